"""The run report: a run's mesh, layout, memory and settings as plain text, short enough to paste into a chat."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from math import prod
from typing import Any, Protocol

import jax

from jzero.display.text_table import align_columns, bullets, size_text, value_text, wrap
from jzero.distributed.machine import loaded_nccl
from jzero.errors import escaped, mask, shorten, some_of
from jzero.layout.sharding import ParamLayout
from jzero.layout.zeropp import ZeroPlusPlus
from jzero.mesh import BATCH_AXES, EXPERT, GROUP_AXES, PIPE, ZERO_AXES, group_size, present
from jzero.model import STACK, weights_layout
from jzero.optimizers import moments
from jzero.planner.advice import group_advice
from jzero.planner.plan import observed
from jzero.planner.state_bytes import gradient_dtype, names_in_fp8, state_bytes
from jzero.planner.traced_operations import MOVE_COLUMNS, matmuls, moves
from jzero.run.report_settings import effective_settings, fallbacks
from jzero.step.train_step import TrainStep
from jzero.stored_names import numberless
from jzero.values.kinds import as_json
from jzero.weights.adapters import trained_beside


class ReportedRun(Protocol):
    """The part of an engine that a report reads: the engine imports this file."""

    step_fn: TrainStep

    def seconds_per_step(self) -> float | None: ...


def report(
    step: TrainStep | ReportedRun, data_notes: Sequence[str] = (), *, html: str | os.PathLike | None = None,
    step_s: float | None = None,
) -> str:  # fmt: skip
    """Report on a `TrainStep`: mesh, batch, ignored keys, layout, bytes, defaults in effect, replaced keys, fallbacks.

    After its first step, which shows what a batch looks like, also what the devices of a group (`tensor`) move, and
    products in float32 under bf16 or fp16.

    Args:
      step: the step, or an engine.
      data_notes: lines about the training data.
      html: a file: write the page of `jzero.plan` for this run too, with the measured memory and time beside the
        planned. The step ran on GPUs of `jzero.planner.GPUS`.
      step_s: the measured seconds of a step; an engine knows them.

    Raises:
      ConfigError: `html` before the first step, on other devices, or without matplotlib.
    """
    if not isinstance(step, TrainStep):
        step_s = step.seconds_per_step() if step_s is None else step_s
        step = step.step_fn
    if html is not None:
        observed(step, step_s).html(html)
    sections = (
        ("jzero run report", _head(step)),
        ("Warnings", bullets(_warnings(step))),
        ("Layout", _spec_table(step)),
        ("Model state per device", _model_state(step)),
        ("Parameter groups", bullets(_groups(step))),
        ("In effect", bullets(effective_settings(step))),
        ("Replaced keys", bullets(_by_reason((r.key, r.value, r.by) for r in step.config.replaced))),
        ("Training data", bullets(data_notes)),
        ("Fallbacks", bullets(fallbacks(step))),
        *_sections_of_step(step),
    )
    return _joined(sections)


# ---------------------------------------------------------------- sections


def _head(step: TrainStep) -> list[str]:
    devices, b, precision, facts = step.mesh.devices, step.batch_sizes, step.precision, step.setup.passes.facts
    kind = getattr(devices.flat[0], "device_kind", devices.flat[0].platform)
    degrees = " x ".join(
        f"{axis} {step.mesh.shape[axis]}" for axis in (PIPE, *BATCH_AXES, *present(step.mesh, *GROUP_AXES))
    )
    of_axes = " (data x zero x expert)" if step.mesh.shape[EXPERT] > 1 else ""
    inferred = f" ({b.inferred.replace(', ', ' and ')}: inferred)" if b.inferred else ""
    rows = {
        "model": repr(step.model),
        "mesh": f"{devices.size} x {kind} = {degrees}",
        "batch": f"{b.train} = {b.micro} per device x {b.accum} accumulation x {step.replicas} replicas"
        f"{of_axes}{inferred}",
        **({"pipeline": facts.pipeline(b.accum)} if facts.pipeline else {}),
        "ZeRO": _zero(step),
        "precision": f"{step.config.precision_text}: masters {precision.master}, gradients reduced in "
        f"{precision.reduce} and accumulated in {precision.accum}{_moments(step)}",
    }
    if nccl := loaded_nccl():
        rows["NCCL"] = f"{nccl[1]} from {nccl[0]}"
    return [part for name, text in rows.items() for part in wrap(text, f"  {name:<9}  ", " " * 13)]


def _moments(step: TrainStep) -> str:
    dtype, leaves = step.precision.optimizer_state, jax.tree.leaves(step.state_shapes.opt_state)
    if step.setup.optimizer.callers or dtype.itemsize == 4:
        return ""
    low, of_all = sum(x.size for x in leaves if x.dtype == dtype), sum(x.size for x in leaves)
    if not low:
        least = f" of {moments.FP8_LEAST:,} elements" if dtype == moments.FP8 else ""
        key = "optimizer.state_dtype" if step.precision.at_random else "bf16.bf16_optimizer_states"
        return f", {key} has no effect: the optimizer has no moments{least}"
    at_random = " rounded at random" if step.precision.at_random else ""
    return f", moments {dtype}{at_random} ({low:,} of the optimizer's {of_all:,} elements)"


def _zero(step: TrainStep) -> str:
    stage, rule, by_layer = step.config.zero_optimization.stage, step.setup.rule, step.setup.passes.facts.by_layer
    if stage and all(leaf.dim is None for leaf in jax.tree.leaves(step.layouts)):
        if group_size(step.mesh) > 1 and not present(step.mesh, *ZERO_AXES):
            return f"stage {stage}, but mesh.zero = 1, so nothing is partitioned beyond the axes of the layout below"
        return f"stage {stage}, but every parameter is replicated (see below), so this is plain data parallelism"
    layer = "gathered layer by layer" if by_layer else "gathered where they are used"
    gather = {None: "replicated", "step": "gathered once a step", "layer": layer}[rule.gather]
    reduce, every = ("reduce-scattered", rule.scatter) if rule.scatter else ("all-reduced", "step")
    when = "every micro-batch" if every == "micro_batch" else "once a step"
    return "; ".join([f"stage {stage}: parameters {gather}, gradients {reduce} {when}", *_plus(step.setup.plus)])


def _plus(plus: ZeroPlusPlus) -> Iterator[str]:
    """Describe the parts of ZeRO++ in use."""
    if plus.secondary:
        yield f"gathered from a second copy, made once a step and partitioned among groups of {plus.secondary} (hpZ)"
    if plus.weights:
        yield "matrices gathered as int8 (qwZ)"
    if plus.gradients:
        yield f"their gradients reduced as 4-bit integers, within nodes of {plus.node} and then across (qgZ)"


def _warnings(step: TrainStep) -> list[str]:
    """List what the config leaves open, what is odd about an optimizer or adapters, and keys that do nothing."""
    found = filter(None, (step.precision.why, step.setup.optimizer.warning))
    ignored = (f"ignored: {line}" for line in _by_reason(step.config.ignored))
    return [*found, *_beside_adapters(step), *ignored]


def _beside_adapters(step: TrainStep) -> Iterator[str]:
    if others := trained_beside(weights_layout(step.model), step.layouts):
        yield (
            f"{some_of(others, 4)} {'is' if len(others) == 1 else 'are'} trained besides the adapters, which can then "
            'not be saved alone; to train only these: "trainable_parameters": ["lora_"]'
        )


def _by_reason(settings: Iterable[tuple[str, Any, str]]) -> list[str]:
    """List keys with their values and a reason; those of one reason share a line."""
    found: dict[str, list[str]] = {}
    for key, value, why in settings:
        value = mask(key, value)
        text = value_text(value) if isinstance(value, float) else as_json(value, 40)
        found.setdefault(why, []).append(f"{key} = {text}")
    return [f"{', '.join(together)}: {why}" for why, together in found.items()]


def _groups(step: TrainStep) -> list[str]:
    """List the parameter groups, and the parameters without weight decay; nothing if all parameters are alike."""
    groups, sizes = step.setup.optimizer.groups, {leaf.name: prod(leaf.shape) for leaf in jax.tree.leaves(step.layouts)}

    def members(names: Sequence[str]) -> str:
        shown = some_of(dict.fromkeys(map(numberless, names)), 6)
        count = f"{len(names)} {'leaf' if len(names) == 1 else 'leaves'}"
        return f"{count}, {sum(sizes[name] for name in names):,} elements" + (f": {shown}" if shown else "")

    lines = []
    for group in groups if len(groups) > 1 else ():
        title = "all others" if group.match is None else value_text(shorten(group.match, 60))
        values = ", ".join(f"{key} {value_text(value)}" for key, value in group.values.items())
        lines.append(f"{title}{f' ({values})' if values else ''}: {members(list(group.leaves))}")
    if undecayed := [name for group in groups for name in group.undecayed]:
        lines.append(f"no_weight_decay {step.config.optimizer.no_weight_decay}: {members(undecayed)}")  # type: ignore[union-attr]
    return lines


MAX_ROWS = 12


def _spec_table(step: TrainStep) -> list[str]:
    """Tabulate the parameters' specs; leaves with a common name prefix share a row."""
    leaves = sorted(jax.tree.leaves(step.layouts), key=lambda leaf: leaf.name)

    def groups_of(depth: int) -> dict[tuple[str, ...], list[ParamLayout]]:
        groups: dict[tuple[str, ...], list[ParamLayout]] = {}
        for leaf in leaves:
            kind = "" if leaf.trainable else "state" if leaf.state else "frozen"
            note = ", ".join(filter(None, [kind, "replicated" if leaf.why else ""]))
            spec = f"P({', '.join(map(repr, leaf.spec))})"
            groups.setdefault((*numberless(leaf.name).split("/")[:-1][:depth], spec, note), []).append(leaf)
        return groups

    groups = next((g for depth in (2, 1) if len(g := groups_of(depth)) <= MAX_ROWS), groups_of(0))

    def elements(some: Iterable[ParamLayout]) -> int:
        return sum(prod(leaf.shape) for leaf in some)

    rows = [["parameters", "leaves", "elements", "spec", ""]]
    for (*begin, spec, note), members in groups.items():
        names = {numberless(leaf.name) for leaf in members}
        name = names.pop() if len(names) == 1 else "/".join([*begin, "*"])
        rows.append([name, f"{len(members)}", f"{elements(members):,}", spec, note])
    total = elements(leaves)
    rows.append(["total", f"{len(leaves)}", f"{total:,}", "", ""])
    if any("frozen" in row[-1] for row in rows):
        trained = [leaf for leaf in leaves if leaf.trainable]
        rows.append(["trained", f"{len(trained)}", f"{elements(trained):,}", "", f"{elements(trained) / total:.2%}"])
    return align_columns(rows, "<>><<")


