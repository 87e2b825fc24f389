"""The count of products in float32, against the GPU program that XLA makes of the step."""

import re

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from helpers.sampling import keep
from planner.test_gpus import needs_cuda_compiler

import jzero
from jzero.planner import gpu_devices, products
from models.vit import ViT, ViTConfig

CALL = re.compile(r'custom-call\(([^)]*)\).*custom_call_target="__(?:cublas|cudnn)')
DEFINITION = re.compile(r"^\s*(?:ROOT )?(%[\w.-]+) = \(?(\w+)\[", re.M)


def library_calls(hlo):
    """Count the products that cuBLAS and cuDNN compute, and those of them with a float32 operand."""
    dtypes = dict(DEFINITION.findall(hlo))
    operands = [[dtypes[name] for name in call.split(", ")[:2]] for call in CALL.findall(hlo)]
    return len(operands), sum("f32" in pair for pair in operands)


class Convolutions(nnx.Module):
    def __init__(self, rngs):
        self.first, self.second = (nnx.Conv(a, b, (3, 3), strides=2, rngs=rngs) for a, b in ((3, 32), (32, 64)))
        self.norms = nnx.List([nnx.BatchNorm(width, rngs=rngs) for width in (32, 64)])
        self.out = nnx.Linear(64, 128, rngs=rngs)

    def __call__(self, x):
        for layer, norm in zip((self.first, self.second), self.norms, strict=True):
            x = nnx.relu(norm(layer(x)))
        return self.out(x.mean((1, 2)))


def squares(net, batch):
    return ((net(batch["images"]) - 1) ** 2).mean()


MODELS = {
    "convolutions": lambda: jzero.from_flax(Convolutions, squares),
    "vit": lambda: jzero.from_flax(lambda rngs: ViT(ViTConfig(2, 64, 4, 128, image_size=32, patch_size=8), rngs=rngs)),
}
CASES = [("convolutions", "auto", 8, 0), ("convolutions", False, 8, 8), ("vit", "auto", 41, 0)]


@pytest.mark.gpu_compile
@needs_cuda_compiler
@pytest.mark.usefixtures("no_compilation_cache")
@pytest.mark.parametrize(("model", "auto_cast", "count", "float32"), keep(CASES, CASES[:1]))
def test_the_gpu_program_has_the_products_that_are_counted(model, auto_cast, count, float32):
    config = {
        "train_batch_size": 32,
        "bf16": {"enabled": True, "auto_cast": auto_cast},
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    }
    step = jzero.make_train_step(MODELS[model](), config, mesh=jzero.make_mesh(devices=gpu_devices("h200", 2)))
    images = jax.ShapeDtypeStruct((32, 32, 32, 3), jnp.float32)
    traced = step.trace({"images": images, "labels": jax.ShapeDtypeStruct((32,), jnp.int32)})
    found = products(traced)
    assert (found.count, found.float32) == (count, float32)
    assert library_calls(traced.lower().compile().as_text()) == (count, float32)
