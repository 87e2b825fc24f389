"""A mixture of experts on one device and on groups of devices, against plain JAX that computes every expert."""

import dataclasses
from functools import lru_cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.mixture_models import CONFIG, batches, model
from helpers.mixtures import plain_balance_loss, plain_experts, plain_route
from helpers.refusals import refuses
from helpers.sampling import keep
from helpers.spreading import on_shards, total
from helpers.steps import mesh, settings

import jzero
from jzero.moe import balance_loss, balanced_bias, experts, route
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


def with_gradients(f, capacity_factor, shapes):
    """The value, and the gradients of its sine."""
    f = partial(f, capacity_factor=capacity_factor)
    gradients = jax.grad(lambda *xs: total(f(*xs)), argnums=tuple(range(len(shapes))))
    return jax.jit(lambda *xs: (f(*xs), gradients(*xs)))(*arrays(shapes))


known = lru_cache(partial(with_gradients, plain))


def assert_close(found, known):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(known), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6 * np.abs(b).max())


@pytest.mark.parametrize("capacity_factor", [None, 0.5])
def test_one_device(capacity_factor):
    assert_close(with_gradients(mixture, capacity_factor, BIASED), known(capacity_factor, BIASED))


def test_without_gates_and_with_another_activation():
    x, router, up, down = arrays()
    ours = jax.jit(lambda x: experts(x, route(x @ router, TOP), up[:, :, 0], down, activation=jax.nn.gelu))(x)
    theirs = jax.jit(lambda x: plain_experts(x, plain_route(x @ router, TOP), up[:, :, 0], down, jax.nn.gelu))(x)
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_experts_train_where_nothing_before_them_does():
    """Frozen embeddings, for one: tokens have no tangent, and gathers with derivatives of their own refuse zeros."""
    gradient = jax.grad(lambda *xs: total(mixture(*xs, capacity_factor=None)), argnums=2)
    found = gradient(*arrays(BIASED))  # not compiled as a whole
    assert_close(found, known(None, BIASED)[1][2])


CASES = [  # degrees, axes that divide the experts, axes that divide their inner width; capacity factor, shapes
    ({"expert": 4}, ("expert",), (), None, BIASED),
    ({"expert": 2, "context": 2, "tensor": 2}, ("expert", "tensor"), (), 0.5, SHAPES),
    ({"expert": 2, "context": 2, "tensor": 2}, ("expert",), ("tensor",), None, BIASED),
    ({"expert": 8}, ("expert",), (), 0.5, BIASED),
    ({"tensor": 4}, ("tensor",), (), 0.5, SHAPES),
    ({"tensor": 4}, (), ("tensor",), 0.5, BIASED),
    ({"context": 4}, (), (), 0.5, BIASED),
]


@pytest.mark.parametrize(("degrees", "of_experts", "inner", "capacity_factor", "shapes"), keep(CASES, CASES[1:3]))
def test_groups(degrees, of_experts, inner, capacity_factor, shapes):
    between_layers = {0: ("expert",), 1: ("context", "tensor")}
    # Where there are more devices than rows, each has all tokens.
    tokens = {} if ROWS % degrees.get("expert", 1) else {"expert": 0, "context": 1, "tensor": 1}
    weights = [dict.fromkeys(of_experts, 0) | dict.fromkeys(inner, d) for d in (3, 1, 2)]
    dims = [tokens, {}, *weights, {}][: len(shapes)]  # axis -> the dimension that it divides
    forms = [(tuple(of.get(axis) for axis in degrees), 1 < i < 5) for i, of in enumerate(dims)]
    run = partial(mixture, capacity_factor=capacity_factor)
    *found, group = on_shards(run, arrays(shapes), forms, between_layers, degrees)
    assert_close(found, known(capacity_factor, shapes))
    assert not group.traced.fallbacks


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x, r, up, down: (x, r, up[0, 0], down), r"up \[\d+, \d+\], down .*; must be"),
        (lambda x, r, up, down: (x[0], r, up, down), r"must be \[B, S, D\]"),
        (lambda x, r, up, down: (x[:, :, 1:], r, up, down), r"x \[4, 8, 5\]"),
        (lambda x, r, up, down: (x[:, 1:], r, up, down), r"the routing is of tokens \[4, 8\]"),
        (lambda x, r, up, down: (x, r, up[1:], down[1:]), r"8 experts, x has tokens \[4, 8\] and up 7 experts"),
        (lambda x, r, up, down: (x, (r.experts, r.weights), up, down), "routing is tuple; must be what jzero.route"),
        (lambda x, r, up, down: (x, r, up, down, (jnp.ones((8, 2, 3)), jnp.ones((8, 6)))),
            r"biases \[8, 2, 3\], \[8, 6\]; must be \[8, 2, 4\] and \[8, 6\]"),
    ],
)  # fmt: skip
def test_shapes_that_do_not_belong_together(change, message):
    x, router, up, down = arrays()
    *given, biases = (*change(x, route(x @ router, TOP), up, down), None)[:5]
    refuses(lambda: experts(*given, biases=biases), rf"^test_experts.py:\d+: experts: .*{message}")


