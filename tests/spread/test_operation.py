"""An operation runs as its plain function does, and on shards in its own way."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.spreading import check

import jzero
from jzero.errors import ConfigError
from jzero.spread import ModelGroup, ShardedArray, spread


def plain(tree, scale, *, power=1):
    return {"y": tree["x"] ** power * scale, "n": tree["x"].sum()}


def on_shards(group, tree, scale, *, power=1):
    x = tree["x"]
    divided = tuple(axis for axes in x.dims for axis in axes)
    y = ShardedArray(x.x**power * group.undivided(scale).x, x.shape, x.dims)
    return {"y": y, "n": ShardedArray(x.x.sum(), (), (), divided)}


OPERATION = jzero.Operation(plain, on_shards, "powers")
X = jnp.arange(1.0, 9.0).reshape(2, 4)


@pytest.mark.parametrize("wrapped", [lambda f: f, jax.jit, jax.checkpoint, jax.grad])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_one_device(wrapped, dtype):
    def total(f):
        return wrapped(lambda x: (lambda out: (out["y"] + out["n"]).sum())(f({"x": x}, 2.0, power=3)))

    np.testing.assert_allclose(total(OPERATION)(X.astype(dtype)), total(plain)(X.astype(dtype)), rtol=1e-6)


def test_batched():
    out = jax.vmap(lambda x, s: OPERATION({"x": x}, s), in_axes=(1, None))(X, 3.0)
    np.testing.assert_allclose(out["y"], 3 * X.T)
    np.testing.assert_allclose(out["n"], X.sum(0))


@pytest.mark.parametrize("form", [(None, None), (0, None), (0, 1), (1, 1)])
def test_on_a_group(form):
    """Its own function runs, whose sum is partial; gradients are one device's."""
    x = X.astype(jnp.float32)

    def f(x):
        out = OPERATION({"x": x}, jnp.float32(2.0), power=2)
        return out["y"], out["n"]

    group = check(f, [x], [(form, False)], rest=False)
    assert not group.traced.fallbacks


def test_inside_loops_and_checkpoints():
    def f(x):
        return jax.lax.scan(jax.checkpoint(lambda c, _: (OPERATION({"x": c}, 0.5)["y"], None)), x, None, length=2)[0]

    check(f, [X], [((0, 1), False)], rest=False)


def test_mistakes():
    text = r"Operation\(powers\): power = \[1, 2\] has no hash: pass arrays by position"
    with pytest.raises(ConfigError, match=text):
        OPERATION({"x": X}, 1.0, power=[1, 2])
    wrong = jzero.Operation(lambda x: x, lambda group, x: x.x, "wrong")
    text = r"Operation\(wrong\): spread must return ShardedArrays in the structure of plain"
    with pytest.raises(ConfigError, match=text):
        spread(wrong, ModelGroup({"a": 2}))(ShardedArray(X, (4, 4), (("a",), ())))
