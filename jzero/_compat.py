"""Private APIs of JAX and CPython: one function each, with the reason that no public one serves.

No other module of jzero uses a private name of JAX or CPython (tests/test_import_order.py checks it). All of these
exist in Python 3.11 and 3.12 and in jax 0.10.2 and 0.11.2. JAX is imported on first use, because the launcher works
without it.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import threading
from collections.abc import Callable
from typing import Any


def backends_are_initialized() -> bool:
    """Whether JAX has started its devices, after which this process can no longer join others.

    `jax.distributed.initialize` refuses too, but only after all processes have met, and without naming the process.
    """
    from jax._src import xla_bridge

    return xla_bridge.backends_are_initialized()


def coordination_service() -> Any:
    """The client of the service that `jax.distributed.initialize` started: a key-value store with barriers.

    JAX's public `multihost_utils` gathers through the devices: a process that failed, or runs another program, would
    hang all others there, and the error would not name it.
    """
    from jax._src import distributed

    return distributed.global_state.client


def before_threads_end(callback: Callable[..., Any], *args: Any) -> None:
    """Call `callback(*args)` when Python ends, while threads still run and new ones may start.

    `atexit` callbacks run later, when Python has joined its threads and allows no new ones; `concurrent.futures` uses
    the same private hook (https://github.com/python/cpython/issues/86128). Python 3.12.0 and 3.12.1 allow no new
    threads even here (https://github.com/python/cpython/issues/113964).
    """
    threading._register_atexit(callback, *args)  # type: ignore[attr-defined]


def close_transport(process: asyncio.subprocess.Process) -> None:
    """Close the pipes of a process that nobody waits for.

    Else the garbage collector does it after the event loop, and prints "RuntimeError: Event loop is closed"
    (https://github.com/python/cpython/issues/114177).
    """
    process._transport.close()  # type: ignore[attr-defined]


def option_names(parser: argparse.ArgumentParser) -> list[str]:
    """The options of a parser, as `--name` or `-n`; argparse lists them only in its help text."""
    return [name for action in parser._actions for name in action.option_strings]


def exception_was_uncaught() -> bool:
    """Whether an exception has ended the main thread.

    `sys.last_exc` says it from Python 3.12 on, which deprecates `sys.last_type`; 3.11 has only the latter.
    """
    return hasattr(sys, "last_exc") or hasattr(sys, "last_type")
