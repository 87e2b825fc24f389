"""Configurations near a step that does not fit, which do: compiled on the way, or by the formula alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import accumulate
from operator import or_
from typing import Any

from jax.sharding import Mesh

from jzero.config import Config
from jzero.config.sizes import ACCUM, MICRO, TRAIN
from jzero.display.slow_work import slow_work
from jzero.display.text_table import size_text
from jzero.errors import ConfigError
from jzero.mesh import DATA, ZERO, ZERO_AXES, present
from jzero.model import SUFFIX
from jzero.planner.advice import over_zero
from jzero.planner.candidates import (
    OFFLOAD_OPTIMIZER,
    OFFLOAD_PARAM,
    POLICIES,
    POLICY,
    STAGE,
    UNROLL,
    Candidate,
    keys_as_json,
    merged,
)
from jzero.planner.gpus import GPUS, described_gpus
from jzero.planner.memory import Live, memory
from jzero.planner.plan_facts import PlanFacts
from jzero.planner.state_bytes import bytes_by_stage, state_bytes
from jzero.step.train_step import TrainStep, make_train_step
from jzero.tree import PyTree
from jzero.values.kinds import either

TRIES, WANTED, MOST_DOUBLINGS = 8, 2, 6  # programs that are compiled at most; configurations that are enough
NOTABLE_SHARE = 0.05  # of the buffers at the peak: worth a line


def nearest(step: TrainStep, batch: PyTree, peak: int, most: int) -> list[tuple[Candidate, int]]:
    """Compile configurations near that of a step that does not fit, until some do.

    Args:
      batch: a global batch, or its shapes.
      peak: bytes that the step needs on a device.
      most: bytes that there are.

    Returns:
      What each changes, with its peak on each device; [] if none fits.
    """
    found: list[tuple[Candidate, int]] = []
    activations, tries = peak - state_bytes(step).least, 0
    with slow_work("looking for the nearest configurations that fit"):
        for candidate in ways(step):
            if len(found) == WANTED or tries == TRIES:
                break
            if any(candidate.keys() >= enough.keys() for enough, _ in found):
                continue  # more of what is enough
            try:
                other = _changed(step, candidate)
                kept = activations * other.batch_sizes.micro / step.batch_sizes.micro
                same = not candidate.keys() & {POLICY, UNROLL}
                if state_bytes(other).least + (kept if same else 0) > most:
                    continue
                tries += 1
                needed = memory(other.lower(batch).compile(), other).peak
            except (ValueError, TypeError, RuntimeError):  # not for this model: a ConfigError, or XLA's own
                continue
            if needed <= most:
                found.append((candidate, needed))
    return found


def nearest_text(found: list[tuple[Candidate, int]], step: TrainStep, live: Live) -> str:
    """Return the configurations as lines of JSON, and what a tiled loss and rounded moments would not need."""
    lines = [f"fits with {size_text(peak)}: {json.dumps(merged({}, changes))}" for changes, peak in found]
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


def ways(step: TrainStep) -> list[Candidate]:
    """List what could be changed: one thing at a time, then more and more of it together."""
    single = [candidate for candidate in _levers(step) if candidate]
    return [*single, *accumulate(single, or_)]


def _levers(step: TrainStep) -> Iterator[Candidate]:
    """Yield the candidates of each kind, the cheapest kind first, and of a kind the mildest."""
    sizes, facts, zero = step.batch_sizes, step.setup.passes.facts, step.config.zero_optimization
    halves = [sizes.micro // 2**i for i in range(1, sizes.micro.bit_length())]
    each, sharded = sizes.micro * sizes.accum, over_zero(step)
    yield sharded if zero.stage else {}
    yield from ({TRAIN: sizes.train, MICRO: micro, ACCUM: each // micro} for micro in halves if each % micro == 0)
    yield from ({POLICY: policy} for policy in POLICIES[POLICIES.index(facts.remat.kind) + 1 :])
    several = sharded or present(step.mesh, *ZERO_AXES)
    yield from ({**sharded, STAGE: stage} for stage in range(zero.stage + 1, 4) if several)
    yield {UNROLL: False} if facts.unrolled else {}
    yield {STAGE: max(zero.stage, 1), OFFLOAD_OPTIMIZER: "cpu"}
    yield {STAGE: 3, OFFLOAD_PARAM: "cpu"}


def _changed(step: TrainStep, candidate: Candidate) -> TrainStep:
    """Make the step of a candidate, with the batch sizes in use, which may not be the config's; at a constant rate."""
    mesh, sharded = step.mesh, over_zero(step)
    if sharded and candidate.keys() >= sharded.keys():
        shape = [{DATA: 1, ZERO: mesh.shape[DATA]}.get(axis, n) for axis, n in mesh.shape.items()]
        mesh = Mesh(mesh.devices.reshape(shape), mesh.axis_names, axis_types=mesh.axis_types)
        if "mesh" not in step.config.model_fields_set:  # the program's own
            candidate = {key: value for key, value in candidate.items() if not key.startswith("mesh.")}
    given, sizes = _given(step), step.batch_sizes
    given.pop("scheduler", None)
    given |= {TRAIN: sizes.train, MICRO: sizes.micro, ACCUM: sizes.accum}
    optimizer = step.setup.optimizer.tx if step.setup.optimizer.callers else None
    return make_train_step(step.model, Config.load(merged(given, candidate)), mesh=mesh, optimizer=optimizer)


def too_large(plan: PlanFacts) -> str:
    """Return one line about a plan that does not fit: the largest part, and what would fit by the formula."""
    name, size = max(plan.memory.parts.items(), key=lambda part: part[1])
    return f"{plan.memory.verdict} per GPU; largest: {name}, {size_text(size)}; {_by_formula(plan)}"


def _by_formula(plan: PlanFacts) -> str:
    """Return what would fit: a smaller rest, a higher stage, or more GPUs; nothing is compiled."""
    step, most, name = plan.step, plan.memory.usable.most, next(name for name, gpu in GPUS.items() if gpu == plan.gpu)
    rest = max(0, plan.memory.peak_bytes - state_bytes(step).total)
    if rest > most:
        policy = (step.config.activation_checkpointing and step.config.activation_checkpointing.policy) or "none"
        return (
            f"activations and temporaries alone take {size_text(rest)}: take a smaller micro-batch or sequence, or "
            f'another activation_checkpointing.policy than "{policy}"'
        )
    tried, excluded = [], []
    for times in (2**i for i in range(MOST_DOUBLINGS + 1)):
        devices, sharded = described_gpus(name, plan.gpus * times, per_host=plan.gpus_per_node), over_zero(step, times)
        try:
            stages = bytes_by_stage(step.model, merged(_given(step), sharded), devices=devices)
        except ConfigError:  # a batch size or mesh of the config that this number of GPUs does not divide
            excluded.append(plan.gpus * times)
            continue
        tried.append(plan.gpus * times)
        for stage, found in stages.items():
            if stage >= step.config.zero_optimization.stage and found.total + rest <= most:
                on = f" with {keys_as_json(sharded)}" if sharded else ""
                return f"ZeRO-{stage} on {plan.gpus * times} of these GPUs{on} would fit, by the formula"
    numbers = ", ".join(map(str, excluded))
    apart = f"; not tried: {numbers}, which the config's batch sizes or mesh exclude" if excluded else ""
    return f"no ZeRO stage on {either(tried)} of these GPUs would fit, by the formula{apart}"


def _given(step: TrainStep) -> dict[str, Any]:
    return step.config.model_dump(mode="json", exclude_unset=True)
