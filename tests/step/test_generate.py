"""Generated text. Oracle: the plain module on the whole sequence, without a cache, on one device.

tests/weights/test_families.py compares with `transformers`.
"""

import dataclasses
import functools
import re
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from helpers.sampling import keep, some
from helpers.steps import mesh, settings

import jzero
from jzero.model import stack_loss
from jzero.step.generate import Sampling, _sampling, sample_tokens
from jzero.tree import named
from models.decoder import Decoder
from models.decoder_config import DecoderConfig
from models.gpt2 import GPT2, GPT2Config
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
    "llama": DecoderConfig(4, 32, 4, 2, 48, vocab_size=61, rope_theta=50.0, tied=True),
    "padded": DecoderConfig(2, 32, 4, 2, 48, vocab_size=61, pad_vocab_to=4, rope_theta=50.0, tied=True),
    "window": DecoderConfig(4, 32, 4, 2, 48, vocab_size=61, rope_theta=50.0, window=4),
    "gpt2": GPT2Config(4, 32, 4, 48, vocab_size=61, max_positions=24),
}
S, NEW = 8, 10
TOKENS = np.random.default_rng(0).integers(0, 61, (5, S)).astype(np.int32)
PADDING = np.array([3, 0, 7, 1, 0])  # rows of unequal length
MASK = (np.arange(S) >= PADDING[:, None]).astype(np.int32)


def model_of(config):
    return jzero.from_flax(lambda rngs: (GPT2 if isinstance(config, GPT2Config) else Decoder)(config, rngs=rngs))


def step_of(model, stage=0, more=None, **axes):
    config = settings(None, stage, accum=2, train_micro_batch_size_per_gpu=2, **(more or {}))
    return jzero.make_train_step(model, config, mesh=mesh(**{"zero": 1, **axes}))


def random_params(model, scale=0.3):
    """Parameters whose continuations vary: biases and norms are random too."""
    shapes = named(jax.eval_shape(model.init, jax.random.key(0)))
    rng = np.random.default_rng(1)
    values = {name: (name[-5:] == "scale") + scale * rng.normal(size=x.shape) for name, x in shapes.items()}
    tree = jax.tree.structure(jax.eval_shape(model.init, jax.random.key(0)))
    return jax.tree.unflatten(tree, [x.astype(np.float32) for x in values.values()])


class Plain:
    """Generation by recomputing everything for every token; rows begin at column 0."""

    def __init__(self, model, params):
        logits = jax.jit(lambda params, tokens: model.module(params)(tokens).astype(jnp.float32))
        self.logits = lambda tokens: logits(params, tokens)

    def continued(self, tokens, padding, new, choose=lambda logits: logits.argmax(-1)):
        rows, length = tokens.shape
        full = np.zeros((rows, length + new), np.int32)
        for row, start in enumerate(padding):
            full[row, : length - start] = tokens[row, start:]
        everyone, last = np.arange(rows), length - padding - 1
        for _ in range(new):
            logits = np.asarray(self.logits(full))[everyone, last]
            last = last + 1
            full[everyone, last] = choose(logits)
        moved = [np.r_[tokens[row, :start], full[row, : length + new - start]] for row, start in enumerate(padding)]
        return np.stack(moved)


@functools.cache
def case(name):
    """A model, its parameters, and what the plain module generates on one device."""
    model = model_of(CONFIGS[name])
    params = random_params(model)
    expected = Plain(model, params).continued(TOKENS, PADDING, NEW)
    assert len(set(expected[:, S:].ravel().tolist())) > 5, "the test needs continuations that vary"
    return model, params, expected


LAYOUTS = {
    "plain": {},
    "zero3": {"stage": 3, "zero": 2},
    "scanned": {"stage": 3, "zero": 2, "more": {"stack": {"unroll": False}}},
    "zero2": {"stage": 2, "data": 2, "zero": 2},
    "1f1b": {"pipe": 2},
    "pipe and zero3": {"stage": 3, "pipe": 2, "zero": 2},
    "interleaved": {"stage": 3, "pipe": 2, "zero": 2, "more": {"pipeline": {"schedule": "interleaved", "chunks": 2}}},
    "pipe, scanned": {"pipe": 2, "more": {"stack": {"unroll": False}}},
    "tensor and zero3": {"stage": 3, "zero": 2, "tensor": 2},
    "context, scanned": {"stage": 3, "context": 2, "tensor": 2, "more": {"stack": {"unroll": False}}},
    "pipe and tensor": {"pipe": 2, "tensor": 2},
}
GREEDY = [
    *product(["everything"], LAYOUTS),
    ("llama", "zero2"), ("window", "zero3"), ("gpt2", "scanned"), ("gpt2", "pipe and zero3"),
    ("padded", "tensor and zero3"),
]  # fmt: skip


