"""Runs `jzero plan`: plans a config, or says by the formula what fits; or searches, and draws what it found."""

from __future__ import annotations

import json
import shlex
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import jax

from jzero.config import Config
from jzero.config.config import read_config
from jzero.display.figure import GRID, INK, colour, new_figure
from jzero.display.text_table import size_text, text_table
from jzero.errors import ConfigError
from jzero.model import Model
from jzero.planner.candidates import (
    OFFLOAD_OPTIMIZER,
    OFFLOAD_PARAM,
    Candidate,
    Raw,
    Task,
    describe_candidate,
    is_open,
    merged,
)
from jzero.planner.estimates import Estimate
from jzero.planner.gpus import Cluster, gpu
from jzero.planner.named_models import RANK, about, is_function, named_model, of_the_model
from jzero.planner.nearest import nearest, nearest_text, too_large
from jzero.planner.plan import lower_step, no_compilation_cache
from jzero.planner.plan_display import plan_text
from jzero.planner.plan_facts import budget_of, fit_verdict
from jzero.planner.rates import Rates
from jzero.planner.search import EQUAL, LATE, Search, search_configs, smallest
from jzero.planner.state_bytes import bytes_by_stage
from jzero.step.batch import amount_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure


SHOWN = 12  # configurations
COLUMNS = ["", "tokens/s per GPU", "step", "peak", "left", "configuration"]
FORMATS = (".svg", ".png", ".pdf")
_GIB = 2**30
SCHEMA, OUT, MINUTES = 2, "best.json", 10.0
HELD = (
    "all state on the GPUs; fewer GPUs may be enough with state in host memory: "
    '"zero_optimization": {"offload_optimizer": {"device": "cpu"}} in the config'
)


def start_jax(args: Namespace) -> None:
    """Start JAX without GPUs, and load its CUDA compiler if something will be compiled.

    Raises:
      ConfigError: an unknown GPU, GPUs that do not fill hosts, no config, or no CUDA compiler.
    """
    cluster = _cluster(args)
    gpu(cluster.gpu)
    if args.nodes < 1 or args.gpus_per_node < 1:
        raise ConfigError(f"--nodes {args.nodes} --gpus_per_node {args.gpus_per_node}: must be positive")
    jax.config.update("jax_platforms", "cpu")
    read_config(args.config)  # a file that is not there comes before what to install
    if not args.formula:
        cluster.devices()


def main(args: Namespace) -> int:
    """Plan or search, print and write; return the exit code.

    Raises:
      ConfigError: anything that the user can mend, a step that cannot fit, and a search in which nothing fits.
    """
    _check(args)
    if args.search or args.fit or args.frontier:
        return _search(args)
    config, cluster = Config.load(_raw(args)), _cluster(args)
    model, shapes = named_model(args.model, args.seq, args.set, args.adapters, args.rank or RANK)
    if args.formula:
        print(formula(model, config, cluster))
        return 0
    if args.tokens is not None and amount_of(shapes(1)).tokens is None:
        raise ConfigError(
            f"--tokens: the batch of {args.model} has no tokens, which are integers `inputs` of [rows, length]"
        )
    with of_the_model(args.model, args.seq):
        made = lower_step(model, config, shapes, cluster).plan(_rates(args))
    text = plan_text(made, budget_of(made, args.tokens, args.price)), about(args.model, args.set)
    _show(args, "\n".join(filter(None, text)), lambda: made.record(args.tokens, args.price))
    if args.html:
        made.html(args.html, args.tokens, args.price)
    if made.memory.fits:
        return 0
    if args.json != "-":
        with no_compilation_cache():
            batch = shapes(made.step.batch_sizes.train)
            found = nearest(made.step, batch, made.memory.peak_bytes, made.memory.usable.most)
        print(f"\n{nearest_text(found, made.step, made.memory.live)}")
    raise ConfigError(too_large(made))


def _check(args: Namespace) -> None:
    """Raise a ConfigError for options that do not go together, before anything is compiled."""
    searches = args.search or args.fit or args.frontier
    for wrong, problem in (
        (args.price is not None and args.tokens is None, "--price: requires --tokens"),
        (args.rank is not None and not args.adapters, "--rank: of adapters; add --adapters lora or qlora"),
        (args.rank is not None and args.rank < 1, f"--rank {args.rank}: must be at least 1"),
        (
            not searches and (args.minutes is not None or args.out is not None),
            "--minutes, --out: of a search; add --search, --frontier or --fit",
        ),
        (
            args.fit and (args.search or args.frontier),
            "--fit cannot be combined with --search or --frontier; search on the cluster that it finds",
        ),
        (
            args.fit and (args.minutes is not None or args.nodes != 1),
            "--fit cannot be combined with --minutes (it compiles few) or --nodes (it finds their number)",
        ),
        (
            searches and (args.html or args.formula or args.tokens is not None),
            "--search, --fit: without --html, --formula, --tokens and --price; plan the config found for these",
        ),
        (
            searches and args.minutes is not None and not args.minutes > 0,
            f"--minutes {args.minutes or 0:g}: must be positive",
        ),
        (
            args.frontier and Path(args.frontier).suffix not in FORMATS,
            f"--frontier {args.frontier}: must end in {', '.join(FORMATS)}",
        ),
    ):
        if wrong:
            raise ConfigError(problem)
    if args.frontier:
        new_figure(1, 1)  # raises without matplotlib
    if not searches:
        return
    for option, path in (("--out", args.out or OUT), ("--json", args.json), ("--frontier", args.frontier)):
        if path and path != "-" and not Path(path).absolute().parent.is_dir():
            raise ConfigError(f"{option} {path}: no such directory")
    if args.out is None and Path(OUT).exists():
        raise ConfigError(f"--out: {OUT} exists; name the file to write")


