"""State under PipelineModules and in functions, of floats and of other dtypes; and what is refused about it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers.drawn import random_params
from helpers.plain_flax import cross_entropy
from helpers.refusals import refuses
from helpers.sampling import keep, some
from helpers.steps import assert_close, mesh, run, started, started_with_numpy
from test_state import ACCUM, BATCHES, PAIR, Layer, by_hand, chain, config, evaluated

import jzero
from jzero.model import stack_loss

ODD = [
    jzero.LayerSpec(nnx.Linear, 6, 8), jzero.LayerSpec(Layer, 8), jzero.LayerSpec(nnx.Linear, 8, 8),
    jzero.LayerSpec(Layer, 8), jzero.LayerSpec(Layer, 16), jzero.LayerSpec(nnx.Linear, 16, 3),
]  # fmt: skip


def in_order(params):
    return [jax.device_get(params)["layers"][str(i)] for i in range(len(ODD))]


CHUNKS = {"pipeline": {"schedule": "interleaved", "chunks": 2}}
CHAINS = [({"zero": 2}, 3, {}), ({"pipe": 2, "data": 2, "zero": 1}, 0, {}), ({"pipe": 2, "zero": 2}, 3, CHUNKS)]


@pytest.mark.parametrize(("degrees", "stage", "more"), some(CHAINS, CHAINS[2:]))
def test_layers_with_batch_norm_train_as_on_one_device(degrees, stage, more):
    model = jzero.PipelineModule(ODD, loss_fn=cross_entropy, example_batch=PAIR)
    step = jzero.make_train_step(model, config(stage, **more), mesh=mesh(**degrees))
    start, losses, state = run(step, [(batch["x"], batch["y"]) for batch in BATCHES], random_params(model))
    expected, after = by_hand(chain, in_order(start), step)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert_close(dict(enumerate(in_order(state.params))), dict(enumerate(after)), rtol=5e-4, atol=5e-6)
    assert float(step.evaluate(state, PAIR)) == pytest.approx(evaluated(chain, after), rel=1e-4)


class Flat:
    def __init__(self, start, new, count=None, names=None):
        self.start, self.new, self.count = start, new, count
        self.state = names or tuple(start)

    def init(self, rng):
        return {"w": np.linspace(-1, 1, 18, dtype=np.float32).reshape(6, 3), **self.start}

    def loss(self, params, batch, rng):
        loss = cross_entropy(batch["x"] @ params["w"], batch["y"])
        return jzero.Mean(loss, self.count(params)) if self.count else loss, self.new(params, batch)


class Sharing:
    """A prefix and a suffix with the state u: each replaces it, reads it, or neither."""

    state = ("ends/u",)

    def __init__(self, first, last):
        self.first, self.last = first, last

    def init(self, rng):
        return {"ends": {"w": jnp.ones((6, 8)), "u": jnp.ones(8)}, "stack": {"w": jnp.ones((4, 8, 8))}}

    def prefix(self, ends, batch, rng):
        x = batch["x"] @ ends["w"]
        return x, {"u": 0.5 * ends["u"] + x.mean(0) if self.first == "replaces" else ends["u"]}

    def block(self, layer, x, rng):
        return jnp.tanh(x @ layer["w"]), {}

    def suffix(self, ends, x, batch, rng):
        loss = (x * ends["u"]).mean() if self.last == "reads" else x.mean()
        return loss, {"u": 2 * ends["u"] if self.last == "replaces" else ends["u"]}

    loss = stack_loss


@pytest.mark.parametrize("stage", keep([0, 3], [0]))
def test_replicas_agree_on_integers_and_bools(stage):
    """Every replica counts its own labels: the first one's counts are kept on all devices, and the mean of floats."""

    def new(params, batch):
        n, seen = params["n"] + jnp.bincount(batch["y"], length=4), params["seen"] | (batch["y"][0] == 1)
        return {"n": n, "seen": seen, "sum": params["sum"] + batch["x"].mean()}

    model = Flat({"n": np.zeros(4, np.int32), "seen": np.zeros(4, bool), "sum": np.zeros((), np.float32)}, new)
    step, state = started(model, config(stage), mesh=mesh(4))
    state, _ = step(state, BATCHES[0])
    mine = PAIR[1][:8]  # of the first of four replicas
    np.testing.assert_array_equal(state.params["n"], np.bincount(mine, minlength=4))
    np.testing.assert_array_equal(state.params["seen"], [mine[0] == 1 or mine[4] == 1] * 4)
    np.testing.assert_allclose(state.params["sum"], ACCUM * PAIR[0].mean(), rtol=1e-5)
    for name in ("n", "seen", "sum"):
        leaf = state.params[name]
        assert leaf.dtype == step.state_shapes.params[name].dtype
        for shard in leaf.addressable_shards:
            np.testing.assert_array_equal(shard.data, np.asarray(leaf)[shard.index])


