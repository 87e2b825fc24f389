"""The two ends of a language model, embedding lookup and cross-entropy, vocabulary-parallel under a pipeline.

Every stage holds a slice of the vocabulary (rows of the embedding, columns of the head), and all stages work together
on the micro-batch that enters or leaves the pipeline, so that no stage is slower than the others. A model just calls
these functions; outside a pipeline they are the ordinary ones. (Shoeybi et al., arXiv:1909.08053, section 3.)

Gradients are written out with custom_vjp. In a shard_map without replication checks, JAX transposes psum to psum: the
gradient of a replicated value would be summed again, and count once per stage.

Shape suffixes: V vocabulary, D width.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator
from contextvars import ContextVar

import jax
import jax.numpy as jnp
from jax import lax

from jzero.errors import ConfigError
from jzero.kernels.softmax import row_losses
from jzero.loss import Mean
from jzero.tiling import tiled

Function = Callable[[jax.Array], jax.Array]
_AXIS: ContextVar[tuple[str | None, frozenset[int]]] = ContextVar("vocabulary_axis", default=(None, frozenset()))


@contextlib.contextmanager
def parallel(axis: str | None, sizes: Collection[int] = ()) -> Iterator[None]:
    """Make `embed` and `cross_entropy` take slices of tables inside this context.

    Args:
      axis: the mesh axis that the vocabulary is divided over; None: tables are whole.
      sizes: the sizes of the whole vocabularies.
    """
    token = _AXIS.set((axis, frozenset(sizes)))
    try:
        yield
    finally:
        _AXIS.reset(token)


def _axis_of(size: int) -> str | None:
    """Return the mesh axis that a table of `size` local rows is divided over, or None.

    Raises:
      ConfigError: the table is whole where slices are expected.
    """
    axis, sizes = _AXIS.get()
    if axis is not None and size * lax.psum(1, axis) not in sizes:
        raise ConfigError(
            f"a table of {size} rows is passed to jzero.pipeline.vocab_parallel, but the model's `vocabulary` does not "
            "name it: name every parameter that embed and cross_entropy get, or none"
        )
    return axis


def embed(table_VD: jax.Array, tokens: jax.Array) -> jax.Array:
    """Look up rows of a table.

    The lookup is in float32, so that its gradient, a sum over all occurrences of a token, is summed in float32.

    Args:
      table_VD: the embedding.
      tokens: [...] integers of any width; as in NumPy, negative ones count from the end.

    Returns:
      [..., D], in the table's dtype.

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
    return _sum(found.astype(dtype), axis)  # one stage has the row and the others add zeros: nothing is rounded


def logits(x: jax.Array, head_DV: jax.Array) -> jax.Array:
    """Compute the logits [..., V] of the features x [..., D], of the whole vocabulary on every stage.

    `cross_entropy` takes less memory: it does not gather the vocabulary.

    >>> logits(jnp.ones((2, 4)), jnp.ones((4, 8))).shape
    (2, 8)
    """
    axis = _axis_of(head_DV.shape[1])
    return x @ head_DV if axis is None else _gather(_copy(x, axis) @ head_DV, axis)


def cross_entropy(
    x: jax.Array,
    head_DV: jax.Array,
    labels: jax.Array,
    *,
    bias_V: jax.Array | None = None,
    vocab_size: int | None = None,
    softcap: float | None = None,
    tiles: int = 1,
) -> Mean:
    """Compute the mean cross-entropy of the logits x @ head.

    Args:
      x: [..., D], the features.
      head_DV: the output projection.
      labels: [...] integers; tokens with negative labels are ignored.
      bias_V: added to the logits.
      vocab_size: the columns of the head from here on are padding, with probability 0; default: none are.
      softcap: bounds the logits: softcap * tanh(logit / softcap).
      tiles: the logits of one tile of the sequence (the last dimension of labels) exist at a time, see `jzero.tiled`.

    Returns:
      The mean over the counted tokens, as a loss: `Mean(sum, count)`.

    >>> total, count = cross_entropy(jnp.zeros((2, 4)), jnp.ones((4, 8)), jnp.array([3, -1]))
    >>> round(float(total), 4), int(count)
    (2.0794, 1)
    """
    axis = _axis_of(head_DV.shape[1])

    def losses(part: tuple[jax.Array, jax.Array]) -> jax.Array:
        x, labels = part
        logits = (x if axis is None else _copy(x, axis)) @ head_DV
        if bias_V is not None:
            logits = logits + bias_V
        if softcap is not None:
            logits = (softcap * jnp.tanh(logits.astype(jnp.float32) / softcap)).astype(logits.dtype)
        return row_losses(logits, labels, axis, vocab_size)

    counted = labels >= 0
    return Mean(jnp.sum(tiled(losses, (x, labels), tiles, axis=labels.ndim - 1), where=counted), counted.sum())


def _start(size: int, axis: str) -> jax.Array:
    return lax.axis_index(axis) * size


def _with_gradient(f: Function, backward: Function, x: jax.Array) -> jax.Array:
    """Compute f(x); its gradient is `backward` of the result's."""
    run = jax.custom_vjp(f)
    run.defvjp(lambda x: (f(x), None), lambda _, g: (backward(g),))
    return run(x)


def _sum(x: jax.Array, axis: str) -> jax.Array:
    """Sum over the axis. The gradient arrives whole on every device, so the backward pass returns it unchanged."""
    return _with_gradient(lambda x: lax.psum(x, axis), lambda g: g, x)


def _copy(x: jax.Array, axis: str) -> jax.Array:
    """Return x, replicated over the axis. The gradient arrives in parts, so the backward pass sums it."""
    return _with_gradient(lambda x: x, lambda g: lax.psum(g, axis), x)


def _gather(x: jax.Array, axis: str) -> jax.Array:
    """Gather the last dimension over the axis. The gradient arrives whole on every stage, which keeps its own part."""
    size = x.shape[-1]
    return _with_gradient(
        lambda x: lax.all_gather(x, axis, axis=x.ndim - 1, tiled=True),
        lambda g: lax.dynamic_slice_in_dim(g, _start(size, axis), size, g.ndim - 1),
        x,
    )
