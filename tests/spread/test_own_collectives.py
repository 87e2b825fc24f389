"""The rules of a program's own collectives: a device of the group holds its part of what the plain collective gives."""

from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.sampling import sample
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from jzero.errors import ConfigError
from jzero.spread import ModelGroup, ShardedArray, spread

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
    with pytest.raises(ConfigError, match=r"test_own_collectives.py:\d+: \w+ over the mesh axis 'a'"):
        jax.eval_shape(f, np.ones(4, np.float32))
