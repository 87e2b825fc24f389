"""cuDNN's fused attention in plain JAX, on CPUs, in float32 too; the backward pass counts the sums as they come."""

import jax
import jax.numpy as jnp
from jax._src.cudnn import fused_attention_stablehlo as cudnn
from jax.interpreters import mlir


def install():
    """Replace the kernels on CPUs, and let float32 pass."""
    cudnn.check_layout = lambda *args: None
    primitives = cudnn._dot_product_attention_fwd_p_wrapper, cudnn._dot_product_attention_bwd_p_wrapper
    for primitive, f in zip(primitives, (forward, backward), strict=True):
        mlir.register_lowering(primitive, mlir.lower_fun(f, multiple_results=True), platform="cpu")


def _by_head(x, layout):
    return (x if layout else x.swapaxes(1, 2)).astype(jnp.float32)


def _scores(q, k, bias, scale, mask_type, window):
    s = scale * jnp.einsum("bntc,bnsc->bnts", q, k)
    if bias.size:
        s += bias.astype(jnp.float32)
    ahead = jnp.arange(s.shape[2])[:, None] - jnp.arange(s.shape[3])
    if mask_type.name == "CAUSAL":
        s = jnp.where(ahead >= 0, s, -jnp.inf)
    return jnp.where(ahead < window, s, -jnp.inf) if window else s


def forward(q, k, v, bias, *rest, scale, mask_type, layout, sliding_window_length, is_training, **params):
    dtype = q.dtype
    q, k, v = (_by_head(x, layout) for x in (q, k, v))
    k, v = (jnp.repeat(x, q.shape[1] // x.shape[1], 1) for x in (k, v))
    s = _scores(q, k, bias, scale, mask_type, sliding_window_length)
    sums = jax.scipy.special.logsumexp(s, -1)
    out = jnp.einsum("bnts,bnsc->bntc", jnp.exp(s - sums[..., None]), v).astype(dtype)
    out = out if layout else out.swapaxes(1, 2)
    return [out, sums] if is_training else [out]


def backward(q, k, v, bias, *rest, scale, mask_type, layout, sliding_window_length, **params):
    *_, sums, output, gradient = rest
    like, kv_heads = (q, k, v), k.shape[1 if layout else 2]
    q, k, v, output, gradient = (_by_head(x, layout) for x in (q, k, v, output, gradient))
    assert sums.shape == q.shape[:3]
    assert output.shape == gradient.shape == q.shape
    k, v = (jnp.repeat(x, q.shape[1] // kv_heads, 1) for x in (k, v))
    p = jnp.exp(_scores(q, k, bias, scale, mask_type, sliding_window_length) - sums[..., None])
    ds = p * (jnp.einsum("bntc,bnsc->bnts", gradient, v) - (gradient * output).sum(-1, keepdims=True))
    dq, dk = scale * jnp.einsum("bnts,bnsc->bntc", ds, k), scale * jnp.einsum("bnts,bntc->bnsc", ds, q)
    dv = jnp.einsum("bnts,bntc->bnsc", p, gradient)
    dk, dv = (x.reshape(x.shape[0], kv_heads, -1, *x.shape[2:]).sum(2) for x in (dk, dv))
    found = [(x if layout else x.swapaxes(1, 2)).astype(y.dtype) for x, y in zip((dq, dk, dv), like, strict=True)]
    if not bias.size:
        return found
    shared = [d for d, n in enumerate(bias.shape) if n != ds.shape[d]]
    return [*found, ds.sum(shared, keepdims=True).astype(bias.dtype)]
