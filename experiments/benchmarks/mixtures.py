"""Measure one mixture of experts on one GPU, by jzero or by PyTorch, as one JSON line.

    python -m experiments.benchmarks.mixtures --case qwen3-moe --runner jzero

The layers of Qwen3-30B-A3B (arXiv:2505.09388) and of DeepSeek-V2-Lite (arXiv:2405.04434), as many as fit beside AdamW's
float32 masters and moments. The vocabulary is smaller: with so few layers its products would take most of the time.
bf16 products, clipping, no remat, random weights and tokens, no balance loss; `mixtures_torch.py` has PyTorch's side.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import jax
import numpy as np

import jzero
from jzero.planner import gpu_devices, memory
from models.decoder import Decoder
from models.decoder_config import DecoderConfig
from models.named import config_from_hf

from .first import steps
from .gpu import PEAK, measure

OPTIMIZER = {"lr": 3e-4, "betas": [0.9, 0.95], "weight_decay": 0.1}
CLIP, SEQUENCE = 1.0, 4096
RUNNERS = ("jzero", "torch", "torch-tuned")
SAME = {
    "hidden_act": "silu",
    "rope_theta": 1e4,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "vocab_size": 32000,
}
CASES: dict[str, dict[str, Any]] = {
    "qwen3-moe": {
        **SAME, "model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 6, "num_attention_heads": 32,
        "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 6144, "num_experts": 128,
        "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True,
    },
    "deepseek-v2-lite": {
        **SAME, "model_type": "deepseek_v2", "hidden_size": 2048, "num_hidden_layers": 7, "num_attention_heads": 16,
        "num_key_value_heads": 16, "kv_lora_rank": 512, "q_lora_rank": None, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "v_head_dim": 128, "intermediate_size": 10944, "n_routed_experts": 64,
        "n_shared_experts": 2, "num_experts_per_tok": 6, "moe_intermediate_size": 1408, "first_k_dense_replace": 1,
        "norm_topk_prob": False, "topk_method": "greedy",
    },
}  # fmt: skip
SMALL = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16,
    "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "intermediate_size": 64,
    "num_experts": 8, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "vocab_size": 128,
}  # fmt: skip


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--case", choices=CASES, required=True)
    p.add_argument("--runner", choices=RUNNERS, required=True)
    p.add_argument("--layers", type=int, help="instead of the case's")
    p.add_argument("--vocab", type=int, help="instead of 32,000")
    p.add_argument("--micro-batch", type=int, default=4, help=f"rows of {SEQUENCE:,} tokens")
    p.add_argument("--plan", action="store_true", help="only compile jzero's step, for an H200 that need not be there")
    p.add_argument("--tiny", action="store_true", help="small shapes, for a look at a CPU")
    return p.parse_args(argv)


def shape_of(args: argparse.Namespace) -> DecoderConfig:
    there = dict(CASES[args.case])
    if args.tiny:
        there |= {key: value for key, value in SMALL.items() if key in there}
    there |= {"num_hidden_layers": args.layers} if args.layers else {}
    there |= {"vocab_size": args.vocab} if args.vocab else {}
    return config_from_hf(there)


def tokens_of(shape: DecoderConfig, args: argparse.Namespace) -> np.ndarray:
    """Draw the rows, each of one more token than a row of the batch has."""
    size = args.micro_batch, (32 if args.tiny else SEQUENCE) + 1
    return np.random.default_rng(0).integers(0, shape.vocab_size, size, dtype=np.int32)


def make_step(shape: DecoderConfig, rows: int, devices: list[Any]) -> jzero.TrainStep:
    config = {
        "train_batch_size": rows,
        "optimizer": {"type": "AdamW", "params": OPTIMIZER},
        "gradient_clipping": CLIP,
        "bf16": {"enabled": True},
    }
    model = jzero.from_flax(lambda rngs: Decoder(shape, rngs=rngs))
    return jzero.make_train_step(model, config, mesh=jzero.make_mesh(config, devices=devices))


def planned(shape: DecoderConfig, tokens: np.ndarray) -> dict[str, Any]:
    """Compile for an H200; return what the compiler plans."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_compilation_cache", False)  # it cannot read back programs for absent GPUs
    step = make_step(shape, len(tokens), gpu_devices("h200", 1, per_host=1))
    row = jax.ShapeDtypeStruct((len(tokens), tokens.shape[1] - 1), np.int32)
    begin = time.perf_counter()
    compiled = step.lower({"inputs": row, "labels": row}).compile()
    return {"compile_s": round(time.perf_counter() - begin, 1), "planned_gib": gib(memory(compiled).peak)}


def measured(shape: DecoderConfig, tokens: np.ndarray) -> dict[str, Any]:
    """Train on the same batch in every step; return what was measured."""
    begin, device = time.perf_counter(), jax.devices()[0]
    step = make_step(shape, len(tokens), [device])
    batch = step.place({"inputs": tokens[:, :-1], "labels": tokens[:, 1:]})
    state = step.init(jax.random.key(0))

    def run() -> jax.Array:
        nonlocal state
        state, metrics = step(state, batch)
        return metrics["loss"]

    first = float(run())
    start_s = time.perf_counter() - begin
    found = measure(run, steps=steps(run, float))
    peak = (device.memory_stats() or {"peak_bytes_in_use": 0})["peak_bytes_in_use"]  # CPUs have none
    return {
        "jax": jax.__version__, "device": device.device_kind, "start_s": round(start_s, 1), **found,
        "peak_gib": gib(peak), "losses": [round(first, 4), round(float(run()), 4)],
    }  # fmt: skip


def gib(size: float) -> float:
    return round(size / 2**30, 2)


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    shape = shape_of(args)
    tokens = tokens_of(shape, args)
    rows, length = len(tokens), tokens.shape[1] - 1
    record = {
        "case": args.case, "runner": args.runner, "layers": shape.num_layers, "vocab": shape.vocab_size,
        "parameters": shape.num_parameters, "micro_batch": rows,
    }  # fmt: skip
    if args.plan:
        print(json.dumps({**record, **planned(shape, tokens)}), flush=True)
        return
    if args.runner == "jzero":
        record |= measured(shape, tokens)
    else:
        from . import mixtures_torch

        record |= mixtures_torch.measured(shape, tokens, tuned=args.runner == "torch-tuned")
    speed = rows * length / record["step_s"]
    flops = speed * shape.flops_per_token(length)  # of the parameters that a token uses, and of attention
    record |= {"tokens_s": round(speed), "model_tflops": round(flops / 1e12, 1)}
    if record["device"] in PEAK:
        record["mfu"] = round(flops / PEAK[record["device"]], 3)
    print(json.dumps(record), flush=True)


if __name__ == "__main__":
    main()
