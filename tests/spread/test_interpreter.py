"""What `jzero.spread` lists of a function, operations with a way of their own, and a program's own collectives."""

from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.refusals import refuses
from helpers.sampling import sample
from helpers.spreading import SUM, check
from jax import lax
from jax.sharding import Mesh, PartitionSpec

import jzero
from jzero.spread import ModelGroup, ShardedArray, spread

RNG = np.random.default_rng(0)


def normal(*shape):
    return RNG.normal(size=shape).astype(np.float32)


def test_a_primitive_without_a_rule_runs_on_whole_arrays_and_is_listed():
    def unruled(x):
        return jnp.linalg.cholesky(x @ x.T + jnp.eye(4))

    group = check(unruled, [normal(4, 8)], [((0, 1), False)])
    assert {fallback.primitive for fallback in group.traced.fallbacks} == {"cholesky"}
    assert group.traced.fallbacks[0].line.startswith("test_interpreter.py:")
    whole = check(unruled, [normal(4, 8)], [((None, None), False)]).traced
    assert not whole.fallbacks
    assert not whole.moves


def test_updates_of_zeros_run_on_shards():
    """JAX puts a `reshard` before them."""
    rows = np.array([1, 5, 0, 3], np.int32)
    forms = [((1, None), False), ((None, None), False)]
    assert not check(lambda u, i: jnp.zeros((8, 4)).at[i].add(u), [normal(4, 4), rows], forms).traced.fallbacks


def test_a_sum_is_made_once_and_scaled_before():
    moves = check(lambda x: (x / 2).sum() / 3, [normal(4, 8)], [((SUM, 1), False)]).traced.moves
    assert [(move.kind, move.shape) for move in moves[: len(moves) // 2]] == [("all-reduce", ()), ("all-reduce", ())]


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
def test_an_operation_on_one_device(wrapped):
    def total(f):
        return wrapped(lambda x: (lambda out: (out["y"] + out["n"]).sum())(f({"x": x}, 2.0, power=3)))

    np.testing.assert_allclose(total(OPERATION)(X), total(plain)(X), rtol=1e-6)
    out = jax.vmap(lambda x, s: OPERATION({"x": x}, s), in_axes=(1, None))(X, 3.0)
    np.testing.assert_allclose(out["y"], 3 * X.T)
    np.testing.assert_allclose(out["n"], X.sum(0))


@pytest.mark.parametrize("form", [(None, None), (0, 1), (1, 1)])
def test_an_operation_on_a_group(form):
    """Its own function runs, whose sum is partial; gradients are one device's. In loops and checkpoints too."""

    def f(x):
        out = OPERATION({"x": x}, jnp.float32(2.0), power=2)
        return out["y"], out["n"]

    def loop(x):
        return lax.scan(jax.checkpoint(lambda c, _: (OPERATION({"x": c}, 0.5)["y"], None)), x, None, length=2)[0]

    for function in (f, loop):
        assert not check(function, [X], [(form, False)], rest=None).traced.fallbacks


def test_mistakes():
    text = r"Operation\(powers\): power = \[1, 2\] has no hash: pass arrays by position"
    refuses(lambda: OPERATION({"x": X}, 1.0, power=[1, 2]), text)
    wrong = jzero.Operation(lambda x: x, lambda group, x: x.x, "wrong")
    text = r"Operation\(wrong\): spread must return ShardedArrays in the structure of plain"
    refuses(lambda: spread(wrong, ModelGroup({"a": 2}))(ShardedArray(X, (4, 4), (("a",), ()))), text)


OTHER = "c"  # an axis outside the group
CALLS = {
    "axis_index": lambda x: x + lax.axis_index(OTHER),
    "psum": lambda x: lax.psum(x, OTHER),
    "pmax": lambda x: lax.pmax(x, OTHER),
    "pmin": lambda x: lax.pmin(x, OTHER),
    "ppermute": lambda x: lax.ppermute(x, OTHER, [(0, 1), (1, 0)]),
    "all_gather": lambda x: lax.all_gather(x, OTHER),
    "all_gather at 1": lambda x: lax.all_gather(x, OTHER, axis=1),
    "all_gather tiled": lambda x: lax.all_gather(x, OTHER, tiled=True),
    "psum_scatter": lambda x: lax.psum_scatter(x, OTHER, scatter_dimension=1, tiled=True),
    "psum_scatter untiled": lambda x: lax.psum_scatter(x, OTHER, scatter_dimension=1),
}


@pytest.mark.parametrize(("name", "form"), sample(product(CALLS, ["rows", "columns", "partial"]), strength=1))
def test_collectives(name, form):
    call, group = CALLS[name], ModelGroup({"a": 2})
    columns = 2 if name == "psum_scatter untiled" else 8
    whole = np.random.default_rng(0).normal(size=(2, 4, columns)).astype(np.float32)  # [other axis, rows, columns]
    dims = {"rows": (("a",), ()), "columns": ((), ("a",)), "partial": ((), ())}[form]

    def run(x):
        x = x[0]
        size = [n // 2 if axes else n for n, axes in zip(x.shape, dims, strict=True)]
        at = [lax.axis_index("a") * n if axes else 0 for n, axes in zip(size, dims, strict=True)]
        part = (
            x * jnp.where(lax.axis_index("a") == 0, 1.5, -0.5) if form == "partial" else lax.dynamic_slice(x, at, size)
        )
        y = spread(call, group)(ShardedArray(part, x.shape, dims, ("a",) if form == "partial" else ()))
        return group.undivided(y).x[None], call(x)[None]

    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), (OTHER, "a"))
    f = jax.shard_map(run, mesh=mesh, in_specs=PartitionSpec(OTHER), out_specs=PartitionSpec(OTHER), check_vma=False)
    found, expected = jax.jit(f)(whole)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    assert not group.traced.fallbacks


@pytest.mark.parametrize(
    "call", [lambda x: lax.psum(x, "a"), lambda x: x + lax.axis_index("a"), lambda x: lax.all_gather(2 * x, ("c", "a"))]
)
def test_a_collective_over_devices_that_act_as_one(call):
    """Such a model would count itself twice."""

    def run(x):
        return group.undivided(spread(call, group)(ShardedArray(x, x.shape, ((),)))).x

    group, mesh = ModelGroup({"a": 2}), Mesh(np.array(jax.devices()[:4]).reshape(2, 2), (OTHER, "a"))
    f = jax.shard_map(run, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False)
    words = r"test_interpreter.py:\d+: \w+ over the mesh axis 'a'"
    refuses(lambda: jax.eval_shape(f, np.ones(4, np.float32)), words)
