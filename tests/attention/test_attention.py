"""Every path of attention against softmax in NumPy, and the choice of the kernel."""

import contextlib
import dataclasses
import importlib.util
import itertools
import re
import sys
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.cuda import needs_cuda_compiler, on_gpu
from helpers.programs import h100s, pairs, traced
from jax._src.cudnn import fused_attention_stablehlo

import jzero
from jzero import attention_kernels
from jzero.attention_kernels import cudnn_obstacle, flash_obstacle, kernel_for, kernel_note
from jzero.planner import Rates, gpu_devices, memory, step_time
from jzero.planner.advice import _attention
from jzero.planner.gpus import GPUS
from jzero.profiling.flops import step_flops
from models.attention import attend, same_segment
from models.decoder import Decoder
from models.decoder_config import DecoderConfig
from models.llama import preset

B, S, H, K, C = 2, 9, 4, 2, 8
Q, KEYS, VALUES = (np.random.default_rng(i).normal(size=(B, S, n, C)).astype("f4") for i, n in enumerate((H, K, K)))
SEGMENTS = np.array([[1, 1, 1, 2, 2, 3, 3, 3, 0], [1, 2, 2, 2, 2, 2, 2, 0, 0]])
PADDING = np.arange(S) < np.array([[6], [9]])  # which keys are tokens
AHEAD = np.arange(S) - np.arange(S)[:, None]


