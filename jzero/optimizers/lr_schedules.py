"""Learning-rate schedules: DeepSpeed's five by its formulas, optax's by their names.

DeepSpeed sets the rate once when the schedule is constructed and then calls it after every applied optimizer step, so
the first step runs at the value of construction and step n at the value of call k = n - 1. So the first two steps of a
warm-up both run at the minimum. jzero keeps these numbers and reports them. optax schedules keep optax's
indexing: step n runs at `schedule(n)`. Every optax schedule that JSON can describe is available; `join_schedules` takes
functions, so pass it as `lr_scheduler`.

Source: deepspeed/runtime/lr_schedules.py of DeepSpeed 0.19.8.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from jzero.errors import ConfigError
from jzero.values.kinds import COUNT32, FLAG, FRACTION, NON_NEGATIVE32, POSITIVE32, either, number, one_of, or_null
from jzero.values.parameters import (
    REQUIRED,
    Param,
    Total,
    Values,
    did_you_mean,
    fill_autos,
    is_auto,
    only,
    read_by_table,
    signature_params,
)

Curve = Callable[[ArrayLike], jax.Array]


@dataclass(frozen=True)
class LRSchedule:
    """A learning rate, and perhaps a momentum, as functions of the number of optimizer steps already applied.

    Attributes:
      lr: count (int or traced int32 scalar) -> float32 scalar.
      momentum: the same for Adam's first beta (OneCycle with cycle_momentum), or None.
      notes: lines for the run report.
      constant: the rate, if it is the same at every step.
      name: its type.
      params: the values of its parameters.

    >>> make_lr_schedule("cosine_decay_schedule", {"init_value": 0.1, "decay_steps": 9}, base_lr=0.1)
    cosine_decay_schedule(init_value=0.1, decay_steps=9, alpha=0.0, exponent=1.0)
    """

    lr: Curve
    momentum: Curve | None = None
    notes: tuple[str, ...] = ()
    constant: float | None = None
    name: str = "lr_scheduler"
    params: Values = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"{self.name}({', '.join(f'{key}={value!r}' for key, value in self.params.items())})"


def make_lr_schedule(type: str | None, params: Values, base_lr: float, total: Total | None = None) -> LRSchedule:
    """Make the schedule of a config's `scheduler` section.

    Args:
      type: a DeepSpeed schedule, the exact name of an optax schedule, or None for a constant rate.
      params: its parameters. "auto" is the Trainer's default (`values.parameters`), under `warmup_max_lr` `base_lr`.
      base_lr: the optimizer's own learning rate.
      total: what "auto" means under `total_num_steps`.

    Returns:
      The schedule, with a note for each surprising number.

    Raises:
      ConfigError: unknown type; unknown, missing or bad parameters (all at once).

    >>> warmup = make_lr_schedule("WarmupLR", {"warmup_num_steps": 10, "warmup_type": "linear"}, base_lr=0.1)
    >>> [round(float(warmup.lr(n)), 3) for n in (0, 1, 2, 6, 11, 50)]
    [0.0, 0.0, 0.01, 0.05, 0.1, 0.1]
    >>> make_lr_schedule("WarmupLr", {}, 1e-3)
    Traceback (most recent call last):
        ...
    jzero.errors.ConfigError: scheduler.type: 'WarmupLr' is unknown; did you mean 'WarmupLR'? Use WarmupLR, ...
    """
    if type is None:
        return LRSchedule(_float32(lambda count: base_lr), constant=base_lr, name="constant", params={"lr": base_lr})
    params, notes = _with_total(type, params, total)
    row, values, problems = _look_up(type, params)
    if row is None or problems:
        raise ConfigError(*problems)
    schedule = row.make(values, base_lr)
    if values.get("warmup_max_lr", base_lr) is None:
        values["warmup_max_lr"] = base_lr
    return replace(schedule, notes=(*schedule.notes, *notes), name=type, params=values)


def _with_total(type: str, params: Values, total: Total | None) -> tuple[Values, tuple[str, ...]]:
    """Give `total_num_steps` its value if it is "auto", and a note that says which."""
    if not is_auto(params.get("total_num_steps")):
        return params, ()
    if total is None:
        raise ConfigError(
            'scheduler.params.total_num_steps = "auto": the number of optimizer steps is not known here; write it, '
            "pass total_num_steps=, or pass training_data with a length to initialize"
        )
    return {**params, "total_num_steps": total.steps}, (f"{type}: total_num_steps {total.steps}: {total.why}",)


def scheduler_problems(scheduler: Any) -> list[str]:
    """List the problems of a config's `scheduler` section that show before any array is made."""
    params = scheduler.params or {}
    total = 2**31 - 1 if is_auto(params.get("total_num_steps")) else None  # the longest: the run will tell
    return _look_up(scheduler.type, {**params, "total_num_steps": total} if total else params)[2]


