"""ZeRO++: stage 3 with less traffic (Wang et al., 2023, arXiv:2306.10209). Each part works alone.

| part | key                        | replaces                        | with                                       |
|------|----------------------------|---------------------------------|--------------------------------------------|
| qwZ  | `zero_quantized_weights`   | all-gather in the compute dtype | all-gather of int8 codes and their scales  |
| qgZ  | `zero_quantized_gradients` | reduce-scatter                  | all-to-all of 4-bit codes and their scales |
| hpZ  | `zero_hpz_partition_size`  | all-gathers over all devices    | one across groups a step, then within them |

qgZ runs one all-to-all within a node and one across nodes, with a sum in float32 after each, so the second moves sums.
hpZ keeps a second copy of the weights in the compute dtype, from the start of a step to the end of its last backward
pass, sharded over the n devices of a group: 2/n bytes per parameter in half precision.

The groups of n, and the nodes, are consecutive along `zero`.
"""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from jzero.distributed.joining import host_of
from jzero.errors import ConfigError
from jzero.mesh import ZERO
from jzero.values.kinds import either

# For slow links between hosts. On NVLink int8 gathers change nothing, since compute hides gathers of bfloat16 as well,
# and 4-bit gradients cost 2.5 % (1.1B, two H100s, experiments/benchmarks/2026-11-23-compression-h100.md).
WEIGHT_BITS, GRADIENT_BITS = 8, 4

Groups = tuple[tuple[int, ...], ...] | None  # indices along `zero`; None: one group of all


