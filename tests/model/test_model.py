"""Flax modules as models, and the Llama: its arithmetic against formulas written out here."""

import dataclasses
from functools import partial
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from helpers.sampling import keep, sample

import jzero
from jzero.attention_kernels import kernel_for
from models.decoder_attention import Attention
from models.llama import PRESETS, Llama, LlamaConfig, preset
from models.mlp import MLP, cross_entropy
from models.rope import rope

X = {"x": np.ones((4, 3), np.float32)}


def shapes(params):
    return {jax.tree_util.keystr(p, simple=True, separator="/"): x.shape for p, x in jax.tree.leaves_with_path(params)}


def mean_square(module, batch):
    return (module(batch["x"]) ** 2).mean()


# ------------------------------------------------------------------------------------------- NNX


class Positional(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(3, 2, rngs=rngs)

    def __call__(self, x):
        return self.linear(x)


class Late(Positional):
    """`rngs` not first, and not keyword-only."""

    def __init__(self, width=2, rngs=None):
        self.linear = nnx.Linear(3, width, rngs=rngs)


class Keyword(Positional):
    def __init__(self, *, rngs):
        super().__init__(rngs)


@pytest.mark.parametrize(
    "module",
    [
        Positional, Late, Keyword, partial(Late, 2), partial(MLP, 3, 5, 2), lambda rngs: nnx.Linear(3, 2, rngs=rngs),
        lambda r: nnx.Linear(3, 2, rngs=r), lambda *, rngs: nnx.Linear(3, 2, rngs=rngs),
    ],
    ids=["class", "class-late", "class-keyword", "partial", "partial-keyword", "lambda", "lambda-r", "lambda-keyword"],
)  # fmt: skip
def test_every_way_to_say_a_module(module):
    model = jzero.from_flax(module, mean_square)
    params = model.init(jax.random.key(0))
    other = model.init(jax.random.key(1))
    assert any((a != b).any() for a, b in zip(*map(jax.tree.leaves, (params, other)), strict=True))
    out = model.module(params)(X["x"])
    assert out.shape == (4, 2)
    np.testing.assert_allclose(model.loss(params, X, None), (out**2).mean(), rtol=1e-6)


def test_nnx_parameters_are_plain_and_are_what_the_module_uses():
    model = jzero.from_flax(partial(MLP, 3, 5, 2), mean_square)
    params = model.init(jax.random.key(0))
    assert shapes(params) == {"fc1/bias": (5,), "fc1/kernel": (3, 5), "fc2/bias": (2,), "fc2/kernel": (5, 2)}
    assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(params))
    expected = jax.nn.relu(X["x"] @ params["fc1"]["kernel"]) @ params["fc2"]["kernel"]
    np.testing.assert_allclose(model.module(params)(X["x"]), expected, rtol=1e-6)
    assert repr(model) == "from_flax(MLP)"


def test_a_loss_of_three_parameters_gets_the_key():
    seen = []

    def loss(module, batch, rng):
        seen.append(rng)
        return jzero.Mean(module(batch["x"]).sum(), jnp.float32(4))

    model, key = jzero.from_flax(Positional, loss), jax.random.key(7)
    _, count = model.loss(model.init(key), X, key)
    model.loss(model.init(key), X, None)
    assert seen[0] is key
    assert seen[1] is None
    assert count == 4


def test_a_default_of_the_loss_is_not_taken_for_the_key():
    def loss(module, batch, scale=2.0):
        return scale * module(batch["x"]).sum()

    model = jzero.from_flax(Positional, loss)
    params = model.init(jax.random.key(0))
    assert model.loss(params, X, jax.random.key(1)) == model.loss(params, X, None) != 0


class Dropped(nnx.Module):
    def __init__(self, rngs):
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.linear = nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, x):
        return self.dropout(self.linear(x))


def test_nnx_dropout_follows_the_key_and_is_off_in_evaluation():
    model = jzero.from_flax(Dropped, lambda module, batch: (module(batch) == 0).mean())
    params, x = model.init(jax.random.key(0)), np.ones((64, 8), np.float32)
    fraction = lambda key: float(model.loss(params, x, key))  # noqa: E731
    assert fraction(None) == 0
    assert 0.4 < fraction(jax.random.key(1)) < 0.6
    assert fraction(jax.random.key(1)) == fraction(jax.random.key(1)) != fraction(jax.random.key(2))


@pytest.mark.parametrize(
    ("module", "loss", "words"),
    [
        (Positional, None, "loss_fn.*missing"),
        (3, mean_square, "neither an nnx or Linen module"),
        (linen.Dense(2), mean_square, "example_batch"),
        (linen.Dense(2), None, "example_batch"),
    ],
)
def test_what_is_missing_is_named(module, loss, words):
    with pytest.raises(jzero.ConfigError, match=words):
        jzero.from_flax(module, loss)


