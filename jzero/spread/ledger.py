"""What a function moves between the devices of a group, known from its trace, before anything is compiled."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple


class Move(NamedTuple):
    """A collective of the forward pass, in a loop counted once.

    Attributes:
      kind: as in compiled programs: "all-gather", "reduce-scatter", "all-reduce", "all-to-all".
      axis: of the mesh.
      shape: the larger one of what a device puts in and gets out.
      line: of the model's source, as "llama.py:159".
      primitive: the one that needed it.
    """

    kind: str
    axis: str
    shape: tuple[int, ...]
    line: str
    primitive: str


class Fallback(NamedTuple):
    """A primitive that ran on whole arrays although its operands were divided."""

    primitive: str
    line: str


@dataclass
class Ledger:
    """The moves and fallbacks of the functions that a group has traced, in order.

    Attributes:
      line, primitive: those that run now.
    """

    moves: list[Move] = field(default_factory=list)
    fallbacks: list[Fallback] = field(default_factory=list)
    line: str = ""
    primitive: str = ""

    def move(self, kind: str, axis: str, shape: tuple[int, ...]) -> None:
        self.moves.append(Move(kind, axis, tuple(shape), self.line, self.primitive))

    def fall_back(self) -> None:
        self.fallbacks.append(Fallback(self.primitive, self.line))
