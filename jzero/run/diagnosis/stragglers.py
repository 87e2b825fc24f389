"""Stragglers: the processes and GPUs for which all others wait.

In a step every device waits for the slowest one in the next collective, so all steps take the same time everywhere, and
no process sees from its own times who was late. Two figures tell it: the time per step in which the devices of a
process had nothing to do, because its data, its script or its host was late; and the time in which each GPU computes
the same product.
"""

from __future__ import annotations

import contextlib
import json
import socket
import timeit
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jzero.distributed.host_collectives import gather_texts
from jzero.errors import some_of
from jzero.events import Noticed
from jzero.run.clock import per_step
from jzero.run.diagnosis.watch import WatchedRun
from jzero.run.observers import Observers
from jzero.step.programs import Details
from jzero.step.train_step import Metrics, TrainStep

STRAGGLER = "straggler"
OWN = ("data", "script", "host")  # parts of the clock in which the devices of a process wait for it
STEP = (*OWN, "peers", "device")
LATE = 0.05  # of a step: a wait that is worth a line
SLOW = 0.15  # more time than the usual GPU takes; the clocks of equal GPUs differ by a few percent
LEAST = 1.0  # ms
SIZE, CHAIN, TRIES = 4096, 8, 3  # of the product: 1.1 TFLOP, about 2 ms on an H100


class Report(NamedTuple):
    """The report of a process: its host, ms per step of each part, and ms of the product on each of its GPUs."""

    host: str
    parts: dict[str, float]
    products: dict[str, float]


class Stragglers:
    """Compares the processes and GPUs of a run every `straggler_check.every` steps."""

    def __init__(self, step: TrainStep, observers: Observers):
        self._every, self._observers = step.config.straggler_check.every or 0, observers
        self._mesh, self.is_on = step.mesh, self._every > 0
        self._mark: tuple[int, dict[str, float]] | None = None

    def restart(self) -> None:
        """Measure from the next step on."""
        self._mark = None

    def take(self, run: WatchedRun, metrics: Metrics, details: Details) -> None:
        """Take a step that was given to the devices; compare if it is due. The first step compiles, and is left out."""
        number, now = run.global_steps, {part: self._observers.clock.total.get(part, 0.0) for part in STEP}
        if self._mark is not None and number <= self._mark[0]:  # a step that is not finite took the run back
            self._mark = None
        if self._mark is not None and number % self._every == 0:
            parts = per_step(self._mark[1], now, number - self._mark[0])
            mine = Report(socket.gethostname(), parts, time_matmuls(self._mesh.local_devices))
            reports = [Report(*json.loads(text)) for text in gather_texts("stragglers", json.dumps(mine))]
            for text in late(reports) + slow(reports):
                self._observers.emit(Noticed(number, STRAGGLER, text))
        if self._mark is None or number % self._every == 0:
            self._mark = number, now


def late(reports: Sequence[Report]) -> list[str]:
    """Describe the processes for which the others wait.

    >>> on_time = Report("a", {"data": 1.0, "device": 99.0}, {})
    >>> late([on_time, Report("b", {"data": 40.0, "script": 2.0, "device": 58.0}, {}), on_time])
    ['straggler: process 1 on b: its devices wait 42.0 ms of a step of 100.0 ms (1.0 elsewhere): data 40.0, script 2.0']
    """
    if len(reports) < 2:
        return []
    found = []
    own = [sum(report.parts.get(part, 0.0) for part in OWN) for report in reports]
    for rank, (report, mine) in enumerate(zip(reports, own, strict=True)):
        others = median(own[:rank] + own[rank + 1 :])
        step = sum(report.parts.values())
        if mine - others > max(LEAST, LATE * step):
            listed = ", ".join(f"{part} {report.parts[part]:.1f}" for part in OWN if report.parts.get(part))
            found.append(
                f"{STRAGGLER}: process {rank} on {report.host}: its devices wait {mine:.1f} ms of a step of "
                f"{step:.1f} ms ({others:.1f} elsewhere): {listed}"
            )
    return found


def slow(reports: Sequence[Report]) -> list[str]:
    """Describe the GPUs that take longer than the usual one for the same product.

    >>> slow([Report("a", {}, {"0": 2.0, "1": 2.1}), Report("b", {}, {"2": 2.9, "3": 2.0})])
    ['straggler: device 2 on b computes a matmul in 2.90 ms, the median of 4 devices in 2.05']
    """
    times = {(r.host, name): ms for r in reports for name, ms in r.products.items()}
    usual = median(times.values()) if times else 0.0
    listed = [f"device {name} on {host} computes a matmul in {ms:.2f} ms" for (host, name), ms in times.items()
              if ms > (1 + SLOW) * usual]  # fmt: skip
    return [f"{STRAGGLER}: {some_of(listed)}, the median of {len(times)} devices in {usual:.2f}"] if listed else []


def time_matmuls(devices: Sequence[jax.Device]) -> dict[str, float]:
    """Time the same chain of products on each GPU, one after the other: {id of the device: ms}.

    Empty on CPUs, whose devices share the cores, and without room for the arrays. The step that still runs comes first,
    so the GPU is as warm as in training.
    """
    with contextlib.suppress(jax.errors.JaxRuntimeError):  # a full GPU must not end the run
        return {str(d.id): 1000 * _time(_chain, d) for d in devices if d.platform != "cpu"}
    return {}


@jax.jit
def _chain(x: jax.Array) -> jax.Array:
    for _ in range(CHAIN):
        x = x @ x * (1 / SIZE)  # keeps the values finite
    return x


def _time(program: Callable[[jax.Array], jax.Array], device: Any) -> float:
    """Return the seconds of the fastest of a few runs."""
    with jax.default_device(device):
        x = jax.random.normal(jax.random.key(0), (SIZE, SIZE), jnp.bfloat16)
    jax.block_until_ready(program(x))
    return min(timeit.repeat(lambda: jax.block_until_ready(program(x)), repeat=TRIES, number=1))
