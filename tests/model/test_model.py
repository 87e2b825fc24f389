"""Sizes and FLOPs of Llamas, whose logits tests/weights/test_families.py compares, and the MLP, against formulas."""

import dataclasses

import jax
import numpy as np
import pytest
from flax import nnx
from helpers.drawn import random_params
from helpers.plain_flax import dense

import jzero
from models.llama import PRESETS, Llama, LlamaConfig, preset
from models.mlp import MLP, cross_entropy

TINY = LlamaConfig(2, 32, 4, 2, 48, vocab_size=64)


def test_presets_are_what_their_names_say():
    sizes = {name: preset(name, vocab_size=128_256).num_parameters / 1e9 for name in ("8b", "70b", "405b")}
    assert sizes == pytest.approx({"8b": 8.03, "70b": 70.55, "405b": 405.85}, abs=0.01)  # Llama 3's model card
    assert preset("1b").num_parameters == pytest.approx(1.1e9, rel=0.03)
    assert preset("125m").num_parameters == pytest.approx(110e6, rel=0.01)
    for config in (PRESETS["tiny"], PRESETS["125m"]):  # fewer key heads; a tied head
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
    # A token of a chunk of 25 sees half of it; one of a sliding window all 25, but for the first tokens.
    of_a_key = 6 * 2 * (32 + 32)  # two layers, with queries' products of 32 and values' of 32
    for chunked, length, keys in ((True, 100, 12.5), (True, 60, 11.25), (False, 100, 21.875), (False, 20, 10)):
        made = dataclasses.replace(TINY, window=25, chunked=chunked)
        found = made.flops_per_token(length) - TINY.flops_per_token(length)
        assert found == pytest.approx(of_a_key * (keys - length / 2), rel=1e-6)


def test_mlp():
    model = jzero.from_flax(MLP, cross_entropy)
    params = random_params(model)
    assert sum(x.size for x in jax.tree.leaves(params)) == 784 * 128 + 128 + 128 * 10 + 10
    images, labels = np.random.default_rng(0).normal(size=(5, 28, 28)).astype(np.float32), np.arange(5)
    hidden = np.maximum(dense(params["fc1"], images.reshape(5, 784)), 0)
    logits = dense(params["fc2"], hidden)
    run = jax.jit(lambda params, batch: (model.module(params)(batch[0]), model.loss(params, batch, None)))
    found, loss = run(params, (images, labels))
    np.testing.assert_allclose(found, logits, rtol=1e-5, atol=1e-5)
    expected = np.log(np.exp(logits).sum(1)) - logits[np.arange(5), labels]
    np.testing.assert_allclose(loss, expected.mean(), rtol=1e-5)
