"""Advises on a step: warnings of what costs throughput or memory, and configurations near one that does not fit."""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import jax
from jax.sharding import Mesh

from jzero.config import Config
from jzero.config.sizes import ACCUM, MICRO, MICS, TRAIN, group_degrees
from jzero.display.slow_work import slow_work
from jzero.display.text_table import size_text
from jzero.errors import ConfigError, some_of
from jzero.mesh import CONTEXT, DATA, TENSOR, ZERO, ZERO_AXES, degrees_text, present
from jzero.model import SUFFIX
from jzero.planner import candidates as keys
from jzero.planner.candidates import Candidate, merged
from jzero.planner.collectives import Collectives
from jzero.planner.gpus import GPU, GPUS, described_gpus
from jzero.planner.memory import Live, memory
from jzero.planner.plan_facts import PlanFacts
from jzero.planner.state_bytes import bytes_by_stage, leaf_bytes, state_bytes
from jzero.planner.traced_collectives import TracedCollective, TracedCollectives
from jzero.planner.traced_matmuls import Matmuls
from jzero.spread.matmuls import WHOLE_FACTOR
from jzero.step.batch import Amount
from jzero.step.train_step import TrainStep, make_train_step
from jzero.stored_names import numberless
from jzero.tiling import CUT
from jzero.tree import PyTree
from jzero.values.kinds import either

WIDE = 2**24  # bytes in float32 per step that are worth a line
LATENCY_BOUND, MANY = 2**20, 64  # bytes of a collective that is all latency; how many of one kind are worth a line
LONG = 2048  # tokens from which the scores of XLA's attention matter
_SYNCHRONOUS = re.compile(r' = .* reduce-scatter(?:-start)?\(.*"is_sync":true| = \S+ reduce-scatter\(')
_RECOMPUTED = re.compile(r"^\s+%?[\w.\-]+\.remat\d*(?:\.\d+)* = ", re.MULTILINE)


TRIES, WANTED, MOST_DOUBLINGS = 8, 2, 6  # programs that are compiled at most; configurations that are enough
NOTABLE_SHARE = 0.05  # of the buffers at the peak: worth a line


def advice(
    step: TrainStep, gpu: GPU, text: str, collectives: Collectives, matmuls: Matmuls, amount: Amount
) -> tuple[str, ...]:
    """List the warnings.

    Args:
      text: the compiled program.
      collectives, matmuls: its collectives; the matmuls of its trace.
      amount: of the global batch.
    """
    half, synchronous = step.config.precision != "fp32", len(_SYNCHRONOUS.findall(text))
    recomputed, small = len(_RECOMPUTED.findall(text)), Counter[str]()
    for row in collectives:
        small[row.kind] += row.times * (row.bytes < LATENCY_BOUND)
    gathers = collectives.select(kind="all-gather", dtype="f32")
    reduced = sum(collectives.select(kind=kind, dtype="f32").bytes for kind in ("reduce-scatter", "all-reduce"))
    where, name = next(iter(matmuls.float32_by_line), ""), "bf16" if gpu.compute_capability >= (8, 0) else "fp16"
    checks = [
        (
            synchronous,
            f"{synchronous} reduce-scatter operations of the program are synchronous: nothing overlaps them; fix: keep "
            "xla_gpu_enable_latency_hiding_scheduler on, or accumulate over more micro-batches",
        ),
        *(
            (
                small[kind] > MANY,
                f"{small[kind]} {kind} operations of a step are smaller than {size_text(LATENCY_BOUND)}, so latency "
                "dominates; fix: a larger zero_optimization.stage3_param_persistence_threshold, or stack.unroll, so "
                "that XLA combines them",
            )
            for kind in ("all-gather", "reduce-scatter", "all-reduce")
        ),
        (
            recomputed,
            f"XLA recomputes {recomputed} operations by itself, because memory is short; fix: choose what to "
            "recompute with activation_checkpointing.policy, or take a smaller micro-batch or more GPUs",
        ),
        (
            half and gathers.bytes > WIDE,
            f"{gathers.launches} all-gathers of a step move {size_text(gathers.bytes)} in float32; "
            f"fix: {step.precision.compute} for these parameters halves it",
        ),
        (
            half and reduced > WIDE,
            f"gradients of {size_text(reduced)} a step are reduced in float32; fix: "
            f'"communication_data_type": "{step.config.precision}" halves it',
        ),
        (
            half and matmuls.float32_share > 0.01,
            f"{matmuls.float32_share:.0%} of the matmuls' FLOPs run in float32, most of them at {where}; fix: cast "
            "its operands to the compute dtype",
        ),
        (
            not half and gpu.compute_capability >= (7, 0),
            "the step computes in float32, at a fraction of the speed and with twice the activations; fix: "
            f'"{name}": {{"enabled": true}}',
        ),
    ]
    return (*unsharded(step), *(line for found, line in checks if found), *_attention(gpu, text, amount))


