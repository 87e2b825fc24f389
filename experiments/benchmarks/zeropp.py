"""Train a small Llama on text with each part of ZeRO++, and print the losses beside those of exact stage 3.

    python -m experiments.benchmarks.zeropp --steps 300 --seeds 3

Runs on simulated CPU devices: what quantisation does to a run does not depend on the machine. The speed on GPUs is
measured by `python -m experiments.benchmarks.llama --zero zero_quantized_weights=true`.
"""

from __future__ import annotations

import argparse
import itertools

import jax
import numpy as np

import jzero
from experiments import text
from models.llama import Llama, LlamaConfig

QWZ, QGZ, HPZ = {"zero_quantized_weights": True}, {"zero_quantized_gradients": True}, {"zero_hpz_partition_size": 4}
RUNS = {"stage 3": {}, "hpZ 4": HPZ, "qwZ": QWZ, "qgZ": QGZ, "all": {**QWZ, **QGZ, **HPZ}}


def main(argv: list[str] | None = None) -> dict[str, np.ndarray]:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--steps", type=int, default=300)
    p.add_argument("--seeds", type=int, default=1)
    p.add_argument("--lr", type=float, default=2e-3)
    p.add_argument("--rows", type=int, default=16, help="of a global batch")
    p.add_argument("--sequence", type=int, default=64)
    p.add_argument("--width", type=int, default=128)
    args = p.parse_args(argv)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)

    shape = LlamaConfig(4, args.width, 4, 2, 3 * args.width, vocab_size=text.BYTES, attention="xla")
    model = jzero.from_flax(lambda rngs: Llama(shape, rngs=rngs))
    train, held_out = (text.windows(part, args.sequence) for part in text.standard_library(4_000_000))
    evaluation = text.sample_rows(held_out, 32 * args.rows)
    curves, finals = {}, {}
    for name, plus in RUNS.items():
        step = jzero.make_train_step(model, config(args, plus))
        runs = [run(step, train, evaluation, args, seed) for seed in range(args.seeds)]
        curves[name], finals[name] = (np.array(part) for part in zip(*runs, strict=True))
        print(f"{name}: held-out losses {finals[name].round(4).tolist()}", flush=True)
    print(table(curves, finals))
    return curves


def run(step: jzero.TrainStep, train: dict, evaluation: dict, args: argparse.Namespace, seed: int) -> tuple:
    """Train from another initialization in another order; return the losses, and that of the held-out text."""
    order = np.random.default_rng(seed).permutation(len(train["inputs"]))
    state, losses = step.init(jax.random.key(seed)), []
    for i in range(args.steps):
        rows = order[np.arange(i * args.rows, (i + 1) * args.rows) % len(order)]
        state, metrics = step(state, {key: x[rows] for key, x in train.items()})
        losses.append(float(metrics["loss"]))  # waits: many steps in flight starve the threads of simulated devices
    return losses, float(step.evaluate(state, evaluation))


def config(args: argparse.Namespace, plus: dict) -> dict:
    return {
        "train_batch_size": args.rows,
        "optimizer": {"type": "AdamW", "params": {"lr": args.lr, "betas": [0.9, 0.95], "weight_decay": 0.1}},
        "scheduler": {
            "type": "WarmupCosineLR",
            "params": {"total_num_steps": args.steps, "warmup_num_steps": max(2, args.steps // 10)},
        },
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, **plus},
        "stack": {"unroll": False},
    }


def table(curves: dict[str, np.ndarray], finals: dict[str, np.ndarray]) -> str:
    """Format the losses [seeds, steps] as means over tenths of the run and all seeds, and the held-out ones."""
    lines = ["| steps | " + " | ".join(curves) + " |", "|---" * (len(curves) + 1) + "|"]
    edges = np.linspace(0, next(iter(curves.values())).shape[1], 11).astype(int)
    for start, end in itertools.pairwise(edges):
        means = (f"{curve[:, start:end].mean():.4f}" for curve in curves.values())
        lines.append(f"| {start + 1} to {end} | " + " | ".join(means) + " |")
    for seed in range(len(next(iter(finals.values())))):
        lines.append(
            f"| held out, seed {seed} | " + " | ".join(f"{final[seed]:.4f}" for final in finals.values()) + " |"
        )
    lines.append("| held out, mean | " + " | ".join(f"{final.mean():.4f}" for final in finals.values()) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
