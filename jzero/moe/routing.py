"""Which experts each token goes to, and the balance of their loads.

Shapes: B rows, S tokens of a row, k experts of a token, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from math import ceil, inf
from numbers import Integral, Real
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax

from jzero.errors import ConfigError
from jzero.tracing.source_lines import calling_line


@partial(
    jax.tree_util.register_dataclass, data_fields=["experts", "weights", "scores", "slots"], meta_fields=["capacity"]
)
@dataclass(frozen=True)
class Routing:
    """The experts of each token.

    Attributes:
      experts: of each token, the one with the largest score first [B, S, k] int32.
      weights: of these experts' outputs in the sum [B, S, k] float32.
      scores: of all experts, parts of their sum [B, S, E] float32.
      slots: the place of a token among those of its row that go to the same expert [B, S, k] int32; None: no capacity.
      capacity: the tokens of a row that an expert takes; those in later slots are dropped. None: all.
    """

    experts: jax.Array
    weights: jax.Array
    scores: jax.Array
    slots: jax.Array | None = None
    capacity: int | None = None

    @property
    def counts(self) -> jax.Array:
        """The tokens that chose each expert [E] int32."""
        return _chosen(self).sum((0, 1, 2), dtype=jnp.int32)

    @property
    def drop_rate(self) -> jax.Array:
        """The part of the choices that is dropped [], between 0 and 1."""
        if self.slots is None or self.capacity is None:
            return jnp.zeros((), jnp.float32)
        return (self.slots >= self.capacity).mean(dtype=jnp.float32)


def route(
    logits: jax.Array,
    top_k: int,
    *,
    score: Literal["softmax", "sigmoid"] = "softmax",
    normalize: bool = True,
    scale: float = 1.0,
    bias: jax.Array | None = None,
    groups: tuple[int, int, int] | None = None,
    capacity_factor: float | None = None,
    min_capacity: int = 4,
) -> Routing:
    """Choose the `top_k` experts of each token.

    Args:
      logits: of the router [B, S, E]; computed and used in float32.
      top_k: experts of a token.
      score: "softmax" over the experts (Mixtral, Qwen3-MoE), or "sigmoid" of each (DeepSeek-V3).
      normalize: divides a token's weights by their sum.
      scale: multiplies the weights.
      bias: [E], added to the scores for the choice alone; see `balanced_bias`.
      groups: (n, k, best): the experts are n groups, and a token's are of the k groups whose `best` largest scores sum
        to most (DeepSeek-V2: 1, arXiv:2405.04434; DeepSeek-V3: 2).
      capacity_factor: limits the tokens of a row that an expert takes to this many times the even share, S k / E
        rounded up (GShard, arXiv:2006.16668), so that all products have one size. First choices come before second
        ones, and early tokens before late ones. None: nothing is dropped. DeepSpeed counts over the rows of a GPU, and
        jzero over one row, so that the layout does not change which tokens are dropped.
      min_capacity: the smallest limit.

    Raises:
      ConfigError: other shapes, more experts of a token than there are, an unknown score, a capacity below 1, groups
        that do not divide the experts or have too few.

    >>> route(jnp.array([[[0.0, 2.0, 1.0]]]), top_k=2).experts.tolist()
    [[[1, 2]]]
    """
    if logits.ndim != 3:
        raise bad_call("route", f"logits {list(logits.shape)}; must be [B, S, E]")
    _, tokens, experts = logits.shape
    if not isinstance(top_k, Integral) or not 1 <= top_k <= experts:
        raise bad_call("route", f"top_k = {top_k!r} of {experts} experts; must be a whole number from 1 to {experts}")
    if bias is not None and bias.shape != (experts,):
        raise bad_call("route", f"bias {list(bias.shape)}; must be [E], here [{experts}]")
    if score not in ("softmax", "sigmoid"):
        raise bad_call("route", f'score = {score!r}; must be "softmax" or "sigmoid"')
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    scores = jax.nn.softmax(logits) if score == "softmax" else jax.nn.sigmoid(logits)
    # The bias decides the choice alone: weights, and so gradients, are those of the scores (arXiv:2408.15664).
    choice = scores if bias is None else scores + lax.stop_gradient(bias)
    _, chosen = lax.top_k(choice if groups is None else _in_best_groups(choice, top_k, groups), top_k)
    weights = jnp.take_along_axis(scores, chosen, axis=-1)
    if normalize:
        weights = weights / (weights.sum(-1, keepdims=True) + 1e-20)  # sigmoids may all be zero
    # For `balance_loss` (DeepSeek-V3, arXiv:2412.19437, eq. 18); those of a softmax sum to 1.
    scores = scores if score == "softmax" else scores / (scores.sum(-1, keepdims=True) + 1e-20)
    if capacity_factor is None:
        return Routing(chosen, weights * scale, scores)
    capacity = min(_capacity(tokens * top_k / experts, capacity_factor, min_capacity), tokens)
    return Routing(chosen, weights * scale, scores, _slots(chosen, experts), capacity)


def _capacity(even_share: float, factor: float, smallest: int) -> int:
    """Return the tokens of a row that an expert takes."""
    numbers = isinstance(smallest, Integral) and isinstance(factor, Real)
    if not numbers or smallest < 1 or not 0 < factor < inf:
        raise bad_call(
            "route",
            f"capacity_factor = {factor!r}, min_capacity = {smallest!r}; must be a positive number or None, and a "
            "positive whole number",
        )
    return max(smallest, ceil(even_share * factor))


def _in_best_groups(scores: jax.Array, top_k: int, groups: tuple[int, int, int]) -> jax.Array:
    """Set the scores [B, S, E] of experts outside of a token's best groups to -inf."""
    (count, kept, best), experts = groups, scores.shape[-1]
    size = experts // count if count > 0 and experts % count == 0 else 0
    if not 1 <= best <= size or not 1 <= kept <= count or kept * size < top_k:
        raise bad_call(
            "route",
            f"groups = {groups} of {experts} experts, top_k = {top_k}; must be (n, k, best): n divides the experts, "
            "k <= n groups have top_k experts or more, and each has `best` or more",
        )
    grouped = scores.reshape(*scores.shape[:2], count, -1)
    _, chosen = lax.top_k(lax.top_k(grouped, best)[0].sum(-1), kept)
    is_kept = (chosen[..., None] == jnp.arange(count)).any(-2)
    return jnp.where(is_kept[..., None], grouped, -jnp.inf).reshape(scores.shape)


