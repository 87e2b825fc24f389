"""Train a Llama for a few steps with every profile on: FLOPs by module, collectives, device times, memory, a trace.

python -m experiments.benchmarks.profiles --preset 1b --stage 3
jzero --no_local_rank --module experiments.benchmarks.profiles --preset 1b --stage 3 --remat full
"""

from __future__ import annotations

import argparse

import jax
import numpy as np

import jzero
from models.llama import PRESETS, Llama, preset

STEPS = 8


def main(argv: list[str] | None = None) -> None:
    p = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    p.add_argument("--preset", choices=sorted(PRESETS), default="1b")
    p.add_argument("--stage", type=int, default=3)
    p.add_argument("--pipe", type=int, default=1, help="pipeline stages")
    p.add_argument("--micro-batch", type=int, default=4, help="sequences per GPU")
    p.add_argument("--accum", type=int, default=1)
    p.add_argument("--sequence", type=int, default=4096)
    p.add_argument("--remat", choices=["none", "matmuls", "full"], default="none")
    p.add_argument("--scan", action="store_true", help="scan the stack instead of unrolling it")
    p.add_argument("--trace", default="traces", help="directory of the trace of the last two steps")
    args = p.parse_args(argv)
    config = {
        "train_micro_batch_size_per_gpu": args.micro_batch,
        "gradient_accumulation_steps": args.accum,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-4}},
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": args.stage},
        "activation_checkpointing": {"policy": args.remat},
        "mesh": {"pipe": args.pipe},
        "stack": {} if args.pipe > 1 else {"unroll": not args.scan},
        "steps_per_print": 4,
        "wall_clock_breakdown": True,
        "memory_breakdown": True,
        "comms_logger": {"enabled": True},
        "flops_profiler": {"enabled": True, "profile_step": 3},
        "profiler": {"steps": [STEPS - 1, STEPS], "output_path": args.trace},
    }
    shape = preset(args.preset)
    engine, *_ = jzero.initialize(model=jzero.from_flax(lambda rngs: Llama(shape, rngs=rngs)), config=config)
    rng = np.random.default_rng(0)
    for _ in range(STEPS):
        text = rng.integers(0, shape.vocab_size, (engine.train_batch_size(), args.sequence + 1), dtype=np.int32)
        loss = engine.train_batch({"inputs": text[:, :-1], "labels": text[:, 1:]})
    jzero.log_dist(f"loss {float(loss):.4f} on {jax.device_count()} x {jax.devices()[0].device_kind}")


if __name__ == "__main__":
    main()
