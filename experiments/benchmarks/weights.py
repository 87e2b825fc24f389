"""Measure the host memory and time to export and load a Llama on CPU devices; each phase is a process of its own.

    python -m experiments.benchmarks.weights make runs/1b --preset 1b      # a checkpoint: parameters, no moments
    python -m experiments.benchmarks.weights export runs/1b
    python -m experiments.benchmarks.weights load runs/1b

Each phase prints a line of JSON: the rise of the process's peak memory in MiB, the size of the loaded parameters
(included in the rise, because CPU devices store them in host memory), the largest leaf, the largest part of it that one
device wrote, and seconds.
"""

import argparse
import json
import re
import time
from math import prod
from pathlib import Path

import jax

import jzero
from jzero import weights
from models.llama import PRESETS, Llama, preset


def peak() -> float:
    """Return the peak host memory of this process in MiB. (`getrusage` also counts its parent's at the start.)"""
    return int(re.search(r"^VmHWM:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.M)[1]) / 1024


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("phase", choices=["make", "export", "load"])
    p.add_argument("directory", type=Path)
    p.add_argument("--preset", choices=PRESETS, default="1b")
    p.add_argument("--vocab_size", type=int)
    p.add_argument("--tied", action="store_true")
    p.add_argument("--devices", type=int, default=8)
    a = p.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", a.devices)
    shape = preset(a.preset, tied=a.tied)
    shape = preset(a.preset, tied=a.tied, vocab_size=a.vocab_size or shape.vocab_size)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    }
    step = jzero.make_train_step(jzero.from_flax(lambda rngs: Llama(shape, rngs=rngs)), config)
    jax.device_put(0.0).block_until_ready()
    before, start, result = peak(), time.perf_counter(), 0
    if a.phase == "make":
        jzero.Engine(step, jax.random.key(0)).save_checkpoint(a.directory / "checkpoint").wait()
    elif a.phase == "export":
        weights.export(a.directory / "checkpoint", a.directory / "export")
    else:
        params = weights.load(a.directory / "export", step)
        result = sum(x.nbytes for x in jax.tree.leaves(params))
    leaves = jax.tree.leaves(step.layouts)
    largest = max(leaves, key=lambda leaf: prod(leaf.shape))
    size = 4 * prod(largest.shape) / 2**20
    found = {
        "phase": a.phase,
        "seconds": round(time.perf_counter() - start, 1),
        "peak": round(peak() - before),
        "result": round(result / 2**20),
        "largest_leaf": round(size),
        "largest_part": round(size / (a.devices if largest.dim is not None else 1)),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