def _model_state(step: TrainStep) -> list[str]:
    b, precision = state_bytes(step), step.precision
    gradient = gradient_dtype(step, step.setup.rule)
    in_step = "only inside the step"
    frozen = any(not (leaf.trainable or leaf.state) for leaf in jax.tree.leaves(step.layouts))
    in_use = any(leaf.on_host.in_use for leaf in jax.tree.leaves(step.layouts))
    formula = "" if b.host else f"ZeRO formula, every leaf partitioned: {size_text(b.formula)}"
    rows = [
        ["part", "bytes", ""],
        [
            f"masters, {precision.master}",
            size_text(b.masters),
            f"frozen parameters in {precision.compute}" if frozen else "",
        ],
        ["optimizer state", size_text(b.optimizer), ""],
        *([["of these in host memory", size_text(b.host), "not on the device"]] if b.host else []),
        ["total between steps", size_text(b.persistent), ""],
        [
            f"parameters, {precision.compute}{' and fp8' if names_in_fp8(step) else ''}",
            size_text(b.parameters),
            in_step if b.parameters else "copied to the device layer by layer" if in_use else "equal to the masters",
        ],
        [f"gradients, {gradient}", size_text(b.gradients), in_step],
        ["total inside the step", size_text(b.total), formula],
    ]
    return align_columns(rows, "<><")


