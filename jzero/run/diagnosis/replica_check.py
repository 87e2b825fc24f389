"""A check that replicas agree: every device adds up the bits of its own copies, and those of one part are compared.

Nothing in a step compares them. A bit that flipped in one device's memory, or a process that computed another update,
stays in that replica's parameters and reaches the others as a gradient of another model.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jzero.checkpoint.checksums import checksums
from jzero.errors import some_of
from jzero.events import Noticed
from jzero.run.diagnosis.finding import by_part, device_name
from jzero.run.diagnosis.watch import Stream, WatchedRun
from jzero.step.programs import Details
from jzero.step.train_step import Metrics, TrainStep
from jzero.tree import PyTree, named

DIFFER = "replicas differ"
MOST_LEAVES = 5  # in a report


class Replicas:
    """Compares the copies of a run's state every `desync_check.every` steps.

    The checksums are read one step later, so that no step waits, or before a save.
    """

    def __init__(self, step: TrainStep, stream: Stream):
        self._step, self._every, self._stream = step, step.config.desync_check.every or 0, stream
        self.is_on = self._every > 0

    def take(self, run: WatchedRun, metrics: Metrics, details: Details) -> tuple[int, jax.Array] | None:
        """Take the checksums of the state after a step, if a comparison is due."""
        due = run.global_steps % self._every == 0
        return (run.global_steps, self.sums(run.state)) if due else None

    def read(self, run: WatchedRun, kept: tuple[int, jax.Array]) -> None:
        """Report the copies that differed when checksums were taken."""
        number, sums = kept
        if found := self.differing(np.asarray(sums)):
            self._stream.emit(Noticed(number, DIFFER, f"{DIFFER}: {some_of(found, MOST_LEAVES)}"))

    @cached_property
    def sums(self) -> Any:
        """The program: a state -> the checksum of each leaf's part on each device, uint32 [devices, leaves]."""
        mesh = self._step.mesh
        everywhere: Any = PartitionSpec(mesh.axis_names)

        def local(state: PyTree) -> jax.Array:
            return checksums(named(state))[None]

        run = jax.shard_map(
            local, mesh=mesh, in_specs=(self._step.state_specs,), out_specs=everywhere, check_vma=False
        )  # fmt: skip
        return self._step.setup.jit(run, out_shardings=NamedSharding(mesh, PartitionSpec()))

    def differing(self, sums: np.ndarray) -> list[str]:
        """Describe each leaf whose copies differ; `sums` as the program returns it."""
        devices = list(self._step.mesh.devices.flat)
        shapes, shardings = named(self._step.state_shapes), named(self._step.state_shardings)
        found = []
        for column, name in enumerate(sorted(shapes)):
            parts = by_part(devices, shardings[name], shapes[name].shape)
            odd = sorted(n for _, holders in parts for n in odd_ones(holders, sums[:, column]))
            if odd:
                found.append(f"{name} on {some_of(device_name(devices, n) for n in odd)}")
        return found


def odd_ones(holders: list[int], sums: np.ndarray) -> list[int]:
    """List the devices whose sum is not that of the majority of the holders; without a majority, all of them.

    >>> odd_ones([0, 1, 3], np.array([7, 7, 0, 8])), odd_ones([0, 3], np.array([7, 7, 0, 8]))
    ([3], [0, 3])
    """
    values, counts = np.unique(sums[holders], return_counts=True)
    if len(values) == 1:
        return []
    usual = values[counts.argmax()] if 2 * counts.max() > len(holders) else None
    return [n for n in holders if usual is None or sums[n] != usual]
