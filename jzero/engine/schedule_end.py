"""The end of the learning-rate schedule: how many steps it has, and a line once a run goes on after them."""

from __future__ import annotations

from jzero.optimizers.lr_schedules import LRSchedule


def steps_of(schedule: LRSchedule | None) -> int | None:
    """Return the optimizer steps of a schedule; None if it names none."""
    return schedule.params.get("total_num_steps") if schedule else None


class ScheduleEnd:
    """Tells once that a run has taken more optimizer steps than its schedule has."""

    def __init__(self, schedule: LRSchedule | None):
        self._schedule, self._total, self._told = schedule, steps_of(schedule), False
        if schedule and self._total and schedule.params.get("warmup_num_steps", 0) > self._total:
            self._total = None  # the rate still rises then

    def may_be_over(self, step: int) -> bool:
        """Return whether the schedule ends before a step, unless steps were skipped."""
        return self._total is not None and step > self._total and not self._told

    def line(self, step: int, skipped: int) -> str:
        """Return the line about a finished step, `skipped` of those up to it; "" unless it is the first beyond the end.

        The schedule does not advance in a step that is skipped.
        """
        if not self.may_be_over(step - skipped):
            return ""
        assert self._schedule is not None and self._total is not None  # noqa: S101, PT018
        self._told = True
        last = float(self._schedule.lr(self._total + 1))  # DeepSpeed's schedules are one step late
        return f"jzero: the schedule ended at step {self._total + skipped:,}; the learning rate stays at {last:g}"
