"""End a job whose devices have stopped: print the stacks, the steps of all processes, and what NCCL knows.

`initialize` starts it in every job of several processes, so that it also works under srun, mpirun and torchrun. The
launcher has a clock of its own (--hang_timeout) and ends the job itself; there rank 0 only adds what NCCL knows.

A process trips when work that it gave to its devices does not finish in time. The others then answer with their steps:
they wait for the process that has begun the fewest.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from jzero import _compat
from jzero.distributed import heartbeat, nccl_ras
from jzero.distributed.exit_codes import HUNG
from jzero.distributed.host_collectives import published
from jzero.errors import ConfigError, some_of

TIMES = 20  # the limit, in units of the slowest recent step
ANSWER = 5.0  # seconds for the other processes to answer; all have ended within twice that
_FLAG, _STEPS = "jzero/hung", "jzero/steps"  # keys in the coordination service; the second one with the rank

_ending, _tripped = threading.Event(), threading.Event()
_started = False


def start(floor: float, ceiling: float) -> None:
    """Watch this process, if it is one of several.

    Args:
      floor, ceiling: bounds of the limit in seconds; ceiling 0: never trip. JZERO_HANG_TIMEOUT replaces both.

    Raises:
      ConfigError: JZERO_HANG_TIMEOUT is not a number.
    """
    global _started
    if given := os.environ.get("JZERO_HANG_TIMEOUT"):
        try:
            floor = ceiling = float(given)
        except ValueError:
            raise ConfigError(f"JZERO_HANG_TIMEOUT = {given!r}: must be seconds; 0: never") from None
    if _started or jax.process_count() == 1 or not ceiling:
        return
    _started = True
    works: list[Callable[[float, float], None]] = [_watch] if heartbeat.launched() else [_watch, _answer]
    for work in works:
        thread = threading.Thread(target=work, args=(floor, ceiling), daemon=True, name="jzero watchdog")
        thread.start()
        _compat.before_threads_end(_end, thread)


def _end(thread: threading.Thread) -> None:
    """Wait for the thread: if it returned from C++ after Python has ended, it would abort the process."""
    _ending.set()
    thread.join(ANSWER)


def limit(times: Sequence[float], floor: float, ceiling: float) -> float:
    """Return the seconds that a step may take, from those of the recent ones; without any it may compile.

    >>> limit([], 600, 1800), limit([0.1, 0.2], 600, 1800), limit([0.1, 50.0], 600, 1800), limit([200.0], 600, 1800)
    (1800, 600, 1000.0, 1800)
    """
    return min(ceiling, max(floor, TIMES * max(times))) if times else ceiling


def _watch(floor: float, ceiling: float) -> None:
    while not _ending.wait(1.0):
        idle, steady = heartbeat.pending()
        most = limit(heartbeat.times() if steady else (), floor, ceiling)
        if idle > most and heartbeat.launched():
            if jax.process_index() == 0:
                print(nccl_ras.status(), file=sys.stderr, flush=True)
            return
        if idle > most:
            _leave_within(2 * ANSWER)  # a stopped process 0 does not answer, and its service has no time limits
            _tripped.set()
            _print_stacks()
            client = _compat.coordination_service()
            try:
                client.key_value_set(_FLAG, "")
            except jax.errors.JaxRuntimeError:  # another process has tripped and prints for all
                return
            for line in words(_gather(client), jax.process_count(), most):
                print(f"jzero: {line}", file=sys.stderr, flush=True)
            os._exit(HUNG)


def _answer(_floor: float, _ceiling: float) -> None:
    """Once a process has tripped, publish this one's steps, and end it too."""
    while not _ending.wait(2.0):
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # no flag, or the service does not answer now
            client = _compat.coordination_service()
            if client is None:  # the script has left the job
                return
            client.key_value_try_get(_FLAG)
            if not _tripped.is_set():  # else it has printed its stacks
                _print_stacks()  # first: once all have answered, the other process ends
            finished, begun = heartbeat.counts()
            client.key_value_set(f"{_STEPS}/{jax.process_index()}", f"{finished} {begun}", allow_overwrite=True)
            _leave_within(2 * ANSWER)
            return


def _print_stacks() -> None:
    faulthandler.dump_traceback(2, all_threads=True)  # the script may have replaced sys.stderr


def _leave_within(seconds: float) -> None:
    timer = threading.Timer(seconds, os._exit, (HUNG,))
    timer.daemon = True
    timer.start()


def _gather(client: Any) -> dict[int, tuple[int, int]]:
    """Return rank -> (steps finished, steps begun) of the processes that answer."""
    found: dict[int, str] = {}
    with contextlib.suppress(jax.errors.JaxRuntimeError):  # nobody answers: process 0 has gone
        found = published(client, _STEPS, ANSWER)
    counts = {rank: text.split() for rank, text in found.items()}
    return {rank: (int(finished), int(begun)) for rank, (finished, begun) in counts.items()}


def words(steps: Mapping[int, tuple[int, int]], size: int, seconds: float) -> list[str]:
    """Describe a hang: the steps, the processes to look at first and, if all have begun the same step, NCCL's view."""
    silent = [rank for rank in range(size) if rank not in steps]
    fewest = min((begun for _, begun in steps.values()), default=0)
    behind = [rank for rank, (_, begun) in steps.items() if begun == fewest]
    each = some_of(f"rank {rank} {finished} of {begun}" for rank, (finished, begun) in sorted(steps.items()))
    lines = [f"no step has finished for {seconds:g} s; steps finished of those begun: {each}"]
    if silent:
        lines.append(f"rank {some_of(silent)} did not answer: look there first")
    elif len(behind) < size:
        lines.append(f"look at rank {some_of(behind)} first: the others wait for it (its stack is above)")
    else:
        lines += [f"all {size} ranks have begun step {fewest}, so they wait in the devices", nccl_ras.status()]
    return lines
