"""Checks between settings that are each valid alone; the parameters of the optimizer and the scheduler."""

from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial

from jzero import optimizers
from jzero.config.keys import BY_METRIC
from jzero.config.sections import CURRICULUM, CurriculumMetric, MeshConfig, Settings
from jzero.config.sizes import MICS, asked_degrees, group_degrees
from jzero.optimizers import lr_schedules
from jzero.values.kinds import as_json

Check = Callable[[Settings], Iterable[str]]
_MESH = " ".join(f"mesh.{axis}" for axis in MeshConfig.model_fields)
_FP8_WEIGHTS = "fp8.enabled zero_optimization.zero_quantized_weights zero_optimization.offload_param.device"
_DEGREES = {  # axis -> the other keys of its degree
    "zero": MICS,
    "expert": "expert_parallel.enabled expert_parallel.autoep_size",
    "context": "sequence_parallel_size",
    "tensor": "tensor_parallel.autotp_size tensor_parallel.tp.tp_size",
    "pipe": "pipeline.stages",
}
_ZERO_PP = ("zero_quantized_weights", "zero_quantized_gradients", "zero_hpz_partition_size")
_NEEDS = {
    "fixed_linear": ("total_curriculum_step", "difficulty_step"),
    "fixed_root": ("total_curriculum_step", "difficulty_step", "root_degree"),
    "fixed_discrete": ("difficulty", "max_step"),
    "custom": (),
}


def contradictions(settings: Settings, wrong: Collection[str]) -> Iterator[str]:
    """Yield the problems between settings, without the checks that read a `wrong` key, its section, or a key inside.

    A wrong value was replaced by its default, about which a check would invent a contradiction.
    """
    for reads, check in _CHECKS:
        pairs = [(f"{key}.", f"{path}.") for key in reads.split() for path in wrong]
        if not any(key.startswith(path) or path.startswith(key) for key, path in pairs):
            yield from check(settings)


def _problem_if(reads: str, holds: Callable[[Settings], object], text: str) -> tuple[str, Check]:
    """Make the row of a check of one condition; the text is a format of the settings `s`."""
    return reads, lambda s: [text.format(s=s)] if holds(s) else []


def _fp8_without_enabled(s: Settings) -> Iterator[str]:
    given = s.fp8.model_fields_set
    if given and "enabled" not in given:
        yield (
            f"fp8 has {', '.join(sorted(given))} but no fp8.enabled = true or false, so fp8 stays off; write "
            '"enabled": true, or "enabled": false to keep the section for later'
        )


def _one_rest(s: Settings) -> Iterator[str]:
    rest = [f"mesh.{axis} = -1" for axis, degree in asked_degrees(s).items() if degree == -1]
    if len(rest) > 1:
        hint = "" if "zero" in s.mesh.model_fields_set else "; -1 is the default of mesh.zero: set that to a number"
        yield f"{' and '.join(rest)}: -1 (the rest) is allowed on one axis only{hint}"


def _two_degrees(axis: str, s: Settings) -> Iterator[str]:
    (key, size), own, tp_size = group_degrees(s)[axis], getattr(s.mesh, axis), s.tensor_parallel.tp.tp_size
    if axis == "tensor" and tp_size not in (1, size):
        yield f"{key} = {size} and tensor_parallel.tp.tp_size = {tp_size}: both are the degree of tensor; keep one"
    if size and axis in s.mesh.model_fields_set and own not in (-1, size):
        both = {"zero": "set the size of a ZeRO group", "pipe": "are the stages"}.get(axis, f"are the degree of {axis}")
        yield f"{key} = {size} and mesh.{axis} = {own}: both {both}; keep one"


def chunk_problems(schedule: str, chunks: int) -> Iterator[str]:
    """Yield a problem if the schedule does not have this number of chunks per stage."""
    if schedule in ("gpipe", "1f1b") and chunks > 1:
        yield (
            f'pipeline.chunks = {chunks}: schedule "{schedule}" has one chunk per stage; set pipeline.schedule to '
            '"interleaved" or "zero_bubble", or chunks to 1 (gradient_accumulation_steps are the micro-batches)'
        )


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