CHOSEN = [("everything", "interleaved"), ("padded", "tensor and zero3")]


@pytest.mark.parametrize(("name", "layout"), keep(GREEDY, CHOSEN))
def test_greedy_is_the_plain_modules(name, layout):
    """Rows of unequal length, and not as many as the replicas divide."""
    model, params, expected = case(name)
    step = step_of(model, **LAYOUTS[layout])
    state = step.init(jax.random.key(0), params)
    found = step.generate(state, TOKENS, NEW, attention_mask=MASK, numpy=True)
    assert isinstance(found, np.ndarray)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.slow
def test_zero3_gathers_the_layers_in_every_pass():
    """Left alone, XLA gathers all layers once, before the loop, and keeps them."""
    model, params, _ = case("llama")
    step = step_of(model, 3, zero=2)
    state, greedy = step.init(jax.random.key(0), params), Sampling(None, None, None, None, None, np.int32(0))
    lowered = step.generate._run.program.lower(state.params, (TOKENS[:4], None), greedy, np.int32(4), None, new=3)
    gathers = {
        text.split()[0]: len(re.findall(r" all-gather(?:-start)?\(", text))
        for text in re.split(r"\n(?=\S)", lowered.compile().as_text())
    }
    stacked = 4 * sum(layout.stacked and layout.dim is not None for layout in jax.tree.leaves(step.layouts))
    ends = sum(not layout.stacked and layout.dim is not None for layout in jax.tree.leaves(step.layouts))
    prompt = gathers.pop("ENTRY")
    assert (prompt, sum(gathers.values())) == (stacked + ends, stacked)


def restricted(logits, temperature, top_k, top_p):
    """The probabilities that users of transformers expect: temperature, then top_k, then top_p."""
    x = logits.astype(np.float64) / temperature
    order = np.argsort(-x)
    p = np.exp(x - x.max())[order]
    p[top_k:] = 0
    p /= p.sum()
    p[np.searchsorted(np.cumsum(p), top_p) + 1 :] = 0
    return (p / p.sum())[np.argsort(order)]


@pytest.mark.slow
def test_samples_follow_the_models_distribution():
    model, params, _ = case("llama")
    step = step_of(model, zero=2, more={"stack": {"unroll": False}})
    state = step.init(jax.random.key(0), params)
    prompts = np.repeat(TOKENS[:1], 4000, 0)
    logits = np.asarray(Plain(model, params).logits(TOKENS[:1]))[0, -1]
    for temperature, top_k, top_p in ((1.5, 20, 0.8), (0.7, 3, 1.0)):  # one program
        expected = restricted(logits, temperature, top_k, top_p) * len(prompts)
        options = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
        found = np.asarray(step.generate(state, prompts, 1, rng=jax.random.key(2), **options))[:, -1]
        counts = np.bincount(found, minlength=61)
        likely = expected > 0
        assert likely.sum() == (counts > 0).sum() > 2
        assert not counts[~likely].any()
        chi_squared = ((counts - expected)[likely] ** 2 / expected[likely]).sum()
        assert chi_squared < likely.sum() + 4 * (2 * likely.sum()) ** 0.5


@pytest.mark.parametrize("option", ["temperature", "top_p"])
@pytest.mark.parametrize("value", [1e-38, 1e-42, 1e-60])  # the smallest normal float32 is 1.2e-38
def test_tiny_values_are_greedy(option, value):
    options = {"temperature": 1.0, "top_p": None, option: value}
    sampling = _sampling(1, jax.random.key(0), top_k=None, eos=None, pad=None, **options)
    logits = jnp.array([[10.0, 20.0, 30.0]])  # each over the smallest normal number is infinite
    assert jax.jit(sample_tokens)(logits, jnp.arange(1), 0, sampling).tolist() == [2]


