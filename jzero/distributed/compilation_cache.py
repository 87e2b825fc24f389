"""Keep compiled programs for the next start of a job, in JAX's persistent compilation cache."""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
import time
import uuid
from collections.abc import Iterable
from pathlib import Path

import jax

from jzero.distributed.host_collectives import gather_texts
from jzero.distributed.joining import hosts
from jzero.files import cache_directory

ENABLED, DIRECTORY = "jax_enable_compilation_cache", "jax_compilation_cache_dir"  # options of JAX
DAYS = 30  # a program that is older is removed, and compiled again where it is needed

_is_decided = False


def turn_on(devices: Iterable[jax.Device]) -> None:
    """Give JAX's cache a directory before programs run on GPUs, if nobody has chosen one.

    For devices that are not there, as in a plan, and for those of a part of the processes it does nothing. Otherwise
    all processes call it.

    In JAX, process 0 writes and all processes read. A process that finds its program takes no part in XLA's autotuning,
    for which the others would wait. So all must find it or none: the cache stays off for several hosts, whose network
    file system may show a new file late, and unless all processes see the same directory. For several processes the
    directory belongs to one command line, so that no other job writes while they look.
    """
    global _is_decided
    used = set(devices)
    if _is_decided or jax.default_backend() != "gpu" or not used <= set(jax.devices()):
        return  # a program for CPUs runs on the same kind of machine only
    if jax.process_count() not in (1, len({device.process_index for device in used})):
        return
    _is_decided = True
    if len(set(hosts())) == 1 and (directory := shared_directory()) is not None:
        jax.config.update(DIRECTORY, str(directory))


def shared_directory() -> Path | None:
    """Return the directory for programs; None unless all processes want one and see the same one."""
    directory, leads = _directory(), jax.process_index() == 0
    own = hashlib.sha256(repr([os.getcwd(), sys.argv]).encode()).hexdigest()[:16]  # the same in the job's next start
    job, mark = gather_texts("compilation cache: job", f"{own} {uuid.uuid4().hex}")[0].split()
    if directory and jax.process_count() > 1:
        directory /= job
    if directory and leads:
        with contextlib.suppress(OSError):  # read-only, or full
            directory.mkdir(mode=0o700, exist_ok=True)
            (directory / mark).touch()
    gather_texts("compilation cache: marked", "")
    seen = gather_texts("compilation cache: seen", str(directory is not None and os.access(directory / mark, os.F_OK)))
    if directory and leads:
        with contextlib.suppress(OSError):
            (directory / mark).unlink()
    return directory if set(seen) == {"True"} else None


def _directory() -> Path | None:
    """Return the user's own directory, without old files: anyone who can write there can run code in this process."""
    if getattr(jax.config, DIRECTORY) is not None or not getattr(jax.config, ENABLED):
        return None
    try:
        directory = cache_directory("programs").absolute()
        for path in (directory.parent, directory):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            found = path.stat()
            if found.st_uid != os.getuid() or found.st_mode & 0o022:
                return None
        for path in directory.rglob("*"):
            with contextlib.suppress(OSError):  # another process removes it
                if path.is_file() and path.stat().st_mtime < time.time() - DAYS * 24 * 3600:
                    path.unlink()
    except (OSError, RuntimeError):  # a home that is read-only, or none
        return None
    return directory
