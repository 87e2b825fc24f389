"""Advises on a step: warnings of what costs throughput or memory."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from math import prod

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jzero.config.sizes import MICS, group_degrees
from jzero.display.text_table import size_text
from jzero.errors import some_of
from jzero.mesh import CONTEXT, DATA, GROUP_AXES, TENSOR, ZERO_AXES, degrees_text, present, spans_hosts
from jzero.model import ENDS, Inputs, StackModel, stack_functions
from jzero.planner.candidates import MESH_DATA, MESH_ZERO, Candidate, keys_as_json
from jzero.planner.collectives import Collectives
from jzero.planner.gpus import GPU
from jzero.planner.state_bytes import leaf_bytes
from jzero.planner.traced_operations import Matmuls, TracedCollective, TracedCollectives
from jzero.spread.matmuls import WHOLE_FACTOR
from jzero.step.batch import Amount
from jzero.step.train_step import TrainStep
from jzero.stored_names import numberless
from jzero.tiling import CUT
from jzero.values.kinds import either

WIDE = 2**24  # bytes in float32 per step that are worth a line
LATENCY_BOUND, MANY = 2**20, 64  # bytes of a collective that is all latency; how many of one kind are worth a line
LONG = 2048  # tokens from which the scores of XLA's attention matter
_SYNCHRONOUS = re.compile(r' = .* reduce-scatter(?:-start)?\(.*"is_sync":true| = \S+ reduce-scatter\(')
_RECOMPUTED = re.compile(r"^\s+%?[\w.\-]+\.remat\d*(?:\.\d+)* = ", re.MULTILINE)


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


def over_zero(step: TrainStep, times: int = 1) -> Candidate:
    """Return the candidate that lets ZeRO shard over the replicas; {} if there are none, or some axis shards already.

    Args:
      times: how many times as many replicas there are.
    """
    data = step.mesh.shape[DATA]
    if data == 1 or present(step.mesh, *ZERO_AXES):
        return {}
    if group_degrees(step.config)["zero"][0] == MICS:
        return {MICS: data * times}
    return {MESH_DATA: 1, MESH_ZERO: data * times}


def unsharded(step: TrainStep) -> Iterator[str]:
    """Name a stage that shards nothing because all replicas are copies, and the mesh on which it does."""
    stage, fix = step.config.zero_optimization.stage, over_zero(step)
    if stage and fix:
        key = group_degrees(step.config)["zero"][0]
        yield f"zero_optimization.stage = {stage} shards nothing: {key} = 1; fix: {keys_as_json(fix)}"


def group_advice(step: TrainStep, traced: jax.stages.Traced, found: TracedCollectives) -> list[str]:
    """List the warnings about devices that act as one, whose collectives in the trace are `found`."""
    attention = step.setup.config.context_parallel.attention
    return [
        *whole_sequences(step, traced),
        *gathered_sequences(found, step.mesh, attention),
        *across_hosts(found, step.mesh),
    ]


def across_hosts(found: TracedCollectives, mesh: Mesh) -> Iterator[str]:
    """Warn where devices of several hosts act as one."""
    if axes := [axis for axis in present(mesh, *GROUP_AXES) if spans_hosts(mesh, axis)]:
        asked, size = degrees_text(mesh, axes), sum(move.total for move in found.all if set(axes) & set(move.axes))
        yield (
            f"{asked}: devices of several hosts act as one; each moves {size_text(size)} per step at the speed of "
            "the network; fix: degrees of expert, context and tensor whose product divides the number of GPUs of a host"
        )


def whole_sequences(step: TrainStep, traced: jax.stages.Traced) -> Iterator[str]:
    """Warn where an axis does not divide the sequence: of the batch, or between the layers of a stack.

    Args:
      traced: the step, which knows the shapes of the batch.
    """
    model, mesh, (_, *inputs) = step.model, step.mesh, traced.args_info[0]
    axes = present(mesh, CONTEXT, TENSOR)
    (batch, *_), extra = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), inputs[:2])
    if not isinstance(model, StackModel):
        degree = mesh.shape[CONTEXT]
        tokens = [x for x in jax.tree.leaves(batch) if x.ndim == 2 and jnp.issubdtype(x.dtype, jnp.integer)]
        for length in sorted({x.shape[1] for x in tokens if x.shape[1] % degree}):
            yield (
                f"mesh.{CONTEXT} = {degree} does not divide the sequence of {length}: every device computes the "
                f"whole of it; fix: a length that is a multiple of {degree}"
            )
    if not axes or not isinstance(model, StackModel):
        return
    prefix = stack_functions(model)[0]
    ends = step.setup.weight_shapes[ENDS]
    x = jax.eval_shape(lambda ends, batch, extra: prefix(ends, Inputs(batch, extra), None)[0], ends, batch, extra)
    for length in sorted({leaf.shape[1] for leaf in jax.tree.leaves(x) if leaf.ndim > 2}):
        divided = 1
        for axis in axes:
            if length % (divided * mesh.shape[axis]):
                yield (
                    f"mesh.{axis} = {mesh.shape[axis]} does not divide the sequence of {length // divided} between "
                    "layers: every device repeats the norms and residuals; fix: a length that is a "
                    f"multiple of {divided * mesh.shape[axis]}"
                )
            else:
                divided *= mesh.shape[axis]


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