def _look_up(type: str, params: Values) -> tuple[_ScheduleRow | None, dict[str, Any], list[str]]:
    """Return the row of a schedule, the parameters with its defaults filled in, and every problem."""
    # "auto" is not DeepSpeed's. The Hugging Face Trainer reads it and writes its own learning rate, which is also the
    # optimizer's; null asks DeepSpeed for the same.
    if params.get("warmup_max_lr") == "auto" and type in ("WarmupLR", "WarmupDecayLR"):
        params = {**params, "warmup_max_lr": None}
    row = _DEEPSPEED.get(type)
    if type in OPTAX_SCHEDULES:
        row = _ScheduleRow(signature_params(getattr(optax, type)), partial(_optax_schedule, type))
    if row:
        values, problems = read_by_table("scheduler.params", fill_autos(params, row.params), row.params)
        return row, values, problems or list(row.check(values))
    if is_auto(type):
        return (
            None,
            {},
            [
                'scheduler.type = "auto": "auto" is the Hugging Face Trainer\'s default of a parameter, and a type has '
                'none; write a type, for example "WarmupDecayLR", or leave the section out for a constant rate'
            ],
        )
    hint = did_you_mean(type, [*_DEEPSPEED, *OPTAX_SCHEDULES])
    use = f"Use {either(_DEEPSPEED)}, or one of optax's (docs/configuration.md lists them)"
    return None, {}, [f"scheduler.type: {type!r} is unknown{hint} {use}"]


def from_config(scheduler: Any, base_lr: float | None, total: Total | None = None) -> LRSchedule | None:
    """Make the schedule of a config's `scheduler` section, or a constant one without a section.

    Args:
      scheduler: the section (`type` and `params`), or None.
      base_lr: the optimizer's own learning rate; None for an optimizer from user code, for which schedules that need
        a rate start from 1e-3.
      total: as for `make_lr_schedule`.

    Returns:
      The schedule; None if neither argument fixes a rate.

    Raises:
      ConfigError: as `make_lr_schedule`.
    """
    if scheduler is None:
        return None if base_lr is None else make_lr_schedule(None, {}, base_lr)
    return make_lr_schedule(scheduler.type, scheduler.params or {}, 1e-3 if base_lr is None else base_lr, total)


# ------------------------------------------------------------------------------------------ DeepSpeed's schedules


def _float32(curve: Callable[[Any], Any]) -> Curve:
    return lambda count: jnp.asarray(curve(count), jnp.float32)


def _by_call(at_construction: float, at_call: Callable[[jax.Array], Any]) -> Curve:
    """Make a curve: the value of construction at step 0, then the value of call k = n - 1 at step n."""

    def curve(count: ArrayLike) -> jax.Array:
        k = jnp.asarray(count, jnp.int32) - 1
        return jnp.where(k < 0, at_construction, at_call(jnp.maximum(k, 0)))

    return _float32(curve)


def _ramp(p: Values) -> tuple[int, Callable[[jax.Array], jax.Array]]:
    """Return (n, γ): the number of warm-up steps and the ramp from 0 to 1 over them."""
    n = max(2, p["warmup_num_steps"])  # DeepSpeed's bound: log(1) = 0 would be a divisor
    if p["warmup_type"] == "log":
        return n, lambda k: jnp.log(k + 1.0) / math.log(n)
    return n, lambda k: k / n


def _warmup(p: Values, base_lr: float, gamma_after: Callable[[jax.Array, int], Any], name: str) -> LRSchedule:
    """Make the schedule min + (max - min)·γ(k); γ is the ramp while k < n, then `gamma_after(k, n)`."""
    n, ramp = _ramp(p)
    low = p["warmup_min_lr"]
    high = base_lr if p["warmup_max_lr"] is None else p["warmup_max_lr"]
    notes = [f"{name}: as in DeepSpeed, the first two optimizer steps run at warmup_min_lr {low:g}"]
    if p["warmup_max_lr"] is None:
        notes.append(f"{name}: the rate warms up to the optimizer's lr {base_lr:g}; warmup_max_lr has no other")
    elif high != base_lr:
        notes.append(f"{name}: warmup_max_lr {high:g} overrides the optimizer's lr {base_lr:g}")
    return LRSchedule(
        _by_call(low, lambda k: low + (high - low) * jnp.where(k < n, ramp(k), gamma_after(k, n))), notes=tuple(notes)
    )


