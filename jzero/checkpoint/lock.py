"""One job at a time writes into a checkpoint directory. DIR/.lock names the job; reading needs no lock.

Every save deletes the drafts of killed jobs, and two jobs in one directory would each delete the other's drafts.

The lock is a file with its owner's name, because network file systems do not all support flock(2) between hosts. The
system creates it atomically (O_EXCL). The owner touches it every REFRESH seconds and deletes it when it exits. Another
job takes the lock over if

- the owner is a process of this host that has ended,
- the owner is an earlier attempt of the same job (`jzero --max_restarts`, a requeued Slurm job), or
- the file has not changed for STALE seconds of this process's own clock. The clocks of two hosts are never compared.

Only process 0 of a job calls this module, and shares the result. An owner that was suspended until another job took its
lock finds out before its next save, and before it completes the one under way (`check_lock`).
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

from jzero.checkpoint.directory import LOCK
from jzero.errors import CheckpointError, ConfigError, escaped

REFRESH = 3.0  # seconds between the owner's touches
STALE = 30.0  # seconds without a touch after which the owner counts as dead
POLL = 0.25  # seconds between two looks at another owner's lock
SETTLE = 1.0  # seconds after a takeover until all processes that took over at the same time have done so

_ID = secrets.token_hex(8)  # of this process
_held: set[Path] = set()


class Owner(NamedTuple):
    """The job that a lock names.

    Attributes:
      id: of its process 0.
      place: the host's boot and the namespace in which `pid` is valid.
      started: the process's start time, because pids are reused.
      attempts: {job: number of its attempt}.
      modified: when the file was last touched, in nanoseconds; not in the file.
    """

    id: str = ""
    host: str = "?"
    place: str = ""
    pid: int = 0
    started: str = ""
    job: str = "?"
    since: str = "?"
    attempts: Mapping[str, int] = {}
    modified: int = 0


def hold(directory: Path) -> None:
    """Take the directory for this process until it exits; do nothing if this process already holds it.

    Raises:
      ConfigError: another job holds it.
      OSError: the directory cannot be written.
    """
    directory.mkdir(parents=True, exist_ok=True)
    file = Path(os.path.realpath(directory)) / LOCK
    first, since = None, 0.0
    while not _create(file):
        seen = _look(file)
        if seen is None:  # it was released just now
            continue
        if seen.id == _ID:
            break
        touched = first is not None and seen.id == first.id and seen.modified != first.modified
        alive = False if _is_earlier_attempt(seen) else touched or _is_alive(seen)
        if alive:
            raise ConfigError(_in_use(file, seen))
        if first is None and alive is None:
            wait = f"waiting {STALE:g} s to see whether it still runs"
            print(escaped(f"jzero: {file} names {_words(seen)}: {wait}"), file=sys.stderr, flush=True)
        if first is None or seen.id != first.id:
            first, since = seen, time.monotonic()
        if alive is False or time.monotonic() - since > STALE:
            _take_over(file, seen)
        else:
            time.sleep(POLL)
    _keep(file)


def check_lock(directory: Path) -> None:
    """Raise a CheckpointError if another job has taken the directory over."""
    seen = _look(file := Path(os.path.realpath(directory)) / LOCK)
    if seen and seen.id != _ID:
        raise CheckpointError(_in_use(file, seen))


def other_holder(directory: Path) -> str:
    """Describe the other job that holds the directory and may be alive; "" if there is none. Never waits."""
    with contextlib.suppress(OSError):
        seen = _look(file := Path(os.path.realpath(directory)) / LOCK)
        if seen and seen.id != _ID and not _is_earlier_attempt(seen) and _is_alive(seen) is not False:
            return _in_use(file, seen)
    return ""


def _in_use(file: Path, owner: Owner) -> str:
    return (
        f"{file.parent} is in use by {_words(owner)}: choose another directory or end that job; if it has ended, "
        f"remove {file} to take over"
    )


def _words(owner: Owner) -> str:
    return f"{owner.job} (process {owner.pid} on {owner.host}, since {owner.since})"


# ---------------------------------------------------------------- the file


def _create(file: Path) -> bool:
    """Create the lock file; return False if it exists."""
    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644)
    except FileExistsError:
        return False
    try:
        with open(descriptor, "w") as stream:
            json.dump({key: x for key, x in _me()._asdict().items() if key != "modified"}, stream)
            stream.flush()
            os.fsync(descriptor)
    except OSError:  # a full disk
        file.unlink(missing_ok=True)
        raise
    return True


def _take_over(file: Path, dead: Owner) -> None:
    """Replace a dead owner's lock. If several processes do so at once, the last one has it; the others see that."""
    new = file.with_name(f"{LOCK}.{_ID}")
    new.unlink(missing_ok=True)
    _create(new)
    now = _look(file)  # the write above may have taken long
    if now == dead or (now and now.id == dead.id and _is_earlier_attempt(now)):
        os.replace(new, file)
        time.sleep(SETTLE)
    new.unlink(missing_ok=True)


