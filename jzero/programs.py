"""The programs of a train step, each compiled when it is first called, and the shapes of a first call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

from jzero import optimizers
from jzero.distributed import compilation_cache
from jzero.fp8 import history
from jzero.gradients import Result
from jzero.loss_scale import LossScale
from jzero.mesh import batch_spec, shardings
from jzero.model import fold
from jzero.setup import Setup
from jzero.sharding import is_state, trainable
from jzero.state import States, TrainState
from jzero.tree import PyTree, partition
from jzero.update import ALWAYS, SCOPE, Conditions, Metrics, update


class Fed(NamedTuple):
    """The input of a step: the global batch and what goes beside it, on the devices.

    Attributes:
      in_parts: whether the batch came as micro-batches, and its rows are in the order of the devices.
    """

    batch: PyTree
    extra: PyTree
    in_parts: bool


class Details(NamedTuple):
    """Details of a step beside its metrics.

    Attributes:
      micro_losses: the loss of every micro-batch, [accum].
      loss_scale: after the step.
      halted: whether this step or one before it was not finite, and changed nothing; None: nobody asked.
      fed: what the step ran on, if somebody asked.
    """

    micro_losses: jax.Array
    loss_scale: LossScale
    halted: jax.Array | None = None
    fed: Fed | None = None


class Moved(NamedTuple):
    """What a step changes beside the trained parameters and the optimizer's state.

    Attributes:
      model: the model's new state, None in the place of parameters.
      fp8: the histories with what this step saw.
    """

    model: PyTree
    fp8: history.Histories


Done = tuple[TrainState, Metrics, Details]


@dataclass(frozen=True)
class Programs:
    """The programs of a train step on its mesh.

    Attributes:
      step: (state, batch, extra, rate, conditions) -> `Done`; the state is donated.
      gradients: (state, batch, extra) -> (gradients of the next step, metrics, `Moved`).
      evaluate: (params, batch, extra) -> the loss and metrics by name.
      micro_loss: (params, micro-batch, extra, the step's key, its index, the devices' own steps, the histories for fp8)
        -> the loss.
      concatenate: micro-batches -> a batch, whose rows come in another order.
    """

    step: jax.stages.Wrapped
    gradients: jax.stages.Wrapped
    evaluate: jax.stages.Wrapped
    micro_loss: jax.stages.Wrapped
    concatenate: jax.stages.Wrapped


def make_programs(setup: Setup, states: States) -> Programs:
    """Make the programs of a config resolved for a mesh, with the sharding of its states."""
    compilation_cache.turn_on(setup.mesh.devices.flat)
    mesh, region, rows = setup.mesh, setup.region(), batch_spec(setup.mesh)
    replicated: Any = PartitionSpec()
    everywhere = NamedSharding(mesh, replicated)
    grad_specs, _ = partition(states.specs.params, trainable(setup.layouts))
    new_state_specs, _ = partition(states.specs.params, is_state(setup.layouts))
    averaging = setup.averaging
    local_specs: Any = averaging.rows(grad_specs) if averaging else grad_specs
    own = averaging.spec if averaging else replicated
    gradients = setup.manual(
        region.gradients, replicated, replicated, replicated, own, replicated, states.specs.fp8,
        out_specs=Result(local_specs, replicated, replicated, replicated, new_state_specs, states.specs.fp8),
    )  # fmt: skip

    def next_result(state: TrainState, batch: PyTree, extra: PyTree) -> Result:
        steps = optimizers.own_steps(state.opt_state)
        key, scale = fold(state.rng, state.step), state.loss_scale.scale
        return gradients(state.params, batch, extra, key, scale, steps, 0, state.fp8)

    def step(state: TrainState, batch: PyTree, extra: PyTree, rate: Any = None, only: Conditions = ALWAYS) -> Done:
        result = next_result(state, batch, extra)
        with jax.named_scope(SCOPE):
            state, metrics, halted = update(setup, state, result, rate, only)
        return state, metrics, Details(result.micro_losses, state.loss_scale, halted)

    def only_gradients(state: TrainState, batch: PyTree, extra: PyTree) -> tuple[PyTree, Metrics, Moved]:
        result = next_result(state, batch, extra)
        whole = averaging.total(result.gradients) if averaging else result.gradients
        histories = history.advance(state.fp8, result.seen, jnp.isfinite(result.squares).all())
        return whole, {**result.means, "grad_norm": optax.tree.norm(whole)}, Moved(result.state, histories)

    def concatenate(parts: list[PyTree]) -> PyTree:
        return jax.tree.map(lambda *xs: jnp.concatenate(xs), *parts)

    evaluate = setup.manual(region.evaluate, replicated, out_specs=replicated)
    micro_loss = setup.manual(
        region.micro_loss, replicated, replicated, replicated, own, states.specs.fp8, out_specs=replicated
    )
    return Programs(
        step=setup.jit(
            step, in_shardings=(states.shardings, NamedSharding(mesh, rows), None, None, None),
            out_shardings=(states.shardings, everywhere, everywhere), donate_argnums=0,
        ),
        gradients=setup.jit(
            only_gradients,
            out_shardings=(
                shardings(mesh, grad_specs), everywhere, Moved(shardings(mesh, new_state_specs), states.shardings.fp8),
            ),
        ),
        evaluate=setup.jit(evaluate),
        micro_loss=setup.jit(micro_loss),
        # Manual, so that every device concatenates its own rows; a global concatenation would move rows.
        concatenate=setup.jit(
            jax.shard_map(concatenate, mesh=mesh, in_specs=rows, out_specs=rows, check_vma=False)
        ),
    )  # fmt: skip


class FirstCall:
    """The shapes of a program's first call; nothing before `note`.

    The trace and the program of these shapes are those of the call: JAX finds them in its caches.
    """

    def __init__(self, program: jax.stages.Wrapped, state_shapes: PyTree, state_shardings: PyTree):
        self._program = program
        self._state = jax.tree.map(_shape, state_shapes, state_shardings)
        self._rest: tuple | None = None  # of batch, extra, rate and conditions

    @property
    def is_known(self) -> bool:
        return self._rest is not None

    @property
    def batch_shapes(self) -> PyTree:
        """The shapes of the global batch; None before the first call."""
        return self._rest and self._rest[0]

    def note(self, fed: Fed, rate: np.float32 | None, only: Conditions) -> None:
        """Keep the shapes of a call."""
        of_halted = jax.tree.map(_shape, only.halted)
        self._rest = (*jax.tree.map(_shape, (fed.batch, fed.extra)), rate, only._replace(halted=of_halted))

    def forget(self) -> None:
        """Forget the shapes: another call comes first."""
        self._rest = None

    def traced(self, change: Callable[[PyTree], PyTree] = lambda batch: batch) -> jax.stages.Traced | None:
        """Trace the call, with another batch if `change` maps the shapes of its own; None before it."""
        if self._rest is None:
            return None
        batch, *rest = self._rest
        return self._program.trace(self._state, change(batch), *rest)


def _shape(x: Any, sharding: Any = None) -> jax.ShapeDtypeStruct:
    """Return all that JAX knows an array by when it looks up a trace."""
    weak = getattr(x, "weak_type", False)  # keys have no such attribute
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding or x.sharding, weak_type=weak)
