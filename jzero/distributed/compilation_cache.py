"""Keeps compiled programs for the next start of a job, in JAX's persistent compilation cache."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax

from jzero.distributed.host_collectives import agree
from jzero.files import kept

ENABLED, DIRECTORY = "jax_enable_compilation_cache", "jax_compilation_cache_dir"  # options of JAX
DAYS = 30  # after which a program is removed; to have it again costs one compilation

_is_decided = False


def turn_on(devices: Iterable[Any]) -> None:
    """Give JAX's cache a directory before programs run on GPUs, if nobody has chosen one.

    For devices that are not there, as in a plan, and for those of a part of the processes it does nothing. Otherwise
    all processes call it.

    JAX has process 0 write and all processes read. A process that finds its program takes no part in XLA's
    autotuning, where the others would wait for it. So the cache stays off unless all processes see one directory.
    JAX_COMPILATION_CACHE_DIR chooses another one; JAX_ENABLE_COMPILATION_CACHE=0 turns the cache off.
    """
    global _is_decided
    used = set(devices)
    if _is_decided or jax.default_backend() != "gpu" or not used <= set(jax.devices()):
        return  # a program for CPUs runs on the same kind of machine only
    if jax.process_count() not in (1, len({device.process_index for device in used})):
        return
    _is_decided = True
    if (directory := shared_directory()) is not None:
        jax.config.update(DIRECTORY, str(directory))


def shared_directory() -> Path | None:
    """Return the directory for programs; None unless all processes want one and see the same one."""
    directory = _directory()
    mark = agree("compilation cache: mark", uuid.uuid4().hex)[0]
    if directory and jax.process_index() == 0:
        with contextlib.suppress(OSError):  # a full disk
            (directory / mark).touch()
    agree("compilation cache: marked", "")
    seen = agree("compilation cache: seen", str(directory and (directory / mark).exists()))
    if directory and jax.process_index() == 0:
        (directory / mark).unlink(missing_ok=True)
    return directory if set(seen) == {"True"} else None


def _directory() -> Path | None:
    """Make the directory of this process, for this user alone: whoever writes there has code run here."""
    if getattr(jax.config, DIRECTORY) is not None or not getattr(jax.config, ENABLED):
        return None
    try:
        directory = kept("programs")
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        for path in directory.glob("*-cache"):  # JAX's suffix
            with contextlib.suppress(FileNotFoundError):  # another process removes it
                if path.stat().st_mtime < time.time() - DAYS * 24 * 3600:
                    path.unlink()
    except (OSError, RuntimeError):  # a home that is read-only, or none
        return None
    return directory
