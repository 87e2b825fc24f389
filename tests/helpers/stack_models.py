"""Small language models as people write them: the GPT of Flax's tutorial, with its layers in a list or scanned."""

import jax.numpy as jnp
import numpy as np
from flax import nnx
from helpers.plain_flax import cross_entropy

VOCAB, LENGTH, WIDTH, HEADS, LAYERS, ROWS = 32, 8, 16, 2, 2, 16
TOKENS = np.random.default_rng(0).integers(0, VOCAB, (2, ROWS, LENGTH + 1)).astype(np.int32)
BATCHES = [{"x": tokens[:, :-1], "y": tokens[:, 1:]} for tokens in TOKENS]


def causal_mask(length):
    return jnp.tril(jnp.ones((length, length), bool))[None, None]


class Block(nnx.Module):
    def __init__(self, rngs, rate=0.0, hidden=3 * WIDTH):
        self.attention = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=rngs)
        self.norm1 = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, hidden, kernel_init=nnx.initializers.normal(0.02), rngs=rngs)
        self.down = nnx.Linear(hidden, WIDTH, rngs=rngs)
        self.norm2 = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(rate, rngs=rngs)

    def __call__(self, x, mask, training=True):
        x = self.norm1(x + self.dropout(self.attention(x, mask=mask), deterministic=not training))
        return self.norm2(x + self.down(nnx.relu(self.up(x))))


class Small(nnx.Module):
    """A layer that compiles fast: the mean of the visible tokens, and two matrices."""

    def __init__(self, rngs, rate=0.0, hidden=3 * WIDTH):
        self.up, self.down = nnx.Linear(WIDTH, hidden, rngs=rngs), nnx.Linear(hidden, WIDTH, rngs=rngs)
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)

    def __call__(self, x, mask, training=True):
        visible = mask[:, 0].astype(x.dtype)
        return x + self.down(nnx.relu(self.up(self.norm((visible / visible.sum(-1, keepdims=True)) @ x))))


class GPT(nnx.Module):
    block = Block

    def __init__(self, rngs, rate=0.0):
        self.tokens = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.positions = nnx.Embed(LENGTH, WIDTH, rngs=rngs)
        self.blocks = self.make_blocks(rngs, rate)
        self.out = nnx.Linear(WIDTH, VOCAB, use_bias=False, rngs=rngs)

    def make_blocks(self, rngs, rate):
        return nnx.List([self.block(rngs, rate) for _ in range(LAYERS)])

    def run(self, x, mask):
        for block in self.blocks:
            x = block(x, mask, training=True)
        return x

    def __call__(self, tokens):
        mask = causal_mask(tokens.shape[1])
        x = self.tokens(tokens) + self.positions(jnp.arange(tokens.shape[1])[None])
        return self.out(self.run(x, mask))


class ScannedGPT(GPT):
    def make_blocks(self, rngs, rate):
        return nnx.vmap(lambda rngs: self.block(rngs, rate))(rngs.split(LAYERS))

    def run(self, x, mask):
        return nnx.scan(lambda x, block: block(x, mask), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.blocks)


class SmallGPT(GPT):
    block = Small


class SmallScannedGPT(ScannedGPT):
    block = Small


def loss_fn(model, batch):
    return cross_entropy(model(batch["x"]), batch["y"])
