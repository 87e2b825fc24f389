"""The live panel: what it says, when it is there, and what it leaves behind in a real terminal."""

import contextlib
import io
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import jax
import pytest
from helpers.engines import Net, config
from helpers.steps import mesh
from rich.console import Console

import jzero
from jzero.display import live, slow_work
from jzero.run import panel as panel_module
from jzero.run.clock import DATA, DEVICE, SCRIPT, START, Clock
from jzero.run.panel import Panel, PanelFacts, draw_panel, make_panel
from jzero.run.speed import CompletedSteps, Speed, Totals
from jzero.step.batch import Amount

TESTS = Path(__file__).parents[1]
FACTS = PanelFacts(
    step=250, total=1000, metrics={"loss": 2.34567, "accuracy": 0.51234, "lr": 3e-4, "grad_norm": 0.4125}, skipped=2,
    scaled=True, speed=Speed(512.4, 524697.6, 0.0625, 0.4123), left=46.9, waits={DATA: 0.012, SCRIPT: 0.1},
    memory=(61 * 2**30, 79 * 2**30), elapsed=125.0, work="saving a checkpoint, 12 s",
)  # fmt: skip


def test_the_drawing_of_a_step():
    """Of the first one nothing is known, and CPU devices count no memory."""

    def drawing(**changes):
        console = Console(file=io.StringIO(), width=90)
        console.print(draw_panel(FACTS._replace(**changes)))
        return console.file.getvalue()

    text = drawing(metrics=FACTS.metrics | {"loss_scale": 1024.0})
    for part in (
        "step 250 of 1,000", "2 min 5 s, 46.9 s left", "saving a checkpoint, 12 s", "loss 2.3457", "accuracy 0.5123",
        "lr 3.000e-04", "grad norm 0.412", "loss scale 1024", "skipped 2", "step 62.5 ms", "samples/s 512.4",
        "tokens/s 524,698", "MFU 41.2 %", "waits for data 1.2 %", "waits for script 10.0 %",
        "memory 61.0 GiB of 79.0 GiB",
    ):  # fmt: skip
        assert part in text
    without = drawing(total=None, left=None, metrics={"a\x1b[2J": 1.0, "loss_scale": 1.0}, scaled=False, speed=None)
    assert "step 250 ─" in without
    assert r"a\x1b[2J" in without
    assert not [words for words in ("left", "\x1b", "loss scale", "samples") if words in without]


