"""SIGTERM: every process stops after the same step, whichever process received the signal.

A process that receives SIGTERM sets a flag in the coordination service, which the others poll. Every process then
publishes the number of the step that it has begun, and begins no other until all have published. The highest number is
the last step: all processes still run it, so that none waits in a collective for one that has stopped. A process whose
script has ended publishes too, so that nobody waits for it; its number is that of a step that nobody begins.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading

import jax

from jzero import _compat
from jzero.distributed.host_collectives import is_set, publish, published
from jzero.errors import some_of

GRACE = 30.0  # seconds from SIGTERM to SIGKILL: the default of jzero, Slurm and Kubernetes
_FLAG, _STEPS = "jzero/stop", "jzero/begun"  # keys in the coordination service; the second one with the rank

_signalled, _ending = threading.Event(), threading.Event()
_lock = threading.Lock()
_begun = 1  # the number of the current step since the start; guarded by _lock
_last: int | None = None  # the step after which all stop; guarded by _lock
_listening = False


def listen() -> None:
    """Handle SIGTERM, unless the script has a handler of its own, and watch for SIGTERM on other processes."""
    global _listening
    if _listening:
        return
    _listening = True
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
        # The handler only sets a flag: a save in the middle of a step would store a state that is half updated.
        signal.signal(signal.SIGTERM, lambda *_: _signalled.set())
    if jax.process_count() > 1:
        thread = threading.Thread(target=_agree_on_the_last, daemon=True, name="jzero preemption")
        thread.start()
        _compat.before_threads_end(_end, thread)


def _end(thread: threading.Thread) -> None:
    """Wait for the thread, which would abort the process if it returned from C++ after Python has ended; publish."""
    _ending.set()
    thread.join(_timeout() + 5)
    with contextlib.suppress(jax.errors.JaxRuntimeError):  # already published, or the other processes have gone
        if _compat.coordination_service():  # the script has not left the job
            publish(_STEPS, str(_begun))


def reached() -> bool:
    """Count a finished step and return whether to stop after it; the same on every process."""
    global _begun
    if jax.process_count() == 1:
        return _signalled.is_set()
    with _lock:
        done, _begun = _begun, _begun + 1
        return _last is not None and done >= _last


def _timeout() -> float:
    """Return the seconds to wait for the other processes: a third of the grace, so that some is left for the save."""
    return float(os.environ.get("JZERO_GRACE", GRACE)) / 3


def _agree_on_the_last() -> None:
    global _last
    while not (_signalled.is_set() or is_set(_FLAG)):
        if _ending.wait(1.0):
            return
    with contextlib.suppress(jax.errors.JaxRuntimeError):  # the other processes have gone
        _compat.coordination_service().key_value_set(_FLAG, "", allow_overwrite=True)
        # The lock stops `reached`, and so the training loop, until all processes have published their step.
        with _lock:
            publish(_STEPS, str(_begun))
            begun = published(_STEPS, _timeout())
            stuck = [rank for rank in range(jax.process_count()) if rank not in begun]
            if stuck:  # they would hang the save too
                why = f"process {some_of(stuck)} did not answer within {_timeout():g} s"
                print(f"jzero: SIGTERM: stopping without a checkpoint: {why}", file=sys.stderr, flush=True)
                os._exit(128 + signal.SIGTERM)
            _last = max(map(int, begun.values()))
