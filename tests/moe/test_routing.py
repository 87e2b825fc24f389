"""Choices, weights, capacity and balance of experts, against loops and plain JAX."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.mixtures import plain_balance_loss, plain_route
from helpers.refusals import refuses

from jzero.moe import balance_loss, balanced_bias, route


def logits(rows=3, tokens=12, experts=6, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=(rows, tokens, experts)), jnp.float32)


@pytest.mark.parametrize(("top_k", "normalize"), [(1, False), (2, True), (6, False)])
def test_choices_and_weights(top_k, normalize):
    routing, plain = route(logits(), top_k, normalize=normalize), plain_route(logits(), top_k, normalize=normalize)
    np.testing.assert_array_equal(jax.nn.one_hot(routing.experts, 6), plain.mask)
    np.testing.assert_allclose(routing.weights, plain.weights, rtol=1e-6)
    np.testing.assert_array_equal(routing.counts, plain.mask.sum((0, 1, 2)))
    assert routing.drop_rate == 0
    np.testing.assert_allclose(balance_loss(routing), plain_balance_loss(plain), rtol=1e-6)


@pytest.mark.parametrize(("factor", "min_capacity"), [(0.5, 1), (0.5, 4), (1.1, 1), (10.0, 4)])
def test_capacity(factor, min_capacity):
    """A loop over choices and tokens, in the order of GShard: first choices first, early tokens first."""
    routing = route(logits(), 2, capacity_factor=factor, min_capacity=min_capacity)
    capacity = min(max(min_capacity, int(np.ceil(12 * 2 / 6 * factor))), 12)
    assert routing.capacity == capacity
    dropped = 0
    for row, chosen in enumerate(np.asarray(routing.experts)):
        taken = np.zeros(6, int)
        for k in range(2):
            for token in range(12):
                expert = chosen[token, k]
                assert routing.slots[row, token, k] == taken[expert]
                dropped += taken[expert] >= capacity
                taken[expert] += 1
    assert float(routing.drop_rate) == pytest.approx(dropped / (3 * 12 * 2))
    assert (dropped > 0) == (factor < 10)


@pytest.mark.parametrize("spread", [0.0, 1.0])
def test_sigmoid_scores(spread):
    """DeepSeek-V3: scores of each expert alone, normalised, then scaled (arXiv:2412.19437, eq. 12 to 16); the balance
    is that of scores divided by their sum (eq. 18): even ones give k, however large they are.
    """
    routing = route(logits() * spread - 2, 2, score="sigmoid", scale=2.5)
    scores = 1 / (1 + np.exp(2 - spread * np.asarray(logits(), np.float64)))
    best = np.sort(scores, -1)[..., ::-1][..., :2]
    np.testing.assert_allclose(routing.weights, 2.5 * best / best.sum(-1, keepdims=True), rtol=1e-6)
    shares = (scores / scores.sum(-1, keepdims=True)).mean((0, 1))
    chosen = np.argsort(-scores, axis=-1, kind="stable")[..., :2]
    part = np.bincount(chosen.ravel(), minlength=6) / (3 * 12)
    expected = 6 * (part * shares).sum()
    assert (expected == pytest.approx(2)) == (spread == 0)
    np.testing.assert_allclose(balance_loss(routing), expected, rtol=1e-6)


@pytest.mark.parametrize("best", [1, 2])
def test_groups(best):
    """Of 12 experts in 4 groups a token's 3 are of the 2 groups with the largest sums of the best scores."""
    bias = np.random.default_rng(1).normal(size=12)
    routing = route(logits(experts=12), 3, score="sigmoid", bias=jnp.asarray(bias), groups=(4, 2, best))
    plain_choice = 1 / (1 + np.exp(-np.asarray(logits(experts=12), float))) + bias
    for choice, chosen in zip(plain_choice.reshape(-1, 12), np.asarray(routing.experts).reshape(-1, 3), strict=True):
        sums = [sum(sorted(choice[3 * g : 3 * g + 3])[-best:]) for g in range(4)]
        inside = [e for g in sorted(range(4), key=sums.__getitem__)[-2:] for e in range(3 * g, 3 * g + 3)]
        assert chosen.tolist() == sorted(inside, key=choice.__getitem__)[:-4:-1]
    assert (routing.experts != route(logits(experts=12), 3, score="sigmoid", bias=jnp.asarray(bias)).experts).any()


def test_the_bias_chooses_and_does_not_weigh():
    bias = jnp.zeros(6).at[5].set(10.0)
    routing = route(logits(), 1, bias=bias, normalize=False)
    assert (routing.experts == 5).all()
    np.testing.assert_allclose(routing.weights[..., 0], jax.nn.softmax(logits())[..., 5], rtol=1e-6)
    gradient = jax.grad(lambda bias: route(logits(), 1, bias=bias, normalize=False).weights.sum())(bias)
    assert (gradient == 0).all()


def test_the_bias_balances():
    bias, tokens = jnp.zeros(6), logits(8, 64) + jnp.arange(6) * 0.5
    before = route(tokens, 2).counts
    for _ in range(300):
        bias = balanced_bias(bias, route(tokens, 2, bias=bias).counts, rate=0.01)
    after = route(tokens, 2, bias=bias).counts
    assert before.max() > 1.5 * before.mean()
    assert after.max() < 1.1 * after.mean()


CAPACITY = "must be a positive number"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logits": logits()[0]}, r"logits \[12, 6\]; must be \[B, S, E\]"),
        ({"bias": jnp.zeros(5)}, r"bias \[5\]; must be \[E\], here \[6\]"),
        ({"score": "softmx"}, "score = 'softmx'; must be"),
        ({"groups": (4, 2, 1)}, "groups = .4, 2, 1. of 6 experts, top_k = 2; must be .n, k, best.: n divides"),
        ({"groups": (6, 1, 1)}, "groups = .6, 1, 1. of 6 experts, top_k = 2; must be"),
        ({"groups": (3, 2, 3)}, "groups = .3, 2, 3. of 6 experts, top_k = 2; must be"),
        ({"capacity_factor": 0.0}, f"capacity_factor = 0.0, min_capacity = 4; {CAPACITY} or None, and a"),
        ({"capacity_factor": 1.0, "min_capacity": 0}, f"capacity_factor = 1.0, min_capacity = 0; {CAPACITY}"),
        ({"capacity_factor": "1.0"}, f"capacity_factor = '1.0', min_capacity = 4; {CAPACITY}"),
        ({"capacity_factor": float("nan")}, f"capacity_factor = nan, min_capacity = 4; {CAPACITY}"),
        *(({"top_k": k}, f"top_k = {k} of 6 experts; must be a whole number from 1 to 6") for k in (0, 7, 2.0)),
    ],
)
def test_bad_arguments(change, message):
    """The message begins with the line of the call."""
    given = {"logits": logits(), "top_k": 2, **change}
    refuses(lambda: route(**given), rf"^test_routing.py:\d+: route: {message}")


def test_a_bias_of_other_experts():
    refuses(lambda: balanced_bias(jnp.zeros(4), jnp.zeros(5)), r"bias \[4\], counts \[5\]; both must be \[E\]")


def test_sigmoids_that_are_all_zero():
    assert (route(jnp.full((1, 2, 4), -200.0), 2, score="sigmoid").weights == 0).all()
