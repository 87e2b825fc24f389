"""What a search found about a step whose loss or gradient is not finite, in words."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from jzero.diagnosis.parameters import BadParameter
from jzero.errors import some_of

FORWARD, BACKWARD = "forward", "backward"


@dataclass(frozen=True)
class Finding:
    """What is not finite in a step, and where it begins.

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
            return "repeated, the step is finite: a device computed wrongly, or an operation does not repeat to the bit"
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
            return f"{where}; no row fails by itself"
        more = " (and maybe more)" if self.more_rows else ""
        samples = f", {_several('sample', self.samples)} of training_data" if self.samples else ""
        return f"{where}: {_several('row', self.rows)}{more} of the global batch{samples}"


def _several(what: str, numbers: Sequence[int]) -> str:
    return f"{what}{'s' if len(numbers) > 1 else ''} {some_of(numbers)}"