def _check_warmup(p: Values) -> Iterator[str]:
    """Check that the warm-up ends within the run; DeepSpeed warns, and never reaches the asked rate."""
    warmup, total = p["warmup_num_steps"], p["total_num_steps"]
    if warmup > total:
        yield (
            f"scheduler.params.warmup_num_steps = {warmup} and total_num_steps = {total}: the warm-up must not be "
            f"longer than the whole schedule; set warmup_num_steps (1000 if left out) to {total} or less"
        )


def _warmup_decay_lr(p: Values, base_lr: float) -> LRSchedule:
    total = p["total_num_steps"]
    return _warmup(p, base_lr, lambda k, n: jnp.maximum(0.0, (total - k) / max(1, total - n)), "WarmupDecayLR")


def _warmup_cosine_lr(p: Values, base_lr: float) -> LRSchedule:
    n, ramp = _ramp(p)
    total, start, floor = p["total_num_steps"], p["warmup_min_ratio"], p["cos_min_ratio"]

    def ratio(k: jax.Array) -> jax.Array:
        progress = jnp.minimum(1.0, (k - n + 1) / max(1, total - n))
        cosine = floor + (1 - floor) * (1 + jnp.cos(jnp.pi * progress)) / 2
        return jnp.where(k < n, start + (1 - start) * ramp(k), cosine)

    note = f"WarmupCosineLR: as in DeepSpeed, the first two optimizer steps run at 0 and {base_lr * start:g}"
    return LRSchedule(_by_call(0.0, lambda k: base_lr * ratio(k)), notes=(note,))


def _lr_range_test(p: Values, base_lr: float) -> LRSchedule:
    low, size, rate = p["lr_range_test_min_lr"], p["lr_range_test_step_size"], p["lr_range_test_step_rate"]

    def curve(count: ArrayLike) -> jax.Array:
        count = jnp.asarray(count, jnp.int32)  # k + 1, and 0 at construction: one formula for both
        x = count // size if p["lr_range_test_staircase"] else count / size
        return low * (1 + rate * x)

    note = f"LRRangeTest: the rate grows from lr_range_test_min_lr {low:g}; the optimizer's lr {base_lr:g} is not used"
    return LRSchedule(_float32(curve), notes=(note,))


def _cycle_sides(p: Values) -> tuple[int, int, int, int]:
    """Return (steps up, stairs up, steps down, stairs down)."""
    up, stairs, down, down_stairs = (
        p[f"cycle_{key}"] for key in ("first_step_size", "first_stair_count", "second_step_size", "second_stair_count")
    )
    # The way down defaults to the way up. 0 stairs is a valid value (a straight line), so `or` would be wrong.
    return up, stairs, up if down is None else down, stairs if down_stairs is None else down_stairs


def _check_stairs(p: Values) -> Iterator[str]:
    """Check that steps times stairs fits int32: in `height` a larger product would wrap to a negative rate."""
    up, up_stairs, down, down_stairs = _cycle_sides(p)
    if max(up * up_stairs, down * down_stairs) >= 2**31:
        yield (
            f"scheduler.params.cycle_first_stair_count: {up_stairs} stairs over {up} steps (and {down_stairs} over "
            f"{down}) are too many; their products must be below 2**31"
        )


def _one_cycle(p: Values, base_lr: float) -> LRSchedule:
    up, up_stairs, down, down_stairs = _cycle_sides(p)
    total, decay_step = up + down, p["decay_step_size"]

    def height(k: jax.Array) -> jax.Array:
        """Return the height in the cycle: 0 at its ends, 1 at its peak."""
        side = lambda i, size, stairs: i * stairs // size / stairs if stairs else i / size  # noqa: E731
        i = k + 1
        return jnp.where(i <= up, side(i, up, up_stairs), side(total - i, down, down_stairs))

    def growth(k: jax.Array, rate: float) -> Any:
        """Return 1 + rate · (steps since the cycle, counted from 1) / decay_step_size; 1 for a size of 0."""
        return 1 + rate * (k - total + 1) / decay_step if decay_step else 1.0

    low, high = p["cycle_min_lr"], p["cycle_max_lr"]
    lr = _by_call(
        low, lambda k: jnp.where(k < total, low + (high - low) * height(k), low / growth(k, p["decay_lr_rate"]))
    )
    notes = [f"OneCycle: the rate runs {low:g} to {high:g} and back; the optimizer's lr {base_lr:g} is not used"]
    if not p["cycle_momentum"]:
        return LRSchedule(lr, notes=tuple(notes))
    slow, fast = p["cycle_min_mom"], p["cycle_max_mom"]
    momentum = _by_call(
        slow, lambda k: jnp.where(k < total, fast - (fast - slow) * height(k), fast * growth(k, p["decay_mom_rate"]))
    )
    notes.append(f"OneCycle: cycle_momentum moves the optimizer's first beta in {slow:g} to {fast:g} against the rate")
    return LRSchedule(lr, momentum, tuple(notes))


