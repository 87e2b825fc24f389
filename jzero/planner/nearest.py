"""The nearest configurations of a step that does not fit, compiled.

The changes keep the global batch and the mesh, and so the losses; those that cost the least speed come first.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from jzero.config import Config
from jzero.config.sizes import ACCUM, MICRO, TRAIN
from jzero.display.slow_work import slow_work
from jzero.mesh import ZERO
from jzero.model import SUFFIX
from jzero.planner import choices as keys
from jzero.planner.choices import Choice, merged
from jzero.planner.live import Live
from jzero.planner.memory import memory
from jzero.planner.state_bytes import state_bytes
from jzero.train_step import TrainStep, make_train_step
from jzero.tree import PyTree
from jzero.values.sizes import size_text

TRIES, WANTED = 8, 2  # programs that are compiled at most; configurations that are enough
LARGE = 0.05  # of the buffers at the peak: worth a line


@dataclass(frozen=True)
class Near:
    """A configuration that fits: what it changes, and its peak on each device."""

    changes: Choice
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
    if after_layers > LARGE * live.peak_bytes:
        lines.append(
            f"{size_text(after_layers)} at the peak are of what follows the last layer: computed tile by tile, logits "
            "and loss take a fraction: loss_tiles=8 of the decoders in jzero.models, jzero.tiled in models of your own"
        )
    moments = state_bytes(step).optimizer
    in_fp32 = step.precision.optimizer_state.itemsize == 4 and not step.setup.callers_optimizer
    on_device = step.config.zero_optimization.offload_optimizer.device == "none"
    if in_fp32 and on_device and moments > LARGE * live.peak_bytes:
        lines.append(
            f'{size_text(moments)} are the optimizer\'s state: optimizer.state_dtype = "bf16" or "fp8" keeps its '
            "moments in 2 bytes or 1 per element instead of 4, rounded at random"
        )
    return "\n".join(lines)


def ways(step: TrainStep) -> Iterator[Choice]:
    """Yield what could be changed: one thing at a time, then more and more of it together."""
    levers = [lever for lever in _levers(step) if lever]
    for lever in levers:
        yield from lever
    together: Choice = {}
    for lever in levers:
        for choice in lever:
            together = together | choice
            yield dict(together)


def _levers(step: TrainStep) -> Iterator[list[Choice]]:
    """Yield the choices of each kind, the cheapest kind first, and of a kind the mildest."""
    sizes, facts, zero = step.batch_sizes, step.setup.passes.facts, step.config.zero_optimization
    halves = [sizes.micro // 2**i for i in range(1, sizes.micro.bit_length())]
    each = sizes.micro * sizes.accum
    yield [{TRAIN: sizes.train, MICRO: micro, ACCUM: each // micro} for micro in halves if each % micro == 0]
    yield [{keys.POLICY: policy} for policy in keys.POLICIES[keys.POLICIES.index(facts.remat.kind) + 1 :]]
    several = step.mesh.shape[ZERO] > 1
    yield [{keys.STAGE: stage} for stage in range(zero.stage + 1, 4) if several]
    yield [{keys.UNROLL: False}] if facts.unrolled else []
    yield [{keys.STAGE: max(zero.stage, 1), keys.OFFLOAD_OPTIMIZER: "cpu"}]
    yield [{keys.STAGE: 3, keys.OFFLOAD_PARAM: "cpu"}]


def _changed(step: TrainStep, choice: Choice) -> TrainStep:
    """Make the step with a choice, with the batch sizes in use, which may not be the config's; at a constant rate."""
    given: dict[str, Any] = step.config.model_dump(mode="json", exclude_unset=True, exclude={"scheduler"})
    optimizer, sizes = step.setup.tx if step.setup.callers_optimizer else None, step.batch_sizes
    given |= {TRAIN: sizes.train, MICRO: sizes.micro, ACCUM: sizes.accum}
    return make_train_step(step.model, Config.load(merged(given, choice)), mesh=step.mesh, optimizer=optimizer)
