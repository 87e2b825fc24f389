"""Layers without experts in front of the stack, as in DeepSeek-V2 and V3."""

import dataclasses

import jax
import pytest
from helpers.mixture_models import CONFIG, batches, model

import jzero


@pytest.mark.parametrize(("policy", "checkpoints"), [("none", 0), ("matmuls", 4), ("full", 4)])
def test_they_are_checkpointed_as_the_others(policy, checkpoints):
    """One of four layers is before the stack: its activations would stay alive until the end of the backward pass."""
    config = dataclasses.replace(CONFIG, num_layers=4, dense_layers=(0,))
    settings = {
        "train_batch_size": len(batches()[0]["inputs"]),
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "activation_checkpointing": {"policy": policy},
    }
    step = jzero.make_train_step(model(config), settings, mesh=jzero.make_mesh(zero=1, devices=jax.devices()[:1]))
    assert str(step.trace(batches()[0]).jaxpr).count("= remat2[") == checkpoints
