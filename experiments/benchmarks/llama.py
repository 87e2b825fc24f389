"""Measure the training speed of one Llama case as one JSON line: one process for all GPUs, or one per GPU.

    python -m experiments.benchmarks.llama --preset 1b --stage 3 --micro-batch 4
    jzero --no_local_rank --module experiments.benchmarks.llama --preset 1b --stage 3 --micro-batch 4

FSDP2 and DeepSpeed were measured under the same conditions: random tokens with a fixed seed, bf16 compute over fp32
masters, AdamW (betas .9/.95, weight decay .1), clip 1.0, cross-entropy in fp32, 4 warm-up steps, then the median of 10
steps with a synchronisation after each, then 10 steps without any (`--steps`).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any, get_args

import jax
import numpy as np

import jzero
from experiments.benchmarks.gpu import MEASURED, WARM
from jzero.attention_kernels import Attend
from jzero.planner import gpu_devices, memory
from jzero.step.update import NEVER
from models.llama import PRESETS, Llama, preset
from models.moe import MixtureConfig


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    p = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    p.add_argument("--preset", choices=sorted(PRESETS), default="1b")
    p.add_argument("--layers", type=int, help="instead of the preset's")
    p.add_argument("--d-ff", type=int, help="instead of the preset's")
    p.add_argument("--mixture", type=int, nargs=3, metavar=("EXPERTS", "TOP_K", "WIDTH"), help="of experts")
    p.add_argument("--capacity", type=float, metavar="FACTOR", help="of an expert; default: no token is dropped")
    p.add_argument("--stage", type=int, default=3)
    p.add_argument("--micro-batch", type=int, default=4, help="sequences per GPU")
    p.add_argument("--accum", type=int, default=1)
    p.add_argument("--sequence", type=int, default=4096)
    p.add_argument("--data", type=int, default=1, help="size of the data axis; the rest is zero")
    p.add_argument("--expert", type=int, default=1, help="size of the expert axis")
    p.add_argument("--context", type=int, default=1, help="size of the context axis")
    p.add_argument("--tensor", type=int, default=1, help="size of the tensor axis")
    p.add_argument("--pipe", type=int, default=1, help="pipeline stages")
    p.add_argument("--schedule", choices=["gpipe", "1f1b", "interleaved", "zero_bubble"], default="1f1b")
    p.add_argument("--chunks", type=int, default=1, help="chunks per stage")
    p.add_argument("--gather", choices=["step", "micro_batch"], help="when a stage's parameters are gathered")
    p.add_argument("--remat", choices=["none", "matmuls", "full"], default="none")
    p.add_argument("--scan", action="store_true", help="scan the stack instead of unrolling it")
    p.add_argument("--reduce", choices=["fp32", "bf16"], default="bf16", help="dtype of the gradient reduction")
    p.add_argument("--fp8", choices=["hybrid", "e4m3"], help="multiply the stack's weights in fp8, in this format")
    p.add_argument("--recipe", choices=["current", "delayed"], default="current", help="of the scales of --fp8")
    p.add_argument("--attention", choices=get_args(Attend), default="auto", help="the kernel")
    p.add_argument("--optimizer", choices=["AdamW", "Muon"], default="AdamW")
    p.add_argument("--state-dtype", choices=["fp32", "bf16", "fp8"], default="fp32", help="of the optimizer's moments")
    p.add_argument("--lr", type=float, default=3e-4)
    p.add_argument("--zero", action="append", default=[], metavar="KEY=VALUE", help="of zero_optimization, in JSON")
    p.add_argument("--option", action="append", default=[], metavar="NAME=VALUE", help="an XLA compiler option")
    p.add_argument("--steps", type=int, default=10, help="measured steps, with and without synchronisation")
    p.add_argument("--tag", default="")
    p.add_argument("--plan", type=int, metavar="GPUS", help="only compile, for this many GPUs that need not be there")
    p.add_argument("--gpu", default="h200", metavar="KIND", help="of --plan")
    p.add_argument("--hlo", metavar="FILE", help="write the optimized program")
    p.add_argument("--profile", help="write a profile of three steps to this directory")
    return p.parse_args(argv)


def config(args: argparse.Namespace) -> dict:
    def values(pairs: list[str]) -> dict[str, Any]:
        return {key: value(text) for key, text in (pair.split("=", 1) for pair in pairs)}

    def value(text: str) -> Any:
        try:
            return json.loads(text)
        except ValueError:
            return text  # a word without quotes

    return {
        "train_micro_batch_size_per_gpu": args.micro_batch,
        "gradient_accumulation_steps": args.accum,
        "optimizer": {
            "type": args.optimizer,
            "state_dtype": args.state_dtype,
            "params": {"lr": args.lr, "betas": [0.9, 0.95], "weight_decay": 0.1},
        },
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "fp8": {"enabled": bool(args.fp8), "format": args.fp8 or "hybrid", "recipe": args.recipe},
        "communication_data_type": args.reduce,
        "zero_optimization": {"stage": args.stage, **values(args.zero)},
        "activation_checkpointing": {"policy": args.remat},
        "mesh": {name: getattr(args, name) for name in ("pipe", "data", "expert", "context", "tensor")},
        "pipeline": {"schedule": args.schedule, "chunks": args.chunks, "gather": args.gather},
        "stack": {"unroll": not args.scan},
        "compiler_options": values(args.option),
    }


def changes(args: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of the preset that the options change."""
    fields = {name: value for name, value in (("num_layers", args.layers), ("d_ff", args.d_ff)) if value}
    if args.mixture:
        fields["mixture"] = MixtureConfig(*args.mixture, capacity_factor=args.capacity)
    return fields


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    shape = preset(args.preset, attention=args.attention, **changes(args))
    model = jzero.from_flax(lambda rngs: Llama(shape, rngs=rngs))
    settings = config(args)
    if args.plan:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_enable_compilation_cache", False)  # it cannot read back programs for absent GPUs
        devices = gpu_devices(args.gpu, args.plan, per_host=min(8, args.plan))
    else:
        jzero.init_distributed()
        devices = jax.devices()
    step = jzero.make_train_step(model, settings, mesh=jzero.make_mesh(settings, devices=devices))
    rows = step.batch_sizes.train
    tokens = jax.ShapeDtypeStruct((rows, args.sequence), np.int32)
    start = time.perf_counter()
    compiled = step.lower({"inputs": tokens, "labels": tokens}).compile()
    record = {
        "tag": args.tag,
        "gpus": len(devices),
        "processes": jzero.get_world_size(),
        **{k: v for k, v in vars(args).items() if k not in ("tag", "plan", "gpu")},
        "parameters": sum(x.size for x in jax.tree.leaves(step.state_shapes.params)),
    }
    record |= {
        "compile_s": round(time.perf_counter() - start, 1),
        "planned_gib": round(memory(compiled, step).peak / 2**30, 2),
        "host_gib": round(step.host_bytes / 2**30, 2),
    }
    if args.hlo:
        Path(args.hlo).write_text(compiled.as_text())
    if not args.plan:
        record |= measure(step, compiled, args, shape)
    jzero.log_dist(json.dumps(record))


