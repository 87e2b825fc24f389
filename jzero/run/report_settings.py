"""The settings of the run report: those in effect, and what the step does instead of what was asked."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import reduce
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jzero import optimizers
from jzero.config.fields import Section
from jzero.config.keys import is_replaced
from jzero.config.screen import FIELDS
from jzero.config.sizes import BATCH
from jzero.data.curriculum import curriculum_of
from jzero.display.text_table import size_text, value_text
from jzero.errors import some_of
from jzero.layout.sharding import ParamLayout
from jzero.layout.zeropp import BLOCK, SMALLEST_BLOCK, ZeroPlusPlus
from jzero.mesh import CONTEXT, PIPE, TENSOR, ZERO_AXES, present
from jzero.planner.advice import undivided_parameters, unsharded
from jzero.step.setup import float16_on_cpu
from jzero.step.train_step import TrainStep


def effective_settings(step: TrainStep) -> list[str]:
    found = [*_gradients(step), *_layout(step), *_optimizer(step), *_stack(step)]
    notes: Callable[[object], list[str]] = getattr(step.model, "report_notes", lambda dtype: [])

    def inside(x: jax.Array) -> jax.Array:
        found.extend(notes(step.precision.compute))
        return x

    # Where the model runs: the devices, and that every axis of the mesh is manual, decide some of it.
    one = PartitionSpec()
    mapped = jax.shard_map(inside, mesh=step.mesh, in_specs=one, out_specs=one, check_vma=False)
    jax.eval_shape(mapped, jax.ShapeDtypeStruct((), jnp.float32))
    return found


def _gradients(step: TrainStep) -> Iterator[str]:
    clip = step.config.gradient_clipping
    yield f"gradient_clipping {clip:g}: by global norm" if clip else "gradient_clipping 0: off"
    if step.config.gradient_allreduce_op == "sum":
        yield f"gradient_allreduce_op sum: gradients are {step.replicas} times those of the mean over the replicas"
    if step.config.precision != "fp32" and not step.precision.check_overflow:
        yield "bf16.check_grad_overflow false: a gradient that is not finite reaches the parameters"
    else:
        yield "a step whose gradient is not finite is skipped"


def _layout(step: TrainStep) -> Iterator[str]:
    tensor = step.config.tensor_parallel
    if tensor.partition_config.layer_specs:
        yield f"tensor_parallel.partition_config, as dimensions: {value_text(tensor.dimensions)}"
    if step.setup.searched:
        yield f"tensor_parallel.dimensions, found by trying: {value_text(tensor.dimensions)}"
    if there := [leaf for leaf in jax.tree.leaves(step.layouts) if leaf.on_host.master or leaf.on_host.moments]:
        yield (
            f"offload: {size_text(step.host_bytes)} of the state in the host's memory for each device; the update "
            f"reads and writes it there; on the host are {_and_not(there, step.layouts)}"
        )


def _optimizer(step: TrainStep) -> Iterator[str]:
    config, schedule = step.config, step.setup.optimizer.schedule
    if config.fp16.enabled:
        first = f"{step.precision.scaler.initial:g}"
        yield f"loss scale dynamic, from {first}" if step.precision.scaler.dynamic else f"loss scale {first}, static"
    if config.optimizer and not step.setup.optimizer.callers:
        used = optimizers.parameters(config.optimizer).items()
        values = ", ".join(f"{k} {value_text(v)}" for k, v in used if v is not None)
        yield f"optimizer {config.optimizer.type}: {values}"
        yield from optimizers.describe(config.optimizer, schedule)
    yield from _autos(step)
    if schedule:
        yield _rates(schedule.lr)
        yield from schedule.notes
    if curriculum := curriculum_of(config):
        yield curriculum.describe()


def _stack(step: TrainStep) -> Iterator[str]:
    facts = step.setup.passes.facts
    checkpointing = f"activation checkpointing {facts.remat.kind}" + ", kept in host memory" * facts.remat.offload
    if facts.layers:
        every = f", {facts.layers_per_checkpoint} layers at a time" if facts.remat.interval else ""
        yield f"layer stack: {facts.layers} layers, {_how(step)}; {checkpointing}{every}"
    elif facts.remat.kind != "none":
        yield checkpointing
    if step.mesh.shape[PIPE] > 1 and present(step.mesh, *ZERO_AXES) and step.config.zero_optimization.stage == 3:
        yield _gathers(step)
    if small := [leaf for leaf in jax.tree.leaves(step.layouts) if leaf.why and not _fell_back(leaf)]:
        elements = sum(prod(leaf.shape) for leaf in small)
        yield f"replicated, {small[0].why}: {len(small)} leaves, {elements:,} elements"


def _how(step: TrainStep) -> str:
    facts, config = step.setup.passes.facts, step.config
    if facts.unrolled:
        return "unrolled"
    in_use = any(leaf.on_host.in_use for leaf in jax.tree.leaves(step.layouts))
    asked = "cpu_checkpointing" if facts.remat.offload else "offload_param" if in_use else ""
    # A pipeline scans many layers, whatever is on the host.
    return f"scanned for {asked}" if asked and config.stack.unroll == "auto" and not facts.pipeline else "scanned"


def _autos(step: TrainStep) -> list[str]:
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


def _gathers(step: TrainStep) -> str:
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


def _and_not(there: list[ParamLayout], layouts: Any) -> str:
    """List what is on the host, or what of the trained parameters is not, whichever is shorter."""
    names = {leaf.name for leaf in there}
    rest = [leaf.name for leaf in jax.tree.leaves(layouts) if leaf.trainable and leaf.name not in names]
    if not rest:
        return "all parameters"
    return some_of(sorted(names), 4) if len(names) <= len(rest) else f"all but {some_of(rest, 4)}"


def _fell_back(leaf: ParamLayout) -> bool:
    return leaf.why.startswith("no dimension")


# What the config asks for and this step has no use for: (whether a step has such a key, its line).
_UNUSED: tuple[tuple[Callable[[TrainStep], object], str], ...] = (
    (
        lambda step: float16_on_cpu(step.precision, step.mesh),
        "fp16 on CPU devices: matmuls that ask for float16 operands and a float32 sum by name (F16_F16_F32, as "
        "jax.nn.dot_product_attention does) take XLA's default, since JAX has no such matmuls there",
    ),
    (
        lambda step: step.config.context_parallel.attention != "auto" and step.mesh.shape[CONTEXT] == 1,
        f"context_parallel.attention: mesh.{CONTEXT} is 1, so it changes nothing",
    ),
    (
        lambda step: step.config.tensor_parallel.regather and step.mesh.shape[TENSOR] == 1,
        f"tensor_parallel.regather: mesh.{TENSOR} is 1, so it changes nothing",
    ),
    (
        lambda step: step.config.expert_parallel.autoep_size > 1 and not step.config.expert_parallel.enabled,
        "expert_parallel.autoep_size: expert_parallel.enabled is false",
    ),
    (
        lambda step: step.mesh.shape[PIPE] == 1 and step.config.pipeline.model_fields_set & {"schedule", "chunks"},
        "pipeline.schedule and pipeline.chunks: one stage, so no pipeline",
    ),
    (
        lambda step: step.mesh.shape[PIPE] == 1 and step.setup.passes.facts.remat.interval > 1,
        "activation_checkpoint_interval: without a pipeline every layer is a checkpoint of its own",
    ),
    (
        lambda step: (
            step.mesh.shape[PIPE] == 1
            and (section := step.config.activation_checkpointing) is not None
            and section.kind != "none"
            and not step.setup.passes.facts.layers
        ),
        "activation_checkpointing: the model has no layer stack, so the whole model is one checkpoint",
    ),
)


def fallbacks(step: TrainStep) -> list[str]:
    facts, layouts, names = step.setup.passes.facts, jax.tree.leaves(step.layouts), dict[str, list[str]]()
    for leaf in filter(_fell_back, layouts):
        names.setdefault(leaf.why, []).append(leaf.name)
    lines = [f"replicated, {why}: {some_of(leaves, 4)}" for why, leaves in names.items()]
    lines += [*undivided_parameters(step), *unsharded(step)]
    if step.setup.optimizer.callers and step.config.optimizer:
        also = ", and its state_dtype" if "state_dtype" in step.config.optimizer.model_fields_set else ""
        lines.append(f"optimizer section ({step.config.optimizer.type}{also}) not used: an optimizer was passed in")
    if exact := [leaf.name for leaf in layouts if _stays_exact(leaf, step.setup.plus)]:
        lines.append(f"not quantized, no blocks of {SMALLEST_BLOCK} to {BLOCK} elements: {some_of(exact, 4)}")
    lines += _not_offloaded(step)
    if facts.fallback:
        lines.append(facts.fallback)
    if any(leaf.by_layer for leaf in layouts) and not facts.by_layer:
        why = "for the same reason" if facts.layers else "the model has no layer stack (docs/functional-api.md), so"
        lines.append(f"{why} ZeRO-3 gathers the whole model at once")
    return [*lines, *(line for applies, line in _UNUSED if applies(step))]


def _stays_exact(leaf: ParamLayout, plus: ZeroPlusPlus) -> bool:
    matrix = leaf.dim is not None and len(leaf.shape) - leaf.stacked > 1 and not leaf.state
    return matrix and (leaf.rule.plus.weights, leaf.rule.plus.gradients) != (plus.weights, plus.gradients)


def _not_offloaded(step: TrainStep) -> list[str]:
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