class _ScheduleRow(NamedTuple):
    """A schedule: its parameters, a function that makes it from them and the base rate, and their joint problems."""

    params: dict[str, Param]
    make: Callable[[dict[str, Any], float], LRSchedule]
    check: Callable[[Values], Iterator[str]] = lambda p: iter(())


_START = {"last_batch_iteration": only(-1, "a resumed run takes its step from the checkpoint")}
_RAMP = {"warmup_num_steps": Param(1000, COUNT32), "warmup_type": Param("log", one_of(("log", "linear"))), **_START}
_FLOOR = {"warmup_min_lr": Param(0.0, NON_NEGATIVE32), **_RAMP}
_PEAK = or_null(NON_NEGATIVE32)  # null: the optimizer's rate
_RATIOS = {"warmup_min_ratio": Param(0.0, NON_NEGATIVE32), "cos_min_ratio": Param(1e-4, NON_NEGATIVE32), **_RAMP}
_TOTAL = {"total_num_steps": Param(REQUIRED, POSITIVE32)}

_DEEPSPEED: dict[str, _ScheduleRow] = {
    # The two defaults differ in DeepSpeed too (pull request 7360 changed WarmupLR's alone).
    "WarmupLR": _ScheduleRow(
        {**_FLOOR, "warmup_max_lr": Param(None, _PEAK)}, lambda p, lr: _warmup(p, lr, lambda k, n: 1.0, "WarmupLR")
    ),
    "WarmupDecayLR": _ScheduleRow(
        {**_TOTAL, **_FLOOR, "warmup_max_lr": Param(0.001, _PEAK)}, _warmup_decay_lr, _check_warmup
    ),
    "WarmupCosineLR": _ScheduleRow({**_TOTAL, **_RATIOS}, _warmup_cosine_lr, _check_warmup),
    "LRRangeTest": _ScheduleRow(
        {
            "lr_range_test_min_lr": Param(1e-3, NON_NEGATIVE32),
            "lr_range_test_step_size": Param(2000, POSITIVE32),
            "lr_range_test_step_rate": Param(1.0, number()),
            "lr_range_test_staircase": Param(False, FLAG),
            **_START,
        },
        _lr_range_test,
    ),
    "OneCycle": _ScheduleRow(
        {
            "cycle_min_lr": Param(REQUIRED, NON_NEGATIVE32),
            "cycle_max_lr": Param(REQUIRED, NON_NEGATIVE32),
            "decay_lr_rate": Param(0.0, NON_NEGATIVE32),
            "cycle_first_step_size": Param(2000, POSITIVE32),
            "cycle_second_step_size": Param(None, POSITIVE32),
            "cycle_first_stair_count": Param(0, COUNT32),
            "cycle_second_stair_count": Param(None, COUNT32),
            "decay_step_size": Param(0, COUNT32),
            "cycle_momentum": Param(True, FLAG),
            "cycle_min_mom": Param(0.8, FRACTION),
            "cycle_max_mom": Param(0.9, FRACTION),
            "decay_mom_rate": Param(0.0, number()),
            **_START,
        },
        _one_cycle,
        _check_stairs,
    ),
}

# ------------------------------------------------------------------------------------------ optax's schedules

OPTAX_SCHEDULES = (
    "constant_schedule", "cosine_decay_schedule", "cosine_onecycle_schedule", "exponential_decay",
    "linear_onecycle_schedule", "linear_schedule", "piecewise_constant_schedule", "piecewise_interpolate_schedule",
    "polynomial_schedule", "sgdr_schedule", "warmup_constant_schedule", "warmup_cosine_decay_schedule",
    "warmup_exponential_decay_schedule",
)  # fmt: skip


def _optax_schedule(name: str, params: Values, base_lr: float) -> LRSchedule:
    given = dict(params)
    try:
        if isinstance(given.get("boundaries_and_scales"), dict):  # JSON keys are text
            given["boundaries_and_scales"] = {int(k): v for k, v in given["boundaries_and_scales"].items()}
        curve = getattr(optax, name)(**given)
        curve(0)
    except (TypeError, ValueError, ArithmeticError) as error:
        raise ConfigError(f"scheduler.params: optax.{name} refuses {dict(params)!r}: {error}") from error
    return LRSchedule(_float32(curve), notes=(f"optax.{name}: the optimizer's lr {base_lr:g} is not used",))
