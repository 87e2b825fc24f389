"""FlashAttention-3: its operands, gradients and limits, with plain JAX as its kernels, and the programs with it."""

import contextlib
import dataclasses
import importlib.util
import sys
from functools import partial
from operator import attrgetter
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.cuda import on_gpu
from helpers.named_models import model_of
from helpers.programs import pairs, traced
from jax.sharding import AxisType

import jzero
from jzero import attention_kernels
from jzero.attention_kernels import flash_obstacle, kernel_for, kernel_note
from jzero.planner import gpu_devices, memory
from jzero.planner.gpus import GPUS
from jzero.profiling.flops import step_flops
from models.attention import attend
from models.llama import preset

B, H, K, C = 2, 4, 2, 8
BF16 = jnp.dtype("bfloat16")

# The extra `test` brings it where it has wheels: Linux on x86-64, Python below 3.13.
has_flash = importlib.util.find_spec("flash_attn3_jax") is not None
needs_flash = pytest.mark.skipif(not has_flash, reason="no wheel of flash-attn3-jax")
LENGTH = 6


@partial(jax.jit, static_argnames="scale")
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
    monkeypatch.setattr(attention_kernels, "_flash_kernels", lambda: found)
    return found


def operands(*rows, width=128, dtype=BF16, **change):
    """Return queries, keys and values, with changed shapes of some."""
    rng = np.random.default_rng(0)
    shapes = {name: (*rows, LENGTH, heads, width) for name, heads in zip("qkv", (H, K, K), strict=True)} | change
    return [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes.values()]


@pytest.mark.parametrize("dims", [(0, 0, 0), (1, 0, None), (None, None, 2)])
def test_a_mapped_axis_becomes_rows_of_flash_attention(kernels, dims):
    """Each entry gets what it gets alone, wherever the mapped axis is."""
    each = operands(3, B, width=C, dtype="f4")
    given = [x[0] if d is None else jnp.moveaxis(x, 0, d) for x, d in zip(each, dims, strict=True)]
    found, out_dims = attention_kernels._mapped(
        kernels[0], given, dims, softmax_scale=0.3, is_causal=True, window_size=(-1, -1)
    )
    assert out_dims == [0, 0]
    for i in range(3):
        alone = attention(*(x[0 if d is None else i] for x, d in zip(each, dims, strict=True)), 0.3)
        for x, y in zip(found, alone, strict=True):
            np.testing.assert_allclose(x[i], y, atol=1e-6)


def test_gradients_of_flash_attention(kernels):
    xs = operands(B, width=C, dtype="f4")
    functions = (lambda *x: attention_kernels.flash_attention(*x, 0.3)), (lambda *x: attention(*x, 0.3)[0])
    found, expected = (jax.vjp(f, *xs) for f in functions)
    np.testing.assert_allclose(found[0], expected[0], atol=1e-6)
    for x, y in zip(found[1](2 * xs[0]), expected[1](2 * xs[0]), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-5)


@needs_flash
def test_vmap_of_gradients_of_flash_attention():
    """The package's primitives get jzero's rule, each its own: the rows of all entries are in one call."""
    q, k, v = (jax.ShapeDtypeStruct((3, B, LENGTH, n, 128), BF16) for n in (H, K, K))

    def loss(q, k, v):
        return attention_kernels.flash_attention(q, k, v, 0.3).astype(jnp.float32).sum()

    traced = jax.make_jaxpr(jax.vmap(jax.grad(loss, argnums=(0, 1, 2))))(q, k, v)
    assert [x.shape for x in traced.out_avals] == [x.shape for x in (q, k, v)]
    calls = [eqn for eqn in traced.eqns if eqn.primitive.name.startswith("flash_mha")]
    assert [eqn.primitive.name for eqn in calls] == ["flash_mha_fwd_hlo", "flash_mha_bwd_hlo"]
    assert all(v.aval.shape[0] == 3 * B for eqn in calls for v in eqn.outvars)


@pytest.fixture
def hopper(monkeypatch):
    """Let this machine have an H100, and the package."""
    monkeypatch.setattr(attention_kernels, "compute_capability", lambda: (9, 0))
    monkeypatch.setattr(attention_kernels, "flash_missing", lambda: None)


