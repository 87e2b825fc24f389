"""The Llama and the MLP against formulas written out here in NumPy."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers.sampling import keep

import jzero
from models.llama import PRESETS, Llama, LlamaConfig, preset
from models.mlp import MLP, cross_entropy

TINY = LlamaConfig(2, 32, 4, 2, 48, vocab_size=64)
TOKENS = np.random.default_rng(0).integers(0, 64, (3, 12)).astype(np.int32)


def norm(x, scale):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + TINY.norm_eps) * scale


def rope(x):
    """Turn the pairs (i, i + C / 2) of x [..., S, C] by the angle position * theta ** (-2 i / C)."""
    half = x.shape[-1] // 2
    angle = np.arange(x.shape[-2])[:, None] * TINY.rope_theta ** (-np.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], -1)


def attention(x, weights):
    """Grouped queries: of a head of keys and values [S, 2, C], two heads of queries."""
    qkv = np.einsum("bsd,dkgc->bkgsc", x, weights["qkv"]["kernel"])
    q, k, v = rope(qkv[:, :, :2]), rope(qkv[:, :, 2]), qkv[:, :, 3]
    scores = np.einsum("bkgsc,bktc->bkgst", q, k) / np.sqrt(8)
    scores = np.exp(np.where(np.tri(x.shape[1], dtype=bool), scores, -np.inf))
    heads = np.einsum("bkgst,bktc->bskgc", scores / scores.sum(-1, keepdims=True), v)
    return heads.reshape(x.shape) @ weights["out"]["kernel"]


def llama(params, tokens):
    """Return the logits [B, S, V] in float64."""
    params = jax.tree.map(lambda w: np.asarray(w, np.float64), params)
    ends, stack = params["ends"], params["stack"]
    x = ends["embed"][tokens]
    for i in range(TINY.num_layers):
        layer = jax.tree.map(lambda w, i=i: w[i], stack)
        x = x + attention(norm(x, layer["attention_norm"]["scale"]), layer["attention"])
        gate, up = np.moveaxis(
            np.einsum("bsd,dif->bsif", norm(x, layer["mlp_norm"]["scale"]), layer["mlp"]["gate_up"]["kernel"]), 2, 0
        )
        x = x + (gate / (1 + np.exp(-gate)) * up) @ layer["mlp"]["down"]["kernel"]
    head = ends["head"]["kernel"] if "head" in ends else ends["embed"].T
    return norm(x, ends["norm"]["scale"]) @ head


@pytest.mark.parametrize("tied", keep([True, False], [True]))
def test_llama(tied):
    """The logits, and the sum of the losses of the tokens that have a label."""
    config = dataclasses.replace(TINY, tied=tied)
    model, rng = jzero.from_flax(lambda rngs: Llama(config, rngs=rngs)), np.random.default_rng(0)
    # Norms would start at one: other numbers show more.
    params = jax.tree.map(
        lambda x: (0.2 * rng.normal(size=x.shape) + (x.ndim < 3 and x.shape[-1] == 32)).astype(np.float32),
        jax.eval_shape(model.init, jax.random.key(0)),
    )
    expected = llama(params, TOKENS)
    logits = jax.jit(lambda params: model.module(params)(TOKENS))(params)
    assert logits.dtype == jnp.float32
    np.testing.assert_allclose(logits, expected, rtol=1e-5, atol=1e-5)
    labels = np.where(np.arange(12) < np.array([[12], [3], [7]]), np.roll(TOKENS, -1, 1), -1)
    total, count = jax.jit(model.loss)(params, {"inputs": TOKENS, "labels": labels}, None)
    losses = np.log(np.exp(expected).sum(-1)) - np.take_along_axis(expected, labels[..., None], -1)[..., 0]
    np.testing.assert_allclose(total, losses[labels >= 0].sum(), rtol=1e-5)
    assert count == 12 + 3 + 7


def test_presets_are_what_their_names_say():
    sizes = {name: preset(name, vocab_size=128_256).num_parameters / 1e9 for name in ("8b", "70b", "405b")}
    assert sizes == pytest.approx({"8b": 8.03, "70b": 70.55, "405b": 405.85}, abs=0.01)  # Llama 3's model card
    assert preset("1b").num_parameters == pytest.approx(1.1e9, rel=0.03)
    assert preset("125m").num_parameters == pytest.approx(110e6, rel=0.01)
    for config in PRESETS.values():
        params = jax.eval_shape(lambda config=config: nnx.state(Llama(config, rngs=nnx.Rngs(0)), nnx.Param))
        assert config.num_parameters == sum(x.size for x in jax.tree.leaves(params))
    with pytest.raises(ValueError, match="'9b' is unknown; choose one of tiny, 125m"):
        preset("9b")


def test_flops_per_token():
    # 6 x (weights that multiply: per layer qkv 32 x 64, out 32 x 32, gate_up 32 x 96, down 48 x 32, two norms 64;
    # the last norm 32, the head 32 x 64) + attention: 6 x layers x width x sequence (two products, half of it masked).
    layer = 32 * 64 + 32 * 32 + 32 * 96 + 48 * 32 + 64
    expected = 6 * (2 * layer + 32 + 32 * 64) + 6 * 2 * 32 * 100
    assert TINY.flops_per_token(100) == expected
    assert dataclasses.replace(TINY, tied=True).flops_per_token(100) == expected


@pytest.mark.parametrize(("length", "chunk", "window"), [(100, 12.5, 21.875), (60, 11.25, 19.791_666), (20, 10, 10)])
def test_flops_of_chunks_and_windows(length, chunk, window):
    """A token of a chunk of 25 sees half of it; one of a sliding window all 25, but for the first tokens."""
    of_a_key = 6 * 2 * (32 + 32)  # two layers, with queries' products of 32 and values' of 32
    for chunked, keys in ((True, chunk), (False, window)):
        made = dataclasses.replace(TINY, window=25, chunked=chunked)
        found = made.flops_per_token(length) - TINY.flops_per_token(length)
        assert found == pytest.approx(of_a_key * (keys - length / 2), rel=1e-6)


def test_mlp():
    model = jzero.from_flax(MLP, cross_entropy)
    params = model.init(jax.random.key(0))
    assert sum(x.size for x in jax.tree.leaves(params)) == 784 * 128 + 128 + 128 * 10 + 10
    images, labels = np.random.default_rng(0).normal(size=(5, 28, 28)).astype(np.float32), np.arange(5)
    hidden = np.maximum(images.reshape(5, 784) @ params["fc1"]["kernel"], 0)  # the biases start at zero
    logits = hidden @ params["fc2"]["kernel"]
    np.testing.assert_allclose(model.module(params)(images), logits, rtol=1e-5, atol=1e-5)
    expected = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
    np.testing.assert_allclose(model.loss(params, (images, labels), None), expected, rtol=1e-5)