# ---------------------------------------------------------------- what only a step shows, by its trace

MOST_MOVES = 12
Sections = Iterable[tuple[str, Sequence[str]]]


def step_report(step: TrainStep) -> str:
    """Return the sections that only a trace shows, as text; empty if there is nothing to say."""
    return _joined(_sections_of_step(step))


def _sections_of_step(step: TrainStep) -> Iterator[tuple[str, list[str]]]:
    """Yield (title, lines) of each section; without lines before the first step."""
    yield f"Moved over {' x '.join(present(step.mesh, *GROUP_AXES))} in a step, per device", _moves(step)
    yield "fp8", bullets(_fp8(step))
    yield "Half precision", bullets(_half_precision(step))


def _joined(sections: Sections) -> str:
    """Return the sections that have lines as text."""
    return escaped("\n\n".join("\n".join([title, *lines]) for title, lines in sections if lines))


def _moves(step: TrainStep) -> list[str]:
    """Tabulate what the devices of a group moved in the first step that ran, and list what ran on whole arrays."""
    if group_size(step.mesh) == 1 or step.traced is None:
        return []
    found = moves(step.traced, step.mesh)
    lines = align_columns([MOVE_COLUMNS, *found.rows(MOST_MOVES)], "<<>>><<<") if found.all else []
    whole = [f"ran on whole arrays: {some_of(found.whole, 6)}"] if found.whole else []
    return lines + bullets([*whole, *group_advice(step, step.traced, found)])


