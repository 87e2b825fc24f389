"""The FLOPs of a train step by module, counted in its trace, against the time of the step."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod

import jax
import numpy as np

from jzero.display.text_table import quantity, text_table
from jzero.mesh import PIPE
from jzero.model import STACK, WHOLE
from jzero.planner.gpus import GPUS
from jzero.planner.traced_operations import OPTIMIZER, Matmul, Walk
from jzero.step.train_step import TrainStep

Path = tuple[str, ...]


@dataclass(frozen=True)
class Module:
    """A module, with the modules in it.

    Attributes:
      path: its scopes; ("stack", "attention", "qkv") in any of the layers, () for the whole step.
      params: its parameters on all devices together.
      forward, backward, recomputed: FLOPs of the matrix products on one device in one step. Recomputed: those of the
        forward pass that run again in the backward pass.
      bytes: operands and results of the products, as if every product read and wrote the device's memory.
    """

    path: Path
    params: int = 0
    forward: float = 0.0
    backward: float = 0.0
    recomputed: float = 0.0
    bytes: float = 0.0

    @property
    def flops(self) -> float:
        return self.forward + self.backward + self.recomputed


@dataclass(frozen=True)
class StepFlops:
    """The FLOPs of a step by module.

    Attributes:
      modules: the whole step first, then depth first, in the order of the program.
      devices: of the mesh.
      optimizer: FLOPs of the optimizer's products (Muon) on whole arrays; no trace tells how XLA divides them.
      dtype: of the compute; decides the peak.
      stages: of the pipeline. With several, products of idle ticks count: the devices run them.
      notes: what was not counted, or guessed.
    """

    modules: tuple[Module, ...]
    devices: int
    optimizer: float
    dtype: str
    stages: int
    notes: tuple[str, ...]

    @property
    def whole(self) -> Module:
        """All modules together."""
        return self.modules[0]

    def table(self, title: str, depth: int = -1, top: int | None = None, *, plain: bool = False) -> str:
        """Draw the modules.

        Args:
          depth: the deepest modules to draw; -1: all.
          top: draw only this number of modules at each depth, those with the most FLOPs; None: the whole tree.
          plain: without lines and colors, also on a terminal.
        """
        rows = [m for m in self.modules if (depth < 0 or len(m.path) <= depth) and (m.flops or m.params)]
        if top is not None:
            rows = list(_largest(rows, top))
        again = any(m.recomputed for m in rows)
        columns = ["module", "parameters", "forward", "backward", *["recomputed"] * again, "bytes", "share"]
        cells = [_cells(m, again, self.whole.flops, indent=top is None) for m in rows]
        return text_table(title, columns, cells, left=["module"], plain=plain)

    def totals(self, seconds: float | None, kind: str) -> list[str]:
        """Return the lines below the table.

        Args:
          seconds: how long the step took; None: unknown.
          kind: `device_kind` of the devices; CPUs have no rate, since several share one machine.
        """
        one, all_of_them = quantity(self.whole.flops, "FLOP"), quantity(self.whole.flops * self.devices, "FLOP")
        lines = [f"{one} per device and step, {all_of_them} in all"]
        if seconds is not None and kind != "cpu":
            lines.append(self._rate(seconds, kind))
        if self.optimizer:
            own = quantity(self.optimizer, "FLOP")
            lines.append(f"besides the table: {own} of the optimizer's matmuls, on whole arrays")
        if self.stages > 1:
            lines.append("the matmuls of a pipeline's idle ticks are in the table: the devices run them")
        return [*lines, *self.notes]

    def peak(self, kind: str) -> float | None:
        """Return the TFLOP/s of a device of this `device_kind` at best; None if they are unknown."""
        return next((gpu.tflops[self.dtype == "float32"] for gpu in GPUS.values() if gpu.description == kind), None)

    def _rate(self, seconds: float, kind: str) -> str:
        useful = (self.whole.forward + self.whole.backward) / seconds
        peak = self.peak(kind)
        text = f"the step took {1e3 * seconds:.1f} ms: {useful / 1e12:.1f} TFLOP/s per device"
        again = self.whole.flops / seconds
        recomputing = self.whole.recomputed > 0
        if peak is None:
            text += f", {again / 1e12:.1f} with what is recomputed" * recomputing
            return f"{text}; the peak of {kind} is unknown"
        name = "TF32" if self.dtype == "float32" else self.dtype
        text += f", {useful / peak / 1e10:.1f} % of the {peak:g} of {kind} in {name}"
        text += " (MFU)" if self.stages == 1 else " with idle ticks"
        return text + f"; with what is recomputed {again / 1e12:.1f}, {again / peak / 1e10:.1f} %" * recomputing


def step_flops(step: TrainStep, traced: jax.stages.Traced) -> StepFlops:
    """Count the FLOPs of a step by module: matrix products, convolutions and fused attention.

    The modules are the scopes of the operations: those of Flax modules, of `jax.named_scope` in a model, and jzero's
    own (prefix, stack, suffix; loss, of a model without a stack). A product of m x k and k x n is 2 m k n FLOPs.
    Attention of XLA computes masked scores too, so all count; of fused causal attention the visible ones do.

    Args:
      traced: `step.trace(batch_shapes)`.
    """
    walk = Walk(traced)
    params: Counter[Path] = Counter({path: 0 for scopes in ((), *walk.scopes) for path in _around(scopes)})
    sums: dict[Path, dict[str, float]] = {path: defaultdict(float) for path in params}
    products = [p for p in walk.found if p.part != OPTIMIZER]
    for p in products:
        for path in _around(p.scopes):
            sums[path][p.part] += p.flops  # each of these parts is an attribute of `Module`
            sums[path]["bytes"] += p.bytes
    for layout in jax.tree.leaves(step.layouts):
        if not layout.state:
            for path in _around(_place(layout.name.split("/"), sums)):
                params[path] += prod(layout.shape)
    first = {path: number for number, path in enumerate(sums)}
    depth_first = sorted(sums, key=lambda path: [first[around] for around in _around(path)])
    return StepFlops(
        tuple(Module(path, params[path], **sums[path]) for path in depth_first),
        step.mesh.size,
        sum(p.flops for p in walk.found if p.part == OPTIMIZER),
        np.dtype(step.precision.compute).name,
        step.mesh.shape[PIPE],
        tuple(_notes(walk, products)),
    )


def _around(path: Path) -> list[Path]:
    """List the modules around a module, itself included, the whole step first."""
    return [path[:depth] for depth in range(len(path) + 1)]


def _place(name: list[str], found: Iterable[Path]) -> Path:
    """Return the module of a parameter: the shortest path with the most of its name, in order.

    The layers' parameters belong to the modules in the stack, and no others do.
    """
    stacked, name = name[0] == STACK, name[1:] if name[0] in (STACK, "ends") else name
    inside = [path for path in found if (STACK in path) == stacked]
    best = max(inside, key=lambda path: (_matched(name, path), -len(path)), default=())
    if _matched(name, best):
        return best
    return next((path for path in found if path[-1:] == (STACK if stacked else WHOLE,)), ())


def _matched(name: list[str], path: Path) -> int:
    """Count the parts of a parameter's name, from the first on, that a path contains in this order.

    >>> _matched(["encoder", "fc1", "kernel"], ("loss", "Net", "encoder", "fc1"))
    2
    """
    position = matched = 0
    for part in name:
        if part not in path[position:]:
            break
        position = path.index(part, position) + 1
        matched += 1
    return matched


def _largest(rows: list[Module], top: int) -> Iterator[Module]:
    """Yield the modules with the most FLOPs at each depth."""
    for depth in range(1 + max(len(m.path) for m in rows)):
        level = [m for m in rows if len(m.path) == depth]
        yield from sorted(level, key=lambda m: -m.flops)[:top]


def _cells(module: Module, again: bool, total: float, indent: bool) -> list[str]:
    name = "/".join(module.path)
    if indent and module.path:
        name = "  " * len(module.path) + module.path[-1]
    flops = [module.forward, module.backward, *[module.recomputed] * again]
    share = f"{module.flops / total:.1%}" if total else "-"
    return [name or "the step", quantity(module.params), *map(quantity, flops), quantity(module.bytes), share]


def _notes(walk: Walk, products: list[Matmul]) -> Iterator[str]:
    if any(p.fused for p in products):
        yield "fused attention counts the pairs of query and key that its mask leaves"
    if walk.guesses["while"]:
        yield "a loop of a length that is only known in its run counts as one pass"
    if walk.guesses["cond"]:
        yield "a condition counts as the mean of its branches"
    for name, times in walk.unread.items():
        yield f"not counted: {name} ({times} times), whose matmuls no trace shows"