def softmax_attention(q, k, v, seen, bias=0.0, softcap=None, scale=C**-0.5):
    """Attention in float64; `seen` [B, S, T]: which keys a query sees. NaN where it sees none: that is ignored."""
    k, v = (np.repeat(x.astype("f8"), q.shape[2] // x.shape[2], 2) for x in (k, v))
    scores = np.einsum("bshc,bthc->bhst", q.astype("f8"), k) * scale
    scores = softcap * np.tanh(scores / softcap) if softcap else scores + bias
    weights = np.where(seen[:, None], np.exp(scores - scores.max(-1, keepdims=True)), 0)
    with np.errstate(invalid="ignore"):
        return np.einsum("bhst,bthc->bshc", weights / weights.sum(-1, keepdims=True), v)


PATHS = [
    *itertools.product((True,), (None, 1, 3, 99), ((None, None), (SEGMENTS, None), (None, PADDING)), (None, 1.5)),
    *itertools.product((False,), (None,), ((None, None), (SEGMENTS, None), (None, PADDING)), (None, 1.5)),
]


def test_every_path():
    run = jax.jit(attend, static_argnames=("choice", "causal", "window", "scale", "softcap"))
    for causal, window, (segments, padding), softcap in PATHS:
        mask = same_segment(segments) if padding is None else padding[:, None, None, :]
        found = run(Q, KEYS, VALUES, mask, causal=causal, window=window, scale=0.7, softcap=softcap)
        seen = np.ones((B, S, S), bool) & (-(window or S) < AHEAD)
        seen &= (AHEAD <= 0) | (not causal)
        seen &= True if segments is None else segments[:, :, None] == segments[:, None]
        seen &= True if padding is None else padding[:, None]
        expected = softmax_attention(Q, KEYS, VALUES, seen, softcap=softcap, scale=0.7)
        counts = ~np.isnan(expected)
        assert counts.mean() > 0.8
        np.testing.assert_allclose(
            found[counts], expected[counts], atol=2e-6, err_msg=f"{causal} {window} {segments} {softcap}"
        )


def test_a_program_in_float16_outside_of_a_step():
    """JAX refuses to lower the products that its attention asks for in float16 for CPUs."""

    def total(x, dtype):
        return jzero.attention(x.astype(dtype), *(jnp.asarray(y, dtype) for y in (KEYS, VALUES))).astype("f4").sum()

    run = jax.jit(jax.grad(total), static_argnums=1)
    found, expected = (run(jnp.asarray(Q, "f4"), dtype) for dtype in ("float16", "float32"))
    np.testing.assert_allclose(found, expected, atol=0.03)


CONFIG = DecoderConfig(
    3, 32, 4, 2, 48, vocab_size=64, window=3, global_layers=(False, False, True), local_theta=10.0, rope_theta=1e3
)


def decoder(config):
    return jzero.from_flax(lambda rngs: Decoder(config, rngs=rngs))


# ------------------------------------------------------------------------------------------- the kernel


@pytest.mark.parametrize(("S", "rows"), [(8, 1), (7, 7), (7, 1), (7, None)])
def test_what_the_kernel_gets(monkeypatch, S, rows):
    """On an H100, cuDNN refused a mask with one row for all queries, and odd numbers of tokens."""
    seen = []

    def spy(q, k, v, mask=None, implementation=None, **_):
        seen.append((implementation, q.shape[1], None if mask is None else mask.shape))
        return q

    monkeypatch.setattr(attention_kernels, "widest_head", lambda: 256)
    monkeypatch.setattr(jax.nn, "dot_product_attention", spy)
    x = jnp.zeros((B, S, H, 8), "bfloat16")
    assert attend(x, x, x, None if rows is None else jnp.ones((B, 1, rows, S), bool)).shape == x.shape
    assert seen == [("cudnn", 8, None if rows is None else (B, 1, 8, 8))]


BF16, F32 = jnp.dtype("bfloat16"), jnp.dtype("float32")


def test_the_kernel_and_the_report(monkeypatch):
    def notes(**changes):
        return decoder(preset("tiny", **changes)).report_notes(BF16)

    assert notes() == ["attention kernel xla (attention='auto', bfloat16)"]
    capped = "attention kernel xla (attention='auto', bfloat16): cuDNN has no soft cap"
    line, names = notes(attention_softcap=50.0)
    assert line == capped
    assert names.endswith("LlamaForCausalLM has no attention_softcap=50.0")
    with pytest.raises(jzero.ConfigError, match="attention = 'cudnn', but cuDNN has no soft cap: use 'auto' or 'xla'"):
        preset("tiny", attention="cudnn", attention_softcap=50.0)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(attention_kernels, "widest_head", lambda: 128)
    assert [kernel_for("auto", d, 128) for d in (BF16, jnp.dtype("float16"), F32)] == ["cudnn", "cudnn", "xla"]
    assert [kernel_for(name, F32, 128) for name in ("xla", "cudnn")] == ["xla", "cudnn"]
    assert kernel_for("auto", BF16, 128, softcap=50.0) == "xla"
    assert cudnn_obstacle(BF16, 100, 256) == "cuDNN needs heads of a multiple of 8, not 100"
    assert notes() == ["attention kernel cudnn (attention='auto', bfloat16)"]
    assert kernel_note("auto", BF16, 32, 50.0) == capped
    assert notes(head_width=192)[0].endswith("bfloat16): cuDNN's heads are at most 128 wide on this GPU, not 192")


@on_gpu
@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "kernel"),
    [({"global_layers": None}, "__cudnn$fmhaSoftmax"), ({}, "__cudnn$fmhaScaleBiasSoftmax")],
    ids=["all layers", "some layers"],
)
def test_windows_under_cudnn(changes, kernel):
    """cuDNN gets a window that all layers have as a number, and one that only some have as a bias."""
    config = dataclasses.replace(CONFIG, d_model=256, window=100, attention="cudnn", **changes)
    _, trace = traced(decoder(config), h100s(zero=2), pairs(8, 512), {}, train_batch_size=8)
    text = trace.lower().compile().as_text()
    assert sorted(set(re.findall(r"__cudnn\$fmha\w*", text))) == [kernel, f"{kernel}Backward"]
    assert bool(re.search(r'"sliding_window_length": ?100\b', text)) == (changes != {})


@needs_cuda_compiler
@pytest.mark.parametrize(("gpu", "kernels"), [("h200", ["cudnn", "xla"]), ("t4", ["xla", "xla"])])
def test_the_planned_gpus_decide(gpu, kernels):
    """Without a GPU, JAX refuses cuDNN's heads wider than 128."""
    mesh = jax.sharding.Mesh(np.array(gpu_devices(gpu, 2)), "zero")
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        assert [kernel_for("auto", BF16, width) for width in (128, 256)] == kernels
    assert kernel_for("auto", BF16, 128) == "xla"  # on this machine


