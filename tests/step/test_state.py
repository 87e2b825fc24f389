"""State that is not trained: BatchNorm's statistics. Oracle: the layers by hand, on one device."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from helpers.drawn import random_params
from helpers.plain_flax import Normed, cross_entropy, dense
from helpers.refusals import refuses
from helpers.sampling import keep, some
from helpers.steps import assert_close, mesh, run, settings, started_with_numpy

import jzero
from jzero.tree import named

ROWS, ACCUM, LR = 32, 2, 0.05
RNG = np.random.default_rng(0)
BATCHES = [
    {"x": RNG.normal(size=(ROWS, 6)).astype(np.float32), "y": RNG.integers(0, 3, ROWS).astype(np.int32)}
    for _ in range(4)
]
PAIR = BATCHES[0]["x"], BATCHES[0]["y"]

config = partial(settings, ROWS, accum=ACCUM, lr=LR)


def micro_batches(step, batch):
    """Cut a batch as the step does: every replica's first rows, then every replica's second rows."""
    rows = np.arange(ROWS).reshape(step.replicas, ACCUM, -1).swapaxes(0, 1).reshape(ACCUM, -1)
    return [jax.tree.map(lambda x, i=i: x[i], batch) for i in rows]


def stored_norm(p, x):
    """Normalise x by the running statistics; return it, and all parameters."""
    return (x - p["mean"]) * jax.lax.rsqrt(p["var"] + 1e-5) * p["scale"] + p["bias"], p


def plain_norm(p, x):
    """Normalise x by its own statistics; return it, and the parameters with the running statistics after it."""
    y, _ = stored_norm({**p, "mean": (mean := x.mean(0)), "var": (var := x.var(0))}, x)
    return y, {**p, "mean": 0.8 * p["mean"] + 0.2 * mean, "var": 0.8 * p["var"] + 0.2 * var}


def net(p, x, norm=plain_norm):
    """Compute the logits; return them, and the parameters with new statistics."""
    x, new = norm(p["norm"], dense(p["first"], x))
    return dense(p["last"], jax.nn.relu(x)), {**p, "norm": new}


def by_hand(forward, params, step):
    """Train on all batches: every micro-batch moves the state; return the losses and the parameters."""

    def loss(params, part):
        logits, after = forward(params, part["x"])
        return cross_entropy(logits, part["y"]), after

    def changed(change, *trees):
        """`change(is_state, *leaves)` of every leaf."""
        state = "mean", "var", "calls", "factor"
        return jax.tree_util.tree_map_with_path(lambda path, *xs: change(path[-1].key in state, *xs), *trees)

    gradient_of, losses = jax.jit(jax.value_and_grad(loss, has_aux=True, allow_int=True)), []
    for batch in BATCHES:
        values, gradients = [], []
        for part in micro_batches(step, batch):
            (value, after), gradient = jax.device_get(gradient_of(params, part))
            params = changed(lambda is_state, old, new: new if is_state else old, params, after)
            values.append(value)
            gradients.append(gradient)
        params = changed(lambda is_state, p, *g: p if is_state else p - LR * sum(g) / ACCUM, params, *gradients)
        losses.append(np.mean(values))
    return losses, params


def evaluated(forward, params):
    return float(jax.jit(lambda params: cross_entropy(forward(params, PAIR[0], stored_norm)[0], PAIR[1]))(params))


def trained(step, forward, of=lambda params: params, params=None):
    start, losses, state = run(step, BATCHES, params or random_params(step.model))
    expected, after = by_hand(forward, of(start), step)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    return state, after


class LinenNet(linen.Module):
    @linen.compact
    def __call__(self, x, train):
        x = linen.BatchNorm(use_running_average=not train, momentum=0.8)(linen.Dense(8)(x))
        return linen.Dense(3)(linen.relu(x))


def nnx_model(module=Normed, **more):
    return jzero.from_flax(module, lambda m, b: cross_entropy(m(b["x"]), b["y"]), **more)


def frozen_linen_model():
    def loss(module, batch):
        return cross_entropy(module(batch["x"], train=False), batch["y"])

    return jzero.from_flax(LinenNet(), loss, example_batch=BATCHES[0])


def of_net(params):
    params = jax.device_get(params)
    if "norm" in params:
        return params
    norm = {**params["BatchNorm_0"], **params["batch_stats"]["BatchNorm_0"]}
    return {"first": params["Dense_0"], "norm": norm, "last": params["Dense_1"]}


STATISTICS = {"mean": np.full(8, 0.5, np.float32), "var": np.full(8, 4.0, np.float32)}  # whose means are exact


class Frozen(Normed):
    def __init__(self, rngs):
        super().__init__(rngs)
        self.norm = nnx.BatchNorm(8, use_running_average=True, rngs=rngs)


FROZEN = [partial(nnx_model, Frozen), frozen_linen_model]


@pytest.mark.parametrize("make", keep(FROZEN, FROZEN[1:]))
def test_batch_norm_built_with_use_running_average_keeps_it_in_training(make):
    """Its statistics, which come with the parameters, are read and stay; scale and bias train."""
    step = jzero.make_train_step(make(), config(3))
    params = random_params(step.model)
    norm = params["batch_stats"]["BatchNorm_0"] if "batch_stats" in params else params["norm"]
    norm |= STATISTICS
    state, after = trained(step, partial(net, norm=stored_norm), of_net, params)
    for name in step.model.state:
        np.testing.assert_array_equal(named(state.params)[name], STATISTICS[name.rpartition("/")[2]])
    assert_close(of_net(state.params), after)


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
    step, state = started_with_numpy(model, config(gradient_accumulation_steps=1))
    _, metrics = step(state, BATCHES[0])
    out = dense(random_params(model)["Dense_0"], PAIR[0] - PAIR[0].mean(0))
    assert float(metrics["loss"]) == pytest.approx((out**2).mean(), rel=1e-5)


@pytest.mark.slow
def test_without_synchronisation_every_replica_has_its_own_statistics():
    step, state = started_with_numpy(nnx_model(sync_batch_norm=False), config(), mesh(1, data=4))
    params, losses, running = of_net(state.params), [], []
    for replica in range(4):  # its rows, in two micro-batches
        own = params
        for first in (8 * replica, 8 * replica + 4):
            logits, own = net(own, PAIR[0][first : first + 4])
            losses.append(cross_entropy(logits, PAIR[1][first : first + 4]))
        running.append(own["norm"])
    state, metrics = step(state, BATCHES[0])
    assert float(metrics["loss"]) == pytest.approx(float(np.mean(losses)), rel=1e-5)
    for name in ("mean", "var"):
        found = of_net(state.params)["norm"][name]
        np.testing.assert_allclose(found, np.mean([norm[name] for norm in running], 0), rtol=1e-5, atol=1e-6)


def test_state_is_not_trained_keeps_its_dtype_and_does_not_move_in_a_skipped_step():
    step, state = started_with_numpy(nnx_model(), config(fp16={"enabled": True, "initial_scale_power": 4}), mesh(2))
    before = named(jax.device_get(state.params))
    assert all(before[name].dtype == np.float32 for name in step.model.state)
    assert not set(step.model.state) & set(step.trainable_names)
    bad = {**BATCHES[0], "x": np.where(np.arange(6) == 0, np.nan, PAIR[0])}
    state, metrics = step(state, bad)
    assert metrics["skipped"]
    for name, x in named(jax.device_get(state.params)).items():
        np.testing.assert_array_equal(x, before[name], err_msg=name)


class Masking(nnx.BatchNorm):
    def __call__(self, x, mask):
        return super().__call__(x, mask=mask > 0)


@pytest.mark.parametrize("kind", [linen.BatchNorm, Masking])
def test_a_mask_is_refused_while_batch_norm_is_synchronised(kind):
    def loss(module, batch, rng):
        more = {"use_running_average": rng is None} if kind is linen.BatchNorm else {}
        return module(batch["x"], mask=batch["y"][:, None] > 0, **more).mean()

    def make(sync, n=2):
        module = kind() if kind is linen.BatchNorm else lambda rngs: kind(6, rngs=rngs)
        model = jzero.from_flax(module, loss, sync_batch_norm=sync, example_batch=BATCHES[0])
        return jzero.make_train_step(model, config(), mesh=mesh(n))

    words = r"BatchNorm with a mask cannot be synchronised.*sync_batch_norm=False"
    refuses(lambda: make(True).trace(BATCHES[0]), words)
    make(False).trace(BATCHES[0])
    if kind is Masking:
        make(True, n=1).trace(BATCHES[0])  # one replica has nothing to synchronise


class Layer(nnx.Module):
    def __init__(self, width, rngs):
        self.linear, self.norm = nnx.Linear(8, width, rngs=rngs), nnx.BatchNorm(width, momentum=0.8, rngs=rngs)

    def __call__(self, x):
        return nnx.relu(self.norm(self.linear(x)))


class Deep(nnx.Module):
    """BatchNorm in prefix, every layer and suffix; a counter in the suffix; a factor that moves in the prefix."""

    def __init__(self, rngs):
        self.first, self.norm = nnx.Linear(6, 8, rngs=rngs), nnx.BatchNorm(8, momentum=0.8, rngs=rngs)
        self.stack = nnx.vmap(lambda rngs: Layer(8, rngs=rngs))(rngs.split(4))
        self.last, self.out = nnx.BatchNorm(8, momentum=0.8, rngs=rngs), nnx.Linear(8, 3, rngs=rngs)
        self.calls, self.factor = nnx.Variable(jnp.zeros((), jnp.int32)), nnx.Variable(jnp.ones(()))

    def prefix(self, batch):
        x = self.norm(self.first(batch["x"])) * self.factor[...]
        self.factor[...] = 0.5 * self.factor[...] + 0.1
        return x

    def suffix(self, x, batch):
        self.calls[...] += 1
        return cross_entropy(self.out(self.last(x)), batch["y"])


def chain(layers, x, norm=plain_norm):
    """Compute linear layers, some of them a `Layer`; return the result, and the parameters with new statistics."""
    after = []
    for p in layers:
        if "norm" in p:
            x, new = norm(p["norm"], dense(p["linear"], x))
            x, p = jax.nn.relu(x), {**p, "norm": new}
        else:
            x = dense(p, x)
        after.append(p)
    return x, after


def deep(params, x):
    ends = params["ends"]
    x, norm = plain_norm(ends["norm"], dense(ends["first"], x))
    x, layers = chain([jax.tree.map(lambda w, i=i: w[i], params["stack"]) for i in range(4)], x * ends["factor"])
    x, last = plain_norm(ends["last"], x)
    ends = {**ends, "norm": norm, "last": last, "calls": ends["calls"] + 1, "factor": 0.5 * ends["factor"] + 0.1}
    return dense(ends["out"], x), {"ends": ends, "stack": jax.tree.map(lambda *xs: jnp.stack(xs), *layers)}


LAYOUTS = [
    ({"zero": 4}, 3, {"stack": {"unroll": False}}),
    ({"zero": 2}, 3, {"activation_checkpointing": {"policy": "full"}}),
    ({"pipe": 2, "zero": 2}, 0, {}),
    ({"pipe": 2, "zero": 2}, 1, {"pipeline": {"schedule": "zero_bubble"}}),
    ({"pipe": 2}, 3, {"pipeline": {"schedule": "interleaved", "chunks": 2}}),
    ({"pipe": 2, "zero": 2}, 3, {"stack": {"unroll": False}}),
]


@pytest.mark.parametrize(("degrees", "stage", "more"), some(LAYOUTS, LAYOUTS[2:3]))
def test_a_stack_with_state_trains_as_on_one_device(degrees, stage, more):
    step = jzero.make_train_step(jzero.from_flax(Deep), config(stage, **more), mesh=mesh(**{"zero": 1, **degrees}))
    state, after = trained(step, deep)
    assert_close(state.params, after, rtol=2e-4, atol=2e-6)
