"""Measure steps of the models of `models/` on the GPUs at hand, beside their plans; or plan them without GPUs.

    python -m experiments.benchmarks.zoo [--rates FILE] [NAME ...]
    python -m experiments.benchmarks.zoo --plan h100 --gpus 2 [NAME ...]

One JSON line for each case: the peak and the median of ten steps with a synchronisation after each, and what the plan
of the program that ran says; with --plan what a plan without GPUs says of the same step. The peak counts since the
process began: for the peak of a case name it alone.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import jax
import numpy as np

import jzero
from jzero.planner import Rates
from jzero.planner.plan import observed
from models.bert import Bert, BertConfig
from models.gpt2 import GPT2, GPT2Config
from models.llama import Llama, preset
from models.vit import ViT, ViTConfig

GPT2_LARGE = GPT2Config(36, 1280, 20, 5120, pad_vocab_to=128)
GPT2_XL = GPT2Config(48, 1600, 25, 6400, pad_vocab_to=128)
BERT_LARGE = BertConfig(24, 1024, 16, 4096, pad_vocab_to=64)
VIT_LARGE, VIT_HUGE = ViTConfig(24, 1024, 16, 4096), ViTConfig(32, 1280, 16, 5120, patch_size=14)
LLAMA_1B, LLAMA_3B = preset("1b"), preset("8b", num_layers=12)

# Name: (the model, rows of a micro-batch, tokens of a row, what the config has beside the plain step)
CASES: dict[str, tuple[Any, int, int, dict[str, Any]]] = {
    "gpt2-large": (GPT2_LARGE, 8, 1024, {}),
    "gpt2-large-full": (GPT2_LARGE, 16, 1024, {"activation_checkpointing": {"policy": "full"}}),
    "gpt2-xl-zero3": (GPT2_XL, 4, 1024, {"zero_optimization": {"stage": 3}}),
    "bert-large": (BERT_LARGE, 32, 512, {}),
    "bert-large-zero2": (BERT_LARGE, 32, 512, {"zero_optimization": {"stage": 2}, "gradient_accumulation_steps": 2}),
    "vit-large": (VIT_LARGE, 64, 0, {}),
    "vit-huge-zero1": (VIT_HUGE, 32, 0, {"zero_optimization": {"stage": 1}}),
    "llama-1b-offload": (LLAMA_1B, 4, 4096, {
        "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}},
        "activation_checkpointing": {"policy": "matmuls"},
    }),
    "llama-3b-offload-both": (LLAMA_3B, 2, 4096, {
        "zero_optimization": {
            "stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"},
        },
        "activation_checkpointing": {"policy": "full"},
    }),
    "llama-1b-loop": (LLAMA_1B, 1, 4096, {
        "mesh": {"pipe": 2}, "gradient_accumulation_steps": 16, "stack": {"unroll": False},
        "activation_checkpointing": {"policy": "matmuls"},
    }),
    "llama-1b-unrolled": (LLAMA_1B, 1, 4096, {
        "mesh": {"pipe": 2}, "gradient_accumulation_steps": 16, "activation_checkpointing": {"policy": "matmuls"},
    }),
}  # fmt: skip
MODULES = {GPT2Config: GPT2, BertConfig: Bert, ViTConfig: ViT}
CONFIG = {
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
    "bf16": {"enabled": True},
    "communication_data_type": "bf16",
}


def model(shape: Any) -> Any:
    module = MODULES.get(type(shape), Llama)
    return jzero.from_flax(lambda rngs: module(shape, rngs=rngs))


def batch(shape: Any, rows: int, length: int) -> dict[str, jax.ShapeDtypeStruct]:
    if isinstance(shape, ViTConfig):
        size = shape.image_size
        images = jax.ShapeDtypeStruct((rows, size, size, shape.num_channels), np.float32)
        return {"images": images, "labels": jax.ShapeDtypeStruct((rows,), np.int32)}
    return {name: jax.ShapeDtypeStruct((rows, length), np.int32) for name in ("inputs", "labels")}


def data(shapes: dict[str, jax.ShapeDtypeStruct]) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        name: rng.normal(size=x.shape).astype(x.dtype)
        if x.dtype == np.float32
        else rng.integers(0, 1000, x.shape, np.int32)
        for name, x in shapes.items()
    }


def measure(name: str, rates: Rates | None) -> dict[str, Any]:
    shape, micro, length, more = CASES[name]
    step = jzero.make_train_step(model(shape), CONFIG | {"train_micro_batch_size_per_gpu": micro} | more)
    rows = step.place(data(batch(shape, step.batch_sizes.train, length)))
    state, walls = step.init(jax.random.key(0)), []
    for _ in range(14):
        start = time.perf_counter()
        state, _ = jax.block_until_ready(step(state, rows))
        walls.append(time.perf_counter() - start)
    median = statistics.median(walls[4:])
    plan = observed(step, median, rates)
    assert plan.measured is not None
    spread = {"min_s": round(min(walls[4:]), 5), "max_s": round(max(walls[4:]), 5)}
    return figures(plan) | {"measured_gib": round(plan.measured.peak_bytes / 2**30, 3), "measured_s": median} | spread


def figures(plan: Any) -> dict[str, Any]:
    memory = plan.memory
    return {
        "gpus": f"{plan.gpus} x {plan.gpu.description}",
        "planned_gib": round(memory.peak_bytes / 2**30, 3),
        "host_gib": round(memory.host_bytes / 2**30, 2),
        "planned_s": plan.time and round(plan.time.step_s, 5),
        "by_ms": plan.time and {name: round(1000 * s, 1) for name, s in plan.time.step.by.items()},
        "problem": plan.time_problem,
        "jax": jax.__version__,
    }


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(CASES)}; default: all")
    p.add_argument("--plan", metavar="KIND", help="plan for such GPUs instead")
    p.add_argument("--gpus", type=int, default=1, help="how many of them")
    p.add_argument("--rates", metavar="FILE", help="what `jzero calibrate` measured")
    args = p.parse_args()
    rates = Rates.load(args.rates) if args.rates else None
    if args.plan:
        jax.config.update("jax_platforms", "cpu")
    for name in args.names or CASES:
        shape, micro, length, more = CASES[name]
        if args.plan:
            config = CONFIG | {"train_micro_batch_size_per_gpu": micro} | more
            found = jzero.plan(
                model(shape), config, lambda rows, s=shape, n=length: batch(s, rows, n),
                gpu=args.plan, gpus_per_node=args.gpus, rates=rates,
            )  # fmt: skip
            record = figures(found)
        else:
            record = measure(name, rates)
        print(json.dumps({"case": name, **record}), flush=True)


if __name__ == "__main__":
    main()
