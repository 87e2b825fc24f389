"""Curriculum learning by sequence length: sequences start short and grow with the steps.

The length depends on the number of the step alone, so a resumed run continues exactly. Shapes are static: the step
compiles once per length.

Li et al., 2022, "The Stability-Efficiency Dilemma" (arXiv:2108.06084); the formulas are those of DeepSpeed's
runtime/data_pipeline/curriculum_scheduler.py.
"""

from __future__ import annotations

from collections.abc import Callable
from math import floor
from typing import Literal

import jax
import numpy as np

from jzero.config import Config
from jzero.config.sections import CurriculumMetric
from jzero.errors import ConfigError
from jzero.step.batch import host_arrays
from jzero.tree import PyTree, named

METRIC = "seqlen"  # DeepSpeed's name for the length
Schedule = Callable[[int], int]
Part = Literal["batch", "inputs", "labels"]


def curriculum_of(config: Config) -> Curriculum | None:
    """Return the curriculum that a config turns on."""
    return next((Curriculum(path, schedule) for path, schedule in config.curricula.items()), None)


class Curriculum:
    """A schedule of lengths, and the cut of a batch to one of them.

    Args:
      path: of the schedule in the config.
      schedule: valid, see `jzero.config.checks`.

    Attributes:
      custom: the lengths of `schedule_type` "custom": step -> length.
      post_process: cuts a batch instead: (batch, {"curriculum_step", "current_difficulties"}) -> batch.

    >>> from jzero.config.sections import CurriculumMetric
    >>> schedule = CurriculumMetric(
    ...     min_difficulty=16, max_difficulty=64, schedule_type="fixed_linear",
    ...     schedule_config={"total_curriculum_step": 6, "difficulty_step": 16},
    ... )
    >>> [Curriculum("curriculum_learning", schedule).length(step) for step in range(1, 8)]
    [16, 32, 32, 48, 48, 64, 64]
    """

    def __init__(self, path: str, schedule: CurriculumMetric):
        self.path, self._schedule, self._numbers = path, schedule, schedule.schedule_config
        self.longest: int = schedule.max_difficulty or 0
        self.custom: Schedule | None = None
        self.post_process: Callable[[PyTree, dict], PyTree] | None = None
        self._before: dict[tuple, int] = {}  # path in the batch -> the columns of the array before the cut

    def length(self, step: int) -> int:
        """Return the length of the sequences of a step; the first step is 1.

        Raises:
          ConfigError: the schedule is "custom" and has no function, or a function that gives no length.
        """
        kind, least = self._schedule.schedule_type, self._schedule.min_difficulty or 0
        if kind == "custom":
            return self._custom(step)
        if least == self.longest:
            return least
        if kind == "fixed_discrete":
            return self._discrete(step)
        numbers = self._numbers
        degree = 1.0 if kind == "fixed_linear" else numbers.root_degree or 1.0
        progress = (step / (numbers.total_curriculum_step or 1)) ** (1.0 / degree)
        reached = floor(progress * (self.longest - least) + least)
        return min(reached - reached % (numbers.difficulty_step or 1), self.longest)

    def _discrete(self, step: int) -> int:
        """Look up the length of a step; the longest one stays once it is reached, as in DeepSpeed."""
        lengths, ends = self._numbers.difficulty or (), self._numbers.max_step or ()
        for length, end in zip(lengths, (*ends, step), strict=True):
            if length == self.longest or step <= end:
                return length
        return lengths[-1]

    def _custom(self, step: int) -> int:
        fix = f'engine.set_custom_curriculum_learning_schedule({{"{METRIC}": step -> length}})'
        if self.custom is None:
            raise ConfigError(f'{self.path}.schedule_type = "custom": no function; call {fix} before the first step')
        length = self.custom(step)
        if not isinstance(length, int | np.integer) or not 1 <= length <= self.longest:
            raise ConfigError(
                f"{fix}: the function returned {length!r} for step {step}: must be an integer from 1 to max_difficulty "
                f"{self.longest}"
            )
        return int(length)

    def cut(self, batch: PyTree, step: int, *, part: Part = "batch") -> PyTree:
        """Cut a batch, or a micro-batch, to the length of a step.

        Every array whose second dimension is the longest length keeps that many columns. An array with one more column,
        for the next token, keeps one more. Other arrays stay as they are.

        Args:
          part: "inputs" or "labels" for those of a criterion alone. Labels may have no such array; for others that is
            an error.
        """
        batch, length = host_arrays(batch), self.length(step)
        if self.post_process is not None:
            return self.post_process(batch, {"curriculum_step": step, "current_difficulties": {METRIC: length}})
        beyond = {name: x.shape[1] - self.longest for name, x in named(batch).items() if np.ndim(x) > 1}
        if part != "labels" and not {0, 1} & set(beyond.values()):
            shapes = ", ".join(f"{name or 'batch'} {list(np.shape(x))}" for name, x in named(batch).items())
            raise ConfigError(
                f"{self.path}.max_difficulty = {self.longest}: no array of the batch has this second dimension "
                f"({shapes}): set it to the length of the sequences, or cut them with engine.set_data_post_process_func"
            )

        # Where the part is in the pair that the step sees.
        at = () if part == "batch" else (jax.tree_util.SequenceKey(("inputs", "labels").index(part)),)

        def one(path: tuple, x: np.ndarray) -> np.ndarray:
            if np.ndim(x) < 2:
                return x
            self._before[*at, *path] = x.shape[1]
            more = x.shape[1] - self.longest
            return x[:, : length + more] if more in (0, 1) else x

        return jax.tree_util.tree_map_with_path(one, batch)

    def uncut(self, shapes: PyTree) -> PyTree:
        """Return the shapes that a batch had before the last `cut`; those of `post_process` as they are."""

        def one(path: tuple, x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            return x.update(shape=(x.shape[0], self._before.get(path, x.shape[1]), *x.shape[2:])) if x.ndim > 1 else x

        return jax.tree_util.tree_map_with_path(one, shapes)

    def describe(self) -> str:
        """Describe the lengths, and how many programs they need, for the run report."""
        kind, step = self._schedule.schedule_type, self._numbers.difficulty_step
        head = f"{self.path}: training sequences are cut to the length of the step"
        if kind == "custom":
            return f"{head}, which your function gives, up to {self.longest}; every new length compiles the step once"
        first = self.length(1)
        if kind == "fixed_discrete":
            count, fix = len({self.length(end) for end in (*(self._numbers.max_step or ()), 2**62)}), ""
        else:
            count = len({*range(first, self.longest, step or 1), self.longest})
            fix = f" (a larger difficulty_step than {step} has fewer)"
        return f"{head}, from {first} to {self.longest}: up to {count} lengths, and each compiles the step once{fix}"
