"""ResNets v1.5 in Flax (He et al., arXiv:1512.03385; strides in the 3x3 convolutions)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

STAGES = 3, 4, 6, 3  # of a ResNet-50
MACS = 4.09e9  # multiply-adds of a ResNet-50's forward pass over a 224 x 224 image


class Bottleneck(nnx.Module):
    def __init__(self, features: int, width: int, stride: int, rngs: nnx.Rngs, dtype: Any):
        conv = partial(nnx.Conv, use_bias=False, dtype=dtype, rngs=rngs)
        norm = partial(nnx.BatchNorm, momentum=0.9, dtype=dtype, rngs=rngs)
        self.convs = nnx.List(
            [
                conv(features, width, (1, 1)),
                conv(width, width, (3, 3), strides=stride),
                conv(width, 4 * width, (1, 1)),
            ]
        )
        zeros = nnx.initializers.zeros_init()
        self.norms = nnx.List([norm(width), norm(width), norm(4 * width, scale_init=zeros)])
        self.shortcut = nnx.data(None)
        if features != 4 * width:
            self.shortcut = nnx.Sequential(conv(features, 4 * width, (1, 1), strides=stride), norm(4 * width))

    def __call__(self, x: jax.Array) -> jax.Array:
        y = x
        for conv, norm in zip(self.convs, self.norms, strict=True):
            y = norm(conv(nnx.relu(y) if conv is not self.convs[0] else y))
        return nnx.relu(y + (x if self.shortcut is None else self.shortcut(x)))


class ResNet(nnx.Module):
    """Images [B, height, width, channels] -> logits [B, classes] in float32; a ResNet-50 by default.

    Args:
      stages: blocks of each stage; every stage but the first halves the height and the width.
      width: channels after the stem, for images of `channels` channels.
      small: a stem that keeps the size, for images of a few dozen pixels (the paper's section 4.2).
      dtype: what Flax's layers compute in; default: the parameters' dtype, which jzero chooses.
    """

    def __init__(
        self,
        rngs: nnx.Rngs,
        classes: int = 1000,
        *,
        stages: Sequence[int] = STAGES,
        width: int = 64,
        channels: int = 3,
        small: bool = False,
        dtype: Any = None,
    ):
        kernel, stride = ((3, 3), 1) if small else ((7, 7), 2)
        self.small = small
        self.stem = nnx.Conv(channels, width, kernel, strides=stride, use_bias=False, dtype=dtype, rngs=rngs)
        self.norm = nnx.BatchNorm(width, momentum=0.9, dtype=dtype, rngs=rngs)
        blocks, features = [], width
        for i, depth in enumerate(stages):
            for j in range(depth):
                blocks.append(Bottleneck(features, width * 2**i, 2 if i and not j else 1, rngs, dtype))
                features = 4 * width * 2**i
        self.blocks = nnx.List(blocks)
        self.head = nnx.Linear(features, classes, dtype=dtype, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        x = self.norm(self.stem(images))
        # The ReLU after the pooling, which it commutes with: a quarter as much is kept. Before it, XLA also writes
        # zeros as large as its operand in the forward pass, and keeps them for the pooling's gradient.
        x = nnx.relu(x if self.small else nnx.max_pool(x, (3, 3), strides=(2, 2), padding="SAME"))
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(axis=(1, 2))).astype(jnp.float32)
