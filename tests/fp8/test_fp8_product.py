"""Products in fp8 against float64 products of factors that NumPy and ml_dtypes round."""

from functools import partial
from itertools import product

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from helpers.sampling import sample
from jax import lax

from jzero.kernels.fp8.matmul import fp8_dot_general
from jzero.kernels.fp8.quantized import E4M3, E5M2, GRADIENTS, cast8, quantize_weight, scale_of
from jzero.kernels.fusion.chains import form_of

MOST = {E4M3: 448.0, E5M2: 57344.0}
TYPES = {E4M3: ml_dtypes.float8_e4m3fn, E5M2: ml_dtypes.float8_e5m2}
BF16 = 2.0**-8

# letters of x, w and y, as in einsum
ORDERS = {
    "x w": "tk,kn->tn",
    "x w^T": "tk,nk->tn",
    "w x": "kn,tk->nt",
    "w^T x^T": "nk,kt->nt",
    "heads out": "bsd,dhc->bshc",
    "heads in": "bshc,hcd->bsd",
    "heads last": "bshc,dhc->bsd",
    "contracted first": "kbs,kn->bsn",
    "weight of heads first": "dhc,bsd->hcbs",
    "reordered": "bchs,hcd->bsd",
}
WEIGHTS = {"w x": 0, "w^T x^T": 0, "weight of heads first": 0}
SIZES = {"t": 12, "k": 16, "n": 20, "b": 2, "s": 6, "d": 24, "h": 4, "c": 8}


def rounded(x, dtype):
    """Multiply by the largest power of two that keeps x in range, round, and divide; in float64."""
    x = np.asarray(x, np.float64)
    scale = 2.0 ** np.floor(np.log2(MOST[dtype] / np.abs(x).max()))
    return (x * scale).astype(np.float32).astype(TYPES[dtype]).astype(np.float64) / scale


def numbers_of(letters):
    (a, b), out = letters.split("->")[0].split(","), letters.split("->")[1]
    shared = [c for c in a if c in b]
    assert [c for c in a + b if c not in shared] == list(out)
    return ((tuple(map(a.index, shared)), tuple(map(b.index, shared))), ((), ()))


def factors(letters, seed=0):
    rng = np.random.default_rng(seed)
    names = (*letters.split("->")[0].split(","), letters.split("->")[1])
    scales = 3.0, 0.02, 1e-4
    drawn = (s * rng.normal(size=[SIZES[c] for c in name]) for s, name in zip(scales, names, strict=True))
    return [jnp.asarray(x, jnp.bfloat16) for x in drawn]


def jzeros(letters, weight, a, b, g, gradients, trained=True):
    """y and the gradients of both factors."""
    numbers = numbers_of(letters)
    form = form_of(numbers, (a.ndim, b.ndim), weight)
    assert form is not None

    @jax.jit
    def run(x, place, g):
        def product(x, place):
            w = quantize_weight((a, b)[weight], (), jnp.bfloat16, gradients)
            return fp8_dot_general(x, w.used(w.x8, place), form, jnp.bfloat16, {})

        y, pull = jax.vjp(product, x, place)
        return y, *pull(g)

    x, place = (a, b)[1 - weight], jnp.zeros((a, b)[weight].shape, jnp.bfloat16) if trained else None
    y, dx, dw = run(x, place, g)
    return y, *((dw, dx) if weight == 0 else (dx, dw))


def close(found, expected):
    """Within the rounding of the result to bfloat16, and of sums in float32."""
    assert found.dtype == jnp.bfloat16
    found = np.asarray(found, np.float64)
    assert np.abs(found - expected).max() < BF16 * np.abs(expected).max()
    assert np.linalg.norm(found - expected) < BF16 / 2 * np.linalg.norm(expected)


@pytest.mark.parametrize(("order", "fp8_format"), sample(product(ORDERS, ["hybrid", "e4m3"]), strength=1))
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


def test_a_frozen_weight_has_no_gradient():
    a, b, g = factors("tk,kn->tn")
    y, dx, dw = jzeros("tk,kn->tn", 1, a, b, g, E5M2, trained=False)
    assert dw is None
    close(y, np.einsum("tk,kn->tn", rounded(a, E4M3), rounded(b, E4M3)))
    close(dx, np.einsum("tn,kn->tk", rounded(g, E5M2), rounded(b, E4M3)))


