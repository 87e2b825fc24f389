"""Layers without experts in front of the stack, as in DeepSeek-V2 and V3."""

import dataclasses

import jax
import pytest
from helpers.mixture_models import CONFIG, batches, model

import jzero
from jzero.tracing.equations import operations


@pytest.mark.parametrize("policy", ["none", "matmuls", "full"])
def test_they_are_checkpointed_as_the_others(policy):
    """One of four layers is before the stack: its activations would stay alive until the end of the backward pass."""
    config = dataclasses.replace(CONFIG, num_layers=4, dense_layers=(0,))
    settings = {
        "train_batch_size": len(batches()[0]["inputs"]),
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "activation_checkpointing": {"policy": policy},
    }
    step = jzero.make_train_step(model(config), settings, mesh=jzero.make_mesh(zero=1, devices=jax.devices()[:1]))
    again = [one.scope for one in operations(step.trace(batches()[0]).jaxpr) if "rematted_computation" in one.scope]
    found = {part for part in ("prefix", "stack") for scope in again if part in scope}
    assert found == (set() if policy == "none" else {"prefix", "stack"})
