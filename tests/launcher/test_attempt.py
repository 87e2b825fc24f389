"""The attempt as a state machine, and which failures are restarted: events go in, and nothing is started."""

import asyncio
import os
import signal
import time
from collections import deque
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers.stored_cases import check_cases
from jobs import CPU, ROOT

from jzero.distributed.last_words import CONFIG, UNAVAILABLE, read_outages
from jzero.errors import ConfigError
from jzero.launcher import restarts
from jzero.launcher.attempt import TRANSITIONS, Attempt, AttemptEvent, State
from jzero.launcher.failure import Failure, Progress
from jzero.launcher.job import Process, make_job
from jzero.launcher.options import parse
from jzero.launcher.restarts import symptom_of, why_not


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


def test_the_manual_shows_the_table():
    page = (ROOT / "docs" / "clusters.md").read_text()
    events = page.partition("| state | ")[2].partition(" |\n")[0].split(" | ")
    assert events == [event.name.lower() for event in AttemptEvent]
    for state in State:
        row = page.partition(f"\n| {state.name.lower()}: {state.value} |")[2].partition("\n")[0].split("|")[:-1]
        after = [TRANSITIONS.get((state, event), (None, None))[0] for event in AttemptEvent]
        assert [cell.strip() for cell in row] == [one.name.lower() if one else "" for one in after]


def test_what_an_attempt_says_and_does(pytestconfig, capsys):
    """Each event brings a state, messages to the agents, lines, kills, or a failure; at the end there is a verdict."""

    def shown(driven):
        attempt, failure = driven.attempt, driven.attempt.failure
        return {
            "state": attempt.state.name, "left": sorted(attempt.left), "told": [*driven.told], "kills": driven.kills,
            "printed": [*driven.printed],
            "failure": failure and [failure.code, failure.what, round(failure.noticed - failure.died, 3)],
        }  # fmt: skip

    def outcome(case):
        driven, found = Driven(**case.get("job", {})), []
        for event, *arguments in case["events"]:
            driven.told, driven.printed = [], []
            before = shown(driven)
            getattr(driven if hasattr(driven, event) else driven.attempt, event)(*arguments)
            after = shown(driven)
            found.append({name: value for name, value in after.items() if value != before[name]})
        return [*found, driven.attempt.verdict(), capsys.readouterr().err]

    check_cases(Path(__file__).with_name("attempts.jsonl"), outcome, pytestconfig)


def attempt(code, lines=(), steps=-1, age=1.0, culprit=0):
    """An attempt whose rank `culprit` has failed."""
    progress = Progress()
    progress.note({"0": (steps, steps + 1, "S")})
    failure = Failure(code, "", 10.0, 12.5, culprit)
    return SimpleNamespace(failure=failure, lines={0: deque(lines)}, progress=progress, age=lambda: age)


ERROR = "jzero: after step 7: ValueError: bad"


def test_the_same_failure_twice(pytestconfig):
    """After two attempts: why a third would fail like them, or ""."""

    def outcome(case):
        first, second = (attempt(**case[name]) for name in ("first", "second"))
        return why_not(symptom_of(second, second.failure), symptom_of(first, first.failure))

    check_cases(Path(__file__).with_name("failures.jsonl"), outcome, pytestconfig)


class Attempts:
    """Runs a job whose attempts end as told, without processes; `printed` is what the command says.

    An end is (exit code, the last line of rank 0), a ConfigError, or either after a signal: {"signal": end}.
    """

    def __init__(self, monkeypatch, capsys):
        self.capsys, self.shared = capsys, []
        monkeypatch.setattr(restarts, "PAUSE", 0.3)
        monkeypatch.setattr(restarts, "Runner", self.runner)

    def run(self, max_restarts, *ends):
        self.ends, options = iter(ends), parse(["--max_restarts", str(max_restarts), *CPU, "1", "--no_python", "true"])
        signals = SimpleNamespace(to=lambda handler: setattr(self, "signal", handler))
        self.began = time.monotonic()
        code = asyncio.run(restarts.run_attempts(make_job(options, os.environ, "/"), signals))
        assert not [*self.ends]
        self.printed = self.capsys.readouterr().err
        return code

    def runner(self, job):
        self.shared.append(job.shared)
        made = Attempt(job, None, lambda **message: None, None)
        made.say = lambda text: None

        async def run():
            if late := isinstance(end := next(self.ends), dict):
                end = end["signal"]
            if late:
                asyncio.get_running_loop().call_later(0.05, self.signal, signal.SIGTERM)
            if isinstance(end, ConfigError):
                raise end
            await asyncio.sleep(0.1 * late)
            code, line = end
            made.started(job)
            made.lines[0].append(line)
            if code:
                made.fail(code, f"rank 0 exited with code {code} first; its last lines: {line}", rank=0)
            return code

        return SimpleNamespace(attempt=made, run=run)


@pytest.fixture
def attempts(monkeypatch, capsys):
    return Attempts(monkeypatch, capsys)


AWAY = ConfigError("nothing was started: no route to host")


def test_a_restart(attempts):
    """Each attempt has a name of its own, and the outages before it."""
    assert attempts.run(2, (3, "a"), (137, "b"), (0, "")) == 0
    assert attempts.printed == "jzero: restart 1 of 2\njzero: restart 2 of 2\n"
    names = [shared["JZERO_ATTEMPT"].split() for shared in attempts.shared]
    assert len({command for command, _ in names}) == 1
    assert [number for _, number in names] == ["0", "1", "2"]
    assert read_outages(attempts.shared[0]) == []
    exited, killed = read_outages(attempts.shared[2])  # one that was killed has not said why in its last line
    assert exited[0] == attempts.shared[0]["JZERO_ATTEMPT"]
    assert exited[3:] == (3, "rank 0 exited with code 3 first: a")
    assert killed[3:] == (137, "rank 0 exited with code 137 first")
    assert exited.died <= exited.noticed <= killed.died
    assert attempts.run(0, (3, "a")) == 3
    assert attempts.printed == ""


def test_a_restart_for_which_a_host_is_away(attempts):
    """It counts as a restart, the next one waits for the host, and the exit code is the script's."""
    assert attempts.run(2, (3, ""), AWAY, (0, "")) == 0
    assert time.monotonic() - attempts.began > 0.3
    assert attempts.printed.count("no route to host") == 1
    assert "no route to host" in attempts.shared[2]["JZERO_OUTAGES"]
    assert attempts.run(1, (3, ""), AWAY) == 3
    with pytest.raises(ConfigError, match="no route to host"):  # the first attempt is no restart
        attempts.run(1, AWAY)


def test_a_signal_ends_the_restarts(attempts):
    assert attempts.run(2, (3, ""), {"signal": AWAY}) == 128 + signal.SIGTERM
    assert attempts.run(2, {"signal": (3, "")}) == 3


def test_restarts_that_would_not_help(attempts):
    assert attempts.run(3, (CONFIG, "")) == CONFIG
    why = "exit code 78: the config, the model or a call is wrong, and another start would not change it"
    assert attempts.printed == f"jzero: no restart after attempt 1 of 4: {why}\n"
    assert attempts.run(3, (1, ERROR), (1, ERROR)) == 1
    why = f"it failed like the attempt before, at the same step: exit code 1; last line: {ERROR}"
    assert attempts.printed == f"jzero: restart 1 of 3\njzero: no restart after attempt 2 of 4: {why}\n"
    assert attempts.run(3, *[(UNAVAILABLE, "process 1 was lost")] * 4) == UNAVAILABLE
    assert "restart 3 of 3" in attempts.printed
