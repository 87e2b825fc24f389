"""`engine.optimizer` and `engine.lr_scheduler`: what scripts read from PyTorch's objects of these names."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import optax

from jzero.adapters.torch_habits import refuses
from jzero.errors import ConfigError


class ParamGroup(dict):
    """One group of parameters: their names (`params`), the next step's `lr`, and what the group sets."""

    def __setitem__(self, key: str, value: Any) -> None:
        instead = "engine.set_lr(...)" if key == "lr" else f"{key} in the config's optimizer.groups"
        raise ConfigError(f"param_groups[...][{key!r}] = {value!r}: param_groups are read-only; write {instead}")

    def update(self, *args: Any, **kwargs: Any) -> None:
        for key, value in dict(*args, **kwargs).items():
            self[key] = value


@refuses(
    step="write engine.step()",
    state_dict="write engine.save_checkpoint(directory), or read engine.state.opt_state",
    load_state_dict="write engine.load_checkpoint(directory)",
    add_param_group="write optimizer.groups in the config",
    backward="write engine.backward(loss)",
)
class Optimizer(optax.GradientTransformationExtraArgs):
    """The optax transformation of an engine, with the attributes of a PyTorch optimizer that can be read."""

    engine: Callable[[], Any]

    @property
    def param_groups(self) -> list[ParamGroup]:
        """The groups, in the config's order; last that of all other parameters."""
        engine = self.engine()
        groups, rates = engine.step_fn.setup.optimizer.groups, engine.get_lr()
        return [
            ParamGroup(params=list(group.leaves), lr=lr, **{k: v for k, v in group.values.items() if k != "lr_scale"})
            for group, lr in zip(groups, rates, strict=True)
        ]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing, since every step begins without gradients; see `Engine.zero_grad`."""
        self.engine().zero_grad()


def optimizer_view(engine: Any) -> Optimizer:
    """Wrap the optax transformation of an engine."""
    tx = engine.step_fn.setup.optimizer.tx
    view = Optimizer(tx.init, tx.update)
    view.engine = _reference(engine)
    return view


@refuses(
    step="leave it out: engine.step() advances the schedule, if it updates the parameters",
    state_dict="write engine.save_checkpoint(directory); the step count is the schedule's only state",
    load_state_dict="write engine.load_checkpoint(directory)",
)
class LRScheduler:
    """The learning-rate schedule of an engine, with the attributes of a DeepSpeed scheduler that can be read."""

    def __init__(self, engine: Any):
        self._engine, self._schedule = _reference(engine), engine.step_fn.setup.optimizer.schedule

    def __call__(self, count: Any) -> Any:
        """Return the schedule's rate after `count` applied steps."""
        return self._schedule.lr(count)

    def get_lr(self) -> list[float]:
        """Return the next step's rate in each group."""
        return self._engine().get_lr()

    def get_last_lr(self) -> list[float]:
        """Return the last step's rate in each group; before the first step, the next one's."""
        return self._engine().get_last_lr()

    @property
    def last_batch_iteration(self) -> int:
        """The steps that were applied, which is the schedule's position."""
        engine = self._engine()
        return int(engine.live_state.step) - engine.skipped_steps


def _reference(engine: Any) -> Callable[[], Any]:
    """Refer to an engine without keeping its state in memory."""
    weak = weakref.ref(engine)

    def get() -> Any:
        if (engine := weak()) is None:
            raise ConfigError("the engine of this optimizer or lr_scheduler was deleted")
        return engine

    return get