def test_something_that_is_no_model():
    config = {"train_batch_size": 8, "optimizer": {"type": "AdamW"}}
    with pytest.raises(jzero.ConfigError, match=r"jzero\.from_flax"):
        jzero.make_train_step(nnx.Linear(3, 2, rngs=nnx.Rngs(0)), config)


# ------------------------------------------------------------------------------------------- an NNX stack


class Layer(nnx.Module):
    def __init__(self, rngs):
        self.linear, self.dropout = nnx.Linear(8, 8, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return x + self.dropout(jnp.tanh(self.linear(x)))


class Stacked(nnx.Module):
    def __init__(self, layers=3, *, rngs):
        self.inner = nnx.Linear(3, 8, rngs=rngs)
        self.stack = nnx.vmap(Layer)(rngs.split(layers))
        self.outer = nnx.Linear(8, 2, rngs=rngs)

    def prefix(self, batch):
        return self.inner(batch["x"])

    def suffix(self, x, batch):
        return (self.outer(x) ** 2).mean()


def test_nnx_stack():
    model = jzero.from_flax(Stacked)
    params = model.init(jax.random.key(0))
    assert set(params) == {"ends", "stack"}
    assert shapes(params["stack"]) == {"linear/bias": (3, 8), "linear/kernel": (3, 8, 8)}
    kernel = params["stack"]["linear"]["kernel"]
    assert (kernel[0] != kernel[1]).any()
    x = X["x"] @ params["ends"]["inner"]["kernel"] + params["ends"]["inner"]["bias"]
    for w, b in zip(kernel, params["stack"]["linear"]["bias"], strict=True):
        x = x + jnp.tanh(x @ w + b)
    expected = ((x @ params["ends"]["outer"]["kernel"] + params["ends"]["outer"]["bias"]) ** 2).mean()
    np.testing.assert_allclose(model.loss(params, X, None), expected, rtol=1e-6)
    assert model.module(params).stack.linear.kernel.shape == (3, 8, 8)
    one, two = (model.loss(params, X, jax.random.key(i)) for i in (1, 2))
    assert one != two  # dropout


def test_nnx_stack_has_its_loss_in_suffix():
    with pytest.raises(jzero.ConfigError, match="drop loss_fn"):
        jzero.from_flax(Stacked, mean_square)


# ------------------------------------------------------------------------------------------- Linen


class LinenNet(linen.Module):
    @linen.compact
    def __call__(self, x, train=False):
        x = linen.Dropout(0.5, deterministic=not train)(linen.Dense(8)(x))
        return linen.Dense(2)(x)


def linen_loss(module, batch, rng):
    return (module(batch["x"], train=rng is not None) ** 2).mean()


@pytest.mark.parametrize("example", [X, {"x": jax.ShapeDtypeStruct((4, 3), jnp.float32)}], ids=["arrays", "shapes"])
def test_linen(example):
    model = jzero.from_flax(LinenNet(), linen_loss, example_batch=example)
    params = model.init(jax.random.key(0))
    assert shapes(params)["Dense_0/kernel"] == (3, 8)
    by_hand = LinenNet().apply({"params": params}, X["x"])
    np.testing.assert_allclose(model.loss(params, X, None), (by_hand**2).mean(), rtol=1e-6)
    np.testing.assert_allclose(model.module(params)(X["x"]), by_hand, rtol=1e-6)
    losses = {float(model.loss(params, X, jax.random.key(i))) for i in (1, 1, 2)}
    assert len(losses) == 2  # dropout, by the key
    assert repr(model) == "from_flax(LinenNet)"


@pytest.mark.slow
def test_linen_and_nnx_train():
    for model in (
        jzero.from_flax(LinenNet(), linen_loss, example_batch=X),
        jzero.from_flax(Stacked),
        jzero.from_flax(partial(MLP, 3, 8, 2), lambda m, b: cross_entropy(m, (b["x"], jnp.zeros(len(b["x"]), int)))),
    ):
        config = {
            "train_batch_size": 4,
            "optimizer": {"type": "AdamW", "params": {"lr": 0.05}},
            "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        }
        step = jzero.make_train_step(model, config, mesh=jzero.make_mesh(devices=jax.devices()[:2]))
        state = step.init(jax.random.key(0))
        before = float(step.evaluate(state, X))
        for _ in range(5):
            state, _ = step(state, X)
        assert float(step.evaluate(state, X)) < 0.9 * before


# ------------------------------------------------------------------------------------------- Llama

TINY = LlamaConfig(2, 32, 4, 2, 48, vocab_size=64)
TOKENS = np.random.default_rng(0).integers(0, 64, (3, 12)).astype(np.int32)


def build(**changes):
    config = dataclasses.replace(TINY, **changes)
    model = jzero.from_flax(lambda rngs: Llama(config, rngs=rngs))
    rng = np.random.default_rng(0)
    # Norms would start at one: other numbers show more.
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    start = jax.tree_util.tree_map_with_path(lambda path, x: "norm" in str(path) and x.ndim < 3, shapes)
    normal = lambda x, one: (one + 0.1 * rng.normal(size=x.shape)).astype(np.float32)  # noqa: E731
    return model, jax.tree.map(lambda *args: jnp.asarray(normal(*args)), shapes, start)


@pytest.mark.parametrize(("name", "tied"), sample(product(PRESETS, [True, False]), strength=1))
def test_num_parameters(name, tied):
    config = preset(name, tied=tied)
    params = jax.eval_shape(jzero.from_flax(lambda rngs: Llama(config, rngs=rngs)).init, jax.random.key(0))
    assert config.num_parameters == sum(x.size for x in jax.tree.leaves(params))


def test_presets_are_what_their_names_say():
    sizes = {name: preset(name, vocab_size=128_256).num_parameters / 1e9 for name in ("8b", "70b", "405b")}
    assert sizes == pytest.approx({"8b": 8.03, "70b": 70.55, "405b": 405.85}, abs=0.01)  # Llama 3's model card
    assert preset("1b").num_parameters == pytest.approx(1.1e9, rel=0.03)
    assert preset("125m").num_parameters == pytest.approx(110e6, rel=0.01)
    with pytest.raises(ValueError, match="'9b' is unknown; choose one of tiny, 125m"):
        preset("9b")


@pytest.mark.parametrize("tied", keep([True, False], [True]))
def test_the_logits_are_those_of_the_training_path(tied):
    model, params = build(tied=tied)
    labels = np.where(np.arange(12) < np.array([[12], [3], [7]]), np.roll(TOKENS, -1, 1), -1)
    total, count = jax.jit(model.loss)(params, {"inputs": TOKENS, "labels": labels}, None)
    logits = jax.jit(lambda params: model.module(params)(TOKENS))(params)
    assert logits.dtype == jnp.float32
    assert logits.shape == (3, 12, 64)
    log_p = np.asarray(jax.nn.log_softmax(logits))
    expected = -sum(log_p[b, s, labels[b, s]] for b in range(3) for s in range(12) if labels[b, s] >= 0)
    np.testing.assert_allclose(total, expected, rtol=1e-6)
    assert count == 12 + 3 + 7


def test_the_past_does_not_see_the_future():
    model, params = build()
    logits = jax.jit(lambda tokens: model.module(params)(tokens))
    changed = TOKENS.copy()
    changed[:, 7:] = (changed[:, 7:] + 1) % 64
    a, b = logits(TOKENS), logits(changed)
    np.testing.assert_array_equal(a[:, :7], b[:, :7])
    assert (np.abs(a[:, 7:] - b[:, 7:]).max(axis=-1) > 1e-3).all()


def test_attention_by_hand():
    """Grouped queries: query head h reads key-value head h // (H / K)."""
    config, x = TINY, np.asarray(jax.random.normal(jax.random.key(0), (2, 6, 32)))
    attention = Attention(config, rngs=nnx.Rngs(1))
    qkv = np.einsum("bsd,dkgc->bskgc", x, np.asarray(attention.qkv.kernel[...]))  # a head's 2 queries, key, value
    q, k, v = qkv[:, :, :, :2].reshape(2, 6, 4, 8), qkv[:, :, :, 2], qkv[:, :, :, 3]
    q, k = (np.asarray(rope(jnp.asarray(t), config.rope_theta)) for t in (q, k))
    out = np.zeros((2, 6, 4, 8))
    for b in range(2):
        for h in range(4):
            for s in range(6):
                scores = np.array([q[b, s, h] @ k[b, t, h // 2] / np.sqrt(8) for t in range(s + 1)])
                weights = np.exp(scores - scores.max())
                out[b, s, h] = weights / weights.sum() @ v[b, : s + 1, h // 2]
    expected = out.reshape(2, 6, 32) @ np.asarray(attention.out.kernel[...])
    np.testing.assert_allclose(attention(jnp.asarray(x)), expected, rtol=1e-4, atol=1e-6)


def test_feed_forward_and_norm_by_hand():
    model, params = build(num_layers=1)
    layer = jax.tree.map(lambda w: np.asarray(w[0], np.float64), params["stack"])
    x = np.asarray(jax.random.normal(jax.random.key(0), (1, 1, 32)), np.float64)  # one position: attention is its value

    def norm(x, scale):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + TINY.norm_eps) * scale

    values = layer["attention"]["qkv"]["kernel"][:, :, 3].reshape(32, 16)  # of 2 heads
    value = (norm(x, layer["attention_norm"]["scale"]) @ values).reshape(2, 8)
    x1 = x + value[[0, 0, 1, 1]].reshape(1, 1, 32) @ layer["attention"]["out"]["kernel"]
    gate, up = (norm(x1, layer["mlp_norm"]["scale"]) @ layer["mlp"]["gate_up"]["kernel"][:, i] for i in (0, 1))
    expected = x1 + (gate / (1 + np.exp(-gate)) * up) @ layer["mlp"]["down"]["kernel"]
    got = jax.jit(model.block)(jax.tree.map(lambda w: np.asarray(w)[0], params["stack"]), jnp.float32(x), None)
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


def test_rope_sees_distances_only():
    q, k = (jax.random.normal(jax.random.key(i), (1, 1, 1, 8)) for i in (0, 1))

    def rotated(x):
        return np.asarray(rope(jnp.tile(x, (1, 16, 1, 1)), 100.0)[0, :, 0])  # the same vector at every position

    scores = rotated(q) @ rotated(k).T
    for distance in (-5, 0, 1, 9):
        diagonal = np.diagonal(scores, distance)
        np.testing.assert_allclose(diagonal, diagonal[0], rtol=1e-4, atol=1e-5)
    assert scores[0].std() > 0.1
    np.testing.assert_allclose(np.linalg.norm(rotated(q), axis=-1), np.linalg.norm(q), rtol=1e-6)
    np.testing.assert_array_equal(rotated(q)[0], q[0, 0, 0])
    position, pair = 3, 1  # angle: position * theta ** (-pair / (C / 2)), the pair is (1, 1 + C / 2)
    angle, x = 3 * 100.0 ** (-1 / 4), np.asarray(q[0, 0, 0])
    expected = x[pair] * np.cos(angle) - x[pair + 4] * np.sin(angle)
    np.testing.assert_allclose(rotated(q)[position, pair], expected, rtol=1e-5)
    assert rope(q.astype(jnp.bfloat16), 100.0).dtype == jnp.bfloat16


def test_flops_per_token_by_hand():
    # 6 x (weights that multiply: per layer qkv 32 x 64, out 32 x 32, gate_up 32 x 96, down 48 x 32, two norms 64;
    # the last norm 32, the head 32 x 64) + attention: 6 x layers x width x sequence (two products, half of it masked).
    layer = 32 * 64 + 32 * 32 + 32 * 96 + 48 * 32 + 64
    expected = 6 * (2 * layer + 32 + 32 * 64) + 6 * 2 * 32 * 100
    assert TINY.flops_per_token(100) == expected
    assert dataclasses.replace(TINY, tied=True).flops_per_token(100) == expected


@pytest.mark.parametrize(("length", "chunk", "window"), [(100, 12.5, 21.875), (60, 11.25, 19.791_666), (20, 10, 10)])
def test_flops_of_chunks_and_windows(length, chunk, window):
    """A token of a chunk of 25 sees half of it; one of a sliding window all 25, but for the first tokens."""
    of_a_key = 6 * 2 * (32 + 32)  # two layers, with queries' products of 32 and values' of 32
    for chunked, keys in ((True, chunk), (False, window)):
        made = dataclasses.replace(TINY, window=25, chunked=chunked)
        found = made.flops_per_token(length) - TINY.flops_per_token(length)
        assert found == pytest.approx(of_a_key * (keys - length / 2), rel=1e-6)


def test_attention_kernel(monkeypatch):
    dtypes = (jnp.dtype("float32"), jnp.dtype("bfloat16"), jnp.dtype("float16"))
    assert [kernel_for("auto", d) for d in dtypes] == ["xla"] * 3  # no GPU here
    assert [kernel_for("cudnn", d) for d in dtypes] == ["cudnn"] * 3
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert [kernel_for("auto", d) for d in dtypes] == ["xla", "cudnn", "cudnn"]
    assert [kernel_for("xla", d) for d in dtypes] == ["xla"] * 3


def test_mlp():
    model = jzero.from_flax(MLP, cross_entropy)
    params = model.init(jax.random.key(0))
    assert sum(x.size for x in jax.tree.leaves(params)) == 784 * 128 + 128 + 128 * 10 + 10
    images, labels = np.ones((5, 28, 28), np.float32), np.arange(5)
    logits = model.module(params)(images)
    expected = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
    np.testing.assert_allclose(model.loss(params, (images, labels), None), expected, rtol=1e-6)
    np.testing.assert_array_equal(logits, model.module(params)(images.reshape(5, 784)))
