"""Curriculum learning: DeepSpeed's lengths, and the numbers of plain JAX on batches that were cut by hand."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers.engines import printed, three_calls
from helpers.oracle import plain_loop
from helpers.refusals import refuses
from helpers.sampling import keep
from helpers.steps import mesh, settings

import jzero
from jzero.config import Config
from jzero.data.curriculum import curriculum_of
from jzero.display.text_table import size_text
from jzero.planner import memory

LENGTH = 12  # of whole sequences
LINEAR = {"min_difficulty": 4, "max_difficulty": LENGTH, "schedule_type": "fixed_linear",
          "schedule_config": {"total_curriculum_step": 3, "difficulty_step": 4}}  # fmt: skip
LEGACY = {"enabled": True, "curriculum_type": "seqlen", **LINEAR}
NEWER = {
    "enabled": True, "seed": 1,
    "data_routing": {"enabled": False, "random_ltd": {"enabled": False, "total_layer_num": 2}},
    "data_sampling": {
        "enabled": True, "num_epochs": 2, "num_workers": 0, "dynamic_batching": {"enabled": False},
        "curriculum_learning": {
            "enabled": True, "data_cluster_path": "/nowhere",
            "curriculum_metrics": {
                "seqlen_truncate": {"difficulty_type": "value", "clustering_type": "single_cluster", **LINEAR},
            },
        },
    },
}  # fmt: skip
VOCABULARY, ROWS = 11, 8
LENGTHS = [4, 8, 12]  # of the first steps


def deepspeed(low, high, kind, config):
    """DeepSpeed's CurriculumScheduler: the lengths of the steps from 1."""
    current, degree = low, config.get("root_degree", 1)
    for step in itertools.count(1):
        if current < high:
            if kind == "fixed_discrete":
                ends = [*config["max_step"], math.inf]
                current = next(length for end, length in zip(ends, config["difficulty"], strict=True) if step <= end)
            else:
                reached = math.floor((step / config["total_curriculum_step"]) ** (1 / degree) * (high - low) + low)
                current = min(reached - reached % config["difficulty_step"], high)
        yield current


@pytest.mark.parametrize(
    ("low", "high", "kind", "config"),
    [
        (10, 1000, "fixed_linear", {"total_curriculum_step": 77, "difficulty_step": 7}),
        (64, 64, "fixed_linear", {"total_curriculum_step": 10, "difficulty_step": 48}),
        (9, 100, "fixed_root", {"total_curriculum_step": 31, "difficulty_step": 1, "root_degree": 3}),
        (16, 128, "fixed_root", {"total_curriculum_step": 50, "difficulty_step": 16, "root_degree": 0.5}),
        (1, 3, "fixed_discrete", {"difficulty": [1, 2, 3], "max_step": [5, 10]}),
        (8, 32, "fixed_discrete", {"difficulty": [8, 32, 16, 24], "max_step": [3, 6, 9]}),  # 32 stays
    ],
)
def test_the_lengths_are_deepspeeds(low, high, kind, config):
    kinds = {"min_difficulty": low, "max_difficulty": high, "schedule_type": kind, "schedule_config": config}
    found = curriculum_of(Config.load({"curriculum_learning": LEGACY | kinds}))
    expected = [*itertools.islice(deepspeed(low, high, kind, config), 139)]
    assert [found.length(step) for step in range(1, 140)] == expected
    most = int(found.describe().split("up to ")[1].split()[0])
    assert most == len(set(expected)) or len(set(expected)) <= most <= (high - low) // config["difficulty_step"] + 2


SGD = {"train_batch_size": ROWS, "curriculum_learning": LEGACY, "optimizer": {"type": "SGD", "params": {"lr": 0}}}