def _raw(args: Namespace) -> Raw:
    """Read the config, which trains the adapters alone unless it says otherwise.

    Raises:
      ConfigError: a mistake in it, or it trains adapters and the model has none.
    """
    raw = ({"trainable_parameters": ["lora_"]} if args.adapters else {}) | read_config(args.config)
    trained = Config.load(raw).trainable_parameters or ()
    if "lora_" in trained and not args.adapters and not is_function(args.model):
        raise ConfigError(f"trainable_parameters has lora_: {args.model} has none; add --adapters lora or qlora")
    return raw


def _cluster(args: Namespace) -> Cluster:
    return Cluster(args.gpu, args.nodes, args.gpus_per_node)


def _rates(args: Namespace) -> Rates:
    return Rates.load(args.rates) if args.rates else Rates.of(args.gpu)


def _show(args: Namespace, text: str, record: Callable[[], Mapping[str, object]]) -> None:
    """Print the text, or with `--json` the record; or write the record into a file beside the text."""
    written = json.dumps(record(), indent=1) if args.json else ""
    if args.json and args.json != "-":
        Path(args.json).write_text(written + "\n", encoding="utf-8")
    print(written if args.json == "-" else text)


def formula(model: Model, config: Config, cluster: Cluster) -> str:
    """Return a table of the bytes of model state per GPU under each stage, without compiling anything.

    Raises:
      ConfigError: a config that does not fit the GPUs or itself.
    """
    there, rows = cluster.usable, []
    for stage, found in bytes_by_stage(model, config, devices=cluster.described()).items():
        sizes = (found.masters + found.optimizer - found.host, found.parameters, found.gradients, found.total)
        mark = "  <- the config's" if stage == config.zero_optimization.stage else ""
        rows.append([str(stage), *map(size_text, sizes), f"{found.total / there.most:.0%}{mark}"])
    columns = ["ZeRO stage", "masters, optimizer", "compute parameters", "gradients", "total", "of the GPU"]
    drawn = text_table(f"model state per GPU, on {cluster}", columns, rows, left=["of the GPU"])
    return f"{drawn}\nwithout activations and gathered layers; the GPU has {size_text(there.most)} for them all"


def _search(args: Namespace) -> int:
    raw, rank = _raw(args), args.rank or RANK
    task = Task(raw, args.model, args.seq, tuple(args.set), _cluster(args), _rates(args), args.adapters, rank)

    def seen(found: Estimate) -> None:
        print(progress(raw, found), file=sys.stderr, flush=True)

    with of_the_model(args.model, args.seq):
        if args.fit:
            task, best = smallest(task, seen)
            record = {
                "nodes": task.cluster.nodes,
                "gpus_per_node": task.cluster.gpus_per_node,
                "estimates": [asdict(best)],
            }
            text = _smallest_text(task, best)
        else:
            found = search_configs(task, minutes=args.minutes or MINUTES, every=bool(args.frontier), seen=seen)
            best, text = found.best, search_text(found)
            estimates = [asdict(one) for one in found.estimates]
            record = {"estimates": estimates, "dropped": dict(found.dropped), "seconds": found.seconds}
    config, out = merged(raw, best.candidate), args.out or OUT
    Path(out).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    record = {"schema": SCHEMA, "config": config, **record}
    _show(args, f"{text}\nwritten: {out}; its plan: {_next(task, out)}", lambda: record)
    if args.frontier:
        frontier_figure(found).savefig(args.frontier)
    return 0


def _smallest_text(task: Task, found: Estimate) -> str:
    raw, there = task.raw, task.cluster
    title = f"{task.model} fits {there.gpus} x {there.gpu} ({there.nodes} x {there.gpus_per_node})"
    drawn = text_table(title, COLUMNS[1:], [row(raw, found)[1:]], left=["configuration"])
    held = [HELD] if all(is_open(raw, key) for key in (OFFLOAD_OPTIMIZER, OFFLOAD_PARAM)) else []
    lines = [*needs(task, found), *held, "", "as lines of the config (--search finds a faster one):"]
    return "\n".join([drawn, *lines, settings_json(found.candidate)])