class Counting(nnx.Module):
    """The loss depends on how often the suffix was called; a module beside the stack has the name of its ends."""

    def __init__(self, rngs):
        self.ends = nnx.Linear(6, 6, rngs=rngs)
        self.stack = nnx.vmap(lambda rngs: nnx.Linear(6, 6, rngs=rngs))(rngs.split(2))
        self.calls = nnx.Variable(jnp.zeros(()))

    def prefix(self, batch):
        return self.ends(batch["x"])

    def suffix(self, x, batch):
        self.calls[...] += 1
        return jnp.mean(x**2) * self.calls[...]


def test_evaluation_starts_every_micro_batch_with_the_same_state():
    steps = [started_with_numpy(jzero.from_flax(Counting), config(), mesh(2, pipe=pipe)) for pipe in (1, 2)]
    one, two = (float(step.evaluate(state, BATCHES[0])) for step, state in steps)
    assert one == pytest.approx(two, rel=1e-6)


def test_bools_of_layers_that_a_stage_switches_to_stay_bools():
    class Flagged(nnx.Module):
        def __init__(self, rngs):
            self.linear, self.ran = nnx.Linear(6, 6, rngs=rngs), nnx.Variable(jnp.zeros((), bool))

        def __call__(self, x):
            self.ran[...] = jnp.ones((), bool)
            return self.linear(x)

    parts = [jzero.LayerSpec(Flagged), jnp.tanh, jzero.LayerSpec(nnx.Linear, 6, 3)]
    model = jzero.PipelineModule(parts, loss_fn=cross_entropy, example_batch=PAIR)
    step, state = started_with_numpy(model, config(), mesh(2, pipe=2))
    ran = step(state, PAIR)[0].params["layers"]["0"]["ran"]
    assert ran.dtype == bool
    assert bool(ran)


N = {"n": np.zeros((), np.float32)}
SHARED = "prefix and suffix share the state ends/u"


def more_of(params, batch):
    return {"n": params["n"] + 1}


@pytest.mark.parametrize(
    ("model", "more", "message"),
    [
        (Flat(N, more_of, lambda p: p["n"] + 1), {}, r"count of the loss depends on .*state \(n\)"),
        (Flat(N, lambda p, b: {"n": p["n"][None]}), {}, r"new state n has shape \(1,\), must have \(\)"),
        (Flat(N, lambda p, b: None), {}, r"must return \(result, {name: new value}\); found tuple"),
        (Flat(N, lambda p, b: {"m": 1}), {}, r"new state m has no leaf of that name"),
        (Flat(N, more_of, names=("n", "other")), {}, r"the model's state: \['other'\] are not among the names .*n"),
        (Flat(N, more_of), {"frozen_parameters": ["^n"]}, r"frozen_parameters: \['\^n'\] match no parameter"),
        (Sharing("replaces", "replaces"), {}, SHARED),
        (Sharing("replaces", "reads"), {}, SHARED),
    ],
)
def test_state_that_is_refused(model, more, message):
    pipe = 2 if isinstance(model, Sharing) else 1
    refuses(lambda: jzero.make_train_step(model, config(**more), mesh=mesh(2, pipe=pipe)).trace(BATCHES[0]), message)


def test_modules_with_state_that_are_refused():
    def named(rngs):
        return nnx.BatchNorm(6, axis_name="batch", rngs=rngs)

    refuses(lambda: jzero.from_flax(named, lambda m, b: m(b["x"]).mean()), "has axis_name = 'batch': leave it out")
    tied = r"TiedLayerSpec\('a', Layer\): tied layers cannot have state"
    refuses(lambda: jzero.PipelineModule([jzero.TiedLayerSpec("a", Layer, 8)], loss_fn=cross_entropy), tied)
