"""What `jzero plan` does with --search, --frontier and --fit."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from dataclasses import asdict
from pathlib import Path
from typing import Any

from jzero.config.source import read
from jzero.display.table import table
from jzero.errors import ConfigError
from jzero.planner import frontier
from jzero.planner.choices import merged
from jzero.planner.outcomes import Outcome, Task
from jzero.planner.rates import Rates
from jzero.planner.search import search
from jzero.planner.search_text import COLUMNS, changes, progress, row, search_text
from jzero.planner.smallest import smallest

SCHEMA = 1


def main(args: Namespace) -> int:
    """Search, print, and write the config found; return the exit code.

    Raises:
      ConfigError: anything that the user can mend, and if nothing fits.
    """
    _check(args)
    raw = read(args.config)
    rates = Rates.load(args.rates) if args.rates else Rates.of(args.gpu)
    task = Task(args.model, args.seq, tuple(args.set), args.gpu, args.nodes, args.gpus_per_node, rates)

    def seen(found: Outcome) -> None:
        print(progress(raw, found), file=sys.stderr, flush=True)

    if args.fit:
        task, found = smallest(task, raw, seen)
        text = _smallest_text(task, raw, found)
        record: dict[str, Any] = {"nodes": task.nodes, "gpus_per_node": task.gpus_per_node, "outcomes": [asdict(found)]}
        config = merged(raw, found.choice)
    else:
        result = search(task, raw, minutes=args.minutes, every=bool(args.frontier), seen=seen)
        text, config = search_text(result), result.config
        outcomes = [asdict(one) for one in result.outcomes]
        record = {"outcomes": outcomes, "dropped": dict(result.dropped), "seconds": result.seconds}
        if args.frontier:
            frontier.write_frontier(result, args.frontier)
    _write(args, text, {"schema": SCHEMA, "config": config, **record})
    return 0


def _check(args: Namespace) -> None:
    """Raise a ConfigError for options that do not go together, before anything is compiled."""
    if args.fit and (args.search or args.frontier):
        raise ConfigError("--fit: without --search and --frontier; search on the cluster that it finds")
    if args.html or args.tokens is not None:
        raise ConfigError(f"--search, --fit: without --html and --tokens; plan the config found: jzero plan {args.out}")
    if not args.minutes > 0:
        raise ConfigError(f"--minutes {args.minutes:g}: must be positive")
    if args.frontier:
        frontier.check_path(args.frontier)


def _write(args: Namespace, text: str, record: dict[str, Any]) -> None:
    Path(args.out).write_text(json.dumps(record["config"], indent=2) + "\n", encoding="utf-8")
    if args.json:
        written = json.dumps(record, indent=1)
        print(written) if args.json == "-" else Path(args.json).write_text(written + "\n", encoding="utf-8")
    if args.json != "-":
        print(f"{text}\nwritten: {args.out}")


def _smallest_text(task: Task, raw: dict[str, Any], found: Outcome) -> str:
    title = f"{task.model} fits {task.gpus} x {task.gpu} ({task.nodes} x {task.gpus_per_node})"
    drawn = table(title, COLUMNS[1:], [row(raw, found)[1:]], left=["configuration"])
    return f"{drawn}\n\nas lines of the config (--search finds a faster one):\n{changes(found.choice)}"
