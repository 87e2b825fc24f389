"""Checks between settings that are each valid alone; the parameters of the optimizer and the scheduler."""

from collections.abc import Callable, Collection, Iterator

from jzero import optimizers
from jzero.config import curriculum
from jzero.config.schedule_names import chunk_problems
from jzero.config.sections import MeshConfig, Settings
from jzero.config.sizes import MICS, asked_degrees, group_degrees, zero_group
from jzero.optimizers import lr_schedules
from jzero.values.kinds import as_json

Check = Callable[[Settings], Iterator[str]]
_CHECKS: list[tuple[tuple[str, ...], Check]] = []
_MESH = tuple(f"mesh.{axis}" for axis in MeshConfig.model_fields)


def contradictions(settings: Settings, wrong: Collection[str]) -> Iterator[str]:
    """Yield the problems between settings, without the checks that read a `wrong` key, its section, or a key inside.

    A wrong value was replaced by its default, about which a check would invent a contradiction.
    """
    for reads, check in _CHECKS:
        pairs = [(f"{key}.", f"{path}.") for key in reads for path in wrong]
        if not any(key.startswith(path) or path.startswith(key) for key, path in pairs):
            yield from check(settings)


def _reads(*keys: str) -> Callable[[Check], Check]:
    def register(check: Check) -> Check:
        _CHECKS.append((keys, check))
        return check

    return register


@_reads("watchdog.floor", "watchdog.ceiling")
def _watchdog(s: Settings) -> Iterator[str]:
    if 0 < s.watchdog.ceiling < s.watchdog.floor:
        yield (
            f"watchdog.floor = {s.watchdog.floor:g} and watchdog.ceiling = {s.watchdog.ceiling:g}: the floor must not "
            "be above the ceiling; set both (ceiling 0: no limit)"
        )


@_reads("fp16.enabled", "bf16.enabled")
def _two_precisions(s: Settings) -> Iterator[str]:
    if s.fp16.enabled and s.bf16.enabled:
        yield 'fp16.enabled = true and bf16.enabled = true: only one may be on; remove the "fp16" section to use bf16'


@_reads("fp8")
def _fp8_without_enabled(s: Settings) -> Iterator[str]:
    given = s.fp8.model_fields_set
    if given and "enabled" not in given:
        yield (
            f"fp8 has {', '.join(sorted(given))} but no fp8.enabled = true or false, so fp8 stays off; write "
            '"enabled": true, or "enabled": false to keep the section for later'
        )


@_reads("fp8.enabled", "fp16.enabled")
def _fp8_beside_fp16(s: Settings) -> Iterator[str]:
    if s.fp8.enabled and s.fp16.enabled:
        yield 'fp8.enabled = true and fp16.enabled = true: fp8 needs bf16; remove the "fp16" section, and enable bf16'


@_reads("fp8.enabled", "zero_optimization.zero_quantized_weights", "zero_optimization.offload_param.device")
def _fp8_weights(s: Settings) -> Iterator[str]:
    zero = s.zero_optimization
    if s.fp8.enabled and zero.zero_quantized_weights:
        yield (
            "fp8.enabled = true and zero_optimization.zero_quantized_weights = true: fp8 weights are gathered as one "
            "byte an element already; keep one"
        )
    if s.fp8.enabled and zero.offload_param.device != "none":
        yield (
            f'fp8.enabled = true and zero_optimization.offload_param.device = "{zero.offload_param.device}": weights '
            "that stay on the host are not cast to fp8; use offload_optimizer, which works beside fp8, or remove one"
        )


@_reads("fp8.recipe", "fp8.amax_history_len")
def _fp8_history(s: Settings) -> Iterator[str]:
    if s.fp8.recipe != "delayed" and "amax_history_len" in s.fp8.model_fields_set:
        yield (
            f'fp8.amax_history_len = {s.fp8.amax_history_len} with fp8.recipe = "{s.fp8.recipe}": only the recipe '
            '"delayed" has a history; set "recipe": "delayed", or remove amax_history_len'
        )