class ZeroPlusPlus(NamedTuple):
    """The parts of ZeRO++ that apply to a parameter.

    Attributes:
      weights: whether they are gathered as int8 codes.
      gradients: whether they are reduced as 4-bit codes.
      secondary: the size n of the groups that hold a second copy of the weights; 0: none.
      node: the number of consecutive devices along `zero` that first reduce gradients among themselves.
    """

    weights: bool = False
    gradients: bool = False
    secondary: int = 0
    node: int = 1

    def of(self, x: Any, shape: tuple[int, ...], group: int) -> ZeroPlusPlus:
        """Return the parts that apply to a parameter sharded over `group` devices.

        Only matrices whose shards divide into blocks are quantized. Vectors are small and stay exact, as in DeepSpeed.

        Args:
          x: has a dtype.
          shape: of the parameter, or of one layer's.
        """
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return ZeroPlusPlus()
        codes = len(shape) > 1 and block_size(prod(shape) // group) > 0
        return self._replace(weights=self.weights and codes, gradients=self.gradients and codes)


NO_ZEROPP = ZeroPlusPlus()


def read_zeropp(section: Any, mesh: Mesh) -> ZeroPlusPlus:
    """Read `zero_optimization`.

    Raises:
      ConfigError: groups that do not divide the ZeRO group.
    """
    n, group = section.zero_hpz_partition_size, mesh.shape[ZERO]
    if n > 1 and group % n:
        fits = [d for d in range(2, group + 1) if group % d == 0]
        raise ConfigError(
            f"zero_optimization.zero_hpz_partition_size = {n}: must divide the mesh's zero {group}; "
            + (f"allowed: {either([*fits, '1 (off)'])}" if fits else "leave it out")
        )
    secondary = n if 1 < n < group else 0  # in one group of all, the second copy would be the first
    gradients = section.zero_quantized_gradients
    node = secondary or (devices_per_host(mesh) if gradients else 1)
    return ZeroPlusPlus(section.zero_quantized_weights, gradients, secondary, node)


def devices_per_host(mesh: Mesh) -> int:
    """Return the largest n such that `zero` consists of runs of n devices, each on one host.

    >>> devices_per_host(Mesh(jax.devices(), "zero")) == len(jax.devices())
    True
    """
    axis, size = mesh.axis_names.index(ZERO), mesh.shape[ZERO]
    lines = [[host_of(device) for device in line] for line in mesh.devices.swapaxes(axis, -1).reshape(-1, size)]
    runs = [n for n in range(size, 0, -1) if size % n == 0]
    return next(n for n in runs if all(len(set(line[i : i + n])) == 1 for line in lines for i in range(0, size, n)))


def inside(size: int, n: int) -> Groups:
    """Return the groups of n consecutive devices.

    >>> inside(6, 3), across(6, 3)
    (((0, 1, 2), (3, 4, 5)), ((0, 3), (1, 4), (2, 5)))
    """
    return tuple(tuple(range(start, start + n)) for start in range(0, size, n))


def across(size: int, n: int) -> Groups:
    """Return the groups of devices that have the same rank in the groups of `inside`."""
    return tuple(tuple(range(place, size, n)) for place in range(n))


def gather_weight(shard: jax.Array, dim: int, plus: ZeroPlusPlus, group: tuple[str, ...] = (ZERO,)) -> jax.Array:
    """Gather a parameter from its shards over the whole ZeRO group, the axes `group`."""
    return _gathered(shard, dim, plus.weights, None, 1, group)


def secondary(shard: jax.Array, dim: int, plus: ZeroPlusPlus) -> jax.Array:
    """Gather a device's part of the second copy from the other groups; the part has one piece from each group."""
    # DeepSpeed's hpZ gathers every layer over all devices in the first forward pass of a step and keeps 1/n of it. Here
    # the devices with the same rank in their groups gather only that 1/n: the same copy, with less traffic.
    return _gathered(shard, dim, plus.weights, across(lax.axis_size(ZERO), plus.secondary), 1)


def gather_secondary(part: jax.Array, dim: int, plus: ZeroPlusPlus) -> jax.Array:
    """Gather a parameter from its second copy, within the group."""
    size = lax.axis_size(ZERO)
    return _gathered(part, dim, plus.weights, inside(size, plus.secondary), size // plus.secondary)


def _gathered(
    part: jax.Array, dim: int, quantized: bool, groups: Groups, pieces: int, axes: tuple[str, ...] = (ZERO,)
) -> jax.Array:
    """Gather parts of several pieces along `dim`: the result has all first pieces, then all second ones, and so on."""
    if not quantized and pieces == 1:
        return lax.all_gather(part, axes, axis=dim, tiled=True, axis_index_groups=groups)
    if quantized:
        both = quantize(part.reshape(-1), WEIGHT_BITS)
        codes, scales = (lax.all_gather(x, axes, axis_index_groups=groups) for x in both)
        parts = dequantize(codes, scales, WEIGHT_BITS).astype(part.dtype).reshape(-1, *part.shape)
    else:
        parts = lax.all_gather(part, axes, axis_index_groups=groups)
    # The pieces of one part are not neighbours in the parameter: each came from another group.
    n, *shape = parts.shape
    split = parts.reshape(n, *shape[:dim], pieces, shape[dim] // pieces, *shape[dim + 1 :])
    return jnp.moveaxis(split, 0, dim + 1).reshape(*shape[:dim], n * shape[dim], *shape[dim + 1 :])


def reduce_scatter(gradient: jax.Array, dim: int, plus: ZeroPlusPlus) -> jax.Array:
    """Sum a whole gradient over the ZeRO group, and return this device's shard of the sum in float32."""
    size, shape = lax.axis_size(ZERO), gradient.shape
    shard = (*shape[:dim], shape[dim] // size, *shape[dim + 1 :])
    # Within the node first, where links are fast: across nodes one sum of a node's devices then moves, not each term.
    parts = jnp.moveaxis(gradient.reshape(*shape[:dim], size, *shard[dim:]), dim, 0)
    parts = parts.reshape(size // plus.node, plus.node, -1)  # [node, place, elements]: who gets it
    if plus.node > 1:
        parts = _exchange(parts, 1, inside(size, plus.node))
    else:
        parts = parts[:, 0]
    if plus.node < size:
        parts = _exchange(parts, 0, across(size, plus.node))
    return parts.reshape(shard)


def _exchange(parts: jax.Array, axis: int, groups: Groups) -> jax.Array:
    """Send part i along `axis` to the i-th device of the group, as codes, and sum over what arrives."""
    both = quantize(parts, GRADIENT_BITS)
    codes, scales = (lax.all_to_all(x, ZERO, axis, axis, axis_index_groups=groups) for x in both)
    # Blocks of different devices have different scales, so their codes cannot be added.
    return dequantize(codes, scales, GRADIENT_BITS).sum(axis)


# ------------------------------------------------------------------ codes
#
# Blockwise symmetric quantisation: signed integers of 8 or 4 bits, and one float32 scale for each block.
#
#     scale = max |x| over the block / largest integer,   code = round(x / scale),   x ~ code * scale
#
# The error of an element is at most half its block's scale. A block with a value that is not finite comes back without
# a finite value, so overflow checks still see it.

LARGEST = {8: 127, 4: 7}  # the largest code by its bits
# The smaller a block, the less its largest value hides the others; each costs 4 bytes. DeepSpeed's weights have blocks
# of 4,000 to 8,000 elements, its gradients of the smaller side of the matrix.
BLOCK = 64
# Below this size the scales would weigh more than the codes save.
SMALLEST_BLOCK = 16


def block_size(n: int) -> int:
    """Return the largest even divisor of n up to `BLOCK`; 0 if there is none from `SMALLEST_BLOCK` on.

    >>> block_size(1024), block_size(1000), block_size(33)
    (64, 50, 0)
    """
    return next((size for size in range(BLOCK, SMALLEST_BLOCK - 1, -2) if n % size == 0), 0)


def quantize(x: jax.Array, bits: int) -> tuple[jax.Array, jax.Array]:
    """Quantise along the last dimension.

    Args:
      x: floats [..., n], with `block_size(n)` > 0.
      bits: 8 or 4.

    Returns:
      The codes, int8 [..., n] or uint8 [..., n / 2]; the scales, float32 [..., n / block].

    >>> codes, scales = quantize(jnp.array([127.0, -63.4] + [0.0] * 14), 8)
    >>> codes[:3].tolist(), scales.tolist()
    ([127, -63, 0], [1.0])
    """
    size = block_size(x.shape[-1])
    blocks = x.astype(jnp.float32).reshape(*x.shape[:-1], -1, size)
    scales = jnp.abs(blocks).max(-1) / LARGEST[bits]
    divisors = jnp.where(scales == 0, 1, scales)[..., None]  # a block of zeros, also of numbers whose scale underflows
    codes = jnp.clip(jnp.round(blocks / divisors), -LARGEST[bits], LARGEST[bits])
    # Two codes of 4 bits in a byte: collectives of smaller types than a byte are not portable.
    if bits == 8:
        return codes.astype(jnp.int8).reshape(x.shape), scales
    low, high = jnp.split((codes + 8).astype(jnp.uint8), 2, axis=-1)
    return (low | high << 4).reshape(*x.shape[:-1], -1), scales


def dequantize(codes: jax.Array, scales: jax.Array, bits: int) -> jax.Array:
    """Invert `quantize`: float32 [..., n].

    >>> x = jnp.linspace(-7, 7, 16)
    >>> dequantize(*quantize(x, 4), 4)[:4].tolist()
    [-7.0, -6.0, -5.0, -4.0]
    """
    blocks = codes.reshape(*scales.shape, -1)
    if bits == 4:
        blocks = jnp.concatenate([blocks & 15, blocks >> 4], axis=-1).astype(jnp.int8) - 8
    x = blocks.astype(jnp.float32) * scales[..., None]
    return x.reshape(*x.shape[:-2], -1)
