"""Plan training runs whose speed others published, and print both speeds and their ratio as a row of a table.

python -m experiments.benchmarks.published                       # every case; one to four minutes of a core each
python -m experiments.benchmarks.published 8b-8xH100 7b-8xA100   # some

`2026-11-24-published.md` has the sources in full, the rows, and what differs in each.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, replace
from typing import Any

import jax

import jzero
from jzero.planner.named_models import named_model
from jzero.planner.rates import Rates


@dataclass(frozen=True)
class Case:
    """A published run: the nearest that jzero can plan, and the tokens/s of one GPU that its source states."""

    source: str
    published: float
    model: tuple[str, ...]  # of --model, then of --set
    sequence: int
    gpu: str
    gpus: int
    rows: int  # of one GPU's micro-batch
    remat: str
    accumulation: int = 1
    per_node: int = 8
    reduce: str = "fp32"
    changes: dict[str, Any] = field(default_factory=dict)  # of the config
    link: float = 50e9  # bytes/s of each GPU to other hosts


LLAMA_3 = ("llama:8b", "vocab_size=128256")
LLAMA_3_70B = ("llama:70b", "vocab_size=128256")
LLAMA_2 = ("llama:8b", "num_kv_heads=32", "d_ff=11008")
KEMPNER_13B = ("llama:8b", "num_layers=40", "d_model=5120", "num_heads=40", "d_ff=17920", "vocab_size=128256")
SCANNED = {"stack": {"unroll": False}}


def mpt(layers: int, width: int) -> tuple[str, ...]:
    """Return GPT-2 in the shape of an MPT, which has as many parameters as its source states."""
    shape = f"num_layers={layers} num_heads=1 d_model={width} num_heads={width // 128} d_ff={4 * width}"
    return ("gpt2:xl", *shape.split(), "vocab_size=50368", "pad_vocab_to=1")  # each change is checked: 1 head first


TITAN = "torchtitan, benchmarks/llama3_h100_202412_torchtitan.md"
FOUNDRY = "llm-foundry, scripts/train/benchmarking/README.md"
KEMPNER = "KempnerForge, benchmarks/mfu_scaling/mfu_scaling_2026-04-05.md"
IBM = "fms-fsdp, pytorch.org's _posts/2024-03-13-maximizing-training.md"
BRIDGE = "Megatron Bridge, docs/performance-summary.md"
CASES = {
    "8b-8xH100": Case(TITAN, 6667, LLAMA_3, 8192, "h100", 8, 2, "matmuls"),
    "8b-128xH100": Case(TITAN, 6514, LLAMA_3, 8192, "h100", 128, 2, "matmuls"),
    "8b-4xH200": Case(KEMPNER, 38983 / 4, LLAMA_3, 4096, "h200", 4, 4, "full", 2, 4),
    "13b-8xH200": Case(KEMPNER, 35405 / 8, KEMPNER_13B, 4096, "h200", 8, 4, "full", 4, 4),
    "mpt-7b-8xH100": Case(FOUNDRY, 10643, mpt(32, 4096), 2048, "h100", 8, 6, "none"),
    "mpt-13b-8xH100": Case(FOUNDRY, 4792, mpt(40, 5120), 2048, "h100", 8, 2, "none"),
    "mpt-13b-64xH100": Case(FOUNDRY, 4800, mpt(40, 5120), 2048, "h100", 64, 2, "none"),
    "mpt-30b-32xH100": Case(FOUNDRY, 2308, mpt(48, 7168), 2048, "h100", 32, 14, "full", 3),
    "mpt-70b-64xH100": Case(FOUNDRY, 1039, mpt(80, 8192), 2048, "h100", 64, 8, "full", 4, changes=SCANNED),
    "mpt-7b-8xA100": Case(FOUNDRY, 4641, mpt(32, 4096), 2048, "a100", 8, 6, "none", 2),
    "mpt-13b-8xA100": Case(FOUNDRY, 2262, mpt(40, 5120), 2048, "a100", 8, 2, "none", 3),
    "mpt-70b-64xA100": Case(FOUNDRY, 410, mpt(80, 8192), 2048, "a100", 64, 8, "full", 4, 8, "bf16", SCANNED),
    "7b-128xA100": Case(
        IBM, 3700, LLAMA_2, 4096, "a100", 128, 2, "none", reduce="bf16", changes={"mesh": {"data": 16}}, link=6.25e9
    ),
    "7b-96xH100": Case(
        IBM, 7500, LLAMA_2, 4096, "h100", 96, 2, "none", reduce="bf16", changes={"mesh": {"data": 12}}, link=12.5e9
    ),
    "8b-32xH200-fp8": Case(
        "torchtitan, benchmarks/llama3-8b_h200_202506_trainy-whitefiber.md",
        10938, LLAMA_3, 8192, "h200", 32, 2, "matmuls",
    ),
    "8b-8xH100-fp8": Case(BRIDGE, 14451, LLAMA_3, 8192, "h100", 8, 1, "none", 16),
    "70b-64xH100-fp8": Case(BRIDGE, 1664, LLAMA_3_70B, 8192, "h100", 64, 1, "full", 2, changes=SCANNED),
    "70b-64xH100-fp8-pipeline": Case(
        BRIDGE, 1664, LLAMA_3_70B, 8192, "h100", 64, 1, "matmuls", 16, changes={
            "mesh": {"pipe": 8},
            "pipeline": {"schedule": "interleaved", "chunks": 5},
            "zero_optimization": {"stage": 2},
        },
    ),
    "405b-1024xH100-fp8": Case(
        BRIDGE, 328, ("llama:405b", "vocab_size=128256"), 8192, "h100", 1024, 1, "full", reduce="bf16", changes=SCANNED
    ),
}  # fmt: skip


def planned(case: Case) -> jzero.planner.Plan:
    """Plan the run of a case."""
    config = {
        "train_micro_batch_size_per_gpu": case.rows,
        "gradient_accumulation_steps": case.accumulation,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "betas": [0.9, 0.95], "weight_decay": 0.1}},
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "communication_data_type": case.reduce,
        "zero_optimization": {"stage": 3},
        "activation_checkpointing": {"policy": case.remat},
        **case.changes,
    }
    name, *shape = case.model
    model, batch = named_model(name, case.sequence, shape)
    rates = replace(Rates.of(case.gpu), hosts=0.9 * case.link)  # the share that Rates.hosts takes
    nodes = case.gpus // case.per_node
    return jzero.plan(model, config, batch, gpu=case.gpu, nodes=nodes, gpus_per_node=case.per_node, rates=rates)


def main(names: list[str]) -> None:
    jax.config.update("jax_platforms", "cpu")
    for name in names or CASES:
        case = CASES[name]
        plan = planned(case)
        record = plan.record()
        time, rows = record["time"], record["layout"]["batch"]["global"]
        speed, waits = time["tokens_per_s_gpu"], time["exposed_s"] / time["step_s"]
        cells = (
            name, f"{rows:,} x {case.sequence:,}", f"{case.published:,.0f}", f"{speed:,.0f}",
            f"{speed / case.published:.2f}", f"{time['mfu']:.0%}", f"{waits:.0%}",
            f"{record['memory']['peak_bytes'] / 2**30:.1f}", case.source,
        )  # fmt: skip
        print("|", " | ".join(cells), "|", flush=True)
        print(plan, file=sys.stderr)


if __name__ == "__main__":
    main(sys.argv[1:])
