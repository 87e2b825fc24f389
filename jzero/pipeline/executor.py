"""The pipeline: one executor for every schedule, inside the manual region of the train step.

Every stage runs the same program on its own numbers. A tick is at most one forward and one backward pass of a chunk of
layers, then a permute each way; the ticks with the same operations are one `lax.scan`. A stage that is idle at a tick
computes on stale data, and what comes of it is dropped by a select. So no collective lies under a branch.
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
from jzero.gradients import seeded
from jzero.loss import sum_and_count
from jzero.mesh import PIPE
from jzero.model import ENDS, STACK, fold
from jzero.pipeline.program import Program, Runs, count
from jzero.pipeline.split_backward import Chunk, split_floats
from jzero.precision import Precision
from jzero.stack import StackView, fetch
from jzero.tree import combine

Columns = dict[str, jax.Array]
Functions = tuple[Callable, Callable, Callable]


@dataclass(frozen=True)
class Stages:
    """What the executor needs to know of the stages.

    Attributes:
      stages, chunks: pipeline stages, and chunks of layers on each.
      view: the form of the parameters in use; its stack is a list, with several chunks a leaf has a leading axis.
      functions: (pairs, micro-batch), for their shapes -> prefix(ends, batch, key) -> x, chunk(weights, x, context)
        -> x, suffix(ends, x, batch, key) -> loss. The weights are (diff, nondiff); a context is the micro-batch's key
        and the chunk's number in the whole model.
    """

    stages: int
    chunks: int
    view: StackView
    precision: Precision
    functions: Callable[[Any, Any], Functions]


class Carry(NamedTuple):
    """What a stage carries from tick to tick.

    first: the prefix's output for the next tick. inbox: the output of the stage before. returned: the gradient from the
    stage after. leaving: the gradient of this stage's last input. stash, rest: buffers [slots, ...], see `program`.
    gradients: summed so far. seen: [M, ...], what is known of each micro-batch's loss.
    """

    first: Any
    inbox: Any
    returned: Any
    leaving: Any
    stash: Any
    rest: Any
    gradients: Any
    seen: jax.Array


class Run:
    """One run of a program over the micro-batches of a batch; without a `seed` forward only."""

    def __init__(
        self, stages: Stages, program: Program, pairs: Any, batch: Any, rng: Any, first: Any,
        seed: jax.Array | None = None,
    ):  # fmt: skip
        self.stages, self.program, self.batch, self.seed = stages, program, batch, seed
        (self.diff, self.nondiff), self.rng, self.first = pairs, rng, first
        self.stage = lax.axis_index(PIPE)
        self.is_first, self.is_last = self.stage == 0, self.stage == stages.stages - 1
        self.last_chunk = stages.chunks - 1
        self.gathers = any(layout.rule.gather == "layer" for layout in jax.tree.leaves(stages.view.layouts[STACK]))
        part, key = self.micro_batch(0)
        prefix, self.layers, self.suffix = stages.functions(pairs, part)
        self.prefix = lambda *args: jax.tree.map(jnp.asarray, prefix(*args))
        self.x = jax.eval_shape(lambda: self.prefix(self.ends(self.diff[ENDS]), part, key))
        weights, context = jax.eval_shape(self.weights, 0), jax.eval_shape(self.context, 0, 0)
        _check_chain(self.x, jax.eval_shape(self.layers, weights, self.x, context))
        if seed is not None:
            self.chunk = Chunk(self.layers, weights, self.x, context, split=program.rest > 0)

    def result(self) -> tuple[Any, jax.Array]:
        """(gradients of the differentiated weights, [M, ...] of what is known of the losses)."""
        columns = {name: jnp.asarray(column)[:, self.stage] for name, column in self.program.columns.items()}
        carry = self.execute(self.program.runs, self.start(), columns)
        return carry.gradients, carry.seen

    def start(self) -> Carry:
        x, m = _zeros(self.x), _length(self.batch)
        floats = split_floats(x)[0]
        if self.seed is None:
            return Carry(x, x, None, None, None, None, None, jnp.zeros((m, 2)))
        accum = self.stages.precision.accum
        stash = _buffer(self.program.stash, self.chunk.stashed_shapes)
        stash += [] if self.program.turns else [_buffer(self.program.stash, x)]
        rest = _buffer(self.program.rest, self.chunk.rest_shapes)
        gradients = jax.tree.map(lambda w: jnp.zeros(w.shape, accum), self.diff)
        return Carry(x, x, floats, floats, stash, rest, gradients, jnp.zeros((m, 2)))

    def execute(self, runs: Runs, carry: Carry, columns: Columns) -> Carry:
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
        """One tick; `operations` as in `jzero.pipeline.program`, `at` this stage's numbers.

        What E makes is used at the next tick (`first`), and G works on what B left at the tick before (`leaving`):
        their all-reduces then run beside the chunks and delay nobody.
        """
        new, y, dy = carry._asdict(), None, None
        idle = {name for name in "BW" if name.lower() in operations}
        operations = operations.upper()
        backward = "B" in operations or "D" in operations
        if set("ESG") & set(operations):
            ends, reduce = jax.vjp(self.ends, self.diff[ENDS])
        ends_gradients = []

        if "E" in operations:
            part, key = self.micro_batch(at["E.micro"])
            new["first"] = self.prefix(ends, part, key)

        if "F" in operations:
            x = _select(self.is_first & (at["F.chunk"] == 0), carry.first, carry.inbox)
            weights, context = self.weights(at["F.chunk"]), self.context(at["F.chunk"], at["F.micro"])
            if self.seed is None:
                y = self.layers(weights, x, context)
            else:
                y, kept = self.chunk.forward(weights, x, context)
                kept += [] if self.program.turns else [y]  # gpipe's suffix comes later
                new["stash"] = _write(carry.stash, at["F.slot"], kept)
            new["inbox"] = self.send(y, +1)

        if backward:
            kept = _read(new["stash"], at["B.slot"])
            y, kept = (y, kept) if self.program.turns else (kept[-1], kept[:-1])
        if "S" in operations:
            part, key = self.micro_batch(at["S.micro"])
            y = self.from_stage(self.is_last, y)
            floats, others = split_floats(y)

            def loss(ends: Any, floats: Any) -> Any:
                value = self.suffix(ends, combine(floats, others), part, key)
                if self.seed is None:
                    return 0.0, jnp.stack(sum_and_count(value))
                return seeded(value, self.seed)

            _, pullback, seen = jax.vjp(loss, ends, floats, has_aux=True)
            new["seen"] = carry.seen.at[at["S.micro"]].set(seen)
            if self.seed is not None:
                gradient, dy = pullback(jnp.float32(1))
                ends_gradients.append(gradient)

        if backward:
            if dy is None:
                dy = carry.returned
            else:
                dy = _select(self.is_last & (at["B.chunk"] == self.last_chunk), dy, carry.returned)
            weights, context = self.weights(at["B.chunk"], again=True), self.context(at["B.chunk"], at["B.micro"])
            if "D" in operations:
                dx, rest = self.chunk.input_backward(weights, context, kept, dy)
                new["rest"] = _write(carry.rest, at["B.rest"], rest)
            else:
                gradient, dx = self.chunk.backward(weights, context, kept, dy)
                new["gradients"] = self.add(new["gradients"], gradient, at["B.chunk"], "B" in idle and at["B.active"])
            new["leaving"], new["returned"] = dx, self.send(dx, -1)

        if "W" in operations:
            weights, context = self.weights(at["W.chunk"], again=True), self.context(at["W.chunk"], at["W.micro"])
            kept, rest = _read(new["stash"], at["W.slot"]), _read(new["rest"], at["W.rest"])
            gradient = self.chunk.weight_backward(weights, context, kept, rest)
            new["gradients"] = self.add(new["gradients"], gradient, at["W.chunk"], "W" in idle and at["W.active"])

        if "G" in operations:
            part, key = self.micro_batch(at["G.micro"])
            _, pullback = jax.vjp(lambda ends: split_floats(self.prefix(ends, part, key))[0], ends)
            ends_gradients += pullback(self.from_stage(self.is_first, carry.leaving))

        if ends_gradients:
            (gradient,) = reduce(jax.tree.map(_sum, *ends_gradients))
            summed = jax.tree.map(_add, new["gradients"][ENDS], gradient)
            new["gradients"] = {**new["gradients"], ENDS: summed}
        return Carry(**new)

    # ------------------------------------------------------------------ parts of it

    def micro_batch(self, index: Any) -> tuple[Any, Any]:
        """(batch, key) of a micro-batch."""
        part = jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, index, keepdims=False), self.batch)
        return part, fold(self.rng, self.first + index)

    def context(self, chunk: Any, micro: Any) -> Any:
        return fold(self.rng, self.first + micro), chunk * self.stages.stages + self.stage

    def ends(self, diff: Any) -> Any:
        return fetch(self.stages.view.layouts[ENDS], (diff, self.nondiff[ENDS]), self.stages.precision)

    def weights(self, chunk: Any, again: bool = False) -> Any:
        """(diff, nondiff) of a chunk; `again`: what is gathered of them is gathered anew, not kept since F."""
        pair = self.diff[STACK], self.nondiff[STACK]
        if self.stages.view.layer_axis:
            pair = jax.tree.map(lambda w: lax.dynamic_index_in_dim(w, chunk, keepdims=False), pair)
        return lax.optimization_barrier(pair) if again and self.gathers else pair

    def add(self, summed: Any, gradient: Any, chunk: Any, active: jax.Array | Literal[False]) -> Any:
        """The sums with a chunk's gradient in them, unless this stage was idle; `active` False: none is.

        Without the select a matrix product adds to the sum by itself.
        """

        def add(s: jax.Array, g: jax.Array) -> jax.Array:
            g = g.astype(s.dtype) if active is False else jnp.where(active, g.astype(s.dtype), 0)
            return s.at[chunk].add(g) if self.stages.view.layer_axis else s + g

        return {**summed, STACK: jax.tree.map(add, summed[STACK], gradient)}

    def send(self, x: Any, step: int) -> Any:
        """x to the next stage (+1) or the previous one (-1); with several chunks the last is before the first."""
        n = self.stages.stages
        pairs = [(s, (s + step) % n) for s in range(n) if self.stages.chunks > 1 or 0 <= s + step < n]
        return jax.tree.map(lambda x: lax.ppermute(x, PIPE, pairs), x)

    def from_stage(self, mine: jax.Array, x: Any) -> Any:
        """On every stage the x of the one where `mine` is true."""
        return jax.tree.map(lambda x: lax.psum(jnp.where(mine, x, jnp.zeros((), x.dtype)), PIPE).astype(x.dtype), x)


def _length(batch: Any) -> int:
    return jax.tree.leaves(batch)[0].shape[0]


def _zeros(shapes: Any) -> Any:
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)


def _buffer(slots: int, shapes: Any) -> Any:
    """Slots for arrays of these shapes. Floats hold anything: what is read before it is written is dropped."""

    def buffer(x: Any) -> jax.Array:
        make = lax.empty if jnp.issubdtype(x.dtype, jnp.floating) else jnp.zeros
        return make((slots, *x.shape), x.dtype)

    return jax.tree.map(buffer, shapes)


def _write(buffer: Any, slot: jax.Array, x: Any) -> Any:
    return jax.tree.map(lambda b, x: lax.dynamic_update_index_in_dim(b, x, slot, 0), buffer, x)


def _read(buffer: Any, slot: jax.Array) -> Any:
    return jax.tree.map(lambda b: lax.dynamic_index_in_dim(b, slot, keepdims=False), buffer)


def _select(condition: jax.Array, x: Any, y: Any) -> Any:
    return jax.tree.map(partial(jnp.where, condition), x, y)


def _sum(*gs: jax.Array) -> jax.Array:
    return gs[0] if gs[0].dtype == jax.dtypes.float0 else sum(gs[1:], gs[0])  # float0: of an integer parameter


def _add(s: jax.Array, g: jax.Array) -> jax.Array:
    return s + g.astype(s.dtype)


def _check_chain(x: Any, y: Any) -> None:
    """Raise a ConfigError unless a block's output is like its input, and can go from stage to stage."""
    for v in jax.tree.leaves(x):
        if not (jnp.issubdtype(v.dtype, jnp.floating) or jnp.issubdtype(v.dtype, jnp.integer) or v.dtype == bool):
            raise ConfigError(f"pipeline: {v.dtype} cannot go from stage to stage; give floats, integers or bools")

    def form(x: Any) -> Any:
        return jax.tree.map(lambda v: f"{v.dtype.name}{list(v.shape)}", x)

    if form(x) != form(y):
        raise ConfigError(
            f"the layer stack takes {form(x)} and gives {form(y)}: every layer gives what the next one takes"
        )
