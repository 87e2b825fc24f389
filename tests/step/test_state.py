"""State that is not trained: BatchNorm's statistics, counters. Oracle: Flax and optax on one device.

BatchNorm over all replicas is the single device's BatchNorm over the same rows, so losses, parameters and statistics
agree to the rounding of float32.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from helpers.oracle import plain_loop
from helpers.plain_flax import Normed
from helpers.sampling import keep, some
from helpers.steps import assert_close, mesh, run, settings

import jzero
from jzero.tree import named

ROWS, ACCUM, LR = 32, 2, 0.05
RNG = np.random.default_rng(0)
BATCHES = [
    {"x": RNG.normal(size=(ROWS, 6)).astype(np.float32), "y": RNG.integers(0, 3, ROWS).astype(np.int32)}
    for _ in range(4)
]


config = partial(settings, ROWS, accum=ACCUM, lr=LR)


def micro_batches(step, batch):
    """Cut a batch as the step does: every replica's first rows, then every replica's second rows."""
    rows = np.arange(ROWS).reshape(step.replicas, ACCUM, -1).swapaxes(0, 1).reshape(ACCUM, -1)
    return [jax.tree.map(lambda x, i=i: x[i], batch) for i in rows]


def cross_entropy(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


class LinenNet(linen.Module):
    axis_name: str | None = None

    @linen.compact
    def __call__(self, x, train):
        norm = linen.BatchNorm(use_running_average=not train, momentum=0.8, axis_name=self.axis_name)
        x = norm(linen.Dense(8)(x))
        return linen.Dense(3)(linen.relu(x))


def nnx_model(**more):
    return jzero.from_flax(Normed, lambda m, b: cross_entropy(m(b["x"]), b["y"]), **more)


def linen_model(axis_name=None, **more):
    def loss(module, batch, rng):
        return cross_entropy(module(batch["x"], train=rng is not None), batch["y"])

    return jzero.from_flax(LinenNet(axis_name), loss, example_batch=BATCHES[0], **more)


def pmap_model():
    """A net written for jax.pmap, which names pmap's axis."""
    return linen_model("batch")


def plain_nnx(params, step):
    """Train with Flax and optax alone; return losses, parameters by name, the loss of an evaluation."""
    module = Normed(nnx.Rngs(0))
    state = nnx.state(module, nnx.Not(nnx.RngState))
    nnx.replace_by_pure_dict(state, jax.tree.map(jnp.asarray, params))
    nnx.update(module, state)
    optimizer = nnx.Optimizer(module, optax.sgd(LR), wrt=nnx.Param)
    gradient_of = nnx.jit(nnx.value_and_grad(lambda m, b: cross_entropy(m(b["x"]), b["y"])))
    losses = []
    for batch in BATCHES:
        total = []
        for part in micro_batches(step, batch):
            module.train()
            loss, gradient = gradient_of(module, part)
            total.append((loss, gradient))
        optimizer.update(module, jax.tree.map(lambda *g: sum(g) / ACCUM, *[g for _, g in total]))
        losses.append(np.mean([loss for loss, _ in total]))
    module.eval()
    evaluation = cross_entropy(module(BATCHES[0]["x"]), BATCHES[0]["y"])
    return losses, named(nnx.to_pure_dict(nnx.state(module, nnx.Not(nnx.RngState)))), float(evaluation)


def plain_linen(params, step):
    net, tx, params = LinenNet(), optax.sgd(LR), dict(params)
    state = {"batch_stats": params.pop("batch_stats")}

    def loss_fn(params, state, part):
        logits, new = net.apply({"params": params, **state}, part["x"], train=True, mutable=["batch_stats"])
        return cross_entropy(logits, part["y"]), new

    gradient_of = jax.jit(jax.value_and_grad(loss_fn, has_aux=True))
    losses, opt = [], tx.init(params)
    for batch in BATCHES:
        total = []
        for part in micro_batches(step, batch):
            (loss, state), gradient = gradient_of(params, state, part)
            total.append((loss, gradient))
        updates, opt = tx.update(jax.tree.map(lambda *g: sum(g) / ACCUM, *[g for _, g in total]), opt, params)
        params = optax.apply_updates(params, updates)
        losses.append(np.mean([loss for loss, _ in total]))
    logits = net.apply({"params": params, **state}, BATCHES[0]["x"], train=False)
    return losses, named({**params, **state}), float(cross_entropy(logits, BATCHES[0]["y"]))


NORMED = [
    (nnx_model, plain_nnx, 0), (nnx_model, plain_nnx, 3), (linen_model, plain_linen, 0), (linen_model, plain_linen, 3),
    (pmap_model, plain_linen, 3),
]  # fmt: skip


