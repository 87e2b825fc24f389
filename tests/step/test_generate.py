"""Generated text. Oracle: the plain module on the whole sequence, without a cache, on one device."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from helpers.drawn import random_params
from helpers.named_models import model_of
from helpers.oracle import greedy
from helpers.refusals import refuses
from helpers.sampling import keep, some
from helpers.steps import mesh, settings

import jzero
from jzero.mesh import batch_spec
from jzero.model import stack_loss
from jzero.step.generate import Sampling, _sampling, sample_tokens
from jzero.tracing.equations import operations
from models.decoder_config import DecoderConfig
from models.gpt2 import GPT2Config
from models.rope import RopeScaling

# All that families differ in, and a padded vocabulary that the stages divide.
EVERYTHING = DecoderConfig(
    4, 32, 4, 2, 48, vocab_size=61, pad_vocab_to=16, attention="xla", rope_theta=50.0, head_width=16, qkv_bias=True,
    qk_norm="shared", window=5, global_layers=(False, False, True), local_theta=10.0, norm="offset_rms", norms="both",
    embed_scale=32**0.5, activation="gelu_tanh", attention_scale=24**-0.5, attention_softcap=2.0, logit_softcap=9.0,
    rope_scaling=RopeScaling("linear", 8.0),
)  # fmt: skip
CONFIGS = {
    "everything": EVERYTHING,
    "padded": DecoderConfig(2, 32, 4, 2, 48, vocab_size=61, pad_vocab_to=4, rope_theta=50.0, tied=True),
    "gpt2": GPT2Config(4, 32, 4, 48, vocab_size=61, max_positions=24),
}
S, NEW = 8, 10
TOKENS = np.random.default_rng(0).integers(0, 61, (5, S)).astype(np.int32)
PADDING = np.array([3, 0, 7, 1, 0])  # rows of unequal length
MASK = (np.arange(S) >= PADDING[:, None]).astype(np.int32)
NO_KEY = Sampling(eos=None, pad=np.int32(0))


def step_of(model, stage=0, more=None, **axes):
    config = settings(None, stage, accum=2, train_micro_batch_size_per_gpu=2, **(more or {}))
    return jzero.make_train_step(model, config, mesh=mesh(**{"zero": 1, **axes}))


@functools.cache
def laid_out(name, layout):
    """A step, whose program is traced and compiled once for all tests, and its state."""
    model, params, _ = case(name)
    step = step_of(model, **LAYOUTS[layout])
    return step, step.init(jax.random.key(0), params)


def assert_varied(tokens):
    assert len(set(tokens[:, S:].ravel().tolist())) > 5, "the test needs continuations that vary"


@functools.cache
def case(name):
    model = model_of(CONFIGS[name])
    params = random_params(model)  # biases and norms are random too, so continuations vary
    expected = greedy(model, params, TOKENS, PADDING, NEW)
    assert_varied(expected)
    return model, params, expected


SCANNED = {"stack": {"unroll": False}}
LAYOUTS = {
    "zero3": {"stage": 3, "zero": 2},
    "scanned": {"stage": 3, "zero": 2, "more": SCANNED},
    "zero2": {"stage": 2, "data": 2, "zero": 2},
    "1f1b": {"pipe": 2},
    "interleaved": {"stage": 3, "pipe": 2, "zero": 2, "more": {"pipeline": {"schedule": "interleaved", "chunks": 2}}},
    "pipe, scanned": {"pipe": 2, "more": SCANNED},
    "tensor and zero3": {"stage": 3, "zero": 2, "tensor": 2},
    "context, scanned": {"stage": 3, "context": 2, "tensor": 2, "more": SCANNED},
    "pipe and tensor": {"pipe": 2, "tensor": 2},
    "tensor of 4": {"tensor": 4},
    "all, scanned": {"stage": 3, "pipe": 2, "zero": 2, "tensor": 2, "more": SCANNED},
}
GREEDY = [
    *[("everything", layout) for layout in LAYOUTS],
    ("gpt2", "scanned"), ("gpt2", "1f1b"), ("padded", "tensor and zero3"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "layout"), keep(GREEDY, [("everything", "all, scanned")]))
def test_greedy_is_the_plain_modules(name, layout):
    """Rows of unequal length, and not as many as the replicas divide."""
    step, state = laid_out(name, layout)
    found = step.generate(state, TOKENS, NEW, attention_mask=MASK, numpy=True)
    assert isinstance(found, np.ndarray)
    np.testing.assert_array_equal(found, case(name)[2])
    if name == "everything" and "tensor" in LAYOUTS[layout]:  # keys and values of this device's heads alone
        shapes = kept_or_gathered(step, state, np.zeros((6, S), np.int32), np.zeros(6, np.int32))
        assert {x[-2] for x in shapes if x[-3:-2] == (S + NEW,)} == {2 if layout == "tensor of 4" else 1}


@pytest.mark.slow
def test_zero3_gathers_the_layers_in_every_pass():
    """Left alone, XLA gathers all layers once, before the loop, and keeps them."""
    step, state = laid_out("everything", "zero3")
    lowered = step.generate._run.program.lower(state.params, (TOKENS[:4], None), NO_KEY, np.int32(4), None, new=3)
    gathers = {
        text.split()[0]: len(re.findall(r" all-gather(?:-start)?\(", text))
        for text in re.split(r"\n(?=\S)", lowered.compile().as_text())
    }
    stacked = 4 * sum(layout.stacked and layout.dim is not None for layout in jax.tree.leaves(step.layouts))
    ends = sum(not layout.stacked and layout.dim is not None for layout in jax.tree.leaves(step.layouts))
    prompt = gathers.pop("ENTRY")
    assert (prompt, sum(gathers.values())) == (stacked + ends, stacked)


def kept_or_gathered(step, state, tokens, padding=None):
    """The shapes of what the loops of a program carry, and of what it gathers."""
    run, rows = step.generate._run.program, jax.NamedSharding(step.mesh, batch_spec(step.mesh))
    batch = jax.device_put((tokens, padding), rows)  # as in a call, which then traces no more
    program = run.trace(state.params, batch, NO_KEY, np.int32(len(TOKENS)), None, new=NEW)
    loops = [one.eqn for one in operations(program.jaxpr) if one.name in ("while", "scan", "all_gather")]
    return {x.aval.shape for eqn in loops for x in eqn.outvars}


def restricted(logits, temperature, top_k, top_p):
    """The probabilities that users of transformers expect: temperature, then top_k, then top_p."""
    x = logits.astype(np.float64) / temperature
    order = np.argsort(-x)
    p = np.exp(x - x.max())[order]
    p[top_k:] = 0
    p /= p.sum()
    p[np.searchsorted(np.cumsum(p), top_p) + 1 :] = 0
    return (p / p.sum())[np.argsort(order)]


@pytest.mark.parametrize(("temperature", "top_k", "top_p"), [(1.5, 20, 0.8), (0.7, 3, 1.0)])
def test_samples_follow_the_distribution(temperature, top_k, top_p):
    rows, logits = 4000, np.random.default_rng(3).normal(size=61).astype(np.float32)
    expected = restricted(logits, temperature, top_k, top_p) * rows
    sampling = _sampling(jnp.int32(1), jax.random.key(2), np.float32(temperature), top_k, top_p, eos=None, pad=None)
    found = jax.jit(sample_tokens)(np.tile(logits, (rows, 1)), np.arange(rows), 0, sampling)
    counts, likely = np.bincount(found, minlength=61), expected > 0
    assert likely.sum() == (counts > 0).sum() > 2
    assert not counts[~likely].any()
    chi_squared = ((counts - expected)[likely] ** 2 / expected[likely]).sum()
    assert chi_squared < likely.sum() + 4 * (2 * likely.sum()) ** 0.5


@pytest.mark.parametrize("value", [1e-38, 1e-42, 1e-60])  # the smallest normal float32 is 1.2e-38
def test_tiny_values_are_greedy(value):
    logits = np.tile(np.arange(61, dtype=np.float32), (4000, 1))
    # 10 over the smallest normal number is infinite; 0.1 apart, only top_p makes samples greedy.
    for apart, temperature, top_k, top_p in ((10, value, None, None), (0.1, 1.0, 2**40, value)):
        sampling = _sampling(1, jax.random.key(0), temperature, top_k, top_p, eos=None, pad=None)
        assert (jax.jit(sample_tokens)(np.float32(apart) * logits, np.arange(4000), 0, sampling) == 60).all()


@functools.cache
def sampled(layout):
    step, state = laid_out("everything", layout)
    options = {"attention_mask": MASK, "rng": jax.random.key(3), "temperature": 0.9, "top_p": 0.9}
    return step.generate(state, TOKENS, NEW, **options, numpy=True)


@pytest.mark.parametrize(
    "layout", some(["zero2", "interleaved", "tensor and zero3", "pipe and tensor"], ["interleaved"])
)
def test_samples_are_the_same_on_every_layout(layout):
    expected = sampled("scanned")
    assert (expected[:, S:] != case("everything")[2][:, S:]).mean() > 0.2
    np.testing.assert_array_equal(sampled(layout), expected)


PASSES = []  # the number of rows in every pass of every device


class Sums(linen.Module):
    """A model whose next token is the sum of all before, modulo 41, plus 3; the sum is its cache."""

    def setup(self):
        self.bias = self.param("bias", linen.initializers.zeros, (50,))

    def make_cache(self, rows, length, dtype):
        return jnp.zeros(rows, jnp.int32)

    def decode(self, tokens, column, padding, cache):
        jax.debug.callback(lambda x: PASSES.append(len(x)), tokens)
        columns = column + jnp.arange(tokens.shape[1])
        there = True if padding is None else columns >= padding[:, None]
        cache = cache + jnp.where(there, tokens, 0).sum(1)
        return jax.nn.one_hot(cache % 41 + 3, 50) + self.bias[...], cache


def continued(row, padding, new, ends, pad):
    row = list(row)
    for left in reversed(range(new)):
        row.append(sum(row[padding:]) % 41 + 3)
        if row[-1] in ends:
            return row + [pad] * left
    return row


def test_rows_end():
    """Each at its own end; when all have ended, no further pass runs."""

    def loss(module, batch):
        return module.bias[...].sum() * batch.mean()

    step = step_of(jzero.from_flax(Sums(), loss, example_batch=jnp.zeros(1)), stage=3, zero=2)
    generate = functools.partial(step.generate, step.init(jax.random.key(0)))
    tokens, padding = np.array([[4, 5, 6], [9, 1, 2], [7, 7, 8]]), np.array([0, 1, 0])
    mask = (np.arange(3) >= padding[:, None]).astype(np.int32)
    free = [continued(row, skip, 20, [], 0) for row, skip in zip(tokens, padding, strict=True)]
    ends = [free[0][9], free[1][6], free[2][12]]
    expected = np.array([continued(row, skip, 20, ends, 49) for row, skip in zip(tokens, padding, strict=True)])
    lengths = (expected != 49).sum(1)
    assert len(set(lengths)) == 3
    PASSES.clear()
    found = generate(tokens, 20, attention_mask=mask, eos_token_id=ends, pad_token_id=49, numpy=True)
    jax.effects_barrier()
    np.testing.assert_array_equal(found, expected)
    assert [2] * 2 * (max(lengths) - 3) == PASSES  # of two rows, the fourth filled up, on two devices
    first = continued(tokens[0], 0, 20, ends[:1], ends[0])
    np.testing.assert_array_equal(generate(tokens[:1], 20, eos_token_id=ends[0])[0], first)


class Recurrent:
    """Functions instead of a Flax module: a stack whose layers sum up all that they have seen."""

    def init(self, rng):
        ends, stack = jax.random.split(rng)
        table, w = jax.random.normal(ends, (16, 8)), jax.random.normal(stack, (4, 8, 8))
        return {"ends": {"table": table}, "stack": {"w": w}}

    def prefix(self, ends, batch, rng):
        return ends["table"][batch]

    def block(self, layer, x, rng):
        return self.decode_block(layer, x, jnp.zeros(8))[0]

    def suffix(self, ends, x, batch, rng):
        return (x @ ends["table"].T).mean()

    loss = stack_loss

    def make_cache(self, rows, length, dtype):
        return jnp.zeros((rows, 1, 8), dtype)

    def decode_prefix(self, ends, tokens, column, padding):
        return ends["table"][tokens]

    def decode_block(self, layer, x, cache):
        sums = cache + jnp.cumsum(x @ layer["w"], axis=1)  # of products, so that `tensor` divides them
        return x + 3 * jnp.sin(sums), sums[:, -1:]

    def decode_suffix(self, ends, x):
        return x[:, -1] @ ends["table"].T


DIVIDED = {"tensor_parallel": {"dimensions": {"w": 1}}}
RECURRENT = [
    LAYOUTS["scanned"], LAYOUTS["interleaved"],
    {"tensor": 2, "zero": 2, "stage": 3, "more": DIVIDED}, {"pipe": 2, "tensor": 2, "more": DIVIDED},
]  # fmt: skip


@pytest.mark.parametrize("layout", keep(RECURRENT, RECURRENT[1::2]), ids=str)
def test_layers_that_are_recurrent(layout):
    """A stage of a pipeline computes several times in a pass, but sums once."""
    step, tokens, params = step_of(Recurrent(), **layout), TOKENS[:4] % 16, random_params(Recurrent(), 1.0)
    state = step.init(jax.random.key(0), params)
    if "tensor" in layout:
        assert (2 if "zero" in layout else 4, 1, 4) in kept_or_gathered(step, state, tokens)  # half of the sums

    def logits(tokens):
        x = params["ends"]["table"][tokens]
        for w in params["stack"]["w"]:
            x = x + 3 * np.sin(np.cumsum(x, axis=1) @ w)
        return x[:, -1] @ params["ends"]["table"].T

    expected = tokens
    for _ in range(NEW):
        expected = np.c_[expected, logits(expected).argmax(-1)]
    assert_varied(expected)
    np.testing.assert_array_equal(step.generate(state, tokens, NEW), expected)


def test_mistakes():
    step = step_of(model_of(CONFIGS["gpt2"]), zero=2)
    state, key = dataclasses.replace(step.state_shapes, step=jnp.int32(0)), jax.random.key(1)  # nothing reads the rest
    generate = functools.partial(step.generate, state)
    for arguments, words in (
        ({"max_new_tokens": 17}, "a row has 25 tokens, but the model has 24 positions"),
        ({"max_new_tokens": 0}, "max_new_tokens = 0: must be a positive integer"),
        ({"pad_token_id": 2**40}, "pad_token_id = 1099511627776: must be a token, or None"),
        ({"top_k": 5, "top_p": 0.9}, "top_k and top_p: only used for sampling"),
        ({"temperature": 0.7}, r"temperature: only used for sampling: pass a key, rng=jax.random.key\(0\)"),
        ({"rng": key, "temperature": -1}, "temperature = -1: must be a number >= 0"),
        ({"rng": key, "top_k": 0, "top_p": 0}, "(?s)top_k = 0: must be a positive integer.*top_p = 0: must be"),
        ({"rng": 3}, "rng = 3: must be one key"),
        ({"rng": key, "top_p": 1.1}, "top_p = 1.1: must be a number > 0 and <= 1"),
        ({"eos_token_id": 2**32 + 2}, "eos_token_id = .*: must be a token"),
        ({"eos_token_id": [2.5]}, "eos_token_id = .*: must be a token"),
        ({"tokens": TOKENS - 61}, r"tokens\[0, 0\] = -\d+: must be a token .*, or 0 in attention_mask"),
        ({"tokens": np.maximum(TOKENS, np.arange(S) * 10)}, r"\[0, 7\] = 70: must be a token below .* 61"),
        ({"tokens": TOKENS + np.int64(2**32), "attention_mask": MASK}, r"tokens\[0, 3\] = 4294967\d+: must be a token"),
        ({"tokens": TOKENS[0]}, r"int32\[8\]: must be integers \[rows, S\]; one prompt is tokens\[None\]"),
        ({"tokens": TOKENS + 0.5}, "float64"),
        ({"attention_mask": MASK[:2]}, r"attention_mask has shape \[2, 8\]"),
        ({"attention_mask": MASK[:, ::-1]}, r'row 0 has padding after a token.*tokenizer.padding_side = "left"'),
    ):
        refuses(lambda more=arguments: generate(**{"tokens": TOKENS, "max_new_tokens": 2, **more}), words)
    without = step_of(jzero.from_flax(lambda rngs: nnx.Linear(4, 4, rngs=rngs), lambda m, b: m(b).mean()))
    words = "has no cache: give the module make_cache, decode_prefix"
    refuses(lambda: without.generate(state, TOKENS, 2), words)
