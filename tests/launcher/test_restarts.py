"""Which failures are restarted: not a ConfigError, and not the same failure at the same step twice."""

from collections import deque
from types import SimpleNamespace

import pytest
from helpers.sampling import keep
from workers import CPU

from jzero.distributed.last_words import CONFIG, HUNG, SAVED, UNAVAILABLE
from jzero.launcher.failure import Failure, Progress
from jzero.launcher.restarts import outage_of, symptom_of, why_not


def attempt(code, *lines, steps=-1, age=1.0, culprit=0):
    """An attempt whose rank `culprit` has failed."""
    progress = Progress()
    progress.note({"0": (steps, steps + 1, "S")})
    failure = Failure(code, "", 10.0, 12.5, culprit)
    return SimpleNamespace(failure=failure, lines={0: deque(lines)}, progress=progress, age=lambda: age)


ERROR = "jzero: after step 7: ValueError: bad"


@pytest.mark.parametrize(
    ("first", "second", "stops"),
    [
        (attempt(1, ERROR, steps=5), attempt(1, ERROR, steps=6), True),  # the line has the step; the count is late
        (attempt(1, ERROR), attempt(1, ERROR.replace("7", "8")), False),
        (attempt(1, "a <X at 0x7f01>", steps=3), attempt(1, "a <X at 0x55aa>", " ", steps=3), True),
        (attempt(1, "a", steps=3), attempt(1, "a", steps=4), False),
        (attempt(1, "a", steps=3), attempt(2, "a", steps=3), False),
        (attempt(1, "a", steps=3), attempt(1, "b", steps=3), False),
        (attempt(3), attempt(3), True),
        (attempt(3, age=100), attempt(3, age=100), False),  # nobody knows at which step
        (attempt(137, ERROR), attempt(137, ERROR), False),
        (attempt(139, ERROR), attempt(139, ERROR), True),
        (attempt(UNAVAILABLE, ERROR), attempt(UNAVAILABLE, ERROR), False),
        (attempt(SAVED), attempt(SAVED), False),
        (attempt(HUNG, steps=3, culprit=None), attempt(HUNG, steps=3, culprit=None), False),
        (attempt(1, ERROR), attempt(CONFIG), True),
    ],
)
def test_the_same_failure_twice(first, second, stops):
    assert bool(why_not(symptom_of(second, second.failure), symptom_of(first, first.failure))) == stops


def test_the_outage_that_the_ledger_records():
    """A rank that ended itself has said why in its last line; one that was killed has not."""
    failed = attempt(1, "jzero: after step 7: ValueError: bad", " ")
    exited = failed.failure._replace(what="rank 0 exited with code 1 first, after 9 s; its last lines:\n    more")
    words = "rank 0 exited with code 1 first, after 9 s: jzero: after step 7: ValueError: bad"
    assert outage_of(failed, exited, "a 0") == ("a 0", 10.0, 12.5, 1, words)
    what = "rank 0 was killed by signal 9 (SIGKILL) first, after 9 s; its last lines: none"
    killed = failed.failure._replace(code=137, what=what)
    assert outage_of(failed, killed, "a 0").reason == "rank 0 was killed by signal 9 (SIGKILL) first, after 9 s"


WORKER = """
import os, sys, jzero
from jzero.distributed import last_words
open("attempts", "a").write("x")
jzero.init_distributed()
what = sys.argv[-2]
if what == "config":
    jzero.Config.load({"train_batch_size": -1})
if what == "step":
    last_words.record_step(41)
    raise ValueError("bad luck")
raise jzero.errors.LostProcessError("process 1 was lost")
"""


@pytest.mark.processes
@pytest.mark.parametrize(
    ("what", "code", "attempts"), keep([("config", 78, 1), ("step", 1, 2), ("lost", 69, 4)], [("step", 1, 2)])
)
def test_restarts_that_would_not_help(start, tmp_path, what, code, attempts):
    job = start(*CPU, 1, "--max_restarts", 3, "worker.py", what, program=WORKER).ended(code)
    assert (tmp_path / "attempts").read_text() == "x" * attempts
    evidence = {
        "config": "no restart after attempt 1 of 4: exit code 78: the config, the model or a call is wrong",
        "step": "no restart after attempt 2 of 4: it failed like the attempt before, at the same step: exit code 1; "
        "last line: jzero: after step 41: ValueError: bad luck",
        "lost": "restart 3 of 3",
    }
    assert evidence[what] in job.errors
