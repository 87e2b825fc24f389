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
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jzero.errors import ConfigError
from jzero.gradients import Weights, weighted
from jzero.loss import Mean, Sums
from jzero.mesh import PIPE
from jzero.model import ENDS, STACK, Inputs, fold, replace_state
from jzero.pipeline import slots
from jzero.pipeline.ends_state import needs_former
from jzero.pipeline.layer_switch import kind_of
from jzero.pipeline.program import Program, Runs, count
from jzero.pipeline.split_backward import Chunk, split_floats
from jzero.precision import Precision
from jzero.sharding import is_state
from jzero.stack import StackView, fetch
from jzero.tree import PyTree, combine, leading_dim, partition
from jzero.zero import ParamLayout, keep_state

Columns = dict[str, jax.Array]  # this stage's numbers by name, see `program.Program.columns`
Functions = tuple[Callable, Callable, Callable]  # prefix, chunk, suffix


@dataclass(frozen=True)
class Stages:
    """The stages as the executor sees them.

    Attributes:
      n_stages, chunks: pipeline stages, and chunks of layers on each.
      view: the form of the parameters in use; its stack is a list, and with several chunks a leaf has an axis for them.
      objective: what the suffix returns -> loss and metrics, to differentiate; see `loss.read_loss`.
      read: what the suffix returns -> what is collected of it.
      functions: called with (pairs, micro-batch), whose shapes alone matter; returns prefix(ends, batch, key) -> x,
        chunk(weights, state, x, context) -> x, suffix(ends, x, batch, key) -> loss, each with the new state beside its
        result. The weights are (diff, nondiff); a context is the micro-batch's key and the chunk's number in the whole
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


class Carry(NamedTuple):
    """The values that a stage carries from tick to tick; M micro-batches.

    Attributes:
      entering: the prefix's output, for the first stage's next forward pass.
      inbox: the output of the stage before.
      returned: the gradient from the stage after.
      leaving: the gradient of this stage's last input.
      stash: residuals between F and B or W, [slots, ...] each.
      rest: operands of the weights' gradient between D and W, [slots, ...] each.
      gradients: summed so far.
      state: the model's, None in the place of parameters.
      former: the ends' state before every micro-batch, [M, ...] each, if the prefix's output depends on it.
      seen: the loss and metrics of every micro-batch, [M, 2] each.
    """

    entering: Any
    inbox: Any
    returned: Any
    leaving: Any
    stash: Any
    rest: Any
    gradients: Any
    state: Any
    former: Any
    seen: Sums


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
        pair, context = jax.eval_shape(self.weights, 0), jax.eval_shape(self.context, 0, 0)
        state = jax.eval_shape(lambda: self.of_chunk(self.state[STACK], 0))
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
            return Carry(x, x, None, None, None, None, None, self.state, None, seen)
        accum = self.stages.precision.accum
        stash = slots.buffer(self.program.stash, self.chunk.stashed_types)
        stash += [] if self.program.turns else [slots.buffer(self.program.stash, self.x, self.stages.offload)]
        rest = slots.buffer(self.program.rest, self.chunk.rest_types)
        gradients = jax.tree.map(lambda w: jnp.zeros(w.shape, accum), self.diff)
        ends = jax.tree.map(jax.typeof, self.state[ENDS])
        former = slots.buffer(leading_dim(self.batch), ends) if self.keeps_former else None
        return Carry(x, x, floats, floats, stash, rest, gradients, self.state, former, seen)

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
            self.keep(new, ENDS, state)

        if "F" in work:
            y = self.forward(new, carry, at)

        kept = None
        if work & set("BD"):
            # Read after F wrote: the last stage begins B in the tick of its F, with the residuals of that F.
            kept = slots.read(new["stash"], at["B.slot"])
            if not self.program.turns:  # gpipe: the suffix runs long after F, on the output that F stashed last
                y, kept = slots.on_device(kept[-1]), kept[:-1]

        if "S" in work:
            gradient, dy = self.leave(new, ends, y, at)
            ends_gradients += gradient

        if work & set("BD"):
            self.backward(new, carry, kept, dy, at, split="D" in work, may_idle="B" in idle)

        if "W" in work:
            weights, context = self.weights(at["W.chunk"], again=True), self.context(at["W.chunk"], at["W.micro"])
            stashed, rest = slots.read(new["stash"], at["W.slot"]), slots.read(new["rest"], at["W.rest"])
            gradient = self.chunk.weight_backward(weights, context, stashed, rest)
            self.add(new, gradient, at["W.chunk"], "W" in idle and at["W.active"])

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
        weights, context = self.weights(at["F.chunk"]), self.context(at["F.chunk"], at["F.micro"])
        state = self.of_chunk(carry.state[STACK], at["F.chunk"])
        if self.cotangent is None:
            y, _ = self.layers(weights, state, x, context)
        else:
            (y, new_state), kept = self.chunk.forward(weights, state, x, context)
            self.keep(new, STACK, new_state, at["F.active"], at["F.chunk"])
            kept += [] if self.program.turns else [y]
            new["stash"] = slots.write(carry.stash, at["F.slot"], kept)
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
        self.keep(new, ENDS, state)
        new["seen"] = jax.tree.map(lambda all, x: all.at[at["S.micro"]].set(x), new["seen"], seen)
        if self.cotangent is None:
            return [], None
        gradient, dy = pullback(jnp.float32(1))
        return [gradient], dy

    def backward(
        self, new: dict[str, Any], carry: Carry, kept: Any, dy: Any, at: Columns, *, split: bool, may_idle: bool
    ) -> None:
        """Run B, a chunk's backward pass, or, if `split`, D, for its input alone; send the input's gradient back.

        `dy` is the suffix's gradient, if S ran in this tick: the last chunk of the last stage begins with it.
        """
        if dy is None:
            dy = carry.returned
        else:
            dy = _select(self.is_last & (at["B.chunk"] == self.last_chunk), dy, carry.returned)
        weights, context = self.weights(at["B.chunk"], again=True), self.context(at["B.chunk"], at["B.micro"])
        if split:
            dx, rest = self.chunk.input_backward(weights, context, kept, dy)
            new["rest"] = slots.write(carry.rest, at["B.rest"], rest)
        else:
            gradient, dx = self.chunk.backward(weights, context, kept, dy)
            self.add(new, gradient, at["B.chunk"], may_idle and at["B.active"])
        new["leaving"], new["returned"] = dx, self.send(dx, -1)

    # ------------------------------------------------------------------ parts of it

    def micro_batch(self, index: Any) -> tuple[Inputs, Any]:
        """Return (inputs, key) of a micro-batch."""
        part = jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, index, keepdims=False), self.batch)
        return Inputs(part, self.extra), fold(self.rng, self.first_index + index)

    def context(self, chunk: Any, micro: Any) -> Any:
        """Pair a micro-batch's key with the number that this stage's chunk has in the whole model."""
        return fold(self.rng, self.first_index + micro), chunk * self.stages.n_stages + self.stage

    def ends(self, diff: PyTree, state: PyTree) -> PyTree:
        """Fetch the weights of prefix and suffix."""
        nondiff = replace_state(self.nondiff[ENDS], state)
        return fetch(self.stages.view.layouts[ENDS], (diff, nondiff), self.stages.precision)

    def weights(self, chunk: Any, again: bool = False) -> Any:
        """Return (diff, nondiff) of a chunk.

        With `again`, XLA must gather again: without the barrier it would keep the weights of the forward pass alive.
        """
        pair = self.of_chunk((self.diff[STACK], self.nondiff[STACK]), chunk)
        return lax.optimization_barrier(pair) if again and self.gathers else pair

    def of_chunk(self, stack: Any, chunk: Any) -> Any:
        """Index trees of the stack by the chunk, if there are several."""
        if not self.stages.view.layer_axis:
            return stack
        return jax.tree.map(lambda w: lax.dynamic_index_in_dim(w, chunk, keepdims=False), stack)

    def keep(self, new: dict[str, Any], part: str, state: PyTree, active: Any = True, chunk: Any = None) -> None:
        """Put new state of the ends or of a chunk into the carry, unless this stage is idle or nothing is trained."""
        if self.cotangent is None:
            return

        def keep(layout: ParamLayout, old: Any, value: Any) -> Any:
            if value is None:
                return old
            if chunk is None or not self.stages.view.layer_axis:
                return jnp.where(active, keep_state(layout, value, old), old)
            mine = lax.dynamic_index_in_dim(old, chunk, keepdims=False)
            kept = jnp.where(active, keep_state(layout, value, mine), mine)
            return lax.dynamic_update_index_in_dim(old, kept, chunk, 0)

        kept = jax.tree.map(keep, self.stages.view.layouts[part], new["state"][part], state)
        new["state"] = {**new["state"], part: kept}

    def add(self, new: dict[str, Any], gradient: PyTree, chunk: Any, active: jax.Array | Literal[False]) -> None:
        """Add a chunk's gradient to the sums, unless this stage is idle; `active` is False if no stage is.

        Without a select, XLA fuses the addition into the matrix product.
        """

        def add(s: jax.Array, g: jax.Array) -> jax.Array:
            g = g.astype(s.dtype) if active is False else jnp.where(active, g.astype(s.dtype), 0)
            return s.at[chunk].add(g) if self.stages.view.layer_axis else s + g

        summed = new["gradients"]
        new["gradients"] = {**summed, STACK: jax.tree.map(add, summed[STACK], gradient)}

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

    if form(x) != form(y):
        raise ConfigError(
            f"the layer stack takes {form(x)} and gives {form(y)}: every layer gives what the next one takes"
        )
