"""The thread that waits for the devices: in their order, and whatever fails."""

import queue
import subprocess
import sys
import threading
import time

import jax.numpy as jnp
import numpy as np
import pytest

from jzero.run import result_waiter
from jzero.run.clock import DEVICE, EVALUATION
from jzero.run.result_waiter import ResultWaiter


class Waits:
    """A result that becomes ready when the test sets `there`; JAX's device_get converts it."""

    def __init__(self, value):
        self.value, self.there = value, threading.Event()

    def __array__(self, dtype=None, copy=None):
        self.there.wait()
        return np.asarray(self.value)


def test_results_come_in_the_order_of_the_devices():
    waiter, found, metric = ResultWaiter(), [], Waits(0.5)
    waiter.give({"loss": jnp.float32(2.0)}, lambda values, end: found.append(float(values["loss"])))
    waiter.begin(DEVICE, metric)
    waiter.give({"loss": metric}, lambda values, end: found.append(float(values["loss"])))
    waiter.give(None, lambda values, end: found.append(values))
    assert waiter.busy()
    metric.there.set()
    waiter.close()
    assert found == [2.0, 0.5, None]
    assert not waiter.busy()


def test_the_time_of_the_devices_belongs_to_what_they_run(monkeypatch):
    """A step and an evaluation, given at once: the devices run one after the other."""
    now, step, evaluation = [0.0], Waits(1.0), Waits(2.0)
    monkeypatch.setattr(result_waiter.time, "perf_counter", lambda: now[0])
    waiter, ended = ResultWaiter(), queue.SimpleQueue()
    now[0] = 10.0
    waiter.begin(DEVICE, step)
    waiter.give(step, lambda values, end: ended.put(end))
    waiter.begin(EVALUATION, evaluation)
    waiter.give(evaluation, lambda values, end: ended.put(end))
    assert waiter.worked(8.0, 11.0) == {DEVICE: 1.0}
    now[0] = 13.0
    step.there.set()
    assert ended.get(timeout=60) == 13.0
    assert waiter.worked(11.0, 14.0) == {DEVICE: 2.0, EVALUATION: 1.0}
    now[0] = 15.0
    evaluation.there.set()
    assert ended.get(timeout=60) == 15.0
    assert waiter.worked(14.0, 17.0) == {EVALUATION: 1.0}
    assert waiter.worked(17.0, 18.0) == {}
    waiter.close()


def test_a_result_that_fails_ends_nothing():
    waiter, found = ResultWaiter(), []
    deleted = jnp.ones(2)
    deleted.delete()
    waiter.begin(DEVICE, deleted)
    waiter.give({"loss": deleted}, lambda values, end: found.append(values))
    waiter.give(jnp.float32(3.0), lambda values, end: found.append(float(values)))
    waiter.close()
    assert found == [3.0]
    assert not waiter.busy()


@pytest.mark.parametrize("error", [ValueError, SystemExit])
def test_what_shows_a_step_and_fails_ends_nothing(error):
    def fail(values, end):
        raise error("no")

    def follow():
        waiter.give(1.0, fail)
        waiter.give(1.0, lambda values, end: found.append(values))
        waiter.close()

    waiter, found = ResultWaiter(), []
    with pytest.warns(RuntimeWarning, match=f"a step is not shown or recorded: {error.__name__}: no"):
        follow()
    assert found == [1.0]


def test_a_step_that_never_ends_is_waited_for_once(monkeypatch):
    """As after the death of a peer, whose collective never completes."""
    monkeypatch.setattr(result_waiter, "_limit", lambda: 0.2)
    waiter, never = ResultWaiter(), Waits(0.0)
    waiter.give(never, print)
    waiter.settle()
    began = time.monotonic()
    monkeypatch.setattr(result_waiter, "_limit", lambda: 600.0)
    waiter.settle()
    waiter.close()
    assert time.monotonic() - began < 300.0
    never.there.set()


AFTER_AN_EXCEPTION = """
import time, jax
from jzero.run.result_waiter import ResultWaiter
jax.device_get = lambda results: (time.sleep(0.5), print("fetched", flush=True), {})[2]
waiter = ResultWaiter()
waiter.give({}, print)
raise ValueError("bad luck")
"""


@pytest.mark.parametrize(("processes", "found"), [(1, [4.0]), (2, [])])
def test_only_a_peer_may_keep_the_last_step_for_ever(processes, found, monkeypatch):
    """Alone, its end comes, however long it takes; a display and a ledger without it would miss it."""
    monkeypatch.setattr(result_waiter, "LAST_STEP_TIMEOUT", 0.1)
    monkeypatch.setattr(result_waiter.jax, "process_count", lambda: processes)
    waiter, seen, last = ResultWaiter(), [], Waits(4.0)
    waiter.give(last, lambda values, end: seen.append(float(values)))
    timer = threading.Timer(0.5, last.there.set)
    timer.start()
    waiter.settle()
    assert seen == found
    timer.join()
    waiter.close()


def test_a_program_that_fails_waits_for_the_thread():
    """Python would stop the thread inside of JAX, and abort."""
    done = subprocess.run([sys.executable, "-c", AFTER_AN_EXCEPTION], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stdout.startswith("fetched\n")
