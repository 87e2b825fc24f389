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
from helpers.refusals import refuses
from helpers.sampling import keep
from helpers.steps import mesh, run, settings

import jzero


class Table(nnx.Module):
    """A layer with constants: one of JAX, one of NumPy."""

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


def test_arrays_that_are_no_variables_are_constants():
    losses, start = train(jzero.from_flax(Tables, mean_square))
    np.testing.assert_allclose(losses, plain_nnx(Tables, start), rtol=1e-6)


class Grid:
    """An object that nnx does not know."""

    def __init__(self):
        self.points = jnp.arange(WIDTH) / WIDTH


class WithGrid(nnx.Module):
    def __init__(self, rngs):
        self.inner = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.inner.grid = Grid()

    def __call__(self, x):
        return self.inner(x + self.inner.grid.points)


def test_arrays_in_an_object_that_nnx_does_not_know():
    """A function of rngs is traced, and such an object would keep the tracer; a built module keeps its array."""
    refuses(lambda: jzero.from_flax(WithGrid, mean_square), r"inner\.grid is a Grid, .*pass a built module")
    built = WithGrid(nnx.Rngs(0))
    model = jzero.from_flax(built, mean_square)
    assert float(model.loss(model.values, X, None)) == pytest.approx(float(mean_square(built, X)), rel=1e-6)


class Huge(nnx.Module):
    def __init__(self, rngs):
        self.weight = nnx.Param(jax.random.normal(rngs.params(), (2**20, 2**20)))  # 4 TiB
        self.mask, self.table = jnp.arange(3.0), np.arange(3.0)


def test_constants_are_found_without_making_the_parameters():
    """They are no tracers, and those of NumPy stay so."""
    seen = []
    model = jzero.from_flax(Huge, lambda module, x: seen.append((module.mask, module.table)) or module.weight[0, 0])
    params = jax.eval_shape(model.init, KEY)
    assert list(params) == ["weight"]
    jax.eval_shape(model.loss, params, X, None)
    mask, table = seen[0]
    np.testing.assert_array_equal(mask, [0, 1, 2])
    assert isinstance(table, np.ndarray)


class TableStack(nnx.Module):
    """Constants in the layers of a stack and beside it."""

    layer = Table

    def __init__(self, rngs):
        self.scale = jnp.float32(0.5)
        self.stack = nnx.vmap(self.layer)(rngs.split(3))

    def prefix(self, batch):
        return batch * self.scale

    def suffix(self, x, batch):
        return (x**2).mean()

    def report_notes(self, dtype):
        return [f"{sum(x.size for x in jax.tree.leaves(nnx.state(self.stack, nnx.Param)))} in the stack"]

    def __call__(self, x):
        x = x * self.scale
        return nnx.scan(lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.stack)


@pytest.mark.parametrize("pipe", keep([1, 3], [3]))
def test_constants_of_a_stack(pipe):
    model = jzero.from_flax(TableStack)
    assert model.report_notes("float32") == [f"{3 * WIDTH * (WIDTH + 1)} in the stack"]
    config = settings(None, 1, lr=LR, train_micro_batch_size_per_gpu=ROWS)
    start, losses, _ = run(jzero.make_train_step(model, config, mesh=mesh(1, pipe=pipe)), [X] * 3)
    np.testing.assert_allclose(losses, plain_nnx(TableStack, {**start["ends"], "stack": start["stack"]}), rtol=1e-6)


class Noise(nnx.Module):
    def __init__(self, rngs):
        self.linear, self.noise = nnx.Linear(3, 3, rngs=rngs), jax.random.normal(rngs.params(), (3,))


class NoiseStack(TableStack):
    layer = Noise


class Gap(nnx.Module):
    """A layer with NaN in a table, and another number."""

    def __init__(self, rngs, last):
        self.linear, self.table = nnx.Linear(WIDTH, WIDTH, rngs=rngs), jnp.array([*[0.0] * 6, jnp.nan, last])

    def __call__(self, x):
        return self.linear(jnp.nan_to_num(self.table) + x)


@pytest.mark.parametrize("other", [jnp.nan, 1.0])
def test_constants_that_differ_between_layers_are_refused(other):
    """Those of NaN are equal."""

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.layers = nnx.List([Gap(rngs, jnp.nan), Gap(rngs, other)])

        def __call__(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

    model = jzero.from_flax(Net, mean_square, stack="layers")
    if jnp.isnan(other):
        loss = model.loss(model.init(KEY), X, None)
        np.testing.assert_allclose(loss, mean_square(Net(nnx.Rngs(KEY)), X), rtol=1e-5)
        return
    words = r"the constant table differs between layers\.0 and layers\.1"
    refuses(lambda: model.loss(model.init(KEY), X, None), words)
    model = jzero.from_flax(NoiseStack)
    params = model.init(KEY)
    words = r"stack\.noise .*differs between the layers.*nnx\.Param.*frozen_par"
    refuses(lambda: jax.eval_shape(model.loss, params, X[:, :3], None), words)


def test_layers_of_a_pipeline_module_that_differ_in_a_constant_are_no_stack():
    alike, other = jzero.LayerSpec(Table, scale=0.5), jzero.LayerSpec(Table, scale=0.25)
    assert jzero.PipelineModule([alike, alike], loss_fn=lambda y, labels: y.sum()).stack == range(2)
    assert jzero.PipelineModule([alike, other], loss_fn=lambda y, labels: y.sum()).stack is None


STARTS_NONE = """
import jax.numpy as jnp, numpy as np
from flax import linen, nnx
from jax._src import xla_bridge
import jzero

class Table(nnx.Module):
    def __init__(self, rngs):
        self.linear, self.mask, self.table = nnx.Linear(8, 8, rngs=rngs), jnp.ones(8), np.ones(8)

    prefix = __call__ = lambda self, x: self.linear(x) * self.mask
    suffix = lambda self, x, batch: x.mean()

class Constants(linen.Module):
    @linen.compact
    def __call__(self, x):
        return linen.Dense(8)(x) + self.variable("tables", "shift", lambda: jnp.ones(8)).value

class Stack(Table):
    def __init__(self, rngs):
        super().__init__(rngs)
        self.stack = nnx.vmap(Table)(rngs.split(2))

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