def test_jzero_attention(monkeypatch):
    """Padded for cuDNN, whose part is played by XLA."""
    jaxs = jax.nn.dot_product_attention
    monkeypatch.setattr(attention_kernels, "kernel_for", lambda *_, **__: "cudnn")
    monkeypatch.setattr(jax.nn, "dot_product_attention", lambda *x, implementation, **more: jaxs(*x, **more))
    rng, T = np.random.default_rng(0), S - 2
    k, v = (rng.normal(size=(B, T, K, C)).astype("f4") for _ in range(2))
    everything, ahead, lengths = np.ones((B, S, T), bool), AHEAD[:, :T], np.array([5, 7], np.int32)
    few = rng.random((S, T)) < 0.7
    few[:, 0] = True
    biases = [None, *(rng.normal(size=shape).astype("f4") for shape in ((B, H, S, T), (1, 1, 1, T), (H, S, T)))]
    cases = [
        ({"is_causal": True}, everything & (ahead <= 0)),
        ({"mask": few}, everything & few),
        ({"mask": few[None, None, :1]}, everything & few[:1]),
        ({"key_value_seq_lengths": lengths}, np.arange(T) < lengths[:, None, None] + np.zeros((S, 1))),
        ({"is_causal": True, "local_window_size": 2}, everything & (ahead <= 0) & (ahead >= -2)),
        ({"local_window_size": (T, 0)}, everything & (ahead <= 0) & (ahead >= -T)),
        ({"local_window_size": (S, 1)}, everything & (ahead <= 1)),
    ]
    given = [*((more, seen, None) for more, seen in cases), *(({}, everything, bias) for bias in biases)]
    given += [(more, seen, biases[1 + i % 3]) for i, (more, seen) in enumerate(cases)]
    for more, seen, bias in given:
        operands = more if bias is None else {**more, "bias": bias}
        expected = softmax_attention(Q, k, v, seen, 0.0 if bias is None else bias)
        found = jax.jit(partial(jzero.attention, **operands))(Q, k, v)
        np.testing.assert_allclose(found, expected, atol=2e-6, err_msg=f"{[*more]} {np.shape(bias)}")


def test_cudnn_takes_what_jzero_attention_gives_it(monkeypatch):
    """Its own checks run, for every form of the operands; a kernel would need a GPU."""
    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91000)
    monkeypatch.setattr(attention_kernels, "widest_head", lambda: 128)
    kernels = set()
    jaxs = jax.nn.dot_product_attention

    def spy(*x, implementation, **more):
        kernels.add(implementation)
        return jaxs(*x, implementation=implementation, **more)

    monkeypatch.setattr(jax.nn, "dot_product_attention", spy)
    lengths = np.full(B, 5, np.int32)
    for queries, keys in [(8, 8), (7, 7), (7, 8)]:
        q, k = jnp.ones((B, queries, H, 64), jnp.bfloat16), jnp.ones((B, keys, K, 64), jnp.bfloat16)
        for bias, mask, causal, window, own in itertools.product(
            (None, (H, queries, keys)), (None, (B, 1, 1, keys)), (True, False), (None, 2, (2, 0)),
            ({}, {"key_value_seq_lengths": lengths, "query_seq_lengths": lengths}),
        ):  # fmt: skip
            operands = {
                "bias": bias and jnp.zeros(bias, q.dtype), "mask": mask and jnp.ones(mask, bool), "is_causal": causal,
                "local_window_size": window, **own,
            }  # fmt: skip
            kernels.clear()
            assert jax.eval_shape(partial(jzero.attention, **operands), q, k, k).shape == q.shape
            assert kernels == {"xla" if window == 2 and not causal else "cudnn"}


def test_jzero_attention_says_what_it_takes():
    half = [x.astype(jnp.float16) for x in (Q, KEYS, VALUES)]
    assert jzero.attention(*half).dtype == jnp.float16
    with pytest.raises(
        ValueError, match='implementation = \'flash\': must be "auto", "flash_attention_3", "cudnn" or "xla"'
    ):
        jzero.attention(Q, KEYS, VALUES, implementation="flash")
    with pytest.raises(ValueError, match=re.escape("key has shape (9, 2, 8); must be [rows, sequence, heads, width]")):
        jzero.attention(Q, KEYS[0], VALUES)
    with pytest.raises(ValueError, match=re.escape("value has shape (2, 9, 2, 12)")):
        jzero.attention(Q, KEYS, jnp.pad(VALUES, [(0, 0)] * 3 + [(0, 4)]))


def test_cudnn_takes_values_narrower_than_keys(monkeypatch):
    """Its own checks of the operands run; a kernel would need a GPU. Without a version for it, values are padded."""
    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91000)
    monkeypatch.setattr(fused_attention_stablehlo, "check_compute_capability", lambda capability: True)
    monkeypatch.setattr(attention_kernels, "widest_head", lambda: 256)
    monkeypatch.setattr(attention_kernels, "compute_capability", lambda: (9, 0))
    q, v = jnp.ones((2, 8, 4, 192), jnp.bfloat16), jnp.ones((2, 8, 4, 128), jnp.bfloat16)

    def widths(version, **more):
        monkeypatch.setattr(attention_kernels, "cudnn_version", lambda: version)
        program = jax.make_jaxpr(partial(jzero.attention, is_causal=True, **more))(q, q, v)
        assert program.out_avals[0].shape == v.shape
        return re.findall(r"pad\[", str(program)) == [], "dot_product_attention_fwd" in str(program)

    assert widths(91000) == (True, True)
    assert widths(90900) == (False, True)
    assert widths(91000, local_window_size=(3, 0)) == (False, True)