def test_layers_before_the_stack_are_checkpointed_as_the_others():
    """As in DeepSeek: the first has no experts. Its activations would stay alive through the backward pass."""
    made = model(dataclasses.replace(CONFIG, num_layers=3, dense_layers=(0,)))
    more = {"activation_checkpointing": {"policy": "matmuls"}, "stack": {"unroll": False}}
    config = settings(len(batches()[0]["inputs"]), **more)
    step = jzero.make_train_step(made, config, mesh=mesh(zero=1))
    again = [one.scope for one in operations(step.trace(batches()[0]).jaxpr) if "rematted_computation" in one.scope]
    assert {part for part in ("prefix", "stack") for scope in again if part in scope} == {"prefix", "stack"}


def logits(rows=3, tokens=12, experts=6, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=(rows, tokens, experts)), jnp.float32)


@pytest.mark.parametrize(("factor", "min_capacity"), [(0.5, 1), (0.5, 4), (10.0, 4)])
def test_capacity(factor, min_capacity):
    """In the order of GShard: first choices first, early tokens first."""
    options = {"capacity_factor": factor, "min_capacity": min_capacity}
    routing, plain = (f(logits(), 2, **options) for f in (route, plain_route))
    assert routing.capacity == min(max(min_capacity, int(np.ceil(12 * 2 / 6 * factor))), 12)
    np.testing.assert_array_equal(routing.slots < routing.capacity, plain.kept)
    for row in np.stack([routing.experts, routing.slots], -1).reshape(3, -1, 2):  # no two tokens in one slot
        assert len(np.unique(row, axis=0)) == len(row)
    assert float(routing.drop_rate) == pytest.approx(float(plain.drop_rate))
    assert (plain.drop_rate > 0) == (factor < 10)


@pytest.mark.parametrize("spread", [0.0, 1.0])
def test_sigmoid_scores(spread):
    """DeepSeek-V3, arXiv:2412.19437, eq. 12 to 18; even scores give the balance k, however large they are."""
    routing, plain = (f(logits() * spread - 2, 2, score="sigmoid", scale=2.5) for f in (route, plain_route))
    np.testing.assert_allclose(routing.weights, plain.weights, rtol=1e-6)
    np.testing.assert_allclose(balance_loss(routing), plain_balance_loss(plain), rtol=1e-6)
    assert (float(balance_loss(routing)) == pytest.approx(2)) == (spread == 0)


def test_the_bias_balances():
    bias, tokens = jnp.zeros(6), logits(8, 64) + jnp.arange(6) * 0.5
    counts = jax.jit(lambda bias: route(tokens, 2, bias=bias).counts)
    before = counts(bias)
    np.testing.assert_allclose(
        balanced_bias(bias, before, rate=0.01), 0.01 * np.sign(before.mean() - before), rtol=1e-6
    )

    for _ in range(300):
        bias = balanced_bias(bias, counts(bias), rate=0.01)
    after = counts(bias)
    assert before.max() > 1.5 * before.mean()
    assert after.max() < 1.1 * after.mean()
    refuses(lambda: balanced_bias(jnp.zeros(4), jnp.zeros(5)), r"bias \[4\], counts \[5\]; both must be \[E\]")


CAPACITY = "must be a positive number"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logits": logits()[0]}, r"logits \[12, 6\]; must be \[B, S, E\]"),
        ({"bias": jnp.zeros(5)}, r"bias \[5\]; must be \[E\], here \[6\]"),
        ({"score": "softmx"}, "score = 'softmx'; must be"),
        ({"groups": (4, 2, 1)}, "groups = .4, 2, 1. of 6 experts, top_k = 2; must be .n, k, best.: n divides"),
        ({"groups": (3, 2, 3)}, "groups = .3, 2, 3. of 6 experts, top_k = 2; must be"),
        ({"capacity_factor": 0.0}, f"capacity_factor = 0.0, min_capacity = 4; {CAPACITY} or None, and a"),
        ({"capacity_factor": 1.0, "min_capacity": 0}, f"capacity_factor = 1.0, min_capacity = 0; {CAPACITY}"),
        *(({"top_k": k}, f"top_k = {k} of 6 experts; must be a whole number from 1 to 6") for k in (0, 7, 2.0)),
    ],
)
def test_bad_arguments(change, message):
    """The message begins with the line of the call."""
    given = {"logits": logits(), "top_k": 2, **change}
    refuses(lambda: route(**given), rf"^test_experts.py:\d+: route: {message}")


def test_sigmoids_that_are_all_zero():
    assert (route(jnp.full_like(logits(), -200.0), 2, score="sigmoid").weights == 0).all()
