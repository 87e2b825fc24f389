"""Embedding and cross-entropy divided over a mesh axis, against NumPy, for every integer dtype that tokens come in."""

import chex
import jax
import numpy as np
import optax
import pytest
from helpers.sampling import keep
from helpers.steps import mesh, settings, started
from jax.sharding import PartitionSpec as P

import jzero
from jzero.pipeline import vocab_parallel
from models.llama import Llama, LlamaConfig

STAGES, WIDTH = 2, 4
# Vocabularies with more rows than the tokens' dtype can count: arithmetic in that dtype wraps around.
TYPES = [("uint8", 264), ("int8", 256), ("int16", 50_304), ("uint16", 65_664), ("int32", 264), ("uint32", 264)]


def whole_and_divided(function, in_specs, rows, *args):
    """Run `function` on one device, and on two that hold half of a vocabulary of `rows` each."""
    stages = jax.sharding.Mesh(jax.devices()[:STAGES], "pipe")

    def inside(*args):
        with vocab_parallel.parallel("pipe", {rows}):
            return function(*args)

    divided = jax.shard_map(inside, mesh=stages, in_specs=in_specs, out_specs=P(), check_vma=False)
    return jax.jit(lambda *args: (function(*args), divided(*args)))(*args)


@pytest.mark.parametrize(("dtype", "rows"), keep(TYPES, [TYPES[i] for i in (0, 2, 4)]))
def test_the_rows_and_labels_that_numpy_takes(dtype, rows):
    rng = np.random.default_rng(0)
    x, head = rng.normal(size=(48, WIDTH)).astype(np.float32), rng.normal(size=(WIDTH, rows)).astype(np.float32)
    # 48 tokens from one end of the dtype, or of the vocabulary, to the other.
    info = np.iinfo(dtype)
    tokens = np.linspace(max(info.min, -rows), min(info.max, rows - 1), 48).astype(np.int64)
    table, narrow = np.ascontiguousarray(head.T), tokens.astype(dtype)
    for found in whole_and_divided(vocab_parallel.embed, (P("pipe"), P()), rows, table, narrow):
        np.testing.assert_array_equal(found, table[tokens])

    logits = x.astype(np.float64) @ head
    losses = np.log(np.exp(logits).sum(-1)) - logits[np.arange(48), tokens]
    expected = losses[tokens >= 0].sum(), (tokens >= 0).sum()
    specs = P(), P(None, "pipe"), P()
    for found in whole_and_divided(vocab_parallel.cross_entropy, specs, rows, x, head, narrow):
        np.testing.assert_allclose(found, expected, rtol=1e-6)


class OfLogits(Llama):
    def suffix(self, x, batch):
        losses = optax.softmax_cross_entropy_with_integer_labels(self.outputs(x), batch["labels"])
        return (losses * batch["weights"]).mean()


@pytest.mark.slow
def test_a_loss_of_logits_has_its_gradient_in_a_pipeline():
    shape, rng = LlamaConfig(2, 16, 2, 1, 24, vocab_size=32, logit_softcap=3.0), np.random.default_rng(0)
    tokens = rng.integers(0, 32, (4, 9)).astype(np.int32)
    batch = {"inputs": tokens[:, :-1], "labels": tokens[:, 1:], "weights": rng.random((4, 8)).astype(np.float32)}
    model = jzero.from_flax(lambda rngs: OfLogits(shape, rngs=rngs))
    step, state = started(model, settings(4, accum=2), mesh(1, pipe=2))
    found, metrics = step.gradients(state, batch)

    def plain(params):
        logits = model.module(params)(batch["inputs"])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])
        return (losses * batch["weights"]).mean()

    loss, expected = jax.value_and_grad(plain)(jax.device_get(state.params))
    assert float(metrics["loss"]) == pytest.approx(float(loss), rel=1e-6)
    chex.assert_trees_all_close(jax.device_get(found), expected, rtol=1e-4, atol=1e-6)
