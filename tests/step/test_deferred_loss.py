"""The loss of the three-call loop does whatever a JAX scalar does."""

import copy
import itertools
import operator as o

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jzero.run.deferred_loss import Loss

VALUE = 2.5
OPERATORS = [o.add, o.sub, o.mul, o.truediv, o.floordiv, o.mod, o.pow, divmod, o.lt, o.le, o.eq, o.ne, o.gt, o.ge]
OTHERS = [3, 0.5, np.float32(3), jnp.float32(0.5), np.ones(2, np.float32), jnp.arange(1.0, 3)]
FUNCTIONS = [
    o.neg, o.pos, abs, float, int, bool, lambda x: round(x, 1), np.log,
    lambda x: jnp.stack([x, x]), jax.jit(lambda x: 2 * x),
    lambda x: sum([x, x]), lambda x: float(max(x, 3 * x)), lambda x: jax.device_get({"loss": x})["loss"],
    lambda x: float(f"{x:.3f}"), lambda x: x.item(), lambda x: x.shape, lambda x: x.mean(),
    lambda x: x.block_until_ready(), lambda x: 1 * jax.block_until_ready(x), lambda x: 1 * copy.copy(x),
]  # fmt: skip


def new():
    return Loss(lambda: jnp.float32(VALUE))


def assert_same(ours, theirs):
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert not isinstance(a, Loss)
        assert np.asarray(a).dtype == np.asarray(b).dtype
        np.testing.assert_array_equal(a, b)


def test_operators_on_both_sides():
    value = jnp.float32(VALUE)
    assert_same(new() - new(), value - value)
    for op, other in zip(OPERATORS, itertools.cycle(OTHERS), strict=False):
        assert_same(op(new(), other), op(value, other))
        np.testing.assert_allclose(jnp.asarray(op(other, new())), jnp.asarray(op(other, value)), rtol=1e-6)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_functions_and_attributes(function):
    assert_same(function(new()), function(jnp.float32(VALUE)))


def test_a_loss_is_computed_once_and_only_when_it_is_read():
    calls = []
    loss = Loss(lambda: calls.append(1) or jnp.float32(VALUE))
    assert {loss: "can be a key"}[loss]
    assert repr(loss) == "Loss(not computed yet)"
    assert not hasattr(loss, "_private")
    assert calls == []
    assert 2 < loss < 3
    assert repr(loss) == "Loss(2.5)"
    assert calls == [1]
    with pytest.raises(AttributeError, match="nonsense"):
        loss.nonsense  # noqa: B018
