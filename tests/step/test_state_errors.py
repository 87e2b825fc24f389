"""State that is not of floats, that evaluation must not move, and what is refused about it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from helpers.refusals import refuses
from helpers.sampling import keep
from helpers.steps import mesh, started
from test_state import BATCHES, config, cross_entropy

import jzero


class Flat:
    """A linear model with state of the test's choice."""

    def __init__(self, start, new, count=None):
        self.start, self.new, self.count = start, new, count
        self.state = tuple(start)

    def init(self, rng):
        return {"w": jax.random.normal(rng, (6, 3)), **self.start}

    def loss(self, params, batch, rng):
        loss = cross_entropy(batch["x"] @ params["w"], batch["y"])
        return jzero.Mean(loss, self.count(params)) if self.count else loss, self.new(params, batch)


@pytest.mark.parametrize("stage", keep([0, 3], [3]))
def test_replicas_agree_on_integers_and_bools(stage):
    """Every replica counts its own labels: the first one's counts are kept, and are the same on all devices."""

    def new(params, batch):
        return {"n": params["n"] + jnp.bincount(batch["y"], length=4), "seen": params["seen"] | (batch["y"][0] == 1)}

    model = Flat({"n": jnp.zeros(4, jnp.int32), "seen": jnp.zeros(4, bool)}, new)
    step = jzero.make_train_step(model, config(stage), mesh=mesh(4))
    state, _ = step(step.init(jax.random.key(0)), BATCHES[0])
    mine = BATCHES[0]["y"][:8]  # of the first of four replicas
    np.testing.assert_array_equal(state.params["n"], np.bincount(mine, minlength=4))
    np.testing.assert_array_equal(state.params["seen"], [mine[0] == 1 or mine[4] == 1] * 4)
    for name in ("n", "seen"):
        leaf = state.params[name]
        assert leaf.dtype == step.state_shapes.params[name].dtype
        whole = np.asarray(leaf)
        for shard in leaf.addressable_shards:
            np.testing.assert_array_equal(shard.data, whole[shard.index])


class Counting(nnx.Module):
    """The loss depends on how often the suffix was called."""

    def __init__(self, rngs):
        self.stack = nnx.vmap(lambda rngs: nnx.Linear(6, 6, rngs=rngs))(rngs.fork(split=2))
        self.calls = nnx.Variable(jnp.zeros(()))

    def prefix(self, batch):
        return batch["x"]

    def suffix(self, x, batch):
        self.calls[...] += 1
        return jnp.mean(x**2) * self.calls[...]


def test_evaluation_starts_every_micro_batch_with_the_same_state():
    steps = [jzero.make_train_step(jzero.from_flax(Counting), config(), mesh=mesh(2, pipe=pipe)) for pipe in (1, 2)]
    one, two = (float(step.evaluate(step.init(jax.random.key(0)), BATCHES[0])) for step in steps)
    assert one == pytest.approx(two, rel=1e-6)


def test_bools_of_layers_that_a_stage_switches_to_stay_bools():
    class Flagged(nnx.Module):
        def __init__(self, rngs):
            self.linear, self.ran = nnx.Linear(6, 6, rngs=rngs), nnx.Variable(jnp.zeros((), bool))

        def __call__(self, x):
            self.ran[...] = jnp.ones((), bool)
            return self.linear(x)

    layers = [jzero.LayerSpec(Flagged), jnp.tanh, jzero.LayerSpec(nnx.Linear, 6, 3)]
    model = jzero.PipelineModule(layers, loss_fn=cross_entropy, example_batch=(BATCHES[0]["x"], BATCHES[0]["y"]))
    step = jzero.make_train_step(model, config(), mesh=mesh(2, pipe=2))
    state, _ = step(step.init(jax.random.key(0)), (BATCHES[0]["x"], BATCHES[0]["y"]))
    ran = state.params["layers"]["0"]["ran"]
    assert ran.dtype == bool
    assert bool(ran)


