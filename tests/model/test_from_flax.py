"""NNX modules as models: how they are made, what their loss function takes, what they draw, modes and boxes.

The oracle is plain Flax and optax on one device.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers.plain_flax import KEY, ROWS, WIDTH, X, mean_square, plain, train
from helpers.refusals import refuses

import jzero

ONES = np.ones((512, WIDTH), np.float32)


# ------------------------------------------------------------------------------------------- a module and its loss


class Late(nnx.Module):
    """`rngs` not first, and not keyword-only."""

    def __init__(self, width=2, rngs=None):
        self.linear = nnx.Linear(WIDTH, width, rngs=rngs)

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


def default(module, batch, scale=1.0):
    return module(batch).sum() * scale, None


@pytest.mark.parametrize(
    ("loss", "gets_key"),
    [(by_keyword, True), (by_name, True), (by_place, True), (anything, False), (more, False), (default, False)],
)
def test_the_loss_gets_the_key_if_it_asks_for_one(loss, gets_key):
    model = jzero.from_flax(partial(nnx.Linear, WIDTH, 2), loss)
    params = model.init(KEY)
    value, key = model.loss(params, X, KEY)
    np.testing.assert_allclose(value, (X @ params["kernel"] + params["bias"]).sum(), rtol=1e-5)
    assert key is (KEY if gets_key else None)
    assert model.loss(params, X, None)[1] is None


class Stacked(nnx.Module):
    """Ends around layers that nnx.vmap stacked."""

    def __init__(self, rngs):
        self.inner, self.outer = (nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(2))
        self.stack = nnx.vmap(lambda rngs: nnx.Linear(WIDTH, WIDTH, rngs=rngs))(rngs.split(3))

    def prefix(self, batch):
        return self.inner(batch)

    def suffix(self, x, batch):
        return (self.outer(x) ** 2).mean()


def test_a_module_with_a_stack():
    model = jzero.from_flax(Stacked)
    params = model.init(KEY)
    x, kernel = X @ params["ends"]["inner"]["kernel"], params["stack"]["kernel"]  # the biases are zeros
    assert (kernel[0] != kernel[1]).any()
    for w in kernel:
        x = x @ w
    expected = ((x @ params["ends"]["outer"]["kernel"]) ** 2).mean()
    np.testing.assert_allclose(model.loss(params, X, None), expected, rtol=1e-5)
    assert model.module(params).stack.kernel.shape == (3, WIDTH, WIDTH)


def with_temperature(module, batch, *, temperature):
    return module(batch).sum() / temperature


def test_losses_that_do_not_fit():
    refuses(lambda: jzero.from_flax(Stacked, mean_square), "drop loss_fn")
    refuses(lambda: jzero.from_flax(Late, with_temperature), r"loss_fn requires temperature.*functools\.partial")


# ------------------------------------------------------------------------------------------- random state


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
    def prefix(self, batch):
        return batch

    def suffix(self, x, batch):
        return (x != 0).mean()


@pytest.mark.parametrize(("module", "loss"), [(Masks, lambda module, x: (module(x) != 0).mean()), (StackOfMasks, None)])
def test_layers_stacked_by_vmap_draw_each_their_own_mask(module, loss):
    model = jzero.from_flax(module, loss)
    params = model.init(KEY)
    kept = lambda key: float(model.loss(params, ONES, key))  # noqa: E731
    assert kept(None) == 1
    assert kept(KEY) == pytest.approx(1 / 8, abs=0.03)  # one mask for all layers would leave a half
    assert kept(KEY) == kept(KEY) != kept(jax.random.key(4))
    assert (model.module(params, KEY)(ONES) != 0).mean() == pytest.approx(1 / 8, abs=0.03)
    assert (model.module(params)(ONES) != 0).all()


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
    assert not any(draws(name, None) for name in training)
    (line,) = model.report_notes(jnp.float32)
    assert line.startswith("off, shut: use_running_average or deterministic is true, as built, in training too")
    built = jzero.from_flax(Fixed(nnx.Rngs(0)), lambda module, batch: module.off(batch).sum())
    assert not hasattr(built, "report_notes"), "`from_flax` calls train() of a built module"


def test_nnx_with_partitioning():
    init = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("model", None))
    losses, start = train(jzero.from_flax(partial(nnx.Linear, WIDTH, WIDTH, kernel_init=init), mean_square))
    expected = plain(lambda p: ((X @ p["kernel"] + p["bias"]) ** 2).mean(), start)
    np.testing.assert_allclose(losses, expected, rtol=1e-6)