@pytest.mark.parametrize(
    "letters", ["btk,bkn->btn", "tkc,knc->tn", "k,k->"], ids=["batch", "weight contracted apart", "no rows"]
)
def test_other_products_have_no_form(letters):
    a, b = letters.split("->")[0].split(",")
    shared = [c for c in a if c in b and c not in letters.split("->")[1]]
    batch = [c for c in a if c in b and c not in shared]
    numbers = tuple((tuple(map(a.index, cs)), tuple(map(b.index, cs))) for cs in (shared, batch))
    assert form_of(numbers, (len(a), len(b)), 1) is None


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_the_scale_is_the_largest_power_of_two_that_fits(dtype):
    most = MOST[dtype]
    for largest in (1.0, 7.0, most, most / 2, np.nextafter(np.float32(most), np.float32(1e9)), 3e-20, 1e20):
        scale = float(scale_of(jnp.float32(largest), dtype))
        assert np.log2(scale) == round(np.log2(scale))
        assert float(np.float32(largest)) * scale <= most < 2 * float(np.float32(largest)) * scale


def test_scales_of_nothing_and_of_what_is_not_finite():
    assert float(scale_of(jnp.float32(0), E4M3)) == 2.0**100  # and its inverse is a normal bfloat16
    assert float(scale_of(jnp.float32(1e-38), E4M3)) == 2.0**100
    assert all(np.isnan(scale_of(jnp.float32(x), E5M2)) for x in (np.inf, np.nan))
    assert not np.asarray(cast8(jnp.zeros((4, 4), jnp.bfloat16), scale_of(jnp.float32(0), E4M3), E4M3)).any()


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("where", ["x", "w", "g"])
def test_what_is_not_finite_ends_as_nan(where, value):
    """A saturated infinity or NaN would look like any other number; the step must be skipped."""
    operands = dict(zip("xwg", factors("tk,kn->tn"), strict=True))
    operands[where] = operands[where].at[1, 2].set(value)
    y, dx, dw = jzeros("tk,kn->tn", 1, *operands.values(), E5M2)
    for result, of in ((y, "xw"), (dx, "gw"), (dw, "xg")):
        assert bool(jnp.isnan(result).all()) == (where in of)


def test_zeros_have_zero_products():
    x, w, g = factors("tk,kn->tn")
    y, dx, dw = jzeros("tk,kn->tn", 1, jnp.zeros_like(x), w, jnp.zeros_like(g), E5M2)
    assert not any(v.any() for v in (y, dx, dw))


def test_a_weight_used_otherwise_is_the_rounded_one_with_its_gradient():
    _, w, _ = factors("tk,kn->tn")
    stored = quantize_weight(w.astype(jnp.float32), (), jnp.bfloat16, E5M2)
    np.testing.assert_array_equal(np.asarray(stored.dequantized(), np.float64), rounded(w, E4M3))
    place = jnp.zeros(w.shape, jnp.bfloat16)
    dw = jax.grad(lambda place: (stored.used(stored.x8, place).dequantized() * 3).sum())(place)
    assert (np.asarray(dw) == 3).all()
    assert stored.x8.dtype == E4M3


def test_gradients_are_summed_exactly():
    """Hopper's fast mode sums in about 14 bits, which a CPU cannot show: the products' precision must ask for more."""

    def precisions(jaxpr):
        for eqn in jaxpr.eqns:
            if eqn.primitive.name == "dot_general":
                yield eqn.params["precision"]
            for inner in jax.tree.leaves(list(eqn.params.values())):
                if hasattr(inner, "jaxpr") or hasattr(inner, "eqns"):
                    yield from precisions(getattr(inner, "jaxpr", inner))

    run = partial(jzeros, "tk,kn->tn", 1, gradients=E5M2)
    fast, exact = ((lax.Precision[name],) * 2 for name in ("DEFAULT", "HIGHEST"))
    found = list(precisions(jax.make_jaxpr(run)(*factors("tk,kn->tn")).jaxpr))
    assert found == [fast, exact, exact]  # y, then the two gradients
