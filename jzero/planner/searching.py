"""`jzero plan` with --search, --frontier or --fit."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from dataclasses import asdict
from pathlib import Path
from typing import Any

from jzero.config import Config
from jzero.config.source import read
from jzero.display.figure import new_figure
from jzero.display.table import table
from jzero.errors import ConfigError
from jzero.planner import frontier
from jzero.planner.choices import OFFLOAD_OPTIMIZER, OFFLOAD_PARAM, is_open, merged
from jzero.planner.named_models import of_the_model
from jzero.planner.outcomes import Outcome, Task
from jzero.planner.rates import Rates
from jzero.planner.search import search
from jzero.planner.search_text import COLUMNS, changes, needs, progress, row, search_text
from jzero.planner.smallest import smallest

SCHEMA, OUT, MINUTES = 1, "best.json", 10.0
HELD = (
    "all state on the GPUs; fewer may do with it in host memory: "
    '"zero_optimization": {"offload_optimizer": {"device": "cpu"}} in the config'
)


def main(args: Namespace) -> int:
    """Search, print, and write the config found; return the exit code.

    Raises:
      ConfigError: anything that the user can mend, and if nothing fits.
    """
    _check(args)
    raw = read(args.config)
    Config.load(raw)  # raises for a mistake, before anything is searched
    rates = Rates.load(args.rates) if args.rates else Rates.of(args.gpu)
    task = Task(args.model, args.seq, tuple(args.set), args.gpu, args.nodes, args.gpus_per_node, rates)

    def seen(found: Outcome) -> None:
        print(progress(raw, found), file=sys.stderr, flush=True)

    if args.fit:
        with of_the_model(args.model, args.seq):
            task, found = smallest(task, raw, seen)
        text = _smallest_text(task, raw, found)
        record: dict[str, Any] = {"nodes": task.nodes, "gpus_per_node": task.gpus_per_node, "outcomes": [asdict(found)]}
        config = merged(raw, found.choice)
    else:
        with of_the_model(args.model, args.seq):
            result = search(task, raw, minutes=args.minutes or MINUTES, every=bool(args.frontier), seen=seen)
        text, config = search_text(result), result.config
        outcomes = [asdict(one) for one in result.outcomes]
        record = {"outcomes": outcomes, "dropped": dict(result.dropped), "seconds": result.seconds}
    _write(args, task, text, {"schema": SCHEMA, "config": config, **record})
    if args.frontier:
        frontier.write_frontier(result, args.frontier)
    return 0


def _check(args: Namespace) -> None:
    """Raise a ConfigError for options that do not go together, before anything is compiled."""
    if args.fit and (args.search or args.frontier):
        raise ConfigError("--fit: without --search and --frontier; search on the cluster that it finds")
    if args.fit and (args.minutes is not None or args.nodes != 1):
        raise ConfigError("--fit: without --minutes, it compiles few; and without --nodes, it finds their number")
    if args.html or args.formula or args.tokens is not None:
        raise ConfigError(
            "--search, --fit: without --html, --formula, --tokens and --price; plan the config found for these"
        )
    if args.minutes is not None and not args.minutes > 0:
        raise ConfigError(f"--minutes {args.minutes:g}: must be positive")
    if args.frontier:
        frontier.check_path(args.frontier)
        new_figure(1, 1)  # raises without matplotlib
    for option, path in (("--out", args.out or OUT), ("--json", args.json), ("--frontier", args.frontier)):
        if path and path != "-" and not Path(path).absolute().parent.is_dir():
            raise ConfigError(f"{option} {path}: no such directory")
    if args.out is None and Path(OUT).exists():
        raise ConfigError(f"--out: {OUT} exists; name the file to write")


def _write(args: Namespace, task: Task, text: str, record: dict[str, Any]) -> None:
    out = args.out or OUT
    Path(out).write_text(json.dumps(record["config"], indent=2) + "\n", encoding="utf-8")
    if args.json:
        written = json.dumps(record, indent=1)
        print(written) if args.json == "-" else Path(args.json).write_text(written + "\n", encoding="utf-8")
    if args.json != "-":
        print(f"{text}\nwritten: {out}; its plan: {_next(task, out)}")


def _smallest_text(task: Task, raw: dict[str, Any], found: Outcome) -> str:
    title = f"{task.model} fits {task.gpus} x {task.gpu} ({task.nodes} x {task.gpus_per_node})"
    drawn = table(title, COLUMNS[1:], [row(raw, found)[1:]], left=["configuration"])
    held = [HELD] if all(is_open(raw, key) for key in (OFFLOAD_OPTIMIZER, OFFLOAD_PARAM)) else []
    lines = [*needs(task, found), *held, "", "as lines of the config (--search finds a faster one):"]
    return "\n".join([drawn, *lines, changes(found.choice)])


def _next(task: Task, out: str) -> str:
    """Return the command that plans the config found."""
    of_preset = "".join(f" --set {change}" for change in task.changes)
    where = f"--gpu {task.gpu} --nodes {task.nodes} --gpus_per_node {task.gpus_per_node}"
    return f"jzero plan {out} --model {task.model}{of_preset} --seq {task.sequence} {where}"