@pytest.mark.parametrize("of", [np.float32, np.float64, jnp.float32, jnp.bfloat16, np.array])
def test_arrays_of_one_number_are_numbers(of):
    options = {"temperature": 0.5, "top_p": 0.75}  # bfloat16 holds both
    plain = _sampling(1, jax.random.key(0), top_k=2**31 - 1, eos=None, pad=3, **options)
    arrays = {name: of(value) for name, value in options.items()}
    found = _sampling(jnp.int32(1), jax.random.key(0), top_k=2**40, eos=None, pad=jnp.int32(3), **arrays)
    assert found[1:] == plain[1:]


@functools.cache
def sampled(layout):
    model, params, _ = case("everything")
    step = step_of(model, **LAYOUTS[layout])
    state = step.init(jax.random.key(0), params)
    options = {"attention_mask": MASK, "rng": jax.random.key(3), "temperature": 0.9, "top_p": 0.9}
    return step.generate(state, TOKENS, NEW, **options, numpy=True)


@pytest.mark.parametrize("layout", some([name for name in LAYOUTS if name != "scanned"], ["pipe and zero3"]))
def test_samples_are_the_same_on_every_layout(layout):
    expected = sampled("scanned")
    assert (expected[:, S:] != case("everything")[2][:, S:]).mean() > 0.2
    np.testing.assert_array_equal(sampled(layout), expected)


PASSES = []  # the number of rows in every pass of every device


class Sums(nnx.Module):
    """A model whose next token is the sum of all before, modulo 41, plus 3; the sum is its cache."""

    def __init__(self, rngs):
        self.bias = nnx.Param(jnp.zeros(50))

    def make_cache(self, rows, length, dtype):
        return jnp.zeros(rows, jnp.int32)

    def decode(self, tokens, column, padding, cache):
        jax.debug.callback(lambda x: PASSES.append(len(x)), tokens)
        columns = column + jnp.arange(tokens.shape[1])
        there = True if padding is None else columns >= padding[:, None]
        cache = cache + jnp.where(there, tokens, 0).sum(1)
        return jax.nn.one_hot(cache % 41 + 3, 50) + self.bias[...], cache


class LinenSums(linen.Module):
    def setup(self):
        self.bias = self.param("bias", linen.initializers.zeros, (50,))

    make_cache, decode = Sums.make_cache, Sums.decode


def loss(module, batch):
    return module.bias[...].sum() * batch.mean()


def continued(row, padding, new, ends, pad):
    """A row of tokens, continued by the rule of `Sums`."""
    row = list(row)
    for left in reversed(range(new)):
        row.append(sum(row[padding:]) % 41 + 3)
        if row[-1] in ends:
            return row + [pad] * left
    return row


@pytest.mark.parametrize("kind", keep(["nnx", "linen"], ["nnx"]))
def test_rows_end(kind):
    """Each at its own end; when all have ended, no further pass runs."""
    nnx_model, linen_model = jzero.from_flax(Sums, loss), jzero.from_flax(LinenSums(), loss, example_batch=jnp.zeros(1))
    step = step_of(nnx_model if kind == "nnx" else linen_model, stage=3, zero=2)
    generate = functools.partial(step.generate, step.init(jax.random.key(0)))
    tokens, padding = np.array([[4, 5, 6], [9, 1, 2], [7, 7, 8]]), np.array([0, 1, 0])
    mask = (np.arange(3) >= padding[:, None]).astype(np.int32)
    free = [continued(row, skip, 20, [], 0) for row, skip in zip(tokens, padding, strict=True)]
    np.testing.assert_array_equal(generate(tokens, 20, attention_mask=mask), free)
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
        sums = cache + jnp.cumsum(x, axis=1)
        return x + 3 * jnp.sin(sums @ layer["w"]), sums[:, -1:]

    def decode_suffix(self, ends, x):
        return x[:, -1] @ ends["table"].T


@pytest.mark.parametrize("layout", keep(["scanned", "1f1b", "interleaved"], ["interleaved"]))
def test_layers_that_are_recurrent(layout):
    """A stage of a pipeline computes several times in a pass, but sums once."""
    model, tokens = Recurrent(), TOKENS[:4] % 16
    step = step_of(model, **LAYOUTS[layout])
    state = step.init(jax.random.key(0))
    params = jax.device_get(state.params)

    def logits(tokens):
        x = params["ends"]["table"][tokens]
        for w in params["stack"]["w"]:
            x = x + 3 * np.sin(np.cumsum(x, axis=1) @ w)
        return x[:, -1] @ params["ends"]["table"].T

    expected = tokens
    for _ in range(NEW):
        expected = np.c_[expected, logits(expected).argmax(-1)]
    assert len(set(expected[:, S:].ravel().tolist())) > 5
    np.testing.assert_array_equal(step.generate(state, tokens, NEW), expected)


