"""The thread that waits for the devices: in their order, and whatever fails."""

import queue
import subprocess
import sys
import threading

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


def test_the_time_of_the_devices_belongs_to_what_they_run(monkeypatch):
    """A step and an evaluation, given at once: the devices run one after the other, and their results come in order."""
    now, step, evaluation = [0.0], Waits(1.0), Waits(2.0)
    monkeypatch.setattr(result_waiter.time, "perf_counter", lambda: now[0])
    waiter, ended = ResultWaiter(), queue.SimpleQueue()
    now[0] = 10.0
    for part, result in ((DEVICE, step), (EVALUATION, evaluation)):
        waiter.begin(part, result)
        waiter.give(result, lambda value, end: ended.put((float(value), end)))
    waiter.give(None, lambda values, end: ended.put(values))
    assert waiter.worked(8.0, 11.0) == {DEVICE: 1.0}
    now[0] = 13.0
    step.there.set()
    assert ended.get(timeout=60) == (1.0, 13.0)
    assert waiter.worked(11.0, 14.0) == {DEVICE: 2.0, EVALUATION: 1.0}
    assert waiter.busy()
    now[0] = 15.0
    evaluation.there.set()
    assert ended.get(timeout=60) == (2.0, 15.0)
    assert ended.get(timeout=60) is None
    assert waiter.worked(14.0, 17.0) == {EVALUATION: 1.0}
    assert waiter.worked(17.0, 18.0) == {}
    assert not waiter.busy()
    waiter.close()


@pytest.mark.parametrize("error", [ValueError, SystemExit])
def test_what_fails_ends_nothing(error):
    """A result, or what shows it."""

    def fail(values, end):
        raise error("no")

    def follow():
        waiter.begin(DEVICE, deleted)
        for result, then in ((deleted, found.append), (1.0, fail), (1.0, lambda values, end: found.append(values))):
            waiter.give(result, then)
        waiter.close()

    waiter, found, deleted = ResultWaiter(), [], jnp.ones(2)
    deleted.delete()
    with pytest.warns(RuntimeWarning) as warned:
        follow()
    words = f"a step is not shown or recorded: {error.__name__}: no"
    assert [str(one.message) for one in warned if "step" in str(one.message)] == [words]
    assert found == [1.0]
    assert not waiter.busy()


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


AFTER_AN_EXCEPTION = """
import time, jax
from jzero.run.result_waiter import ResultWaiter
jax.device_get = lambda results: (time.sleep(0.5), print("fetched", flush=True), {})[2]
waiter = ResultWaiter()
waiter.give({}, print)
raise ValueError("bad luck")
"""


def test_a_program_that_fails_waits_for_the_thread():
    """Python would stop the thread inside of JAX, and abort."""
    done = subprocess.run([sys.executable, "-c", AFTER_AN_EXCEPTION], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stdout.startswith("fetched\n")
