"""Draw a pipeline schedule: a row per stage, a column per tick, a cell per operation; as text or as a figure.

The operations of one tick are side by side with equal widths, because in lockstep they run one after the other: the
width of the drawing is time.
"""

from __future__ import annotations

from collections.abc import Iterator
from string import ascii_letters
from typing import TYPE_CHECKING, NamedTuple

from jzero.display.figure import GRID, INK, new_figure
from jzero.pipeline.schedules import PipelineSchedule

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = {"F": "#1f5fbf", "B": "#23804a", "W": "#d9730d"}


class Cell(NamedTuple):
    """One operation of one stage; `column` counts cells from the left; an idle cell has chunk = micro = -1."""

    tick: int
    column: int
    stage: int
    letter: str
    chunk: int
    micro: int


def draw_text(schedule: PipelineSchedule) -> str:
    """Draw the schedule as a table of text.

    >>> from jzero.pipeline.schedules import make_schedule
    >>> print(draw_text(make_schedule("1f1b", stages=2, micro_batches=3)))
    PipelineSchedule(1f1b, 2 stages, 3 micro-batches: 5 ticks, bubble 25.0%, at most 3 in flight)
    stage 0 | F0 | F1 ·  | F2 B0 | ·  B1 | B2 |
    stage 1 | ·  | F0 B0 | F1 B1 | F2 B2 | ·  |
    tick    | 0  | 1     | 2     | 3     | 4  |
    F forward, B backward, · idle; the number: the micro-batch
    """
    cells = list(_cells(schedule))
    labels = [_label(schedule, cell) for cell in cells]
    width = max(map(len, [*labels, str(schedule.ticks - 1)]))
    rows: list[list[list[str]]] = [[[] for _ in range(schedule.ticks)] for _ in range(schedule.stages)]
    for cell, text in zip(cells, labels, strict=True):
        rows[cell.stage][cell.tick].append(text.ljust(width))
    ticks = [str(tick).ljust(len(letters) * (width + 1) - 1) for tick, letters in enumerate(_letters(schedule))]
    names = [f"stage {stage}" for stage in range(schedule.stages)]
    lines = [[" ".join(tick) for tick in row] for row in rows] + [ticks]
    table = [
        f"{name.ljust(len(names[-1]))} | {' | '.join(line)} |"
        for name, line in zip([*names, "tick"], lines, strict=True)
    ]
    legend = ", ".join(f"{letter} {name}" for letter, name in _names(schedule).items())
    chunks = f"; a to {ascii_letters[schedule.chunks - 1]}: the chunk" if 1 < schedule.chunks <= 52 else ""
    return "\n".join([repr(schedule), *table, f"{legend}, · idle; the number: the micro-batch{chunks}"])


def draw_figure(schedule: PipelineSchedule) -> Figure:
    """Draw the schedule as a matplotlib figure; `.savefig("schedule.svg")` writes it.

    Raises:
      ConfigError: matplotlib is not installed.
    """
    letters = _letters(schedule)
    columns = sum(map(len, letters))
    figure = new_figure(1.5 + 0.3 * max(columns, 24), 1.6 + 0.33 * schedule.stages)
    from matplotlib.patches import Patch, Rectangle

    axes = figure.add_subplot(xlim=(0, columns), ylim=(schedule.stages, 0))  # stage 0 on top
    for cell in _cells(schedule):
        if cell.micro < 0:
            continue
        fill, ink = _shade(schedule, cell.letter, cell.chunk)
        axes.add_patch(Rectangle((cell.column + 0.05, cell.stage + 0.05), 0.9, 0.9, facecolor=fill))
        axes.text(cell.column + 0.5, cell.stage + 0.5, str(cell.micro), color=ink, fontsize=9, ha="center", va="center")
    left, centres = 0, []
    for tick in letters:
        axes.axvline(left, color=GRID, linewidth=0.5)
        centres.append(left + len(tick) / 2)
        left += len(tick)
    axes.set_xticks(centres, [str(tick) for tick in range(schedule.ticks)], fontsize=8)
    axes.set_yticks([s + 0.5 for s in range(schedule.stages)], [f"stage {s}" for s in range(schedule.stages)])
    axes.tick_params(length=0)
    axes.spines[:].set_color(GRID)
    axes.set_xlabel("tick")
    axes.set_title(repr(schedule), loc="left", fontsize=9)
    entries = [
        Patch(
            color=_shade(schedule, letter, chunk)[0],
            label=f"{letter}: {name}" + (f", chunk {chunk}" if schedule.chunks > 1 else ""),
        )
        for letter, name in _names(schedule).items()
        for chunk in dict.fromkeys((0, schedule.chunks - 1))  # the shades between need no legend
    ]
    figure.legend(handles=entries, loc="outside lower left", ncols=len(schedule.works), frameon=False, fontsize=9)
    return figure


def _letters(schedule: PipelineSchedule) -> list[str]:
    """List the operations of every tick: ["F", "F", "FB", ...]."""
    return [letters for letters, ticks in schedule.phases for _ in range(ticks)]


def _cells(schedule: PipelineSchedule) -> Iterator[Cell]:
    """Yield all cells, idle ones too, column by column."""
    column = 0
    for tick, letters in enumerate(_letters(schedule)):
        for letter in letters:
            work = schedule.works[letter]
            for stage in range(schedule.stages):
                yield Cell(tick, column, stage, letter, int(work.chunk[tick, stage]), int(work.micro[tick, stage]))
            column += 1


def _label(schedule: PipelineSchedule, cell: Cell) -> str:
    if cell.micro < 0:
        return "·"
    if schedule.chunks == 1:
        return f"{cell.letter}{cell.micro}"
    chunk = ascii_letters[cell.chunk] if schedule.chunks <= len(ascii_letters) else f".{cell.chunk}"
    return f"{cell.letter}{cell.micro}{chunk}"


def _names(schedule: PipelineSchedule) -> dict[str, str]:
    """Name the operations by letter, for the legend."""
    split = "W" in schedule.works
    names = {"F": "forward", "B": "input gradient" if split else "backward", "W": "weight gradient"}
    return {letter: names[letter] for letter in schedule.works}


def _shade(schedule: PipelineSchedule, letter: str, chunk: int) -> tuple[str, str]:
    """Return (a cell's colour, paler for later chunks; the colour of its number)."""
    pale = 0.85 * chunk / schedule.chunks
    channels = [int(COLOURS[letter][i : i + 2], 16) for i in (1, 3, 5)]
    fill = "#" + "".join(f"{round(c + pale * (255 - c)):02x}" for c in channels)
    return fill, "#ffffff" if pale < 0.35 else INK
