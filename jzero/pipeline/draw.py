"""A schedule as a picture: a row per stage, a column per tick, a cell per work; as text, as SVG or as PNG.

The works of a tick stand side by side, each as wide as any other, because in lockstep they run one after the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from os import PathLike, fspath
from pathlib import Path
from string import ascii_letters
from typing import NamedTuple
from xml.sax.saxutils import escape

from jzero.errors import ConfigError
from jzero.pipeline.schedules import Schedule

COLOURS = {"F": "#1f5fbf", "B": "#23804a", "W": "#d9730d"}
INK, GRID, WHITE = "#333333", "#d0d0d0", "#ffffff"
CELL, ROW, LEFT, TOP = 22, 24, 62, 44  # points: a cell's width, a row's height, the table's corner


class Cell(NamedTuple):
    """A work of a stage, or its idleness (chunk = micro = -1); `column` counts cells from the left."""

    tick: int
    column: int
    stage: int
    letter: str
    chunk: int
    micro: int


class Rect(NamedTuple):
    x: float
    y: float
    width: float
    height: float
    fill: str
    tip: str = ""


class Text(NamedTuple):
    """`anchor` is where x lies on the text: at its start, middle or end. y is the middle of its height."""

    x: float
    y: float
    text: str
    anchor: str = "middle"
    fill: str = INK
    size: float = 10


def draw(schedule: Schedule, path: str | PathLike[str] | None = None) -> str:
    """See `Schedule.draw`."""
    if path is None:
        return _text(schedule)
    writers = {".svg": _write_svg, ".png": _write_png}
    suffix = Path(path).suffix.lower()
    if suffix not in writers:
        raise ConfigError(f"draw({fspath(path)!r}): a picture is an .svg or a .png; draw() is the text")
    writers[suffix](schedule, Path(path))
    return fspath(path)


def _columns(schedule: Schedule) -> list[str]:
    """The works of every tick: ["F", "F", "FB", ...]."""
    return [works for works, ticks in schedule.phases for _ in range(ticks)]


def _cells(schedule: Schedule) -> Iterator[Cell]:
    """Idle ones too, column by column."""
    column = 0
    for tick, letters in enumerate(_columns(schedule)):
        for letter in letters:
            work = schedule.works[letter]
            for stage in range(schedule.stages):
                yield Cell(tick, column, stage, letter, int(work.chunk[tick, stage]), int(work.micro[tick, stage]))
            column += 1


def _text(schedule: Schedule) -> str:
    def label(cell: Cell) -> str:
        chunk = ""
        if schedule.chunks > 1:
            chunk = ascii_letters[cell.chunk] if schedule.chunks <= len(ascii_letters) else f".{cell.chunk}"
        return f"{cell.letter}{cell.micro}{chunk}" if cell.micro >= 0 else "·"

    cells = list(_cells(schedule))
    labels = [label(cell) for cell in cells]
    width = max(map(len, [*labels, str(schedule.ticks - 1)]))
    rows: list[list[list[str]]] = [[[] for _ in range(schedule.ticks)] for _ in range(schedule.stages)]
    for cell, text in zip(cells, labels, strict=True):
        rows[cell.stage][cell.tick].append(text.ljust(width))
    ticks = [str(tick).ljust(len(works) * (width + 1) - 1) for tick, works in enumerate(_columns(schedule))]
    names = [f"stage {stage}" for stage in range(schedule.stages)]
    lines = [[" ".join(tick) for tick in row] for row in rows] + [ticks]
    table = [
        f"{name.ljust(len(names[-1]))} | {' | '.join(line)} |"
        for name, line in zip([*names, "tick"], lines, strict=True)
    ]
    legend = ", ".join(f"{letter} {name}" for letter, name in _names(schedule).items())
    chunks = f"; a to {ascii_letters[schedule.chunks - 1]}: the chunk" if 1 < schedule.chunks <= 52 else ""
    return "\n".join([repr(schedule), *table, f"{legend}, · idle; the number: the micro-batch{chunks}"])


def _names(schedule: Schedule) -> dict[str, str]:
    """The works for the legend."""
    split = "W" in schedule.works
    names = {"F": "forward", "B": "input gradient" if split else "backward", "W": "weight gradient"}
    return {letter: names[letter] for letter in schedule.works}


def _shade(schedule: Schedule, letter: str, chunk: int) -> tuple[str, str]:
    """The colour of a cell, paler from chunk to chunk, and that of the number on it."""
    pale = 0.85 * chunk / schedule.chunks
    channels = [int(COLOURS[letter][i : i + 2], 16) for i in (1, 3, 5)]
    fill = "#" + "".join(f"{round(c + pale * (255 - c)):02x}" for c in channels)
    return fill, WHITE if pale < 0.35 else INK


def _shapes(schedule: Schedule) -> tuple[float, float, list[Rect | Text]]:
    """The picture: width, height and what is on it, in points from the top left corner."""
    columns, stages = _columns(schedule), schedule.stages
    right, bottom = LEFT + CELL * sum(map(len, columns)), TOP + ROW * stages
    shapes: list[Rect | Text] = [Text(12, 20, repr(schedule), "start", size=12)]
    for cell in _cells(schedule):
        if cell.micro < 0:
            continue
        fill, ink = _shade(schedule, cell.letter, cell.chunk)
        x, y = LEFT + CELL * cell.column, TOP + ROW * cell.stage
        of_chunk = f", chunk {cell.chunk}" if schedule.chunks > 1 else ""
        tip = f"tick {cell.tick}, stage {cell.stage}: {cell.letter} of micro-batch {cell.micro}{of_chunk}"
        shapes += [
            Rect(x + 1, y + 1, CELL - 1.5, ROW - 1.5, fill, tip),
            Text(x + CELL / 2 + 0.25, y + ROW / 2 + 0.25, str(cell.micro), fill=ink),
        ]
    x = LEFT
    for tick, letters in enumerate(columns):
        shapes.append(Rect(x, TOP, 0.5, bottom - TOP + 4, GRID))
        shapes.append(Text(x + CELL * len(letters) / 2, bottom + 11, str(tick), size=8))
        x += CELL * len(letters)
    shapes.append(Rect(right, TOP, 0.5, bottom - TOP + 4, GRID))
    for stage in range(stages + 1):
        shapes.append(Rect(LEFT, TOP + ROW * stage, right - LEFT, 0.5, GRID))
    for stage in range(stages):
        shapes.append(Text(LEFT - 8, TOP + ROW * (stage + 0.5), f"stage {stage}", "end"))
    shapes.append(Text(LEFT - 8, bottom + 11, "tick", "end", size=8))
    x, y = LEFT, bottom + 30
    for letter, name in _names(schedule).items():
        for chunk in range(schedule.chunks):
            shapes.append(Rect(x, y - 6, 12, 12, _shade(schedule, letter, chunk)[0]))
            x += 12
        shapes.append(Text(x + 5, y, f"{letter}: {name}", "start"))
        x += 30 + 6 * len(f"{letter}: {name}")
    if schedule.chunks > 1:
        shapes.append(Text(x, y, f"the paler, the later the chunk (0 to {schedule.chunks - 1})", "start"))
        x += 220
    width = max(right, x, 12 + 6.5 * len(repr(schedule))) + 12
    return width, y + 18, shapes


def _write_svg(schedule: Schedule, path: Path) -> None:
    width, height, shapes = _shapes(schedule)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}pt" '
        f'height="{height:g}pt" font-family="Helvetica, Arial, sans-serif">',
        f'<rect width="100%" height="100%" fill="{WHITE}"/>',
    ]
    for shape in shapes:
        if isinstance(shape, Rect):
            box = f'x="{shape.x:g}" y="{shape.y:g}" width="{shape.width:g}" height="{shape.height:g}"'
            tip = f' class="cell"><title>{escape(shape.tip)}</title></rect>' if shape.tip else "/>"
            lines.append(f'<rect {box} fill="{shape.fill}"{tip}')
        else:
            at = f'x="{shape.x:g}" y="{shape.y:g}" dy="0.35em" text-anchor="{shape.anchor}"'
            lines.append(f'<text {at} fill="{shape.fill}" font-size="{shape.size:g}">{escape(shape.text)}</text>')
    path.write_text("\n".join([*lines, "</svg>", ""]), encoding="utf-8")


def _write_png(schedule: Schedule, path: Path) -> None:
    try:
        from matplotlib.collections import PatchCollection
        from matplotlib.figure import Figure
        from matplotlib.patches import Rectangle
    except ImportError as error:
        raise ConfigError(
            f"draw({fspath(path)!r}): a .png needs matplotlib; pip install 'jzero[experiments]', or draw an .svg"
        ) from error
    width, height, shapes = _shapes(schedule)
    figure = Figure(figsize=(width / 72, height / 72))
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, width), ylim=(height, 0))
    axes.axis("off")
    boxes = [shape for shape in shapes if isinstance(shape, Rect)]
    patches = [Rectangle((box.x, box.y), box.width, box.height) for box in boxes]
    axes.add_collection(PatchCollection(patches, facecolors=[box.fill for box in boxes], edgecolors="none"))
    anchors = {"start": "left", "middle": "center", "end": "right"}
    for shape in shapes:
        if isinstance(shape, Text):
            text = axes.text(shape.x, shape.y, shape.text, color=shape.fill, fontsize=shape.size)
            text.set(ha=anchors[shape.anchor], va="center_baseline")
    longest = max(width, height) / 72
    figure.savefig(path, dpi=min(144, 2**15 / longest))  # a picture has less than 2**16 pixels a side
