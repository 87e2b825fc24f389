"""Estimates the time of one execution of a scheduled GPU program, from its optimized HLO alone.

The order of a scheduled module's instructions is the order in which XLA enqueues them. Collectives run on their own
stream, asynchronous copies on a third, everything else on the compute stream: a ``-start`` queues a collective, a
``-done`` makes the compute stream wait for it. The walk plays this with a clock for each. Two facts matter besides: a
collective waits until the kernel that is enqueued after its start leaves the streaming multiprocessors
(`Rates.late`), and compute beside a collective slows (`Rates.slow`).
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from jzero.errors import ConfigError
from jzero.planner.collectives import CollectiveCosts, is_collective
from jzero.planner.hlo import Computation, Instruction, UnreadableProgram, read_hlo
from jzero.planner.kernel_costs import HOST, Cost, Kernels
from jzero.planner.rates import UNCERTAINTY_F8, Rates

COMPUTE, COMMUNICATION, COPIES = "compute", "communication", "copies"  # the streams
INTERVALS = 100  # of the timeline

Segment = tuple[str, str, float, float]  # stream, label, start_s, end_s
Key = tuple[str, str]  # stream, label
SLOWED, LOOPS, BETWEEN, EXPOSED = "slowed by communication", "loops", "between steps", "exposed communication"


class Trips(NamedTuple):
    """Segments that repeat: those of the first of some trips of a loop, when it starts, and its length, not 0."""

    segments: Sequence[Segment | Trips]
    start: float
    length: float
    times: int


@dataclass(frozen=True, repr=False)
class StepTime:
    """The estimated time of one step, in seconds, on the slowest device of a program.

    Attributes:
        step_s: of the whole step: compute_s + exposed_s.
        compute_s: of the compute stream without waiting.
        exposed_s: that compute waits for communication, or for copies.
        by: {category: seconds} of compute_s.
        exposed: {kind of collective, or "copies", "host memory": seconds} of exposed_s.
        flops, bytes, wire: per device: FLOPs of products and attention, bytes read and written in memory, bytes sent.
        uncertainty: the share by which the estimate may be off.
        timeline: {(stream, label): seconds in each of `INTERVALS` equal parts of the step}, the longest first. Compute
            and its waits ("exposed communication") take the whole step.
    """

    step_s: float
    compute_s: float
    exposed_s: float
    by: dict[str, float]
    exposed: dict[str, float]
    flops: float
    bytes: float
    wire: float
    uncertainty: float
    timeline: dict[Key, np.ndarray] = field(compare=False)

    def __repr__(self) -> str:
        parts = {**self.by, **{f"exposed {kind}": seconds for kind, seconds in self.exposed.items()}}
        sums = (
            f"{self.flops / 1e12:.2f} TFLOP, {self.bytes / 1e9:.1f} GB of memory traffic, {self.wire / 1e9:.2f} GB sent"
        )
        lines = [f"StepTime({self.step_s * 1e3:.1f} ms +- {self.uncertainty:.0%}: {sums})"]
        lines += [f"  {s * 1e3:9.2f} ms  {s / self.step_s:6.1%}  {name}" for name, s in _sorted(parts)]
        return "\n".join(lines)


def step_time(
    compiled: jax.stages.Compiled | str,
    rates: Rates,
    *,
    mesh: Mesh | None = None,
    gpus_per_node: int = 8,
    host_bytes: int = 0,
    host_reads: int = 0,
) -> StepTime:
    """Estimate the time of one execution of a compiled GPU program; nothing runs.

    Args:
        compiled: from ``jax.jit(f).lower(...).compile()``, or the text of its optimized HLO module.
        rates: of the GPU and its links.
        mesh: of the program. Its devices' numbers tell which GPUs share a host; without it, consecutive positions do.
        gpus_per_node: GPUs of one host. Collectives of groups on several hosts take the links between them.
        host_bytes: of the state in host memory (`TrainStep.host_bytes`). A program compiled for a GPU that is not there
            does not show it; each byte is then read and written once a step, beside nothing else.
        host_reads: bytes that the passes read of it before (`host_reads(step)`), beside nothing else.

    Raises:
        UnreadableProgram: an instruction whose time this reader cannot tell; a ValueError that names it.
        ConfigError: the mesh and the program have different numbers of devices, or gpus_per_node is not positive.
        ValueError: the program has no schedule: it was compiled for CPUs, or the text is not its optimized one.
    """
    if gpus_per_node < 1:
        raise ConfigError(f"gpus_per_node = {gpus_per_node}: must be at least 1")
    module = read_hlo(compiled)
    if not module.scheduled:
        raise ValueError("step_time: the HLO module has no schedule (is_scheduled=true); compile the step for a GPU")
    walk = _Walk(Kernels(module, rates, gpus_per_node), CollectiveCosts(module, rates, mesh, gpus_per_node))
    return walk.result(host_bytes, host_reads)


class _Walk:
    """A walk through a program with a clock for each stream.

    Attributes:
        compute: the clock of the compute stream, in seconds.
        free: when the other streams have done what was queued.
        times: how often what is being walked runs.
        by, exposed, sums: totals, each execution counted.
        segments: of the timeline so far.
    """

    def __init__(self, kernels: Kernels, wire: CollectiveCosts):
        self.module, self.rates, self.kernels, self.wire = kernels.module, kernels.rates, kernels, wire
        self.compute, self.free = 0.0, {COMMUNICATION: 0.0, COPIES: 0.0}
        self.times = 1
        self.by, self.exposed, self.sums = (defaultdict[str, float](float) for _ in range(3))
        self.segments: list[Segment | Trips] = []
        self.flying: dict[str, _Flight] = {}
        self.waiting: list[_Flight] = []

    def result(self, host_bytes: int, host_reads: int) -> StepTime:
        self._walk(self.module.entry)
        if HOST not in self.by and HOST not in self.exposed:
            self._spend(HOST, host_bytes / self.kernels.host_update + host_reads / self.kernels.host_read)
        scale = self.rates.scale
        self._spend(BETWEEN, self.rates.step)
        by = {name: scale * seconds for name, seconds in _sorted(self.by)}
        exposed = {name: scale * seconds for name, seconds in _sorted(self.exposed)}
        before = spent(self.segments, np.linspace(0.0, self.compute, INTERVALS + 1))
        longest = sorted(((key, s) for key, s in before.items() if s[-1]), key=lambda item: -item[1][-1])
        timeline = {key: scale * np.diff(s) for key, s in longest}
        compute_s, exposed_s = sum(by.values()), sum(exposed.values())
        sums = self.sums["flops"], self.sums["bytes"], self.sums["wire"]
        uncertainty = UNCERTAINTY_F8 if self.kernels.in_f8 else self.rates.uncertainty
        return StepTime(compute_s + exposed_s, compute_s, exposed_s, by, exposed, *sums, uncertainty, timeline)

    # ---------------------------------------------------------------- instructions

    def _walk(self, computation: str) -> None:
        outside, self.flying = self.flying, {}
        scope = self.module.computations[computation]
        for op in scope.values():
            self._instruction(op, scope)
        self._launch()
        for flight in list(self.flying.values()):  # a pair does not leave its computation
            self._arrive(flight)
        self.flying = outside

    def _instruction(self, op: Instruction, scope: Computation) -> None:
        if op.opcode.endswith("-done"):
            if flight := self.flying.pop(op.operands[0], None):
                self._arrive(flight)
        elif op.opcode.endswith("-update"):
            if flight := self.flying.pop(op.operands[0], None):
                self.flying[op.name] = flight  # a done names the update instead of the start
        elif found := self._collective(op, scope):
            self._send(op, self.wire.cost(*found))
        elif op.opcode == "while":
            self._loop(op)
        elif op.opcode == "conditional":
            self._branches(op)
        elif op.opcode in ("call", "async-start"):
            for name in op.called():
                self._walk(name)
        elif op.opcode.endswith("-start") and op.opcode not in ("copy-start", "fusion-start"):
            raise UnreadableProgram(op, "an asynchronous operation that this reader does not know")
        elif cost := self.kernels.cost(op, scope):
            self.sums["flops"] += cost.flops * self.times
            self.sums["bytes"] += cost.bytes * self.times
            if op.opcode.endswith("-start"):
                self.flying[op.name] = flight = _Flight(COPIES, cost.category, cost.seconds, self.compute)
                self._begin(flight, self.compute)
            else:
                self._launch(cost.seconds)
                self._spend(cost.category, cost.seconds + self.rates.gap)

    def _collective(self, op: Instruction, scope: Computation) -> tuple[Instruction, Computation] | None:
        """Return the collective that an instruction is, or wraps, with the computation of its operands."""
        if is_collective(op):
            return op, scope
        called = op.called() if op.opcode in ("async-start", "fusion", "fusion-start") else ()
        return next(((i, at) for name in called for i, at, *_ in self.module.walk(name) if is_collective(i)), None)

    def _spend(self, category: str, seconds: float) -> None:
        self.segments.append((COMPUTE, category, self.compute, self.compute + seconds))
        self.compute += seconds
        self.by[category] += seconds * self.times

    # ---------------------------------------------------------------- communication

    def _send(self, op: Instruction, cost: Cost) -> None:
        flight = _Flight(COMMUNICATION, cost.category, cost.seconds, self.compute)
        self.sums["wire"] += cost.bytes * self.times
        self.waiting.append(flight)
        if op.opcode.endswith("-start") and '"is_sync":true' not in op.attributes.replace(" ", ""):
            self.flying[op.name] = flight
        else:
            self._arrive(flight)

    def _launch(self, kernel: float = 0.0) -> None:
        """Begin the collectives that were asked for, late by the kernel that takes the multiprocessors first."""
        for flight in self.waiting:
            self._begin(flight, flight.asked + self.rates.late * kernel)
        self.waiting.clear()

    def _begin(self, flight: _Flight, earliest: float) -> None:
        """Queue a collective or copy on its stream."""
        flight.begin = max(earliest, self.free[flight.stream])
        flight.end = self.free[flight.stream] = flight.begin + flight.seconds
        self.segments.append((flight.stream, flight.label, flight.begin, flight.end))

    def _arrive(self, flight: _Flight) -> None:
        """Make the compute stream wait for a collective or copy, after a collective slowed it."""
        if flight in self.waiting:
            self._launch()
        beside = max(0.0, min(flight.end, self.compute) - flight.begin)
        if beside and flight.stream == COMMUNICATION:
            self._spend(SLOWED, self.rates.slow * beside)
        if flight.end > self.compute:
            self.segments.append((COMPUTE, EXPOSED, self.compute, flight.end))
            self.exposed[flight.label] += (flight.end - self.compute) * self.times
            self.compute = flight.end

    # ---------------------------------------------------------------- control flow

    def _loop(self, op: Instruction) -> None:
        """Walk the body of a loop twice: the first trip, and one that stands for the others."""
        if op.trips is None:
            raise UnreadableProgram(op, "a loop whose number of trips the compiler does not know")
        body = op.attribute(r"\bbody=%?([\w.\-]+)")
        self._launch()
        if op.trips:
            self._trip(body)
        if op.trips > 1:
            rest, start, done = op.trips - 1, self.compute, len(self.segments)
            self.times *= rest
            self._trip(body)
            self.times //= rest
            length = self.compute - start
            self.segments[done:] = [Trips(self.segments[done:], start, length, rest)] if length else []
            self.compute = start + rest * length  # the other streams have done by then what a trip queued

    def _trip(self, body: str) -> None:
        self._walk(body)
        self._spend(LOOPS, self.rates.trip)

    def _branches(self, op: Instruction) -> None:
        """Take the slowest branch: devices that take others wait for it at the next collective."""
        self._launch()
        branches = []
        for name in op.called():
            branches.append(branch := copy.copy(self))
            branch.__dict__.update({key: v.copy() for key, v in vars(self).items() if isinstance(v, dict | list)})
            branch._walk(name)
        if not branches:
            raise UnreadableProgram(op, "a conditional without branches")
        self.__dict__.update(vars(max(branches, key=lambda branch: branch.compute)))


@dataclass(eq=False)
class _Flight:
    """A collective or copy on its way: how long it takes, when compute asked for it, when it begins and ends."""

    stream: str
    label: str
    seconds: float
    asked: float
    begin: float = 0.0
    end: float = 0.0


def _sorted(parts: dict[str, float]) -> list[tuple[str, float]]:
    return sorted(((name, seconds) for name, seconds in parts.items() if seconds), key=lambda item: -item[1])


def spent(parts: Sequence[Segment | Trips], moments: np.ndarray) -> dict[Key, np.ndarray]:
    """Return the seconds that the labels of each stream have taken before some moments.

    >>> spent([Trips([("compute", "a", 1.0, 3.0)], 0.0, 4.0, 2), ("compute", "b", 8.0, 9.0)], np.array([2.0, 8.5]))
    {('compute', 'a'): array([1., 4.]), ('compute', 'b'): array([0. , 0.5])}
    """
    found: dict[Key, np.ndarray] = defaultdict(lambda: np.zeros(moments.shape))
    for part in parts:
        if isinstance(part, Trips):
            done = np.clip((moments - part.start) // part.length, 0, part.times - 1)
            of_one = np.append(moments - done * part.length, part.start + part.length)
            for key, before in spent(part.segments, of_one).items():
                found[key] += before[:-1] + done * before[-1]
        else:
            stream, label, start, end = part
            found[stream, label] += np.clip(moments, start, end) - start
    return dict(found)
