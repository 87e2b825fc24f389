"""NNX modules as models: how they are made, losses, draws, modes, boxes, constants; beside plain Flax and optax."""

import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers.drawn import random_params
from helpers.plain_flax import KEY, LR, ROWS, WIDTH, X, mean_square, nnx_loss
from helpers.refusals import refuses
from helpers.steps import compare, mesh, settings

import jzero

ONES = np.ones((512, WIDTH), np.float32)


class Late(nnx.Module):
    """`rngs` not first, and not keyword-only; a kernel with axes of a mesh that there is not."""

    def __init__(self, width=2, rngs=None):
        init = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("model", None))
        self.linear = nnx.Linear(WIDTH, width, kernel_init=init, rngs=rngs)

    def __call__(self, x):
        return self.linear(x)


class Keyword(Late):
    def __init__(self, *, rngs):
        super().__init__(rngs=rngs)


@pytest.mark.parametrize(
    "module", [Late, partial(Late, 2), Keyword, lambda r: Late(rngs=r), lambda *, rngs: Late(rngs=rngs)]
)
def test_every_way_to_say_a_module(module):
    model = jzero.from_flax(module, mean_square)
    params = model.init(KEY)["linear"]
    assert (params["kernel"] != model.init(jax.random.key(0))["linear"]["kernel"]).any()
    expected = X @ params["kernel"] + params["bias"]
    np.testing.assert_allclose(model.module({"linear": params})(X), expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(model.loss({"linear": params}, X, None), (expected**2).mean(), rtol=1e-6)


@pytest.mark.parametrize(
    ("loss", "gets_key"),
    [
        (lambda module, batch, *, rng: (module(batch).sum(), rng), True),
        (lambda module, batch, scale=1.0, rng=None: (module(batch).sum() * scale, rng), True),
        (lambda module, batch, key: (module(batch).sum(), key), True),
        (lambda module, batch, **options: (module(batch).sum(), options.get("rng")), False),
        (lambda module, batch, *rest, scale=1.0: (module(batch).sum() * scale, (*rest, None)[0]), False),
        (lambda module, batch, scale=1.0: (module(batch).sum() * scale, None), False),
    ],
    ids=["by keyword", "by name", "by place", "any option", "any argument", "a default"],
)
def test_the_loss_gets_the_key_if_it_asks_for_one(loss, gets_key):
    model = jzero.from_flax(partial(nnx.Linear, WIDTH, 2), loss)
    params = model.init(KEY)
    value, key = model.loss(params, X, KEY)
    np.testing.assert_allclose(value, (X @ params["kernel"] + params["bias"]).sum(), rtol=1e-5)
    assert key is (KEY if gets_key else None)
    assert model.loss(params, X, None)[1] is None


def test_losses_that_do_not_fit():
    refuses(lambda: jzero.from_flax(StackOfMasks, mean_square), "drop loss_fn")
    loss = lambda module, batch, *, temperature: module(batch).sum() / temperature  # noqa: E731
    refuses(lambda: jzero.from_flax(Late, loss), r"loss_fn requires temperature.*functools\.partial")


class Masked(nnx.Module):
    """A layer that draws: what dropout leaves of x, and a bias so that there is something to train."""

    def __init__(self, rngs):
        self.bias, self.dropout = nnx.Param(jnp.zeros(WIDTH)), nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.dropout(x) + 0 * self.bias[...]


class Masks(nnx.Module):
    """Three layers made by nnx.vmap, which nnx.scan runs, or a model's stack."""

    def __init__(self, rngs):
        self.stack = nnx.vmap(Masked)(rngs.split(3))

    def __call__(self, x):
        return nnx.scan(lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.stack)


class StackOfMasks(Masks):
    prefix = lambda self, batch: batch  # noqa: E731
    suffix = lambda self, x, batch: (x != 0).mean()  # noqa: E731


@pytest.mark.parametrize(("module", "loss"), [(Masks, lambda module, x: (module(x) != 0).mean()), (StackOfMasks, None)])
def test_layers_stacked_by_vmap_draw_each_their_own_mask(module, loss):
    model = jzero.from_flax(module, loss)
    params = jax.jit(model.init)(KEY)

    @jax.jit
    def kept(key):
        return model.loss(params, ONES, key), (model.module(params, key)(ONES) != 0).mean()

    assert kept(None) == (1, 1)
    assert kept(KEY) == pytest.approx((1 / 8, 1 / 8), abs=0.03)  # one mask for all layers would leave a half
    assert kept(KEY) == kept(KEY) != kept(jax.random.key(4))


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
    assert not any(draws(name, None) for name in training)
    (line,) = model.report_notes(jnp.float32)
    assert line.startswith("off, shut: use_running_average or deterministic is true, as built, in training too")
    built = jzero.from_flax(nnx.Dropout(0.5, deterministic=True, rngs=nnx.Rngs(0)), mean_square)
    assert not hasattr(built, "report_notes"), "`from_flax` calls train() of a built module"


class Table(nnx.Module):
    """A layer with constants: one of JAX, one of NumPy."""

    def __init__(self, rngs, scale=0.5):
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.mask = jnp.tril(jnp.full((WIDTH, WIDTH), scale))
        self.table = np.arange(WIDTH, dtype=np.float32) / WIDTH

    def __call__(self, x):
        return jnp.tanh(self.linear(x) @ self.mask + self.table)


class Grid:
    def __init__(self):
        self.points = jnp.arange(WIDTH) / WIDTH


class WithGrid(nnx.Module):
    def __init__(self, rngs):
        self.inner = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.inner.grid = Grid()

    def __call__(self, x):
        return self.inner(x + self.inner.grid.points)


def test_a_tracer_without_a_sharding_says_so_without_a_search():
    """Flax asks at each random key; jax 0.10 searches all equations, which takes half a minute for a deep module."""
    jzero.from_flax(partial(nnx.Linear, 4, 4), mean_square)

    def ask(x):
        for _ in range(1000):
            x = x + 1
        start = time.process_time()
        assert not any(hasattr(x, "sharding") for _ in range(500))
        return time.process_time() - start

    seconds = []
    jax.eval_shape(lambda x: seconds.append(ask(x)), 1.0)
    assert seconds[0] < 0.5


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


def test_constants_of_a_stack():
    model = jzero.from_flax(TableStack)
    assert model.report_notes("float32") == [f"{3 * WIDTH * (WIDTH + 1)} in the stack"]
    config = settings(None, 1, train_micro_batch_size_per_gpu=ROWS)
    step, plain = jzero.make_train_step(model, config, mesh=mesh(1, pipe=3)), nnx_loss(TableStack, mean_square)
    join = lambda params: {**params["ends"], "stack": params["stack"]}  # noqa: E731
    compare(step, [X] * 3, plain, optax.sgd(LR), random_params(model), join=join, rtol=1e-6)


class Gap(nnx.Module):
    """A layer with NaN in a table, and another number."""

    def __init__(self, rngs, last):
        self.linear, self.table = nnx.Linear(WIDTH, WIDTH, rngs=rngs), jnp.array([*[0.0] * 6, jnp.nan, last])

    def __call__(self, x):
        return self.linear(jnp.nan_to_num(self.table) + x)


class Noise(nnx.Module):
    def __init__(self, rngs):
        self.linear, self.noise = nnx.Linear(WIDTH, WIDTH, rngs=rngs), jax.random.normal(rngs.params(), (3,))


def test_constants_that_differ_between_layers_are_refused():
    """Those of NaN are equal."""

    def layers(last):
        return lambda rngs: nnx.Sequential(Gap(rngs, jnp.nan), Gap(rngs, last))

    alike, other = (jzero.from_flax(layers(last), mean_square, stack="layers") for last in (jnp.nan, 1.0))
    plain, params = nnx_loss(layers(jnp.nan), mean_square), random_params(jzero.from_flax(layers(jnp.nan), mean_square))
    losses = jax.jit(lambda own, params: (alike.loss(own, X, None), plain(params, X, None)))
    np.testing.assert_allclose(*losses(alike.adopt(params), params), rtol=1e-5)
    words = r"the constant table differs between layers\.0 and layers\.1"
    refuses(lambda: other.loss(other.init(KEY), X, None), words)
    model = jzero.from_flax(type("NoiseStack", (TableStack,), {"layer": Noise}))
    params = jax.eval_shape(model.init, KEY)
    words = r"stack\.noise .*differs between the layers.*nnx\.Param.*frozen_par"
    refuses(lambda: jax.eval_shape(model.loss, params, X, None), words)


def test_layers_of_a_pipeline_module_that_differ_in_a_constant_are_no_stack():
    alike, other = jzero.LayerSpec(Table, scale=0.5), jzero.LayerSpec(Table, scale=0.25)
    assert jzero.PipelineModule([alike, alike], loss_fn=lambda y, labels: y.sum()).stack == range(2)
    assert jzero.PipelineModule([alike, other], loss_fn=lambda y, labels: y.sum()).stack is None


STARTS_NONE = """
import jax.numpy as jnp, numpy as np
from flax import linen, nnx
from jax._src import xla_bridge
import jzero

class Stack(nnx.Module):
    def __init__(self, rngs):
        layer = lambda rngs: nnx.Linear(8, 8, rngs=rngs)
        self.linear, self.mask, self.table = layer(rngs), jnp.ones(8), np.ones(8)
        self.stack = nnx.vmap(layer)(rngs.split(2))

    prefix = lambda self, x: self.linear(x) * self.mask
    suffix = lambda self, x, batch: x.mean()

class Constants(linen.Module):
    @linen.compact
    def __call__(self, x):
        return linen.Dense(8)(x) + self.variable("tables", "shift", lambda: jnp.ones(8)).value

jzero.from_flax(Stack)
jzero.from_flax(Constants(), lambda m, x: m(x).mean(), example_batch=np.ones((2, 8), np.float32))
layers = [*[jzero.LayerSpec(nnx.Linear, 8, 8)] * 2, linen.Dense(1)]
jzero.PipelineModule(layers, loss_fn=lambda y, labels: y.sum(), example_batch=(np.ones((2, 8)), np.ones((2, 1))))
assert not xla_bridge.backends_are_initialized()
"""


@pytest.mark.slow
def test_constants_start_no_backend():
    """A process makes its model before it joins the others, and it must join before JAX starts a backend."""
    subprocess.run([sys.executable, "-c", STARTS_NONE], check=True, cwd=Path(__file__).parents[2])
