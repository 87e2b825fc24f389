"""A mixture of experts on one device and on groups of devices, against plain JAX that computes every expert."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.mixtures import plain_balance_loss, plain_experts, plain_route
from helpers.sampling import keep
from jax.sharding import Mesh, PartitionSpec

from jzero.errors import ConfigError
from jzero.moe import balance_loss, experts, route
from jzero.spread import ModelGroup, ShardedArray, spread, whole

ROWS, TOKENS, WIDTH, INNER, EXPERTS, TOP = 4, 8, 6, 4, 8, 2
SHAPES = ((ROWS, TOKENS, WIDTH), (WIDTH, EXPERTS), (EXPERTS, WIDTH, 2, INNER), (EXPERTS, INNER, WIDTH))
BIASED = (*SHAPES, (EXPERTS, 2, INNER), (EXPERTS, WIDTH))


def arrays(shapes=SHAPES):
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(size=s) / np.sqrt(s[-2]), jnp.float32) for s in shapes]


def glu(gate, value):
    return jnp.tanh(gate) * (value + 1)


def mixture(x, router, up, down, *biases, capacity_factor):
    routing = route(x @ router, TOP, capacity_factor=capacity_factor, min_capacity=1)
    more = {"biases": biases, "glu": glu} if biases else {}
    return jnp.sin(experts(x, routing, up, down, **more)).sum() + balance_loss(routing)


def plain(x, router, up, down, *biases, capacity_factor):
    routing = plain_route(x @ router, TOP, capacity_factor=capacity_factor, min_capacity=1)
    more = {"biases": biases, "glu": glu} if biases else {}
    return jnp.sin(plain_experts(x, routing, up, down, **more)).sum() + plain_balance_loss(routing)


def with_gradients(f, capacity_factor, shapes=SHAPES):
    return jax.jit(jax.value_and_grad(partial(f, capacity_factor=capacity_factor), argnums=tuple(range(len(shapes)))))


def assert_close(found, known):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(known), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6 * np.abs(b).max())


@pytest.mark.parametrize("shapes", [SHAPES, BIASED], ids=["plain", "biased"])
@pytest.mark.parametrize("capacity_factor", keep([None, 0.5, 1.0, 100.0], [None, 0.5]))
def test_one_device(capacity_factor, shapes):
    found, known = (with_gradients(f, capacity_factor, shapes)(*arrays(shapes)) for f in (mixture, plain))
    assert_close(found, known)


def test_without_gates_and_with_another_activation():
    x, router, up, down = arrays()
    ours = experts(x, route(x @ router, TOP), up[:, :, 0], down, activation=jax.nn.gelu)
    theirs = plain_experts(x, plain_route(x @ router, TOP), up[:, :, 0], down, jax.nn.gelu)
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_all_tokens_to_one_expert():
    """The load that no even share of rows would hold."""
    x, router, up, down = arrays()
    router = router.at[:, 3].set(0) + 100.0 * (jnp.arange(EXPERTS) == 3)
    x = jnp.abs(x)
    assert (route(x @ router, 1).experts == 3).all()
    ours = experts(x, route(x @ router, 1), up, down)
    np.testing.assert_allclose(ours, plain_experts(x, plain_route(x @ router, 1), up, down), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_batched_and_differentiated_inside_a_model():
    x, router, up, down = arrays()
    gradient = jax.vmap(jax.grad(lambda x: mixture(x[None], router, up, down, 1.0)))(x)
    known = jax.vmap(jax.grad(lambda x: plain(x[None], router, up, down, 1.0)))(x)
    np.testing.assert_allclose(gradient, known, rtol=1e-5, atol=1e-6)


# (degrees, axes that divide the experts, axes that divide their inner width)
GROUPS = [
    ({"expert": 2}, ("expert",), ()),
    ({"expert": 4}, ("expert",), ()),
    ({"expert": 8}, ("expert",), ()),  # more devices than rows: all tokens on each
    ({"tensor": 4}, ("tensor",), ()),
    ({"tensor": 4}, (), ("tensor",)),
    ({"context": 4}, (), ()),
    ({"expert": 2, "tensor": 2}, ("expert",), ()),
    ({"expert": 2, "tensor": 2}, ("expert",), ("tensor",)),
    ({"expert": 2, "tensor": 2}, ("expert", "tensor"), ()),
    ({"expert": 2, "context": 2}, ("expert",), ()),
    ({"context": 2, "tensor": 2}, ("tensor",), ()),
    ({"expert": 2, "context": 2, "tensor": 2}, ("expert", "tensor"), ()),
    ({"expert": 2, "context": 2, "tensor": 2}, ("expert",), ("tensor",)),
]
CASES = [(group, factor, shapes) for group in GROUPS for factor in (None, 0.5) for shapes in (SHAPES, BIASED)]
SAMPLE = [(GROUPS[1], None, SHAPES), (GROUPS[7], None, BIASED), (GROUPS[11], 0.5, SHAPES), (GROUPS[12], 0.5, BIASED)]


@pytest.mark.parametrize(("case", "capacity_factor", "shapes"), keep(CASES, SAMPLE))
def test_groups(case, capacity_factor, shapes):
    degrees, of_experts, inner = case
    dims = [None, None, (of_experts, (), (), inner), (of_experts, inner, ()), (of_experts, (), inner), None]
    dims = dims[: len(shapes)]
    specs = [PartitionSpec(*(axes or None for axes in d)) if d else PartitionSpec() for d in dims]
    group = ModelGroup(degrees, {0: ("expert",), 1: ("context", "tensor")})

    def local(*shards):
        def loss(*shards):
            values = [
                whole(x) if d is None else ShardedArray(x, shape, d, weight=True)
                for x, shape, d in zip(shards, shapes, dims, strict=True)
            ]
            values[0] = group.in_activation_layout(values[0])
            run = spread(partial(mixture, capacity_factor=capacity_factor), group)
            return group.undivided(run(*values)).x / group.size

        value, shares = jax.value_and_grad(loss, argnums=tuple(range(len(shards))))(*shards)
        missing = [tuple(a for a in degrees if a not in {b for axes in d or () for b in axes}) for d in dims]
        summed = [jax.lax.psum(g, axes) if axes else g for g, axes in zip(shares, missing, strict=True)]
        return value * group.size, summed

    mesh = Mesh(np.array(jax.devices()[: group.size]).reshape(*degrees.values()), tuple(degrees))
    out_specs = (PartitionSpec(), specs)
    run = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=tuple(specs), out_specs=out_specs, check_vma=False))
    assert_close(run(*arrays(shapes)), with_gradients(plain, capacity_factor, shapes)(*arrays(shapes)))
    assert not group.traced.fallbacks


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x, up, down: (x, up[0, 0], down), r"up \[\d+, \d+\], down .*; must be"),
        (lambda x, up, down: (x[0], up, down), "must be \\[B, S, D\\]"),
        (lambda x, up, down: (x[:, :, 1:], up, down), "x \\[4, 8, 5\\]"),
        (lambda x, up, down: (x, up, down[:, 1:]), "down \\[8, 3, 6\\]"),
        (lambda x, up, down: (x[:, 1:], up, down), "the routing is of tokens \\[4, 8\\]"),
        (lambda x, up, down: (x, up[1:], down[1:]), "8 experts, x has tokens \\[4, 8\\] and up 7 experts"),
    ],
)
def test_shapes_that_do_not_belong_together(change, message):
    x, router, up, down = arrays()
    routing = route(x @ router, TOP)
    with pytest.raises(ConfigError, match=rf"^test_experts.py:\d+: experts: .*{message}"):
        experts(*change(x, up, down)[:1], routing, *change(x, up, down)[1:])
    with pytest.raises(ConfigError, match=r"experts: biases \[8, 2, 3\], \[8, 6\]; must be \[8, 2, 4\] and \[8, 6\]"):
        experts(x, routing, up, down, biases=(jnp.ones((8, 2, 3)), jnp.ones((8, 6))))
    with pytest.raises(ConfigError, match=r"experts: routing is tuple; must be what jzero\.route returns"):
        experts(x, (routing.experts, routing.weights), up, down)
