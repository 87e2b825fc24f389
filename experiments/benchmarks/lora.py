"""Measure a LoRA fine-tune of a Llama in bf16 on one GPU as one JSON line.

    python -m experiments.benchmarks.lora --preset 8b --rank 16 --targets all-linear --micro-batch 4

Random weights and tokens, frozen weights once in bf16, AdamW over float32 adapters, the same batch in every step.
"""

from __future__ import annotations

import argparse
import collections
import json
from typing import Any

import jax
import numpy as np

import jzero
from jzero.planner import gpu_devices, memory
from jzero.step.update import NEVER
from models.llama import PRESETS, Llama, preset
from models.lora import LoRAConfig

from .gpu import PEAK, measure


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--preset", choices=sorted(PRESETS), default="8b")
    p.add_argument("--rank", type=int, default=16)
    p.add_argument("--targets", default="all-linear", help="module names with commas between, or all-linear")
    p.add_argument("--micro-batch", type=int, default=4, help="sequences")
    p.add_argument("--sequence", type=int, default=4096)
    p.add_argument("--remat", choices=["none", "matmuls", "full"], default="none")
    p.add_argument("--unroll", action="store_true", help="unroll the stack instead of scanning it")
    p.add_argument("--lr", type=float, default=1e-3)
    p.add_argument("--plan", action="store_true", help="only compile, for an H200 that need not be there")
    return p.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    if args.plan:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_enable_compilation_cache", False)  # it cannot read back programs for absent GPUs
    targets = args.targets if args.targets == "all-linear" else args.targets.split(",")
    lora = LoRAConfig(r=args.rank, lora_alpha=2 * args.rank, target_modules=targets)
    shape = preset(args.preset, attention="cudnn", lora=lora)
    config = {
        "train_batch_size": args.micro_batch,
        "optimizer": {"type": "AdamW", "params": {"lr": args.lr}},
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "trainable_parameters": ["lora_"],
        "activation_checkpointing": {"policy": args.remat},
        **({"stack": {"unroll": True}} if args.unroll else {}),
    }
    devices = gpu_devices("h200", 1, per_host=1) if args.plan else jax.devices()[:1]
    mesh = jzero.make_mesh(config, devices=devices)
    step = jzero.make_train_step(jzero.from_flax(lambda rngs: Llama(shape, rngs=rngs)), config, mesh=mesh)
    tokens = jax.ShapeDtypeStruct((args.micro_batch, args.sequence), np.int32)
    compiled = step.lower({"inputs": tokens, "labels": tokens}).compile()
    record = {**vars(args), "jax": jax.__version__, "planned_gib": gib(memory(compiled).peak)}
    if not args.plan:
        record |= run(step, compiled, args, shape)
    print(json.dumps(record), flush=True)


def run(step: jzero.TrainStep, compiled: Any, args: argparse.Namespace, shape: Any) -> dict[str, Any]:
    text = np.random.default_rng(0).integers(0, shape.vocab_size, (args.micro_batch, args.sequence + 1), dtype=np.int32)
    batch = step.place({"inputs": text[:, :-1], "labels": text[:, 1:]})
    device = jax.devices()[0]
    state = step.init(jax.random.key(0))
    jax.block_until_ready(state)
    stored = collections.Counter()
    for x in jax.tree.leaves(state.params):
        stored[str(x.dtype)] += x.nbytes
    initialised = device.memory_stats()
    losses = []

    def one() -> Any:
        nonlocal state
        state, metrics, _ = compiled(state, (batch,), None, None, NEVER, None)  # no extra, no rate from outside
        losses.append(metrics["loss"])
        return state

    found = measure(one, repeats=5, steps=4)
    tokens = args.micro_batch * args.sequence
    # No product for the gradient of a frozen weight: a third of those of the matrices. Attention's have none.
    flops = (shape.flops_per_token(args.sequence) - shape.flops_per_token(1) / 3) * tokens
    return {
        **found,
        "device": device.device_kind,
        "tokens_s": round(tokens / found["step_s"]),
        "mfu": round(flops / found["step_s"] / PEAK[device.device_kind], 3),
        "params_gib": {dtype: gib(size) for dtype, size in stored.items()},
        "state_gib": gib(initialised["bytes_in_use"]),
        "init_peak_gib": gib(initialised["peak_bytes_in_use"]),
        "peak_gib": gib(device.memory_stats()["peak_bytes_in_use"]),
        "losses": {i + 1: round(float(losses[i]), 4) for i in (0, 4, 9, len(losses) - 1)},
    }


def gib(size: float) -> float:
    return round(size / 2**30, 2)


if __name__ == "__main__":
    main()
