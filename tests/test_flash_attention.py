"""FlashAttention-3: when it is taken, its gradients and `jax.vmap`, and the compiled program of an H200.

Its kernels run on Hopper GPUs only: experiments/benchmarks/2026-11-27-flash-attention-h200.md. Here plain JAX takes
their place.
"""

import importlib.util
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.cuda import needs_cuda_compiler

import jzero
from jzero.attention_kernels import choice, flash
from jzero.attention_kernels.choice import flash_obstacle, kernel_for, kernel_note
from jzero.planner import Rates, gpu_devices, step_time
from jzero.profiling.flops import step_flops
from models.decoder import Decoder
from models.llama import preset

BF16 = jnp.dtype("bfloat16")
needs_flash = pytest.mark.skipif(importlib.util.find_spec("flash_attn3_jax") is None, reason="the extra flash")
B, S, H, K, C = 2, 6, 4, 2, 8


def attention(q, k, v, scale):
    """Compute causal attention [B, S, H, C] and the logarithms of its sums of exponentials [B, H, S]."""
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], 2) for x in (k, v))
    scores = jnp.where(jnp.tri(q.shape[1]), jnp.einsum("bshc,bthc->bhst", q, k) * scale, -jnp.inf)
    return jnp.einsum("bhst,bthc->bshc", jax.nn.softmax(scores), v), jax.nn.logsumexp(scores, -1)


@pytest.fixture
def kernels(monkeypatch):
    """Let plain JAX play the two kernels, with the operands and results that flash-attn3-jax gives them."""
    options = {"is_causal": True, "window_size": (-1, -1)}

    def forward(q, k, v, softmax_scale, **more):
        assert more == options
        return attention(q, k, v, softmax_scale)

    def backward(gradient, q, k, v, o, sums, softmax_scale, **more):
        assert more == options
        expected = attention(q, k, v, softmax_scale)
        np.testing.assert_allclose(
            jnp.stack([abs(x - y).max() for x, y in zip(expected, (o, sums), strict=True)]), 0, atol=1e-6
        )
        return jax.vjp(lambda *x: attention(*x, softmax_scale)[0], q, k, v)[1](gradient)

    found = SimpleNamespace(bind=forward), SimpleNamespace(bind=backward)
    monkeypatch.setattr(flash, "_kernels", lambda: found)
    return found


def arrays(*rows):
    rng = np.random.default_rng(0)
    return [rng.normal(size=(*rows, S, n, C)).astype("f4") for n in (H, K, K)]


def test_gradients(kernels):
    xs = arrays(B)
    found, expected = (
        jax.vjp(f, *xs) for f in (lambda *x: flash.flash_attention(*x, 0.3), lambda *x: attention(*x, 0.3)[0])
    )
    np.testing.assert_allclose(found[0], expected[0], atol=1e-6)
    for x, y in zip(found[1](2 * xs[0]), expected[1](2 * xs[0]), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-5)


@pytest.mark.parametrize("dims", [(0, 0, 0), (1, 0, None), (None, None, 2)])
def test_a_mapped_axis_becomes_rows(kernels, dims):
    """Each entry gets what it gets alone, wherever the mapped axis is."""
    each = arrays(3, B)
    given = [x[0] if d is None else np.moveaxis(x, 0, d) for x, d in zip(each, dims, strict=True)]
    found, out_dims = flash._mapped(kernels[0], given, dims, softmax_scale=0.3, is_causal=True, window_size=(-1, -1))
    assert out_dims == [0, 0]
    for i in range(3):
        alone = attention(*(x[0 if d is None else i] for x, d in zip(each, dims, strict=True)), 0.3)
        for x, y in zip(found, alone, strict=True):
            np.testing.assert_allclose(x[i], y, atol=1e-6)


@pytest.fixture
def hopper(monkeypatch):
    """Let this machine have an H100, and the package."""
    monkeypatch.setattr(choice, "compute_capability", lambda: (9, 0))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "flash_attn3_jax")


