"""Warnings about a planned step: what costs throughput or memory in the field, one line each, with the fix."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from jzero.batch import Amount
from jzero.planner.collectives import Collectives
from jzero.planner.gpus import GPU
from jzero.planner.products import Products
from jzero.values.sizes import size_text

if TYPE_CHECKING:
    from jzero.train_step import TrainStep

WIDE = 2**24  # bytes in float32 per step that are worth a line
SMALL, MANY = 2**20, 64  # bytes of a collective that is all latency; how many of one kind are worth a line
LONG = 2048  # tokens from which the scores of XLA's attention matter
_SYNC = re.compile(r' = .* (all-gather|reduce-scatter|all-reduce|collective-permute)(?:-start)?\(.*"is_sync":true')
_SYNC_PLAIN = re.compile(r" = \S+ reduce-scatter\(")


def advice(
    step: TrainStep, gpu: GPU, text: str, collectives: Collectives, products: Products, amount: Amount
) -> tuple[str, ...]:
    """List the warnings.

    Args:
      text: the compiled program.
      collectives, products: its collectives; the products of its trace.
      amount: of the global batch.
    """
    half = step.config.precision != "fp32"
    found = [*_reductions(text), *_small(collectives), *_rematerialisation(text)]
    if half:
        found += [*_wide_collectives(step, collectives), *_wide_products(products)]
    else:
        found += _no_half(gpu)
    return (*found, *_attention(gpu, text, amount))


def _no_half(gpu: GPU) -> Iterator[str]:
    name = "bf16" if gpu.compute_capability >= (8, 0) else "fp16"
    if gpu.compute_capability >= (7, 0):
        yield (
            f"the step computes in float32, at a fraction of the speed and with twice the activations; fix: "
            f'"{name}": {{"enabled": true}}'
        )


def _reductions(text: str) -> Iterator[str]:
    kinds = [match[1] for match in _SYNC.finditer(text)] + ["reduce-scatter"] * len(_SYNC_PLAIN.findall(text))
    if count := kinds.count("reduce-scatter"):
        yield (
            f"{count} reduce-scatter operations of the program are synchronous: nothing overlaps them; fix: keep "
            "xla_gpu_enable_latency_hiding_scheduler on, or accumulate over more micro-batches"
        )


def _wide_collectives(step: TrainStep, collectives: Collectives) -> Iterator[str]:
    gathers = collectives.select(kind="all-gather", dtype="f32")
    if gathers.bytes > WIDE:
        yield (
            f"{gathers.launches} all-gathers of a step move {size_text(gathers.bytes)} in float32; "
            f"fix: {step.precision.compute} for these parameters halves it"
        )
    reduced = sum(collectives.select(kind=kind, dtype="f32").bytes for kind in ("reduce-scatter", "all-reduce"))
    if reduced > WIDE:
        yield (
            f"gradients of {size_text(reduced)} a step are reduced in float32; fix: "
            f'"communication_data_type": "{step.config.precision}" halves it'
        )


def _small(collectives: Collectives) -> Iterator[str]:
    for kind in ("all-gather", "reduce-scatter", "all-reduce"):
        count = sum(row.times for row in collectives.select(kind=kind) if row.bytes < SMALL)
        if count > MANY:
            yield (
                f"{count} {kind} operations of a step are smaller than {size_text(SMALL)} and cost their latency; fix: "
                "a larger zero_optimization.stage3_param_persistence_threshold, or stack.unroll, so that XLA combines "
                "them"
            )


def _rematerialisation(text: str) -> Iterator[str]:
    if count := len(re.findall(r"^\s+%?[\w.\-]+\.remat\d*(?:\.\d+)* = ", text, re.MULTILINE)):
        yield (
            f"XLA recomputes {count} operations of its own accord, because memory is short; fix: choose what to "
            "recompute with activation_checkpointing.policy, or take a smaller micro-batch or more GPUs"
        )


def _wide_products(products: Products) -> Iterator[str]:
    if products.float32_share > 0.01:
        where = next(iter(products.float32_by_line))
        yield (
            f"{products.float32_share:.0%} of the products' FLOPs run in float32, most of them at {where}; fix: cast "
            "its operands to the compute dtype"
        )


def _attention(gpu: GPU, text: str, amount: Amount) -> Iterator[str]:
    length = (amount.tokens or 0) // max(amount.samples, 1)
    if length < LONG or gpu.compute_capability < (8, 0) or "__cudnn$fmha" in text or "flash_mha_fwd" in text:
        return
    if re.search(rf"\w\[\d+,(?:\d+,)*{length},{length}\]", text):
        yield (
            f"attention keeps scores of {length} x {length}; fix: cuDNN's, which keeps none: "
            "jzero.attention, in half precision with heads of at most 128"
        )
