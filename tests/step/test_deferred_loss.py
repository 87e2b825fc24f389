"""The loss of the three-call loop does whatever a JAX scalar does."""

import copy
import math
import operator
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.sampling import sample

from jzero.run.deferred_loss import Loss

VALUE = 2.5
o = operator
TWO = (o.add, o.sub, o.mul, o.truediv, o.floordiv, o.mod, o.pow, divmod)
COMPARE = (o.lt, o.le, o.eq, o.ne, o.gt, o.ge)
ONE = {
    "neg": operator.neg, "pos": operator.pos, "abs": abs, "bool": bool, "int": int, "float": float, "round": round,
    "round to a digit": lambda x: round(x, 1), "math.isnan": math.isnan, "np.isnan": np.isnan, "np.log": np.log,
    "jnp.exp": jnp.exp, "jnp.isnan": jnp.isnan,
    "jnp.where": lambda x: jnp.where(x > 2, x, 0),
    "jnp.stack": lambda x: jnp.stack([x, x]),
    "np.mean": lambda x: np.mean([x, x]),
    "jit": jax.jit(lambda x: 2 * x),
    "sum": lambda x: sum([x, x]),
    "max": lambda x: float(max(x, 3 * x)),
    "device_get": lambda x: jax.device_get({"loss": x})["loss"],
    "tree.map": lambda x: jax.tree.map(float, [x])[0],
    "format": lambda x: float(f"{x:.3f}"),
    "format of nothing": lambda x: float(f"{x}"),
    "item": lambda x: x.item(),
    "tolist": lambda x: x.tolist(),
    "mean": lambda x: x.mean(),
    "astype": lambda x: x.astype(jnp.bfloat16),
    "shape": lambda x: x.shape,
    "ndim": lambda x: x.ndim,
    "size": lambda x: x.size,
    "block_until_ready": lambda x: x.block_until_ready(),
    "jax.block_until_ready": lambda x: 1 * jax.block_until_ready(x),
    "dtype": lambda x: np.zeros(1, x.dtype),
    "copy": lambda x: 1 * copy.copy(x),
}  # fmt: skip


def new():
    return Loss(lambda: jnp.float32(VALUE))


def assert_same(ours, theirs):
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert not isinstance(a, Loss)
        assert np.asarray(a).dtype == np.asarray(b).dtype
        np.testing.assert_array_equal(a, b)


def name(value):
    return getattr(value, "__name__", repr(value))


OTHERS = [3, 0.5, np.float32(3), jnp.float32(0.5), np.ones(2, np.float32), jnp.arange(1.0, 4)]


@pytest.mark.parametrize(
    ("op", "other"), sample(product([*TWO, *COMPARE], OTHERS), lambda case: map(name, case), strength=1), ids=name
)
def test_operators_on_both_sides(op, other):
    value = jnp.float32(VALUE)
    assert_same(op(new(), other), op(value, other))
    np.testing.assert_allclose(jnp.asarray(op(other, new())), jnp.asarray(op(other, value)), rtol=1e-6)


@pytest.mark.parametrize("op", [*TWO, *COMPARE], ids=lambda op: op.__name__)
def test_operators_on_two_losses(op):
    assert_same(op(new(), new()), op(jnp.float32(VALUE), jnp.float32(VALUE)))


@pytest.mark.parametrize("function", ONE.values(), ids=ONE)
def test_functions_and_attributes(function):
    assert_same(function(new()), function(jnp.float32(VALUE)))


def test_a_loss_is_computed_once_and_only_when_it_is_read():
    calls = []
    loss = Loss(lambda: calls.append(1) or jnp.float32(VALUE))
    assert {loss: "can be a key"}[loss]
    assert repr(loss) == "Loss(not computed yet)"
    assert not hasattr(loss, "_private")
    assert calls == []
    assert loss > 2
    assert loss < 3
    assert repr(loss) == "Loss(2.5)"
    assert calls == [1]


def test_what_a_scalar_does_not_have():
    with pytest.raises(AttributeError, match="nonsense"):
        new().nonsense  # noqa: B018
    with pytest.raises(TypeError, match="str"):
        new() + "text"
