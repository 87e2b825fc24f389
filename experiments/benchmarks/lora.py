"""Measure a LoRA or QLoRA fine-tune of a decoder in bf16 on one GPU as one JSON line.

    python -m experiments.benchmarks.lora --preset 8b --rank 16 --targets all-linear --micro-batch 4
    python -m experiments.benchmarks.lora --preset 70b --quantized nf4 --remat full --micro-batch 1

Random weights and tokens, frozen weights once in bf16 or in few bits, AdamW over float32 adapters, the same batch in
every step. `lora_torch.py` has PyTorch's side.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
from typing import Any

import jax
import numpy as np

import jzero
from jzero.planner import gpu_devices, memory
from jzero.step.update import NEVER
from models.decoder import Decoder
from models.decoder_config import DecoderConfig
from models.llama import PRESETS
from models.lora import LoRAConfig
from models.quantized import Quantized, quantize

from .gpu import PEAK, measure

QWEN = {"qkv_bias": True, "rope_theta": 1e6, "norm_eps": 1e-6, "family": "qwen2"}
SHAPES = {**PRESETS, "qwen2.5-32b": DecoderConfig(64, 5120, 40, 8, 27648, vocab_size=152_064, **QWEN)}


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--preset", choices=SHAPES, default="8b")
    p.add_argument("--rank", type=int, default=16)
    p.add_argument("--targets", default="all-linear", help="module names with commas between, or all-linear")
    p.add_argument("--quantized", choices=["nf4", "int8", "none"], default="none", help="the layers' frozen matrices")
    p.add_argument("--micro-batch", type=int, default=4, help="sequences")
    p.add_argument("--sequence", type=int, default=4096)
    p.add_argument("--remat", choices=["none", "matmuls", "full"], default="none")
    stack = p.add_mutually_exclusive_group()
    stack.add_argument("--unroll", action="store_true", help="unroll the stack")
    stack.add_argument("--scan", action="store_true", help="scan the stack, which compiles faster")
    p.add_argument("--lr", type=float, default=1e-3)
    p.add_argument("--plan", action="store_true", help="only compile, for an H200 that need not be there")
    return p.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    if args.plan:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_enable_compilation_cache", False)  # it cannot read back programs for absent GPUs
    targets = args.targets if args.targets == "all-linear" else args.targets.split(",")
    kind = None if args.quantized == "none" else args.quantized
    lora = LoRAConfig(r=args.rank, lora_alpha=2 * args.rank, target_modules=targets, quantized=kind)
    shape = dataclasses.replace(SHAPES[args.preset], lora=lora)
    config = {
        "train_batch_size": args.micro_batch,
        "optimizer": {"type": "AdamW", "params": {"lr": args.lr}},
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "trainable_parameters": ["lora_"],
        "activation_checkpointing": {"policy": args.remat},
        **({"stack": {"unroll": args.unroll}} if args.unroll or args.scan else {}),
    }
    devices = gpu_devices("h200", 1, per_host=1) if args.plan else jax.devices()[:1]
    mesh = jzero.make_mesh(config, devices=devices)
    step = jzero.make_train_step(jzero.from_flax(lambda rngs: Decoder(shape, rngs=rngs)), config, mesh=mesh)
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
    params = None if args.quantized == "none" else quantized_weights(step.state_shapes.params, args.quantized)
    state = step.init(jax.random.key(0), params, donate=True)
    jax.block_until_ready(state)
    stored = collections.Counter()
    for x in jax.tree.leaves(state.params):
        stored[str(x.dtype)] += x.nbytes
    initialised = memory_stats(device)
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
        "model_tflops": round(flops / found["step_s"] / 1e12, 1),
        "mfu": round(flops / found["step_s"] / PEAK.get(device.device_kind, float("inf")), 3),
        "params_gib": {dtype: gib(size) for dtype, size in stored.items()},
        "state_gib": gib(initialised["bytes_in_use"]),
        "init_peak_gib": gib(initialised["peak_bytes_in_use"]),
        "peak_gib": gib(memory_stats(device)["peak_bytes_in_use"]),
        "losses": {i + 1: round(float(losses[i]), 4) for i in (0, 4, 9, len(losses) - 1)},
    }


def quantized_weights(shapes: Any, kind: str) -> Any:
    """Draw the quantised matrices layer by layer, since no GPU holds all of 70B unquantised; None for the others."""
    if not isinstance(shapes, dict):
        return None
    made = {name: quantized_weights(part, kind) for name, part in shapes.items()}
    if "codes" not in shapes:
        return made
    layers, rows, *out = shapes["codes"].shape
    matrix = (rows * 2 if kind == "nf4" else rows, *out)

    @jax.jit
    def draw(keys: jax.Array) -> Quantized:
        return jax.lax.map(lambda key: quantize(0.02 * jax.random.normal(key, matrix), kind), keys)

    return made | draw(jax.random.split(jax.random.key(0), layers))._asdict()


def memory_stats(device: jax.Device) -> dict[str, int]:
    return device.memory_stats() or {"bytes_in_use": 0, "peak_bytes_in_use": 0}  # CPUs have none


def gib(size: float) -> float:
    return round(size / 2**30, 2)


if __name__ == "__main__":
    main()
