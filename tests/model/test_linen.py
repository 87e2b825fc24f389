"""Linen modules: boxed parameters, collections, sown values, streams.

The oracle is plain Flax and optax on one device.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen
from helpers.plain_flax import KEY, WIDTH, X, mean_square, plain, train
from helpers.refusals import refuses

import jzero

ZEROS = np.zeros((1000, WIDTH), np.float32)


class Heads(linen.Module):
    """Attention and `DenseGeneral`, which unbox their kernels in the initializer that Flax traces in every call."""

    axes: tuple
    annotate: Callable = linen.with_partitioning

    @linen.compact
    def __call__(self, x):
        init = self.annotate(linen.initializers.lecun_normal(), self.axes)
        x = linen.MultiHeadDotProductAttention(2, kernel_init=init, out_kernel_init=init)(x[:, None])
        zeros = self.annotate(linen.initializers.zeros, self.axes[1:])
        x = linen.DenseGeneral((2, WIDTH // 2), kernel_init=init, bias_init=zeros)(x)
        return linen.DenseGeneral(WIDTH, axis=(-2, -1), kernel_init=init)(x)[:, 0]


class Several(linen.Module):
    """A boxed kernel, a constraint on an activation as in MaxText, a constant, and sown values, one with a sum."""

    @linen.compact
    def __call__(self, x):
        init = linen.with_partitioning(linen.initializers.lecun_normal(), ("model", None))
        x = linen.with_logical_constraint(linen.Dense(WIDTH, kernel_init=init)(x), ("rows", "heads"))
        self.sow("intermediates", "features", x)
        self.sow("losses", "norm", (x**2).sum(), init_fn=lambda: 0.0, reduce_fn=lambda a, b: a + b)
        table = self.variable("tables", "shift", lambda: jnp.arange(WIDTH, dtype=jnp.float32) / WIDTH)
        return x + table.value


MODULES = {
    "several": Several(),
    **{f"heads, {axes}": Heads(axes) for axes in ((None, "model", None), ("embed", "model", "data"))},
    "heads, logical": Heads(("embed", "heads"), linen.with_logical_partitioning),
}


@pytest.mark.parametrize("module", MODULES.values(), ids=MODULES)
def test_linen(module):
    def loss(module, batch):
        with linen.logical_axis_rules((("rows", "data"), ("embed", "zero"), ("heads", "tensor"))):
            return mean_square(module, batch)

    model = jzero.from_flax(module, loss, example_batch=jax.eval_shape(lambda: X))
    losses, start = train(model, gradient_clipping=0)
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

    model = jzero.from_flax(Noisy(), loss, example_batch=ZEROS)
    params = model.init(KEY)
    noise.clear()
    for key in (KEY, KEY, jax.random.key(4), None):
        model.loss(params, ZEROS, key)
    first, again, other, off = map(np.asarray, noise)
    np.testing.assert_array_equal(first, again)
    assert abs(np.corrcoef(first.ravel(), other.ravel())[0, 1]) < 0.05
    assert first.mean() == pytest.approx(0, abs=0.05)
    assert first.std() == pytest.approx(1, abs=0.05)
    assert (off == 0).all()


class Counter(linen.Module):
    """State that training changes only where it may."""

    collection: str = "counts"

    @linen.compact
    def __call__(self, x):
        count = self.variable(self.collection, "calls", lambda: jnp.zeros(()))
        if not self.is_initializing() and self.is_mutable_collection(self.collection):
            count.value += 1
        return linen.Dense(WIDTH)(x) + count.value


def test_linen_collections_that_training_changes_are_state():
    for module, state in (
        (linen.BatchNorm(use_running_average=False), {"batch_stats/mean", "batch_stats/var"}),
        (Counter(), {"counts/calls"}),
        (Several(), set()),
    ):
        assert jzero.from_flax(module, mean_square, example_batch=X).state == state
    words = r"\['Dense_0'\] names both a submodule and a variable collection"
    refuses(lambda: jzero.from_flax(Counter("Dense_0"), mean_square, example_batch=X), words)


def test_constants_of_other_variables_are_refused():
    """Training does not change the collection, so the step computes it from the module, and would ignore these."""
    model = jzero.from_flax(Several(), mean_square, example_batch=X)
    params, tables = (Several().init(KEY, X)[name] for name in ("params", "tables"))
    model.adopt({"params": params, "tables": tables})
    other = {"params": params, "tables": {"shift": tables["shift"] + 1}}
    refuses(lambda: model.adopt(other), r"params: tables/shift is not what the module computes: .*frozen_par")
