"""The pipeline executor: runs any schedule, inside the manual region of the train step.

All stages run the same program, each on its own numbers (SPMD). A tick is at most one forward and one backward pass of
a chunk of layers, then a permute each way. Consecutive ticks with the same operations are one `lax.scan`. A stage that
is idle in a tick computes on stale data and a select drops the result: with a branch instead, the stages would run
different collectives and deadlock; with a multiplication by zero, 0 * NaN would be NaN.

The operations of a tick: E prefix, F forward, S suffix, B backward, D backward of the input alone, W backward of the
weights, G backward of the prefix; see `jzero.pipeline.schedules`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jzero.layout.sharding import ParamLayout, is_state
from jzero.layout.storage import keep_state
from jzero.loss import Mean, Sums, weighted
from jzero.mesh import PIPE
from jzero.model import ENDS, STACK, Inputs, fold, replace_state
from jzero.passes.sequential import DeviceWeights, PassFacts
from jzero.passes.stack import StackView, fetch_params
from jzero.pipeline.carry import Carry, check_chain, from_stage, needs_former, select, send
from jzero.pipeline.schedules import Program, Runs, count
from jzero.precision import Precision
from jzero.tracing.chunk import Chunk, split_floats
from jzero.tracing.slots import copied_to_device, make_slots, read_slot, write_slot
from jzero.tree import PyTree, combine, leading_dim, partition

Index = jax.Array | int
Columns = dict[str, jax.Array]  # this stage's numbers by name, see `schedules.Program.columns`
Functions = tuple[Callable, Callable, Callable]  # prefix, piece, suffix


@dataclass(frozen=True)
class Cut:
    """A model cut into stages.

    Attributes:
      view: the form of the parameters in use; its stack is a list of the layers of a piece, and with several pieces on
        a stage a leaf has an axis for them, chunk by chunk.
      functions: called with (pairs, micro-batch), whose shapes alone matter; returns prefix(ends, batch, key) -> x,
        piece(weights, state, x, context) -> x, suffix(ends, x, batch, key) -> loss, each with the new state beside its
        result. The weights are (diff, nondiff); a context is the micro-batch's key and the piece's number in the whole
        model.
      facts, summary: for the report.
      pieces: the equal pieces of a chunk; a tick's pass is a loop over them, or unrolled if there is only one.
      owned: replaces every leaf of the state by that of the stage that computed it.
    """

    view: StackView
    functions: Callable[[PyTree, PyTree], Functions]
    facts: PassFacts
    summary: str
    pieces: int = 1
    owned: Callable[[PyTree], PyTree] = lambda state: state


class Stages(NamedTuple):
    """The stages as the executor sees them.

    Attributes:
      n_stages, chunks: pipeline stages, and chunks of layers on each.
      objective: what the suffix returns -> loss and metrics, to differentiate; see `loss.read_loss`.
      read: what the suffix returns -> what is collected of it.
    """

    n_stages: int
    chunks: int
    cut: Cut
    precision: Precision
    objective: Callable[[PyTree], dict[str, Mean]]
    read: Callable[[PyTree], PyTree]


class MicroBatches(NamedTuple):
    """The micro-batches of a global batch: their arrays [M, rows, ...], the batch's key, the number of the first."""

    arrays: PyTree
    key: jax.Array | None
    first: Index = 0

    def key_of(self, index: Index) -> jax.Array | None:
        return fold(self.key, self.first + index)


class Piece(NamedTuple):
    """A piece of a chunk: its number there, its place among the pieces of all of a stage's chunks, and its operands."""

    number: Index
    place: Index
    weights: PyTree
    context: tuple[jax.Array | None, Index]


