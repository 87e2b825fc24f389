"""The cache of generation where groups of devices act as one: `tensor` divides it by heads.

tests/step/test_generate.py compares the texts of these layouts with one device.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.sampling import keep
from test_generate import LAYOUTS, MASK, NEW, TOKENS, Recurrent, S, case, step_of

from jzero.step.generate import Sampling
from jzero.tracing.equations import operations

CUT = {
    "tensor": {"tensor": 2},
    **{name: LAYOUTS[name] for name in ("tensor and zero3", "context, scanned", "pipe and tensor")},
}


def kept_or_gathered(jaxpr):
    """The shapes of what the loops of a program carry, and of what it gathers."""
    found = (operation.eqn for operation in operations(jaxpr) if operation.name in ("while", "scan", "all_gather"))
    return (x.aval.shape for eqn in found for x in eqn.outvars)


def heads_of(step, state):
    """The numbers of heads of the keys and values that a program keeps or gathers."""
    run, greedy = step.generate._run.program.__wrapped__, Sampling(None, None, None, None, None, np.int32(0))
    program = jax.make_jaxpr(functools.partial(run, new=NEW))
    found = program(state.params, (TOKENS[:4], None), greedy, np.int32(4), None)
    return {shape[-2] for shape in kept_or_gathered(found) if shape[-3:-2] == (S + NEW,)}


@pytest.mark.parametrize("layout", keep(list(CUT), ["tensor"]))
def test_tensor_divides_the_caches_heads(layout):
    """Keys and values of this device's heads alone; nothing gathers those of a cache."""
    model, params, _ = case("everything")
    step = step_of(model, **CUT[layout])
    assert heads_of(step, step.init(jax.random.key(0), params)) == {1}


@pytest.mark.slow
def test_heads_that_tensor_does_not_divide():
    """Two heads on four devices: the cache is whole on each."""
    model, params, expected = case("everything")
    step = step_of(model, tensor=4)
    state = step.init(jax.random.key(0), params)
    assert heads_of(step, state) == {2}
    np.testing.assert_array_equal(step.generate(state, TOKENS, NEW, attention_mask=MASK), expected)


RECURRENT = [{"tensor": 2, "zero": 2, "stage": 3}, {"pipe": 2, "tensor": 2}]


class Mixing(Recurrent):
    """Its sums are of products, so `tensor` divides them; they have no columns."""

    def decode_block(self, layer, x, cache):
        sums = cache + jnp.cumsum(x @ layer["w"], axis=1)
        return x + 3 * jnp.sin(sums), sums[:, -1:]


@pytest.mark.parametrize("layout", keep(RECURRENT, RECURRENT[1:]), ids=str)
def test_a_recurrent_state(layout):
    step = step_of(Mixing(), more={"tensor_parallel": {"dimensions": {"w": 1}}}, **layout)
    alone, tokens = step_of(Mixing()), TOKENS[:4] % 16
    state, plain = step.init(jax.random.key(0)), alone.init(jax.random.key(0))
    run = functools.partial(step.generate._run.program.__wrapped__, new=NEW)
    greedy = Sampling(None, None, None, None, None, np.int32(0))
    shapes = set(kept_or_gathered(jax.make_jaxpr(run)(state.params, (tokens, None), greedy, np.int32(4), None)))
    rows = 2 if "zero" in layout else 4
    assert (rows, 1, 4) in shapes
    expected = alone.generate(plain, tokens, NEW)
    assert len(set(expected[:, S:].ravel().tolist())) > 5
    np.testing.assert_array_equal(step.generate(state, tokens, NEW), expected)
