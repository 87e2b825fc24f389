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
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence

import jax

from jzero import _compat
from jzero.distributed import heartbeat
from jzero.distributed.host_collectives import is_set, publish, published
from jzero.distributed.last_words import HUNG
from jzero.errors import ConfigError, some_of

TIMES = 20  # the limit, in units of the slowest recent step
ANSWER = 5.0  # seconds for the other processes to answer; all have ended within twice that
NCCL_MOST = 16_384  # bytes of an answer of NCCL; one of a large job would hide the stacks
_FLAG, _STEPS = "jzero/hung", "jzero/steps"  # keys in the coordination service; the second one with the rank

_ending, _tripped = threading.Event(), threading.Event()
_started = False


def watch_for_hangs(floor: float, ceiling: float) -> None:
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


def step_time_limit(times: Sequence[float], floor: float, ceiling: float) -> float:
    """Return the seconds that a step may take, from those of the recent ones; without any it may compile.

    >>> [step_time_limit(times, 600, 1800) for times in ([], [0.1, 0.2], [0.1, 50.0], [200.0])]
    [1800, 600, 1000.0, 1800]
    """
    return min(ceiling, max(floor, TIMES * max(times))) if times else ceiling


def _watch(floor: float, ceiling: float) -> None:
    while not _ending.wait(1.0):
        idle, steady = heartbeat.pending()
        most = step_time_limit(heartbeat.step_times() if steady else (), floor, ceiling)
        if idle > most and heartbeat.launched():
            if jax.process_index() == 0:
                print(nccl_status(), file=sys.stderr, flush=True)
            return
        if idle > most:
            _leave_within(2 * ANSWER)  # a stopped process 0 does not answer, and its service has no time limits
            _tripped.set()
            _print_stacks()
            try:
                _compat.coordination_service().key_value_set(_FLAG, "")
            except jax.errors.JaxRuntimeError:  # another process has tripped and prints for all
                return
            for line in words(_gather(), jax.process_count(), most):
                print(f"jzero: {line}", file=sys.stderr, flush=True)
            os._exit(HUNG)


def _answer(_floor: float, _ceiling: float) -> None:
    """Once a process has tripped, publish this one's steps, and end it too."""
    while not is_set(_FLAG):
        if _ending.wait(2.0):
            return
    if not _tripped.is_set():  # else it has printed its stacks
        _print_stacks()  # first: once all have answered, the other process ends
    _leave_within(2 * ANSWER)
    with contextlib.suppress(jax.errors.JaxRuntimeError):  # the service does not answer now
        publish(_STEPS, "{} {}".format(*heartbeat.step_counts()))


def _print_stacks() -> None:
    faulthandler.dump_traceback(2, all_threads=True)  # the script may have replaced sys.stderr


def _leave_within(seconds: float) -> None:
    timer = threading.Timer(seconds, os._exit, (HUNG,))
    timer.daemon = True
    timer.start()


def _gather() -> dict[int, tuple[int, int]]:
    """Return rank -> (steps finished, steps begun) of the processes that answer."""
    with contextlib.suppress(jax.errors.JaxRuntimeError):  # nobody answers: process 0 has gone
        counts = {rank: text.split() for rank, text in published(_STEPS, ANSWER).items()}
        return {rank: (int(finished), int(begun)) for rank, (finished, begun) in counts.items()}
    return {}


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
        lines += [f"all {size} ranks have begun step {fewest}, so they wait in the devices", nccl_status()]
    return lines


def nccl_status(env: Mapping[str, str] = os.environ, timeout: float = 5.0) -> str:
    """Ask NCCL's RAS service which ranks are missing, hang or differ; return its answer, or why there is none.

    NCCL 2.24 and later start the service in every process; it listens on one port of each host and answers lines of
    text (https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting/ras.html).

    Args:
      env: NCCL_RAS_ADDR has the service's address, as host:port; NCCL_RAS_ENABLE=0 turns it off.
      timeout: seconds to wait for all of the answer; after that what has come is returned.
    """
    address = env.get("NCCL_RAS_ADDR", "localhost:28028")
    if env.get("NCCL_RAS_ENABLE") == "0":
        return "NCCL's RAS service is off (NCCL_RAS_ENABLE=0)"
    host, _, port = address.rpartition(":")
    end, answer, why = time.monotonic() + timeout, b"", "it closed the connection"
    try:
        with socket.create_connection((host.strip("[]") or "localhost", int(port)), timeout) as connection:
            connection.sendall(b"VERBOSE STATUS\n")
            while len(answer) < NCCL_MOST:
                connection.settimeout(max(0.01, end - time.monotonic()))
                if not (data := connection.recv(4096)):
                    break
                answer += data
    except (OSError, ValueError, OverflowError) as error:
        why = getattr(error, "strerror", None) or str(error)
    text = answer[:NCCL_MOST].decode(errors="replace").strip()
    return (
        f"NCCL's RAS service at {address}:\n{text}"
        if text
        else f"NCCL's RAS service at {address} did not answer: {why}"
    )