@pytest.mark.parametrize("frozen", [False, True])
def test_a_built_module_trains_though_it_was_evaluated(frozen):
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.norm, self.last = nnx.BatchNorm(6, rngs=rngs), nnx.Linear(6, 3, rngs=rngs)

        def __call__(self, x):
            return self.last(self.norm(x))

    built = Net(nnx.Rngs(0))
    built.eval()

    def loss(module, batch):
        if frozen:
            module.norm.eval()
        return cross_entropy(module(batch["x"]), batch["y"])

    step = jzero.make_train_step(jzero.from_flax(built, loss), config(), mesh=mesh(2))
    state, _ = step(step.init(jax.random.key(0)), BATCHES[0])
    assert (not np.any(state.params["norm"]["mean"])) is frozen


def test_a_stack_beside_a_module_named_ends():
    class Ends(nnx.Module):
        def __init__(self, rngs):
            self.ends = nnx.Linear(6, 6, rngs=rngs)
            self.stack = nnx.vmap(lambda rngs: nnx.Linear(6, 6, rngs=rngs))(rngs.fork(split=2))

        def prefix(self, batch):
            return self.ends(batch["x"])

        def suffix(self, x, batch):
            return x.mean()

    step = jzero.make_train_step(jzero.from_flax(Ends), config(), mesh=mesh(2))
    step(step.init(jax.random.key(0)), BATCHES[0])


N = {"n": jnp.zeros(())}


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Flat(N, lambda p, b: {"n": p["n"] + 1}, lambda p: p["n"] + 1), r"count of the loss depends on .*state \(n\)"),
        (Flat(N, lambda p, b: {"n": p["n"][None]}), r"new state n has shape \(1,\), must have \(\)"),
        (Flat(N, lambda p, b: None), r"must return \(result, {name: new value}\); found tuple"),
        (Flat(N, lambda p, b: {"m": 1}), r"new state m has no leaf of that name"),
    ],
)
def test_state_that_is_refused(model, message):
    step = jzero.make_train_step(model, config(), mesh=mesh(2))
    refuses(lambda: step(step.init(jax.random.key(0)), BATCHES[0]), message)


class Named(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.BatchNorm(6, axis_name="batch", rngs=rngs)


def test_state_that_is_refused_at_once():
    model = Flat(N, lambda p, b: {"n": p["n"] + 1})
    with pytest.raises(jzero.ConfigError, match=r"frozen_parameters: \['\^n'\] match no parameter"):
        jzero.make_train_step(model, config(frozen_parameters=["^n"]), mesh=mesh(2))
    with pytest.raises(jzero.ConfigError, match=r"norm has axis_name = 'batch': leave it out"):
        jzero.from_flax(Named, lambda m, b: m.norm(b["x"]).mean())


def test_a_mask_is_refused_while_linens_batch_norm_is_synchronised():
    def loss(module, batch, rng):
        mask = (batch["y"] > 0)[:, None]
        return module(batch["x"], use_running_average=rng is None, mask=mask).mean()

    for sync in (True, False):
        model = jzero.from_flax(linen.BatchNorm(), loss, example_batch=BATCHES[0], sync_batch_norm=sync)
        step, state = started(model, config(), mesh=mesh(2))
        if sync:
            with pytest.raises(jzero.ConfigError, match="BatchNorm with a mask cannot be synchronised"):
                step(state, BATCHES[0])
        else:
            assert np.isfinite(step(state, BATCHES[0])[1]["loss"])


class Masking(nnx.BatchNorm):
    """A subclass that makes the mask itself."""

    def __call__(self, x, mask):
        return super().__call__(x, mask=mask > 0)


@pytest.mark.parametrize("kind", [nnx.BatchNorm, Masking])
def test_a_mask_is_refused_while_nnx_batch_norm_is_synchronised(kind):
    def loss(model, batch):
        return model(batch["x"], mask=batch["y"][:, None] > 0).mean()

    def make(sync, n=4):
        model = jzero.from_flax(lambda rngs: kind(6, rngs=rngs), loss, sync_batch_norm=sync)
        return jzero.make_train_step(model, config(), mesh=mesh(n))

    with pytest.raises(jzero.ConfigError, match=r"BatchNorm with a mask cannot be synchronised.*sync_batch_norm=False"):
        make(True).lower(BATCHES[0])
    make(False).lower(BATCHES[0])
    make(True, n=1).lower(BATCHES[0])  # one replica has nothing to synchronise
