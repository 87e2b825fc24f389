"""The norms of decoders and encoders, float32 inside."""

import jax
import jax.numpy as jnp
from flax import nnx

from .decoder_config import DecoderConfig


def unit_rms(x: jax.Array, epsilon: float, axes: tuple[int, ...] = (-1,)) -> jax.Array:
    """Divide vectors by the roots of their mean squares over the axes, in float32."""
    wide = x.astype(jnp.float32)
    return wide * jax.lax.rsqrt((wide**2).mean(axes, keepdims=True) + epsilon)


class Norm(nnx.Module):
    """A norm that Flax lacks: its scale has another shape, or the parameter is the scale minus one."""

    def __init__(
        self,
        shape: tuple[int, ...],  # of the scale; [K, G, C] for queries or keys [B, S, K, G, C] with one for each head
        epsilon: float,
        axes: tuple[int, ...] = (-1,),  # of the mean: of a head (Cohere, StableLM), or of all heads together (OLMo 2)
        *,
        centered: bool = False,
        offset: int = 0,  # of the scale from its parameter: 1 for Gemma
    ):
        self.epsilon, self.axes, self.centered, self.offset = epsilon, axes, centered, offset
        self.scale = nnx.Param(jnp.full(shape, 1.0 - offset))

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        if self.centered:
            wide = wide - wide.mean(self.axes, keepdims=True)
        unit, scale = unit_rms(wide, self.epsilon, self.axes), self.scale[...].astype(jnp.float32)
        return (unit * (1 + scale if self.offset else scale)).astype(x.dtype)


def make_norm(config: DecoderConfig, rngs: nnx.Rngs, width: int | None = None) -> nnx.Module:
    width, epsilon = width or config.d_model, config.norm_eps
    if config.norm == "rms":
        return nnx.RMSNorm(width, epsilon=epsilon, rngs=rngs)
    if config.norm == "offset_rms":
        return Norm((width,), epsilon, offset=1)
    return nnx.LayerNorm(width, epsilon=epsilon, use_bias=config.norm == "layer", rngs=rngs)


def query_key_norms(config: DecoderConfig, rngs: nnx.Rngs) -> tuple[nnx.Module, nnx.Module]:
    """Make the norms of queries and keys: of [..., C] if all heads share a scale, otherwise of [..., K, G, C]."""
    c = config
    if c.qk_norm == "shared":
        return make_norm(c, rngs, c.head_dim), make_norm(c, rngs, c.head_dim)
    axes = (-1,) if c.qk_norm == "each" else (-3, -2, -1)
    shapes = (c.num_kv_heads, c.num_groups, c.head_dim), (c.num_kv_heads, 1, c.head_dim)
    queries, keys = (Norm(shape, c.norm_eps, axes, centered=c.norm.startswith("layer")) for shape in shapes)
    return queries, keys
