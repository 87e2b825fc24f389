"""A model checks the values of its first batch on the host: decoders, that the tokens are in the vocabulary."""

import jax
import numpy as np
import pytest
from flax import nnx
from helpers.drawn import random_params
from helpers.named_models import model_of
from helpers.plain_flax import mean_square
from helpers.refusals import refuses
from helpers.steps import started_with_numpy

import jzero
from models.bert import BertConfig
from models.gpt2 import GPT2Config
from models.llama import LlamaConfig
from models.transformer import check_tokens

SIZE = 16  # of the vocabulary; the embedding has 64 rows
SETTINGS = {"train_batch_size": 8, "optimizer": {"type": "Adam", "params": {"lr": 1e-2}}}
MODELS = [
    LlamaConfig(1, 16, 2, 1, 16, vocab_size=SIZE, pad_vocab_to=64),
    GPT2Config(1, 16, 2, 16, vocab_size=SIZE, max_positions=8, pad_vocab_to=64),
    BertConfig(1, 16, 2, 16, vocab_size=SIZE, max_positions=8, pad_vocab_to=64),
]


def rows(**changed):
    """Tokens of the vocabulary, with another one in row 5 of an array."""
    batch = {name: np.arange(64, dtype=np.int32).reshape(8, 8) % SIZE for name in ("inputs", "labels")}
    for name, token in changed.items():
        batch[name][5, 3] = token
    return batch


@pytest.mark.parametrize("shape", MODELS, ids=type)
def test_tokens_outside_the_vocabulary_are_refused(shape):
    model = model_of(shape)
    for leaf, token in (("inputs", SIZE), ("inputs", -1), ("labels", 9999)):
        words = rf"leaf '{leaf}' has token {token}, but.* 0 to 15: .*len\(tokenizer\)"
        refuses(lambda leaf=leaf, token=token: model.check_batch(rows(**{leaf: token})), words)
    model.check_batch(rows(inputs=SIZE - 1, labels=-100))


def test_what_is_no_token_is_left_to_the_model():
    check_tokens((np.array([[9]]), np.array([[9]])), vocab_size=4)
    check_tokens({"inputs": np.array([[3]]), "labels": np.array([9.5])}, vocab_size=4)


checked = []  # batches


class Checked(nnx.Module):
    """Takes no number over 99 in the first array."""

    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(4, 4, rngs=rngs) for _ in range(2)])

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x

    def check_batch(self, batch):
        checked.append(batch)
        if np.max(first := jax.tree.leaves(batch)[0]) > 99:
            raise jzero.ConfigError(f"{np.max(first)} is too large")


def gap(outputs, labels):
    return ((outputs - labels) ** 2).mean()


def test_an_exception_of_the_model_shows_the_batch():
    """It keeps its type, in each program and in later steps of another shape."""
    wrong, right = ({"x": np.zeros((8, n), np.float32), "y": np.zeros((8, 4), np.float32)} for n in (5, 4))
    of_dict = jzero.from_flax(Checked, loss_fn=lambda module, batch: gap(module(batch["x"]), batch["y"]))
    made, *_ = jzero.initialize(model=of_dict, config=SETTINGS, params=random_params(of_dict))
    for call in (
        lambda: made.train_batch(wrong),
        lambda: made.step_fn(made.state, wrong),
        lambda: made.eval_batch(wrong),
        lambda: float(made(wrong)),
        lambda: (made.train_batch(right), made.train_batch(wrong)),
    ):
        with pytest.raises(TypeError) as found:
            call()
        seen = "x float32[1, 5], y float32[1, 4]"
        assert f"while the model was traced with a micro-batch of {seen}" in found.value.__notes__


def test_the_engine_refuses_it_before_its_first_step():
    """Also if the batch lies on the devices already, as a loader's does."""
    model = jzero.from_flax(Checked, mean_square, stack="layers")
    good, bad = (np.full((8, 4), x, np.float32) for x in (1, 346))
    made, *_ = jzero.initialize(model=model, config=SETTINGS, training_data=bad, params=random_params(model))
    for batch in ((), (bad,)):
        refuses(lambda batch=batch: made.train_batch(*batch), "346.0 is too large")
    assert made.global_steps == 0
    assert np.isfinite(float(made.train_batch(good)))


@pytest.mark.parametrize(
    "way", [{"loss_fn": mean_square, "stack": "layers"}, {"criterion": gap}], ids=["stack", "criterion"]
)
def test_only_the_first_batch_is_checked(way):
    """With a criterion the module gets what its call gets: the inputs."""
    step, state = started_with_numpy(jzero.from_flax(Checked, **way), SETTINGS)
    x = np.arange(32, dtype=np.float32).reshape(8, 4)
    checked.clear()
    for _ in range(2):
        state, _ = step(state, (x, x) if "criterion" in way else x)
    (found,) = checked
    assert isinstance(found, np.ndarray)
    np.testing.assert_array_equal(found, x)
