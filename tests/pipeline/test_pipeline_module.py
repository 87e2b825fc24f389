"""PipelineModule: which layers are the stack, NNX and Linen layers, shared parameters, errors, switches."""

from functools import lru_cache

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from helpers.drawn import random_params
from helpers.plain_flax import cross_entropy, dense
from helpers.refusals import refuses
from helpers.sampling import keep

import jzero
from jzero.model import Inputs, StackModel, fold
from jzero.pipeline.layer_switch import switched
from jzero.pipeline.module import LayerSpec, PipelineModule, TiedLayerSpec
from jzero.tree import named

X = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
Y = np.random.default_rng(1).normal(size=(4, 2)).astype(np.float32)
KEY = jax.random.key(0)
BLOCK = LayerSpec(nnx.Linear, 8, 8)


def mean_square(outputs, labels):
    return ((outputs - labels) ** 2).mean()


def pipeline(*layers, **options):
    return PipelineModule(layers, options.pop("num_stages", None), **{"loss_fn": mean_square, **options})


def shapes(params):
    return {name: x.shape for name, x in named(params).items()}


def close(a, b):
    chex.assert_trees_all_close(a, b, rtol=1e-6, atol=1e-6)


class Residual(nnx.Module):
    def __init__(self, width, rate, *, rngs):
        self.linear, self.dropout = nnx.Linear(width, width, rngs=rngs), nnx.Dropout(rate, rngs=rngs)

    def __call__(self, x):
        return x + self.dropout(jnp.tanh(self.linear(x)))


TOKENS = np.arange(8).reshape(2, 4)
EMBED, HEAD = (TiedLayerSpec("e", nnx.Embed, 16, 8, forward_fn=f) for f in (None, nnx.Embed.attend))


def start(x):
    return {"h": x["x"].astype(jnp.float32), "mask": x["x"] > 0, "ids": x["ids"], "half": x["x"].astype(jnp.bfloat16)}