@pytest.mark.parametrize(("make", "plain", "stage"), keep(NORMED, NORMED[2:3]))
def test_batch_norm_trains_as_on_one_device(make, plain, stage):
    step = jzero.make_train_step(make(), config(stage))
    start, losses, state = run(step, BATCHES)
    expected, parameters, evaluation = plain(start, step)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert_close(named(state.params), parameters)
    moved = [name for name in step.model.state if not np.allclose(named(start)[name], named(state.params)[name])]
    assert sorted(moved) == sorted(step.model.state)
    assert len(moved) == 2
    assert float(step.evaluate(state, BATCHES[0])) == pytest.approx(evaluation, rel=1e-4)


STATISTICS = {"mean": np.full(8, 0.5, np.float32), "var": np.full(8, 4.0, np.float32)}


def frozen_nnx():
    """A net whose statistics are those of another run, and its parameters."""

    class Frozen(Normed):
        def __init__(self, rngs):
            super().__init__(rngs)
            self.norm = nnx.BatchNorm(8, use_running_average=True, rngs=rngs)

    model = jzero.from_flax(Frozen, lambda m, b: cross_entropy(m(b["x"]), b["y"]))
    params = model.init(jax.random.key(0))
    params["norm"] |= STATISTICS
    return model, params, lambda p: (p["first"], p["norm"], p["last"])


def frozen_linen():
    class Frozen(linen.Module):
        @linen.compact
        def __call__(self, x):
            x = linen.BatchNorm(use_running_average=True)(linen.Dense(8)(x))
            return linen.Dense(3)(linen.relu(x))

    net = Frozen()
    model = jzero.from_flax(net, lambda m, b: cross_entropy(m(b["x"]), b["y"]), example_batch=BATCHES[0])
    variables = net.init(jax.random.key(0), BATCHES[0]["x"])
    variables["batch_stats"]["BatchNorm_0"] = STATISTICS
    return model, variables, lambda p: (p["Dense_0"], p["BatchNorm_0"], p["Dense_1"])


@pytest.mark.parametrize("make", [frozen_nnx, frozen_linen])
def test_batch_norm_built_with_use_running_average_keeps_it_in_training(make):
    """Its statistics, which come with the parameters, are read and stay; scale and bias train. The net is by hand."""
    model, params, parts = make()
    step = jzero.make_train_step(model, config(3))
    start, losses, state = run(step, BATCHES, params)

    def loss(params, batch):
        first, norm, last = parts(params)
        x = batch["x"] @ first["kernel"] + first["bias"]
        x = (x - STATISTICS["mean"]) / np.sqrt(STATISTICS["var"] + 1e-5) * norm["scale"] + norm["bias"]
        return cross_entropy(jax.nn.relu(x) @ last["kernel"] + last["bias"], batch["y"])

    plain = plain_loop(loss, start, BATCHES, optax.sgd(LR))
    np.testing.assert_allclose(losses, plain.losses, rtol=1e-5)
    assert len(model.state) == 2
    for name in model.state:
        np.testing.assert_array_equal(named(state.params)[name], STATISTICS[name.rpartition("/")[2]])
    expected = float(loss(plain.params, BATCHES[0]))
    assert float(step.evaluate(state, BATCHES[0])) == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_batch_norm_keeps_the_axis_of_a_vmap_around_it():
    """Two halves of a batch under vmap are normalised together, in the step too."""

    def halves(module, batch, rng):
        x = batch["x"].reshape(2, -1, 6)
        return jax.vmap(lambda half: module(half, train=rng is not None), axis_name="half")(x).var()

    net = LinenNet("half")
    model = jzero.from_flax(net, halves, example_batch=BATCHES[0])
    params = model.init(jax.random.key(0))
    values = {"params": {k: v for k, v in params.items() if k != "batch_stats"}, "batch_stats": params["batch_stats"]}
    logits, _ = net.clone(axis_name=None).apply(values, BATCHES[0]["x"], train=True, mutable=["batch_stats"])
    loss, _ = model.loss(params, BATCHES[0], jax.random.key(0))
    assert float(loss) == pytest.approx(float(logits.var()), rel=1e-5)


def test_a_copy_of_batch_norm_is_synchronised():
    """A library's own class with Flax's fields; the oracle is NumPy over the whole batch."""

    class Centred(linen.Module):
        use_running_average: bool = False
        axis_name: tuple | None = None

        @linen.compact
        def __call__(self, x):
            mean = x.mean(0)
            return linen.Dense(1)(x - (jax.lax.pmean(mean, self.axis_name) if self.axis_name else mean))

    model = jzero.from_flax(Centred(), lambda m, b: (m(b["x"]) ** 2).mean(), example_batch=BATCHES[0])
    step = jzero.make_train_step(model, config(gradient_accumulation_steps=1))
    state, x = step.init(jax.random.key(0)), BATCHES[0]["x"]
    kernel = np.asarray(state.params["Dense_0"]["kernel"])
    _, metrics = step(state, BATCHES[0])
    assert float(metrics["loss"]) == pytest.approx((((x - x.mean(0)) @ kernel) ** 2).mean(), rel=1e-5)


