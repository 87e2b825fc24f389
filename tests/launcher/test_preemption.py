"""SIGTERM among processes: which step is the last, against a stand-in for JAX's coordination service."""

import signal
import sys
import threading

import jax
import pytest

from jzero.distributed import preemption


class Service:
    """A coordination service: keys that are written once; no read waits, so a key that is missing is missed."""

    def __init__(self):
        self.keys, self.waits = {}, []  # milliseconds that reads would wait

    def key_value_set(self, key, value, allow_overwrite=False):
        if key in self.keys and not allow_overwrite:
            raise jax.errors.JaxRuntimeError("ALREADY_EXISTS")
        self.keys[key] = value

    def blocking_key_value_get(self, key, milliseconds):
        self.waits.append(milliseconds)
        return self.key_value_try_get(key)

    def key_value_try_get(self, key):
        if key not in self.keys:
            raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED")
        return self.keys[key]


@pytest.fixture
def service(monkeypatch):
    """Make this process rank 0 of 3 that has begun step 5 and received SIGTERM."""
    one = Service()
    monkeypatch.setattr(preemption._compat, "coordination_service", lambda: one)
    monkeypatch.setattr(preemption.os, "_exit", sys.exit)
    monkeypatch.setattr(jax, "process_count", lambda: 3)
    new = {"_begun": 5, "_last": None, "_signalled": threading.Event(), "_ending": threading.Event()}
    for name, value in new.items():
        monkeypatch.setattr(preemption, name, value)
    preemption._signalled.set()
    return one


def publish(service, rank, begun, monkeypatch):
    """Let another rank's script end after it has begun `begun` steps."""
    with monkeypatch.context() as there:
        there.setattr(jax, "process_index", lambda: rank)
        there.setattr(preemption, "_begun", begun)
        preemption._end(threading.Thread())


def test_the_last_step_is_the_highest(service, monkeypatch):
    """Two ranks' scripts have ended: nobody waits for them, and a later number of theirs does not count."""
    monkeypatch.setattr(threading.Thread, "join", lambda *_: None)
    publish(service, 1, 6, monkeypatch)
    publish(service, 2, 5, monkeypatch)
    publish(service, 2, 9, monkeypatch)
    preemption._agree_on_the_last()
    assert preemption._last == 6
    assert [preemption.reached(), preemption.reached()] == [False, True]
    assert "jzero/stop" in service.keys


def test_a_rank_that_does_not_answer(service, monkeypatch, capsys):
    monkeypatch.setenv("JZERO_GRACE", "0.9")
    service.key_value_set("jzero/begun/1", "5")
    with pytest.raises(SystemExit, match=str(128 + signal.SIGTERM)):
        preemption._agree_on_the_last()
    assert capsys.readouterr().err == (
        "jzero: SIGTERM: stopping without a checkpoint: process 2 did not answer within 0.3 s\n"
    )
    assert max(service.waits) <= 300  # milliseconds
    assert preemption._last is None