def test_the_shapes_before_a_cut():
    """Arrays of another length are not cut, also with the columns of one that was."""
    curriculum, rng = curriculum_of(Config.load({"curriculum_learning": LEGACY})), np.random.default_rng(0)
    batch = {
        "tokens": rng.integers(0, 9, (2, LENGTH + 1)), "states": rng.normal(size=(2, LENGTH, 3)),
        "weight": rng.normal(size=2), "class": rng.normal(size=(2, 4, 5)), "wide": rng.normal(size=(2, LENGTH + 2)),
    }  # fmt: skip
    for step, length in ((1, 4), (2, 8), (4, 12)):
        found = curriculum.cut(batch, step)
        np.testing.assert_array_equal(found["tokens"], batch["tokens"][:, : length + 1])
        np.testing.assert_array_equal(found["states"], batch["states"][:, :length])
        assert all(found[name] is batch[name] for name in ("weight", "class", "wide"))
        shapes = jax.eval_shape(lambda x: x, found)
        assert {name: x.shape for name, x in curriculum.uncut(shapes).items()} == {n: x.shape for n, x in batch.items()}
    pair = np.zeros((2, LENGTH)), np.zeros((2, 4))  # labels need no sequence
    short = [curriculum.cut(x, 1, part=part) for part, x in zip(("inputs", "labels"), pair, strict=True)]
    assert [x.shape for x in short] == [(2, 4), (2, 4)]
    assert [x.shape for x in curriculum.uncut(jax.eval_shape(lambda *x: x, *short))] == [(2, LENGTH), (2, 4)]
    words = r"max_difficulty = 12.*second dimension \(x \[2, 7\], y \[2\]\)"
    refuses(lambda: curriculum.cut({"x": np.zeros((2, 7)), "y": np.zeros(2)}, 1), words)


class Bigrams:
    """Predicts the next token from the last one; `seen` has the shapes that were traced."""

    def __init__(self):
        self.seen = set()

    def init(self, rng):
        return {"table": 0.1 * jax.random.normal(rng, (VOCABULARY, VOCABULARY))}

    def loss(self, params, batch, rng):
        self.seen.add(batch["inputs"].shape[1])
        return bigram_loss(params, batch)


def bigram_loss(params, batch):
    logits = params["table"][batch["inputs"]]
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), batch["labels"][..., None], -1).mean()


def tokens(seed):
    x = np.random.default_rng(seed).integers(0, VOCABULARY, (ROWS, LENGTH + 1)).astype(np.int32)
    return {"inputs": x[:, :-1], "labels": x[:, 1:]}


def build(section=LEGACY, key="curriculum_learning", more=None, **arguments):
    config = settings(ROWS, accum=2, lr=0.5, steps_per_print=1, **{key: section}, **(more or {}))
    return jzero.initialize(model=Bigrams(), config=config, mesh=mesh(2), **arguments)[0]


def plain(engine):
    """Return the losses and the parameters of plain JAX from the engine's parameters, on cut batches."""
    batches = [{name: x[:, :length] for name, x in tokens(seed).items()} for seed, length in enumerate(LENGTHS)]
    run = plain_loop(bigram_loss, jax.device_get(engine.state.params), batches, optax.sgd(0.5))
    return run.losses, run.params


def halves(batch):
    return [jax.tree.map(lambda x, i=i: x[4 * i : 4 * i + 4], batch) for i in range(2)]


LOOPS = ["iterator", "three calls", "training_data", "newer keys"]


@pytest.mark.parametrize("loop", keep(LOOPS, ["training_data"]))
def test_training_is_plain_jax_on_cut_batches(loop, capsys):
    def samples():
        return ({name: x[i] for name, x in tokens(seed).items()} for seed in range(3) for i in range(8))

    more = {"training_data": samples} if loop == "training_data" else {}
    engine = build(NEWER, "data_efficiency", **more) if loop == "newer keys" else build(**more)
    expected, params = plain(engine)
    losses = []
    for seed in range(3):
        if loop == "three calls":
            losses.append(float(np.mean([float(x) for x in three_calls(engine, halves(tokens(seed)))])))
            continue
        batch = {"iterator": iter(halves(tokens(seed))), "training_data": None}.get(loop, tokens(seed))
        losses.append(float(engine.train_batch(batch)))
    np.testing.assert_allclose(losses, expected, rtol=1e-6)
    np.testing.assert_allclose(engine.state.params["table"], params["table"], rtol=1e-6, atol=1e-7)
    assert engine.step_fn.model.seen == set(LENGTHS)
    lines = [line for line in printed(engine, capsys).splitlines() if line.startswith("step ")]
    assert [line.split("sequence ")[1].split(",")[0] for line in lines] == [str(n) for n in LENGTHS]


