"""Finds the parameters that are not finite, and puts into words what a search found about a step that is not."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from jzero.errors import some_of
from jzero.layout.sharding import ParamLayout, specs
from jzero.layout.storage import to_device
from jzero.step.setup import Setup
from jzero.tree import PyTree


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


FORWARD, BACKWARD = "forward", "backward"


@dataclass(frozen=True)
class Finding:
    """The part of a step that is not finite, and where it begins.

    Attributes:
      step: the step's number.
      loss: the loss that the step reported.
      parameters: those that are not finite before the step.
      inputs: the leaves of the micro-batch that are not finite.
      direction: the pass that fails first, "forward" or "backward"; "": the repeated step is finite.
      place: where that pass fails first.
      largest: the largest absolute value at each place of the forward pass, in its order.
      gradients: the gradients that are not finite, if the forward pass is.
      micro_batch, of: the first micro-batch that fails, of how many.
      replicas: those on which it fails.
      rows: its rows that fail by themselves, as rows of the global batch; empty: the search found none.
      more_rows: whether there may be more rows.
      samples: the same rows as samples of training_data; empty: unknown.
    """

    step: int
    loss: float
    parameters: tuple[BadParameter, ...] = ()
    inputs: tuple[str, ...] = ()
    direction: str = ""
    place: str = ""
    largest: Mapping[str, float] = field(default_factory=dict)
    gradients: tuple[str, ...] = ()
    micro_batch: int = 0
    of: int = 1
    replicas: tuple[int, ...] = ()
    rows: tuple[int, ...] = ()
    more_rows: bool = False
    samples: tuple[int, ...] = ()

    def located(self, rows: Sequence[int], samples: Sequence[int]) -> Finding:
        """Number the rows, which are those of the micro-batch, as rows of the global batch and as samples."""
        return replace(
            self, rows=tuple(rows[n] for n in self.rows), samples=tuple(samples[n] for n in self.rows if samples)
        )

    def __str__(self) -> str:
        what = f"the loss is {self.loss:g}" if not math.isfinite(self.loss) else "the gradient is not finite"
        lines = [f"step {self.step}: {what}", self._place()]
        lines += [f"parameter {bad}" for bad in self.parameters] or ["all parameters are finite on every device"]
        if self.inputs:
            lines.append(f"the batch itself is not finite: {some_of(self.inputs)}")
        if self.direction:
            lines.append(self._rows())
        return "\n  ".join(lines)

    def _place(self) -> str:
        if not self.direction:
            return "repeated, the step is finite: a device computed wrongly, or an operation is not deterministic"
        if self.direction == FORWARD:
            before = []
            for place, value in self.largest.items():
                before.append(f"{place}: {value:.3g}")
                if place == self.place:
                    break
            return f"first in the forward pass: {self.place} (largest absolute values: {'; '.join(before[-4:])})"
        return (
            f"the forward pass is finite; first in the backward pass: {self.place}; "
            f"gradients that are not finite: {some_of(self.gradients)}"
        )

    def _rows(self) -> str:
        where = f"in micro-batch {self.micro_batch} of {self.of}"
        if self.replicas:
            where += f", on {_several('replica', self.replicas)}"
        if not self.rows:
            return f"{where}; no single row fails alone"
        more = " (and maybe more)" if self.more_rows else ""
        samples = f", {_several('sample', self.samples)} of training_data" if self.samples else ""
        return f"{where}: {_several('row', self.rows)}{more} of the global batch{samples}"


def _several(what: str, numbers: Sequence[int]) -> str:
    return f"{what}{'s' if len(numbers) > 1 else ''} {some_of(numbers)}"