def test_a_panel_reads_its_run(monkeypatch):
    monkeypatch.setattr(live, "kind", lambda: live.TERMINAL)
    stats = {"bytes_in_use": 1, "peak_bytes_in_use": 5, "bytes_limit": 9}
    devices = [SimpleNamespace(memory_stats=lambda peak=n: stats | {"peak_bytes_in_use": peak}) for n in (4, 5)]
    schedule = {"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 40, "warmup_num_steps": 5}}}
    step = jzero.make_train_step(Net(), config(**schedule), mesh=mesh())
    monkeypatch.setattr(jax, "local_devices", lambda: devices)
    finished, clock = CompletedSteps(), Clock()
    clock.total = {START: 5.0, DATA: 1.0, DEVICE: 3.0}
    facts = make_panel(step, lambda: False, finished, clock)._facts
    assert facts()[:2] == (0, 40)
    finished.add(7, Amount(8, 80), {"loss": 0.5, "skipped": 1.0}, 10.0)
    assert finished.totals == Totals(1, 8, 80, 1, 10.0)
    found = facts()
    assert (found.step, found.total, found.skipped, found.memory) == (7, 40, 1, (5, 9))
    assert (found.metrics["loss"], found.waits, found.scaled) == (0.5, {DATA: 0.25}, False)
    finished.add(40, Amount(4), {"loss": 0.5}, 11.0)
    assert finished.step_s == 1.0
    assert finished.totals == Totals(2, 12, None, 1, 11.0)
    assert (facts().total, facts().left) == (40, 0)
    finished.add(41, Amount(8), {"loss": 0.5}, 12.0)
    assert (facts().step, facts().total, facts().left) == (41, None, None)  # the run goes on after its schedule


class Shown:
    """A display that records what happens to it."""

    def __init__(self, render):
        self.events, self.left = [], False
        Shown.last = self

    def refresh(self):
        self.events.append("refresh")

    def is_left(self):
        return self.left

    def stop(self, keep):
        self.events.append(f"stop {keep}")


@pytest.fixture
def panel(monkeypatch):
    """A panel whose thread draws nothing by itself."""
    monkeypatch.setattr(panel_module, "PERIOD", 1e6)
    made = Panel(lambda: FACTS, lambda: False, Shown)
    yield made
    made.stop(keep=False)
    assert Panel._shown is None


def test_a_panel_comes_with_a_step_and_goes_at_the_end(panel):
    """One at a time; in a notebook it follows to the next cell."""
    other = Panel(lambda: FACTS, lambda: False, Shown)
    before = slow_work._taken
    panel.step()
    first = Shown.last
    assert slow_work._taken == before + 1
    panel.step()
    other.step()  # another run's
    assert Shown.last is first
    panel.stop(keep=True)
    panel.stop(keep=True)
    assert first.events == ["stop True"]
    assert slow_work._taken == before
    other.step()
    second = Shown.last
    second.left = True
    other.step()
    assert second.events == ["stop True"]
    assert Shown.last is not second is not first
    other.stop(keep=False)


def test_a_panel_leaves_the_screen_to_a_bar_and_to_a_traceback(panel, monkeypatch):
    """And to the script, when neither it nor the devices work."""
    told, now = [], [100.0]
    monkeypatch.setattr(sys, "excepthook", lambda *error: told.append([*Shown.last.events, error[0]]))
    monkeypatch.setattr(panel_module.time, "monotonic", lambda: now[0])
    hook = sys.excepthook
    panel.step()
    assert not panel.is_idle()
    now[0] += panel_module.IDLE + 1
    assert panel.is_idle()
    panel._busy = lambda: True
    assert not panel.is_idle()
    sys.excepthook(ValueError, ValueError("no"), None)
    assert told == [["stop True", ValueError]]
    assert sys.excepthook is hook
    shown, tqdm = Shown.last, pytest.importorskip("tqdm").tqdm
    with tqdm(total=3, file=io.StringIO()):
        panel.step()
        assert Shown.last is shown
    panel.step()
    assert Shown.last is not shown


@pytest.mark.parametrize("late", [False, True])
def test_a_display_that_fails_leaves_the_run_alone(late, panel, capsys, monkeypatch):
    """At once or later, its panel goes for good and gives back what it has taken."""
    opened, closed = [], Mock(side_effect=OSError("closed"))

    def broken(render):
        opened.append(Shown(render) if late else closed())
        opened[0].refresh = opened[0].stop = closed
        return opened[0]

    before = None, slow_work._taken, sys.excepthook
    monkeypatch.setattr(panel, "_open", broken)
    monkeypatch.setattr(panel_module, "PERIOD", 0.0)
    panel.step()
    if late:
        assert panel._done.wait(60.0)  # its thread has refreshed it
    with panel._lock:
        assert (Panel._shown, slow_work._taken, sys.excepthook) == before
    panel.step()
    assert len(opened) == late
    assert capsys.readouterr().err == "jzero: no panel any more: closed\n"


def test_where_a_panel_is_shown(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    def check(kind, auto):
        assert live.kind() == kind
        assert [bool(live.opener(wanted)) for wanted in ("auto", True, False)] == [auto, True, False]

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stdout", Terminal())
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    check(live.PLAIN, False)
    monkeypatch.setattr(sys, "stderr", Terminal())
    check(live.TERMINAL, True)
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    check(live.PLAIN, False)  # a prompt
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: SimpleNamespace(kernel=1)))
    check(live.NOTEBOOK, True)