def _curriculum(s: Settings) -> Iterator[str]:
    """Yield the problems of the switches and of the schedules. DeepSpeed reads only the inner switch."""
    sampling, schedules = s.data_efficiency.data_sampling, s.curricula
    if sampling.curriculum_learning.enabled:
        outer = {"data_efficiency": s.data_efficiency.enabled, "data_efficiency.data_sampling": sampling.enabled}
        for path, enabled in outer.items():
            if not enabled:
                yield f"{path}.enabled = false and {CURRICULUM}.enabled = true: set both to the same"
        others = sampling.curriculum_learning.curriculum_metrics.model_extra or {}
        for metric in others:
            yield f"{CURRICULUM}.curriculum_metrics.{metric}: not yet supported: {BY_METRIC}; leave it out"
        if not others and not any(path.startswith(CURRICULUM) for path in schedules):
            yield f"{CURRICULUM}.curriculum_metrics.seqlen: required with enabled = true"
    if len(schedules) > 1:
        yield f"{' and '.join(schedules)}: both set the length of the sequences; keep one"
    for path, schedule in schedules.items():
        yield from _schedule_problems(path, schedule)


def _schedule_problems(path: str, schedule: CurriculumMetric) -> Iterator[str]:
    """Yield what is wrong with one schedule that is turned on."""
    low, high, kind, numbers = (
        schedule.min_difficulty, schedule.max_difficulty, schedule.schedule_type, schedule.schedule_config,
    )  # fmt: skip
    missing = [key for key in ("min_difficulty", "max_difficulty", "schedule_type") if getattr(schedule, key) is None]
    missing += [f"schedule_config.{key}" for key in _NEEDS[kind or "custom"] if getattr(numbers, key) is None]
    for key in missing:
        yield f"{path}.{key}: required with enabled = true" + (f' and schedule_type "{kind}"' * ("." in key))
    if missing or low is None or high is None:
        return
    if low > high:
        yield f"{path}.min_difficulty = {low} and max_difficulty = {high}: the minimum must not be above the maximum"
    elif numbers.difficulty_step and low < numbers.difficulty_step and kind in ("fixed_linear", "fixed_root"):
        yield (
            f"{path}.min_difficulty = {low} and schedule_config.difficulty_step = {numbers.difficulty_step}: lengths "
            "are multiples of the step, so the first would be 0; set the minimum to the step or more"
        )
    if kind == "fixed_discrete" and numbers.difficulty and numbers.max_step:
        if len(numbers.difficulty) != len(numbers.max_step) + 1:
            yield (
                f"{path}.schedule_config.max_step: has {len(numbers.max_step)} entries, and difficulty "
                f"{len(numbers.difficulty)}; it must have one less, because the last difficulty stays"
            )
        if list(numbers.max_step) != sorted(set(numbers.max_step)):
            yield f"{path}.schedule_config.max_step = {list(numbers.max_step)}: the steps must increase"
        if max(numbers.difficulty) > high:
            lengths = list(numbers.difficulty)
            yield f"{path}.schedule_config.difficulty = {lengths}: must not be above max_difficulty {high}"