def _next(task: Task, out: str) -> str:
    """Return the command that plans the config found."""
    of_preset = [word for change in task.changes for word in ("--set", change)]
    there = task.cluster
    of_preset += ["--adapters", task.adapters, "--rank", str(task.rank)] if task.adapters else []
    where = ["--gpu", there.gpu, "--nodes", str(there.nodes), "--gpus_per_node", str(there.gpus_per_node)]
    return shlex.join(
        ["jzero", "plan", str(out), "--model", task.model, *of_preset, "--seq", str(task.sequence), *where]
    )


def row(raw: Raw, found: Estimate, fastest: Estimate | None = None) -> list[str]:
    """Return the cells of one configuration; "=" marks one that is as fast as the fastest, as far as estimates tell."""
    mark = ""
    if fastest and found.step_s and fastest.step_s and found.step_s <= (1 + EQUAL) * fastest.step_s:
        mark = "1" if found is fastest else "="
    margin = found.usable_bytes - found.peak_bytes
    left = size_text(margin) if found.fits else f"-{size_text(-margin)}"
    speed = f"{found.tokens_per_s_gpu:,.0f}" if found.tokens_per_s_gpu else "-"
    step = f"{1000 * found.step_s:,.0f} ms" if found.step_s else "-"
    return [mark, speed, step, size_text(found.peak_bytes), left, describe_candidate(raw, found.candidate)]


def progress(raw: Raw, found: Estimate) -> str:
    """Return the line about a configuration that was just compiled."""
    if not found.peak_bytes:
        return f"not compiled: {describe_candidate(raw, found.candidate)}: {found.problem}"
    _, speed, step, peak, left, name = row(raw, found)
    what = f"{step}, {speed} tokens/s per GPU" if found.fits else "does not fit"
    return f"{what}, peak {peak}, {left} left: {name}"


def search_text(found: Search) -> str:
    """Return the table, what was not compiled, and the fastest configuration's lines.

    Raises:
      ConfigError: nothing fits.
    """
    best, task, raw = found.best, found.task, found.task.raw
    compiled = [one for one in found.estimates if one.peak_bytes]
    title = (
        f"{task.model}, {task.sequence} tokens a row, on {task.cluster}: {len(compiled)} "
        f"configurations compiled in {found.seconds:.0f} s, ±{best.uncertainty:.0%}"
    )
    drawn = text_table(title, COLUMNS, [row(raw, one, best) for one in compiled[:SHOWN]], left=["", "configuration"])
    parts = [drawn, f'"=": as fast as the first, within the error of the estimate ({EQUAL:.0%})']
    if found.dropped:
        parts.append("not compiled: " + ", ".join(f"{count} ({why})" for why, count in found.dropped.items()))
    untried = found.dropped.get(LATE, 0)
    which = f"the fastest of {len(compiled)}; --minutes left {untried} untried" if untried else "the fastest"
    return "\n".join(
        [*parts, *needs(task, best), "", f"{which}, as lines of the config:", settings_json(best.candidate)]
    )


def needs(task: Task, found: Estimate) -> list[str]:
    """Return the lines about what a configuration needs of its GPUs and hosts."""
    host = f"needs {size_text(found.host_bytes)} of pinned host memory for each GPU"
    return [fit_verdict(found.peak_bytes, task.cluster.usable), *[host] * bool(found.host_bytes)]


def settings_json(candidate: Candidate) -> str:
    """Write a candidate as the JSON that has to be in the config."""
    return json.dumps(merged({}, candidate), indent=2)


def frontier_figure(found: Search) -> Figure:
    """Draw the compiled configurations; the line joins the frontier, and numbers refer to the legend below.

    Raises:
      ConfigError: matplotlib is not installed.
    """
    best, raw = found.frontier, found.task.raw
    figure = new_figure(9, 4.5 + 0.22 * len(best))
    axes = figure.add_subplot()
    others = [one for one in found.estimates if one.step_s and one not in best]
    axes.scatter(*_points(others), color=GRID, edgecolor=INK, linewidth=0.5)
    axes.plot(*_points(best), color=colour(0), marker="o")
    for number, one in enumerate(best, 1):
        (x,), (y,) = _points([one])
        label_ = f"{number}. {describe_candidate(raw, one.candidate)}"
        axes.annotate(str(number), (x, y), xytext=(0, 6), textcoords="offset points", ha="center", fontsize=9)
        axes.plot([], [], " ", label=label_)
    if best:
        axes.axvline(best[0].usable_bytes / _GIB, color=INK, linewidth=1, linestyle="--")
    axes.set_xlabel("peak memory per GPU, GiB (dashed: what the GPU has)")
    axes.set_ylabel(
        "tokens/s per GPU" if all(one.tokens_per_s_gpu for one in found.estimates if one.step_s) else "samples/s"
    )
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower left", frameon=False, fontsize=8, handlelength=0)
    return figure


def _points(estimates: list[Estimate] | tuple[Estimate, ...]) -> tuple[list[float], list[float]]:
    """Return the coordinates: GiB, and tokens/s per GPU or samples/s."""
    return [one.peak_bytes / _GIB for one in estimates], [
        one.tokens_per_s_gpu or one.samples_per_s or 0 for one in estimates
    ]