def _look(file: Path) -> Owner | None:
    """Read the lock file; None if there is none. A file that is not a lock, or not yet whole, has an unknown owner."""
    try:  # NFS fetches a file's attributes when it is opened, and otherwise caches them for up to a minute
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    with open(descriptor, "rb") as stream:
        modified, text = os.fstat(descriptor).st_mtime_ns, stream.read(10_000) or b""
    try:
        owner = Owner(**json.loads(text))
        attempts = {str(job): int(number) for job, number in owner.attempts.items()}
        return owner._replace(pid=int(owner.pid), attempts=attempts, modified=modified)
    except (ValueError, TypeError, AttributeError, RecursionError):
        return Owner(modified=modified)


def _keep(file: Path) -> None:
    """Touch the lock from now on, and delete it at exit."""
    if not _held:
        os.register_at_fork(after_in_child=_held.clear)  # a child that ends must not release its parent's lock
        threading.Thread(target=_touch, daemon=True, name="jzero lock").start()
        atexit.register(_each_held, os.unlink)
    _held.add(file)


def _touch() -> None:
    while True:
        time.sleep(REFRESH)
        _each_held(os.utime)


def _each_held(do: Callable[[Path], None]) -> None:
    for file in list(_held):
        with contextlib.suppress(OSError):
            if (seen := _look(file)) and seen.id == _ID:
                do(file)


# ---------------------------------------------------------------- who is who


def _me() -> Owner:
    env, script = os.environ, Path(sys.argv[0]).name or "python"
    slurm = f"Slurm job {env['SLURM_JOB_ID']}" if "SLURM_JOB_ID" in env else ""
    names = [name for name in (slurm, env.get("JZERO_JOB_ID", "") and f"job {env['JZERO_JOB_ID']}") if name]
    return Owner(
        _ID, socket.gethostname(), _place(), os.getpid(), _started(os.getpid()) or "",
        f"{', '.join(names) or 'a job'} of {script}", time.strftime("%Y-%m-%d %H:%M:%S %Z"), _attempts(),
    )  # fmt: skip


def _attempts() -> dict[str, int]:
    """Number this attempt of the job, for every system that can start the job again.

    Two commands in one Slurm allocation have the same job and the same number, so neither takes the other's lock.
    """
    env, found = os.environ, {}
    with contextlib.suppress(ValueError):
        if job := env.get("SLURM_JOB_ID"):
            found[f"slurm {job}"] = int(env.get("SLURM_RESTART_COUNT", 0))
        if attempt := env.get("JZERO_ATTEMPT"):
            job, _, number = attempt.partition(" ")
            found[f"jzero {job}"] = int(number)
    return found


def _is_earlier_attempt(owner: Owner) -> bool:
    mine = _attempts()
    return any(job in mine and number < mine[job] for job, number in owner.attempts.items())


def _is_alive(owner: Owner) -> bool | None:
    """Return whether the owner runs; None if it is on another host, or hidden because it is another user's."""
    if not owner.place or owner.place != _place():
        return None
    try:
        os.kill(owner.pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # another user's
        pass
    started = _started(owner.pid)
    return None if started is None else started == owner.started


@cache
def _place() -> str:
    """Name the boot of this host and the namespace of pids, which containers have of their own; "" if unknown."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{socket.gethostname()} {boot} {os.readlink('/proc/self/ns/pid')}"
    return ""


def _started(pid: int) -> str | None:
    """Return a process's start time in ticks since the boot, "" for a zombie; None if it cannot be read."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
        return "" if fields[0] in "ZX" else fields[19]
    return None
