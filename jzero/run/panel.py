"""A live panel on process 0: where the run is, how fast it is, and what it waits for."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from jzero.display import slow_work
from jzero.display.live import Display, bar_of_script, opener
from jzero.display.text_table import size_text
from jzero.distributed.machine import fullest_first
from jzero.errors import in_a_line, one_line
from jzero.ledger.goodput import duration
from jzero.loss import LOSS, STEP_METRICS
from jzero.run.clock import COMPILE, DATA, SCRIPT, START, Clock
from jzero.run.lines import scheduled_steps
from jzero.run.speed import CompletedSteps, Speed
from jzero.step.train_step import TrainStep

if TYPE_CHECKING:
    from rich.console import RenderableType

PERIOD = 0.5  # seconds between two states of the panel
IDLE = 10.0  # seconds without a step after which the panel goes away, so that the script has the screen


class PanelFacts(NamedTuple):
    """The figures in the panel.

    Attributes:
      step, total: of the newest step that the devices have finished, and of the run if it is known.
      metrics: of that step, by name.
      scaled: whether the loss is scaled (fp16).
      speed: of the last steps.
      left: seconds to the last step.
      waits: {part: share of the time} in which the devices wait.
      memory: peak bytes on the fullest device and its limit; None on CPU devices.
      elapsed: seconds since the engine was made.
      work: slow work that goes on, as "saving a checkpoint, 12 s".
    """

    step: int
    total: int | None
    metrics: Mapping[str, float]
    skipped: int
    scaled: bool
    speed: Speed | None
    left: float | None
    waits: Mapping[str, float]
    memory: tuple[int, int] | None
    elapsed: float
    work: str = ""


def fields(facts: PanelFacts) -> dict[str, str]:
    """List what the panel shows, by label."""
    m, speed = facts.metrics, facts.speed
    found = {LOSS: f"{m[LOSS]:.4f}"} if LOSS in m else {}
    found |= {one_line(name): f"{x:.4g}" for name, x in m.items() if name not in STEP_METRICS}
    found |= {"lr": f"{m['lr']:.3e}", "grad norm": f"{m['grad_norm']:.3f}"} if "lr" in m else {}
    if facts.scaled and "loss_scale" in m:
        found["loss scale"] = f"{m['loss_scale']:g}"
    found["skipped"] = f"{facts.skipped}"
    if speed:
        found["step"] = f"{1000 * speed.step:,.1f} ms"
        found["samples/s"] = f"{speed.samples:,.1f}"
        found |= {"tokens/s": f"{speed.tokens:,.0f}"} if speed.tokens else {}
        found |= {} if speed.mfu is None else {"MFU": f"{100 * speed.mfu:.1f} %"}
    found |= {f"waits for {part}": f"{100 * share:.1f} %" for part, share in facts.waits.items()}
    if facts.memory:
        peak, limit = facts.memory
        found["memory"] = f"{size_text(peak)}" + (f" of {size_text(limit)}" if limit else "")
    return found


def draw_panel(facts: PanelFacts) -> RenderableType:
    """Draw the panel."""
    from rich.columns import Columns
    from rich.console import Group
    from rich.padding import Padding
    from rich.panel import Panel as Box
    from rich.progress_bar import ProgressBar
    from rich.text import Text

    cells = [Text.assemble((f"{label} ", "dim"), (value, "bold")) for label, value in fields(facts).items()]
    rows: list[RenderableType] = [Columns(cells, padding=(0, 3))]
    times = f"{duration(facts.elapsed)}" + ("" if facts.left is None else f", {duration(facts.left)} left")
    if facts.total:
        bar = ProgressBar(total=facts.total, completed=min(facts.step, facts.total))
        rows.append(Padding(bar, 0))  # which ends its line
    if facts.work:
        rows.append(Text(facts.work, style="yellow"))
    of = f" of {facts.total:,}" if facts.total else ""
    return Box(Group(*rows), title=f"step {facts.step:,}{of}", subtitle=times, title_align="left", border_style="dim")


class Panel:
    """Shows a run while it takes steps.

    A thread draws it, from what the devices have finished by then, so that no step waits for it. One run of a process
    has the screen at a time. An error of the display ends the panel, not the run, whose other processes would wait.
    """

    _shown: Panel | None = None

    def __init__(
        self, facts: Callable[[], PanelFacts], busy: Callable[[], bool],
        open_display: Callable[[Callable[[], RenderableType]], Display],
    ):  # fmt: skip
        self._facts, self._busy, self._open = facts, busy, open_display
        self._display: Display | None = None
        self._lock, self._stepped = threading.RLock(), 0.0
        self._done, self._broken = threading.Event(), False

    def step(self) -> None:
        """Show the panel, from the first step on and again after a pause."""
        self._stepped = time.monotonic()
        try:
            display = self._display  # the thread may take it away meanwhile
            if display is not None and display.is_left():
                self.stop(keep=True)
            if Panel._shown is None and not self._broken and not bar_of_script():
                self._start()
        except Exception as error:
            self._give_up(error)

    def _start(self) -> None:
        self._done, self._hook = threading.Event(), sys.excepthook
        self._elsewhere = slow_work.shown_elsewhere()
        self._elsewhere.__enter__()
        Panel._shown = self
        self._display = self._open(lambda: draw_panel(self._facts()))
        sys.excepthook = self._failed
        threading.Thread(target=self._follow, args=(self._done,), daemon=True, name="jzero panel").start()

    def _failed(self, *error: Any) -> None:
        """Leave the screen to the traceback."""
        self.stop(keep=True)
        self._hook(*error)

    def _give_up(self, error: Exception) -> None:
        """Train on without a panel."""
        self._broken = True
        self.stop(keep=False)
        with contextlib.suppress(Exception):  # the terminal may be closed
            print(f"jzero: no panel any more: {in_a_line(error)}", file=sys.stderr, flush=True)

    def _follow(self, done: threading.Event) -> None:
        while not done.wait(PERIOD):
            try:
                if bar_of_script() or self.is_idle():
                    self.stop(keep=False)
                with self._lock:
                    if self._display is not None and not done.is_set():
                        self._display.refresh()
            except Exception as error:
                self._give_up(error)

    def is_idle(self) -> bool:
        """Return whether there has been no step for a while, and neither the devices nor the engine work."""
        return time.monotonic() - self._stepped > IDLE and not (self._busy() or slow_work.current())

    def stop(self, keep: bool) -> None:
        """Take the panel off the screen; or leave its last state there."""
        with self._lock:
            if Panel._shown is not self:
                return
            display, self._display = self._display, None
            self._done.set()
            with contextlib.suppress(Exception):  # the terminal may be closed
                if display is not None:  # it could be opened
                    display.stop(keep)
            self._elsewhere.__exit__(None, None, None)
            if sys.excepthook == self._failed:
                sys.excepthook = self._hook
            Panel._shown = None


def make_panel(step: TrainStep, busy: Callable[[], bool], completed: CompletedSteps, clock: Clock) -> Panel | None:
    """Make the panel of a run; None where the output is plain text, or the config wants none."""
    open_display = opener(step.config.progress.panel)
    if open_display is None:
        return None
    schedule, scaled = step.setup.optimizer.schedule, step.config.fp16.enabled
    last = scheduled_steps(schedule)

    def read() -> PanelFacts:
        spent = dict(clock.total)
        time_of_steps = sum(spent.values()) - spent.get(START, 0.0) - spent.get(COMPILE, 0.0)
        waits = {part: spent[part] / time_of_steps for part in (DATA, SCRIPT) if spent.get(part) and time_of_steps > 0}
        peaks = ((found["peak_bytes_in_use"], found.get("bytes_limit", 0)) for _, found in fullest_first())
        total = None if last is None or completed.number > last else last  # the run goes on after its schedule
        return PanelFacts(
            completed.number, total, completed.metrics, completed.totals.skipped, scaled, completed.recent_speed(),
            completed.remaining(total), waits, next(peaks, None), clock.elapsed, str(slow_work.current() or ""),
        )  # fmt: skip

    return Panel(read, busy, open_display)
