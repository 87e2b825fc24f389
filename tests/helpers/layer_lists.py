"""What the tests of lists of layers share."""

from functools import lru_cache

import chex
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from helpers.plain_flax import cross_entropy

from jzero.pipeline.module import LayerSpec, PipelineModule, TiedLayerSpec
from jzero.tree import named

X = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
Y = np.random.default_rng(1).normal(size=(4, 2)).astype(np.float32)
KEY = jax.random.key(0)
BLOCK = LayerSpec(nnx.Linear, 8, 8)


def mean_square(outputs, labels):
    return ((outputs - labels) ** 2).mean()


def pipeline(*layers, **options):
    return PipelineModule(layers, options.pop("num_stages", None), **{"loss_fn": mean_square, **options})


def shapes(params):
    return {name: x.shape for name, x in named(params).items()}


def close(a, b):
    chex.assert_trees_all_close(a, b, rtol=1e-6, atol=1e-6)


class Residual(nnx.Module):
    def __init__(self, width, rate, *, rngs):
        self.linear, self.dropout = nnx.Linear(width, width, rngs=rngs), nnx.Dropout(rate, rngs=rngs)

    def __call__(self, x):
        return x + self.dropout(jnp.tanh(self.linear(x)))


def attend(module, x):
    return module.attend(x)


TOKENS = np.arange(8).reshape(2, 4)
EMBED, HEAD = (TiedLayerSpec("e", nnx.Embed, 16, 8, forward_fn=f) for f in (None, attend))


def start(x):
    return {"h": x["x"].astype(jnp.float32), "mask": x["x"] > 0, "ids": x["ids"], "half": x["x"].astype(jnp.bfloat16)}


class Wide(nnx.Module):
    """Other shapes and another tree; integers and bools that must come through exactly."""

    def __init__(self, d_in, d_out, *, rngs):
        self.linear, self.dropout = nnx.Linear(d_in, d_out, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        h = self.dropout(jnp.tanh(self.linear(jnp.where(x["mask"].any(), x["h"], 0))))
        return {**x, "h": h, "more": (x["ids"] // 2, h[:, :1] * x["half"][:, :1].astype(h.dtype))}


def finish(x):
    assert x["ids"].dtype == jnp.uint32
    assert x["mask"].dtype == bool
    return x["h"] + x["more"][1] + (x["ids"] == np.uint32(2**32 - 1))[:, None] + (x["more"][0] == 2**31 - 1)[:, None]


@lru_cache
def layers(kind):
    """Tied ends around four layers alike, with dropout, or five; or layers not alike, with integers and masks."""
    if kind != "different":
        alike = [LayerSpec(Residual, 8, 0.5)] * {"four": 4, "five": 5}[kind]
        return pipeline(EMBED, *alike, HEAD, loss_fn=cross_entropy)
    return pipeline(start, *(LayerSpec(Wide, *size) for size in ((3, 16), (16, 16), (16, 2))), finish)


def batch_of_layers(kind, rows):
    rng = np.random.default_rng(0)
    if kind != "different":
        return tuple(rng.integers(0, 16, (2, rows, 8)).astype(np.int32))
    x = {"x": rng.normal(size=(rows, 3)).astype(np.float32), "ids": rng.integers(0, 2**32, rows, np.uint32)}
    return x, np.full((rows, 2), 9, np.float32)  # far off: no loss that cancels
