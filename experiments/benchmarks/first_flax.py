"""The models of `first.py` in plain Flax, as people write them: layers of Flax alone, in the parameters' dtype."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

import jzero
from experiments.resnet import STAGES, ResNet

Build = Callable[[nnx.Rngs], nnx.Module]


class Size(NamedTuple):
    """The shape of a model and of its batch.

    Attributes:
      rows, length: of a batch; the length is that of tokens, or an image's side.
      vocab: words or classes.
      layers, d, heads, kv_heads, d_ff: of a transformer; a U-Net's levels, and channels of the first.
      frames: of the audio beside the tokens.
      attention: a function as `jax.nn.dot_product_attention`, which is what plain Flax calls.
    """

    rows: int
    length: int
    vocab: int = 1000
    layers: int = 12
    d: int = 768
    heads: int = 12
    kv_heads: int = 12
    d_ff: int = 3072
    dropout: float = 0.0
    frames: int = 0
    attention: Callable[..., jax.Array] = jzero.attention

    @property
    def vocab_rows(self) -> int:
        """The rows of the embedding: a multiple of 128."""
        return -(-self.vocab // 128) * 128


# By default nnx.Embed computes in the dtype that its table has when it is made: in float32, as all layers after it.
Embed = partial(nnx.Embed, dtype=jnp.bfloat16)


class Block(nnx.Module):
    """A layer with norms before its parts (GPT-2, ViT, Whisper) or after the sums (BERT).

    Args:
      tanh: GELU by tanh.
      cross: attention to another sequence, too.
    """

    def __init__(
        self, size: Size, rngs: nnx.Rngs, causal: bool = False, before: bool = True, tanh: bool = False,
        cross: bool = False,
    ):  # fmt: skip
        d, linear = size.d, partial(nnx.Linear, rngs=rngs)
        self.heads, self.causal, self.before, self.tanh = size.heads, causal, before, tanh
        self.attend = size.attention
        self.norm1, self.norm2 = (nnx.LayerNorm(d, rngs=rngs) for _ in range(2))
        self.qkv, self.out = linear(d, 3 * d), linear(d, d)
        self.up, self.down = linear(d, size.d_ff), linear(size.d_ff, d)
        self.dropout = nnx.Dropout(size.dropout, rngs=rngs)
        if cross:
            self.norm3, self.query, self.kv, self.cross = (
                nnx.LayerNorm(d, rngs=rngs),
                *(linear(d, n) for n in (d, 2 * d, d)),
            )

    def split(self, y: jax.Array, n: int) -> list[jax.Array]:
        return [x.reshape(*x.shape[:2], self.heads, -1) for x in jnp.split(y, n, axis=-1)]

    def attention(self, x: jax.Array) -> jax.Array:
        y = self.attend(*self.split(self.qkv(x), 3), is_causal=self.causal)
        return self.dropout(self.out(y.reshape(x.shape)))

    def mlp(self, x: jax.Array) -> jax.Array:
        return self.dropout(self.down(nnx.gelu(self.up(x), approximate=self.tanh)))

    def __call__(self, x: jax.Array, other: jax.Array | None = None) -> jax.Array:
        if not self.before:
            x = self.norm1(x + self.attention(x))
            return self.norm2(x + self.mlp(x))
        x = x + self.attention(self.norm1(x))
        if other is not None:
            y = self.attend(*self.split(self.query(self.norm3(x)), 1), *self.split(self.kv(other), 2))
            x = x + self.dropout(self.cross(y.reshape(x.shape)))
        return x + self.mlp(self.norm2(x))


class Text(nnx.Module):
    """GPT-2, or BERT with its head for masked words: tokens -> logits."""

    def __init__(self, size: Size, rngs: nnx.Rngs, causal: bool):
        d = size.d
        self.causal, self.dropout = causal, nnx.Dropout(size.dropout, rngs=rngs)
        self.embed, self.positions = (Embed(n, d, rngs=rngs) for n in (size.vocab_rows, size.length))
        self.layers = nnx.List([Block(size, rngs, causal, causal, causal) for _ in range(size.layers)])
        self.norm = nnx.LayerNorm(d, rngs=rngs)
        if not causal:
            self.types, self.first = Embed(2, d, rngs=rngs), nnx.LayerNorm(d, rngs=rngs)
            self.dense, self.bias = nnx.Linear(d, d, rngs=rngs), nnx.Param(jnp.zeros(size.vocab_rows))

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens) + self.positions(jnp.arange(tokens.shape[1]))
        if not self.causal:
            x = self.first(x + self.types(jnp.zeros_like(tokens)))
        x = self.dropout(x)
        for layer in self.layers:
            x = layer(x)
        if self.causal:
            return self.embed.attend(self.norm(x))
        return self.embed.attend(self.norm(nnx.gelu(self.dense(x), approximate=False))) + self.bias[...]


class ViT(nnx.Module):
    """Images -> logits, by patches of 16 pixels at a side."""

    def __init__(self, size: Size, rngs: nnx.Rngs):
        self.patches = nnx.Conv(3, size.d, (16, 16), strides=(16, 16), rngs=rngs)
        n, normal = (size.length // 16) ** 2 + 1, nnx.initializers.normal(0.02)
        self.first, self.positions = (
            nnx.Param(jnp.zeros((1, 1, size.d))),
            nnx.Param(normal(rngs.params(), (1, n, size.d))),
        )
        self.layers = nnx.List([Block(size, rngs) for _ in range(size.layers)])
        self.norm, self.head = nnx.LayerNorm(size.d, rngs=rngs), nnx.Linear(size.d, size.vocab, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        x = self.patches(images).reshape(len(images), -1, self.norm.num_features)
        first = jnp.broadcast_to(self.first[...], (len(x), *self.first.shape[1:]))
        x = jnp.concatenate([first, x], 1) + self.positions[...]
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x)[:, 0])


class Whisper(nnx.Module):
    """Audio [B, frames, 80] and tokens -> logits, with half as many positions as frames in the encoder."""

    def __init__(self, size: Size, rngs: nnx.Rngs):
        d = size.d
        self.convs = nnx.List([nnx.Conv(n, d, (3,), strides=s, rngs=rngs) for n, s in ((80, 1), (d, 2))])
        self.places = Embed(size.frames // 2, d, rngs=rngs)
        self.encoder = nnx.List([Block(size, rngs) for _ in range(size.layers)])
        self.embed, self.positions = (Embed(n, d, rngs=rngs) for n in (size.vocab_rows, size.length))
        self.decoder = nnx.List([Block(size, rngs, causal=True, cross=True) for _ in range(size.layers)])
        self.norm1, self.norm2 = (nnx.LayerNorm(d, rngs=rngs) for _ in range(2))

    def __call__(self, audio: jax.Array, tokens: jax.Array) -> jax.Array:
        audio = audio.astype(self.convs[0].kernel.dtype)
        for conv in self.convs:
            audio = nnx.gelu(conv(audio), approximate=False)
        audio = audio + self.places(jnp.arange(audio.shape[1]))
        for layer in self.encoder:
            audio = layer(audio)
        audio, x = self.norm1(audio), self.embed(tokens) + self.positions(jnp.arange(tokens.shape[1]))
        for layer in self.decoder:
            x = layer(x, audio)
        return self.embed.attend(self.norm2(x))


class Llama(nnx.Module):
    """Tokens -> logits; with `lora` its matrices are frozen in bfloat16 beside adapters of rank 16."""

    def __init__(self, size: Size, rngs: nnx.Rngs, lora: bool = False):
        linear = partial(nnx.LoRALinear, lora_rank=16, param_dtype=jnp.bfloat16) if lora else nnx.Linear
        kept = {"param_dtype": jnp.bfloat16} if lora else {}
        self.embed = Embed(size.vocab, size.d, **kept, rngs=rngs)
        linear, norm = partial(linear, use_bias=False, rngs=rngs), partial(nnx.RMSNorm, size.d, **kept, rngs=rngs)
        self.layers = nnx.List([LlamaBlock(size, linear, norm) for _ in range(size.layers)])
        self.norm = norm()
        self.head = nnx.Linear(size.d, size.vocab, use_bias=False, **kept, rngs=rngs) if lora else nnx.data(None)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.embed.attend(self.norm(x)) if self.head is None else self.head(self.norm(x))


class LlamaBlock(nnx.Module):
    def __init__(self, size: Size, linear: Callable[[int, int], nnx.Module], norm: Callable[[], nnx.Module]):
        self.heads, self.attend, d = size.heads, size.attention, size.d
        kv = d // size.heads * size.kv_heads
        self.norm1, self.norm2 = norm(), norm()
        self.q, self.k, self.v, self.o = (linear(d, n) for n in (d, kv, kv, d))
        self.gate, self.up, self.down = linear(d, size.d_ff), linear(d, size.d_ff), linear(size.d_ff, d)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.norm1(x)
        q, k, v = (f(y).reshape(*y.shape[:2], -1, y.shape[-1] // self.heads) for f in (self.q, self.k, self.v))
        x = x + self.o(self.attend(rotate(q), rotate(k), v, is_causal=True).reshape(x.shape))
        y = self.norm2(x)
        return x + self.down(nnx.silu(self.gate(y)) * self.up(y))


def rotate(x: jax.Array, theta: float = 500_000.0) -> jax.Array:
    """Rotate the halves of [B, S, H, C] by their position."""
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None, None] * theta ** (-jnp.arange(half) / half)
    (a, b), cos, sin = jnp.split(x.astype(jnp.float32), 2, axis=-1), jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)


class UNet(nnx.Module):
    """Images -> logits of every pixel (Ronneberger et al., arXiv:1505.04597, padded, with group norms)."""

    def __init__(self, size: Size, rngs: nnx.Rngs):
        widths = [size.d * 2**i for i in range(size.layers)]
        pairs = list(pairwise(widths))
        self.downs = nnx.List([Double(a, b, rngs) for a, b in [(3, size.d), *pairs]])
        self.ups = nnx.List([nnx.ConvTranspose(b, a, (2, 2), strides=(2, 2), rngs=rngs) for a, b in pairs[::-1]])
        self.joined = nnx.List([Double(b, a, rngs) for a, b in pairs[::-1]])
        self.head = nnx.Conv(size.d, size.vocab, (1, 1), rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        skips: list[jax.Array] = []
        for down in self.downs:
            x = down(nnx.max_pool(x, (2, 2), strides=(2, 2)) if skips else x)
            skips.append(x)
        for up, joined, skip in zip(self.ups, self.joined, skips[-2::-1], strict=True):
            x = joined(jnp.concatenate([skip, up(x)], -1))
        return self.head(x)


class Double(nnx.Module):
    def __init__(self, a: int, b: int, rngs: nnx.Rngs):
        self.convs = nnx.List([nnx.Conv(n, b, (3, 3), rngs=rngs) for n in (a, b)])
        self.norms = nnx.List([nnx.GroupNorm(b, num_groups=8, rngs=rngs) for _ in range(2)])

    def __call__(self, x: jax.Array) -> jax.Array:
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = nnx.silu(norm(conv(x)))
        return x


def resnet(size: Size, rngs: nnx.Rngs) -> nnx.Module:
    """A ResNet-50, of fewer blocks in a small run; its statistics would make the convolutions float32."""
    return ResNet(rngs, size.vocab, stages=STAGES[: size.layers], width=size.d, dtype=jnp.bfloat16)


FAMILIES: dict[str, Callable[[Size, Any], nnx.Module]] = {
    "gpt2": partial(Text, causal=True), "bert": partial(Text, causal=False), "vit": ViT, "whisper": Whisper,
    "llama": Llama, "lora": partial(Llama, lora=True), "resnet": resnet, "unet": UNet,
}  # fmt: skip