def test_where_flash_attention_runs(hopper, monkeypatch):
    assert flash_obstacle(BF16, 128) is None
    assert flash_obstacle(jnp.dtype("float16"), 128) is None
    assert flash_obstacle(BF16, 64) == "flash-attn3-jax has heads of 128, not 64"
    assert flash_obstacle(jnp.dtype("float32"), 128) == "FlashAttention-3 needs half precision, not float32"
    for axes, why in (
        (("zero", "tensor"), "FlashAttention-3 is not divided along tensor"),
        (("expert", "context"), "FlashAttention-3 is not divided along expert and context"),
        (("data", "zero"), "XLA does not divide FlashAttention-3 along data and zero"),
    ):
        with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((2, 2), axes, (AxisType.Auto,) * 2)):
            assert flash_obstacle(BF16, 128) == why
    monkeypatch.undo()
    monkeypatch.setattr(attention_kernels, "compute_capability", lambda: (10, 0))
    assert flash_obstacle(BF16, 128) == "FlashAttention-3 needs a Hopper GPU"
    monkeypatch.setattr(attention_kernels, "compute_capability", lambda: (9, 0))
    monkeypatch.setitem(sys.modules, "flash_attn3_jax", None)
    attention_kernels._flash_kernels.cache_clear()
    assert flash_obstacle(BF16, 128).startswith("FlashAttention-3 needs the extra flash: pip install -e ")


def test_auto_takes_flash_attention_on_this_machines_gpus(kernels, hopper, monkeypatch):
    """On a mesh, which divides the program; cuDNN's where the call or the mesh is not for it, and in a plan."""
    monkeypatch.setattr(attention_kernels, "widest_head", lambda: 128)
    one, tensor = (jax.sharding.AbstractMesh((n,), ("tensor",), (AxisType.Auto,)) for n in (1, 2))
    cases = [
        (None, True, BF16, "cudnn"), (one, True, BF16, "flash_attention_3"), (one, False, BF16, "cudnn"),
        (tensor, True, BF16, "cudnn"), (one, True, jnp.dtype("float32"), "xla"),
    ]  # fmt: skip
    for mesh, causal, dtype, expected in cases:
        with jax.sharding.use_abstract_mesh(mesh) if mesh else contextlib.nullcontext():
            assert kernel_for("auto", dtype, 128, causal=causal) == expected
    called = []
    monkeypatch.setattr(attention_kernels, "_by", lambda kernel, xs, *_: called.append(kernel) or xs[0])
    monkeypatch.setattr(attention_kernels, "flash_attention", lambda *_: called.append("flash_attention_3"))
    q, k, v = operands(B)
    with jax.sharding.use_abstract_mesh(one):
        jzero.attention(q, k, v, is_causal=True)
        jzero.attention(q, k, v)
        jzero.attention(q[:, -1:], k, v, is_causal=True)
        jzero.attention(q, k, v, is_causal=True, mask=jnp.ones((LENGTH, LENGTH), bool))
        assert called == ["flash_attention_3", "cudnn", "cudnn", "cudnn"]
        monkeypatch.setattr(attention_kernels, "absent_gpu", lambda: GPUS["h200"])
        assert kernel_for("auto", BF16, 128, causal=True) == "cudnn"


@pytest.mark.parametrize(
    ("change", "more"),
    [
        ({}, {"is_causal": False}),
        ({}, {"mask": jnp.ones((1, 1, LENGTH, LENGTH), bool)}),
        ({}, {"bias": jnp.zeros((1, 1, LENGTH, LENGTH))}),
        ({}, {"local_window_size": 2}),
        ({}, {"query_seq_lengths": jnp.full(B, LENGTH)}),
        ({}, {"key_value_seq_lengths": jnp.full(B, LENGTH)}),
        ({"k": (B, LENGTH + 2, K, 128), "v": (B, LENGTH + 2, K, 128)}, {}),
        ({"k": (B, LENGTH, 3, 128), "v": (B, LENGTH, 3, 128)}, {}),
    ],
)
def test_what_flash_attention_does_not_compute(kernels, hopper, change, more):
    """The package would compute something else (causal masks end at the last key), or fail when it is compiled."""
    with pytest.raises(ValueError, match=r'"flash_attention_3": it computes causal attention of .*; write "auto"'):
        jzero.attention(*operands(B, **change), implementation="flash_attention_3", **{"is_causal": True} | more)