def _half_precision(step: TrainStep) -> list[str]:
    """List what is not in half precision in the first step that ran, and which arrays of its batch were cast."""
    if step.precision.compute.itemsize > 2 or step.traced is None:
        return []
    found, lines = matmuls(step.traced), []
    name = step.config.precision
    if found.cast:
        arrays = ", ".join(array or "the batch" for array in found.cast)
        lines.append(f"cast to {step.precision.compute} ({name}.auto_cast): {arrays}")
    if found.float32:
        where = [f"{count} in {line}, {share:.0%}" for line, (count, share) in found.float32_by_line.items()]
        lines.append(
            f"{found.float32} of {found.count} matmuls ({found.float32_share:.0%} of the FLOPs) run in float32 "
            f"under {name}, since an operand is float32: {some_of(where, 6)}. If you did not intend this, cast the "
            "operand to the dtype of the weights"
        )
    return lines


def _fp8(step: TrainStep) -> list[str]:
    """List the weights that the first step multiplied in fp8, and why the other large ones of the stack were not."""
    choice = step.setup.fp8.choice
    if choice is None:
        return []
    shapes = {leaf.name: leaf.shape for leaf in jax.tree.leaves(step.layouts)}

    def listed(names: Iterable[str]) -> str:
        return some_of(sorted({numberless(name).removeprefix(f"{STACK}/") for name in names}), 6)

    stack = sum(prod(shape) for name, shape in shapes.items() if name.startswith(f"{STACK}/"))
    share = sum(prod(shapes[name]) for name in choice.names) / stack
    section, frozen = step.config.fp8, choice.names - step.setup.histories.keys()
    delayed = section.recipe == "delayed"
    scales = f"delayed scales, by {section.amax_history_len} steps" if delayed else "current scales"
    lines = [
        f"{len(choice.names)} weights of each layer, {share:.1%} of the stack's elements, are multiplied in fp8 "
        f"(format {section.format}, {scales}): {listed(choice.names)}"
    ]
    if delayed and frozen:
        lines.append(f"frozen weights use current scales: {listed(frozen)}")
    reasons: dict[str, list[str]] = {}
    for name, why in choice.others.items():
        reasons.setdefault(why, []).append(name)
    return lines + [f"kept in {step.precision.compute}: {listed(names)}, {why}" for why, names in reasons.items()]
