"""Whether replicas agree: every device adds up the bits of its own copies, and those of one part are compared.

Nothing in a step compares them. A bit that flipped in one device's memory, or a process that computed another update,
stays in that replica's parameters and reaches the others as a gradient of another model.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jzero.checkpoint.checksums import checksums
from jzero.diagnosis.parameters import by_part, device_name
from jzero.diagnosis.watch import Log
from jzero.errors import some_of
from jzero.state import TrainState
from jzero.train_step import TrainStep
from jzero.tree import PyTree, named

DIFFER = "replicas differ"
MOST_LEAVES = 5  # in a report


class Compared(Protocol):
    """The part of the engine that is compared."""

    state: TrainState
    global_steps: int


class Replicas:
    """Compares the copies of a run's state every `desync_check.every` steps.

    The checksums are read one step later, so that no step waits, or before a save.
    """

    def __init__(self, step: TrainStep, log: Log):
        self._step, self._every, self._log = step, step.config.desync_check.every, log
        self._held: tuple[int, jax.Array] | None = None

    def finish(self, run: Compared) -> None:
        """Report the copies that differed after the step before, and take the checksums of this one if it is due."""
        self.settle()
        if self._every and run.global_steps % self._every == 0:
            self._held = run.global_steps, self.sums(run.state)

    def settle(self) -> None:
        """Report the copies that differed when checksums were last taken, if nobody has yet."""
        if self._held is not None:
            number, sums = self._held
            self._held = None
            if found := self.differing(np.asarray(sums)):
                self._log.notice(number, DIFFER, f"{DIFFER}: {some_of(found, MOST_LEAVES)}")

    def restart(self) -> None:
        """Forget the last checksums: the state was replaced."""
        self._held = None

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