@_reads("bf16.bf16_optimizer_states", "bf16.bf16_master_weights_and_grads")
def _bf16_states(s: Settings) -> Iterator[str]:
    if s.bf16.bf16_optimizer_states and not s.bf16.bf16_master_weights_and_grads:
        yield (
            "bf16.bf16_optimizer_states = true: moments in bfloat16 need masters in bfloat16, so this needs "
            "bf16.bf16_master_weights_and_grads = true; set both or neither"
        )


@_reads("bf16.bf16_optimizer_states", "optimizer.state_dtype")
def _two_dtypes_of_moments(s: Settings) -> Iterator[str]:
    if s.bf16.bf16_optimizer_states and s.optimizer and "state_dtype" in s.optimizer.model_fields_set:
        yield (
            f'bf16.bf16_optimizer_states = true and optimizer.state_dtype = "{s.optimizer.state_dtype}": both set the '
            "dtype of the moments; keep one"
        )


@_reads(MICS, "mesh.zero")
def _group_against_mesh(s: Settings) -> Iterator[str]:
    key, size = zero_group(s)
    if size and "zero" in s.mesh.model_fields_set and s.mesh.zero not in (-1, size):
        yield f"{key} = {size} and mesh.zero = {s.mesh.zero}: both set the size of a ZeRO group; keep one"


@_reads(MICS, *_MESH)
def _one_rest(s: Settings) -> Iterator[str]:
    rest = [f"mesh.{axis} = -1" for axis, degree in asked_degrees(s).items() if degree == -1]
    if len(rest) > 1:
        hint = "" if "zero" in s.mesh.model_fields_set else "; -1 is the default of mesh.zero: set that to a number"
        yield f"{' and '.join(rest)}: -1 (the rest) is allowed on one axis only{hint}"


@_reads(
    "expert_parallel.enabled",
    "expert_parallel.autoep_size",
    "tensor_parallel.autotp_size",
    "tensor_parallel.tp.tp_size",
    "sequence_parallel_size",
    *_MESH,
)
def _groups_against_mesh(s: Settings) -> Iterator[str]:
    tp_size = s.tensor_parallel.tp.tp_size
    for axis, (key, size) in group_degrees(s).items():
        if axis == "tensor" and tp_size not in (1, size):
            yield f"{key} = {size} and tensor_parallel.tp.tp_size = {tp_size}: both are the degree of tensor; keep one"
        own = getattr(s.mesh, axis)
        if size and axis in s.mesh.model_fields_set and own not in (-1, size):
            yield f"{key} = {size} and mesh.{axis} = {own}: both are the degree of {axis}; keep one"


@_reads("tensor_parallel.dimensions", "tensor_parallel.partition_config.layer_specs")
def _two_tables(s: Settings) -> Iterator[str]:
    if s.tensor_parallel.dimensions and s.tensor_parallel.partition_config.layer_specs:
        yield (
            "tensor_parallel.dimensions and tensor_parallel.partition_config.layer_specs: both say which dimensions "
            "mesh.tensor divides; keep one"
        )


@_reads("pipeline.stages", "mesh.pipe")
def _stages_against_mesh(s: Settings) -> Iterator[str]:
    if s.pipeline.stages and "pipe" in s.mesh.model_fields_set and s.mesh.pipe not in (-1, s.pipeline.stages):
        yield f"pipeline.stages = {s.pipeline.stages} and mesh.pipe = {s.mesh.pipe}: both are the stages; keep one"


@_reads("pipeline.schedule", "pipeline.chunks")
def _chunks(s: Settings) -> Iterator[str]:
    schedule, chunks = s.pipeline.schedule, s.pipeline.chunks
    yield from chunk_problems(schedule, chunks)
    if chunks == 1 and schedule == "interleaved":
        yield 'pipeline.schedule = "interleaved": needs pipeline.chunks of 2 or more; one chunk per stage is "1f1b"'


@_reads("pipeline.gather", "zero_optimization.stage")
def _gather(s: Settings) -> Iterator[str]:
    stage = s.zero_optimization.stage
    if s.pipeline.gather == "micro_batch" and stage < 3:
        yield (
            f'pipeline.gather = "micro_batch" with zero_optimization.stage = {stage}: only stage 3 has parameters to '
            "gather for every micro-batch; remove it or use stage 3"
        )


_ZERO_PP = ("zero_quantized_weights", "zero_quantized_gradients", "zero_hpz_partition_size")


