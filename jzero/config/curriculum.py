"""The curriculum of a config, under DeepSpeed's older or newer keys, and what is wrong with it."""

from collections.abc import Iterator
from typing import TypeVar

from jzero.config.sections import CurriculumMetric, Settings
from jzero.errors import ConfigError

S = TypeVar("S", bound=Settings)
OLDER, NEWER = "curriculum_learning", "data_efficiency.data_sampling.curriculum_learning"
NEEDS = {
    "fixed_linear": ("total_curriculum_step", "difficulty_step"),
    "fixed_root": ("total_curriculum_step", "difficulty_step", "root_degree"),
    "fixed_discrete": ("difficulty", "max_step"),
    "custom": (),
}


def active(s: Settings) -> dict[str, CurriculumMetric]:
    """Return the schedules that the config turns on, by their path; a config without problems has one at most."""
    newer = s.data_efficiency.data_sampling.curriculum_learning
    found: dict[str, CurriculumMetric] = {OLDER: s.curriculum_learning} if s.curriculum_learning.enabled else {}
    if newer.enabled and newer.curriculum_metrics.seqlen:
        found[f"{NEWER}.curriculum_metrics.seqlen"] = newer.curriculum_metrics.seqlen
    return found


def without_curriculum(config: S) -> S:
    """Return a config that has no curriculum.

    Raises:
      ConfigError: it has one, which only the engine follows.
    """
    for path in active(config):
        raise ConfigError(
            f"{path}: the engine of jzero.initialize cuts the batches, and a train step does not; turn it off here and "
            "pass batches of the lengths that you want"
        )
    return config


def switch_problems(s: Settings) -> Iterator[str]:
    """Yield what is wrong with the switches: DeepSpeed reads the inner one alone, and documents all three."""
    sampling, schedules = s.data_efficiency.data_sampling, active(s)
    if sampling.curriculum_learning.enabled:
        outer = {"data_efficiency": s.data_efficiency.enabled, "data_efficiency.data_sampling": sampling.enabled}
        for path, enabled in outer.items():
            if not enabled:
                yield f"{path}.enabled = false and {NEWER}.enabled = true: set both to the same"
        if not any(path.startswith(NEWER) for path in schedules):
            yield f"{NEWER}.curriculum_metrics.seqlen: required with enabled = true"
    if len(schedules) > 1:
        yield f"{' and '.join(schedules)}: both set the length of the sequences; keep one"


def schedule_problems(path: str, schedule: CurriculumMetric) -> Iterator[str]:
    """Yield what is wrong with one schedule that is turned on."""
    low, high, kind, numbers = (
        schedule.min_difficulty, schedule.max_difficulty, schedule.schedule_type, schedule.schedule_config,
    )  # fmt: skip
    missing = [key for key in ("min_difficulty", "max_difficulty", "schedule_type") if getattr(schedule, key) is None]
    missing += [f"schedule_config.{key}" for key in NEEDS[kind or "custom"] if getattr(numbers, key) is None]
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
