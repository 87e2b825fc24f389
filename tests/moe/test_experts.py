"""A mixture of experts on one device and on groups of devices, against plain JAX that computes every expert."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.mixture_models import CONFIG, batches, model
from helpers.mixtures import plain_balance_loss, plain_experts, plain_route
from helpers.refusals import refuses
from helpers.sampling import keep
from jax.sharding import Mesh, PartitionSpec

import jzero
from jzero.moe import balance_loss, experts, route
from jzero.spread import ModelGroup, ShardedArray, spread, whole
from jzero.tracing.equations import operations

ROWS, TOKENS, WIDTH, INNER, EXPERTS, TOP = 4, 8, 6, 4, 8, 2
SHAPES = ((ROWS, TOKENS, WIDTH), (WIDTH, EXPERTS), (EXPERTS, WIDTH, 2, INNER), (EXPERTS, INNER, WIDTH))
BIASED = (*SHAPES, (EXPERTS, 2, INNER), (EXPERTS, WIDTH))


def arrays(shapes=SHAPES):
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(size=s) / np.sqrt(s[-2]), jnp.float32) for s in shapes]


def glu(gate, value):
    return jnp.tanh(gate) * (value + 1)


def mixture(x, router, up, down, *biases, capacity_factor, functions=(route, experts, balance_loss)):
    route, experts, balance_loss = functions
    routing = route(x @ router, TOP, capacity_factor=capacity_factor, min_capacity=1)
    more = {"biases": biases, "glu": glu} if biases else {}
    return jnp.sin(experts(x, routing, up, down, **more)).sum() + balance_loss(routing)


plain = partial(mixture, functions=(plain_route, plain_experts, plain_balance_loss))


def with_gradients(f, capacity_factor, shapes=SHAPES):
    return jax.jit(jax.value_and_grad(partial(f, capacity_factor=capacity_factor), argnums=tuple(range(len(shapes)))))


def assert_close(found, known):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(known), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6 * np.abs(b).max())


@pytest.mark.parametrize(("capacity_factor", "shapes"), [(None, BIASED), (0.5, BIASED)])
def test_one_device(capacity_factor, shapes):
    found, known = (with_gradients(f, capacity_factor, shapes)(*arrays(shapes)) for f in (mixture, plain))
    assert_close(found, known)


def test_without_gates_and_with_another_activation():
    x, router, up, down = arrays()
    ours = experts(x, route(x @ router, TOP), up[:, :, 0], down, activation=jax.nn.gelu)
    theirs = plain_experts(x, plain_route(x @ router, TOP), up[:, :, 0], down, jax.nn.gelu)
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_experts_train_where_nothing_before_them_does():
    """Frozen embeddings, for one: tokens have no tangent, and gathers with derivatives of their own refuse zeros."""
    found, known = (jax.grad(partial(f, capacity_factor=None), argnums=2)(*arrays()) for f in (mixture, plain))
    assert_close(found, known)


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
    gradient, known = (
        jax.vmap(jax.grad(lambda x, f=f: f(x[None], router, up, down, capacity_factor=1.0)))(x)
        for f in (mixture, plain)
    )
    np.testing.assert_allclose(gradient, known, rtol=1e-5, atol=1e-6)


# (degrees, axes that divide the experts, axes that divide their inner width), capacity factor, shapes
CASES = [
    (({"expert": 4}, ("expert",), ()), None, SHAPES),
    (({"expert": 2, "tensor": 2}, ("expert",), ("tensor",)), None, BIASED),
    (({"expert": 2, "context": 2, "tensor": 2}, ("expert", "tensor"), ()), 0.5, SHAPES),
    (({"expert": 2, "context": 2, "tensor": 2}, ("expert",), ("tensor",)), 0.5, BIASED),
    (({"expert": 8}, ("expert",), ()), 0.5, BIASED),  # more devices than rows: all tokens on each
    (({"tensor": 4}, ("tensor",), ()), 0.5, SHAPES),
    (({"tensor": 4}, (), ("tensor",)), None, BIASED),
    (({"context": 4}, (), ()), 0.5, BIASED),
    (({"expert": 2, "tensor": 2}, ("expert", "tensor"), ()), None, BIASED),
    (({"expert": 2, "context": 2}, ("expert",), ()), None, SHAPES),
    (({"context": 2, "tensor": 2}, ("tensor",), ()), 0.5, SHAPES),
]


@pytest.mark.parametrize(("case", "capacity_factor", "shapes"), keep(CASES, CASES[:4]))
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
        (lambda x, r, up, down: (x, r, up[0, 0], down), r"up \[\d+, \d+\], down .*; must be"),
        (lambda x, r, up, down: (x[0], r, up, down), r"must be \[B, S, D\]"),
        (lambda x, r, up, down: (x[:, :, 1:], r, up, down), r"x \[4, 8, 5\]"),
        (lambda x, r, up, down: (x, r, up, down[:, 1:]), r"down \[8, 3, 6\]"),
        (lambda x, r, up, down: (x[:, 1:], r, up, down), r"the routing is of tokens \[4, 8\]"),
        (lambda x, r, up, down: (x, r, up[1:], down[1:]), r"8 experts, x has tokens \[4, 8\] and up 7 experts"),
        (
            lambda x, r, up, down: (x, (r.experts, r.weights), up, down),
            "routing is tuple; must be what jzero.route",
        ),
        (
            lambda x, r, up, down: (x, r, up, down, (jnp.ones((8, 2, 3)), jnp.ones((8, 6)))),
            r"biases \[8, 2, 3\], \[8, 6\]; must be \[8, 2, 4\] and \[8, 6\]",
        ),
    ],
)
def test_shapes_that_do_not_belong_together(change, message):
    x, router, up, down = arrays()
    *given, biases = (*change(x, route(x @ router, TOP), up, down), None)[:5]
    refuses(lambda: experts(*given, biases=biases), rf"^test_experts.py:\d+: experts: .*{message}")


def test_layers_before_the_stack_are_checkpointed_as_the_others():
    """As in DeepSeek: one of four has no experts. Its activations would stay alive through the backward pass."""
    config = dataclasses.replace(CONFIG, num_layers=4, dense_layers=(0,))
    settings = {
        "train_batch_size": len(batches()[0]["inputs"]),
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "activation_checkpointing": {"policy": "matmuls"},
    }
    step = jzero.make_train_step(model(config), settings, mesh=jzero.make_mesh(zero=1, devices=jax.devices()[:1]))
    again = [one.scope for one in operations(step.trace(batches()[0]).jaxpr) if "rematted_computation" in one.scope]
    assert {part for part in ("prefix", "stack") for scope in again if part in scope} == {"prefix", "stack"}
