"""The memory of a step, part by part.

The parts add up to XLA's peak. Masters, optimizer state and the batch are the program's arguments, exactly. What a step
makes lives in XLA's one block of temporaries: the compute parameters and the gradients are computed from the layout
(`state_bytes`), and the rest of the block is activations and temporaries. Without gradient accumulation the update
uses up the gradients one by one, so that their part may be smaller at the peak, and the rest larger.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from jzero.planner.live import Live, live
from jzero.planner.memory import Memory
from jzero.planner.room import FRACTION, Room
from jzero.planner.state_bytes import state_bytes
from jzero.values.sizes import size_text

if TYPE_CHECKING:
    from jzero.train_step import TrainStep


SLACK = 0.95  # of XLA's limit, from which it schedules a step to use less memory


@dataclass(frozen=True)
class PlannedMemory:
    """Bytes per GPU of a planned step.

    Attributes:
      parts: {part: bytes}; they add up to the peak. A part that is computed, not read from the program, never exceeds
        the temporaries that contain it.
      host_bytes: of host memory per GPU.
      xla: the compiler's own figures.
      live: the largest temporary buffers at the peak.
      room: what the GPU has.
    """

    parts: dict[str, int]
    host_bytes: int
    xla: Memory
    live: Live
    room: Room

    @property
    def peak_bytes(self) -> int:
        return self.xla.peak

    @property
    def fits(self) -> bool:
        """Whether the peak fits into the GPU beside NCCL and CUDA, with XLA's fraction raised if need be."""
        return self.peak_bytes <= self.room.most

    @property
    def largest(self) -> str:
        return max(self.parts, key=lambda part: self.parts[part])

    @property
    def verdict(self) -> str:
        """One line: whether the step fits, and how."""
        return verdict(self.peak_bytes, self.room)


def verdict(peak_bytes: int, room: Room) -> str:
    """Say in one line whether a peak fits, and what XLA must be given for it."""
    peak, own = size_text(peak_bytes), size_text(room.device - room.most)
    if peak_bytes > room.most:
        return f"does not fit: {peak} of at most {size_text(room.most)}"
    if peak_bytes <= SLACK * room.preallocated:
        share = peak_bytes / room.preallocated
        return f"fits: {peak} is {share:.0%} of the {size_text(room.preallocated)} that XLA preallocates"
    if room.most == room.device:  # a device that is there, and what XLA has of it
        return f"fits: {peak} is {peak_bytes / room.most:.0%} of the {size_text(room.most)} that XLA has"
    fraction, given = int(100 * room.limit / room.device) / 100, size_text(room.preallocated)
    return (
        f"fits if XLA may take more than its {given}: set {FRACTION}={fraction:.2f}, as planned; {own} are assumed "
        "for NCCL and CUDA"
    )


def planned_memory(step: TrainStep, xla: Memory, text: str, there: Room) -> PlannedMemory:
    """Divide the peak of a compiled step into parts; `text` is its optimized program."""
    state, temps = state_bytes(step), xla.temps
    parts = {"masters and optimizer state": state.persistent}
    if not state.host:
        parts = {"masters": state.masters, "optimizer state": state.optimizer}
    parts["batch and counters"] = xla.arguments - sum(parts.values())
    for name, size in (("compute parameters", state.parameters), ("gradients", state.gradients)):
        parts[name] = min(size, temps)
        temps -= parts[name]
    parts["activations and temporaries"] = temps
    parts["new outputs"] = xla.outputs - xla.aliased
    return PlannedMemory({name: size for name, size in parts.items() if size}, xla.host, xla, live(text), there)
