"""Kill every process that a job started on this host, whatever it did to leave its parents.

The kernel gives an orphan to its nearest ancestor that asked for orphans (PR_SET_CHILD_SUBREAPER). So a process that
left its session, its parents and its environment is still a descendant of the agent. The agent runs under a guard, a
small process that gets the orphans when the agent is killed, and that kills an agent which is stopped.
"""

import contextlib
import ctypes
import os
import select
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import NoReturn

PULSE_SILENCE = 8  # seconds without a sign of life of the agent
START = 60  # seconds until the first one
PATIENCE = 5.0  # seconds that killed processes have to end: the kernel first frees their memory


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent dies, even by SIGKILL."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def adopt_orphans() -> None:
    """Have the kernel make this process the parent of all orphans among its descendants."""
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER


def guarded(run: Callable[[int], object]) -> NoReturn:
    """Run `run(pulse)` in a child process, then kill all its descendants and end with its exit code.

    The child writes to the file descriptor `pulse` as a sign of life; it is killed after PULSE_SILENCE seconds without.
    """
    adopt_orphans()
    read, pulse = os.pipe()
    child = os.fork()
    if not child:
        os.close(read)
        os.set_blocking(pulse, False)  # a stopped guard must not block its child
        adopt_orphans()
        run(pulse)
        os._exit(0)
    os.close(pulse)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    late = -START
    while late <= PULSE_SILENCE:  # counted, not measured: the guard of a suspended host is suspended too
        if not select.select([read], [], [], 1)[0]:
            late += 1
        elif os.read(read, 4096):
            late = 0
        else:
            break
    kill_descendants()
    ended, status = os.waitpid(child, os.WNOHANG)
    code = os.waitstatus_to_exitcode(status) if ended else -signal.SIGKILL
    if code < 0:
        why = f"did not run for {PULSE_SILENCE} s" if late > PULSE_SILENCE else f"was killed by signal {-code}"
        with contextlib.suppress(OSError):
            os.write(2, f"its agent {why}\n".encode())
    os._exit(128 - code if code < 0 else code)


def reap_orphans(others: Iterable[int]) -> None:
    """Collect the ended children of this process, but not these `others`, for which somebody waits."""
    with contextlib.suppress(ChildProcessError):
        while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            if ended.si_pid in others:
                return  # the next call sees those after it
            os.waitpid(ended.si_pid, 0)


def kill_descendants() -> None:
    """Kill all descendants of this process."""
    own = os.getpid()
    _kill(lambda: {pid: state for pid, state in _trees([own]).items() if pid != own})


def kill_job(job: str) -> None:
    """Kill the job's processes, which an agent of it left here, and their descendants."""
    _kill(lambda: _trees(_marked(job)))


def state_and_parent(pid: int) -> tuple[str, int]:
    """Return a process's state (R running, S sleeping, T stopped, ...; ? if there is none) and its parent's pid."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat", errors="replace") as file:
        state, parent, *_ = file.read().rpartition(")")[2].split()
        return state, int(parent)
    return "?", 0


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _marked(job: str) -> list[int]:
    """Return the pids of the job's agents and their guards, and of the processes with its id in their environment."""
    mark, agent, found = f"JZERO_JOB_ID={job}".encode(), f"'jzero agent {job}'".encode(), []
    for pid in _pids():
        with (
            contextlib.suppress(OSError),
            open(f"/proc/{pid}/environ", "rb") as environ,
            open(f"/proc/{pid}/cmdline", "rb") as words,
        ):
            is_agent = any(word.startswith(agent) for word in words.read().split(b"\0"))
            if is_agent or mark in environ.read().split(b"\0"):
                found.append(pid)
    return found


def _trees(roots: Iterable[int]) -> dict[int, str]:
    """Return pid -> state of these processes and all their descendants."""
    states, children = dict[int, str](), defaultdict[int, list[int]](list)
    for pid in _pids():
        states[pid], parent = state_and_parent(pid)
        children[parent].append(pid)
    found, left = dict[int, str](), list(roots)
    while left:
        pid = left.pop()
        if pid in states and pid not in found:
            found[pid] = states[pid]
            left += children[pid]
    return found


def _kill(find: Callable[[], dict[int, str]]) -> None:
    """Kill the processes that `find` lists until it lists none, or PATIENCE is over."""
    clean, end = 0, time.monotonic() + PATIENCE
    # Twice none: while the list is made, a process may fork, or end and so leave its children out of the tree.
    while clean < 2 and time.monotonic() < end:
        found = find()
        for pid in found:  # those that have ended too: their main thread has ended, others may run
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        clean = clean + 1 if set(found.values()) <= {"Z", "X", "?"} else 0
        time.sleep(0.02)
