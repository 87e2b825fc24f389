"""The two ends of a language model: embedding lookup and cross-entropy, vocabulary-parallel where a pipeline asks.

Under a pipeline every stage holds a slice of the vocabulary (of the embedding's rows, of the head's columns), and all
stages work together on the micro-batch that enters or leaves the pipeline, so no stage is the slow one. A model just
calls these functions; outside a pipeline they are the ordinary ones. (Shoeybi et al., arXiv:1909.08053, section 3.)

T tokens, V vocabulary, D width.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from contextvars import ContextVar

import jax
import jax.numpy as jnp
from jax import lax

from jzero.errors import ConfigError

_AXIS: ContextVar[tuple[str | None, frozenset[int]]] = ContextVar("vocabulary_axis", default=(None, frozenset()))


@contextlib.contextmanager
def parallel(axis: str | None, sizes: Collection[int] = ()) -> Iterator[None]:
    """Within, `embed` and `cross_entropy` are given slices, over a mesh axis, of vocabularies of these sizes.

    None: whole tables.
    """
    token = _AXIS.set((axis, frozenset(sizes)))
    try:
        yield
    finally:
        _AXIS.reset(token)


def _axis_of(size: int) -> str | None:
    """The mesh axis over which a table with so many local rows is sliced.

    Raises:
      ConfigError: a whole table where slices are expected.
    """
    axis, sizes = _AXIS.get()
    if axis is not None and size * lax.psum(1, axis) not in sizes:
        raise ConfigError(
            f"a table of {size} rows is used through jzero.pipeline.vocab_parallel, but the model's "
            f"`vocabulary` does not name it: "
            "name every parameter that embed and cross_entropy are given, or none"
        )
    return axis


def embed(table_VD: jax.Array, tokens: jax.Array) -> jax.Array:
    """Rows of the table, [..., D], for integer `tokens` [...].

    In float32, so that the gradient, a sum over every occurrence of a token, is summed in float32.

    >>> embed(jnp.eye(3), jnp.array([2, 0])).tolist()
    [[0.0, 0.0, 1.0], [1.0, 0.0, 0.0]]
    """
    axis, dtype, table_VD = _axis_of(len(table_VD)), table_VD.dtype, table_VD.astype(jnp.float32)
    tokens = tokens.astype(jnp.int32)  # int8 cannot hold a row count of 256: it would wrap around
    if axis is None:
        return table_VD[tokens].astype(dtype)
    size = len(table_VD) * lax.psum(1, axis)
    tokens = jnp.clip(jnp.where(tokens < 0, tokens + size, tokens), 0, size - 1)  # as indexing does
    rows = tokens - _start(len(table_VD), axis)
    mine = (rows >= 0) & (rows < len(table_VD))
    found = jnp.where(mine[..., None], table_VD[jnp.where(mine, rows, 0)], 0)
    return _sum(found.astype(dtype), axis)  # one stage has the row, so nothing is rounded


def cross_entropy(x: jax.Array, head_DV: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(sum of the tokens' cross-entropies, number of tokens) of the logits x @ head.

    Args:
      x: [..., D], the features. head_DV: [D, V].
      labels: [...] integers; those below zero count for nothing.

    >>> total, count = cross_entropy(jnp.zeros((2, 4)), jnp.ones((4, 8)), jnp.array([3, -1]))
    >>> round(float(total), 4), int(count)
    (2.0794, 1)
    """
    axis = _axis_of(head_DV.shape[1])
    logits = (x if axis is None else _copy(x, axis)) @ head_DV
    losses = _losses(logits, labels, axis)
    counted = labels >= 0
    return jnp.sum(losses, where=counted), counted.sum()


def _start(size: int, axis: str) -> jax.Array:
    return lax.axis_index(axis) * size


def _sum(x: jax.Array, axis: str) -> jax.Array:
    """The sum over the axis; its gradient arrives whole on every device, so it passes as it is."""

    @jax.custom_vjp
    def f(x: jax.Array) -> jax.Array:
        return lax.psum(x, axis)

    f.defvjp(lambda x: (f(x), None), lambda _, g: (g,))
    return f(x)


def _copy(x: jax.Array, axis: str) -> jax.Array:
    """x as it is, the same on every device; its gradient arrives in parts, and is summed over the axis."""

    @jax.custom_vjp
    def f(x: jax.Array) -> jax.Array:
        return x

    f.defvjp(lambda x: (x, None), lambda _, g: (lax.psum(g, axis),))
    return f(x)


def _losses(logits: jax.Array, labels: jax.Array, axis: str | None) -> jax.Array:
    """Float32 cross-entropies [...] of logits [..., V], V local, with the gradient written out.

    The residuals are the logits as they are and one number per token.
    """

    def hit(logits: jax.Array, labels: jax.Array) -> jax.Array:
        columns = lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
        start = 0 if axis is None else _start(logits.shape[-1], axis)
        return columns == (labels.astype(jnp.int32) - start)[..., None]

    def forward(logits: jax.Array, labels: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        wide = logits.astype(jnp.float32)
        highest = wide.max(-1)
        if axis is not None:
            highest = lax.pmax(highest, axis)
        sums = jnp.stack([jnp.exp(wide - highest[..., None]).sum(-1), jnp.where(hit(wide, labels), wide, 0).sum(-1)])
        if axis is not None:
            sums = lax.psum(sums, axis)
        normalizer = jnp.log(sums[0]) + highest
        return normalizer - sums[1], (logits, labels, normalizer)

    def backward(saved: tuple[jax.Array, ...], g: jax.Array) -> tuple[jax.Array, None]:
        logits, labels, normalizer = saved
        probabilities = jnp.exp(logits.astype(jnp.float32) - normalizer[..., None])
        return ((probabilities - hit(logits, labels)) * g[..., None]).astype(logits.dtype), None

    @jax.custom_vjp
    def losses(logits: jax.Array, labels: jax.Array) -> jax.Array:
        return forward(logits, labels)[0]

    losses.defvjp(forward, backward)
    return losses(logits, labels)
