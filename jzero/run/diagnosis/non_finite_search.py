"""Searches for what is not finite in a step, and puts it into words.

It looks at the parameters, then the forward pass, then the backward pass, then rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
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
from jzero.run.diagnosis.repeat import Repeat, is_finite
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
    leaves = jax.tree.leaves(setup.layouts)

    def local(masters: PyTree) -> list[jax.Array]:
        return [jnp.atleast_1d(_finite(layout, x)) for layout, x in zip(leaves, jax.tree.leaves(masters), strict=True)]

    found = on_each_device(setup, local, specs(setup.layouts))(params)
    pairs = zip(leaves, map(np.asarray, found), strict=True)
    return [bad for layout, finite in pairs if not finite.all() for bad in _of(setup, layout, finite)]


def on_each_device(setup: Setup, look: Callable[[PyTree], PyTree], of: PyTree) -> jax.stages.Wrapped:
    """Make a program that looks at each device's part of a tree with the specs `of`: results [devices, ...]."""
    everywhere: Any = PartitionSpec(setup.mesh.axis_names)

    def local(tree: PyTree) -> PyTree:
        return jax.tree.map(lambda x: x[None], look(tree))

    run = jax.shard_map(local, mesh=setup.mesh, in_specs=(of,), out_specs=everywhere, check_vma=False)
    return setup.jit(run, out_shardings=NamedSharding(setup.mesh, PartitionSpec()))


def _finite(layout: ParamLayout, x: jax.Array) -> jax.Array:
    """Return whether a local part is finite, by layer if it is stacked, so that one layer at a time leaves the host."""

    def look(x: jax.Array) -> jax.Array:
        return is_finite(to_device(x) if layout.on_host.master or layout.on_host.in_use else x)

    return lax.map(look, x) if layout.stacked else look(x)


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
            places = list(self.largest)
            last = places[: places.index(self.place) + 1][-4:]
            listed = "; ".join(f"{place}: {self.largest[place]:.3g}" for place in last)
            return f"first in the forward pass: {self.place} (largest absolute values: {listed})"
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


def find_non_finite(repeat: Repeat, found: Finding, first: int = 0) -> Finding:
    """Repeat a step in parts, and find where it is not finite. All processes call it.

    Args:
      found: the step's number and loss.
      first: the index of the first micro-batch.

    Returns:
      `found`, completed; its rows are those of the micro-batch, in the order of the devices.
    """
    found = replace(found, parameters=tuple(bad_parameters(repeat.setup, repeat.state.params)))
    seen = np.stack([repeat.forward(repeat.micro_batch(i), first + i) for i in range(repeat.accum)])
    lost = ~np.isfinite(seen[..., -1])  # [accum, replicas]: whose loss
    if lost.any():
        return _forward(repeat, found, seen, lost, first)
    for index in range(repeat.accum):
        part = repeat.micro_batch(index)
        gradients = repeat.backward(part, first + index)
        if not _all_finite(gradients):
            return _backward(repeat, found, part, index, first, gradients)
    return found


def _forward(repeat: Repeat, found: Finding, seen: np.ndarray, lost: np.ndarray, first: int) -> Finding:
    """Complete the finding of a loss that is not finite; `seen` is [accum, replicas, places]."""
    index = int(np.flatnonzero(lost.any(1))[0])
    # Some models pass on infinities, such as masks: what is not finite where the loss is finite does not count.
    normal = (~np.isfinite(seen[~lost])).any(0)
    bad = (~np.isfinite(seen[index][lost[index]])).any(0) & ~normal
    part = repeat.micro_batch(index)
    with np.errstate(invalid="ignore"):
        largest = seen[index].max(0)
    found = replace(
        found, direction=FORWARD, place=repeat.places[int(np.flatnonzero(bad)[0])],
        largest=dict(zip(repeat.places, map(float, largest), strict=True)),
        replicas=tuple(map(int, np.flatnonzero(lost[index]))),
    )  # fmt: skip

    def is_bad(rows: Sequence[int]) -> bool:
        return not np.isfinite(repeat.forward(repeat.rows(part, rows), first + index)[:, -1]).all()

    return _with_rows(repeat, found, part, index, first, is_bad)


def _backward(
    repeat: Repeat, found: Finding, part: PyTree, index: int, first: int, gradients: dict[str, np.ndarray]
) -> Finding:
    """Complete the finding of a gradient that is not finite after a finite forward pass."""
    layers = np.zeros(repeat.layers, bool)
    names = []
    for name, finite in gradients.items():
        bad = ~finite
        if bad.shape and repeat.layers:
            layers |= bad
        of = f" (layer {some_of(np.flatnonzero(bad))})" if bad.shape else ""
        names += [f"{name}{of}"] * bool(bad.any())
    place = "the model"
    if repeat.layers:
        last = int(np.flatnonzero(layers)[-1]) if layers.any() else -1
        place = f"layer {last} of {repeat.layers}" if layers.any() else repeat.places[0]
        if last in (-1, repeat.layers - 1) and not _all_finite(repeat.backward(part, first + index, only_suffix=True)):
            place = "the suffix (what is after the layers)"
    found = replace(found, direction=BACKWARD, place=place, gradients=tuple(names))

    def is_bad(rows: Sequence[int]) -> bool:
        return not _all_finite(repeat.backward(repeat.rows(part, rows), first + index))

    return _with_rows(repeat, found, part, index, first, is_bad)


def _with_rows(repeat: Repeat, found: Finding, part: PyTree, index: int, first: int, is_bad: Any) -> Finding:
    """Add the rows that fail by themselves."""
    size = repeat.micro * repeat.replicas
    rows = bad_rows(range(size), is_bad)
    replicas = found.replicas or tuple(sorted({row // repeat.micro for row in rows}))
    if not replicas:  # rows that fail together
        parts = np.arange(size).reshape(repeat.replicas, repeat.micro)
        replicas = tuple(bad_rows(range(repeat.replicas), lambda some: is_bad(parts[list(some)].ravel().tolist())))
    return replace(
        found, micro_batch=first + index, rows=tuple(rows), more_rows=len(rows) == MOST < size,
        replicas=replicas, inputs=tuple(repeat.not_finite(part)),
    )  # fmt: skip


def _all_finite(gradients: dict[str, np.ndarray]) -> bool:
    return all(finite.all() for finite in gradients.values())


MOST = 4  # rows to find; each takes about two runs of a micro-batch for every power of two in its size


def bad_rows(rows: Sequence[int], is_bad: Callable[[Sequence[int]], bool], most: int = MOST) -> list[int]:
    """Find rows that are bad by themselves.

    Args:
      is_bad: whether a micro-batch of these rows, repeated to fill it, is bad.
      most: rows to find before the search ends.

    >>> bad_rows(range(16), lambda some: 3 in some or 12 in some)
    [3, 12]
    """
    if most == 0 or not is_bad(rows):
        return []
    if len(rows) == 1:
        return list(rows)
    middle = len(rows) // 2
    found = bad_rows(rows[:middle], is_bad, most)
    return found + bad_rows(rows[middle:], is_bad, most - len(found))