def test_models_with_flash_attention(kernels, hopper, monkeypatch):
    """Packed documents and padded prompts have a mask, which is for another kernel; what never runs is refused."""
    monkeypatch.setattr(attention_kernels, "widest_head", lambda: 0)  # XLA's kernel takes cuDNN's part
    q, k, v = operands(B)
    mask = jnp.tril(jnp.ones((1, 1, LENGTH, LENGTH), bool))
    found, expected = attend(q, k, v, mask, choice="flash_attention_3", causal=True), attend(q, k, v, causal=True)
    np.testing.assert_allclose(found.astype("f4"), expected.astype("f4"), atol=0.05)
    by_it = partial(jzero.attention, is_causal=True, scale=0.3, implementation="flash_attention_3")
    expected = attention(*(x.astype("f4") for x in (q, k, v)), 0.3)[0]
    np.testing.assert_allclose(by_it(q, k, v).astype("f4"), expected, atol=0.05)
    with pytest.raises(ValueError, match="in one dtype"):
        by_it(q, k.astype("f4"), v)
    with pytest.raises(ValueError, match="it computes causal attention"):
        attend(q, k, v, mask, choice="flash_attention_3")
    for changes, why in (
        ({"window": 100}, "has no window = 100"),
        ({"attention_softcap": 30.0}, "has no attention_softcap = 30.0"),
        ({"num_heads": 4, "num_kv_heads": 4}, "has heads of 128, not 64"),
    ):
        with pytest.raises(jzero.ConfigError, match=f"attention = 'flash_attention_3' {why}: use 'auto'"):
            dataclasses.replace(SHAPE, **changes)
    assert kernel_note("flash_attention_3", BF16, 128).endswith("flash_attention_3', bfloat16): cuDNN's with a mask")


SHAPE = preset("tiny", d_model=256, num_heads=2, num_kv_heads=1, num_layers=1, attention="flash_attention_3")


def make_step(attention="flash_attention_3", **config):
    config = {"train_batch_size": 8, "stack": {"unroll": True}, **config}
    shape = dataclasses.replace(SHAPE, attention=attention)
    mesh = jzero.make_mesh(config, devices=gpu_devices("h200", 2))
    return traced(model_of(shape), mesh, pairs(8, 512), {}, **config)


@on_gpu
@needs_flash
@pytest.mark.parametrize(
    ("config", "forward"),
    [
        ({"zero_optimization": {"stage": 3}}, 1),
        pytest.param({"activation_checkpointing": {"policy": "full"}}, 2, marks=pytest.mark.slow),
    ],
    ids=["ZeRO-3", "all recomputed"],
)
def test_the_compiled_program_calls_flash_attention(config, forward):
    """A layer calls it once forward, again where everything is recomputed, and once backward; FLOPs are cuDNN's."""
    made, of_cudnn = (make_step(attention, **config) for attention in ("flash_attention_3", "cudnn"))
    counted, expected = (step_flops(*one).modules for one in (made, of_cudnn))
    counts = attrgetter("forward", "backward", "recomputed")
    assert [*map(counts, counted)] == [*map(counts, expected)]
    compiled = made[1].lower().compile()
    text = compiled.as_text()
    found = [text.count(f'custom_call_target="{name}') for name in ("flash_mha_fwd", "flash_mha_bwd", "__cudnn$fmha")]
    assert found == [forward, 1, 0]
    # The gradients that its backward pass sums in float32: of queries, and of keys and values that two heads share.
    rows, length, width = 4, 512, 128
    scratch = 4 * rows * length * width * (2 + 2 * 1)
    assert memory(compiled).temps == compiled.memory_analysis().temp_size_in_bytes + scratch
