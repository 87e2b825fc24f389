"""Measure how long a save delays training: alternate windows of steps without and with a save; print one JSON line.

    python -m experiments.benchmarks.checkpoint --directory /tmp/checkpoints --preset 1b --micro-batch 4

The model and the batches are those of `experiments.benchmarks.llama`. A save starts before the first step of its
window. Its files may be complete only later; the window does not include that wait. `held_s` is the difference between
the windows.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import time
from pathlib import Path

import jax
import numpy as np

import jzero
from experiments.benchmarks.llama import config
from experiments.benchmarks.llama import parse as parse_case
from models.llama import Llama, preset


def main(argv: list[str] | None = None) -> None:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--directory", type=Path, required=True, help="for the checkpoints; on a local disk of each host")
    p.add_argument("--steps", type=int, default=100, help="of a window (default 100)")
    p.add_argument("--windows", type=int, default=3, help="of each kind (default 3)")
    own, rest = p.parse_known_args(argv)
    args = parse_case(rest)
    jzero.init_distributed()
    shape = preset(args.preset, attention="cudnn" if jax.default_backend() == "gpu" else "auto")
    settings = config(args)
    step = jzero.make_train_step(jzero.from_flax(lambda rngs: Llama(shape, rngs=rngs)), settings)
    text = np.random.default_rng(0).integers(0, shape.vocab_size, (step.batch_sizes.train, args.sequence + 1), np.int32)
    batch = step.place({"inputs": text[:, :-1], "labels": text[:, 1:]})
    state = step.init(jax.random.key(0))
    calls, writes, windows = [], [], {False: [], True: []}

    def window(saves: bool) -> None:
        nonlocal state
        jax.block_until_ready(state)
        start = time.perf_counter()
        if saves:
            under_way = jzero.checkpoint.save(state, own.directory, "now")
            calls.append(time.perf_counter() - start)
        for i in range(own.steps):
            state, metrics = step(state, batch)
            if i % 10 == 9:
                float(metrics["loss"])  # wait for the device, as a run that prints the loss does
        jax.block_until_ready(state)
        windows[saves].append(time.perf_counter() - start)
        if saves:
            under_way.wait()
            writes.append(time.perf_counter() - start)

    for _ in range(3):
        state, _ = step(state, batch)
    jzero.checkpoint.save(state, own.directory, "now").wait()  # compiles
    for i in range(2 * own.windows):
        window(saves=bool(i % 2))
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves((state.params, state.opt_state)))
    jzero.checkpoint.save(state, own.directory, "now").wait()
    last = step(state, batch)[1]["loss"]
    del state
    start = time.perf_counter()
    read = jax.block_until_ready(
        jzero.checkpoint.restore(own.directory, step.state_shardings, shapes=step.state_shapes)
    )
    restored = time.perf_counter() - start
    again = step(read, batch)[1]["loss"]
    plain, saving = (statistics.median(windows[kind]) for kind in (False, True))
    record = {
        "gpus": step.mesh.size, "processes": jzero.get_world_size(), "preset": args.preset, "stage": args.stage,
        "steps": own.steps, "plain_s": [round(t, 3) for t in windows[False]],
        "saving_s": [round(t, 3) for t in windows[True]], "held_s": round(saving - plain, 3),
        "held_percent": round(100 * (saving / plain - 1), 3), "call_s": [round(t, 4) for t in calls],
        "complete_s": [round(t, 2) for t in writes], "state_gib": round(size / 2**30, 2),
        "restore_s": round(restored, 2), "same_next_loss": float(again) == float(last), "jax": jax.__version__,
        "device": step.mesh.devices.flat[0].device_kind,
    }  # fmt: skip
    jzero.log_dist(json.dumps(record))
    if jzero.get_rank() == 0:
        shutil.rmtree(own.directory)


if __name__ == "__main__":
    main()
