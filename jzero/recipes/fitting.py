"""The micro-batch and the recomputation of a fine-tuning: the fastest that fit into a device's memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from jzero.config.sizes import MICRO
from jzero.display.slow_work import slow_work
from jzero.display.text_table import size_text
from jzero.planner.candidates import POLICIES, POLICY, Raw, merged
from jzero.planner.memory import memory
from jzero.step.train_step import TrainStep
from jzero.tree import PyTree

MANY = 4096  # tokens of a micro-batch on a device, from which larger ones are hardly faster
SLACK = 0.97  # of the memory: a larger micro-batch is tried if the two smallest predict this

MakeStep = Callable[[Raw], tuple[TrainStep, PyTree]]  # a config -> the step, the shapes of its batch


class Fit(NamedTuple):
    """A micro-batch per device, what the backward pass computes again, and the peak bytes of a device if known."""

    micro: int
    policy: str
    peak: int | None

    def __str__(self) -> str:
        return "" if self.peak is None else f", peak {size_text(self.peak)} per device"


def choose_fit(make: MakeStep, config: Raw, rows: int, length: int, most: int) -> Fit | int:
    """Find the least recomputation with which a large micro-batch fits, else the largest micro-batch that fits.

    For each policy the steps of one and two rows are compiled, which predict the rest; the choice is compiled too.

    Args:
      config: the micro-batch and the policy that it has are kept.
      rows: of a device in a step. length: tokens of a row.
      most: bytes of a device.

    Returns:
      The fit; or, if nothing fits, the bytes that the smallest needs.
    """
    best, least = None, 2**63
    given = config.get(MICRO), (config.get("activation_checkpointing") or {}).get("policy")
    for policy in [given[1]] if given[1] else POLICIES:

        def peak(micro: int, policy: str = policy) -> int:
            with slow_work(f"planning micro-batch {micro}, recomputation {policy}"):
                step, batch = make(merged(config, {MICRO: micro, POLICY: policy}))
                return memory(step.lower(batch).compile(), step).peak

        first = peak(given[0] or 1)
        least = min(least, first)
        if first > most:
            continue
        found = Fit(given[0], policy, first) if given[0] else _largest(peak, policy, first, rows, most)
        if found.micro == rows or found.micro * length >= MANY or given[0]:
            return found
        best = found if best is None or found.micro > best.micro else best
    return best or least


def _largest(peak: Callable[[int], int], policy: str, first: int, rows: int, most: int) -> Fit:
    """Return the largest micro-batch that divides the rows and fits; one row does, with `first` bytes."""
    sizes = [n for n in range(2, rows + 1) if rows % n == 0]
    if not sizes or (second := peak(sizes[0])) > most:
        return Fit(1, policy, first)
    each = (second - first) / (sizes[0] - 1)
    for micro in reversed(sizes[1:]):
        if first + each * (micro - 1) <= SLACK * most and (found := peak(micro)) <= most:
            return Fit(micro, policy, found)
    return Fit(sizes[0], policy, second)
