"""Stages of different structure: one program that switches between them."""

from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers.layer_lists import KEY, Wide, X, Y, close, finish, pipeline, start
from helpers.sampling import keep

import jzero
from jzero.model import Inputs
from jzero.pipeline.layer_switch import switched
from jzero.pipeline.module import LayerSpec

INPUTS = {"x": X, "ids": np.array([2**32 - 1, 0, 1, 2**31], np.uint32)}


def switch_model():
    wide, thin = LayerSpec(Wide, 3, 16), LayerSpec(Wide, 16, 2)
    return pipeline(start, wide, LayerSpec(Wide, 16, 16), thin, finish, num_stages=3)


def no_state(params):
    return jax.tree.map(lambda _: False, params)


BOUNDARIES = [(0, 1, 5), (0, 2, 3, 5), (0, 1, 2, 3, 4, 5), (0, 5)]


@pytest.mark.parametrize(
    ("mode", "boundaries"),
    keep(product(["evaluation", "dropout"], BOUNDARIES), [("dropout", (0, 2, 3, 5))]),
    ids=str,
)
def test_switched_is_the_module(mode, boundaries):
    key = KEY if mode == "dropout" else None
    model, batch = switch_model(), (INPUTS, Y)
    assert not model.stack
    params, inputs = model.init(KEY), Inputs(batch)
    shapes = jax.eval_shape(lambda *args: args, params, inputs)
    prefix, chunk, suffix = switched(model, boundaries, *shapes, no_state(params))

    @jax.jit
    def loss(params):
        body = lambda x, part: (chunk(params, x, part, key)[0], None)  # noqa: E731
        x, _ = jax.lax.scan(body, prefix(inputs), jnp.arange(len(boundaries) - 1))
        return suffix(x, inputs, key)

    expected = jax.jit(jax.value_and_grad(lambda params: model.loss(params, batch, key)))(params)
    close(jax.value_and_grad(loss)(params), expected)
    assert min(np.abs(g).max() for g in jax.tree.leaves(expected[1])) > 1e-3


def test_switched_buffers():
    model, params = switch_model(), switch_model().init(KEY)
    prefix, chunk, _ = switched(model, [0, 2, 5], params, Inputs((INPUTS, Y)), no_state(params))
    x = prefix(Inputs((INPUTS, Y)))
    longest = 4 * (16 + 1 + 3)  # h, more[1] and half
    assert {kind: (v.shape, v.dtype) for kind, v in x.items()} == {
        "float": ((longest,), jnp.float32), "other": ((4 * (3 + 1 + 1),), jnp.int32)
    }  # fmt: skip
    np.testing.assert_array_equal(x["float"], [*X.ravel(), *[0] * (longest - X.size)])
    np.testing.assert_array_equal(x["other"].view(np.uint32), [*INPUTS["ids"], *[0] * 16])
    assert set(chunk(params, x, jnp.int32(1), None)[0]) == {"float", "other"}

    model = pipeline(LayerSpec(nnx.Linear, 3, 2), jnp.tanh)
    params = model.init(KEY)
    prefix, _, _ = switched(model, [0, 1, 2], params, Inputs((X, Y)), no_state(params))
    assert set(prefix(Inputs((X, Y)))) == {"float"}  # nothing else goes between the layers


def test_switched_keeps_its_arguments_alone():
    model, params = switch_model(), switch_model().init(KEY)
    prefix, chunk, _ = switched(model, [0, 2, 5], params, Inputs((INPUTS, Y)), no_state(params))
    x = prefix(Inputs((INPUTS, Y)))
    _, pullback = jax.vjp(lambda params, x: chunk(params, x, jnp.int32(1), KEY)[0], params, x)
    arguments = {(v.shape, v.dtype) for v in jax.tree.leaves((params, x, jnp.int32(1), KEY))}
    kept = [(v.shape, v.dtype) for v in jax.tree.leaves(pullback)]
    assert kept
    assert set(kept) <= arguments


def test_switched_refuses_what_it_cannot_pack():
    model = pipeline(lambda x: x + 1j, jnp.abs)
    with pytest.raises(jzero.ConfigError, match="complex64 cannot go from stage to stage"):
        switched(model, [0, 1, 2], {}, Inputs((X, Y)), {})
