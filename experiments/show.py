"""Shows a training run: a live progress bar, the metrics as a CSV file, the loss as a curve."""

from __future__ import annotations

import csv
import json
import resource
import sys
import time
from pathlib import Path

import jax
import matplotlib
import numpy as np
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

matplotlib.use("Agg")
import matplotlib.pyplot as plt

import jzero

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


def curves(metrics: Path, names: dict[str, str], path: Path, title: str) -> None:
    """Plot curves of a `metrics.jsonl` (the config's `jsonl_monitor`) one above the other: {event: its label}."""
    steps = [json.loads(line) for line in metrics.read_text().splitlines()]
    figure, axes = plt.subplots(len(names), figsize=(8, 2.6 * len(names) + 0.4), sharex=True, layout="constrained")
    for axis, (name, label) in zip(np.atleast_1d(axes), names.items(), strict=True):
        points = [(step["step"], float(step[name])) for step in steps if name in step]
        axis.plot(*zip(*points, strict=True), color=BLUE)
        axis.set(ylabel=label)
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.2)
    axis.set(xlabel="step")
    figure.suptitle(title, fontsize=11)
    figure.savefig(path, dpi=100)
    plt.close(figure)
