"""The constants of NNX modules: arrays that are no variables. The oracle is plain Flax and optax on one device."""

import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers.plain_flax import KEY, LR, ROWS, WIDTH, X, mean_square, plain_nnx, train
from helpers.sampling import keep

import jzero


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


@pytest.mark.parametrize("build", keep([Table, Tables], [Tables]))
def test_arrays_that_are_no_variables_are_constants(build):
    losses, start = train(jzero.from_flax(build, mean_square))
    np.testing.assert_allclose(losses, plain_nnx(build, start), rtol=1e-6)
    assert losses[2] < losses[0]


def test_arrays_in_an_object_that_nnx_does_not_know():
    """A function of rngs is traced, and such an object would keep the tracer; a built module keeps its array."""

    class Grid:
        def __init__(self):
            self.points = jnp.arange(4.0)

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.inner = nnx.Linear(4, 4, rngs=rngs)
            self.inner.grid = Grid()

    def loss(module, batch):
        return (module.inner(batch + module.inner.grid.points) ** 2).mean()

    with pytest.raises(jzero.ConfigError, match=r"inner\.grid is a Grid, .*pass a built module"):
        jzero.from_flax(Net, loss)
    built = Net(nnx.Rngs(0))
    model = jzero.from_flax(built, loss)
    batch = jnp.ones((2, 4))
    assert float(model.loss(model.values, batch, None)) == pytest.approx(float(loss(built, batch)), rel=1e-6)


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


@pytest.mark.parametrize("pipe", keep([1, 3], [3]))
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


@pytest.mark.parametrize("other", [jnp.nan, 1.0])
def test_constants_with_nan_are_equal(other):
    class Layer(nnx.Module):
        def __init__(self, rngs, last):
            self.linear, self.table = nnx.Linear(3, 3, rngs=rngs), jnp.array([0.0, jnp.nan, last])

        def __call__(self, x):
            return self.linear(jnp.nan_to_num(self.table) + x)

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.layers = nnx.List([Layer(rngs, jnp.nan), Layer(rngs, other)])

        def __call__(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

    model = jzero.from_flax(Net, lambda module, x: module(x).mean(), stack="layers")
    if jnp.isnan(other):
        loss = model.loss(model.init(KEY), X[:, :3], None)
        np.testing.assert_allclose(loss, Net(nnx.Rngs(KEY))(X[:, :3]).mean(), rtol=1e-6)
    else:
        with pytest.raises(jzero.ConfigError, match=r"the constant table differs between layers\.0 and layers\.1"):
            model.loss(model.init(KEY), X[:, :3], None)


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


@pytest.mark.slow
def test_constants_start_no_backend():
    """A process makes its model before it joins the others, and it must join before JAX starts a backend."""
    subprocess.run([sys.executable, "-c", STARTS_NONE], check=True, cwd=Path(__file__).parents[2])


def test_layers_of_a_pipeline_module_that_differ_in_a_constant_are_no_stack():
    def loss(outputs, labels):
        return (outputs**2).mean()

    alike, other = jzero.LayerSpec(Table, scale=0.5), jzero.LayerSpec(Table, scale=0.25)
    assert jzero.PipelineModule([alike, alike], loss_fn=loss).stack == range(2)
    assert jzero.PipelineModule([alike, other], loss_fn=loss).stack is None
