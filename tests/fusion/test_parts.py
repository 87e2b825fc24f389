"""The kernel of elementwise functions in Pallas's interpreter, and its own erf and erfc, against float64."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
from jax.experimental import pallas as pl
from test_fused import BF16, numbers

from jzero.kernels.fusion import parts
from jzero.kernels.fusion.elementwise import Elementwise, erfc
from jzero.kernels.fusion.parts import map_parts


@pytest.fixture
def interpreted(monkeypatch):
    monkeypatch.setattr(pl, "pallas_call", partial(pl.pallas_call, interpret=True))


def mixed(a, b, c):
    return [a * jax.nn.sigmoid(b), b - c, jnp.exp(-c) * a]


def with_row(a, b, c, bias):
    """Two results, and the sum over all rows of a third."""
    return [*mixed(a, b + bias, c), jnp.sum(a * c, 0, keepdims=True)]


# The last one has several tiles and several programs for each column; without sums a program has one tile.
@pytest.mark.parametrize(
    ("m", "n", "row"),
    [(32, 512, False), (8, 1024, True), (16, 384, True), (96, 1024, False), (64, 128, True), (320, 2048, True)],
)
def test_the_kernel_in_pallas_interpreter(m, n, row, interpreted):
    *xs, bias = numbers((m, 2, n), (m, 1, n), (1, 1, n))
    f, counts, xs = (with_row, (1, 2, 1), [*xs, bias]) if row else (mixed, (1, 2), xs)
    results = [(m, 1, n), (m, 2, n), (1, 1, n)][: len(counts)]
    assert parts.supports_elementwise([x.shape for x in xs], results)
    found = jax.jit(partial(parts.tiled_map_parts, f, results=results))(*xs)
    for a, b in zip(found, map_parts(f, xs, counts), strict=True):
        assert a.shape == b.shape
        assert a.dtype == jnp.bfloat16
        np.testing.assert_allclose(np.asarray(a, np.float32), np.asarray(b, np.float32), rtol=BF16, atol=1e-6)
    a, b, c = (np.asarray(x, np.float64) for x in (xs[0][:, 0], xs[0][:, 1], xs[1][:, 0]))
    b = b + np.asarray(bias[0, 0], np.float64) if row else b
    np.testing.assert_allclose(np.asarray(found[0][:, 0], np.float64), a / (1 + np.exp(-b)), rtol=BF16, atol=1e-6)
    if row:
        np.testing.assert_allclose(np.asarray(found[2][0, 0], np.float64), (a * c).sum(0), rtol=BF16, atol=1e-5)


@pytest.mark.parametrize("bad", [np.nan, -np.inf], ids=str)
def test_what_is_not_finite_stays_in_its_place(bad, interpreted):
    x, bias = numbers((8, 1, 1024), (1, 1, 1024))
    x = x.at[3, 0, 5].set(bad)
    for found in (
        parts.tiled_map_parts(with_row, x, x, x, bias, results=[(8, 1, 1024)] * 3 + [(1, 1, 1024)]),
        map_parts(with_row, [x, x, x, bias], [1] * 4),
    ):
        kept = [np.isfinite(np.asarray(y, np.float32)) for y in found]
        assert all(y.sum() >= y.size - 1 and y[..., :5].all() and y[..., 6:].all() for y in kept)
        assert not kept[3][0, 0, 5]


def test_shapes_that_the_kernel_does_not_take():
    for shape in ((1, 1, 512), (7, 1, 512), (64, 1, 192), (2**20, 1, 4096)):
        assert not parts.supports_elementwise([shape], [shape])
        assert not parts.supports_elementwise([shape], [shape, (1, *shape[1:])])


@pytest.mark.parametrize("derivative", [False, True], ids=["value", "derivative"])
def test_erfc_against_float64(derivative):
    x = np.concatenate([np.linspace(-6, 6, 4001), [0.0, -np.inf, np.inf, np.nan]]).astype(np.float32)
    f, expected = erfc, scipy.special.erfc(x.astype(np.float64))
    if derivative:
        f, expected = jax.vmap(jax.grad(erfc)), -2 / np.sqrt(np.pi) * np.exp(-(x.astype(np.float64) ** 2))
    # the argument of 2^y, up to 52, is rounded twice
    np.testing.assert_allclose(f(jnp.asarray(x)), expected, rtol=6e-6)


def test_erf_of_small_numbers():
    """The difference 1 - erfc(x) would have no digits."""
    x = np.geomspace(1e-6, 2e-2, 40).astype(np.float32)
    trace = jax.make_jaxpr(jax.lax.erf)(x).jaxpr
    f = Elementwise(tuple(trace.eqns), tuple(trace.invars), trace.outvars[0])
    np.testing.assert_allclose(f(x)[0], scipy.special.erf(x.astype(np.float64)), rtol=1e-4)
