"""Pipelines whose stages are groups of devices that act as one: the losses, norms and parameters of one device.

The oracle (`helpers.tensor_models.reference`) is plain JAX.
"""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from helpers.sampling import some
from helpers.tensor_models import errors

import jzero
from jzero.errors import ConfigError

LAYOUTS = [
    ("nnx", "1f1b", {"pipe": 2, "tensor": 2, "accum": 4}),
    ("nnx", "zero_bubble", {"pipe": 2, "tensor": 2, "zero": 2, "stage": 3, "accum": 4}),
    ("llama", "zero_bubble", {"pipe": 2, "context": 2, "tensor": 2, "stage": 2, "accum": 4, "remat": "matmuls"}),
    ("llama", "1f1b", {"pipe": 2, "context": 2, "zero": 2, "stage": 3, "accum": 4, "remat": "full"}),
    ("llama", "gpipe", {"pipe": 2, "tensor": 2, "data": 2, "stage": 1, "accum": 4, "unroll": False}),
    ("four", "interleaved", {"pipe": 2, "tensor": 2, "stage": 1, "accum": 4}),
    ("four", "interleaved", {"pipe": 2, "context": 2, "zero": 2, "stage": 3, "accum": 4, "remat": "full"}),
    ("four", "interleaved", {"pipe": 2, "context": 2, "tensor": 2, "stage": 2, "accum": 2, "unroll": False}),
    ("layers", "1f1b", {"pipe": 2, "tensor": 2, "zero": 2, "stage": 3, "accum": 4}),
    ("layers", "zero_bubble", {"pipe": 4, "tensor": 2, "accum": 4, "remat": "matmuls"}),
    ("layers", "gpipe", {"pipe": 2, "context": 2, "zero": 2, "stage": 2, "accum": 4, "unroll": False}),
    ("layers", "interleaved", {"pipe": 2, "context": 2, "tensor": 2, "stage": 3, "accum": 4}),
]
CHUNKS = {"interleaved": 2}


@pytest.mark.parametrize(("name", "schedule", "layout"), some(LAYOUTS, [LAYOUTS[2]]))
def test_one_device_computes_the_same(name, schedule, layout):
    losses, parameters, *_ = errors(name, **layout, pipeline={"schedule": schedule, "chunks": CHUNKS.get(schedule, 1)})
    assert losses < 1e-6
    assert parameters < 2e-6


@pytest.mark.parametrize("axis", ["context", "tensor"])
def test_layers_in_no_stack_that_the_stages_divide(axis):
    layers = [jzero.LayerSpec(nnx.Linear, 8, width) for width in (8, 16)]
    layers = [layers[0], jnp.tanh, layers[1]]
    model = jzero.PipelineModule(layers, num_stages=2, loss_fn=lambda y, labels: ((y - labels) ** 2).mean())
    config = {"train_batch_size": 8, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    if axis == "tensor":
        config["tensor_parallel"] = {"dimensions": {"kernel": 1}}
    mesh = jzero.make_mesh(pipe=2, **{axis: 2}, devices=jax.devices())
    with pytest.raises(ConfigError, match=rf"mesh.{axis} = 2 with mesh.pipe = 2 and layers of .* not yet supported"):
        jzero.make_train_step(model, config, mesh=mesh)
