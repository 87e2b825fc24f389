"""Casts and products in fp8 against factors that NumPy and ml_dtypes round, and their products in float64."""

from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl

from jzero.kernels.fp8 import matmul
from jzero.kernels.fp8.delayed_scaling import bound, zero_counts
from jzero.kernels.fp8.matmul import cast_pair, fp8_dot_general, identity
from jzero.kernels.fp8.quantized import E4M3, E5M2, GRADIENTS, cast8, quantize_weight, scale_of
from jzero.kernels.fusion.chains import form_of
from jzero.tracing.equations import operations

MOST = {E4M3: 448.0, E5M2: 57344.0}
TYPES = {E4M3: ml_dtypes.float8_e4m3fn, E5M2: ml_dtypes.float8_e5m2}
BF16 = 2.0**-8
PLAIN = "tk,kn->tn"

# letters of x, w and y, as in einsum
ORDERS = {
    "x w": PLAIN,
    "x w^T": "tk,nk->tn",
    "w^T x^T": "nk,kt->nt",
    "heads out": "bsd,dhc->bshc",
    "heads in": "bshc,hcd->bsd",
    "contracted first": "kbs,kn->bsn",
    "weight of heads first": "dhc,bsd->hcbs",
    "reordered": "bchs,hcd->bsd",
}
WEIGHTS = {"w^T x^T": 0, "weight of heads first": 0}
SIZES = {"t": 12, "k": 16, "n": 20, "b": 2, "s": 6, "d": 24, "h": 4, "c": 8}


def rounded(x, dtype, scale=None):
    """Multiply by this scale or the largest power of two that keeps x in range, clip, round, and divide; in float64."""
    x = np.asarray(x, np.float64)
    scale = scale or 2.0 ** np.floor(np.log2(MOST[dtype] / np.abs(x).max()))
    x = np.clip(x * scale, -MOST[dtype], MOST[dtype])
    return x.astype(np.float32).astype(TYPES[dtype]).astype(np.float64) / scale


def form_of_letters(letters, weight):
    (a, b), out = letters.split("->")[0].split(","), letters.split("->")[1]
    shared = [c for c in a if c in b and c not in out]
    batch = [c for c in a if c in b and c in out]
    numbers = tuple((tuple(map(a.index, cs)), tuple(map(b.index, cs))) for cs in (shared, batch))
    return form_of(numbers, (len(a), len(b)), weight)


def factors(letters):
    rng = np.random.default_rng(0)
    names = (*letters.split("->")[0].split(","), letters.split("->")[1])
    scales = 3.0, 0.02, 1e-4
    drawn = (s * rng.normal(size=[SIZES[c] for c in name]) for s, name in zip(scales, names, strict=True))
    return [x.astype(jnp.bfloat16) for x in drawn]


@partial(jax.jit, static_argnums=(0, 1, 5, 6))
def jzeros(letters, weight, a, b, g, gradients, trained=True):
    def product(x, place):
        w = quantize_weight((a, b)[weight], (), jnp.bfloat16, gradients)
        return fp8_dot_general(x, w.used(w.x8, place), form_of_letters(letters, weight), jnp.bfloat16, {})

    x, place = (a, b)[1 - weight], jnp.zeros((a, b)[weight].shape, jnp.bfloat16) if trained else None
    y, pull = jax.vjp(product, x, place)
    dx, dw = pull(g)
    return y, *((dw, dx) if weight == 0 else (dx, dw))


def close(found, expected):
    """Within the rounding of the result to bfloat16, and of sums in float32."""
    assert found.dtype == jnp.bfloat16
    found = np.asarray(found, np.float64)
    assert np.abs(found - expected).max() < BF16 * np.abs(expected).max()
    assert np.linalg.norm(found - expected) < BF16 / 2 * np.linalg.norm(expected)


@pytest.mark.parametrize(("order", "fp8_format"), [*zip(ORDERS, ["hybrid", "e4m3"] * 4, strict=True)])
def test_three_products_of_rounded_factors(order, fp8_format):
    letters, weight, gradients = ORDERS[order], WEIGHTS.get(order, 1), GRADIENTS[fp8_format]
    a, b, g = factors(letters)
    y, da, db = jzeros(letters, weight, a, b, g, gradients)
    (left, right), out = letters.split("->")[0].split(","), letters.split("->")[1]
    a8, b8, g8 = rounded(a, E4M3), rounded(b, E4M3), rounded(g, gradients)
    close(y, np.einsum(letters, a8, b8))
    close(da, np.einsum(f"{out},{right}->{left}", g8, b8))
    close(db, np.einsum(f"{left},{out}->{right}", a8, g8))
    exact = np.einsum(f"{left},{out}->{right}", *(np.asarray(v, np.float64) for v in (a, g)))
    assert np.linalg.norm(np.asarray(db, np.float64) - exact) > 2 * BF16 * np.linalg.norm(exact)  # the test can fail
    if order == "x w":
        *frozen, nothing = jzeros(letters, weight, a, b, g, gradients, trained=False)
        jax.tree.map(np.testing.assert_array_equal, frozen, [y, da])
        assert nothing is None


