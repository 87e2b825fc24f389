"""Flax modules with more than parameters: constants, random streams, fixed modes, boxed parameters, sown values.

The oracle is plain Flax and optax on one device.
"""

import subprocess
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

import jzero

WIDTH, ROWS, LR = 8, 16, 0.1
X = np.random.default_rng(0).normal(size=(ROWS, WIDTH)).astype(np.float32)
KEY = jax.random.key(3)


def mean_square(module, batch):
    return (module(batch) ** 2).mean()


def train(model, steps=3, **more):
    """The losses of `steps` steps of SGD on four devices at ZeRO stage 3, and the parameters at the start."""
    config = {
        "train_batch_size": ROWS,
        "optimizer": {"type": "SGD", "params": {"lr": LR}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        **more,
    }
    step = jzero.make_train_step(model, config, mesh=jzero.make_mesh(devices=jax.devices()[:4]))
    state = step.init(KEY)
    start, losses = jax.device_get(state.params), []
    for _ in range(steps):
        state, metrics = step(state, X)
        losses.append(float(metrics["loss"]))
    return losses, start


def plain(loss, params, steps=3):
    """The same losses from optax; `loss(params)` is plain Flax."""
    tx = optax.sgd(LR)
    state, losses = tx.init(params), []
    value_and_grad = jax.jit(jax.value_and_grad(loss))
    for _ in range(steps):
        value, gradients = value_and_grad(params)
        updates, state = tx.update(gradients, state)
        params = optax.apply_updates(params, updates)
        losses.append(float(value))
    return losses


def plain_nnx(build, params, steps=3):
    graph, state, rest = nnx.split(build(nnx.Rngs(0)), nnx.Param, ...)

    def loss(params):
        nnx.replace_by_pure_dict(state, params)
        return mean_square(nnx.merge(graph, state, rest), X)

    return plain(loss, params, steps)


# ------------------------------------------------------------------------------------------- NNX: random state


class Masked(nnx.Module):
    """A layer that draws: what dropout leaves of x, and a bias so that there is something to train."""

    def __init__(self, rngs):
        self.bias, self.dropout = nnx.Param(jnp.zeros(WIDTH)), nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.dropout(x) + 0 * self.bias[...]


class Scanned(nnx.Module):
    """Three layers made by nnx.vmap, run by nnx.scan."""

    def __init__(self, rngs):
        self.layers = nnx.vmap(Masked)(rngs.split(3))

    def __call__(self, x):
        return nnx.scan(lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.layers)


def test_layers_stacked_by_vmap_draw_each_their_own_mask():
    model = jzero.from_flax(Scanned, lambda module, batch: (module(batch) != 0).mean())
    params, ones = model.init(KEY), np.ones((512, WIDTH), np.float32)
    kept = lambda key: float(model.loss(params, ones, key))  # noqa: E731
    assert kept(None) == 1
    assert kept(KEY) == pytest.approx(1 / 8, abs=0.03)  # one mask for all layers would leave a half
    assert kept(KEY) == kept(KEY) != kept(jax.random.key(4))


class Twice(nnx.Module):
    """A prefix, a stack and a suffix; the stack draws."""

    def __init__(self, rngs):
        self.stack = nnx.vmap(Masked)(rngs.split(3))

    def prefix(self, batch):
        return batch

    def suffix(self, x, batch):
        return (x != 0).mean()

    def __call__(self, x):
        return nnx.scan(lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.stack)


def test_a_stack_and_the_module_around_it_both_draw():
    model = jzero.from_flax(Twice)
    params, ones = model.init(KEY), np.ones((512, WIDTH), np.float32)
    assert float(model.loss(params, ones, KEY)) == pytest.approx(1 / 8, abs=0.03)
    assert (model.module(params, KEY)(ones) != 0).mean() == pytest.approx(1 / 8, abs=0.03)
    assert (model.module(params)(ones) != 0).all()


# ------------------------------------------------------------------------------------------- NNX: fixed modes


class Fixed(nnx.Module):
    """Dropout that the constructor switched off, dropout of attention whose mode is open, dropout that is on."""

    def __init__(self, rngs):
        self.off = nnx.Dropout(0.5, deterministic=True, rngs=rngs)
        self.open = nnx.MultiHeadAttention(1, WIDTH, dropout_rate=0.5, decode=False, rngs=rngs)
        self.on = nnx.Dropout(0.5, rngs=rngs)
        self.shut = nnx.MultiHeadAttention(1, WIDTH, dropout_rate=0.5, decode=False, deterministic=True, rngs=rngs)


def test_a_mode_that_the_constructor_fixed_stays():
    model = jzero.from_flax(Fixed, lambda module, batch: module.off(batch).sum())
    params, ones = model.init(KEY), np.ones((ROWS, WIDTH), np.float32)

    def draws(name, key):
        return bool((getattr(model.module(params, key), name)(ones) != getattr(model.module(params), name)(ones)).any())

    training = {name: draws(name, KEY) for name in ("off", "open", "on", "shut")}
    assert training == {"off": False, "open": True, "on": True, "shut": False}
    assert float(model.loss(params, ones, KEY)) == ones.sum()
    assert not any(draws(name, None) for name in training)


# ------------------------------------------------------------------------------------------- NNX: constants


class Table(nnx.Module):
    """A layer with constants: one of JAX, one of NumPy; a list's element has one too."""

    def __init__(self, rngs, scale=0.5):
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.mask = jnp.tril(jnp.full((WIDTH, WIDTH), scale))
        self.table = np.arange(WIDTH, dtype=np.float32) / WIDTH

    def __call__(self, x):
        return jnp.tanh(self.linear(x) @ self.mask + self.table)


class Tables(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([Table(rngs), Table(rngs, 0.25)])
        self.shift = jnp.float32(0.5)

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x + self.shift


@pytest.mark.parametrize("build", [Table, Tables])
def test_arrays_that_are_no_variables_are_constants(build):
    losses, start = train(jzero.from_flax(build, mean_square))
    np.testing.assert_allclose(losses, plain_nnx(build, start), rtol=1e-6)
    assert losses[2] < losses[0]


def test_a_constant_is_not_a_tracer_and_a_numpy_one_stays_numpy():
    seen = []

    def loss(module, batch):
        seen.append((module.mask, module.table))
        return mean_square(module, batch)

    model = jzero.from_flax(Table, loss)
    jax.jit(model.loss)(model.init(KEY), X, None)
    mask, table = seen[0]
    assert not isinstance(mask, jax.core.Tracer)
    assert isinstance(table, np.ndarray)
    assert list(model.init(KEY)) == ["linear"]


class TableStack(nnx.Module):
    """Constants in the layers of a stack and beside it."""

    def __init__(self, rngs):
        self.scale = jnp.float32(0.5)
        self.stack = nnx.vmap(Table)(rngs.split(3))

    def prefix(self, batch):
        return batch * self.scale

    def suffix(self, x, batch):
        return (x**2).mean()

    def __call__(self, x):
        x = x * self.scale
        return nnx.scan(lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.stack)


@pytest.mark.parametrize("pipe", [1, 3])
def test_constants_of_a_stack(pipe):
    model = jzero.from_flax(TableStack)
    mesh = {"train_micro_batch_size_per_gpu": ROWS, "mesh": {"pipe": pipe}, "zero_optimization": {"stage": 1}}
    step = jzero.make_train_step(
        model,
        {"optimizer": {"type": "SGD", "params": {"lr": LR}}, **mesh},
        mesh=jzero.make_mesh(pipe=pipe, devices=jax.devices()[:pipe]),
    )
    state = step.init(KEY)
    start, losses = jax.device_get(state.params), []
    for _ in range(3):
        state, metrics = step(state, X)
        losses.append(float(metrics["loss"]))
    np.testing.assert_allclose(losses, plain_nnx(TableStack, {**start["ends"], "stack": start["stack"]}), rtol=1e-6)


def test_a_modules_methods_still_see_its_stack():
    class Net(TableStack):
        def report_notes(self, dtype):
            return [f"{sum(x.size for x in jax.tree.leaves(nnx.state(self.stack, nnx.Param)))} in the stack"]

    model = jzero.from_flax(Net)
    stack = jax.eval_shape(model.init, jax.random.key(0))["stack"]
    assert model.report_notes("float32") == [f"{sum(x.size for x in jax.tree.leaves(stack))} in the stack"]


def test_constants_that_differ_between_the_layers_of_a_stack_are_refused():
    class Layer(nnx.Module):
        def __init__(self, rngs):
            self.linear, self.noise = nnx.Linear(3, 3, rngs=rngs), jax.random.normal(rngs.params(), (3,))

    class Net(TableStack):
        def __init__(self, rngs):
            self.scale, self.stack = jnp.float32(0.5), nnx.vmap(Layer)(rngs.split(2))

    model = jzero.from_flax(Net)
    params = model.init(KEY)
    with pytest.raises(jzero.ConfigError, match=r"stack\.noise .*differs between the layers.*nnx\.Param.*frozen_par"):
        jax.eval_shape(model.loss, params, X[:, :3], None)


def test_constants_are_found_without_making_the_parameters():
    class Huge(nnx.Module):
        def __init__(self, rngs):
            self.weight = nnx.Param(jax.random.normal(rngs.params(), (2**20, 2**20)))  # 4 TiB
            self.mask = jnp.arange(3.0)

    seen = []
    model = jzero.from_flax(Huge, lambda module, batch: seen.append(module.mask) or module.weight[...].sum())
    params = jax.eval_shape(model.init, KEY)
    jax.eval_shape(model.loss, params, X, None)
    np.testing.assert_array_equal(seen[0], [0, 1, 2])


STARTS_NONE = """
import jax, jax.numpy as jnp, numpy as np
from flax import linen, nnx
from jax._src import xla_bridge
import jzero

class Table(nnx.Module):
    def __init__(self, rngs):
        self.linear, self.mask, self.table = nnx.Linear(8, 8, rngs=rngs), jnp.ones(8), np.ones(8)

    def __call__(self, x):
        return self.linear(x) * self.mask

class Stack(nnx.Module):
    def __init__(self, rngs):
        self.stack, self.shift = nnx.vmap(Table)(rngs.split(2)), jnp.float32(1)

    def prefix(self, batch):
        return batch

    def suffix(self, x, batch):
        return x.mean()

class Constants(linen.Module):
    @linen.compact
    def __call__(self, x):
        return linen.Dense(8)(x) + self.variable("tables", "shift", lambda: jnp.ones(8)).value

x = np.ones((2, 8), np.float32)
jzero.from_flax(Stack)
jzero.from_flax(Constants(), lambda m, x: m(x).mean(), example_batch=x)
jzero.PipelineModule([jzero.LayerSpec(Table), Constants()], loss_fn=lambda o, l: o.mean(), example_batch=(x, x))
assert not xla_bridge.backends_are_initialized()
"""


def test_constants_start_no_backend():
    """A process makes its model before it joins the others, and it must join before JAX starts a backend."""
    subprocess.run([sys.executable, "-c", STARTS_NONE], check=True, cwd=Path(__file__).parent)


def test_layers_of_a_pipeline_module_that_differ_in_a_constant_are_no_stack():
    def loss(outputs, labels):
        return (outputs**2).mean()

    alike, other = jzero.LayerSpec(Table, scale=0.5), jzero.LayerSpec(Table, scale=0.25)
    assert jzero.PipelineModule([alike, alike], loss_fn=loss).stack == range(2)
    assert jzero.PipelineModule([alike, other], loss_fn=loss).stack is None


def test_nnx_with_partitioning():
    class Net(nnx.Module):
        def __init__(self, rngs):
            init = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("model", None))
            self.linear = nnx.Linear(WIDTH, WIDTH, kernel_init=init, rngs=rngs)

        def __call__(self, x):
            return self.linear(x)

    losses, start = train(jzero.from_flax(Net, mean_square))
    expected = plain(lambda p: ((X @ p["linear"]["kernel"] + p["linear"]["bias"]) ** 2).mean(), start)
    np.testing.assert_allclose(losses, expected, rtol=1e-6)


# ------------------------------------------------------------------------------------------- Linen


class Boxed(linen.Module):
    @linen.compact
    def __call__(self, x):
        init = linen.with_partitioning(linen.initializers.lecun_normal(), ("model", None))
        return linen.Dense(WIDTH, kernel_init=init)(x)


class Constants(linen.Module):
    """A collection that training only reads."""

    @linen.compact
    def __call__(self, x):
        table = self.variable("tables", "shift", lambda: jnp.arange(WIDTH, dtype=jnp.float32) / WIDTH)
        return linen.Dense(WIDTH)(x) + table.value


class Sown(linen.Module):
    """Values sown into two collections, one of them with a sum of its own."""

    @linen.compact
    def __call__(self, x):
        x = linen.Dense(WIDTH)(x)
        self.sow("intermediates", "features", x)
        self.sow("losses", "norm", (x**2).sum(), init_fn=lambda: 0.0, reduce_fn=lambda a, b: a + b)
        return x


@pytest.mark.parametrize("module", [Boxed(), Constants(), Sown()], ids=["boxed", "constants", "sown"])
def test_linen(module):
    model = jzero.from_flax(module, mean_square, example_batch=X)
    losses, start = train(model)
    rest = {name: part for name, part in module.init(KEY, X).items() if name not in ("params", "losses")}
    expected = plain(lambda params: (module.apply({"params": params, **rest}, X) ** 2).mean(), start)
    np.testing.assert_allclose(losses, expected, rtol=1e-6)
    assert all(type(x) is np.ndarray for x in jax.tree.leaves(start))


class Noisy(linen.Module):
    """Draws from a stream that is not called dropout."""

    @linen.compact
    def __call__(self, x, train=False):
        x = linen.Dense(WIDTH)(x)
        return x + jax.random.normal(self.make_rng("noise"), x.shape) if train else x


def test_linen_streams_of_any_name_follow_the_key():
    noise = []

    def loss(module, batch, rng):
        noise.append(module(batch, train=rng is not None) - module(batch))
        return jnp.float32(0)

    model = jzero.from_flax(Noisy(), loss, example_batch=np.zeros((1000, WIDTH), np.float32))
    params, zeros = model.init(KEY), np.zeros((1000, WIDTH), np.float32)
    noise.clear()
    for key in (KEY, KEY, jax.random.key(4), None):
        model.loss(params, zeros, key)
    first, again, other, off = map(np.asarray, noise)
    np.testing.assert_array_equal(first, again)
    assert abs(np.corrcoef(first.ravel(), other.ravel())[0, 1]) < 0.05
    assert first.mean() == pytest.approx(0, abs=0.05)
    assert first.std() == pytest.approx(1, abs=0.05)
    assert (off == 0).all()


class Counter(linen.Module):
    """State that training changes only where it may."""

    @linen.compact
    def __call__(self, x):
        count = self.variable("counts", "calls", lambda: jnp.zeros(()))
        if not self.is_initializing() and self.is_mutable_collection("counts"):
            count.value += 1
        return linen.Dense(WIDTH)(x) + count.value


@pytest.mark.parametrize(
    ("module", "state"),
    [
        (linen.BatchNorm(use_running_average=False), {"batch_stats/mean", "batch_stats/var"}),
        (Counter(), {"counts/calls"}),
        (Sown(), set()),
    ],
)
def test_linen_collections_that_training_changes_are_state(module, state):
    assert jzero.from_flax(module, mean_square, example_batch=X).state == state


def test_a_collection_named_like_a_submodule_is_refused():
    class Twice(linen.Module):
        @linen.compact
        def __call__(self, x):
            self.variable("Dense_0", "calls", lambda: jnp.zeros(())).value += 1
            return linen.Dense(WIDTH)(x)

    with pytest.raises(jzero.ConfigError, match=r"\['Dense_0'\] names both a submodule and a variable collection"):
        jzero.from_flax(Twice(), mean_square, example_batch=X)


# ------------------------------------------------------------------------------------------- the loss function


def by_keyword(module, batch, *, rng):
    return module(batch).sum(), rng


def by_name(module, batch, scale=1.0, rng=None):
    return module(batch).sum() * scale, rng


def by_place(module, batch, key):
    return module(batch).sum(), key


def anything(module, batch, **options):
    return module(batch).sum(), options.get("rng")


def more(module, batch, *rest, scale=1.0):
    return module(batch).sum() * scale, (*rest, None)[0]


@pytest.mark.parametrize(
    ("loss", "gets_key"),
    [(by_keyword, True), (by_name, True), (by_place, True), (anything, False), (more, False)],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_the_loss_gets_the_key_if_it_asks_for_one(loss, gets_key):
    model = jzero.from_flax(partial(nnx.Linear, WIDTH, 2), loss)
    params = model.init(KEY)
    value, key = model.loss(params, X, KEY)
    np.testing.assert_allclose(value, (X @ params["kernel"] + params["bias"]).sum(), rtol=1e-5)
    assert key is (KEY if gets_key else None)


def test_a_keyword_that_the_loss_requires_is_named():
    def loss(module, batch, *, temperature):
        return module(batch).sum() / temperature

    with pytest.raises(jzero.ConfigError, match=r"loss_fn requires temperature.*functools\.partial"):
        jzero.from_flax(partial(nnx.Linear, WIDTH, 2), loss)