def _attention(gpu: GPU, text: str, amount: Amount) -> Iterator[str]:
    length = (amount.tokens or 0) // max(amount.samples, 1)
    if length < LONG or gpu.compute_capability < (8, 0) or "__cudnn$fmha" in text or "flash_mha_fwd" in text:
        return
    if re.search(rf"\w\[\d+,(?:\d+,)*{length},{length}\]", text):
        yield (
            f"attention stores its scores of {length} x {length}; fix: use jzero.attention (cuDNN), which does not, in "
            "half precision with heads of at most 128"
        )


def undivided_parameters(step: TrainStep) -> Iterator[str]:
    """Name these parameters, what they cost each device compared with divided ones, and the size that would fit.

    Layers that are alike share a line. The bytes are those of masters, moments, weights and gradients inside the step.
    """
    if not step.setup.unfit:
        return
    degree, price = step.mesh.shape[TENSOR], leaf_bytes(step)
    layouts = {layout.name: layout for layout in jax.tree.leaves(step.layouts)}
    alike: dict[object, list[str]] = defaultdict(list)
    for name, dim in step.setup.unfit.items():
        layout = layouts[name]
        alike[numberless(name), layout.shape[layout.stacked :], dim, layout.divided].append(name)
    for names in alike.values():
        layout, dim = layouts[names[0]], step.setup.unfit[names[0]]
        shape = layout.shape[layout.stacked :]
        others = {axis: step.mesh.shape[axis] for axis, at in layout.divided if at == dim or dim is None}
        parts = degree * prod(others.values())
        sizes = " x ".join(f"mesh.{axis} = {n}" for axis, n in {TENSOR: degree, **others}.items())
        what = "any dimension" if dim is None else f"the {shape[dim]}"
        more = sum(sum(price[name]) for name in names) * (1 - 1 / degree)
        fits = "" if dim is None else f"; {-(-shape[dim] // parts) * parts} would fit"
        yield (
            f"replicated over {TENSOR}: {sizes} does not divide {what} of {some_of(names, 4)} {list(shape)}: "
            f"{size_text(more)} more per device than divided{fits}"
        )


def over_zero(step: TrainStep, times: int = 1) -> keys.Candidate:
    """Return the choice that lets ZeRO shard over the replicas; {} if there are none, or some axis shards already.

    Args:
      times: how many times as many replicas there are.
    """
    data = step.mesh.shape[DATA]
    if data == 1 or present(step.mesh, *ZERO_AXES):
        return {}
    if group_degrees(step.config)["zero"][0] == MICS:
        return {MICS: data * times}
    return {keys.DATA: 1, keys.ZERO: data * times}


def unsharded(step: TrainStep) -> Iterator[str]:
    """Name a stage that shards nothing because all replicas are copies, and the mesh on which it does."""
    stage, fix = step.config.zero_optimization.stage, over_zero(step)
    if stage and fix:
        key = group_degrees(step.config)["zero"][0]
        yield f"zero_optimization.stage = {stage} shards nothing: {key} = 1; fix: {keys.keys_as_json(fix)}"


