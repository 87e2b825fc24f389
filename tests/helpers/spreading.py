"""Runs a function on shards of its arrays, with any division of them, for comparison with the plain function."""

from functools import cache
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st
from jax.sharding import Mesh, PartitionSpec

from jzero.spread import ModelGroup, ShardedArray, spread

DEGREES = {"a": 2, "b": 2}
REST = {1: ("a", "b")}  # how activations lie between layers
SUM = "sum"


def forms(shape, integer=False):
    """How an array lies: for each axis the dimension that it divides, SUM (partial), or None; and whether a weight."""

    def valid(choice):
        return all(
            size % 2 ** sum(at == d for at in choice) == 0 and (not integer or SUM not in choice)
            for d, size in enumerate(shape)
        )

    places = [None, SUM, *range(len(shape))]
    choices = [c for c in product(places, repeat=len(DEGREES)) if valid(c)]
    return st.tuples(st.sampled_from(choices), st.booleans())


def _dims(shape, choice, degrees):
    return tuple(tuple(a for a, at in zip(degrees, choice, strict=True) if at == d) for d in range(len(shape)))


def _value(x, shape, form, degrees):
    choice, weight = form
    sums = tuple(a for a, at in zip(degrees, choice, strict=True) if at == SUM)
    for axis in sums:  # this device's part of the sum
        assert degrees[axis] == 2
        x = x * jnp.where(jax.lax.axis_index(axis) == 0, 1.5, -0.5).astype(x.dtype)
    return ShardedArray(x, shape, _dims(shape, choice, degrees), sums, weight and not sums)


def on_shards(f, arrays, forms_of, rest=REST, degrees=DEGREES):
    """(results, gradients of sum(sin(results)) with respect to floats, group)."""
    group = ModelGroup(degrees, rest)
    shapes = [x.shape for x in arrays]
    dims = [_dims(x.shape, choice, degrees) for x, (choice, _) in zip(arrays, forms_of, strict=True)]
    specs = tuple(PartitionSpec(*(axes or None for axes in d)) for d in dims)
    floats = [i for i, x in enumerate(arrays) if np.issubdtype(x.dtype, np.floating)]

    def results(xs):
        values = [_value(x, s, form, degrees) for x, s, form in zip(xs, shapes, forms_of, strict=True)]
        out = spread(f, group)(*values)
        return jax.tree.map(lambda v: group.undivided(v).x, out, is_leaf=lambda v: isinstance(v, ShardedArray))

    def local(*xs):
        def loss(some):
            every = list(xs)
            for i, x in zip(floats, some, strict=True):
                every[i] = x
            return total(results(every)) / group.size

        shares = jax.grad(loss)([xs[i] for i in floats])
        lacking = [tuple(a for a in degrees if not any(a in axes for axes in dims[i])) for i in floats]
        return results(xs), [jax.lax.psum(g, axes) for g, axes in zip(shares, lacking, strict=True)]

    mesh = Mesh(np.array(jax.devices()[: group.size]).reshape(*degrees.values()), tuple(degrees))
    out_specs = (PartitionSpec(), [specs[i] for i in floats])
    run = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=out_specs, check_vma=False))
    return *run(*arrays), group


def total(out):
    return sum(jnp.sum(jnp.sin(x)) for x in jax.tree.leaves(out) if jnp.issubdtype(x.dtype, jnp.floating))


def check(f, arrays, forms_of, rest=REST, tolerance=2e-5, degrees=DEGREES):
    """Compare with `f` on one device: values, and gradients.

    The tolerance is relative to an array's largest element: a sum of large terms that cancel has their rounding error.
    """
    results, gradients, group = on_shards(f, arrays, forms_of, rest, degrees)

    def close(a, b):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * max(1.0, np.abs(b).max(initial=0.0)))

    floats = tuple(i for i, x in enumerate(arrays) if np.issubdtype(x.dtype, np.floating))
    jax.tree.map(close, (results, gradients), _on_one_device(f, floats)(*arrays))
    return group


@cache
def _on_one_device(f, floats):
    gradients = jax.grad(lambda *xs: total(f(*xs)), argnums=floats) if floats else lambda *xs: ()
    return jax.jit(lambda *xs: (f(*xs), list(gradients(*xs))))
