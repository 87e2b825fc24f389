"""The loss of preferences is that of the paper, and of trl."""

import jax
import numpy as np
import pytest
from helpers.steps import mesh, settings
from scipy.special import log_softmax

import jzero
from jzero.data import Pairs
from models.byte_tokenizer import byte_tokenizer
from models.decoder import Decoder
from models.llama import preset
from models.preferences import PreferenceDecoder

pytestmark = pytest.mark.slow
pytest.importorskip("transformers")
PAIRS = [{"prompt": f"{i}?", "chosen": f" {i + 1}, my friend", "rejected": f" {i + 1}"} for i in range(8)]


def log_probabilities(module, rows):
    """Sum those of the tokens with a label, with plain Flax and SciPy in float64: [pairs, 2]."""
    sides = []
    for side in ("chosen", "rejected"):
        normal = log_softmax(np.asarray(module(rows[side]["inputs"]), np.float64), axis=-1)
        labels = rows[side]["labels"]
        found = np.take_along_axis(normal, np.maximum(labels, 0)[..., None], axis=-1)[..., 0]
        sides.append(np.where(labels >= 0, found, 0).sum(1))
    return np.stack(sides, 1)


def test_the_loss_is_trls():
    """-log sigmoid(beta * ((policy chosen - rejected) - (reference chosen - rejected))), and the rewards' margin.

    As in trl's DPOTrainer with loss_type "sigmoid"; the reference is another model here, so the loss is not log 2.
    """
    tokenizer = byte_tokenizer()
    rows = Pairs(PAIRS, tokenizer, length=64).rows(np.arange(8))
    shape = preset("tiny", num_layers=2, vocab_size=len(tokenizer))
    models = [jzero.from_flax(lambda rngs: Decoder(shape, rngs=rngs)) for _ in range(2)]
    params = [model.init(jax.random.key(seed)) for seed, model in enumerate(models)]
    policy, reference = (log_probabilities(model.module(p), rows) for model, p in zip(models, params, strict=True))
    margins = 0.1 * ((policy[:, 0] - policy[:, 1]) - (reference[:, 0] - reference[:, 1]))
    model = jzero.from_flax(lambda rngs: PreferenceDecoder(shape, rngs=rngs), has_aux=True)
    step = jzero.make_train_step(model, settings(8), mesh=mesh(8))
    batch = {**rows, "reference": reference.astype(np.float32)}
    loss, metrics = step.evaluate(step.init(jax.random.key(0), params[0]), batch)
    assert abs(margins).max() > 0.01
    assert float(loss) == pytest.approx(np.log1p(np.exp(-margins)).mean(), abs=1e-5)
    assert float(metrics["margin"]) == pytest.approx(margins.mean(), abs=1e-4)
    assert float(metrics["accuracy"]) == (margins > 0).mean()
