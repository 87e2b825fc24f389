"""Between the forward and the backward pass: activations on the host, and weights that nothing keeps."""

import os

import jax
import numpy as np
import pytest
from helpers.offload import BF16, BOTH, PARAM, run, scans
from layouts import LAYOUTS, Net, batch, settings

import jzero
from jzero.layout import offload


@pytest.mark.parametrize("policy", ["full", "matmuls"])
def test_activations_between_the_passes_lie_on_the_host(policy):
    section = {"policy": policy, "cpu_checkpointing": True}
    config = settings(LAYOUTS["stage3"], activation_checkpointing=section, stack={})
    step = jzero.make_train_step(Net(), config)
    assert not step.setup.passes.facts.unrolled
    kept = [x.aval for eqn in scans(step.trace(batch(0)).jaxpr.jaxpr) for x in eqn.outvars]
    rows = config["train_micro_batch_size_per_gpu"]
    of_layers = [x for x in kept if x.shape[:2] == (4, rows)]  # [layers, rows, features]
    assert of_layers
    assert {x.memory_space for x in of_layers} == {jax.memory.Space.Host}


@pytest.mark.slow
def test_activations_on_the_host_change_no_number():
    for policy in ("full", "matmuls"):
        _, expected = run("stage3", {}, activation_checkpointing={"policy": policy}, stack={"unroll": False})
        more = {"activation_checkpointing": {"policy": policy, "cpu_checkpointing": True}}
        np.testing.assert_allclose(run("stage3", {}, **more)[1], expected, rtol=1e-6)


@pytest.mark.parametrize("on_host", [True, False])
def test_jax_may_pin_most_of_the_hosts_memory_for_activations(on_host, monkeypatch):
    monkeypatch.setattr(offload, "memory_gb", lambda: 100)
    monkeypatch.delenv(offload.LIMIT, raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setattr(offload, "backends_are_initialized", lambda: False)
    offload.allow_pinned(jzero.Config.load({"activation_checkpointing": {"cpu_checkpointing": on_host}}))
    assert os.environ.pop(offload.LIMIT, None) == ("45" if on_host else None)  # for each of two GPUs


@pytest.mark.parametrize(
    ("more", "key"),
    [
        ({"zero_optimization": {"stage": 3, **PARAM}}, "zero_optimization.offload_param"),
        ({"activation_checkpointing": {"cpu_checkpointing": True}}, "activation_checkpointing.cpu_checkpointing"),
    ],
)
def test_an_unrolled_stack_would_keep_it_on_the_device(more, key):
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0, **more.get("zero_optimization", {})}
    with pytest.raises(jzero.ConfigError, match=f"stack.unroll = true with {key}: "):
        jzero.make_train_step(
            Net(), settings(LAYOUTS["stage3"], stack={"unroll": True}, **more | {"zero_optimization": zero})
        )


def test_one_gpu_keeps_no_layers_weights_from_forward_to_backward():
    """Under offload_param they come again. Weights are [layers 4, 8, 8], activations [layers 4, rows 2, 8]."""
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0}

    def kept(offloaded):
        more = {"train_micro_batch_size_per_gpu": 2, "stack": {"unroll": False}}
        config = settings(LAYOUTS["one"], zero_optimization=zero | offloaded, **more, **BF16)
        step = jzero.make_train_step(Net(), config, mesh=jzero.make_mesh(devices=jax.devices()[:1]))
        layers = [eqn for eqn in scans(step.trace(batch(0)).jaxpr.jaxpr) if eqn.params["length"] == 4]
        forward = next(eqn for eqn in layers if not eqn.params["reverse"])
        return [x.aval.shape for x in forward.outvars]

    assert (4, 2, 8) in kept(BOTH)
    assert (4, 8, 8) not in kept(BOTH)
