"""SIGTERM: every process stops after the same step, whichever of them it came to.

A process that is told, or hears in the key-value service that another was, says which step it has begun, and begins no
other until all have said theirs; the highest of these numbers is the step after which all stop.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading

import jax

from jzero.distributed.host_collectives import agree, service

EXIT_CODE = 75  # "saved; start me again": sysexits.h's EX_TEMPFAIL
PATIENCE = 60.0  # seconds for all processes to answer
_NOTICE = "jzero/stop"

_told, _ending = threading.Event(), threading.Event()
_lock = threading.Lock()
_begun = 1  # the number of the step that is being done, of those since the start; guarded by _lock, as is
_last: int | None = None  # the step after which all stop
_listening = False


def listen() -> None:
    """Take SIGTERM, unless the script has taken it, and listen for other processes'."""
    global _listening
    if _listening:
        return
    _listening = True
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
        signal.signal(signal.SIGTERM, lambda *_: _told.set())
    if jax.process_count() > 1:
        thread = threading.Thread(target=_agree_on_the_last, daemon=True, name="jzero preemption")
        thread.start()
        threading._register_atexit(_end, thread)  # type: ignore[attr-defined]


def _end(thread: threading.Thread) -> None:
    """A thread that comes back from C++ when Python has ended would abort the process."""
    _ending.set()
    thread.join(PATIENCE)


def reached() -> bool:
    """Whether to stop now that a step is done: after the same one on every process. Call it after every step."""
    global _begun
    if jax.process_count() == 1:
        return _told.is_set()
    with _lock:
        done, _begun = _begun, _begun + 1
        return _last is not None and done >= _last


def _agree_on_the_last() -> None:
    global _last
    while not (_told.is_set() or _noticed()):
        if _ending.wait(1.0):
            return
    with contextlib.suppress(jax.errors.JaxRuntimeError):  # the others have gone
        service().key_value_set(_NOTICE, "", allow_overwrite=True)
        with _lock:
            try:
                _last = max(map(int, agree("the last step", str(_begun), PATIENCE)))
            except ValueError as error:  # then nobody can wait for them either
                print(f"jzero: SIGTERM: stopping without a checkpoint: {error}", file=sys.stderr, flush=True)
                os._exit(128 + signal.SIGTERM)


def _noticed() -> bool:
    try:
        service().key_value_try_get(_NOTICE)
    except jax.errors.JaxRuntimeError:  # not there, or not to be had just now
        return False
    return True
