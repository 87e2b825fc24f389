"""Train a Llama on text in bf16 and in fp8, and print the losses beside each other.

    python -m experiments.benchmarks.fp8_losses --preset 125m --steps 1000
    python -m experiments.benchmarks.fp8_losses --preset 1b --steps 300

Runs of one seed start from the same parameters and see the same rows. How far two runs in bf16 differ is what another
seed shows, and the same seed with its rows in reverse order inside each batch, where only roundings differ.
"""

from __future__ import annotations

import argparse
import json

import jax
import numpy as np

import jzero
from experiments import text
from models.llama import PRESETS, Llama, preset

EVERY = 50  # steps of which a line has the mean
TRANSIENT = 100  # steps at the beginning
RUNS = {"bf16": None, "bf16, rows reversed": None, "fp8 hybrid": "hybrid", "fp8 e4m3": "e4m3"}


def main(argv: list[str] | None = None) -> dict[str, list[list[float]]]:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--preset", choices=sorted(PRESETS), default="125m")
    p.add_argument("--steps", type=int, default=1000)
    p.add_argument("--seeds", type=int, default=2)
    p.add_argument("--lr", type=float, default=3e-4)
    p.add_argument("--rows", type=int, default=8, help="of a global batch")
    p.add_argument("--sequence", type=int, default=1024)
    p.add_argument("--runs", nargs="*", choices=RUNS, default=list(RUNS))
    p.add_argument("--min-size", type=int, default=512, help="of a product in fp8")
    args = p.parse_args(argv)
    shape = preset(args.preset, vocab_size=text.BYTES)
    model = jzero.from_flax(lambda rngs: Llama(shape, rngs=rngs))
    train, _ = text.standard_library(10_000_000)
    batch = text.windows(train, args.sequence)
    curves: dict[str, list[list[float]]] = {}
    for name in args.runs:
        form = RUNS[name]
        step = jzero.make_train_step(model, config(args, form))
        curves[name] = [run(step, batch, args, seed, reverse="reversed" in name) for seed in range(args.seeds)]
        print(json.dumps({"run": name, "losses": np.round(curves[name], 4).tolist()}), flush=True)
    print(table(curves))
    return curves


def config(args: argparse.Namespace, form: str | None) -> dict:
    return {
        "train_batch_size": args.rows,
        "optimizer": {"type": "AdamW", "params": {"lr": args.lr, "betas": [0.9, 0.95], "weight_decay": 0.1}},
        "scheduler": {
            "type": "WarmupCosineLR",
            "params": {"total_num_steps": args.steps, "warmup_num_steps": args.steps // 5, "warmup_type": "linear"},
        },
        "bf16": {"enabled": True},
        "fp8": {"enabled": form is not None, "format": form or "hybrid", "min_size": args.min_size},
        "zero_optimization": {"stage": 2},
    }


def run(step: jzero.TrainStep, batch: dict, args: argparse.Namespace, seed: int, reverse: bool) -> list[float]:
    order = np.random.default_rng(seed).permutation(len(batch["inputs"]))
    state, losses = step.init(jax.random.key(seed)), []
    for i in range(args.steps):
        rows = order[np.arange(i * args.rows, (i + 1) * args.rows) % len(order)]
        rows = rows[::-1] if reverse else rows
        state, metrics = step(state, {key: x[rows] for key, x in batch.items()})
        losses.append(metrics["loss"])
    return [float(loss) for loss in losses]


def table(curves: dict[str, list[list[float]]]) -> str:
    """Write means of `EVERY` steps over the seeds, and below the first run's differences from the others."""
    means = {name: np.mean(runs, axis=0) for name, runs in curves.items()}
    lines = [f"| steps | {' | '.join(means)} |", "|---" * (1 + len(means)) + "|"]
    steps = len(next(iter(means.values())))
    for start in range(0, steps, EVERY):
        cells = (f"{x[start : start + EVERY].mean():.4f}" for x in means.values())
        lines.append(f"| {start + 1} to {min(start + EVERY, steps)} | {' | '.join(cells)} |")
    first, *others = curves
    for name in others:
        for seed, (a, b) in enumerate(zip(np.array(curves[name]), np.array(curves[first]), strict=True)):
            last = a[-EVERY:].mean() / b[-EVERY:].mean() - 1
            early = np.abs(a[:TRANSIENT] / b[:TRANSIENT] - 1).max()
            lines.append(
                f"{name}, seed {seed}: mean of the last {EVERY} {last:+.2%} of the first run's; largest difference "
                f"of a step among the first {TRANSIENT} {early:.2%}"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
