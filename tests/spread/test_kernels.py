"""The rules of cuDNN's attention: values and gradients of XLA's, with the kernels replaced by plain JAX on CPUs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.cuda import needs_cuda_compiler
from helpers.spreading import DEGREES, check
from jax._src.cudnn import fused_attention_stablehlo as cudnn
from jax.interpreters import mlir

pytestmark = needs_cuda_compiler  # with which cuDNN comes, whose version JAX asks for


def plain(q, k, v, bias):
    wide = [x.astype(jnp.float32) for x in (q, k, v)]
    bias = bias.astype(jnp.float32) if bias.size else None
    return jax.nn.dot_product_attention(*wide, bias, is_causal=True, implementation="xla").astype(q.dtype)


def forward(q, k, v, bias, *rest, is_training, **params):
    sums = jnp.zeros((q.shape[0], q.shape[2], q.shape[1]), jnp.float32)
    return [plain(q, k, v, bias), sums] if is_training else [plain(q, k, v, bias)]


def backward(q, k, v, bias, *rest, **params):
    *_, sums, output, gradient = rest
    assert sums.shape == (q.shape[0], q.shape[2], q.shape[1])
    assert output.shape == gradient.shape == q.shape
    gradients = jax.vjp(plain, q, k, v, bias)[1](gradient)
    return list(gradients if bias.size else gradients[:3])


@pytest.fixture(autouse=True, scope="module")
def on_cpus():
    primitives = cudnn._dot_product_attention_fwd_p_wrapper, cudnn._dot_product_attention_bwd_p_wrapper
    for primitive, f in zip(primitives, (forward, backward), strict=True):
        mlir.register_lowering(primitive, mlir.lower_fun(f, multiple_results=True), platform="cpu")


@jax.jit
def attention(q, k, v, *bias):
    return jax.nn.dot_product_attention(q, k, v, *bias, is_causal=True, implementation="cudnn")


ROWS, HEADS, BOTH = ((0, None), False), ((None, 2), False), ((0, 2), False)


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("form", [ROWS, HEADS, BOTH], ids=["rows", "heads", "both"])
@pytest.mark.parametrize("bias", [None, 1, 4])
def test_attention(kv_heads, form, bias):
    rng = np.random.default_rng(0)
    shapes = [(2, 4, 4, 8), (2, 4, kv_heads, 8), (2, 4, kv_heads, 8)]
    arrays = [rng.normal(size=shape).astype(np.float16) for shape in shapes]
    if bias is not None:
        arrays.append(rng.normal(size=(1, bias, 4, 4)).astype(np.float16))
    keys = form if kv_heads > 1 or form is ROWS else ((form[0][0], None), False)
    forms = [form, keys, keys, ((None,) * len(DEGREES), False)][: len(arrays)]
    group = check(attention, arrays, forms, tolerance=2e-2)
    assert not group.ledger.fallbacks
