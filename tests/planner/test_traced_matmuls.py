"""The count of products in float32: by hand, and against the GPU programs that XLA makes of steps."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from helpers.cuda import on_gpu
from helpers.steps import settings
from jax import lax

import jzero
from jzero.planner import gpu_devices
from jzero.planner.traced_operations import matmuls

BF16, F32 = jnp.bfloat16, jnp.float32


def count(f, *args):
    return matmuls(jax.jit(f).trace(*args))


A, B = jnp.ones((8, 16)), jnp.ones((16, 4))
HALF_A, HALF_B = A.astype(BF16), B.astype(BF16)
ONCE = 2 * 8 * 16 * 4
IMAGES, KERNEL = jnp.ones((2, 8, 8, 3)), jnp.ones((2, 2, 3, 5))
OF_CONV = 2 * (2 * 4 * 4 * 5) * (2 * 2 * 3)
with_algorithm = [partial(jnp.matmul, precision=lax.DotAlgorithmPreset[f"BF16_BF16_F32{x}"]) for x in ("", "_X3")]


def conv(x, w):
    return (lax.conv_general_dilated(x, w, (2, 2), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")) ** 2).sum()


@pytest.mark.parametrize(
    ("f", "args", "float32", "total", "flops"),
    [
        (jnp.matmul, (HALF_A, B), 1, 1, ONCE),
        (partial(jnp.matmul, preferred_element_type=F32), (HALF_A, HALF_B), 0, 1, ONCE),
        (with_algorithm[0], (A, B), 0, 1, ONCE),
        (with_algorithm[1], (A, B), 1, 1, ONCE),
        (partial(jnp.einsum, "bij,bkj->bik"), (jnp.ones((3, 5, 7)), jnp.ones((3, 9, 7))), 1, 1, 2 * 3 * 5 * 7 * 9),
        (jnp.matmul, (jnp.ones((8, 8), int), jnp.ones((8, 8), int)), 0, 0, 0),
        (lambda a, b: lax.scan(lambda x, _: (x @ a, None), b, length=6), (jnp.ones((4, 4)), B), 6, 6, 6 * 512),
        (lambda a, b: (a @ b, a.T @ a)[0], (A, B), 1, 1, ONCE),  # dead code does not run
        (jax.grad(lambda a, b: (a @ b).sum(), (0, 1)), (A, B), 2, 2, 2 * ONCE),
        (lax.ragged_dot, (A, jnp.ones((3, 16, 4)), jnp.array([2, 2, 4])), 1, 1, ONCE),
        # Both gradients of a convolution multiply as often as the convolution, whatever its stride.
        (conv, (IMAGES, KERNEL), 1, 1, OF_CONV),
        (jax.grad(conv), (IMAGES, KERNEL), 2, 2, 2 * OF_CONV),
        (jax.grad(conv, (0, 1)), (IMAGES, KERNEL), 3, 3, 3 * OF_CONV),
    ],
)
def test_products_and_flops(f, args, float32, total, flops):
    found = count(f, *args)
    assert (found.float32, found.count, found.flops) == (float32, total, flops)


def line(f, below):
    return f"{f.__name__} (test_traced_matmuls.py:{f.__code__.co_firstlineno + below})"


def test_products_in_float32_are_listed_by_line():
    def f(a, b):
        wide = a @ b
        half = a.astype(BF16) @ b.astype(BF16)
        return wide.sum() + half.sum() + (a.T @ a).sum()

    found = count(f, A, B)
    assert list(found.float32_by_line.items()) == [
        (line(f, 3), (1, pytest.approx(2 / 3))), (line(f, 1), (1, pytest.approx(1 / 6))),
    ]  # fmt: skip
    assert str(found).splitlines()[0] == "2 of 3 matmuls, 83.3% of the FLOPs, in float32"


def test_the_newest_line_of_the_model_counts():
    def helper(x, w):
        return x @ w

    def f(x, w):
        return helper(x, w)

    own = jzero.Operation(helper, lambda group, x, w: None)
    for caller in (f, lambda x, w: own(x, w)):
        assert [p.where for p in count(caller, A, B).all] == [line(helper, 1)]

    def f(x, w):  # products inside of JAX's and jzero's functions have the line of the call
        y, up = jnp.linalg.multi_dot([x, w, w.T]), w[None].repeat(2, 0)
        return jzero.experts(x[None], jzero.route(y[None, :, :2], 1), up, up.mT).sum()

    for traced in (f, jax.grad(f)):
        assert {p.where for p in count(traced, A, B).all} == {line(f, 1), line(f, 2)}


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


@pytest.mark.slow
@on_gpu
@pytest.mark.parametrize(("auto_cast", "float32"), [("auto", 0), (False, 8)])
def test_the_gpu_program_has_the_products_that_are_counted(auto_cast, float32):
    model = jzero.from_flax(Convolutions, lambda net, batch: (net(batch["images"]) ** 2).mean())
    config = settings(32, bf16={"enabled": True, "auto_cast": auto_cast})
    step = jzero.make_train_step(model, config, mesh=jzero.make_mesh(devices=gpu_devices("h200", 2)))
    traced = step.trace({"images": jax.ShapeDtypeStruct((32, 32, 32, 3), jnp.float32)})
    found = matmuls(traced)
    assert (found.count, found.float32) == (8, float32)
    assert library_calls(traced.lower().compile().as_text()) == (8, float32)