def gathered_sequences(found: TracedCollectives, mesh: Mesh, attention: str = "auto") -> Iterator[str]:
    """Warn of attention that gathers sequences over `context`, and of tiles that the axes do not divide."""
    if factors := [move for mark, move in found.marked if mark == WHOLE_FACTOR and CONTEXT in move.axes]:
        yield (
            f"XLA's own attention at {_lines(factors)} gathers queries or keys over context, {_price(factors)}; fix: "
            "jzero.attention in bf16 or fp16 on GPUs, where it takes cuDNN's kernel and leaves sequences divided"
            + (f'; context_parallel.attention = "{attention}" changes that kernel alone' if attention != "auto" else "")
        )
    axes = present(mesh, CONTEXT, TENSOR)
    parts = prod(mesh.shape[axis] for axis in axes)
    for cut in sorted({mark for mark, _ in found.marked if mark.startswith(CUT)}):
        moved = [move for mark, move in found.marked if mark == cut]
        tiles, length = map(int, cut.removeprefix(CUT).split("_of_"))
        fitting = [n for n in range(1, length + 1) if length % (n * parts) == 0]
        near = sorted(sorted(fitting, key=lambda n: abs(n - tiles))[:3])  # called at once
        fix = f"{either(near)} tiles" if near else f"a length that is a multiple of {parts}"
        yield (
            f"{tiles} tiles of the sequence of {length} at {_lines(moved)}: {degrees_text(mesh, axes)} do not divide a "
            f"tile of {length // tiles}, so the sequence is gathered, {_price(moved)}; fix: {fix}"
        )


def _lines(moved: Sequence[TracedCollective]) -> str:
    return some_of(dict.fromkeys(move.line or "an unknown line" for move in moved), 3)


def _price(moved: Sequence[TracedCollective]) -> str:
    return f"{size_text(sum(move.total for move in moved))} a step on each device, and again in the backward pass"


@dataclass(frozen=True)
class Near:
    """A configuration that fits: what it changes, and its peak on each device."""

    changes: Candidate
    peak_bytes: int


def nearest(step: TrainStep, batch: PyTree, peak: int, most: int) -> list[Near]:
    """Compile configurations near that of a step that does not fit, until some do; [] if none does.

    Args:
      batch: a global batch, or its shapes.
      peak: bytes that the step needs on a device.
      most: bytes that there are.
    """
    found: list[Near] = []
    activations, tries = peak - state_bytes(step).least, 0
    with slow_work("looking for the nearest configurations that fit"):
        for choice in ways(step):
            if len(found) == WANTED or tries == TRIES:
                break
            if any(choice.keys() >= near.changes.keys() for near in found):
                continue  # more of what is enough
            try:
                other = _changed(step, choice)
                kept = activations * other.batch_sizes.micro / step.batch_sizes.micro
                same = not choice.keys() & {keys.POLICY, keys.UNROLL}
                if state_bytes(other).least + (kept if same else 0) > most:
                    continue
                tries += 1
                needed = memory(other.lower(batch).compile(), other).peak
            except (ValueError, TypeError, RuntimeError):  # not for this model: a ConfigError, or XLA's own
                continue
            if needed <= most:
                found.append(Near(choice, needed))
    return found


def nearest_text(found: list[Near], step: TrainStep, live: Live) -> str:
    """Return the configurations as lines of JSON, and what a tiled loss and rounded moments would not need."""
    lines = [f"fits with {size_text(near.peak_bytes)}: {json.dumps(merged({}, near.changes))}" for near in found]
    if not found:
        lines = ["no smaller micro-batch, more recomputation, higher stage or offload fits: use more devices"]
    after_layers = sum(b.bytes for b in live.buffers if b.op_name.startswith(f"{SUFFIX}/"))
    if after_layers > NOTABLE_SHARE * live.peak_bytes:
        lines.append(
            f"{size_text(after_layers)} of the peak come after the last layer: computed tile by tile, logits "
            "and loss take a fraction: loss_tiles=8 of the decoders in jzero.models, jzero.tiled in models of your own"
        )
    moments = state_bytes(step).optimizer
    in_fp32 = step.precision.optimizer_state.itemsize == 4 and not step.setup.optimizer.callers
    on_device = step.config.zero_optimization.offload_optimizer.device == "none"
    if in_fp32 and on_device and moments > NOTABLE_SHARE * live.peak_bytes:
        lines.append(
            f'{size_text(moments)} are the optimizer\'s state: optimizer.state_dtype = "bf16" or "fp8" keeps its '
            "moments in 2 bytes or 1 per element instead of 4, rounded at random"
        )
    return "\n".join(lines)


def ways(step: TrainStep) -> Iterator[Candidate]:
    """Yield what could be changed: one thing at a time, then more and more of it together."""
    levers = [lever for lever in _levers(step) if any(lever)]
    for lever in levers:
        yield from lever
    together: Candidate = {}
    for lever in levers:
        for choice in lever:
            together = together | choice
            yield dict(together)


