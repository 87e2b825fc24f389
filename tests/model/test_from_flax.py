"""NNX modules with random streams, fixed modes and boxed parameters; what a loss function takes.

The oracle is plain Flax and optax on one device.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers.plain_flax import KEY, ROWS, WIDTH, X, mean_square, plain, train

import jzero

# ------------------------------------------------------------------------------------------- random state


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


# ------------------------------------------------------------------------------------------- fixed modes and boxes


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
    (line,) = model.report_notes(jnp.float32)
    assert line.startswith("off, shut: use_running_average or deterministic is true, as built, in training too")
    built = jzero.from_flax(Fixed(nnx.Rngs(0)), lambda module, batch: module.off(batch).sum())
    assert not hasattr(built, "report_notes"), "`from_flax` calls train() of a built module"


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
