"""A model checks the values of its first batch on the host: decoders, that the tokens are in the vocabulary."""

import jax
import numpy as np
import pytest
from flax import nnx
from helpers.sampling import keep

import jzero
from jzero.adapters.from_flax import from_flax
from models.bert import Bert, BertConfig
from models.decoder import Decoder
from models.gpt2 import GPT2, GPT2Config
from models.llama import LlamaConfig
from models.vocabulary import check_tokens

SIZE = 16  # of the vocabulary; the embedding has 64 rows
SETTINGS = {"train_batch_size": 8, "optimizer": {"type": "Adam", "params": {"lr": 1e-2}}}
MODELS = {
    "decoder": (Decoder, LlamaConfig(1, 16, 2, 1, 16, vocab_size=SIZE, pad_vocab_to=64)),
    "gpt2": (GPT2, GPT2Config(1, 16, 2, 16, vocab_size=SIZE, max_positions=8, pad_vocab_to=64)),
    "bert": (Bert, BertConfig(1, 16, 2, 16, vocab_size=SIZE, max_positions=8, pad_vocab_to=64)),
}


def rows(**changed):
    """Tokens of the vocabulary, with another one in row 5 of an array."""
    batch = {name: np.arange(64, dtype=np.int32).reshape(8, 8) % SIZE for name in ("inputs", "labels")}
    for name, token in changed.items():
        batch[name][5, 3] = token
    return batch


def model(name):
    module, config = MODELS[name]
    return jzero.from_flax(lambda rngs: module(config, rngs=rngs))


@pytest.mark.parametrize("name", MODELS)
def test_tokens_outside_the_vocabulary_are_refused(name):
    for leaf, token in (("inputs", SIZE), ("inputs", -1), ("labels", 9999)):
        words = rf"leaf '{leaf}' has token {token}, but.* 0 to 15: .*len\(tokenizer\)"
        with pytest.raises(jzero.ConfigError, match=words):
            model(name).check_batch(rows(**{leaf: token}))
    model(name).check_batch(rows(inputs=SIZE - 1, labels=-100))


def test_what_is_no_token_is_left_to_the_model():
    check_tokens((np.array([[9]]), np.array([[9]])), vocab_size=4)
    check_tokens({"inputs": np.array([[3]]), "labels": np.array([9.5])}, vocab_size=4)


def test_the_engine_refuses_them_before_its_first_step():
    """Also if the batch lies on the devices already, as a loader's does."""
    made, *_ = jzero.initialize(model=model("decoder"), config=SETTINGS, training_data=rows(labels=346))
    for batch in ((), (rows(inputs=346),)):
        with pytest.raises(jzero.ConfigError, match="has token 346"):
            made.train_batch(*batch)
    assert made.global_steps == 0
    assert np.isfinite(float(made.train_batch(rows(labels=-100))))


seen = []  # the batches that were checked


class Checked(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(4, 4, rngs=rngs) for _ in range(2)])

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x

    def check_batch(self, batch):
        seen.append(batch)


def squares(module, batch):
    return (module(batch) ** 2).mean()


def gap(outputs, labels):
    return ((outputs - labels) ** 2).mean()


def to_labels(module, batch):
    return ((module(batch["x"]) - batch["y"]) ** 2).mean()


@pytest.mark.parametrize(
    ("leaves", "error", "seen"),
    [
        ({"x": (8, 5), "y": (8, 4)}, TypeError, "x float32[1, 5], y float32[1, 4]"),
        ({"x": (8, 4)}, KeyError, "x float32[1, 4]"),
    ],
)
def test_an_exception_of_the_model_shows_the_batch(leaves, error, seen):
    """It keeps its type, in each program and in later steps of another shape."""
    wrong = {name: np.zeros(shape, np.float32) for name, shape in leaves.items()}
    right = {name: np.zeros((8, 4), np.float32) for name in "xy"}
    made, *_ = jzero.initialize(model=from_flax(Checked, loss_fn=to_labels), config=SETTINGS)
    for call in (
        lambda: made.train_batch(wrong),
        lambda: made.step_fn(made.state, wrong),
        lambda: made.eval_batch(wrong),
        lambda: float(made(wrong)),
        lambda: (made.train_batch(right), made.train_batch(wrong)),
    ):
        with pytest.raises(error) as found:
            call()
        assert f"while the model was traced with a micro-batch of {seen}" in found.value.__notes__


WAYS = [{"loss_fn": squares}, {"loss_fn": squares, "stack": "layers"}, {"criterion": gap}]


@pytest.mark.parametrize("way", keep(WAYS, WAYS[1:]), ids=["loss_fn", "stack", "criterion"])
def test_only_the_first_batch_is_checked(way):
    """With a criterion the module gets what its call gets: the inputs."""
    step = jzero.make_train_step(from_flax(Checked, **way), SETTINGS)
    x, state = np.arange(32, dtype=np.float32).reshape(8, 4), step.init(jax.random.key(0))
    seen.clear()
    for _ in range(3):
        state, _ = step(state, (x, x) if "criterion" in way else x)
    (found,) = seen
    assert isinstance(found, np.ndarray)
    np.testing.assert_array_equal(found, x)