class Execution:
    """One execution of a program over the micro-batches of a batch; without `cotangents` forward only."""

    def __init__(
        self, stages: Stages, program: Program, weights: DeviceWeights, batch: MicroBatches,
        cotangents: Mean | None = None,
    ):  # fmt: skip
        self.stages, self.cut, self.program = stages, stages.cut, program
        self.batch, self.cotangents = batch, cotangents
        self.diff, self.nondiff, self.state, self.extra = weights
        self.stage, self.send = lax.axis_index(PIPE), partial(send, stages=stages.n_stages, wraps=stages.chunks > 1)
        self.is_first, self.is_last = self.stage == 0, self.stage == stages.n_stages - 1
        self.layouts = self.cut.view.layouts
        self.gathers = any(layout.rule.gather == "layer" for layout in jax.tree.leaves(self.layouts[STACK]))
        pair, part = (self.diff, replace_state(self.nondiff, self.state)), self.micro_batch(0)[0]
        prefix, self.layers, self.suffix = stages.cut.functions(pair, part)
        self.prefix = lambda *args: jax.tree.map(jnp.asarray, prefix(*args))
        self.trace_shapes()

    def trace_shapes(self) -> None:
        """Trace the functions for the first micro-batch: `x` and `sums` are shapes, and `chunk` is traced layers."""
        part, key = self.micro_batch(0)
        ends = partial(self.fetch_ends, self.diff[ENDS], self.state[ENDS])
        self.x = jax.eval_shape(lambda: self.prefix(ends(), part, key)[0])
        pair, context = jax.eval_shape(self.weights, 0), jax.eval_shape(self.context, 0, 0, 0)
        state = jax.eval_shape(lambda: self.of_piece(self.state[STACK], 0))
        check_chain(self.x, jax.eval_shape(self.layers, pair, state, self.x, context)[0])
        self.sums = jax.eval_shape(lambda x: self.stages.read(self.suffix(ends(), x, part, key)[0]), self.x)
        if self.cotangents is not None:
            first, last = (lambda ends: self.prefix(ends, part, key)), lambda ends, x: self.suffix(ends, x, part, key)
            self.keeps_former = needs_former(first, last, jax.eval_shape(ends), self.x, self.layouts[ENDS])
            self.chunk = Chunk(self.layers, (pair, state, self.x, context), split=self.program.rest > 0)

    def result(self) -> tuple[PyTree, Sums, PyTree]:
        """Run the program.

        Returns:
          The gradients of diff, the loss and metrics of every micro-batch [M, 2], the new state.
        """
        columns = {name: jnp.asarray(column)[:, self.stage] for name, column in self.program.columns.items()}
        carry = self.execute(self.program.runs, self.start(), columns)
        gradients = {ENDS: carry.ends_gradients, STACK: carry.stack_gradients}
        return gradients, carry.seen, {ENDS: carry.ends_state, STACK: carry.stack_state}

    def start(self) -> Carry:
        """Make the carry before the first tick."""
        x, micro_batches = jax.tree.map(jnp.zeros_like, self.x), leading_dim(self.batch.arrays)
        seen = jax.tree.map(lambda s: jnp.zeros((micro_batches, *s.shape), s.dtype), self.sums)
        carry = Carry(x, x, seen=seen, ends_state=self.state[ENDS], stack_state=self.state[STACK])
        if self.cotangents is None:
            return carry
        floats, pieces, offload = split_floats(x)[0], self.cut.pieces, self.cut.facts.remat.offload

        def sums(weights: PyTree) -> PyTree:
            return jax.tree.map(lambda w: jnp.zeros(w.shape, self.stages.precision.accum), weights)

        ends = jax.tree.map(jax.typeof, self.state[ENDS])
        return carry._replace(
            returned=floats,
            leaving=floats,
            stash=make_slots(self.program.stash * pieces, self.chunk.stashed_types),
            outputs=None if self.program.turns else make_slots(self.program.stash, self.x, offload),
            rest=make_slots(self.program.rest * pieces, self.chunk.rest_types),
            ends_gradients=sums(self.diff[ENDS]),
            stack_gradients=sums(self.diff[STACK]),
            former=make_slots(micro_batches, ends) if self.keeps_former else None,
        )

    def execute(self, runs: Runs, carry: Carry, columns: Columns) -> Carry:
        """Run nested runs of ticks, each repeated run as one scan over its rows of the columns."""
        start = 0
        for what, times in runs:
            run, shape = partial(self.run, what), (times,) if isinstance(what, str) else (times, count(what))
            stop = start + prod(shape)
            part = {name: column[start:stop].reshape(shape) for name, column in columns.items()}
            start = stop
            if times == 1:
                carry, _ = run(carry, {name: column[0] for name, column in part.items()})
            else:
                carry, _ = lax.scan(run, carry, part)
        return carry

    def run(self, what: str | Runs, carry: Carry, columns: Columns) -> tuple[Carry, None]:
        return self.tick(what, carry, columns) if isinstance(what, str) else self.execute(what, carry, columns), None

    # ------------------------------------------------------------------ one tick

    def tick(self, operations: str, carry: Carry, at: Columns) -> Carry:
        """Run one tick.

        Args:
          operations: the letters of `jzero.pipeline.schedules`; lower case: some stage is idle.
          at: this stage's numbers for this tick: micro-batches, chunks, slots.
        """
        # The next tick uses the output of E (`entering`); G uses the result of B in the tick before (`leaving`). So
        # their all-reduces overlap with the chunks and delay no stage.
        work = set(operations.upper())
        new, y, dy, ends_gradients = carry, None, None, []
        if work & set("ESG"):
            # E, S and G share one fetch of the ends, and one transpose reduces the sum of their gradients.
            ends, reduce = jax.vjp(lambda diff: self.fetch_ends(diff, carry.ends_state), self.diff[ENDS])

        if "E" in work:
            if carry.former is not None:
                new = new._replace(former=write_slot(carry.former, at["E.micro"], carry.ends_state))
            entering, state = self.prefix(ends, *self.micro_batch(at["E.micro"]))
            ends = replace_state(ends, state)
            new = new._replace(entering=entering, ends_state=self.kept_state(ENDS, new.ends_state, state))

        if "F" in work:
            new, y = self.forward(new, at, carry.entering)

        if work & set("BD") and carry.outputs is not None:
            y = copied_to_device(read_slot(new.outputs, at["B.slot"]))

        if "S" in work:
            new, gradient, dy = self.leave(new, ends, y, at)
            ends_gradients += gradient

        if work & set("BD"):
            new = self.backward(new, dy, at, split="D" in work, may_idle="b" in operations)

        if "W" in work:
            new = self.weight_backward(new, at, may_idle="w" in operations)

        if "G" in work:
            part, key = self.micro_batch(at["G.micro"])
            if carry.former is not None:
                former = self.fetch_ends(self.diff[ENDS], read_slot(carry.former, at["G.micro"]))
                ends = replace_state(ends, partition(former, is_state(self.layouts[ENDS]))[0])
            _, pullback = jax.vjp(lambda ends: split_floats(self.prefix(ends, part, key)[0])[0], ends)
            ends_gradients += pullback(from_stage(self.is_first, carry.leaving))

        if ends_gradients:
            (gradient,) = reduce(jax.tree.map(_sum, *ends_gradients))
            total = jax.tree.map(lambda s, g: s + g.astype(s.dtype), new.ends_gradients, gradient)
            new = new._replace(ends_gradients=total)
        return new

    def forward(self, carry: Carry, at: Columns, entering: PyTree) -> tuple[Carry, PyTree]:
        """Run F, a chunk's forward pass: stash its residuals, send its output to the next stage, and return it.

        `entering` is the prefix's output of the tick before.
        """
        # Chunk 0 of the first stage begins a micro-batch; every other chunk continues with the previous stage's output.
        x = select(self.is_first & (at["F.chunk"] == 0), entering, carry.inbox)

        def piece(piece: Piece, x: PyTree, stack: PyTree, stash: PyTree) -> tuple[PyTree, PyTree, PyTree]:
            state = self.of_piece(stack, piece.place)
            if self.cotangents is None:
                return self.layers(piece.weights, state, x, piece.context)[0], stack, stash
            slot, operands = self.index(at["F.slot"], piece.number), (piece.weights, state, x, piece.context)
            (y, new_state), stash = self.chunk.forward_into(stash, slot, *operands)
            stack = self.kept_state(STACK, stack, new_state, at["F.active"], piece.place)
            return y, stack, stash

        y, stack, stash = self.run_pieces("F", piece, at, x, carry.stack_state, carry.stash)
        outputs = None if carry.outputs is None else write_slot(carry.outputs, at["F.slot"], y)
        return carry._replace(stack_state=stack, stash=stash, outputs=outputs, inbox=self.send(y, +1)), y

    def leave(self, carry: Carry, ends: PyTree, y: PyTree, at: Columns) -> tuple[Carry, list[PyTree], PyTree]:
        """Run S, the suffix and its backward pass; return (carry, [gradient of the ends], gradient of y).

        It runs on the last stage's output, and all stages compute it: in lockstep they would wait anyway, and a
        vocabulary is divided among them.
        """
        part, key = self.micro_batch(at["S.micro"])
        floats, others = split_floats(from_stage(self.is_last, y))

        def loss(ends: PyTree, floats: PyTree) -> PyTree:
            value, state = self.suffix(ends, combine(floats, others), part, key)
            if self.cotangents is None:
                return 0.0, (self.stages.read(value), state)
            total, sums = weighted(self.stages.objective(value), self.cotangents)
            return total, (sums, state)

        _, pullback, (seen, state) = jax.vjp(loss, ends, floats, has_aux=True)
        seen = jax.tree.map(lambda all, x: all.at[at["S.micro"]].set(x), carry.seen, seen)
        carry = carry._replace(seen=seen, ends_state=self.kept_state(ENDS, carry.ends_state, state))
        if self.cotangents is None:
            return carry, [], None
        gradient, dy = pullback(jnp.float32(1))
        return carry, [gradient], dy

    def backward(self, carry: Carry, dy: PyTree, at: Columns, *, split: bool, may_idle: bool) -> Carry:
        """Run B, a chunk's backward pass, or, if `split`, D, for its input alone; send the input's gradient back.

        `dy` is the suffix's gradient, if S ran in this tick: the last chunk of the last stage begins with it.
        """
        last = self.is_last & (at["B.chunk"] == self.stages.chunks - 1)
        dy = carry.returned if dy is None else select(last, dy, carry.returned)

        def piece(piece: Piece, dy: PyTree, summed: PyTree, rest: PyTree) -> tuple[PyTree, PyTree, PyTree]:
            # Read after F wrote: the last stage begins B in the tick of its F, with the residuals of that F.
            slot = self.index(at["B.slot"], piece.number)
            if split:
                kept = read_slot(carry.stash, slot)
                dx, operands = self.chunk.input_backward(piece.weights, piece.context, kept, dy)
                return dx, summed, write_slot(rest, self.index(at["B.rest"], piece.number), operands)
            gradient, dx = self.chunk.backward_from(carry.stash, slot, piece.weights, piece.context, dy)
            return dx, self.add_gradient(summed, gradient, piece.place, may_idle and at["B.active"]), rest

        dx, summed, rest = self.run_pieces("B", piece, at, dy, carry.stack_gradients, carry.rest)
        return carry._replace(stack_gradients=summed, rest=rest, leaving=dx, returned=self.send(dx, -1))

    def weight_backward(self, carry: Carry, at: Columns, *, may_idle: bool) -> Carry:
        """Run W, the gradient of a chunk's weights."""

        def piece(piece: Piece, summed: PyTree) -> tuple[PyTree]:
            stashed = read_slot(carry.stash, self.index(at["W.slot"], piece.number))
            rest = read_slot(carry.rest, self.index(at["W.rest"], piece.number))
            gradient = self.chunk.weight_backward(piece.weights, piece.context, stashed, rest)
            return (self.add_gradient(summed, gradient, piece.place, may_idle and at["W.active"]),)

        (summed,) = self.run_pieces("W", piece, at, carry.stack_gradients)
        return carry._replace(stack_gradients=summed)

    # ------------------------------------------------------------------ parts of it

    def micro_batch(self, index: Index) -> tuple[Inputs, jax.Array | None]:
        """Return (inputs, key) of a micro-batch."""
        part = jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, index, keepdims=False), self.batch.arrays)
        return Inputs(part, self.extra), self.batch.key_of(index)

    def run_pieces(self, operation: str, f: Callable, at: Columns, *carry: PyTree) -> tuple[PyTree, ...]:
        """Run `carry = f(piece, *carry)` for every piece of a chunk, for B from the last one on."""

        def run(carry: tuple[PyTree, ...], p: Index) -> tuple[tuple[PyTree, ...], None]:
            chunk = at[f"{operation}.chunk"]
            index = self.index(chunk, p)
            weights = self.weights(index, again=operation != "F")
            return f(Piece(p, index, weights, self.context(chunk, at[f"{operation}.micro"], p)), *carry), None

        if self.cut.pieces == 1:
            return run(carry, 0)[0]
        return lax.scan(run, carry, jnp.arange(self.cut.pieces), reverse=operation == "B")[0]

    def index(self, chunk_or_slot: Index, piece: Index) -> Index:
        """Find a piece among those of all chunks or slots."""
        return chunk_or_slot if self.cut.pieces == 1 else chunk_or_slot * self.cut.pieces + piece

    def context(self, chunk: Index, micro: Index, piece: Index) -> tuple[jax.Array | None, Index]:
        """Pair a micro-batch's key with the number that a piece of this stage's chunk has in the whole model."""
        number = chunk * self.stages.n_stages + self.stage
        return self.batch.key_of(micro), self.index(number, piece)

    def fetch_ends(self, diff: PyTree, state: PyTree) -> PyTree:
        """Fetch the weights of prefix and suffix."""
        return fetch_params(self.layouts[ENDS], (diff, replace_state(self.nondiff[ENDS], state)), self.stages.precision)

    def weights(self, index: Index, again: bool = False) -> PyTree:
        """Return (diff, nondiff) of a piece; `again` in a backward pass."""
        # Without the barrier XLA would not gather again, but keep the weights of the forward pass alive.
        pair = self.of_piece((self.diff[STACK], self.nondiff[STACK]), index)
        return lax.optimization_barrier(pair) if again and self.gathers else pair

    def of_piece(self, stack: PyTree, index: Index) -> PyTree:
        """Index trees of the stack by the piece, if there are several."""
        return read_slot(stack, index) if self.cut.view.layer_axis else stack

    def kept_state(
        self, part: str, old: PyTree, new: PyTree, active: jax.Array | bool = True, index: Index | None = None
    ) -> PyTree:
        """Replace state of the ends, or of a piece of the stack, unless this stage is idle or nothing is trained."""
        if self.cotangents is None:
            return old

        def keep(layout: ParamLayout, old: jax.Array, value: jax.Array | None) -> jax.Array:
            if value is None:
                return old
            if index is None or not self.cut.view.layer_axis:
                return jnp.where(active, keep_state(layout, value, old), old)
            mine = lax.dynamic_index_in_dim(old, index, keepdims=False)
            kept = jnp.where(active, keep_state(layout, value, mine), mine)
            return lax.dynamic_update_index_in_dim(old, kept, index, 0)

        return jax.tree.map(keep, self.layouts[part], old, new)

    def add_gradient(
        self, summed: PyTree, gradient: PyTree, index: Index, active: jax.Array | Literal[False]
    ) -> PyTree:
        """Add a piece's gradient to the sums, unless this stage is idle; `active` is False if no stage is."""

        def add(s: jax.Array, g: jax.Array) -> jax.Array:
            # Without a select, XLA fuses the addition into the matrix product.
            g = g.astype(s.dtype) if active is False else jnp.where(active, g.astype(s.dtype), 0)
            return s.at[index].add(g) if self.cut.view.layer_axis else s + g

        return jax.tree.map(add, summed, gradient)


def _sum(*gs: jax.Array) -> jax.Array:
    return gs[0] if gs[0].dtype == jax.dtypes.float0 else sum(gs[1:], gs[0])  # float0: of an integer parameter
