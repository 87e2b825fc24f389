"""A transformer block with LayerNorm and biases, as in GPT-2, BERT and ViT; the rows of its weights in files.

Shape suffixes: B batch, S sequence, D model width, H heads, C width of a head, F feed-forward width.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import jax
from flax import nnx

from jzero.attention_kernels import Attend
from jzero.errors import ConfigError

from .attention import Carry, Decoding, Hidden, KVCache, attend, same_segment
from .downloads import Download
from .lora import FusedLinear


def gelu(x: jax.Array) -> jax.Array:
    """GELU without the approximation by tanh."""
    return nnx.gelu(x, approximate=False)


@dataclass(frozen=True)
class BlockConfig:
    """The shape of a stack of blocks, and the `download` it comes from. A subclass says what its blocks are like."""

    num_layers: int
    d_model: int
    num_heads: int
    d_ff: int
    norm_eps: float = 1e-12
    attention: Attend = "auto"
    download: Download | None = field(default=None, compare=False, repr=False, kw_only=True)

    causal: ClassVar[bool]
    pre_norm: ClassVar[bool]  # norms before attention and feed-forward layers; otherwise after the sums
    activation: ClassVar[Any]  # a function
    row_length: ClassVar[int | None] = None  # rows are padded after as many positions; None: they are not

    def __post_init__(self):
        if self.d_model % self.num_heads:
            raise ConfigError(
                f"{type(self).__name__}: num_heads = {self.num_heads} must divide d_model = {self.d_model}"
            )

    @property
    def head_dim(self) -> int:
        return self.d_model // self.num_heads


class Attention(nnx.Module):
    """Multi-head attention; one product makes queries, keys and values."""

    def __init__(self, config: Any, *, rngs: nnx.Rngs):
        self.config = c = config
        shape, widths = (3, c.num_heads, c.head_dim), {"query": 1, "key": 1, "value": 1}
        self.qkv = FusedLinear(c.d_model, shape, 0, widths, rngs=rngs, kernel_init=nnx.initializers.normal(0.02))
        self.out = linear(c.d_model, c.d_model, rngs, 0.02 / (2 * c.num_layers) ** 0.5)

    def __call__(self, x_BSD: jax.Array, segments_BS: jax.Array | None) -> jax.Array:
        q_BSHC, k_BSHC, v_BSHC = self.heads(x_BSD)
        return self.attend(q_BSHC, k_BSHC, v_BSHC, same_segment(segments_BS), causal=self.config.causal)

    def decode(self, x: Decoding, cache: KVCache) -> tuple[jax.Array, KVCache]:
        """Attend within a prompt, or from one token to all before it; return (y_BSD, the cache with their keys)."""
        q_BSHC, k_BSHC, v_BSHC = self.heads(x.x_BSD)
        cache = cache.put(k_BSHC, v_BSHC, x.column)
        if x.x_BSD.shape[1] > 1:
            return self.attend(q_BSHC, k_BSHC, v_BSHC, same_segment(x.segments_BS), causal=True), cache
        return self.attend(q_BSHC, *cache, x.visible_B11T(cache.k_BTKC.shape[1])), cache

    def heads(self, x_BSD: jax.Array) -> list[jax.Array]:
        """Compute queries, keys and values [B, S, H, C]."""
        return [part_BS1HC.squeeze(2) for part_BS1HC in self.qkv(x_BSD)]

    def attend(
        self, q_BSHC: jax.Array, k_BTHC: jax.Array, v_BTHC: jax.Array, mask_B1ST: jax.Array | None,
        causal: bool = False,
    ) -> jax.Array:  # fmt: skip
        c = self.config
        o_BSHC = attend(q_BSHC, k_BTHC, v_BTHC, mask_B1ST, choice=c.attention, causal=causal, length=c.row_length)
        return self.out(o_BSHC.reshape(*o_BSHC.shape[:2], -1))


class MLP(nnx.Module):
    """down(activation(up(x)))."""

    def __init__(self, config: Any, *, rngs: nnx.Rngs):
        self.activation, c = config.activation, config
        self.up = linear(c.d_model, c.d_ff, rngs)
        self.down = linear(c.d_ff, c.d_model, rngs, 0.02 / (2 * c.num_layers) ** 0.5)

    def __call__(self, x_BSD: jax.Array) -> jax.Array:
        return self.down(self.activation(self.up(x_BSD)))


class Block(nnx.Module):
    """Attention and a feed-forward layer, each with a norm and a residual sum."""

    def __init__(self, config: Any, *, rngs: nnx.Rngs):
        self.pre_norm = config.pre_norm
        self.attention, self.mlp = Attention(config, rngs=rngs), MLP(config, rngs=rngs)
        self.attention_norm, self.mlp_norm = norm(config, rngs), norm(config, rngs)

    def __call__(self, x: Hidden) -> Hidden:
        x_BSD, segments_BS, *_ = x if isinstance(x, Carry) else Carry(x)
        if self.pre_norm:
            x_BSD = x_BSD + self.attention(self.attention_norm(x_BSD), segments_BS)
            x_BSD = x_BSD + self.mlp(self.mlp_norm(x_BSD))
        else:
            x_BSD = self.attention_norm(x_BSD + self.attention(x_BSD, segments_BS))
            x_BSD = self.mlp_norm(x_BSD + self.mlp(x_BSD))
        return x_BSD if segments_BS is None else Carry(x_BSD, segments_BS)

    def decode(self, x: Decoding, cache: KVCache) -> tuple[Decoding, KVCache]:
        """Run the layer in generation, with norms before attention and feed-forward layer."""
        y_BSD, cache = self.attention.decode(x._replace(x_BSD=self.attention_norm(x.x_BSD)), cache)
        x_BSD = x.x_BSD + y_BSD
        return x._replace(x_BSD=x_BSD + self.mlp(self.mlp_norm(x_BSD))), cache


def stacked(config: Any, rngs: nnx.Rngs) -> Block:
    """Make the layer stack; each parameter has a leading layer axis."""

    @nnx.split_rngs(splits=config.num_layers)
    @nnx.vmap
    def blocks(rngs: nnx.Rngs) -> Block:
        return Block(config, rngs=rngs)

    return blocks(rngs)


def run(stack: Block, x: Hidden) -> jax.Array:
    """Apply all layers, without remat or parallelism."""
    graph, layers = nnx.split(stack)
    x, _ = jax.lax.scan(lambda x, layer: (nnx.merge(graph, layer)(x), None), x, layers)
    return plain(x)


def plain(x: Hidden) -> jax.Array:
    """Return x_BSD."""
    return x.x_BSD if isinstance(x, Carry) else x


# The cut of the parameter that contains several matrices, see `jzero.model`.
FUSED: dict[str, tuple[int, tuple[int, ...]]] = {"stack/attention/qkv/kernel": (1, (1, 1, 1))}

# The dimensions that the mesh axis `tensor` divides, see `jzero.model`: heads and the feed-forward width.
DIVIDED = {
    "qkv/kernel": 2, "qkv/bias": 1, "attention/out/kernel": 0, "mlp/up/kernel": 1, "mlp/up/bias": 0,
    "mlp/down/kernel": 0,
}  # fmt: skip


def linear(d_in: int, d_out: int, rngs: nnx.Rngs, std: float = 0.02) -> nnx.Linear:
    return nnx.Linear(d_in, d_out, kernel_init=nnx.initializers.normal(std), rngs=rngs)


def norm(config: Any, rngs: nnx.Rngs) -> nnx.LayerNorm:
    return nnx.LayerNorm(config.d_model, epsilon=config.norm_eps, rngs=rngs)


def check_length(length: int, most: int) -> None:
    """Raise a ConfigError if there are more tokens than positions: a lookup would repeat the last one's."""
    if length > most:
        raise ConfigError(f"a row has {length} tokens, but the model has {most} positions: shorten the rows")


# ------------------------------------------------------------------------------------------- rows of weights_layout


def linear_rows(name: str, leaf: str, transposed: bool = True) -> list[dict]:
    """Describe a linear layer."""
    return [
        {"name": f"{name}.weight", "leaf": f"{leaf}/kernel", "transposed": transposed},
        {"name": f"{name}.bias", "leaf": f"{leaf}/bias"},
    ]


def norm_rows(name: str, leaf: str) -> list[dict]:
    return [{"name": f"{name}.weight", "leaf": f"{leaf}/scale"}, {"name": f"{name}.bias", "leaf": f"{leaf}/bias"}]


def qkv_rows(names: tuple[str, str, str], d_model: int) -> list[dict]:
    """Describe the queries, keys and values of the stack, of three names."""
    leaf, rows = "stack/attention/qkv", []
    for i, name in enumerate(names):
        kernel = {"slices": [[1, i, i + 1]], "transposed": [1, 2, 3, 0], "reshape": [d_model, d_model]}
        rows.append({"name": f"{name}.weight", "leaf": f"{leaf}/kernel", **kernel})
        rows.append({"name": f"{name}.bias", "leaf": f"{leaf}/bias", "slices": [[0, i, i + 1]], "reshape": [d_model]})
    return rows
