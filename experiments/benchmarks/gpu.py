"""Measure steps on a GPU: time with its spread, memory, power and clock."""

from __future__ import annotations

import contextlib
import os
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax

WARM_UP = 5
WARM, MEASURED = "== measuring", "== measured"  # lines by which `matrix.py` knows when a program's steps run
PEAK = {"NVIDIA H100 80GB HBM3": 989e12, "NVIDIA H200": 989e12}  # FLOP/s of dense bf16 products, by the datasheet


@contextlib.contextmanager
def smi(gpu: int | str | None = None) -> Iterator[dict[str, Any]]:
    """Record the power (W) and the clock (MHz) of a GPU, five times a second, as medians; {} without a GPU.

    Args:
      gpu: its index; by default that of the first one which this process sees.
    """
    found: dict[str, Any] = {}
    if gpu is None:  # nvidia-smi shows all
        gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    if shutil.which("nvidia-smi") is None:
        yield found
        return
    query = f"nvidia-smi --id={gpu} --query-gpu=power.draw,clocks.sm --format=csv,noheader,nounits -lms 200".split()
    with subprocess.Popen(query, stdout=subprocess.PIPE, text=True) as process:
        yield found
        process.terminate()
        rows = [[float(x) for x in line.split(",")] for line in process.communicate()[0].splitlines() if "," in line]
    if rows:
        found["power_w"], found["clock_mhz"] = (statistics.median(column) for column in zip(*rows, strict=True))


def measure(
    step: Callable[[], Any], wait: Callable[[Any], Any] = jax.block_until_ready, *, repeats: int = 7, steps: int = 20
) -> dict[str, Any]:
    """Time `step`, which queues one step and returns something to wait for: seconds per step over several repeats."""
    for _ in range(WARM_UP):
        wait(step())
    times = []
    with smi() as power:
        for _ in range(repeats):
            start = time.perf_counter()
            for _ in range(steps):
                last = step()
            wait(last)
            times.append((time.perf_counter() - start) / steps)
    return {
        "step_s": round(statistics.median(times), 5),
        "step_s_min": round(min(times), 5),
        "step_s_max": round(max(times), 5),
        **power,
    }