def _levers(step: TrainStep) -> Iterator[list[Candidate]]:
    """Yield the choices of each kind, the cheapest kind first, and of a kind the mildest."""
    sizes, facts, zero = step.batch_sizes, step.setup.passes.facts, step.config.zero_optimization
    halves = [sizes.micro // 2**i for i in range(1, sizes.micro.bit_length())]
    each, sharded = sizes.micro * sizes.accum, over_zero(step)
    yield [sharded if zero.stage else {}]
    yield [{TRAIN: sizes.train, MICRO: micro, ACCUM: each // micro} for micro in halves if each % micro == 0]
    yield [{keys.POLICY: policy} for policy in keys.POLICIES[keys.POLICIES.index(facts.remat.kind) + 1 :]]
    several = sharded or present(step.mesh, *ZERO_AXES)
    yield [{**sharded, keys.STAGE: stage} for stage in range(zero.stage + 1, 4) if several]
    yield [{keys.UNROLL: False}] if facts.unrolled else []
    yield [{keys.STAGE: max(zero.stage, 1), keys.OFFLOAD_OPTIMIZER: "cpu"}]
    yield [{keys.STAGE: 3, keys.OFFLOAD_PARAM: "cpu"}]


def _changed(step: TrainStep, choice: Candidate) -> TrainStep:
    """Make the step with a choice, with the batch sizes in use, which may not be the config's; at a constant rate."""
    mesh, sharded = step.mesh, over_zero(step)
    if sharded and choice.keys() >= sharded.keys():
        shape = [{DATA: 1, ZERO: mesh.shape[DATA]}.get(axis, n) for axis, n in mesh.shape.items()]
        mesh = Mesh(mesh.devices.reshape(shape), mesh.axis_names, axis_types=mesh.axis_types)
        if "mesh" not in step.config.model_fields_set:  # the program's own
            choice = {key: value for key, value in choice.items() if not key.startswith("mesh.")}
    given, sizes = _given(step), step.batch_sizes
    given.pop("scheduler", None)
    given |= {TRAIN: sizes.train, MICRO: sizes.micro, ACCUM: sizes.accum}
    optimizer = step.setup.optimizer.tx if step.setup.optimizer.callers else None
    return make_train_step(step.model, Config.load(merged(given, choice)), mesh=mesh, optimizer=optimizer)


def too_large(plan: PlanFacts) -> str:
    """Return one line about a plan that does not fit: the largest part, and what would fit by the formula."""
    memory = plan.memory
    largest = f"largest: {memory.largest}, {size_text(memory.parts[memory.largest])}"
    instead = next(_by_formula(plan), "no number of such GPUs fits it by ZeRO alone")
    return f"{memory.verdict} per GPU; {largest}; {instead}"


def _by_formula(plan: PlanFacts) -> Iterator[str]:
    """Yield what would fit: a smaller rest, a higher stage, more GPUs; nothing is compiled."""
    step, most, name = plan.step, plan.memory.usable.most, next(name for name, gpu in GPUS.items() if gpu == plan.gpu)
    rest = max(0, plan.memory.peak_bytes - state_bytes(step).total)
    if rest > most:
        policy = (step.config.activation_checkpointing and step.config.activation_checkpointing.policy) or "none"
        yield (
            f"activations and temporaries alone take {size_text(rest)}: take a smaller micro-batch or sequence, or "
            f'another activation_checkpointing.policy than "{policy}"'
        )
    for times in (2**i for i in range(MOST_DOUBLINGS + 1)):
        devices, sharded = described_gpus(name, plan.gpus * times, per_host=plan.gpus_per_node), over_zero(step, times)
        try:
            stages = bytes_by_stage(step.model, merged(_given(step), sharded), devices=devices)
        except ConfigError:  # a batch size or mesh of the config that this number of GPUs does not divide
            continue
        for stage, found in stages.items():
            if stage >= step.config.zero_optimization.stage and found.total + rest <= most:
                on = f" with {keys.keys_as_json(sharded)}" if sharded else ""
                yield f"ZeRO-{stage} on {plan.gpus * times} of these GPUs{on} would fit, by the formula"


def _given(step: TrainStep) -> dict[str, Any]:
    return step.config.model_dump(mode="json", exclude_unset=True)
