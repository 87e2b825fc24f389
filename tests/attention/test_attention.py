"""Every path of attention against softmax in NumPy, and the choice of the kernel."""

import itertools
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.cuda import needs_cuda_compiler, on_gpu
from helpers.named_models import model_of
from helpers.programs import h100s, pairs, traced
from helpers.sampling import keep
from jax._src.cudnn import fused_attention_stablehlo

import jzero
from jzero import attention_kernels
from jzero.attention_kernels import cudnn_obstacle, kernel_for, kernel_note
from jzero.planner import gpu_devices
from models.attention import attend, same_segment
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


MASKED = (None, None), (SEGMENTS, None), (None, PADDING)
PATHS = [*itertools.product((True,), (None, 1, 3, 99), MASKED), *((False, None, masks) for masks in MASKED)]
TURNS = keep([0, 1], [0])  # which half of a matrix, so that by default each pair of settings occurs


@pytest.mark.parametrize("turn", TURNS)
def test_every_path(turn):
    run = jax.jit(attend, static_argnames=("choice", "causal", "window", "scale", "softcap"))
    for i, (causal, window, (segments, padding)) in enumerate(PATHS):
        softcap = (None, 1.5)[(i + turn) % 2]
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
        return model_of(preset("tiny", **changes)).report_notes(BF16)

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
    ("config", "packed", "kernel"),
    [
        ({"window": 100}, False, "__cudnn$fmhaSoftmax"),
        ({"window": 100, "global_layers": (False, False, True)}, False, "__cudnn$fmhaScaleBiasSoftmax"),
        ({}, True, "__cudnn$fmhaScaleBiasSoftmax"),
    ],
    ids=["a window", "a window in some layers", "documents in a row"],
)
def test_masks_under_cudnn(config, packed, kernel):
    """cuDNN gets a window that all layers have as a number, and any other mask as a bias."""
    model = model_of(DecoderConfig(3, 256, 4, 2, 48, vocab_size=64, attention="cudnn", **config))
    batch = pairs(8, 512)
    batch |= {"segments": batch["inputs"]} if packed else {}
    _, trace = traced(model, h100s(zero=2), batch, {}, train_batch_size=8)
    text = trace.lower().compile().as_text()
    assert sorted(set(re.findall(r"__cudnn\$fmha\w*", text))) == [kernel, f"{kernel}Backward"]
    assert bool(re.search(r'"sliding_window_length": ?100\b', text)) == (kernel == "__cudnn$fmhaSoftmax")


@needs_cuda_compiler
@pytest.mark.parametrize(("gpu", "kernels"), [("h200", ["cudnn", "xla"]), ("t4", ["xla", "xla"])])
def test_the_planned_gpus_decide(gpu, kernels):
    """Without a GPU, JAX refuses cuDNN's heads wider than 128."""
    mesh = jax.sharding.Mesh(np.array(gpu_devices(gpu, 2)), "zero")
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        assert [kernel_for("auto", BF16, width) for width in (128, 256)] == kernels
    assert kernel_for("auto", BF16, 128) == "xla"  # on this machine


@pytest.mark.parametrize("turn", TURNS)
def test_jzero_attention(turn, monkeypatch):
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
    given = [(more, seen, biases[(i + turn) % 2 and 1 + i % 3]) for i, (more, seen) in enumerate(cases)]
    for more, seen, bias in [*given, *(({}, everything, bias) for bias in biases)]:
        operands = more if bias is None else {**more, "bias": bias}
        expected = softmax_attention(Q, k, v, seen, 0.0 if bias is None else bias)
        found = jax.jit(partial(jzero.attention, **operands))(Q, k, v)
        np.testing.assert_allclose(found, expected, atol=2e-6, err_msg=f"{[*more]} {np.shape(bias)}")


@pytest.mark.parametrize("turn", keep([0, 1, 2], [0]))
def test_cudnn_takes_what_jzero_attention_gives_it(turn, monkeypatch):
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
    forms = itertools.product(
        (True, False), (True, False), (True, False), (None, 2, (2, 0)),
        ({}, {"key_value_seq_lengths": lengths, "query_seq_lengths": lengths}),
    )  # fmt: skip
    for i, (bias, mask, causal, window, own) in enumerate(forms):
        queries, keys = [(8, 8), (7, 7), (7, 8)][(i + i // 6 + turn) % 3]
        q, k = jnp.ones((B, queries, H, 64), jnp.bfloat16), jnp.ones((B, keys, K, 64), jnp.bfloat16)
        operands = {
            "bias": jnp.zeros((H, queries, keys), q.dtype) if bias else None,
            "mask": jnp.ones((B, 1, 1, keys), bool) if mask else None,
        }
        kernels.clear()
        attention = partial(jzero.attention, **operands, is_causal=causal, local_window_size=window, **own)
        assert jax.eval_shape(attention, q, k, k).shape == q.shape
        assert kernels == {"xla" if window == 2 and not causal else "cudnn"}


def test_jzero_attention_says_what_it_takes():
    half = [x.astype(jnp.float16) for x in (Q, KEYS, VALUES)]
    assert jzero.attention(*half).dtype == jnp.float16
    words = 'implementation = \'flash\': must be "auto", "flash_attention_3", "cudnn" or "xla"'
    with pytest.raises(ValueError, match=words):
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