# ---------------------------------------------------------------------------------- FlashAttention-3


# The extra `test` brings it where it has wheels: Linux on x86-64, Python below 3.13.
needs_flash = pytest.mark.skipif(
    importlib.util.find_spec("flash_attn3_jax") is None, reason="no wheel of flash-attn3-jax"
)
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


def arrays(*rows):
    rng = np.random.default_rng(0)
    return [rng.normal(size=(*rows, LENGTH, n, C)).astype("f4") for n in (H, K, K)]


@pytest.mark.parametrize("dims", [(0, 0, 0), (1, 0, None), (None, None, 2)])
def test_a_mapped_axis_becomes_rows(kernels, dims):
    """Each entry gets what it gets alone, wherever the mapped axis is."""
    each = arrays(3, B)
    given = [x[0] if d is None else np.moveaxis(x, 0, d) for x, d in zip(each, dims, strict=True)]
    found, out_dims = attention_kernels._mapped(
        kernels[0], given, dims, softmax_scale=0.3, is_causal=True, window_size=(-1, -1)
    )
    assert out_dims == [0, 0]
    for i in range(3):
        alone = attention(*(x[0 if d is None else i] for x, d in zip(each, dims, strict=True)), 0.3)
        for x, y in zip(found, alone, strict=True):
            np.testing.assert_allclose(x[i], y, atol=1e-6)


def test_gradients(kernels):
    xs = arrays(B)
    found, expected = (
        jax.vjp(f, *xs)
        for f in (lambda *x: attention_kernels.flash_attention(*x, 0.3), lambda *x: attention(*x, 0.3)[0])
    )
    np.testing.assert_allclose(found[0], expected[0], atol=1e-6)
    for x, y in zip(found[1](2 * xs[0]), expected[1](2 * xs[0]), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-5)


@needs_flash
def test_vmap_of_gradients():
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


def test_where_it_runs(hopper, monkeypatch):
    assert flash_obstacle(BF16, 128) is None
    assert flash_obstacle(jnp.dtype("float16"), 128) is None
    assert flash_obstacle(BF16, 64) == "flash-attn3-jax has heads of 128, not 64"
    assert flash_obstacle(jnp.dtype("float32"), 128) == "FlashAttention-3 needs half precision, not float32"
    for axes, why in (
        (("zero", "tensor"), "FlashAttention-3 is not divided along tensor"),
        (("expert", "context"), "FlashAttention-3 is not divided along expert and context"),
        (("data", "zero"), "XLA does not divide FlashAttention-3 along data and zero"),
    ):
        with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((2, 2), axes)):
            assert flash_obstacle(BF16, 128) == why
    monkeypatch.undo()
    monkeypatch.setattr(attention_kernels, "compute_capability", lambda: (10, 0))
    assert flash_obstacle(BF16, 128) == "FlashAttention-3 needs a Hopper GPU"


def test_without_the_package(monkeypatch):
    monkeypatch.setattr(attention_kernels, "compute_capability", lambda: (9, 0))
    monkeypatch.setitem(sys.modules, "flash_attn3_jax", None)
    attention_kernels._flash_kernels.cache_clear()
    assert flash_obstacle(BF16, 128).startswith("FlashAttention-3 needs the extra flash: pip install -e ")


def operands(**change):
    """Return queries, keys and values for 128-wide heads, with changed [B, S, heads, C] of some."""
    rng = np.random.default_rng(0)
    shapes = {"q": (B, LENGTH, H, 128), "k": (B, LENGTH, K, 128), "v": (B, LENGTH, K, 128)} | change
    return [jnp.asarray(rng.normal(size=shape), BF16) for shape in shapes.values()]


def test_jzero_attention_by_it(kernels, hopper):
    q, k, v = operands()
    expected = attention(*(x.astype("f4") for x in (q, k, v)), 0.3)[0]
    by_it = partial(jzero.attention, is_causal=True, scale=0.3, implementation="flash_attention_3")
    np.testing.assert_allclose(by_it(q, k, v).astype("f4"), expected, atol=0.05)
    with pytest.raises(ValueError, match="in one dtype"):
        by_it(q, k.astype("f4"), v)


