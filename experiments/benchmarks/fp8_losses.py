"""Train a Llama on text in bf16 and with products or moments in fp8, and print the losses beside each other.

    python -m experiments.benchmarks.fp8_losses --preset 125m --steps 1000 | tee losses
    python -m experiments.benchmarks.fp8_losses --preset 1b --steps 300
    python -m experiments.benchmarks.fp8_losses --read losses OTHERS

Runs of one seed start from the same parameters and see the same rows. How far two runs in bf16 differ is what another
seed shows, and the same seed with its rows in reverse order inside each batch, where only roundings differ. Seeds can
be divided over GPUs, one program on each with its own `--first-seed`; `--read` prints the table of all.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np

import jzero
from experiments import text
from models.llama import PRESETS, Llama, preset

BASE = "bf16"  # what others are compared with, if it was run
EVERY = 50  # steps of which a line has the mean
TRANSIENT = 100  # steps at the beginning
RUNS = {  # name -> (`fp8.format`, `fp8.recipe`, `optimizer.state_dtype`)
    "bf16": (None, "current", "fp32"),
    "bf16, rows reversed": (None, "current", "fp32"),
    "fp8 hybrid": ("hybrid", "current", "fp32"),
    "fp8 e4m3": ("e4m3", "current", "fp32"),
    "fp8 delayed": ("hybrid", "delayed", "fp32"),
    "bf16, moments bf16": (None, "current", "bf16"),
    "bf16, moments fp8": (None, "current", "fp8"),
    "fp8 hybrid, moments fp8": ("hybrid", "current", "fp8"),
}
BY_DEFAULT = [name for name, (_, _, moments) in RUNS.items() if moments == "fp32"]


def main(argv: list[str] | None = None) -> list[dict]:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--preset", choices=sorted(PRESETS), default="125m")
    p.add_argument("--steps", type=int, default=1000)
    p.add_argument("--seeds", type=int, default=2)
    p.add_argument("--first-seed", type=int, default=0)
    p.add_argument("--lr", type=float, default=3e-4)
    p.add_argument("--beta2", type=float, default=0.95)
    p.add_argument("--rows", type=int, default=8, help="of a global batch")
    p.add_argument("--sequence", type=int, default=1024)
    p.add_argument("--runs", nargs="*", choices=RUNS, default=BY_DEFAULT)
    p.add_argument("--min-size", type=int, default=512, help="of a product in fp8")
    p.add_argument("--read", nargs="+", type=Path, metavar="FILE", help="print the table of what earlier runs printed")
    args = p.parse_args(argv)
    done = read(args.read) if args.read else list(train(args))
    print(table(done))
    return done


def read(files: list[Path]) -> list[dict]:
    """Read what runs printed; the last line of an interrupted one may be torn."""
    done: dict[tuple, dict] = {}
    for file in files:
        for line in file.read_text().splitlines():
            if line[:1] == "{" and line[-1:] == "}":
                one = json.loads(line)
                key = one["run"], one["seed"]
                if key in done:
                    raise SystemExit(f"{file}: {key[0]}, seed {key[1]}: an earlier line has it; read each run once")
                done[key] = one
    if len(settings := {one.get("settings", "") for one in done.values()}) != 1:
        raise SystemExit(
            f"--read: the files must have runs of one kind; they have {'; '.join(sorted(settings)) or 'none'}"
        )
    return list(done.values())


def train(args: argparse.Namespace) -> Iterator[dict]:
    """Run seed by seed, so that what was interrupted has whole pairs."""
    shape = preset(args.preset, vocab_size=text.BYTES)
    model = jzero.from_flax(lambda rngs: Llama(shape, rngs=rngs))
    kinds = {RUNS[name] for name in args.runs}
    steps = {kind: jzero.make_train_step(model, config(args, *kind)) for kind in kinds}
    settings = f"{args.preset}, {args.steps} steps, lr {args.lr:g}, beta2 {args.beta2:g}, {args.rows} x {args.sequence}"
    batch = text.windows(text.standard_library(10_000_000)[0], args.sequence)
    for seed in range(args.first_seed, args.first_seed + args.seeds):
        for name in args.runs:
            losses = run(steps[RUNS[name]], batch, args, seed, reverse="reversed" in name)
            line = {"run": name, "seed": seed, "settings": settings, "losses": [round(loss, 4) for loss in losses]}
            print(json.dumps(line), flush=True)
            yield line


def config(args: argparse.Namespace, form: str | None, recipe: str, moments: str) -> dict:
    return {
        "train_batch_size": args.rows,
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": args.lr, "betas": [0.9, args.beta2], "weight_decay": 0.1},
            "state_dtype": moments,
        },
        "scheduler": {
            "type": "WarmupCosineLR",
            "params": {"total_num_steps": args.steps, "warmup_num_steps": args.steps // 5, "warmup_type": "linear"},
        },
        "bf16": {"enabled": True},
        "fp8": {
            "enabled": form is not None,
            "format": form or "hybrid",
            "recipe": recipe,
            "min_size": args.min_size,
        },
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


def table(done: list[dict]) -> str:
    """Write means of `EVERY` steps over the seeds of all runs, and how far the others are from the first."""
    runs: dict[str, dict[int, list[float]]] = {}
    for line in done:
        runs.setdefault(line["run"], {})[line["seed"]] = line["losses"]
    if not (seeds := sorted(set.intersection(*map(set, runs.values())))):
        return "no seed has all runs"
    curves = {name: np.array([of[seed] for seed in seeds]) for name, of in runs.items()}  # [seeds, steps]
    first, *others = sorted(curves, key=lambda name: name != BASE)
    lines = [f"{len(seeds)} seeds", "", f"| steps | {' | '.join(curves)} |", "|---" * (1 + len(curves)) + "|"]
    steps = curves[first].shape[1]
    for start in range(0, steps, EVERY):
        cells = (f"{x[:, start : start + EVERY].mean():.4f}" for x in curves.values())
        lines.append(f"| {start + 1} to {min(start + EVERY, steps)} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", *(differences(name, curves[name], first, curves[first]) for name in others)])


def differences(name: str, x: np.ndarray, first: str, y: np.ndarray) -> str:
    """Say how far losses x [seeds, steps] are from the first run's losses y."""
    last = 100 * (x[:, -EVERY:].mean(1) / y[:, -EVERY:].mean(1) - 1)
    error = f"standard error {last.std(ddof=1) / len(last) ** 0.5:.2f}, " if len(last) > 1 else ""
    early, tens = 100 * (x / y - 1)[:, :TRANSIENT], 100 * (_tens(x) / _tens(y) - 1)
    largest = np.abs(early).max(1)
    return (
        f"{name}: mean of the last {EVERY} {last.mean():+.2f} % of {first}'s, {error}by seed "
        f"{' '.join(f'{d:+.2f}' for d in last)}\n  of a step among the first {TRANSIENT}: root mean square "
        f"{np.sqrt((early**2).mean()):.2f} %, largest of a seed {np.median(largest):.1f} % (median), of all "
        f"{largest.max():.1f} %; mean of ten steps over the seeds {tens.min():+.2f} to {tens.max():+.2f} %"
    )


def _tens(x: np.ndarray) -> np.ndarray:
    """Return the means of ten steps over the seeds."""
    return np.array([x[:, i : i + 10].mean() for i in range(0, min(TRANSIENT, x.shape[1]), 10)])


if __name__ == "__main__":
    main()
