"""The pipeline executor: runs any schedule, inside the manual region of the train step.

All stages run the same program, each on its own numbers (SPMD). A tick is at most one forward and one backward pass of
a chunk of layers, then a permute each way. Consecutive ticks with the same operations are one `lax.scan`. A stage that
is idle in a tick computes on stale data and a select drops the result: with a branch instead, the stages would run
different collectives and deadlock; with a multiplication by zero, 0 * NaN would be NaN.

The operations of a tick: E prefix, F forward, S suffix, B backward, D backward of the input alone, W backward of the
weights, G backward of the prefix; see `jzero.pipeline.program`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from jzero.errors import ConfigError
from jzero.gradients import Weights
from jzero.loss import Mean, Sums, weighted
from jzero.mesh import PIPE
from jzero.model import ENDS, STACK, Inputs, fold, replace_state
from jzero.pipeline import slots
from jzero.pipeline.carry import Carry
from jzero.pipeline.ends_state import needs_former
from jzero.pipeline.layer_switch import kind_of
from jzero.pipeline.program import Program, Runs, count
from jzero.precision import Precision
from jzero.sharding import is_state
from jzero.stack import StackView, fetch
from jzero.tracing.chunk import Chunk, split_floats
from jzero.tree import PyTree, combine, leading_dim, partition
from jzero.zero import ParamLayout, keep_state

Columns = dict[str, jax.Array]  # this stage's numbers by name, see `program.Program.columns`
Functions = tuple[Callable, Callable, Callable]  # prefix, piece, suffix


@dataclass(frozen=True)
class Stages:
    """The stages as the executor sees them.

    Attributes:
      n_stages, chunks: pipeline stages, and chunks of layers on each.
      pieces: the equal pieces of a chunk; a tick's pass is a loop over them, or unrolled if there is only one.
      view: the form of the parameters in use; its stack is a list of the layers of a piece, and with several pieces on
        a stage a leaf has an axis for them, chunk by chunk.
      objective: what the suffix returns -> loss and metrics, to differentiate; see `loss.read_loss`.
      read: what the suffix returns -> what is collected of it.
      functions: called with (pairs, micro-batch), whose shapes alone matter; returns prefix(ends, batch, key) -> x,
        piece(weights, state, x, context) -> x, suffix(ends, x, batch, key) -> loss, each with the new state beside its
        result. The weights are (diff, nondiff); a context is the micro-batch's key and the piece's number in the whole
        model.
      offload: whether what a forward pass keeps for the backward pass lies in host memory.
    """

    n_stages: int
    chunks: int
    view: StackView
    precision: Precision
    objective: Callable[[Any], dict[str, Mean]]
    read: Callable[[Any], PyTree]
    functions: Callable[[Any, PyTree], Functions]
    offload: bool = False
    pieces: int = 1


class Execution:
    """One execution of a program over the micro-batches of a batch; without a `cotangent` forward only."""

    def __init__(
        self, stages: Stages, program: Program, weights: Weights, batch: PyTree, rng: Any, first_index: Any,
        cotangent: jax.Array | None = None,
    ):  # fmt: skip
        self.stages, self.program, self.batch, self.cotangent = stages, program, batch, cotangent
        (self.diff, self.nondiff, self.state, self.extra), self.rng, self.first_index = weights, rng, first_index
        self.stage = lax.axis_index(PIPE)
        self.is_first, self.is_last = self.stage == 0, self.stage == stages.n_stages - 1
        self.last_chunk = stages.chunks - 1
        self.gathers = any(layout.rule.gather == "layer" for layout in jax.tree.leaves(stages.view.layouts[STACK]))
        part, key = self.micro_batch(0)
        prefix, self.layers, self.suffix = stages.functions((self.diff, replace_state(self.nondiff, self.state)), part)
        self.prefix = lambda *args: jax.tree.map(jnp.asarray, prefix(*args))
        ends = partial(self.ends, self.diff[ENDS], self.state[ENDS])
        self.x = jax.eval_shape(lambda: self.prefix(ends(), part, key)[0])
        pair, context = jax.eval_shape(self.weights, 0), jax.eval_shape(self.context, 0, 0, 0)
        state = jax.eval_shape(lambda: self.of_piece(self.state[STACK], 0))
        _check_chain(self.x, jax.eval_shape(self.layers, pair, state, self.x, context)[0])
        self.sums = jax.eval_shape(lambda x: stages.read(self.suffix(ends(), x, part, key)[0]), self.x)
        if cotangent is not None:
            whole = jax.eval_shape(self.ends, self.diff[ENDS], self.state[ENDS])
            first, last = (lambda ends: self.prefix(ends, part, key)), lambda ends, x: self.suffix(ends, x, part, key)
            self.keeps_former = needs_former(first, last, whole, self.x, stages.view.layouts[ENDS])
            self.chunk = Chunk(self.layers, pair, state, self.x, context, split=program.rest > 0)

    def result(self) -> tuple[PyTree, Sums, PyTree]:
        """Run the program.

        Returns:
          The gradients of diff, the loss and metrics of every micro-batch [M, 2], the new state.
        """
        columns = {name: jnp.asarray(column)[:, self.stage] for name, column in self.program.columns.items()}
        carry = self.execute(self.program.runs, self.start(), columns)
        return carry.gradients, carry.seen, carry.state

    def start(self) -> Carry:
        """Make the carry before the first tick."""
        x = slots.zeros(self.x)
        seen = jax.tree.map(lambda s: jnp.zeros((leading_dim(self.batch), *s.shape), s.dtype), self.sums)
        floats = split_floats(x)[0]
        if self.cotangent is None:
            return Carry(x, x, None, None, None, None, None, None, self.state, None, seen)
        accum, pieces = self.stages.precision.accum, self.stages.pieces
        stash = slots.buffer(self.program.stash * pieces, self.chunk.stashed_types)
        outputs = None if self.program.turns else slots.buffer(self.program.stash, self.x, self.stages.offload)
        rest = slots.buffer(self.program.rest * pieces, self.chunk.rest_types)
        gradients = jax.tree.map(lambda w: jnp.zeros(w.shape, accum), self.diff)
        ends = jax.tree.map(jax.typeof, self.state[ENDS])
        former = slots.buffer(leading_dim(self.batch), ends) if self.keeps_former else None
        return Carry(x, x, floats, floats, stash, outputs, rest, gradients, self.state, former, seen)

    def execute(self, runs: Runs, carry: Carry, columns: Columns) -> Carry:
        """Run nested runs of ticks, each repeated run as one scan over its rows of the columns."""
        start = 0
        for what, times in runs:
            n = 1 if isinstance(what, str) else count(what)
            part = {name: column[start : start + n * times] for name, column in columns.items()}
            start += n * times

            def body(carry: Carry, columns: Columns, what: Any = what) -> tuple[Carry, None]:
                run = self.tick if isinstance(what, str) else self.execute
                return run(what, carry, columns), None

            if times == 1:
                carry = body(carry, {name: column[0] for name, column in part.items()})[0]
            else:
                shape = (times,) if isinstance(what, str) else (times, n)
                carry = lax.scan(body, carry, {name: column.reshape(shape) for name, column in part.items()})[0]
        return carry

    # ------------------------------------------------------------------ one tick

    def tick(self, operations: str, carry: Carry, at: Columns) -> Carry:
        """Run one tick.

        The next tick uses the output of E (`entering`); G uses the result of B in the tick before (`leaving`). So
        their all-reduces overlap with the chunks and delay no stage.

        Args:
          operations: the letters of `jzero.pipeline.program`; lower case: some stage is idle.
          at: this stage's numbers for this tick: micro-batches, chunks, slots.
        """
        idle = {name for name in "BW" if name.lower() in operations}
        work = set(operations.upper())
        new, y, dy, ends_gradients = carry._asdict(), None, None, []
        if work & set("ESG"):
            # E, S and G share one fetch of the ends, and one transpose reduces the sum of their gradients.
            ends, reduce = jax.vjp(lambda diff: self.ends(diff, carry.state[ENDS]), self.diff[ENDS])

        if "E" in work:
            if carry.former is not None:
                new["former"] = slots.write(carry.former, at["E.micro"], carry.state[ENDS])
            new["entering"], state = self.prefix(ends, *self.micro_batch(at["E.micro"]))
            ends = replace_state(ends, state)
            self.keep(new, state)

        if "F" in work:
            y = self.forward(new, carry, at)

        if work & set("BD") and carry.outputs is not None:
            y = slots.on_device(slots.read(new["outputs"], at["B.slot"]))

        if "S" in work:
            gradient, dy = self.leave(new, ends, y, at)
            ends_gradients += gradient

        if work & set("BD"):
            self.backward(new, carry, dy, at, split="D" in work, may_idle="B" in idle)

        if "W" in work:
            self.weight_backward(new, at, may_idle="W" in idle)

        if "G" in work:
            part, key = self.micro_batch(at["G.micro"])
            if carry.former is not None:
                former = self.ends(self.diff[ENDS], slots.read(carry.former, at["G.micro"]))
                ends = replace_state(ends, partition(former, is_state(self.stages.view.layouts[ENDS]))[0])
            _, pullback = jax.vjp(lambda ends: split_floats(self.prefix(ends, part, key)[0])[0], ends)
            ends_gradients += pullback(self.from_stage(self.is_first, carry.leaving))

        if ends_gradients:
            (gradient,) = reduce(jax.tree.map(_sum, *ends_gradients))
            new["gradients"] = {**new["gradients"], ENDS: jax.tree.map(_add, new["gradients"][ENDS], gradient)}
        return Carry(**new)

    def forward(self, new: dict[str, Any], carry: Carry, at: Columns) -> Any:
        """Run F, a chunk's forward pass: stash its residuals, send its output to the next stage, and return it."""
        # Chunk 0 of the first stage begins a micro-batch; every other chunk continues with the previous stage's output.
        x = _select(self.is_first & (at["F.chunk"] == 0), carry.entering, carry.inbox)

        def piece(p: Any, x: Any, stack: Any, stash: Any) -> tuple[Any, Any, Any]:
            index = self.index(at["F.chunk"], p)
            weights, context = self.weights(index), self.context(at["F.chunk"], at["F.micro"], p)
            state = self.of_piece(stack, index)
            if self.cotangent is None:
                return self.layers(weights, state, x, context)[0], stack, stash
            (y, new_state), kept = self.chunk.forward(weights, state, x, context)
            stack = self.kept(STACK, stack, new_state, at["F.active"], index)
            return y, stack, slots.write(stash, self.index(at["F.slot"], p), kept)

        y, stack, new["stash"] = self.through(piece, x, carry.state[STACK], carry.stash)
        new["state"] = {**new["state"], STACK: stack}
        if carry.outputs is not None:
            new["outputs"] = slots.write(carry.outputs, at["F.slot"], y)
        new["inbox"] = self.send(y, +1)
        return y

    def leave(self, new: dict[str, Any], ends: Any, y: Any, at: Columns) -> tuple[list[Any], Any]:
        """Run S, the suffix and its backward pass; return ([gradient of the ends], gradient of y).

        It runs on the last stage's output, and all stages compute it: in lockstep they would wait anyway, and a
        vocabulary is divided among them.
        """
        part, key = self.micro_batch(at["S.micro"])
        floats, others = split_floats(self.from_stage(self.is_last, y))

        def loss(ends: Any, floats: Any) -> Any:
            value, state = self.suffix(ends, combine(floats, others), part, key)
            if self.cotangent is None:
                return 0.0, (self.stages.read(value), state)
            total, sums = weighted(self.stages.objective(value), self.cotangent)
            return total, (sums, state)

        _, pullback, (seen, state) = jax.vjp(loss, ends, floats, has_aux=True)
        self.keep(new, state)
        new["seen"] = jax.tree.map(lambda all, x: all.at[at["S.micro"]].set(x), new["seen"], seen)
        if self.cotangent is None:
            return [], None
        gradient, dy = pullback(jnp.float32(1))
        return [gradient], dy

    def backward(self, new: dict[str, Any], carry: Carry, dy: Any, at: Columns, *, split: bool, may_idle: bool) -> None:
        """Run B, a chunk's backward pass, or, if `split`, D, for its input alone; send the input's gradient back.

        `dy` is the suffix's gradient, if S ran in this tick: the last chunk of the last stage begins with it.
        """
        if dy is None:
            dy = carry.returned
        else:
            dy = _select(self.is_last & (at["B.chunk"] == self.last_chunk), dy, carry.returned)
        # Read after F wrote: the last stage begins B in the tick of its F, with the residuals of that F.
        stash = new["stash"]

        def piece(p: Any, dy: Any, summed: Any, rest: Any) -> tuple[Any, Any, Any]:
            index = self.index(at["B.chunk"], p)
            weights, context = self.weights(index, again=True), self.context(at["B.chunk"], at["B.micro"], p)
            kept = slots.read(stash, self.index(at["B.slot"], p))
            if split:
                dx, operands = self.chunk.input_backward(weights, context, kept, dy)
                return dx, summed, slots.write(rest, self.index(at["B.rest"], p), operands)
            gradient, dx = self.chunk.backward(weights, context, kept, dy)
            return dx, self.added(summed, gradient, index, may_idle and at["B.active"]), rest

        dx, summed, new["rest"] = self.through(piece, dy, new["gradients"][STACK], carry.rest, reverse=True)
        new["gradients"] = {**new["gradients"], STACK: summed}
        new["leaving"], new["returned"] = dx, self.send(dx, -1)

    def weight_backward(self, new: dict[str, Any], at: Columns, *, may_idle: bool) -> None:
        """Run W, the gradient of a chunk's weights."""

        def piece(p: Any, summed: Any) -> tuple[Any]:
            index = self.index(at["W.chunk"], p)
            weights, context = self.weights(index, again=True), self.context(at["W.chunk"], at["W.micro"], p)
            stashed = slots.read(new["stash"], self.index(at["W.slot"], p))
            rest = slots.read(new["rest"], self.index(at["W.rest"], p))
            gradient = self.chunk.weight_backward(weights, context, stashed, rest)
            return (self.added(summed, gradient, index, may_idle and at["W.active"]),)

        (summed,) = self.through(piece, new["gradients"][STACK])
        new["gradients"] = {**new["gradients"], STACK: summed}

    # ------------------------------------------------------------------ parts of it

    def micro_batch(self, index: Any) -> tuple[Inputs, Any]:
        """Return (inputs, key) of a micro-batch."""
        part = jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, index, keepdims=False), self.batch)
        return Inputs(part, self.extra), fold(self.rng, self.first_index + index)

    def through(self, piece: Callable, *carry: Any, reverse: bool = False) -> Any:
        """Run `carry = piece(p, *carry)` for every piece of a chunk."""
        if self.stages.pieces == 1:
            return piece(0, *carry)
        numbers = jnp.arange(self.stages.pieces)
        return lax.scan(lambda carry, p: (piece(p, *carry), None), carry, numbers, reverse=reverse)[0]

    def index(self, chunk_or_slot: Any, piece: Any) -> Any:
        """Find a piece among those of all chunks or slots."""
        return chunk_or_slot if self.stages.pieces == 1 else chunk_or_slot * self.stages.pieces + piece

    def context(self, chunk: Any, micro: Any, piece: Any) -> Any:
        """Pair a micro-batch's key with the number that a piece of this stage's chunk has in the whole model."""
        number = chunk * self.stages.n_stages + self.stage
        return fold(self.rng, self.first_index + micro), self.index(number, piece)

    def ends(self, diff: PyTree, state: PyTree) -> PyTree:
        """Fetch the weights of prefix and suffix."""
        nondiff = replace_state(self.nondiff[ENDS], state)
        return fetch(self.stages.view.layouts[ENDS], (diff, nondiff), self.stages.precision)

    def weights(self, index: Any, again: bool = False) -> Any:
        """Return (diff, nondiff) of a piece.

        With `again`, XLA must gather again: without the barrier it would keep the weights of the forward pass alive.
        """
        pair = self.of_piece((self.diff[STACK], self.nondiff[STACK]), index)
        return lax.optimization_barrier(pair) if again and self.gathers else pair

    def of_piece(self, stack: Any, index: Any) -> Any:
        """Index trees of the stack by the piece, if there are several."""
        if not self.stages.view.layer_axis:
            return stack
        return jax.tree.map(lambda w: lax.dynamic_index_in_dim(w, index, keepdims=False), stack)

    def keep(self, new: dict[str, Any], state: PyTree) -> None:
        """Put new state of the ends into the carry, unless nothing is trained."""
        if self.cotangent is not None:
            new["state"] = {**new["state"], ENDS: self.kept(ENDS, new["state"][ENDS], state)}

    def kept(self, part: str, old: PyTree, new: PyTree, active: Any = True, index: Any = None) -> PyTree:
        """Replace the state of the ends, or of a piece of the stack, unless this stage is idle."""

        def keep(layout: ParamLayout, old: Any, value: Any) -> Any:
            if value is None:
                return old
            if index is None or not self.stages.view.layer_axis:
                return jnp.where(active, keep_state(layout, value, old), old)
            mine = lax.dynamic_index_in_dim(old, index, keepdims=False)
            kept = jnp.where(active, keep_state(layout, value, mine), mine)
            return lax.dynamic_update_index_in_dim(old, kept, index, 0)

        return jax.tree.map(keep, self.stages.view.layouts[part], old, new)

    def added(self, summed: PyTree, gradient: PyTree, index: Any, active: jax.Array | Literal[False]) -> PyTree:
        """Add a piece's gradient to the sums, unless this stage is idle; `active` is False if no stage is.

        Without a select, XLA fuses the addition into the matrix product.
        """

        def add(s: jax.Array, g: jax.Array) -> jax.Array:
            g = g.astype(s.dtype) if active is False else jnp.where(active, g.astype(s.dtype), 0)
            return s.at[index].add(g) if self.stages.view.layer_axis else s + g

        return jax.tree.map(add, summed, gradient)

    def send(self, x: Any, step: int) -> Any:
        """Send x to the next stage (+1) or the previous one (-1); with several chunks the last precedes the first."""
        n = self.stages.n_stages
        pairs = [(s, (s + step) % n) for s in range(n) if self.stages.chunks > 1 or 0 <= s + step < n]
        return jax.tree.map(lambda x: lax.ppermute(x, PIPE, pairs), x)

    def from_stage(self, mine: jax.Array, x: Any) -> Any:
        """Broadcast x from the stage where `mine` is true to every stage."""
        return jax.tree.map(lambda x: lax.psum(jnp.where(mine, x, jnp.zeros((), x.dtype)), PIPE).astype(x.dtype), x)


def _select(condition: jax.Array, x: Any, y: Any) -> Any:
    return jax.tree.map(partial(jnp.where, condition), x, y)


def _sum(*gs: jax.Array) -> jax.Array:
    return gs[0] if gs[0].dtype == jax.dtypes.float0 else sum(gs[1:], gs[0])  # float0: of an integer parameter


def _add(s: jax.Array, g: jax.Array) -> jax.Array:
    return s + g.astype(s.dtype)


def _check_chain(x: Any, y: Any) -> None:
    """Raise a ConfigError unless a block's output is like its input, and can go from stage to stage."""
    for leaf in jax.tree.leaves(x):
        kind_of(leaf)  # raises

    def form(x: Any) -> Any:
        return jax.tree.map(lambda v: f"{v.dtype.name}{list(v.shape)}", x)

    if jax.tree.flatten(form(x)) != jax.tree.flatten(form(y)):
        raise ConfigError(
            f"the layer stack takes {form(x)} and gives {form(y)}: every layer gives what the next one takes"
        )