class Sums(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(VOCABULARY, 3, rngs=rngs)

    def __call__(self, x):
        return self.embed(x)


def test_a_criterion_outside_of_the_model():
    """Outputs that are read have the length of the step; labels without a sequence stay."""

    def criterion(outputs, labels):
        return ((outputs.sum((1, 2)) - labels) ** 2).mean()

    engine = jzero.initialize(model=Sums, criterion=criterion, config=SGD, mesh=mesh(1))[0]
    table = np.asarray(engine.state.params["embed"]["embedding"])
    x, labels = tokens(0)["inputs"], np.arange(ROWS, dtype=np.float32)
    outputs = engine(x)
    assert outputs.shape == (ROWS, LENGTHS[0], 3)
    loss = engine.loss(outputs, labels)
    engine.backward(loss)
    engine.step()
    np.testing.assert_allclose(float(loss), ((table[x[:, :4]].sum((1, 2)) - labels) ** 2).mean(), rtol=1e-5)
    assert engine.eval()(x).shape == (ROWS, LENGTH, 3)


def test_a_resumed_run_continues_with_the_same_lengths_and_an_evaluation_sees_whole_sequences(tmp_path):
    one = build()
    one.train_batch(tokens(0))
    one.save_checkpoint(tmp_path).wait()
    two = build(resume=tmp_path)
    assert float(two.train_batch(tokens(1))) == float(one.train_batch(tokens(1)))
    assert two.step_fn.model.seen == {LENGTHS[1]}
    whole = bigram_loss(jax.device_get(two.state.params), tokens(0))
    np.testing.assert_allclose(two.eval_batch(tokens(0)), whole, rtol=1e-6)


def test_memory_is_planned_for_the_longest_sequences(capsys):
    engine = build(more={"memory_breakdown": True})
    engine.train_batch(tokens(0))
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "planned" in line]
    short = {name: x[:, : LENGTHS[0]] for name, x in tokens(0).items()}
    least, most = (size_text(memory(engine.step_fn.lower(x).compile()).peak) for x in (short, tokens(0)))
    assert line.startswith(f"memory of a step of sequence {LENGTH}, planned: {most} per device")
    assert least != most


def test_functions_of_your_own():
    engine, states = build({**LEGACY, "schedule_type": "custom", "schedule_config": {}}), []

    def own(batch, state):
        states.append(state)
        return {name: x[:, : state["current_difficulties"]["seqlen"] - 1] for name, x in batch.items()}

    refuses(lambda: engine.train_batch(tokens(0)), r'schedule_type = "custom": no function; call engine.set_custom')
    engine.set_custom_curriculum_learning_schedule({"seqlen": lambda step: 3 * step})
    engine.train_batch(tokens(0))
    engine.set_data_post_process_func(own)
    engine.train_batch(tokens(1))
    assert engine.step_fn.model.seen == {3, 5}
    assert states == [{"curriculum_step": 2, "current_difficulties": {"seqlen": 6}}]
    engine.set_custom_curriculum_learning_schedule({"seqlen": lambda step: 13})
    words = "returned 13 for step 3: must be an integer from 1 to max_difficulty 12"
    refuses(lambda: engine.train_batch(tokens(0)), words)
    refuses(lambda: engine.set_custom_curriculum_learning_schedule({"voc": lambda step: 3}), "write 'seqlen': function")
    off = build({**LEGACY, "enabled": False})
    refuses(lambda: off.set_data_post_process_func(own), "set_data_post_process_func: the config has no curriculum")
    words = r"curriculum_learning: the engine of jzero.initialize cuts the batch"
    refuses(lambda: jzero.make_train_step(Bigrams(), SGD), words)
