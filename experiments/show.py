"""What the examples share: options and config, a live progress bar, metrics as a CSV file, curves."""

from __future__ import annotations

import argparse
import csv
import json
import resource
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax
import matplotlib
import numpy as np
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

import jzero

matplotlib.use("Agg")
import matplotlib.pyplot as plt

Curve = Sequence[tuple[int, float]]  # (step, value)
BLUE, GREY, ORANGE = "#1f5fbf", "#777777", "#d9730d"


def memory() -> int:
    """Return the peak memory in bytes: of this process's first GPU or, without GPUs, of this process."""
    stats = jax.local_devices()[0].memory_stats() or {}
    if "peak_bytes_in_use" in stats:
        return stats["peak_bytes_in_use"]
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def steps_of(wanted: int | None, config: jzero.Config) -> int:
    """Return the number of steps of a run: `wanted`, else the scheduler's; say when more steps than its are wanted."""
    total = config.scheduler.params.get("total_num_steps") if config.scheduler else None
    if total in (None, "auto"):
        return wanted or 100
    if wanted and wanted > total:
        jzero.log_dist(f"--steps {wanted}: the learning rate stays as it is from step {total} on (total_num_steps)")
    return wanted or int(total)


class TrainingBar:
    """A progress bar with loss, tokens/s and memory, which records every step.

    On a terminal the bar is live. Ten lines, spread over the run, remain on the terminal and in a log file.
    """

    def __init__(self, steps: int, tokens_per_step: int):
        self.steps, self.tokens_per_step, self.rows = steps, tokens_per_step, []
        text = "loss {task.fields[loss]:.3f} · {task.fields[speed]:,.0f} tokens/s · {task.fields[gib]:.2f} GiB"
        columns = (BarColumn(30), MofNCompleteColumn(), TextColumn(text), TimeElapsedColumn(), TimeRemainingColumn())
        self.progress = Progress(*columns)

    def __enter__(self) -> TrainingBar:
        self.progress.start()
        self.task = self.progress.add_task("", total=self.steps, loss=np.nan, speed=0, gib=memory() / 2**30)
        self.clock = [time.perf_counter()]
        return self

    def __exit__(self, *error: object) -> None:
        self.progress.stop()

    def advance(self, loss: float, **metrics: float) -> None:
        """Record one finished step."""
        self.clock.append(time.perf_counter())
        recent = self.clock[1:][-20:]  # without the first step, which compiles
        speed = self.tokens_per_step * (len(recent) - 1) / (recent[-1] - recent[0]) if len(recent) > 1 else 0.0
        gib, step = memory() / 2**30, len(self.rows) + 1
        self.rows.append({"step": step, "loss": loss, **metrics, "tokens_per_s": round(speed), "memory_gib": gib})
        self.progress.update(self.task, advance=1, loss=loss, speed=speed, gib=gib)
        if step % max(1, self.steps // 10) == 0:
            self.progress.console.print(f"step {step:5}   loss {loss:.3f}   {speed:,.0f} tokens/s", highlight=False)

    def write_csv(self, path: Path) -> None:
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, self.rows[0])
            writer.writeheader()
            writer.writerows({k: f"{v:.6g}" if isinstance(v, float) else v for k, v in r.items()} for r in self.rows)


def loss_curve(path: Path, losses: list[float], held_out: float, bigram: float, title: str) -> None:
    """Plot the training loss, its running mean, the held-out loss and a bigram model's loss, in nats per byte."""
    steps = np.arange(1, len(losses) + 1)
    half = len(losses) // 80
    mean = [np.mean(losses[max(0, i - half) : i + half + 1]) for i in range(len(losses))]
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    axes.plot(steps, losses, color=BLUE, alpha=0.25, linewidth=0.8)
    axes.plot(steps, mean, color=BLUE, label=f"training, mean of {2 * half + 1} steps")
    axes.axhline(bigram, color=GREY, linestyle="--", label=f"bigram, held out: {bigram:.3f}")
    axes.plot(steps[-1], held_out, "o", color=ORANGE, clip_on=False, zorder=3, label=f"held out: {held_out:.3f}")
    axes.set(xlabel="step", ylabel="loss, nats per byte", title=title, ylim=(0, None), xlim=(0, len(losses)))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.2)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def options(name: str, description: str | None, out: str) -> argparse.ArgumentParser:
    """Make the parser of an example whose config is experiments/NAME.json, and whose files go to `out`."""
    p = argparse.ArgumentParser(name, None, description, formatter_class=argparse.RawTextHelpFormatter)
    p.add_argument(
        "--config", type=existing_file, default=Path(__file__).with_name(f"{name}.json"), help="a config file"
    )
    p.add_argument("--steps", type=int, help="default: the scheduler's total_num_steps")
    p.add_argument("--out", type=Path, default=Path(out), help=f"default {out}")
    return p


def existing_file(name: str) -> Path:
    """Return the path of a file; without one, argparse prints the message in a line."""
    if not Path(name).is_file():
        raise argparse.ArgumentTypeError(f"{name}: no such file")
    return Path(name)


def read_config(args: argparse.Namespace) -> tuple[jzero.Config, int]:
    """Read an example's config, whose curves go to --out; return it and the number of steps."""
    read = json.loads(args.config.read_text())
    monitor = {"enabled": True, "output_path": str(args.out), "job_name": "curves"}
    config = jzero.Config.load({**read, "jsonl_monitor": monitor})
    return config, steps_of(args.steps, config)


def finish(out: Path, losses: Sequence[float], lines: Mapping[str, Curve | str], title: str) -> list[float]:
    """Draw OUT/curves.png on process 0, print the first and the last loss, and return the losses.

    Args:
      lines: {label: points (step, value), or the name of a metric that the run wrote}.
    """
    losses = [float(loss) for loss in losses]
    if jax.process_index() == 0:
        steps = [json.loads(line) for line in (out / "curves" / "metrics.jsonl").read_text().splitlines()]
        found = {
            label: [(step["step"], step[key]) for step in steps if (key := f"Train/Samples/{line}") in step]
            if isinstance(line, str)
            else line
            for label, line in lines.items()
        }
        curves({"loss": list(enumerate(losses, 1)), **found}, out / "curves.png", title)
    jzero.log_dist(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}; files are in {out}")
    return losses


def curves(lines: Mapping[str, Curve], path: Path, title: str) -> None:
    """Plot curves one above the other: {label: points (step, value)}."""
    figure, axes = plt.subplots(len(lines), figsize=(8, 2.6 * len(lines) + 0.4), sharex=True, layout="constrained")
    for axis, (label, points) in zip(np.atleast_1d(axes), lines.items(), strict=True):
        axis.plot(*zip(*points, strict=True), color=BLUE)
        axis.set(ylabel=label)
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.2)
    axis.set(xlabel="step")
    figure.suptitle(title, fontsize=11)
    figure.savefig(path, dpi=100)
    plt.close(figure)
