"""Maps the tiles of a kernel to the rows of groups."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def tile_map(sizes: jax.Array, rows: int, m: int, align: int) -> tuple[jax.Array, jax.Array]:
    """Cut groups of rows into tiles that never cross groups; the padding rows are one more group.

    Returns:
        [4, tiles] int32: each tile's group, its first row (a multiple of `align`), and which
        of its rows belong to the group: from, to; and the number of tiles in use, [1].
    """
    groups = len(sizes)
    ends = jnp.cumsum(sizes.astype(jnp.int32))
    starts, ends = jnp.append(jnp.zeros(1, jnp.int32), ends), jnp.append(ends, rows)
    aligned = starts // align * align
    tiles = jnp.where(ends > starts, (ends - aligned + m - 1) // m, 0)
    last = jnp.cumsum(tiles)
    i = jnp.arange(max_tiles(rows, groups, m, align), dtype=jnp.int32)
    group = jnp.minimum(jnp.sum(last[None] <= i[:, None], axis=1, dtype=jnp.int32), groups)
    first = aligned[group] + (i - (last - tiles)[group]) * m
    begin = jnp.maximum(starts[group] - first, 0)
    return jnp.stack([group, first, begin, jnp.clip(ends[group] - first, begin, m)]), last[-1:]


def max_tiles(rows: int, groups: int, m: int, align: int) -> int:
    """Count the tiles of the worst sizes: each group and the padding may begin `align - 1` rows early."""
    return (rows + (groups + 1) * (m - 1 + align - 1)) // m