def test_when_it_is_taken(hopper, monkeypatch):
    assert kernel_for("auto", BF16, 128, plain=True) == "flash_attention_3"
    assert kernel_note("auto", BF16, 128) == (
        "attention kernel flash_attention_3 (attention='auto', bfloat16): cuDNN's with masks"
    )
    assert kernel_note("auto", BF16, 128, causal=False) == "attention kernel cudnn (attention='auto', bfloat16)"
    for arguments, why in (
        ((BF16, 128), "used for causal attention"),
        ((BF16, 128, 30.0, True), "without soft caps"),
        ((BF16, 64, None, True), "heads of 128, not 64"),
        ((jnp.dtype("float32"), 128, None, True), "half precision"),
    ):
        assert why in flash_obstacle(*arguments)
        assert kernel_for("auto", *arguments) != "flash_attention_3"
    for axis in ("tensor", "context", "expert"):
        with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((2, 2), ("zero", axis))):
            assert flash_obstacle(BF16, 128, None, True) == f"FlashAttention-3 is not divided along {axis}"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert kernel_note("auto", BF16, 128).endswith(
        "cudnn (attention='auto', bfloat16): FlashAttention-3 needs the extra flash: pip install 'jzero[flash]'"
    )
    monkeypatch.setattr(choice, "compute_capability", lambda: (10, 0))
    assert flash_obstacle(BF16, 128, None, True) == "FlashAttention-3 needs a Hopper GPU"
    assert kernel_note("auto", BF16, 128) == "attention kernel cudnn (attention='auto', bfloat16)"


def test_jzero_attention_by_it(kernels, hopper):
    """With heads of 128 it runs; where it cannot, "auto" takes another kernel, and asking for it is an error."""
    q, k, v = (jnp.asarray(np.tile(x, 16), BF16) for x in arrays(B))
    expected = attention(*(x.astype("f4") for x in (q, k, v)), 128**-0.5)[0]
    for implementation in ("auto", "flash_attention_3"):
        found = jzero.attention(q, k, v, is_causal=True, implementation=implementation)
        np.testing.assert_allclose(found.astype("f4"), expected, atol=0.02)
    for more in (
        {}, {"is_causal": True, "mask": jnp.ones((1, 1, S, S), bool)}, {"is_causal": True, "local_window_size": 2},
        {"is_causal": True, "bias": jnp.zeros((1, 1, S, S))},
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r'"flash_attention_3": FlashAttention-3 is used for .*; write "auto"'):
            jzero.attention(q, k, v, implementation="flash_attention_3", **more)


def make_step(devices, changes, **config):
    shape = preset("tiny", d_model=256, num_heads=2, num_kv_heads=2, num_layers=2, **changes)
    settings = {
        "train_batch_size": 8,
        "bf16": {"enabled": True},
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        **config,
    }
    model = jzero.from_flax(lambda rngs: Decoder(shape, rngs=rngs))
    return jzero.make_train_step(model, settings, mesh=jzero.make_mesh(settings, devices=devices))


TOKENS = {name: jax.ShapeDtypeStruct((8, 512), np.int32) for name in ("inputs", "labels")}


@pytest.mark.gpu_compile
@needs_cuda_compiler
@needs_flash
@pytest.mark.usefixtures("no_compilation_cache")
@pytest.mark.parametrize(
    ("config", "calls"),
    [
        ({"zero_optimization": {"stage": 3}}, (2, 2, 0)),
        ({"activation_checkpointing": {"policy": "matmuls"}}, (2, 2, 0)),
        ({"activation_checkpointing": {"policy": "full"}}, (4, 2, 0)),
        ({"mesh": {"tensor": 2}}, (0, 0, 4)),
    ],
    ids=["ZeRO-3", "matmuls kept", "all recomputed", "tensor"],
)
def test_the_compiled_program(config, calls):
    """Each layer calls it once forward and once backward; `tensor` leaves the heads to cuDNN."""
    step = make_step(gpu_devices("h200", 2), {}, stack={"unroll": True}, **config)
    compiled = step.lower(TOKENS).compile()
    text = compiled.as_text()
    found = [text.count(f'custom_call_target="{name}') for name in ("flash_mha_fwd", "flash_mha_bwd", "__cudnn$fmha")]
    assert tuple(found) == calls
    assert step_time(compiled, Rates.of("h200"), mesh=step.mesh).step_s > 0


@needs_cuda_compiler
@needs_flash
def test_flops_and_time_beside_cudnns():
    """The FLOPs are the same, and a plan takes the measured ratio of the two kernels' speeds."""
    flops, times = [], []
    for attention in ("flash_attention_3", "cudnn"):
        step = make_step(gpu_devices("h200", 2), {"attention": attention})
        traced = step.trace(TOKENS)
        flops.append(step_flops(step, traced))
        found = step_time(traced.lower().compile(), Rates.of("h200"), mesh=step.mesh)
        times.append(found.by["attention"])
    assert [f.forward for f in flops[0].modules] == [f.forward for f in flops[1].modules]
    assert [f.backward for f in flops[0].modules] == [f.backward for f in flops[1].modules]
    assert times[0] < times[1]
