"""Layer stacks in checkpoints: stored layer by layer, under the names that the layers have in the module.

So a checkpoint is the same with and without `from_flax(..., stack=...)`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from jzero.checkpoint.snapshot import spread, to_host
from jzero.display.slow_work import slow_work

Names = Mapping[str, tuple[str, ...]]  # of a leaf in a checkpoint: one, or one for each layer


def take_apart(leaves: Mapping[str, jax.Array], names: Names, room: bool) -> dict[str, jax.Array]:
    """Cut stacked leaves into layers, each in a buffer of its own, spread over all devices.

    Without `room` on the devices the layers go to the host, one leaf at a time.
    """
    made: dict[str, jax.Array] = {}
    for name, x in leaves.items():
        to = of_layer(x.sharding, x.shape)
        layers = jax.jit(tuple, out_shardings=(to,) * len(x))(x)
        parts = dict(zip(names[name], layers, strict=True))
        made |= parts if room else to_host(parts)
    return made


@slow_work("reading the checkpoint")
def read_layers(
    source: Any, shardings: Mapping[str, Sharding], shapes: Mapping[str, Sequence[int]], names: Names
) -> dict[str, jax.Array]:
    """Read leaves by their names in the state, stacked ones layer by layer.

    Args:
      source: a `Checkpoint`.
      shardings, shapes: of the leaves to read.
    """
    wanted: dict[str, Sharding] = {}
    for name, sharding in shardings.items():
        parts = names[name]
        wanted |= dict.fromkeys(parts, sharding if len(parts) == 1 else of_layer(sharding, shapes[name]))
    read = source.read(wanted)

    def one(name: str, sharding: Sharding) -> jax.Array:
        parts = [read.pop(part) for part in names[name]]
        if len(parts) == 1:
            return parts[0]
        return stack_layers(parts, sharding)

    return {name: one(name, sharding) for name, sharding in shardings.items()}


def stack_layers(layers: Sequence[jax.Array], sharding: Sharding) -> jax.Array:
    """Stack the layers of one leaf."""
    return jax.jit(_stack, out_shardings=sharding)(layers)


def _stack(layers: Sequence[jax.Array]) -> jax.Array:  # one function, so that leaves of one shape compile once
    return jnp.stack(layers)


def of_layer(sharding: Any, shape: Sequence[int]) -> Sharding:
    """Choose the sharding of one layer of a stacked leaf, over all devices where a dimension divides."""
    if not isinstance(sharding, NamedSharding):
        return sharding
    layer = NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[1:]), memory_kind=sharding.memory_kind)
    return spread(layer, tuple(shape[1:]))
