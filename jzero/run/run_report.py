"""The run report: a run's mesh, layout, memory and settings as plain text, short enough to paste into a chat."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import reduce
from math import prod
from typing import Any

import jax

from jzero import optimizers
from jzero.config.fields import Section
from jzero.config.keys import is_replaced
from jzero.config.screen import FIELDS
from jzero.config.sizes import BATCH
from jzero.data.curriculum import curriculum_of
from jzero.display.text_table import size_text
from jzero.distributed.machine import loaded_nccl
from jzero.errors import mask, shorten, some_of
from jzero.layout.sharding import ParamLayout
from jzero.layout.zeropp import BLOCK, SMALLEST_BLOCK, ZeroPlusPlus
from jzero.mesh import BATCH_AXES, CONTEXT, EXPERT, GROUP_AXES, PIPE, TENSOR, ZERO_AXES, group_size, present
from jzero.model import weights_layout
from jzero.optimizers import moments
from jzero.planner.advice import undivided_parameters, unsharded
from jzero.planner.plan import observed
from jzero.planner.state_bytes import gradient_dtype, names_in_fp8, state_bytes
from jzero.run.report_text import align_columns, bullets, spec_table, value_text, wrap
from jzero.run.step_report import joined, sections_of_step
from jzero.step.setup import float16_on_cpu
from jzero.stored_names import numberless
from jzero.values.kinds import as_json
from jzero.weights.adapters import trained_beside


def report(
    step: Any, data_notes: Sequence[str] = (), *, html: str | os.PathLike | None = None, step_s: float | None = None
) -> str:
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
    if engine_s := getattr(step, "seconds_per_step", None):
        step_s = engine_s() if step_s is None else step_s
    step = getattr(step, "step_fn", step)
    if html is not None:
        observed(step, step_s).html(html)
    sections = (
        ("jzero run report", _head(step)),
        ("Warnings", bullets(_warnings(step))),
        ("Layout", spec_table(step)),
        ("Model state per device", _model_state(step)),
        ("Parameter groups", bullets(_groups(step))),
        ("In effect", bullets(_effective(step))),
        ("Replaced keys", bullets(_by_reason((r.key, r.value, r.by) for r in step.config.replaced))),
        ("Training data", bullets(data_notes)),
        ("Fallbacks", bullets(_fallbacks(step))),
        *sections_of_step(step),
    )
    return joined(sections)


# ---------------------------------------------------------------- sections


def _head(step: Any) -> list[str]:
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


def _moments(step: Any) -> str:
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


def _zero(step: Any) -> str:
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


def _warnings(step: Any) -> list[str]:
    """List the precision that the config leaves open, what is odd about adapters, keys that do nothing."""
    precision = [step.precision.why] if step.precision.why else []
    ignored = (f"ignored: {line}" for line in _by_reason(step.config.ignored))
    return [*precision, *_beside_adapters(step), *ignored]


def _beside_adapters(step: Any) -> Iterator[str]:
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


def _groups(step: Any) -> list[str]:
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
        lines.append(f"no_weight_decay {step.config.optimizer.no_weight_decay}: {members(undecayed)}")
    return lines


def _model_state(step: Any) -> list[str]:
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


def _how(step: Any) -> str:
    facts, config = step.setup.passes.facts, step.config
    if facts.unrolled:
        return "unrolled"
    in_use = any(leaf.on_host.in_use for leaf in jax.tree.leaves(step.layouts))
    asked = "cpu_checkpointing" if facts.remat.offload else "offload_param" if in_use else ""
    # A pipeline scans many layers, whatever is on the host.
    return f"scanned for {asked}" if asked and config.stack.unroll == "auto" and not facts.pipeline else "scanned"


def _not_offloaded(step: Any) -> list[str]:
    """Say why nothing is on the host where the config asks for offload."""
    zero, layouts, lines = step.config.zero_optimization, jax.tree.leaves(step.layouts), []
    if zero.offload_param.device == "cpu" and zero.stage < 3:
        lines.append(f"offload_param: stage {zero.stage} keeps the weights on the device; use stage 3")
    elif zero.offload_param.device == "cpu" and not any(leaf.on_host.in_use for leaf in layouts):
        limit = f"{zero.stage3_param_persistence_threshold:,}"
        lines.append(
            f"offload_param: no parameter has stage3_param_persistence_threshold = {limit} elements, so no parameter "
            "is offloaded"
        )
    if zero.offload_optimizer.ratio < 1 and not any(leaf.on_host.moments for leaf in layouts):
        why = "device is none" if zero.offload_optimizer.device == "none" else "ratio is 0"
        lines.append(f"offload_optimizer: {why}, so all of the state stays on the device")
    return lines


def _effective(step: Any) -> list[str]:
    config, schedule, facts = step.config, step.setup.optimizer.schedule, step.setup.passes.facts
    clip = config.gradient_clipping
    lines = [f"gradient_clipping {clip:g}: by global norm" if clip else "gradient_clipping 0: off"]
    if config.gradient_allreduce_op == "sum":
        lines.append(
            f"gradient_allreduce_op sum: gradients are {step.replicas} times those of the mean over the replicas"
        )
    if config.precision != "fp32" and not step.precision.check_overflow:
        lines.append("bf16.check_grad_overflow false: a gradient that is not finite reaches the parameters")
    else:
        lines.append("a step whose gradient is not finite is skipped")
    tensor = config.tensor_parallel
    if tensor.partition_config.layer_specs:
        lines.append(f"tensor_parallel.partition_config, as dimensions: {value_text(tensor.dimensions)}")
    if step.setup.searched:
        lines.append(f"tensor_parallel.dimensions, found by trying: {value_text(tensor.dimensions)}")
    if there := [leaf for leaf in jax.tree.leaves(step.layouts) if leaf.on_host.master or leaf.on_host.moments]:
        lines.append(
            f"offload: {size_text(step.host_bytes)} of the state in the host's memory for each device; the update "
            f"reads and writes it there; on the host are {_and_not(there, step.layouts)}"
        )
    if config.fp16.enabled:
        scaler = step.precision.scaler
        first = f"{scaler.initial:g}"
        lines.append(f"loss scale dynamic, from {first}" if scaler.dynamic else f"loss scale {first}, static")
    if config.optimizer and not step.setup.optimizer.callers:
        used = optimizers.parameters(config.optimizer).items()
        lines.append(
            f"optimizer {config.optimizer.type}: " + ", ".join(f"{k} {value_text(v)}" for k, v in used if v is not None)
        )
        lines += optimizers.describe(config.optimizer, schedule)
    lines += _autos(step)
    if schedule:
        lines.append(_rates(schedule.lr))
        lines += schedule.notes
    if curriculum := curriculum_of(config):
        lines.append(curriculum.describe())
    checkpointing = f"activation checkpointing {facts.remat.kind}" + ", kept in host memory" * facts.remat.offload
    if facts.layers:
        every = f", {facts.layers_per_checkpoint} layers at a time" if facts.remat.interval else ""
        lines.append(f"layer stack: {facts.layers} layers, {_how(step)}; {checkpointing}{every}")
    elif facts.remat.kind != "none":
        lines.append(checkpointing)
    if step.mesh.shape[PIPE] > 1 and present(step.mesh, *ZERO_AXES) and config.zero_optimization.stage == 3:
        lines.append(_gathers(step))
    small = [leaf for leaf in jax.tree.leaves(step.layouts) if leaf.why and not _fell_back(leaf)]
    if small:
        elements = sum(prod(leaf.shape) for leaf in small)
        lines.append(f"replicated, {small[0].why}: {len(small)} leaves, {elements:,} elements")
    with jax.sharding.use_abstract_mesh(step.mesh.abstract_mesh):  # the devices decide some of it
        return [*lines, *getattr(step.model, "report_notes", lambda dtype: [])(step.precision.compute)]


def _autos(step: Any) -> list[str]:
    """List the keys given as "auto" with the values that they get; the section "Replaced keys" has those without."""
    config, schedule = step.config, step.setup.optimizer.schedule
    params = {
        "optimizer": optimizers.parameters(config.optimizer) if config.optimizer else {},
        "scheduler": schedule.params if schedule else {},
    }

    def text(key: str) -> str:
        if key in BATCH:
            return f"{key} = {step.batch_sizes[BATCH.index(key)]}"
        section, _, name = key.partition(".params.")
        if name:
            return f"{key} = {value_text(params[section][name])}" if name in params[section] else f"{key} (not used)"
        if key not in FIELDS:
            return f"{key} (off)"
        value = reduce(getattr, key.split("."), config)
        return f"{key} (its defaults)" if isinstance(value, Section) else f"{key} = {value_text(value)}"

    settings = [text(key) for key in config.autos if not is_replaced(key)]
    return [f'"auto", so the default: {", ".join(settings)}'] if settings else []


def _gathers(step: Any) -> str:
    """Describe when a pipeline gathers parameters, and the memory that each way takes in the compute dtype."""
    itemsize, sizes, leaves = step.precision.compute.itemsize, step.mesh.shape, jax.tree.leaves(step.layouts)
    used = [prod(leaf.shape) * itemsize // prod(sizes[a] for a in leaf.axes & {PIPE, TENSOR}) for leaf in leaves]
    kept = [size // prod(sizes[a] for a in leaf.group) for leaf, size in zip(leaves, used, strict=True)]
    asked = step.config.pipeline.gather or "micro_batch"
    return (
        f"pipeline.gather {asked}: micro_batch keeps {size_text(sum(kept))} of parameters per device and gathers them "
        f"for every micro-batch, step keeps {size_text(sum(used))} and gathers once"
    )


def _rates(lr: Callable[[int], Any]) -> str:
    """List the learning rates of the first steps and of a few later ones."""
    rates = {n: f"{float(lr(n)):.3g}" for n in (0, 1, 2, 10, 100, 1000, 10_000)}
    if len(set(rates.values())) == 1:
        return f"learning rate {rates[0]} at every step"
    return "learning rate by step: " + ", ".join(f"{n}={rate}" for n, rate in rates.items())


def _fell_back(leaf: ParamLayout) -> bool:
    return leaf.why.startswith("no dimension")


def _stays_exact(leaf: ParamLayout, plus: ZeroPlusPlus) -> bool:
    matrix = leaf.dim is not None and len(leaf.shape) - leaf.stacked > 1 and not leaf.state
    return matrix and (leaf.rule.plus.weights, leaf.rule.plus.gradients) != (plus.weights, plus.gradients)


def _and_not(there: list[ParamLayout], layouts: Any) -> str:
    """List what is on the host, or what of the trained parameters is not, whichever is shorter."""
    names = {leaf.name for leaf in there}
    rest = [leaf.name for leaf in jax.tree.leaves(layouts) if leaf.trainable and leaf.name not in names]
    if not rest:
        return "all parameters"
    return some_of(sorted(names), 4) if len(names) <= len(rest) else f"all but {some_of(rest, 4)}"


def _fallbacks(step: Any) -> list[str]:
    names: dict[str, list[str]] = {}
    for leaf in filter(_fell_back, jax.tree.leaves(step.layouts)):
        names.setdefault(leaf.why, []).append(leaf.name)
    lines = [f"replicated, {why}: {some_of(leaves, 4)}" for why, leaves in names.items()]
    lines += [*undivided_parameters(step), *unsharded(step)]
    if step.setup.optimizer.callers and step.config.optimizer:
        also = ", and its state_dtype" if "state_dtype" in step.config.optimizer.model_fields_set else ""
        lines.append(f"optimizer section ({step.config.optimizer.type}{also}) not used: an optimizer was passed in")
    if float16_on_cpu(step.precision, step.mesh):
        lines.append(
            "fp16 on CPU devices: matmuls that ask for float16 operands and a float32 sum by name (F16_F16_F32, as "
            "jax.nn.dot_product_attention does) take XLA's default, since JAX has no such matmuls there"
        )
    if exact := [leaf.name for leaf in jax.tree.leaves(step.layouts) if _stays_exact(leaf, step.setup.plus)]:
        lines.append(f"not quantized, no blocks of {SMALLEST_BLOCK} to {BLOCK} elements: {some_of(exact, 4)}")
    lines += _not_offloaded(step)
    facts = step.setup.passes.facts
    if facts.fallback:
        lines.append(facts.fallback)
    if any(leaf.by_layer for leaf in jax.tree.leaves(step.layouts)) and not facts.by_layer:
        why = "for the same reason" if facts.layers else "the model has no layer stack (docs/functional-api.md), so"
        lines.append(f"{why} ZeRO-3 gathers the whole model at once")
    for axis, key, given in (
        (CONTEXT, "context_parallel.attention", step.config.context_parallel.attention != "auto"),
        (TENSOR, "tensor_parallel.regather", step.config.tensor_parallel.regather),
    ):
        if given and step.mesh.shape[axis] == 1:
            lines.append(f"{key}: mesh.{axis} is 1, so it changes nothing")
    if step.config.expert_parallel.autoep_size > 1 and not step.config.expert_parallel.enabled:
        lines.append("expert_parallel.autoep_size: expert_parallel.enabled is false")
    checkpointing = step.config.activation_checkpointing
    stages, pipeline = step.mesh.shape[PIPE], step.config.pipeline
    if stages == 1 and pipeline.model_fields_set & {"schedule", "chunks"}:
        lines.append("pipeline.schedule and pipeline.chunks: one stage, so no pipeline")
    if stages == 1 and facts.remat.interval > 1:
        lines.append("activation_checkpoint_interval: without a pipeline every layer is a checkpoint of its own")
    if checkpointing and checkpointing.kind != "none" and not facts.layers and stages == 1:
        lines.append("activation_checkpointing: the model has no layer stack, so the whole model is one checkpoint")
    return lines
