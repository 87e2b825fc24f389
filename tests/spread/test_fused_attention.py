"""The rules of cuDNN's attention: values and gradients of XLA's, with the kernels replaced by plain JAX on CPUs."""

from itertools import product

import jax
import numpy as np
import pytest
from helpers import attention_kernels
from helpers.cuda import needs_cuda_compiler
from helpers.sampling import some
from helpers.spreading import check

pytestmark = needs_cuda_compiler  # with which cuDNN comes, whose version JAX asks for


@pytest.fixture(autouse=True, scope="module")
def on_cpus():
    attention_kernels.install()


@jax.jit
def attention(q, k, v, *bias):
    return jax.nn.dot_product_attention(q, k, v, *bias, is_causal=True, implementation="cudnn")


# What the two axes divide: rows 0, the sequence 1, heads 2.
FORMS = {
    "rows": (0, None),
    "heads": (None, 2),
    "both": (0, 2),
    "sequence": (1, None),
    "ulysses": (1, 2),
    "deep": (1, 1),
}
CASES = list(product([4, 2, 1], FORMS, [None, 1, 4]))


def operands(heads, kv_heads, form, bias=None):
    rng = np.random.default_rng(0)
    shapes = [(2, 4, heads, 8), (2, 4, kv_heads, 8), (2, 4, kv_heads, 8)]
    arrays = [rng.normal(size=shape).astype(np.float16) for shape in shapes]
    if bias is not None:
        arrays.append(rng.normal(size=(1, bias, 4, 4)).astype(np.float16))
    keys = tuple(None if at == 2 and kv_heads == 1 else at for at in form)
    forms = [(form, False), (keys, False), (keys, False), ((None, None), False)]
    return arrays, forms[: len(arrays)]


@pytest.mark.parametrize(("kv_heads", "form", "bias"), some(CASES, [CASES[i] for i in (4, 20, 34, 51)]))
def test_attention(kv_heads, form, bias):
    group = check(attention, *operands(4, kv_heads, FORMS[form], bias), tolerance=2e-2)
    assert not group.traced.fallbacks


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_more_devices_than_key_value_heads(kv_heads):
    """Four devices, with one or two query heads each: two of them attend to the same key-value head."""
    arrays, forms = operands(8, kv_heads, (1, 0))
    group = check(attention, arrays, forms, tolerance=2e-2, degrees={"a": 4, "b": 2})
    assert not group.traced.fallbacks


def test_heads_that_the_axis_does_not_divide():
    """With a bias, which allows no ring, every device computes all heads, and the ledger records it."""
    arrays, forms = operands(6, 2, (1, None), bias=1)
    group = check(attention, arrays, forms, tolerance=2e-2, degrees={"a": 4, "b": 2})
    assert {fallback.primitive for fallback in group.traced.fallbacks} == {
        "dot_product_attention_fwd_wrapper", "dot_product_attention_bwd_wrapper"
    }  # fmt: skip