def test_a_product_by_known_scales():
    """Both maxima come out as if they were a gradient."""
    letters = ORDERS["x w^T"]
    x, w, g = factors(letters)
    x[3, 4] = 700.0  # 448 / 4 is the largest number at this scale
    known = {"x": 4.0, "g": 2.0**20, "w": 2.0**12}

    def run(x, place, seen):
        q = quantize_weight(w, (), jnp.bfloat16, E5M2, jnp.array([*known.values()]))
        return fp8_dot_general(x, q.used(q.x8, place, seen), form_of_letters(letters, 1), jnp.bfloat16, {})

    @jax.jit
    def both(g, *args):
        y, pull = jax.vjp(run, *args)
        return y, *pull(g)

    *found, counts = both(g, x, np.zeros_like(w), zero_counts())
    x8, w8, g8 = rounded(x, E4M3, known["x"]), rounded(w, E4M3, known["w"]), rounded(g, E5M2, known["g"])
    assert np.abs(x8).max() == 112
    for one, expected in zip(found, (x8 @ w8.T, g8 @ w8, g8.T @ x8), strict=True):
        close(one, expected)
    largest = [np.abs(np.asarray(v, np.float64)).max() for v in (x, g)]
    np.testing.assert_array_equal(bound(counts), 2.0 ** (np.floor(np.log2(largest)) + 1))


@pytest.mark.parametrize(
    "letters", ["btk,bkn->btn", "tkc,knc->tn", "k,k->"], ids=["batch", "weight contracted apart", "no rows"]
)
def test_other_products_have_no_form(letters):
    assert form_of_letters(letters, 1) is None


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_the_scale_is_the_largest_power_of_two_that_fits(dtype):
    most = MOST[dtype]
    for largest in (1.0, 7.0, most, most / 2, np.nextafter(np.float32(most), np.float32(1e9)), 3e-20, 1e20):
        scale = float(scale_of(jnp.float32(largest), dtype))
        assert np.log2(scale) == round(np.log2(scale))
        assert float(np.float32(largest)) * scale <= most < 2 * float(np.float32(largest)) * scale
    for nothing in (0, 1e-38):
        assert float(scale_of(jnp.float32(nothing), dtype)) == 2.0**100  # and its inverse is a normal bfloat16
    assert all(np.isnan(scale_of(jnp.float32(x), dtype)) for x in (np.inf, np.nan))
    assert not np.asarray(cast8(jnp.zeros((4, 4), jnp.bfloat16), scale_of(jnp.float32(0), dtype), dtype)).any()


@pytest.mark.parametrize(("where", "value"), [("x", np.nan), ("w", np.inf), ("g", -np.inf)])
def test_what_is_not_finite_ends_as_nan(where, value):
    """A saturated infinity or NaN would look like any other number; the step must be skipped."""
    operands = dict(zip("xwg", factors(PLAIN), strict=True))
    operands[where][1, 2] = value
    y, dx, dw = jzeros(PLAIN, 1, *operands.values(), E5M2)
    for result, of in ((y, "xw"), (dx, "gw"), (dw, "xg")):
        assert np.isnan(result).all() == (where in of)


def test_a_weight_used_otherwise_is_the_rounded_one_with_its_gradient():
    _, w, _ = factors(PLAIN)

    @jax.jit
    def run(w, place):
        stored = quantize_weight(w, (), jnp.bfloat16, E5M2)
        dw = jax.grad(lambda place: (stored.used(stored.x8, place).dequantized() * 3).sum())(place)
        return stored.x8, stored.dequantized(), dw

    x8, found, dw = run(w.astype(np.float32), np.zeros_like(w))
    np.testing.assert_array_equal(np.asarray(found, np.float64), rounded(w, E4M3))
    assert (np.asarray(dw) == 3).all()
    assert x8.dtype == E4M3


def test_gradients_are_summed_exactly():
    """Hopper's fast mode sums in about 14 bits, which a CPU cannot show: the products' precision must ask for more."""
    trace = jax.make_jaxpr(lambda *factors: jzeros(PLAIN, 1, *factors, E5M2))(*factors(PLAIN))
    found = [one.eqn.params["precision"] for one in operations(trace.jaxpr) if one.name == "dot_general"]
    fast, exact = ((lax.Precision[name],) * 2 for name in ("DEFAULT", "HIGHEST"))
    assert found == [fast, exact, exact]  # y, then the two gradients


def both(a, b, g):
    return [a * g, b + g]


@pytest.mark.parametrize(
    ("kernel", "f", "dtype"),
    [(True, identity, E4M3), (True, both, E5M2), (False, both, E4M3)],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_cast_its_transpose_and_its_largest_element(kernel, f, dtype, monkeypatch):
    monkeypatch.setattr(pl, "pallas_call", partial(pl.pallas_call, interpret=True))
    rng, parts, scale = np.random.default_rng(0), {identity: (1,), both: (2, 1)}[f], np.float32(4)
    xs = [rng.normal(size=(64, p, 256)).astype(jnp.bfloat16) for p in parts]
    xs[0][33, 0, 200] = 300.0  # out of e4m3's range at this scale
    columns = [np.asarray(x, np.float32)[:, p] for x in xs for p in range(x.shape[1])]
    expected = np.concatenate(columns if f is identity else both(*columns), 1)  # by NumPy
    assert matmul.supports_cast([x.shape for x in xs], expected.shape)

    @partial(jax.jit, static_argnums=0)
    def run(with_amax, *xs):
        if kernel:
            return matmul.tiled_cast_pair(f, *xs, scale, dtype=dtype, with_amax=with_amax)
        return cast_pair(f, xs, scale, dtype, with_amax)

    for with_amax in (False, True):
        found = run(with_amax, *xs)
        assert len(found) == 2 + with_amax
        x8, transposed = (np.asarray(x, np.float32) for x in found[:2])
        np.testing.assert_array_equal(transposed, x8.T)
        clipped = np.clip(expected * 4, -MOST[dtype], MOST[dtype]).astype(TYPES[dtype]).astype(np.float32)
        np.testing.assert_array_equal(x8, clipped)
        if with_amax:
            assert float(found[2]) == pytest.approx(np.abs(expected).max(), rel=1e-6)
