"""A layer of a decoder: attention, a feed-forward layer, and their norms.

Shape suffixes are those of models/decoder.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jzero.tiling import tiled

from .attention import Cache, Carry, Decoding, Hidden
from .decoder_attention import Attention, LatentAttention, initial, linear_of
from .decoder_config import DecoderConfig
from .lora import FusedLinear
from .moe import Mixture
from .norms import make_norm


def gelu(x: jax.Array) -> jax.Array:
    """GELU without the approximation by tanh."""
    return nnx.gelu(x, approximate=False)


ACTIVATIONS = {"silu": nnx.silu, "gelu": gelu, "gelu_tanh": nnx.gelu}


class MLP(nnx.Module):
    """down(activation(gate(x)) * up(x)), where one product makes gate and up, or down(activation(up(x)))."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        self.activation, self.gated, c = ACTIVATIONS[config.activation], config.gated, config
        if c.gated:  # with silu this is SwiGLU
            widths, more = {"gate_proj": 1, "up_proj": 1}, {"use_bias": c.mlp_bias, "kernel_init": initial(c)}
            self.gate_up = FusedLinear(c.d_model, (2, c.d_ff), 0, widths, c.lora, rngs=rngs, **more)
        else:
            self.up = linear_of(c, c.d_model, c.d_ff, "up_proj", rngs, bias=c.mlp_bias)
        self.down = linear_of(c, c.d_ff, c.d_model, "down_proj", rngs, last=True, bias=c.mlp_bias)

    def __call__(self, x_BSD: jax.Array) -> jax.Array:
        if not self.gated:
            return self.down(self.activation(self.up(x_BSD)))
        gate_BSF, up_BSF = (part_BS1F.squeeze(2) for part_BS1F in self.gate_up(x_BSD))
        return self.down(self.activation(gate_BSF) * up_BSF)


class Block(nnx.Module):
    """One decoder layer."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        self.config, before, after = config, config.norms != "after", config.norms in ("after", "both")
        if before:
            self.attention_norm = make_norm(config, rngs)
        self.attention = (LatentAttention if config.latent else Attention)(config, rngs=rngs)
        if before and config.parallel != "one_norm":
            self.mlp_norm = make_norm(config, rngs)
        if config.mixture:
            starts = {"init": initial(config), "last": initial(config, last=True)}
            activation = ACTIVATIONS[config.activation]
            self.mlp: Any = Mixture(config.mixture, config.d_model, activation, rngs=rngs, **starts)
        else:
            self.mlp = MLP(config, rngs=rngs)
        if after:
            self.attention_post_norm, self.mlp_post_norm = make_norm(config, rngs), make_norm(config, rngs)

    def __call__(self, x: Hidden) -> Hidden:
        carry = x if isinstance(x, Carry) else Carry(x)
        h_BSD = self.before("attention", carry.x_BSD)
        y_BSD = self.attention(carry._replace(x_BSD=h_BSD))
        x_BSD, metrics = self.feed_forward(carry.x_BSD, h_BSD, y_BSD, self.config.mlp_tiles)
        if not isinstance(x, Carry):
            return x_BSD
        metrics = carry.metrics if metrics is None else jax.tree.map(jnp.add, carry.metrics, metrics)
        return Carry(x_BSD, carry.segments_BS, None if carry.layer is None else carry.layer + 1, metrics)

    def decode(self, x: Decoding, cache: Cache) -> tuple[Decoding, Cache]:
        """Run the layer in generation."""
        h_BSD = self.before("attention", x.x_BSD)
        y_BSD, cache = self.attention.decode(x._replace(x_BSD=h_BSD), cache)
        layer = None if x.layer is None else x.layer + 1
        return x._replace(x_BSD=self.feed_forward(x.x_BSD, h_BSD, y_BSD)[0], layer=layer), cache

    def feed_forward(
        self, x_BSD: jax.Array, h_BSD: jax.Array, y_BSD: jax.Array, tiles: int = 1
    ) -> tuple[jax.Array, dict[str, jax.Array] | None]:
        """Add attention's output y_BSD to x_BSD, and then the feed-forward layer's; return its metrics too.

        Args:
          h_BSD: attention's input.
        """
        parallel = {"one_norm": h_BSD, "two_norms": x_BSD}
        # One line for each sum: a plan shows collectives by their lines.
        x_BSD = self.after("attention", x_BSD + self.scaled("attention", y_BSD))
        source_BSD = parallel.get(self.config.parallel or "", x_BSD)
        y_BSD = tiled(lambda x_BSD: self.mlp(self.before("mlp", x_BSD)), source_BSD, tiles)
        y_BSD, metrics = y_BSD if isinstance(y_BSD, tuple) else (y_BSD, None)
        return self.after("mlp", x_BSD + self.scaled("mlp", y_BSD)), metrics

    def before(self, part: str, x_BSD: jax.Array) -> jax.Array:
        """Return the input of a part of the layer."""
        return x_BSD if self.config.norms == "sum" else self.normed(f"{part}_norm", x_BSD)

    def scaled(self, part: str, y_BSD: jax.Array) -> jax.Array:
        """Return what a part of the layer adds."""
        return times(self.normed(f"{part}_post_norm", y_BSD), self.config.residual_scale)

    def after(self, part: str, x_BSD: jax.Array) -> jax.Array:
        """Return the sum after a part of the layer."""
        return self.normed(f"{part}_norm", x_BSD) if self.config.norms == "sum" else x_BSD

    def normed(self, name: str, x_BSD: jax.Array) -> jax.Array:
        """Apply a norm, if this family has it."""
        return getattr(self, name)(x_BSD) if hasattr(self, name) else x_BSD


class LayerGroup(nnx.Module):
    """Layers that follow each other and differ: before the stack, or as one layer of it."""

    def __init__(self, configs: Iterable[DecoderConfig], *, rngs: nnx.Rngs):
        self.layers = nnx.List([Block(config, rngs=rngs) for config in configs])

    def __call__(self, x: Hidden) -> Hidden:
        for layer in self.layers:
            x = layer(x)
        return x

    def decode(self, x: Decoding, caches: Sequence[Cache]) -> tuple[Decoding, Sequence[Cache]]:
        """Run the layers in generation, each with its cache."""
        new = []
        for layer, cache in zip(self.layers, caches, strict=True):
            x, cache = layer.decode(x, cache)
            new.append(cache)
        return x, new


def times(x: jax.Array, scale: float) -> jax.Array:
    return x if scale == 1 else x * jnp.asarray(scale, x.dtype)