def test_a_notebook_has_one_output_that_changes(monkeypatch):
    shell, shown = SimpleNamespace(kernel=1, execution_count=3), []
    handle = SimpleNamespace(update=shown.append)
    ipython = SimpleNamespace(get_ipython=lambda: shell, display=lambda x, display_id: shown.append(x) or handle)
    for name in ("IPython", "IPython.display"):
        monkeypatch.setitem(sys.modules, name, ipython)
    display = live.Notebook(lambda: len(shown))
    display.refresh()
    assert (shown, display.is_left()) == ([0, 1], False)
    shell.execution_count = 4
    assert display.is_left()


IN_A_TERMINAL = """
import sys
import jax, numpy as np
from rich.text import Text
jax.config.update("jax_platforms", "cpu")
import jzero
from helpers.regression import Regression
from jzero.display.live import Terminal

states, errors = iter(range(1000)), sys.stderr
def open_terminal():
    return Terminal(lambda: Text(f"<state {next(states)}>"))
shown = open_terminal()
print(f"answer <{input('a question: ')}>")
assert shown.is_left()
shown.refresh()
print("after it")
shown.stop(keep=False)
variable, shown = "of the script", open_terminal()
breakpoint()
shown.stop(keep=False)
assert repr(input) == "<built-in function input>"
assert sys.stderr is errors
print("end of the prompts")

config = {"train_batch_size": 8, "optimizer": {"type": "Adam"}, "steps_per_print": 2,
          "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 10, "warmup_num_steps": 2}}}
engine, *_ = jzero.initialize(model=Regression(), config=config)
for i in range(3):
    engine.train_batch({"x": np.ones((8, 3), np.float32), "y": np.ones(8, np.float32)})
    print(f"line {i} of the script")
"""


def run_in_terminal(program, typed):
    """Run a program in a pseudo-terminal where somebody types ahead; return what it writes there."""
    terminal, its_end = os.openpty()
    program = [sys.executable, "-c", program]
    env = os.environ | {"TERM": "xterm", "COLUMNS": "80", "LINES": "24", "PYTHONPATH": f"{TESTS}:{TESTS.parent}"}
    child = subprocess.Popen(program, stdin=its_end, stdout=its_end, stderr=its_end, env=env)
    os.close(its_end)
    os.write(terminal, typed)
    written = b""
    with contextlib.suppress(OSError):  # Linux: the other end is closed
        while part := os.read(terminal, 4096):
            written += part
    os.close(terminal)
    assert child.wait() == 0
    return written.decode()


@pytest.mark.processes
def test_a_terminal_shows_the_panel_and_is_clean_afterwards():
    """A prompt takes the panel away; otherwise the next state would be written over what is typed."""
    prompts, _, run = run_in_terminal(IN_A_TERMINAL, b"typed\np variable\nc\n").partition("end of the prompts")
    question, pdb = prompts.index("a question: "), prompts.index("(Pdb) ")
    assert "<state" in prompts[:question]
    assert "<state" not in prompts[question : prompts.index("after it")] + prompts[pdb:]
    assert "answer <typed>" in prompts
    assert "'of the script'" in prompts[pdb:]
    text = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", run).replace("\r", "")
    for words in ("step 3 of 10 ─", "step 2: loss ", *(f"line {i} of the script" for i in range(3))):
        assert words in text
    end = text[text.rindex("╰") :].splitlines()  # below the last panel there is the summary alone
    assert re.match(r"jzero: 3 steps in ", end[1])
    assert re.match(r"  24 samples; .*; last loss \d\.\d+; 0 skipped$", end[2])
    assert not any(border in line for line in end[3:] for border in "│╭")
    assert re.findall(r"\x1b\[\?25([hl])", run)[-1] == "h"  # the cursor