def bad_call(name: str, problem: str) -> ConfigError:
    """Make the exception of a bad call of a function; it names the line of the model."""
    line = calling_line()
    return ConfigError(f"{line}: {name}: {problem}" if line else f"{name}: {problem}")


def _slots(chosen: jax.Array, experts: int) -> jax.Array:
    """Number the tokens of a row that go to the same expert, first choices first: [B, S, k] -> [B, S, k]."""
    rows, tokens, k = chosen.shape
    flat = chosen.swapaxes(1, 2).reshape(rows, k * tokens)
    order = jnp.argsort(flat, axis=1, stable=True)
    rank = jnp.argsort(order, axis=1)  # the inverse permutation
    counts = (flat[..., None] == jnp.arange(experts)).sum(1, dtype=jnp.int32)
    first = jnp.cumsum(counts, axis=1) - counts
    slots = rank.astype(jnp.int32) - jnp.take_along_axis(first, flat, axis=1)
    return slots.reshape(rows, k, tokens).swapaxes(1, 2)


def balance_loss(routing: Routing) -> jax.Array:
    """Compute the load-balancing loss [] of the Switch Transformer (arXiv:2101.03961, eq. 4), for k experts of a token.

    It is E times the sum over the experts of the part of tokens that chose it times its mean score; k if all loads and
    scores are even. The mean is over the tokens of a micro-batch. In Hugging Face's transformers it is over all layers'
    tokens together.
    """
    experts, tokens = routing.scores.shape[-1], routing.scores.shape[0] * routing.scores.shape[1]
    part = _chosen(routing).sum((0, 1, 2), dtype=jnp.float32) / tokens
    return experts * (part * routing.scores.mean((0, 1))).sum()


def balanced_bias(bias: jax.Array, counts: jax.Array, rate: float = 1e-3) -> jax.Array:
    """Move a bias [E] towards even loads, without a loss (arXiv:2408.15664): up for experts with few tokens.

    Args:
      bias: what `route` adds to the scores for the choice; state besides the parameters, not trained.
      counts: tokens of each expert [E]; over all replicas `jzero.all_gather(routing.counts[None]).sum(0)`.
      rate: the size of one move.

    Raises:
      ConfigError: other shapes.
    """
    if bias.ndim != 1 or bias.shape != counts.shape:
        raise bad_call("balanced_bias", f"bias {list(bias.shape)}, counts {list(counts.shape)}; both must be [E]")
    # Of whole numbers, since a mean in a fused multiply-add is not exact: an even load moves nothing.
    return bias + rate * jnp.sign(counts.sum() - len(counts) * counts.astype(jnp.float32))


def _chosen(routing: Routing) -> jax.Array:
    return routing.experts[..., None] == jnp.arange(routing.scores.shape[-1])