class Layer(nnx.Module):
    def __init__(self, rngs):
        self.linear, self.norm = nnx.Linear(8, 8, rngs=rngs), nnx.BatchNorm(8, momentum=0.8, rngs=rngs)

    def __call__(self, x):
        return x + nnx.relu(self.norm(self.linear(x)))


class Deep(nnx.Module):
    """BatchNorm in prefix, every layer and suffix; a counter of calls in the suffix."""

    def __init__(self, rngs):
        self.first, self.norm = nnx.Linear(6, 8, rngs=rngs), nnx.BatchNorm(8, momentum=0.8, rngs=rngs)
        self.stack = nnx.vmap(lambda rngs: Layer(rngs=rngs))(rngs.fork(split=4))
        self.last, self.out = nnx.BatchNorm(8, momentum=0.8, rngs=rngs), nnx.Linear(8, 3, rngs=rngs)
        self.calls = nnx.Variable(jnp.zeros((), jnp.int32))

    def prefix(self, batch):
        return self.norm(self.first(batch["x"]))

    def suffix(self, x, batch):
        self.calls[...] += 1
        return cross_entropy(self.out(self.last(x)), batch["y"])


def plain_norm(p, x):
    """Normalise x by its own statistics; return it, and the running statistics after it."""
    mean, var = x.mean(0), x.var(0)
    y = (x - mean) * jax.lax.rsqrt(var + 1e-5) * p["scale"] + p["bias"]
    return y, {"mean": 0.8 * p["mean"] + 0.2 * mean, "var": 0.8 * p["var"] + 0.2 * var}


def plain_deep(params, step):
    """Train by hand: BatchNorm is written out."""

    def loss_fn(params, batch):
        ends, stack = params["ends"], params["stack"]
        x, norm = plain_norm(ends["norm"], batch["x"] @ ends["first"]["kernel"] + ends["first"]["bias"])
        layers = []
        for i in range(4):
            layer = jax.tree.map(lambda w, i=i: w[i], stack)
            y, new = plain_norm(layer["norm"], x @ layer["linear"]["kernel"] + layer["linear"]["bias"])
            x = x + jax.nn.relu(y)
            layers.append(new)
        x, last = plain_norm(ends["last"], x)
        stacked = jax.tree.map(lambda *xs: jnp.stack(xs), *layers)
        value = cross_entropy(x @ ends["out"]["kernel"] + ends["out"]["bias"], batch["y"])
        return value, {"norm": norm, "last": last, "stack": {"norm": stacked}}

    losses, params = [], jax.tree.map(jnp.asarray, params)
    gradient_of = jax.jit(jax.value_and_grad(loss_fn, has_aux=True, allow_int=True))
    for batch in BATCHES:
        total = []
        for part in micro_batches(step, batch):
            (value, new), gradient = gradient_of(params, part)
            total.append((value, gradient))
            for node, stats in ((params["ends"]["norm"], new["norm"]), (params["ends"]["last"], new["last"])):
                node.update(stats)
            params["stack"]["norm"].update(new["stack"]["norm"])
        losses.append(np.mean([value for value, _ in total]))

        def descend(path, p, *gs):
            still = path[-1].key in ("mean", "var", "calls")
            return p if still else p - LR * sum(gs) / ACCUM

        params = jax.tree_util.tree_map_with_path(descend, params, *[g for _, g in total])
    return losses, named({**params["ends"], "stack": params["stack"]})


LAYOUTS = [
    ({"data": 2}, 0, {}),
    ({"zero": 4}, 3, {}),
    ({"zero": 2}, 3, {"stack": {"unroll": False}}),
    ({"zero": 2}, 3, {"activation_checkpointing": {"policy": "full"}}),
    ({"pipe": 2, "zero": 2}, 0, {}),
    ({"pipe": 2, "zero": 2}, 1, {"pipeline": {"schedule": "zero_bubble"}}),
    ({"pipe": 2}, 3, {"pipeline": {"schedule": "interleaved", "chunks": 2}}),
    ({"pipe": 4, "zero": 2}, 0, {"pipeline": {"schedule": "gpipe"}}),
    ({"pipe": 2, "zero": 2}, 3, {"stack": {"unroll": False}}),
]


@pytest.mark.parametrize(("degrees", "stage", "more"), some(LAYOUTS, LAYOUTS[4:5]))
def test_a_stack_with_state_trains_as_on_one_device(degrees, stage, more):
    step = jzero.make_train_step(jzero.from_flax(Deep), config(stage, **more), mesh=mesh(**{"zero": 1, **degrees}))
    start, losses, state = run(step, BATCHES)
    expected, after = plain_deep(start, step)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    found = named({**state.params["ends"], "stack": state.params["stack"]})
    calls = found.pop("calls")
    assert_close(found, after, rtol=2e-4, atol=2e-6)
    assert int(calls) == len(BATCHES) * ACCUM
