"""The programs of a train step, each compiled when it is first called, and the shapes of a first call.

Their arguments are (state or parameters, batch, extra, ...), as `Call` passes them. A batch is a tuple of parts, see
`passes.gradients.Parts`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

from jzero.layout.sharding import trainable
from jzero.loss_scale import LossScale
from jzero.mesh import batch_spec, shardings
from jzero.model import fold
from jzero.passes.gradients import Aside, Parts, Result
from jzero.step.setup import Setup
from jzero.step.state import States, TrainState
from jzero.step.update import NEVER, SCOPE, Metrics, SkipWhen, aside_of, update
from jzero.tree import PyTree, partition

REPLICATED: Any = PartitionSpec()


class StepInput(NamedTuple):
    """The input of a step: the parts of its batch and what goes with it, on the devices.

    Attributes:
      factor: multiplies the gradient; None: 1.
    """

    batch: Parts
    extra: PyTree
    factor: np.float32 | None = None


class Details(NamedTuple):
    """Details of a step besides its metrics.

    Attributes:
      micro_losses: the loss of every micro-batch, [accum].
      loss_scale: after the step.
      frozen: whether this step or one before it was not finite, and changed nothing; None: nobody asked.
      fed: what the step ran on, if somebody asked.
    """

    micro_losses: jax.Array
    loss_scale: LossScale
    frozen: jax.Array | None = None
    fed: StepInput | None = None


StepResult = tuple[TrainState, Metrics, Details]


def step_program(setup: Setup, states: States) -> jax.stages.Wrapped:
    """Make (state, batch, extra, rate, when to skip, the gradient's factor) -> `StepResult`; the state is donated."""
    result_of, replicated = _results(setup, states), NamedSharding(setup.mesh, REPLICATED)

    def step(
        state: TrainState, batch: Parts, extra: PyTree, rate: Any, skip: SkipWhen = NEVER, factor: Any = None
    ) -> StepResult:
        result = result_of(state, batch, extra)
        # In the program, not before it: a factor that changes compiles nothing anew, and None adds no operation.
        if factor is not None:
            scaled = jax.tree.map(lambda g: g * factor, result.gradients)
            result = result._replace(gradients=scaled, squares=result.squares * factor**2)
        with jax.named_scope(SCOPE):
            state, metrics, frozen = update(setup, state, result, rate, skip)
        return state, metrics, Details(result.micro_losses, state.loss_scale, frozen)

    # Donated, so that the new state takes the memory of the old one; with in_shardings, so that the program does not
    # depend on how the arrays of a first call lie.
    rows = NamedSharding(setup.mesh, batch_spec(setup.mesh))
    return setup.jit(
        step, in_shardings=(states.shardings, rows, None, None, None, None),
        out_shardings=(states.shardings, replicated, replicated), donate_argnums=0,
    )  # fmt: skip


def gradients_program(setup: Setup, states: States) -> jax.stages.Wrapped:
    """Make (state, batch, extra) -> (gradients of the next step, metrics, `Aside`)."""
    result_of, replicated = _results(setup, states), NamedSharding(setup.mesh, REPLICATED)

    def only_gradients(state: TrainState, batch: Parts, extra: PyTree) -> tuple[PyTree, Metrics, Aside]:
        result = result_of(state, batch, extra)
        metrics = {**result.means, "grad_norm": optax.tree.norm(result.gradients)}
        finite = jnp.isfinite(result.squares).all()
        # As in a step: the maxima of a pass that is not finite decide no scale.
        histories = jax.tree.map(partial(jnp.where, finite), result.aside.fp8, state.fp8)
        return result.gradients, metrics, result.aside._replace(fp8=histories)

    placed = (
        shardings(setup.mesh, _trained(setup, states)),
        replicated,
        shardings(setup.mesh, aside_of(setup, states.specs)),
    )
    return setup.jit(only_gradients, out_shardings=placed)


def evaluate_program(setup: Setup) -> jax.stages.Wrapped:
    """Make (parameters, batch, extra) -> the loss and metrics by name."""
    return setup.jit(setup.manual(setup.region.evaluate, REPLICATED, out_specs=REPLICATED))


def micro_loss_program(setup: Setup, states: States) -> jax.stages.Wrapped:
    """Make (parameters, a micro-batch, extra, the step's key, its index, the histories for fp8) -> the loss."""
    rest = REPLICATED, REPLICATED, REPLICATED, states.specs.fp8
    return setup.jit(setup.manual(setup.region.micro_loss, *rest, out_specs=REPLICATED))


def _results(setup: Setup, states: States) -> Callable[[TrainState, Parts, PyTree], Result]:
    """Make the function that computes a step's gradients, on all devices."""
    out = Result(_trained(setup, states), REPLICATED, REPLICATED, REPLICATED, aside_of(setup, states.specs))
    rest = REPLICATED, REPLICATED, REPLICATED, REPLICATED, states.specs.fp8
    gradients = setup.manual(setup.region.gradients, *rest, out_specs=out)

    def result_of(state: TrainState, batch: Parts, extra: PyTree) -> Result:
        key, scale = fold(state.rng, state.step), state.loss_scale.scale
        return gradients(state.params, batch, extra, key, scale, 0, state.fp8)

    return result_of


def _trained(setup: Setup, states: States) -> PyTree:
    """Return the specs of the trained parameters, None for the rest."""
    return partition(states.specs.params, trainable(setup.layouts))[0]


class FirstCall:
    """The shapes of a program's first call: batch, extra, rate, when to skip and factor."""

    # Their trace and program are those of the call: JAX finds them in its caches.

    def __init__(
        self, program: jax.stages.Wrapped, states: States, fed: StepInput, rate: np.float32 | None, skip: SkipWhen
    ):
        self._program, self._states = program, states
        self._parts, extra = jax.tree.map(_shape, (fed.batch, fed.extra))
        self._rest = extra, rate, skip._replace(frozen=jax.tree.map(_shape, skip.frozen)), fed.factor

    @property
    def batch_shapes(self) -> PyTree:
        """The shapes of the global batch."""

        def whole(*parts: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            return parts[0].update(shape=(sum(x.shape[0] for x in parts), *parts[0].shape[1:]))

        return jax.tree.map(whole, *self._parts)

    def traced(self, change: Callable[[PyTree], PyTree] = lambda part: part) -> jax.stages.Traced:
        """Trace the call, with other parts of the batch if `change` maps the shapes of its own."""
        state = jax.tree.map(_shape, self._states.shapes, self._states.shardings)
        return self._program.trace(state, tuple(map(change, self._parts)), *self._rest)


def _shape(x: Any, sharding: Any = None) -> jax.ShapeDtypeStruct:
    """Return all that JAX knows an array by when it looks up a trace; it knows no sharding of NumPy's."""
    if isinstance(x, np.ndarray):
        return jax.ShapeDtypeStruct(x.shape, jax.dtypes.canonicalize_dtype(x.dtype))
    weak = getattr(x, "weak_type", False)  # keys have no such attribute
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding or x.sharding, weak_type=weak)
