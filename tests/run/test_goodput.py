"""The goodput of a run: its arithmetic is that of hand-made times."""

import pytest

from jzero.ledger.goodput import goodput


def record(kind, time, **fields):
    return {"kind": kind, "time": float(time), **fields}


def steps(first, begins, ends, **fields):
    """Step records; `fields` belong to the first."""
    numbers = range(first, first + len(ends))
    pairs = zip(numbers, begins, ends, strict=True)
    made = [record("step", b, step=n, samples=8 * n, rows=8, began=float(a), metrics={}) for n, a, b in pairs]
    made[0] |= fields
    return made


def started(began, time, new=False):
    return record("start", time, began=float(began), new=new)


def state(time, step, origin=None):
    return record("state", time, step=step, samples=8 * step, **{"from": origin})


def save(began, time, step):
    times = {"began": float(began), "stall": 1.0, "background": 1.0}
    return record("save", time, tag=f"global_step{step}", step=step, **times, bytes=9)


def failure(died, noticed, attempt):
    return record("failure", noticed, attempt=attempt, died=float(died), code=137, reason="killed")


def test_goodput_of_a_run_with_a_failure():
    """Times by hand: 100 s, 4 of 7 steps repeat."""
    records = [
        started(1000, 1004),  # start 4
        state(1006, 0),  # start 2 more
        # compiles from 1007 to 1017, runs until 1021; then 2 s each; a save of 1 s delays the third by 1 s; data 0.5
        *steps(1, [1007], [1021], compile=10.0),  # script 1, compile 10, first step 4 - 2, step 2
        *steps(2, [1021], [1023]),
        *steps(3, [1024.5], [1026.5], save=1.0, wait=0.5),
        save(1023, 1025, 2),
        *steps(4, [1026, 1028], [1028.5, 1030.5]),  # given ahead of time
        failure(1031, 1033, "a 0"),  # 0.5 s of a sixth step are lost, then 2 s until the notice
        started(1040, 1042),  # restart 7, start 2
        state(1045, 2, "/runs/global_step2"),  # restore 3; steps 3 to 5 no longer count
        *steps(3, [1045], [1050], compile=2.5),  # compile 2.5, then 2.5: 0.5 more than the median
        *steps(4, [1050, 1052, 1058], [1052, 1054, 1060], evaluation=0.0),  # the script takes 4 s before step 6
        save(1060, 1063, 6),
        record("end", 1064, step=6, reason="SIGTERM"),
        started(1096, 1096.5),  # stopped 33
        state(1098, 6, "/runs/global_step6"),  # restore 1.5
        *steps(7, [1099], [1100], compile_before=0.75),  # compile 0.75, script 0.25
    ]
    found = goodput(records)
    assert found.wall == 100
    assert found.lost == pytest.approx({
        "start": 4 + 2 + 2 + 0.5, "script": 1 + 4 + 0.25, "compile": 10 + 2.5 + 0.75, "first step": 2 + 0.5,
        "save": 1 + 3, "data": 0.5, "repeated steps": 0.5 + 6, "detect": 2, "restart": 7, "restore": 3 + 1.5,
        "stopped": 33,
    })  # fmt: skip
    assert found.steps == pytest.approx(2 + 2 + 2 + 2 + 2 + 2 + 1)  # steps 1, 2; 3 to 6; 7
    assert found.steps + sum(found.lost.values()) == pytest.approx(found.wall)
    assert found.share == pytest.approx(0.13)
    words = "goodput 13.0% of 1 min 40 s; lost: stopped 33.0%, compile 13.2%, start 8.5%, restart 7.0%"
    assert str(found).startswith(words)


def refused(began, **fields):
    """A start that a mistake ends 2 s later, without a state."""
    why = "ConfigError: the rank is 8, the checkpoint's is 4"
    return [started(began, began + 1) | fields, record("end", began + 2, step=0, reason=why)]


def begun(began):
    """A start of 1 s."""
    return [started(began, began + 1), state(began + 1, 0)]


FAILED = [failure(5, 5, "a 0"), failure(9, 10, "a 1")]
CLEAN = [*begun(0), *steps(1, [1, 2, 3], [2, 3, 4]), save(4.5, 5, 3), record("end", 7, step=3, reason="")]
AGAIN = [started(1000, 1001), state(1003, 3, "x"), *steps(4, [1003, 1004], [1004, 1005])]
ENDED = [*refused(40), started(102, 103), state(103, 1)]
CASES = {  # rule: (records, wall time, time of steps, the rest)
    "an attempt may repeat the failures before it; the time of one that wrote nothing is the restart's": (
        [*begun(0), *steps(1, [1, 2, 3], [2, 3, 4]), *FAILED, *begun(20), *steps(1, [21], [22]),
         *FAILED, failure(30, 90, "a 2"), started(100, 101), state(101, 1, "x"), *steps(2, [101], [102])],
        102, 1 + 1, {"start": 1 + 1 + 1, "repeated steps": 3 + 1 + 8, "restart": 15 + 10, "detect": 60},
    ),
    "a refused start counts as little": ([*CLEAN, *refused(500)], 5, 3, {"start": 1, "script": 0.5, "save": 0.5}),
    "as the time after a clean end": (
        [*refused(-90), *CLEAN, *refused(500), *refused(600), *AGAIN],
        10, 5, {"start": 2, "script": 0.5, "save": 0.5, "restore": 2},
    ),
    "that after SIGTERM counts": (
        [*begun(0), *steps(1, [1], [2]), record("end", 3, step=1, reason="SIGTERM"), *ENDED],
        103, 1, {"start": 1 + 1, "stopped": 100},
    ),
    "and after a kill": ([*begun(0), *steps(1, [1], [2]), *ENDED], 103, 1, {"start": 1 + 1, "stopped": 100}),
    "a start without a state counts if a launcher saw it fail": (
        [*refused(0, attempt="a 0"), failure(2, 4, "a 0"), *begun(7), *steps(1, [8], [9])],
        9, 1, {"start": 1 + 1, "repeated steps": 1, "detect": 2, "restart": 3},
    ),
    "clocks that differ give no negative time": (
        [*begun(10), *steps(1, [11], [12]), failure(5, 6, "a"), started(7, 8), state(9, 0)],
        2, 0, {"start": 1, "repeated steps": 1},
    ),
}  # fmt: skip


@pytest.mark.parametrize("rule", CASES)
def test_times_by_hand(rule):
    records, wall, of_steps, lost = CASES[rule]
    found = goodput(records)
    assert (found.wall, found.steps, found.lost) == (wall, of_steps, lost)
