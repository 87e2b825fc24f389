"""Layers of a PipelineModule that share parameters."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from helpers.layer_lists import BLOCK, EMBED, HEAD, KEY, TOKENS, attend, close, linear, pipeline, shapes
from helpers.sampling import keep

from jzero.pipeline.module import LayerSpec, TiedLayerSpec

MIDDLES = [[BLOCK] * 4, [LayerSpec(nnx.Linear, 8, 4), LayerSpec(nnx.Linear, 4, 8)]]


@pytest.mark.parametrize("middle", keep(MIDDLES, MIDDLES[1:]))
def test_tied(middle):
    model = pipeline(EMBED, *middle, HEAD, loss_fn=lambda logits, labels: (logits * labels).sum())
    params = model.init(KEY)
    ends = params["ends"] if model.stack else params
    assert shapes(ends["tied"]) == {"e/embedding": (16, 8)}
    assert set(ends.get("layers", {})) == (set() if model.stack else {"1", "2"})
    np.testing.assert_array_equal(
        ends["tied"]["e"]["embedding"], nnx.Embed(16, 8, rngs=nnx.Rngs(jax.random.fold_in(KEY, 0))).embedding[...]
    )
    labels = np.random.default_rng(0).normal(size=(2, 4, 16)).astype(np.float32)

    def untied(first, last, params):
        x = first[TOKENS]
        layers = [jax.tree.map(lambda w, i=i: w[i], params["stack"]) for i in range(4)] if model.stack else None
        for layer in layers or [params["layers"]["1"], params["layers"]["2"]]:
            x = linear(layer, x)
        return (x @ last.T * labels).sum()

    loss, gradients = jax.jit(jax.value_and_grad(model.loss))(params, (TOKENS, labels), None)
    e = ends["tied"]["e"]["embedding"]
    expected, (first, last) = jax.jit(jax.value_and_grad(untied, (0, 1)))(e, e, params)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    np.testing.assert_allclose(
        (gradients["ends"] if model.stack else gradients)["tied"]["e"]["embedding"], first + last, rtol=1e-5, atol=1e-5
    )


class Head(nnx.Module):
    def __init__(self, *, rngs):
        self.inner = nnx.Embed(16, 8, rngs=rngs)
        self.bias = nnx.Param(jnp.ones(16))

    def __call__(self, x):
        return self.inner.attend(x) + self.bias[...]


class Entry(nnx.Module):
    def __init__(self, *, rngs):
        self.inner, self.scale = nnx.Embed(16, 8, rngs=rngs), nnx.Param(jnp.full(8, 2.0))

    def __call__(self, tokens):
        return self.inner(tokens) * self.scale[...]


@pytest.mark.parametrize("attr", ["inner.embedding", "inner", ["inner.embedding"]])
def test_tied_weight_attr(attr):
    model = pipeline(*(TiedLayerSpec("e", c, tied_weight_attr=attr) for c in (Entry, Head)))
    params = model.init(KEY)
    assert shapes(params) == {"layers/0/scale": (8,), "layers/1/bias": (16,), "tied/e/inner/embedding": (16, 8)}
    table = params["tied"]["e"]["inner"]["embedding"]
    close(model.module(params)(TOKENS), 2 * table[TOKENS] @ table.T + 1)


def test_tied_linen():
    layers = [TiedLayerSpec("e", linen.Embed, 16, 8, forward_fn=f) for f in (None, attend)]
    model = pipeline(*layers, example_batch=(TOKENS, np.ones((2, 4, 16))))
    params = model.init(KEY)
    assert shapes(params) == {"tied/e/embedding": (16, 8)}
    table = params["tied"]["e"]["embedding"]
    close(model.module(params)(TOKENS), table[TOKENS] @ table.T)