@_reads("zero_optimization.stage", "pipeline.gather", *(f"zero_optimization.{key}" for key in _ZERO_PP))
def _zero_pp(s: Settings) -> Iterator[str]:
    zero = s.zero_optimization
    asked = {key: value for key in _ZERO_PP if (value := getattr(zero, key)) is True or value > 1}
    for key, value in asked.items():
        text = f"zero_optimization.{key} = {as_json(value)}"
        if zero.stage < 3:
            yield f"{text} with zero_optimization.stage = {zero.stage}: ZeRO++ is for stage 3; remove it or use stage 3"
        elif key == "zero_hpz_partition_size" and s.pipeline.gather == "step":
            yield (
                f'{text} with pipeline.gather = "step": the weights are gathered once a step and kept whole, so a '
                "second copy has no use; remove one"
            )


@_reads(
    "zero_optimization.stage", "zero_optimization.offload_param.device", "zero_optimization.zero_hpz_partition_size"
)
def _two_places(s: Settings) -> Iterator[str]:
    zero = s.zero_optimization
    if zero.offload_param.device == "cpu" and zero.stage == 3 and zero.zero_hpz_partition_size > 1:
        yield (
            'zero_optimization.offload_param.device = "cpu" with zero_hpz_partition_size = '
            f"{zero.zero_hpz_partition_size}: one keeps the weights off the device, the other a copy on it; remove one"
        )


@_reads("pipeline.activation_checkpoint_interval", "activation_checkpointing.policy")
def _interval(s: Settings) -> Iterator[str]:
    remat, interval = s.activation_checkpointing, s.pipeline.activation_checkpoint_interval
    if interval and remat and remat.policy == "none":
        yield (
            f"pipeline.activation_checkpoint_interval = {interval}: does nothing with activation_checkpointing.policy "
            '"none"; use policy "full" or "matmuls", or remove one'
        )


@_reads("activation_checkpointing.policy", "activation_checkpointing.cpu_checkpointing")
def _no_policy(s: Settings) -> Iterator[str]:
    remat = s.activation_checkpointing
    if remat and remat.policy == "none" and remat.cpu_checkpointing:
        yield (
            'activation_checkpointing.cpu_checkpointing = true: does nothing with policy "none"; remove it or use '
            'policy "full"'
        )


@_reads("optimizer.type", "optimizer.params", "optimizer.groups", "optimizer.no_weight_decay")
def _optimizer(s: Settings) -> Iterator[str]:
    if s.optimizer:
        yield from optimizers.optimizer_problems(s.optimizer)


@_reads("scheduler.type", "scheduler.params")
def _scheduler(s: Settings) -> Iterator[str]:
    if s.scheduler:
        yield from lr_schedules.scheduler_problems(s.scheduler)


@_reads("curriculum_learning", curriculum.NEWER)
def _curriculum(s: Settings) -> Iterator[str]:
    yield from curriculum.switch_problems(s)
    for path, schedule in curriculum.active(s).items():
        yield from curriculum.schedule_problems(path, schedule)


@_reads(
    "optimizer.type", "optimizer.params", "zero_optimization.stage", "pipeline.stages", "mesh.pipe",
    "zero_optimization.offload_optimizer.device",
)  # fmt: skip
def _compressed(s: Settings) -> Iterator[str]:
    if s.optimizer is None or optimizers.optimizer_problems(s.optimizer) or not optimizers.compresses(s.optimizer):
        return
    stages = s.pipeline.stages or s.mesh.pipe
    if s.zero_optimization.offload_optimizer.device == "cpu":
        yield (
            f'zero_optimization.offload_optimizer.device = "cpu" with optimizer.type {s.optimizer.type!r}: its '
            "compressed communication keeps its state on the devices; remove one, or write "
            "optimizer.params.exact_communication: true"
        )
    for key, value, fits in (("zero_optimization.stage", s.zero_optimization.stage, 0), ("mesh.pipe", stages, 1)):
        if value not in (fits, -1):
            yield (
                f"{key} = {value} with optimizer.type {s.optimizer.type!r}: its compressed communication needs {key} "
                f"{fits}, where every device has all gradients; or write optimizer.params.exact_communication: true"
            )