class Wide(nnx.Module):
    """Other shapes and another tree; integers and bools that must come through exactly."""

    def __init__(self, d_in, d_out, *, rngs):
        self.linear, self.dropout = nnx.Linear(d_in, d_out, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        h = self.dropout(jnp.tanh(self.linear(jnp.where(x["mask"].any(), x["h"], 0))))
        return {**x, "h": h, "more": (x["ids"] // 2, h[:, :1] * x["half"][:, :1].astype(h.dtype))}


def finish(x):
    assert x["ids"].dtype == jnp.uint32
    assert x["mask"].dtype == bool
    return x["h"] + x["more"][1] + (x["ids"] == np.uint32(2**32 - 1))[:, None] + (x["more"][0] == 2**31 - 1)[:, None]


@lru_cache
def layers(kind):
    """Tied ends around four layers alike, with dropout, or five; or layers not alike, with integers and masks."""
    if kind != "different":
        alike = [LayerSpec(Residual, 8, 0.5)] * {"four": 4, "five": 5}[kind]
        return pipeline(EMBED, *alike, HEAD, loss_fn=cross_entropy)
    return pipeline(start, *(LayerSpec(Wide, *size) for size in ((3, 16), (16, 16), (16, 2))), finish)


def batch_of_layers(kind, rows):
    rng = np.random.default_rng(0)
    if kind != "different":
        return tuple(rng.integers(0, 16, (2, rows, 8)).astype(np.int32))
    x = {"x": rng.normal(size=(rows, 3)).astype(np.float32), "ids": rng.integers(0, 2**32, rows, np.uint32)}
    return x, np.full((rows, 2), 9, np.float32)  # far off: no loss that cancels


def test_prefix_stack_suffix():
    model = pipeline(LayerSpec(nnx.Linear, 3, 8), BLOCK, BLOCK, BLOCK, jnp.tanh, LayerSpec(nnx.Linear, 8, 2))
    assert isinstance(model, StackModel)
    assert model.stack == range(1, 4)
    params = random_params(model)
    assert shapes(params) == {
        "ends/layers/0/bias": (8,), "ends/layers/0/kernel": (3, 8), "ends/layers/5/bias": (2,),
        "ends/layers/5/kernel": (8, 2), "stack/bias": (3, 8), "stack/kernel": (3, 8, 8),
    }  # fmt: skip
    x = dense(params["ends"]["layers"]["0"], X)
    for i in range(3):
        x = dense(jax.tree.map(lambda w, i=i: w[i], params["stack"]), x)
    outputs = dense(params["ends"]["layers"]["5"], np.tanh(x))
    run = jax.jit(lambda p: (model.module(p)(X), model.loss(p, (X, Y), None), model.loss(p, [X, Y], KEY)))
    close(run(params), (outputs, *[mean_square(outputs, Y)] * 2))


class Shift(nnx.Module):
    def __init__(self, by, *, rngs):
        self.by = nnx.Param(jnp.asarray(by))

    def __call__(self, x):
        return x + self.by[...]


def test_every_layer_starts_as_its_own_spec_says():
    shifts = pipeline(*(LayerSpec(Shift, np.full(8, by, np.float32)) for by in (1, 2)))  # arrays compare to arrays
    assert shifts.init(KEY)["stack"]["by"][:, 0].tolist() == [1, 2]
    constant = [LayerSpec(nnx.Linear, 8, 8, kernel_init=nnx.initializers.constant(c)) for c in (1.0, 2.0, 3.0)]
    model = pipeline(*constant)
    assert model.stack == range(3)
    assert model.init(KEY)["stack"]["kernel"][:, 0, 0].tolist() == [1, 2, 3]
    kernel = nnx.Linear(8, 8, rngs=nnx.Rngs(jax.random.fold_in(KEY, 1))).kernel[...]
    for alike in ([BLOCK] * 3, [LayerSpec(nnx.Linear, 8, 8), LayerSpec(nnx.Linear, 8, out_features=8), BLOCK]):
        model = pipeline(*alike)
        assert model.stack == range(3)
        np.testing.assert_allclose(model.init(KEY)["stack"]["kernel"][1], kernel, rtol=1e-6)


class Bare(nnx.Module):
    """No parameters, no `__init__`."""

    def __call__(self, x):
        return x.reshape(len(x), -1)


class Options(nnx.Module):
    def __init__(self, **options):
        self.linear = nnx.Linear(8, 8, **options)


CONV = LayerSpec(linen.Conv, 3, (3, 3), strides=2)


@pytest.mark.parametrize(
    ("layers", "options", "stack"),
    [
        ([BLOCK] * 4, {"num_stages": 3}, range(4)),
        ([BLOCK], {}, None),
        ([LayerSpec(nnx.Linear, 8, 64), LayerSpec(nnx.Linear, 64, 8), BLOCK, BLOCK], {}, None),  # less than half
        ([LayerSpec(nnx.Linear, 2, 2)] * 3 + [LayerSpec(nnx.Linear, 2, 8), BLOCK, BLOCK], {}, range(4, 6)),
        ([BLOCK, jnp.tanh, BLOCK, jnp.tanh], {}, None),
        ([LayerSpec(nnx.Dropout, 0.5)] * 5, {}, None),  # no parameters
        ([LayerSpec(Bare), LayerSpec(Options), LayerSpec(Options)], {}, range(1, 3)),
        ([TiedLayerSpec("k", nnx.Linear, 8, 8)] * 4 + [BLOCK] * 2, {}, range(4, 6)),  # tied parameters count once
        ([LayerSpec(Residual, 8, 0.1), LayerSpec(Residual, 8, 0.2)], {}, None),  # another graph
        ([LayerSpec(nnx.Linear, 8, 8, param_dtype=jnp.bfloat16), BLOCK], {}, None),
        ([linen.Dense(8) for _ in range(3)], {"example_batch": (np.ones((4, 8)), np.ones(8))}, range(3)),
        ([LayerSpec(linen.Dense, 8)] * 3, {"example_batch": (X, np.ones(8))}, range(1, 3)),
        ([CONV] * 3, {"example_batch": (np.ones((1, 9, 9, 3)), np.ones(3))}, None),  # alike, but the shape changes
    ],
)  # fmt: skip
def test_which_layers_are_the_stack(layers, options, stack):
    model = pipeline(*layers, **options)
    assert model.stack == stack
    assert isinstance(model, StackModel) == (stack is not None)
    assert hasattr(model, "prefix") == hasattr(model, "block") == hasattr(model, "suffix") == (stack is not None)


def test_boundaries():
    layers = [LayerSpec(nnx.Linear, 8, 64), jnp.tanh, LayerSpec(nnx.Linear, 64, 8), BLOCK]
    model = pipeline(*layers, num_stages=2, activation_checkpoint_interval=3)
    assert (model.num_stages, model.activation_checkpoint_interval) == (2, 3)
    assert model.boundaries(2) == [0, 2, 4]
    assert pipeline(*layers, partition_method="type:tanh|linear").boundaries(4) == [0, 1, 2, 3, 4]


class Noisy(linen.Module):
    @linen.compact
    def __call__(self, x, train=False):
        return linen.Dropout(0.5, deterministic=not train)(linen.Dense(8)(x))


def test_linen():
    example = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (X, Y))
    model = pipeline(Noisy(), linen.Dropout(0.5), LayerSpec(linen.Dense, features=2), example_batch=example)
    params = random_params(model)
    assert shapes(params) == {
        "layers/0/Dense_0/bias": (8,), "layers/0/Dense_0/kernel": (3, 8), "layers/2/bias": (2,),
        "layers/2/kernel": (8, 2),
    }  # fmt: skip
    layers = params["layers"]
    close(jax.jit(lambda p: model.module(p)(X))(params), dense(layers["2"], dense(layers["0"]["Dense_0"], X)))
    zeros = [(np.asarray(model.apply(params, 1, 2, np.ones((64, 8)), key)) == 0).mean() for key in (None, KEY)]
    assert zeros[0] == 0
    assert 0.4 < zeros[1] < 0.6
    loss = jax.jit(model.loss)
    assert loss(params, (X, Y), KEY) != loss(params, (X, Y), jax.random.key(1))


def test_dropout_keys_follow_the_layer():
    ones, drop, linear = np.ones((32, 8), np.float32), LayerSpec(nnx.Dropout, 0.5), LayerSpec(Residual, 8, 0.5)

    def dropped(key):
        return jzero.from_flax(drop.build, lambda m, x, rng: m(x)).loss({}, ones, key)

    def block(params, x, key):
        return jzero.from_flax(linear.build, lambda m, x, rng: m(x)).loss(params, x, key)

    model = pipeline(drop, linear, linear, drop)
    params = model.init(KEY)
    x = dropped(fold(fold(KEY, 0), 1))
    for i in range(2):
        x = block(jax.tree.map(lambda w, i=i: w[i], params["stack"]), x, fold(KEY, i + 1))
    close(model.module(params, KEY)(ones), x * dropped(fold(fold(KEY, 3), 4)))
    close(model.module(params)(ones), model.module(params)(ones))


MIDDLES = [[BLOCK] * 2, [LayerSpec(nnx.Linear, 8, 4), LayerSpec(nnx.Linear, 4, 8)]]


@pytest.mark.parametrize("middle", keep(MIDDLES, MIDDLES[1:]))
def test_tied(middle):
    model = pipeline(EMBED, *middle, HEAD, loss_fn=lambda logits, labels: (logits * labels).sum())
    params = jax.device_get(model.init(KEY))
    ends = params["ends"] if model.stack else params
    assert shapes(ends["tied"]) == {"e/embedding": (16, 8)}
    assert set(ends.get("layers", {})) == (set() if model.stack else {"1", "2"})
    e = ends["tied"]["e"]["embedding"]
    np.testing.assert_array_equal(e, nnx.Embed(16, 8, rngs=nnx.Rngs(jax.random.fold_in(KEY, 0))).embedding[...])
    labels = np.random.default_rng(0).normal(size=(2, 4, 16)).astype(np.float32)

    def untied(first, last):
        x = first[TOKENS]
        layers = [jax.tree.map(lambda w, i=i: w[i], params["stack"]) for i in range(2)] if model.stack else None
        for layer in layers or [params["layers"]["1"], params["layers"]["2"]]:
            x = dense(layer, x)
        return (x @ last.T * labels).sum()

    loss, gradients = jax.jit(jax.value_and_grad(model.loss))(params, (TOKENS, labels), None)
    expected, (first, last) = jax.jit(jax.value_and_grad(untied, (0, 1)))(e, e)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    found = (gradients["ends"] if model.stack else gradients)["tied"]["e"]["embedding"]
    np.testing.assert_allclose(found, first + last, rtol=1e-5, atol=1e-5)


class Head(nnx.Module):
    def __init__(self, *, rngs):
        self.inner = nnx.Embed(16, 8, rngs=rngs)
        self.bias = nnx.Param(jnp.ones(16))

    def __call__(self, x):
        return self.inner.attend(x) + self.bias[...]


class Entry(nnx.Module):
    def __init__(self, *, rngs):
        self.inner, self.scale = nnx.Embed(16, 8, rngs=rngs), nnx.Param(jnp.full(8, 2.0))

    def __call__(self, tokens):
        return self.inner(tokens) * self.scale[...]


@pytest.mark.parametrize("attr", ["inner", ["inner.embedding"]])
def test_tied_weight_attr(attr):
    model = pipeline(*(TiedLayerSpec("e", c, tied_weight_attr=attr) for c in (Entry, Head)))
    params = random_params(model)
    assert shapes(params) == {"layers/0/scale": (8,), "layers/1/bias": (16,), "tied/e/inner/embedding": (16, 8)}
    table, layers = params["tied"]["e"]["inner"]["embedding"], params["layers"]
    expected = layers["0"]["scale"] * table[TOKENS] @ table.T + layers["1"]["bias"]
    close(jax.jit(lambda params: model.module(params)(TOKENS))(params), expected)


MISFIT = [LayerSpec(nnx.Linear, 3, 8), jnp.tanh, LayerSpec(nnx.Linear, 5, 2)]
MISFIT_WORDS = (
    r"layers\[2\] \(Linear\) does not fit float32\[4,8\], the output of layers\[1\] \(tanh\): .*\(8,\).*\(5,\)"
)


BATCH = {"example_batch": (X, Y)}
UNLIKE = r"\(Embed\) have the key 'e' but cannot share .*\[16,8\]} and .*\[17,8\]}.*tied_weight_attr"
ERRORS = [
    ([], {}, "layers is empty"),
    ([BLOCK], {"loss_fn": None}, r"loss_fn is missing; pass loss_fn=f with f\(outputs, labels\)"),
    ([BLOCK], {"activation_checkpoint_interval": -1}, "activation_checkpoint_interval = -1 must be"),
    ([nnx.Linear], {}, r"Linear'> is not a layer: .* is LayerSpec\(Linear, \.\.\.\)"),
    ([LayerSpec(nnx.Linear, 3)], {}, r"layers\[0\] \(Linear\): .*missing.*out_features"),
    ([BLOCK, linen.Dense(2)], {}, r"layers\[1\] \(Dense\) is a Linen module.*example_batch=\(inputs"),
    ([BLOCK], {"example_batch": {"x": X}}, r"a batch is \(inputs, labels\), but this is a dict of 1"),
    (MISFIT, BATCH, MISFIT_WORDS),
    ([linen.Dense(2), linen.Conv(3, (2, 2, 2))], BATCH, r"\(Conv\) does not fit float32\[4,2\], the output of layers"),
    ([LayerSpec(nnx.Linear, 3, 5)], BATCH, r"loss_fn does not fit outputs float32\[4,5\] and labels float32\[4,2\]"),
    ([EMBED, BLOCK, TiedLayerSpec("e", nnx.Embed, 17, 8)], {}, UNLIKE),
    ([TiedLayerSpec("e", nnx.Embed, 16, 8, tied_weight_attr="weight")], {}, "weight: the parameters are embedding"),
]


@pytest.mark.parametrize(("layers", "options", "words"), ERRORS)
def test_errors(layers, options, words):
    refuses(lambda: pipeline(*layers, **options), words)


def test_what_is_no_layer():
    for make, word in ((lambda: LayerSpec(jnp.tanh), "LayerSpec"), (lambda: TiedLayerSpec("e", dict), "TiedLayerSpec")):
        refuses(make, f"^{word}: typename .* is not a class of nnx or Linen modules: pass the class")
    refuses(lambda: pipeline(nnx.Linear(3, 2, rngs=nnx.Rngs(0))), "Linear is not a layer: .* is LayerSpec")


HALF = [LayerSpec(nnx.Linear, 8, 8, dtype=jnp.bfloat16)] * 2
WIDE = (np.ones((4, 8), np.float32), Y)


@pytest.mark.parametrize(
    ("layers", "batch", "words"),
    [
        (MISFIT, (X, Y), MISFIT_WORDS),
        *[(MISFIT, batch, r"a batch is \(inputs, labels\)") for batch in ({"x": X, "y": Y}, (X, Y, Y))],
        ([BLOCK] * 2, (X, Y), r"layers\[0\] \(Linear\) does not fit float32\[4,3\], the batch's"),
        (HALF, WIDE, r"layers\[0:2\] \(Linear\) have one structure.*float32\[4,8\] becomes bfloat16\["),
    ],
)
def test_errors_of_the_first_step(layers, batch, words):
    model = pipeline(*layers)
    params = model.init(KEY)
    if layers is HALF:
        params = jax.tree.map(lambda w: w.astype(jnp.bfloat16), params)
    refuses(lambda: model.loss(params, batch, None), words)


# ------------------------------------------------- stages of different structure: one program switches between them

INPUTS = {"x": X, "ids": np.array([2**32 - 1, 0, 1, 2**31], np.uint32)}
MODEL = layers("different")


def switched_at(model, boundaries, params, inputs):
    return switched(model, boundaries, params, inputs, jax.tree.map(lambda _: False, params))


SWITCHED = [([0, 1, 5], None), ([0, 2, 3, 5], KEY), ([0, 1, 2, 3, 4, 5], None), ([0, 5], KEY)]


@pytest.mark.parametrize(
    ("boundaries", "key"), keep(SWITCHED, SWITCHED[1:2]), ids=["2", "3, dropout", "5", "1, dropout"]
)
def test_switched_is_the_module(boundaries, key):
    batch = (INPUTS, Y)
    assert not MODEL.stack
    params, inputs = random_params(MODEL), Inputs(batch)
    prefix, chunk, suffix = switched_at(MODEL, boundaries, *jax.eval_shape(lambda *args: args, params, inputs))

    def loss(params):
        body = lambda x, part: (chunk(params, x, part, key)[0], None)  # noqa: E731
        x, _ = jax.lax.scan(body, prefix(inputs), jnp.arange(len(boundaries) - 1))
        return suffix(x, inputs, key)

    expected = jax.jit(jax.value_and_grad(lambda params: MODEL.loss(params, batch, key)))(params)
    close(jax.jit(jax.value_and_grad(loss))(params), expected)
    assert min(np.abs(g).max() for g in jax.tree.leaves(expected[1])) > 1e-3


def test_the_buffers_of_a_switch_and_what_its_backward_pass_keeps():
    params, inputs = jax.eval_shape(lambda *args: args, jax.eval_shape(MODEL.init, KEY), Inputs((INPUTS, Y)))
    prefix, chunk, _ = switched_at(MODEL, [0, 2, 5], params, inputs)
    x = jax.eval_shape(prefix, inputs)
    assert {kind: (v.shape, v.dtype) for kind, v in x.items()} == {
        "float": ((4 * (16 + 1 + 3),), jnp.float32),  # the longest: h, more[1] and half
        "other": ((4 * (3 + 1 + 1),), jnp.int32),
    }
    arguments = params, x, jnp.int32(1), KEY
    pullback = lambda *given: jax.vjp(lambda *given: chunk(*given, *arguments[2:])[0], *given)[1]  # noqa: E731
    kept = {(v.shape, v.dtype) for v in jax.tree.leaves(jax.eval_shape(pullback, params, x))}
    assert kept
    assert kept <= {(v.shape, v.dtype) for v in jax.tree.leaves(arguments)}


def test_switched_refuses_what_it_cannot_pack():
    model = pipeline(lambda x: x + 1j, jnp.abs)
    refuses(lambda: switched_at(model, [0, 1, 2], {}, Inputs((X, Y))), "complex64 cannot go from stage to stage")
