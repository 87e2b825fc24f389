"""Stages of different structure: one program that switches between them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.drawn import random_params
from helpers.refusals import refuses
from helpers.sampling import keep
from test_pipeline_module import KEY, Wide, X, Y, close, finish, pipeline, start

from jzero.model import Inputs
from jzero.pipeline.layer_switch import switched
from jzero.pipeline.module import LayerSpec

INPUTS = {"x": X, "ids": np.array([2**32 - 1, 0, 1, 2**31], np.uint32)}
MODEL = pipeline(start, *(LayerSpec(Wide, *size) for size in ((3, 16), (16, 16), (16, 2))), finish, num_stages=3)


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