@pytest.mark.slow
def test_half_precision_and_averaged_weights():
    """With rounding a token may be another, but then it is as probable; the plain module reads what was generated."""
    model, params, _ = case("everything")
    step = step_of(model, 3, {"bf16": {"enabled": True}, "ema": {"decay": 0.5}, "stack": {"unroll": False}}, zero=2)
    state = step.init(jax.random.key(0), params)  # the average is that of the first parameters
    state = dataclasses.replace(state, params=jax.tree.map(jnp.negative, state.params))
    found = step.generate(step.averaged(state), TOKENS, NEW, numpy=True)

    def regret(params):
        """By how much the likeliest token is better than the generated one."""
        weights = jax.tree.map(lambda x: x.astype(jnp.bfloat16), jax.device_get(params))
        logits = np.asarray(Plain(model, weights).logits(found))[:, S - 1 : -1]
        return (logits.max(-1) - np.take_along_axis(logits, found[:, S:, None], 2)[..., 0]).max()

    assert regret(params) < 0.1
    assert regret(state.params) > 0.5


def test_mistakes():
    step = step_of(model_of(CONFIGS["gpt2"]), zero=2)
    generate, key = functools.partial(step.generate, step.init(jax.random.key(0))), jax.random.key(1)
    for arguments, words in (
        ({"max_new_tokens": 17}, "a row has 25 tokens, but the model has 24 positions"),
        ({"max_new_tokens": 0}, "max_new_tokens = 0: must be a positive integer"),
        ({"max_new_tokens": 2**40}, "max_new_tokens = 1099511627776: must be a positive integer"),
        ({"pad_token_id": 2**40}, "pad_token_id = 1099511627776: must be a token, or None"),
        ({"temperature": 0.7}, r"temperature: only used for sampling: pass a key, rng=jax.random.key\(0\)"),
        ({"top_k": 5, "top_p": 0.9}, "top_k and top_p: only used for sampling"),
        ({"rng": key, "temperature": -1}, "temperature = -1: must be a number >= 0"),
        ({"rng": key, "temperature": "hot"}, "temperature = 'hot'"),
        ({"rng": key, "top_k": 0, "top_p": 0}, "(?s)top_k = 0: must be a positive integer.*top_p = 0: must be"),
        ({"rng": key, "top_p": 1.1}, "top_p = 1.1: must be a number > 0 and <= 1"),
        ({"rng": 3}, "rng = 3: must be one key"),
        ({"eos_token_id": [2.5]}, "eos_token_id = .*: must be a token"),
        ({"eos_token_id": 2**32 + 2}, "eos_token_id = .*: must be a token"),
        ({"eos_token_id": [[1, 2], [3, 4]]}, "(?s)eos_token_id = .*: must be a token"),
        ({"tokens": TOKENS - 61}, r"tokens\[0, 0\] = -\d+: must be a token .*, or 0 in attention_mask"),
        ({"tokens": np.maximum(TOKENS, np.arange(S) * 10)}, r"\[0, 7\] = 70: must be a token below .* 61"),
        ({"tokens": TOKENS + np.int64(2**32), "attention_mask": MASK}, r"tokens\[0, 3\] = 4294967\d+: must be a token"),
        ({"tokens": TOKENS[0]}, r"int32\[8\]: must be integers \[rows, S\]; one prompt is tokens\[None\]"),
        ({"tokens": TOKENS + 0.5}, "float64"),
        ({"attention_mask": MASK[:2]}, r"attention_mask has shape \[2, 8\]"),
        ({"attention_mask": MASK[:, ::-1]}, r'row 0 has padding after a token.*tokenizer.padding_side = "left"'),
    ):
        with pytest.raises(jzero.ConfigError, match=words):
            generate(**{"tokens": TOKENS, "max_new_tokens": 2, **arguments})
    without = step_of(jzero.from_flax(lambda rngs: nnx.Linear(4, 4, rngs=rngs), lambda m, b: m(b).mean()))
    with pytest.raises(jzero.ConfigError, match="has no cache: give the module make_cache, decode_prefix"):
        without.generate(without.init(jax.random.key(0)), TOKENS, 2)
