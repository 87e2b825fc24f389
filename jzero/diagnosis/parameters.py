"""Which parameters are not finite, and on which devices: every device looks at its own copy."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from jzero.errors import some_of
from jzero.setup import Setup
from jzero.sharding import specs
from jzero.tree import PyTree
from jzero.zero import ParamLayout, to_device


@dataclass(frozen=True)
class BadParameter:
    """A parameter that is not finite.

    Attributes:
      name: of the leaf.
      layers: of the stack, if it is stacked.
      devices: whose part is not finite.
      good: devices that hold the same part, and whose copy is finite.
    """

    name: str
    layers: tuple[int, ...]
    devices: tuple[str, ...]
    good: tuple[str, ...]

    def __str__(self) -> str:
        what = f"{self.name}{f', layer {some_of(self.layers)}' if self.layers else ''}, is not finite on "
        if not self.good:
            return f"{what}{'every device that holds this part of it' if self.devices[1:] else self.devices[0]}"
        return f"{what}{some_of(self.devices)}; the same part is finite on {some_of(self.good)}"


def bad_parameters(setup: Setup, params: PyTree) -> list[BadParameter]:
    """Find the parameters that are not finite, on any device of any process. All processes call it."""
    mesh, leaves = setup.mesh, jax.tree.leaves(setup.layouts)
    everywhere: Any = PartitionSpec(mesh.axis_names)

    def local(masters: PyTree) -> list[jax.Array]:
        flags = [_finite(layout, x) for layout, x in zip(leaves, jax.tree.leaves(masters), strict=True)]
        return [jnp.atleast_1d(flag)[None] for flag in flags]

    run = jax.shard_map(local, mesh=mesh, in_specs=(specs(setup.layouts),), out_specs=everywhere, check_vma=False)
    found = setup.jit(run, out_shardings=NamedSharding(mesh, PartitionSpec()))(params)
    pairs = zip(leaves, map(np.asarray, found), strict=True)
    return [bad for layout, finite in pairs if not finite.all() for bad in _of(setup, layout, finite)]


def _finite(layout: ParamLayout, x: jax.Array) -> jax.Array:
    """Return whether a local part is finite, by layer if it is stacked."""

    def finite(x: jax.Array) -> jax.Array:
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return jnp.ones((), bool)
        return jnp.isfinite(to_device(x) if layout.on_host.master or layout.on_host.in_use else x).all()

    return lax.map(finite, x) if layout.stacked else finite(x)


def _of(setup: Setup, layout: ParamLayout, finite: np.ndarray) -> list[BadParameter]:
    """Sort the devices by the part that they hold; `finite` is [devices, local layers or 1]."""
    devices = list(setup.mesh.devices.flat)
    found: dict[tuple, tuple[list[str], list[str]]] = {}
    for place, holders in by_part(devices, NamedSharding(setup.mesh, layout.spec), layout.shape):
        bad = [n for n in holders if not finite[n].all()]
        good = [n for n in holders if n not in bad]
        if not bad:
            continue
        layers: tuple[int, ...] = ()
        if layout.stacked:
            first = place[0].start or 0
            layers = tuple(first + int(i) for i in np.flatnonzero(~finite[bad].all(0)))
        named = found.setdefault((layers, bool(good)), ([], []))
        for names, numbers in zip(named, (bad, good), strict=True):
            names += [device_name(devices, n) for n in numbers]
    return [BadParameter(layout.name, layers, tuple(bad), tuple(good)) for (layers, _), (bad, good) in found.items()]


def by_part(devices: list[Any], sharding: jax.sharding.Sharding, shape: tuple[int, ...]) -> Iterable[tuple]:
    """Group devices by the part of an array that they hold: (its index, the numbers of the devices)."""
    places = sharding.devices_indices_map(shape)
    parts: dict[str, tuple] = {}
    for number, device in enumerate(devices):
        parts.setdefault(str(places[device]), (places[device], []))[1].append(number)
    return parts.values()


def device_name(devices: list[Any], number: int) -> str:
    """Name a device by its place in the mesh and its process."""
    return f"device {number} (process {devices[number].process_index})"