def test_auto_takes_it_on_this_machines_gpus(kernels, hopper, monkeypatch):
    """On a mesh, which divides the program; cuDNN's where the call or the mesh is not for it, and in a plan."""
    monkeypatch.setattr(attention_kernels, "widest_head", lambda: 128)
    one, tensor = (jax.sharding.AbstractMesh((n,), ("tensor",)) for n in (1, 2))
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
    q, k, v = operands()
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
def test_what_it_does_not_compute(kernels, hopper, change, more):
    """The package would compute something else (causal masks end at the last key), or fail when it is compiled."""
    with pytest.raises(ValueError, match=r'"flash_attention_3": it computes causal attention of .*; write "auto"'):
        jzero.attention(*operands(**change), implementation="flash_attention_3", **{"is_causal": True} | more)


def test_models(kernels, hopper, monkeypatch):
    """Packed documents and padded prompts have a mask, which is for another kernel; what never runs is refused."""
    monkeypatch.setattr(attention_kernels, "widest_head", lambda: 0)  # XLA's kernel takes cuDNN's part
    q, k, v = operands()
    mask = jnp.tril(jnp.ones((1, 1, LENGTH, LENGTH), bool))
    found = attend(q, k, v, mask, choice="flash_attention_3", causal=True)
    np.testing.assert_allclose(found.astype("f4"), attend(q, k, v, causal=True).astype("f4"), atol=0.05)
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


SHAPE = preset("tiny", d_model=256, num_heads=2, num_kv_heads=1, num_layers=2, attention="flash_attention_3")


def make_step(attention="flash_attention_3", **config):
    config = {"train_batch_size": 8, "stack": {"unroll": True}, **config}
    shape = dataclasses.replace(SHAPE, attention=attention)
    mesh = jzero.make_mesh(config, devices=gpu_devices("h200", 2))
    return traced(jzero.from_flax(lambda rngs: Decoder(shape, rngs=rngs)), mesh, TOKENS, {}, **config)


TOKENS = pairs(8, 512)


@on_gpu
@needs_flash
@pytest.mark.parametrize(
    ("config", "forward"),
    [
        ({"zero_optimization": {"stage": 3}}, 2),
        pytest.param({"activation_checkpointing": {"policy": "full"}}, 4, marks=pytest.mark.slow),
    ],
    ids=["ZeRO-3", "all recomputed"],
)
def test_the_compiled_program(config, forward):
    """Each layer calls it once forward, again where everything is recomputed, and once backward."""
    compiled = make_step(**config)[1].lower().compile()
    text = compiled.as_text()
    found = [text.count(f'custom_call_target="{name}') for name in ("flash_mha_fwd", "flash_mha_bwd", "__cudnn$fmha")]
    assert found == [forward, 2, 0]
    # The gradients that its backward pass sums in float32: of queries, and of keys and values that two heads share.
    rows, length, width = 4, 512, 128
    scratch = 4 * rows * length * width * (2 + 2 * 1)
    assert memory(compiled).temps == compiled.memory_analysis().temp_size_in_bytes + scratch


@needs_cuda_compiler
@needs_flash
def test_tensor_refuses_it():
    with pytest.raises(ValueError, match="is not divided along tensor"):
        make_step(mesh={"tensor": 2})


@on_gpu
@needs_flash
@pytest.mark.slow
def test_flops_and_time_beside_cudnns():
    """The FLOPs are the same, and a plan takes the measured ratio of the two kernels' speeds."""
    flops, times = [], []
    for attention in ("flash_attention_3", "cudnn"):
        step, trace = make_step(attention)
        flops.append(step_flops(step, trace))
        rates = dataclasses.replace(Rates.of("h200"), attention_start=0.0, gap=0.0)
        times.append(step_time(trace.lower().compile(), rates, mesh=step.mesh).by["attention"])
    assert [(f.forward, f.backward, f.recomputed) for f in flops[0].modules] == [
        (f.forward, f.backward, f.recomputed) for f in flops[1].modules
    ]
    assert 1 / 1.23 < times[0] / times[1] < 1 / 1.10


def test_a_plan_does_not_advise_another_kernel():
    """The text has a width that equals the sequence, as the shape of kept scores does."""
    gpu, amount = GPUS["h200"], SimpleNamespace(tokens=4096 * 2, samples=2)
    text = "%x = bf16[2,4096,4096]{2,1,0} add(%a, %b)"
    assert len(list(_attention(gpu, text, amount))) == 1
    assert not list(_attention(gpu, text + ' custom_call_target="flash_mha_fwd"', amount))
