"""Measure what watching a run costs: engines that show and record more or less take steps in turns.

python -m experiments.benchmarks.watching --out runs/watching

Llama 125m on one GPU, a batch that lies on the device, `engine.train_batch`. The ratios are to "nothing" of the same
turn. The panel draws to standard output, also where that is no terminal.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import jax
import numpy as np

import jzero
from experiments.benchmarks.gpu import smi
from models.llama import PRESETS, Llama, preset

EVERY = 10  # steps between progress lines


def sections(out: Path) -> dict[str, dict]:
    """Return {variant: sections of its config}."""
    files = {"enabled": True, "output_path": str(out)}
    parts: dict[str, dict] = {
        "lines": {"steps_per_print": EVERY},
        "curves": {name: files | {"job_name": name} for name in ("tensorboard", "csv_monitor", "jsonl_monitor")},
        "ledger": {"checkpoint": {"dir": str(out / "checkpoints")}},
        "checks": {
            "non_finite": {"action": "stop"}, "spikes": {"action": "report"}, "desync_check": {"every": 100},
            "straggler_check": {"every": 100},
        },
        "panel": {"progress": {"panel": True}},
    }  # fmt: skip
    everything = {key: value for part in parts.values() for key, value in part.items()}
    return {"nothing": {}, **parts, "everything": everything}


def main(argv: list[str] | None = None) -> None:
    p = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    p.add_argument("--preset", choices=sorted(PRESETS), default="125m")
    p.add_argument("--micro-batch", type=int, default=14)
    p.add_argument("--sequence", type=int, default=2048)
    p.add_argument("--steps", type=int, default=100, help="of a turn")
    p.add_argument("--turns", type=int, default=4)
    p.add_argument("--out", type=Path, default=Path("runs/watching"), help="directory for what the variants write")
    args = p.parse_args(argv)
    jax.config.update("jax_compilation_cache_dir", str(args.out / "cache"))  # most variants are one program
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    shape = preset(args.preset)
    text = np.random.default_rng(0).integers(0, shape.vocab_size, (args.micro_batch, args.sequence + 1), dtype=np.int32)
    config = {
        "train_batch_size": args.micro_batch, "optimizer": {"type": "AdamW", "params": {"lr": 3e-4}},
        "bf16": {"enabled": True}, "progress": {"panel": False, "summary": False},
    }  # fmt: skip
    mesh = jzero.make_mesh(devices=jax.devices()[:1])
    engines = {}
    for name, more in sections(args.out).items():
        engine, *_ = jzero.initialize(
            model=jzero.from_flax(lambda rngs: Llama(shape, rngs=rngs)), config=config | more, mesh=mesh
        )
        batch = engine.step_fn.place({"inputs": text[:, :-1], "labels": text[:, 1:]})
        turn(engine, batch, 120)  # compiles, the checks' programs too
        engines[name] = engine
    times: dict[str, list[float]] = {name: [] for name in engines}
    with smi() as power:
        for i in range(args.turns):
            names = list(engines)
            for name in names[i % len(names) :] + names[: i % len(names)]:
                times[name].append(turn(engines[name], batch, args.steps))
    base = times["nothing"]
    for name, seconds in times.items():
        ratios = [round(x / y, 4) for x, y in zip(seconds, base, strict=True)]
        found = {"variant": name, "ms": [round(1000 * x, 2) for x in seconds], "ratios": ratios}
        os.write(2, f"{json.dumps(found)}\n".encode())  # below the panel
    os.write(2, f"{json.dumps(power | {'device': jax.devices()[0].device_kind, 'jax': jax.__version__})}\n".encode())


def turn(engine: jzero.Engine, batch: dict, steps: int) -> float:
    """Return the seconds of a step."""
    jax.block_until_ready(engine.state)
    start = time.perf_counter()
    for _ in range(steps):
        engine.train_batch(batch)
    jax.block_until_ready(engine.state)
    seconds = (time.perf_counter() - start) / steps
    if engine._observers.panel:
        engine._observers.panel.stop(keep=False)  # it would go by itself, but draw during the next engine's turn
    return seconds


if __name__ == "__main__":
    main()
