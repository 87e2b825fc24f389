"""Mixtures of experts in plain JAX: every expert computes every token, and a mask chooses. No jzero in it."""

from contextlib import contextmanager
from math import ceil
from types import SimpleNamespace
from unittest.mock import patch

import jax
import jax.numpy as jnp


def plain_route(logits, top_k, *, score="softmax", normalize=True, scale=1.0, bias=None, groups=None,
                capacity_factor=None, min_capacity=4):  # fmt: skip
    """Choices as masks [B, S, k, E]; places by a running count, first choices first."""
    rows, tokens, experts = logits.shape
    scores = {"softmax": jax.nn.softmax, "sigmoid": jax.nn.sigmoid}[score](logits.astype(jnp.float32))
    choice = scores if bias is None else scores + bias
    if groups is not None:  # the place of each group in the order of the sums of its best scores
        grouped = choice.reshape(rows, tokens, groups[0], -1)
        order = jnp.argsort(-jnp.sort(grouped, -1)[..., -groups[2] :].sum(-1), -1)
        choice = jnp.where((jnp.argsort(order, -1) < groups[1])[..., None], grouped, -1e9).reshape(choice.shape)
    _, chosen = jax.lax.top_k(choice, top_k)
    mask = jax.nn.one_hot(chosen, experts)
    weights = jnp.einsum("bske,bse->bsk", mask, scores)
    weights = weights / weights.sum(-1, keepdims=True) if normalize else weights
    kept = jnp.ones((rows, tokens, top_k))
    if capacity_factor is not None:
        capacity = max(min_capacity, ceil(tokens * top_k / experts * capacity_factor))
        in_order = mask.swapaxes(1, 2).reshape(rows, top_k * tokens, experts)
        places = ((jnp.cumsum(in_order, 1) - in_order) * in_order).sum(-1)
        kept = (places < capacity).astype(jnp.float32).reshape(rows, top_k, tokens).swapaxes(1, 2)
    counts = mask.sum((0, 1, 2))
    return SimpleNamespace(
        mask=mask, weights=weights * scale, scores=scores, kept=kept, drop_rate=1 - kept.mean(), counts=counts
    )


def plain_experts(x, routing, up, down, activation=jax.nn.silu, glu=None, biases=None):
    up_bias, down_bias = biases or (jnp.zeros((len(up), *up.shape[2:])), jnp.zeros((len(up), x.shape[-1])))
    if up.ndim == 4:
        gate, value = (jnp.einsum("bsd,edf->bsef", x, up[:, :, i]) + up_bias[:, i] for i in range(2))
        hidden = glu(gate, value) if glu else activation(gate) * value
    else:
        hidden = activation(jnp.einsum("bsd,edf->bsef", x, up) + up_bias)
    outputs = jnp.einsum("bsef,efd->bsed", hidden, down) + down_bias
    counted = jnp.einsum("bske,bsk->bse", routing.mask, routing.weights * routing.kept)
    return jnp.einsum("bsed,bse->bsd", outputs, counted.astype(x.dtype))


def plain_balance_loss(routing):
    """E times the sum over the experts of (part of the tokens that chose it) x (its mean part of the scores)."""
    part, scores = routing.mask.sum(2).mean((0, 1)), routing.scores / routing.scores.sum(-1, keepdims=True)
    return scores.shape[-1] * (part * scores.mean((0, 1))).sum()


@contextmanager
def plain_mixtures():
    """Make the models of this project compute so."""
    with (
        patch("models.moe.route", plain_route),
        patch("models.moe.experts", plain_experts),
        patch("models.moe.balance_loss", plain_balance_loss),
    ):
        yield
