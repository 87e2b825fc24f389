"""The experts of a mixture: two products of each token with the weights of the experts that it goes to.

Shapes: B rows, S tokens of a row, T = B S, k experts of a token, E experts, C slots of an expert (the capacity), D
width, F inner width of an expert.
"""

from __future__ import annotations

from collections.abc import Callable

import jax

from jzero.moe.local_experts import Tokens, mixed
from jzero.moe.on_group import experts_on_group
from jzero.moe.routing import Routing, bad_call
from jzero.spread.operation import Operation


def experts(
    x: jax.Array, routing: Routing, up: jax.Array, down: jax.Array, *, activation: Callable = jax.nn.silu
) -> jax.Array:
    """Apply a mixture of experts to tokens.

    Without a capacity each token's rows are sorted by expert, and the products are grouped ones, of as many rows as
    each expert has: nothing is dropped (MegaBlocks, arXiv:2211.15841). With one, each expert has as many rows, empty
    or not, and the products are batched.

    The weights' expert dimension may be divided by the mesh axis `expert`, which divides the rows of the batch too:
    then tokens move to their experts, by all-to-alls. A model names these weights: `divided = {"expert": {"moe/": 0}}`.

    Without a capacity it cannot be batched by `jax.vmap`: JAX's `ragged_dot` has no rule for that. Put rows into B.

    Args:
      x: tokens [B, S, D].
      routing: from `route`.
      up: [E, D, 2, F], gates and values; or [E, D, F] without gates.
      down: [E, F, D].
      activation: of the gates, or of the values if there are none.

    Returns:
      [B, S, D] in the dtype of x: the weighted sum of the outputs of each token's experts.

    Raises:
      ConfigError: shapes that do not belong together.
    """
    if not isinstance(routing, Routing):
        raise bad_call("experts", f"routing is {type(routing).__name__}; must be what jzero.route returns")
    count, *matrix = up.shape
    fits = x.ndim == 3 and len(matrix) > 1 and matrix[1:-1] in ([], [2])
    if not fits or matrix[0] != x.shape[2] or down.shape != (count, matrix[-1], matrix[0]):
        raise bad_call(
            "experts",
            f"x {list(x.shape)}, up {list(up.shape)}, down {list(down.shape)}; must be [B, S, D], [E, D, 2, F]"
            " or [E, D, F], and [E, F, D]",
        )
    if routing.experts.shape[:2] != x.shape[:2] or routing.scores.shape[-1] != count:
        raise bad_call(
            "experts",
            f"the routing is of tokens {list(routing.experts.shape[:2])} and {routing.scores.shape[-1]} "
            f"experts, x has tokens {list(x.shape[:2])} and up {count} experts",
        )
    slots = () if routing.slots is None else (routing.slots,)
    arrays = (x, routing.experts, routing.weights, up, down, *slots)
    return mixture(*arrays, capacity=routing.capacity, activation=activation)


def _plain(
    x: jax.Array, chosen: jax.Array, weights: jax.Array, up: jax.Array, down: jax.Array, slots: jax.Array | None = None,
    *, capacity: int | None, activation: Callable,
) -> jax.Array:  # fmt: skip
    return mixed(Tokens(x, chosen, weights, slots), up, down, capacity, activation)


mixture = Operation(_plain, experts_on_group, "experts")