_CHECKS: tuple[tuple[str, Check], ...] = (
    _problem_if(
        "watchdog.floor watchdog.ceiling",
        lambda s: 0 < s.watchdog.ceiling < s.watchdog.floor,
        "watchdog.floor = {s.watchdog.floor:g} and watchdog.ceiling = {s.watchdog.ceiling:g}: the floor must not "
        "be above the ceiling; set both (ceiling 0: no limit)",
    ),
    _problem_if(
        "fp16.enabled bf16.enabled",
        lambda s: s.fp16.enabled and s.bf16.enabled,
        'fp16.enabled = true and bf16.enabled = true: only one may be on; remove the "fp16" section to use bf16',
    ),
    ("fp8", _fp8_without_enabled),
    _problem_if(
        "fp8.enabled fp16.enabled",
        lambda s: s.fp8.enabled and s.fp16.enabled,
        'fp8.enabled = true and fp16.enabled = true: fp8 needs bf16; remove the "fp16" section, and enable bf16',
    ),
    _problem_if(
        _FP8_WEIGHTS,
        lambda s: s.fp8.enabled and s.zero_optimization.zero_quantized_weights,
        "fp8.enabled = true and zero_optimization.zero_quantized_weights = true: fp8 weights are gathered as one "
        "byte an element already; keep one",
    ),
    _problem_if(
        _FP8_WEIGHTS,
        lambda s: s.fp8.enabled and s.zero_optimization.offload_param.device != "none",
        'fp8.enabled = true and zero_optimization.offload_param.device = "{s.zero_optimization.offload_param.device}"'
        ": weights that stay on the host are not cast to fp8; use offload_optimizer, which works with fp8, or "
        "remove one",
    ),
    _problem_if(
        "fp8.recipe fp8.amax_history_len",
        lambda s: s.fp8.recipe != "delayed" and "amax_history_len" in s.fp8.model_fields_set,
        'fp8.amax_history_len = {s.fp8.amax_history_len} with fp8.recipe = "{s.fp8.recipe}": only the recipe '
        '"delayed" has a history; set "recipe": "delayed", or remove amax_history_len',
    ),
    _problem_if(
        "bf16.bf16_optimizer_states bf16.bf16_master_weights_and_grads",
        lambda s: s.bf16.bf16_optimizer_states and not s.bf16.bf16_master_weights_and_grads,
        "bf16.bf16_optimizer_states = true: moments in bfloat16 need masters in bfloat16, so this needs "
        "bf16.bf16_master_weights_and_grads = true; set both or neither",
    ),
    _problem_if(
        "bf16.bf16_optimizer_states optimizer.state_dtype",
        lambda s: s.bf16.bf16_optimizer_states and s.optimizer and "state_dtype" in s.optimizer.model_fields_set,
        'bf16.bf16_optimizer_states = true and optimizer.state_dtype = "{s.optimizer.state_dtype}": both set the '
        "dtype of the moments; keep one",
    ),
    *((f"{keys} mesh.{axis}", partial(_two_degrees, axis)) for axis, keys in _DEGREES.items()),
    (f"{MICS} {_MESH}", _one_rest),
    _problem_if(
        "tensor_parallel.dimensions tensor_parallel.partition_config.layer_specs",
        lambda s: s.tensor_parallel.dimensions and s.tensor_parallel.partition_config.layer_specs,
        "tensor_parallel.dimensions and tensor_parallel.partition_config.layer_specs: both say which dimensions "
        "mesh.tensor divides; keep one",
    ),
    ("pipeline.schedule pipeline.chunks", lambda s: chunk_problems(s.pipeline.schedule, s.pipeline.chunks)),
    _problem_if(
        "pipeline.schedule pipeline.chunks",
        lambda s: s.pipeline.chunks == 1 and s.pipeline.schedule == "interleaved",
        'pipeline.schedule = "interleaved": needs pipeline.chunks of 2 or more; one chunk per stage is "1f1b"',
    ),
    _problem_if(
        "pipeline.gather zero_optimization.stage",
        lambda s: s.pipeline.gather == "micro_batch" and s.zero_optimization.stage < 3,
        'pipeline.gather = "micro_batch" with zero_optimization.stage = {s.zero_optimization.stage}: only stage 3 '
        "has parameters to gather for every micro-batch; remove it or use stage 3",
    ),
    (
        " ".join(["zero_optimization.stage pipeline.gather", *(f"zero_optimization.{key}" for key in _ZERO_PP)]),
        _zero_pp,
    ),
    _problem_if(
        "zero_optimization.stage zero_optimization.offload_param.device zero_optimization.zero_hpz_partition_size",
        lambda s: (
            s.zero_optimization.offload_param.device == "cpu"
            and s.zero_optimization.stage == 3
            and s.zero_optimization.zero_hpz_partition_size > 1
        ),
        'zero_optimization.offload_param.device = "cpu" with zero_hpz_partition_size = '
        "{s.zero_optimization.zero_hpz_partition_size}: one keeps the weights off the device, the other a copy on "
        "it; remove one",
    ),
    _problem_if(
        "pipeline.activation_checkpoint_interval activation_checkpointing.policy",
        lambda s: (
            s.pipeline.activation_checkpoint_interval
            and s.activation_checkpointing
            and s.activation_checkpointing.policy == "none"
        ),
        "pipeline.activation_checkpoint_interval = {s.pipeline.activation_checkpoint_interval}: does nothing with "
        'activation_checkpointing.policy "none"; use policy "full" or "matmuls", or remove one',
    ),
    _problem_if(
        "activation_checkpointing.policy activation_checkpointing.cpu_checkpointing",
        lambda s: (
            s.activation_checkpointing
            and s.activation_checkpointing.policy == "none"
            and s.activation_checkpointing.cpu_checkpointing
        ),
        'activation_checkpointing.cpu_checkpointing = true: does nothing with policy "none"; remove it or use '
        'policy "full"',
    ),
    (
        "optimizer.type optimizer.params optimizer.groups optimizer.no_weight_decay",
        lambda s: optimizers.optimizer_problems(s.optimizer) if s.optimizer else (),
    ),
    ("scheduler.type scheduler.params", lambda s: lr_schedules.scheduler_problems(s.scheduler) if s.scheduler else ()),
    (f"curriculum_learning {CURRICULUM}", _curriculum),
)