def measure(step: jzero.TrainStep, compiled, args: argparse.Namespace, shape) -> dict:
    rows = step.batch_sizes.train
    rng = np.random.default_rng(0)
    pool = []
    for _ in range(4):
        text = rng.integers(0, shape.vocab_size, (rows, args.sequence + 1), dtype=np.int32)
        pool.append(step.place({"inputs": text[:, :-1], "labels": text[:, 1:]}))
    start = time.perf_counter()
    state = jax.block_until_ready(step.init(jax.random.key(0)))
    initialised = time.perf_counter() - start
    losses, drops = [], []

    def run(n: int, synchronise: bool) -> list[float]:
        nonlocal state
        times = []
        for i in range(n):
            start = time.perf_counter()
            # No extra, no rate from outside.
            state, metrics, _ = compiled(state, (pool[i % len(pool)],), None, None, NEVER, None)
            losses.append(metrics["loss"])
            drops.append(metrics.get("drop_rate", 0.0))
            if synchronise:
                jax.block_until_ready(state)
            times.append(time.perf_counter() - start)
        print(f"{n} steps, {'synchronised' if synchronise else 'queued'}: {times}", file=sys.stderr, flush=True)
        return times

    run(4, True)
    jzero.log_dist(WARM)
    walls = run(args.steps, True)
    start = time.perf_counter()
    run(args.steps, False)
    jax.block_until_ready(state)
    free = (time.perf_counter() - start) / args.steps
    jzero.log_dist(MEASURED)
    if args.profile:
        with jax.profiler.trace(args.profile):
            run(3, True)
    devices = len(step.mesh.devices.flat)
    per_gpu = rows * args.sequence / devices
    flops = shape.flops_per_token(args.sequence)
    median = statistics.median(walls)
    return {
        "init_s": round(initialised, 1),
        "step_s": round(median, 5),
        "step_s_min": round(min(walls), 5),
        "step_s_max": round(max(walls), 5),
        "free_step_s": round(free, 5),
        "tokens_s_gpu": round(per_gpu / median),
        "free_tokens_s_gpu": round(per_gpu / free),
        "model_tflops": round(per_gpu / median * flops / 1e12, 1),
        "peak_gib": round(
            max((d.memory_stats() or {}).get("peak_bytes_in_use", 0) for d in jax.local_devices()) / 2**30, 2
        ),
        "losses": [round(float(loss), 5) for loss in losses[:14]],
        "last_loss": round(float(losses[-1]), 4),
        "drop_rate": round(float(statistics.fmean(map(float, drops))), 4),
        "jax": jax.__version__,
        "device": step.mesh.devices.flat[0].device_kind,
    }


if __name__ == "__main__":
    main()
