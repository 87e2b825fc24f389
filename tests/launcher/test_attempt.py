"""The attempt as a state machine: events go in, and what it says and tells the agents comes out. Nothing is started."""

import signal
from types import SimpleNamespace

import pytest
from jobs import ROOT

from jzero.launcher.attempt import TRANSITIONS, Attempt, AttemptEvent, State
from jzero.launcher.job import Process

STOP = {"stop": 4.0}


class Driven:
    """An attempt of `ranks` processes, one a host, with a clock that `at` sets."""

    def __init__(self, ranks=3, hang_timeout=0, grace=30):
        self.now, self.told, self.printed, self.kills = 100.0, [], [], 0
        processes = [Process(rank, 0, f"h{rank}", [0], {}) for rank in range(ranks)]
        hosts = [process.host for process in processes]
        self.job = SimpleNamespace(
            options=SimpleNamespace(hang_timeout=hang_timeout, grace=grace), processes=processes, hosts=hosts,
            hosts_here=hosts, of=lambda host: [process for process in processes if process.host == host],
        )  # fmt: skip
        self.attempt = Attempt(self.job, self.put, self.tell, self.kill, lambda: self.now)
        self.attempt.started(self.job)

    def put(self, line, number):
        self.printed.append(line)

    def tell(self, **message):
        self.told.append(message)

    def kill(self):
        self.kills += 1

    def ends(self, rank, code):
        """End a process; its last output has been read."""
        self.attempt.receive("died", [rank, code])
        self.attempt.receive("exit", [rank, code])

    def at(self, seconds):
        """Let the clock show so many seconds after the start."""
        self.now = 100.0 + seconds
        self.attempt.tick()


@pytest.fixture
def driven():
    return Driven()


def test_the_manual_shows_the_table():
    page = (ROOT / "docs" / "clusters.md").read_text()
    events = page.partition("| state | ")[2].partition(" |\n")[0].split(" | ")
    assert events == [event.name.lower() for event in AttemptEvent]
    for state in State:
        row = page.partition(f"\n| {state.name.lower()}: {state.value} |")[2].partition("\n")[0].split("|")[:-1]
        after = [TRANSITIONS.get((state, event), (None, None))[0] for event in AttemptEvent]
        assert [cell.strip() for cell in row] == [one.name.lower() if one else "" for one in after]


def test_the_first_failure_counts(driven, capsys):
    """The first that died is named, though another one's output ends earlier."""
    driven.attempt.receive("out", [1, 2, "the cause"])
    driven.attempt.receive("died", [1, 3])
    driven.ends(2, 9)
    assert driven.attempt.state is State.RUNNING
    driven.attempt.receive("exit", [1, 3])
    driven.ends(0, -15)
    assert (driven.attempt.state, driven.told) == (State.FAILED, [STOP])
    assert driven.attempt.verdict() == 3
    assert capsys.readouterr().err == (
        "jzero: rank 1 on h1 exited with code 3 first, after 0 s; its last lines:\n    the cause\n"
    )


def test_what_does_not_stop_is_killed(driven):
    driven.ends(1, -9)
    driven.at(5.9)
    assert driven.kills == 0
    for seconds, kills in ((6.1, 1), (60, 1), (67, 2)):
        driven.at(seconds)
        assert (driven.attempt.state, driven.kills) == (State.KILLED, kills)
    assert driven.attempt.verdict() == 137


def test_a_rank_that_saved_gives_the_others_the_grace(driven):
    driven.ends(0, 75)
    assert driven.told == [{"stop": 30}]
    assert driven.attempt.verdict() == 75


def test_a_lost_host(driven):
    driven.attempt.lose("h1", "no route (exit code 255)")
    assert sorted(driven.attempt.left) == [0, 2]
    assert driven.attempt.failure.what == "lost h1: no route (exit code 255)"
    driven.attempt.lose("h2", "")
    assert sorted(driven.attempt.left) == [0]


@pytest.mark.parametrize(("codes", "verdict"), [([75, 75, 75], 75), ([75, 75, -15], 143), ([0, 0, 0], 143)])
def test_a_signal(driven, codes, verdict):
    driven.attempt.interrupt(signal.SIGTERM)
    assert driven.told == [{"signal": 15}]
    assert driven.printed == [
        "jzero: signal 15 (SIGTERM): the scripts have 30 s to end; send it again to kill them now"
    ]
    for rank, code in enumerate(codes):
        driven.ends(rank, code)
    assert (driven.attempt.state, driven.attempt.verdict()) == (State.INTERRUPTED, verdict)


def test_a_second_signal(driven):
    driven.attempt.interrupt(signal.SIGINT)
    driven.attempt.interrupt(signal.SIGTERM)
    assert (driven.attempt.state, driven.kills) == (State.KILLED, 1)
    assert driven.attempt.verdict() == 130


def test_a_rank_that_fails_after_ctrl_c(driven):
    """The others may wait for it for ever, so they have 8 s; one that the signal ends is no failure."""
    driven.attempt.interrupt(signal.SIGINT)
    driven.ends(0, -2)
    driven.ends(1, 3)
    first = "rank 1 was the first to fail after signal 2 (SIGINT): it exited with code 3; the others have 8 s"
    assert driven.printed[1:] == [f"jzero: {first}"]
    driven.at(5.1)
    driven.at(8.1)
    assert driven.printed[2:] == ["jzero: still running: rank 2 (rank 1 exited with code 3)", "jzero: killed: rank 2"]


def test_a_signal_after_a_failure(driven):
    """It is passed on, and no restart follows."""
    driven.ends(1, 3)
    driven.attempt.interrupt(signal.SIGTERM)
    assert (driven.attempt.state, driven.told) == (State.INTERRUPTED, [STOP, {"signal": 15}])
    driven.at(29)
    assert driven.kills == 0
    driven.at(31)
    assert (driven.kills, driven.attempt.verdict()) == (1, 143)


def test_who_still_runs(driven):
    driven.at(1000)
    driven.ends(0, 0)
    driven.at(1019)
    assert driven.printed == []
    driven.at(1021)
    driven.at(2000)
    assert driven.printed == ["jzero: still running: rank 1, 2 (the other ranks succeeded)"]


def test_a_hang():
    """The processes print their stacks; then the job ends, and names the rank that has begun the fewest steps."""
    driven = Driven(hang_timeout=60)
    driven.attempt.receive("status", {"0": [5, 6, "S"], "1": [5, 5, "S"], "2": [-1, -1, "S"]})
    driven.at(59)
    assert driven.told == []
    driven.at(61)
    driven.at(62)
    assert driven.told == [{"dump": True}]
    driven.at(62.6)
    failure = driven.attempt.failure
    assert (driven.told[1:], failure.code) == ([STOP], 124)
    assert failure.what.endswith("rank 0 5 of 6, rank 1 5 of 5; look at rank 1 first (stacks above)")
    assert failure.noticed - failure.died == pytest.approx(62.6)
