"""The compiled H100 program of a pipeline: its collectives, tick by tick, and memory that does not grow with the step.

What is expected follows from the schedule's table (`jzero.pipeline.schedules`), the ZeRO table (`layout.zero`) and the
shapes. F, B, W are ticks; a micro-batch enters with E (the embedding, of which every stage has rows), leaves with S
(the last stage's output, the head's gradient, the softmax's maximum and sums), and its gradient is back with G. Stage 3
gathers with F, and again with B what the gradient of a layer's input needs, which is no bias; W needs no weights.
"""

from collections import Counter
from dataclasses import replace
from math import prod

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.named_models import model_of
from helpers.pipelines import Case, Decoder
from helpers.programs import SIZE, WITH_CUBLAS, collectives_of, h100s, needs_gpu_programs, one_by_one, pairs, traced
from helpers.sampling import keep, some

from jzero.pipeline import vocab_parallel
from jzero.pipeline.schedules import make_program, make_schedule
from jzero.planner import collectives, memory
from models.llama import LlamaConfig

pytestmark = needs_gpu_programs
MICRO, SEQUENCE, WIDTH, VOCAB = 2, 4, 24, 64


class Scaled(Decoder):
    """Ends with the vocabulary on `pipe`, and a scale that is not. No two leaves have the same size."""

    def init(self, rng):
        ends = {"embed": (VOCAB, WIDTH), "scale": (WIDTH,), "head": (WIDTH, 2 * VOCAB)}
        wide = self.layers, 2 * WIDTH
        stack = {"w": (self.layers, WIDTH, 2 * WIDTH), "v": (*wide, 2 * WIDTH), "b": wide}
        return jax.tree.map(jnp.ones, {"ends": ends, "stack": stack}, is_leaf=lambda x: isinstance(x, tuple))

    def block(self, layer, x, rng):
        return x + jnp.tanh(jnp.tanh(x @ layer["w"] + layer["b"]) @ layer["v"])[..., :WIDTH]

    def suffix(self, ends, x, batch, rng):
        return vocab_parallel.cross_entropy(x * ends["scale"], ends["head"], batch["labels"])


def step_of(case, model, rows, length, options=WITH_CUBLAS, **more):
    config = case.config(train_micro_batch_size_per_gpu=rows, **more)
    batch = pairs(rows * case.micro * case.data * case.zero, length)
    return traced(model, h100s(pipe=case.stages, data=case.data, zero=case.zero), batch, options, **config)


def ticks(table):
    """work -> how many ticks have it. Where it is split, D is the input's part of the backward pass, W the weights'."""
    backward, weight = table.backward, table.weight or table.backward
    whole = (np.array(backward) == np.array(weight)).all(axis=(0, 2))
    some = {name: work.active.any(axis=1) for name, work in (("F", table.forward), ("D", backward), ("W", weight))}
    works = {"F": some["F"], "B": some["D"] & whole, "D": some["D"] & ~whole, "W": some["W"] & ~whole}
    return {name: int(there.sum()) for name, there in works.items()} | dict.fromkeys("ESG", table.micro_batches)


def expected(case, loop=False):
    """The tables as a Counter of (kind, dtype, axes, bytes) -> arrays moved."""
    moved, norms, sizes = Counter(), Counter(), {"pipe": case.stages, "data": case.data, "zero": case.zero}
    table = make_schedule(case.schedule, case.stages, case.micro, case.chunks)
    at, alone = ticks(table), [what for what, n in make_program(table).runs if isinstance(what, str) and n == 1]
    depth, tokens = 1 + loop, MICRO * SEQUENCE
    gather = {0: None, 1: "step", 2: "step", 3: case.gather or "micro_batch"}[case.stage]

    def add(kind, dtype, axes, elements, times):
        axes = tuple(axis for axis in sizes if axis in axes and sizes[axis] > 1)
        if axes and times:
            moved[kind, dtype, axes, elements * SIZE[dtype]] += times

    unread = any("b" in what and "S" not in what for what in alone)  # the last tick with B
    add("collective-permute", "bf16", ["pipe"], tokens * WIDTH, at["F"] + at["B"] + at["D"] - unread)
    add("all-reduce", "bf16", ["pipe"], tokens * WIDTH, at["E"] + 2 * at["S"] + at["G"])
    add("all-reduce", "f32", ["pipe"], tokens, at["S"])
    add("all-reduce", "f32", ["pipe"], 2 * tokens, at["S"])
    # The first stage's sums and counts of the micro-batches' losses, to all stages and over the replicas: XLA makes one
    # all-reduce of the two.
    add("all-reduce", "f32", ["pipe", "data", "zero"], 2 * case.micro, 1)
    add("all-reduce", "f32", ["data", "zero"], 1, 1)  # the total count, which the gradients are divided by

    def gathers(works, loop):
        """In so many ticks any of these works; all of those that are no loop's are one."""
        same = max(0, sum(bool(set(works) & set(what.upper())) for what in alone) - 1)
        return sum(at[work] for work in works) - (0 if loop else same)

    def leaf(shape, needed, reduced, on_pipe=True, layers=1, together=1, loop=False):
        """`needed`, `reduced`: in which ticks, by their works; `together`: that many are one array once a step."""
        arrays, together = (1, layers * together) if loop else (layers, together)
        one, over_pipe = prod(shape), [] if on_pipe else ["pipe"]
        norms[on_pipe] += 1
        if not case.stage:
            add("all-reduce", "bf16", [*over_pipe, "data", "zero"], together * one, arrays)
            return
        if gather == "step":
            add("all-gather", "bf16", ["zero"], together * one, arrays)
        else:
            add("all-gather", "bf16", ["zero"], one, layers * sum(gathers(works, loop) for works in needed))
        if case.stage == 1:
            add("reduce-scatter", "bf16", ["zero"], together * one, arrays)
        else:
            add("reduce-scatter", "bf16", ["zero"], one, layers * sum(at[work] for work in reduced))
        add("all-reduce", "bf16", [*over_pipe, "data"], together * one // case.zero, arrays)

    shapes = jax.eval_shape(Scaled(1).init, jax.random.key(0))
    for name, x in shapes["stack"].items():
        works = ["F", "BD"], "BD" if name == "b" else "BW"
        if name == "b" and table.weight is not None:  # whole backward passes add the bias again, in the chain's kernel
            works = ["F"], "BD"
        leaf(x.shape[1:], *works, layers=depth, together=case.chunks, loop=loop)
        chunk = depth * prod(x.shape[1:]) // (case.zero if case.stage else 1)
        if case.chunks % case.stages == 0:
            add("all-to-all", "bf16", ["pipe"], case.chunks * chunk, 2)
        elif case.chunks > 1:
            add("collective-permute", "bf16", ["pipe"], chunk, 2 * case.chunks)
    leaf((VOCAB // case.stages, WIDTH), ["E"], "G")
    leaf((WIDTH,), ["S"], "S", on_pipe=False)
    leaf((WIDTH, 2 * VOCAB // case.stages), ["S"], "S")
    for on_pipe, leaves in norms.items():  # the gradient's norm
        add("all-reduce", "f32", [*["pipe"] * on_pipe, *["zero"] * (case.stage > 0)], leaves, 1)
    return moved


ALL = [
    (Case("1f1b", 2, 4, 3, 2), False),
    (Case("gpipe", 4, 6, 0, 1, 2), False),
    (Case("zero_bubble", 4, 8, 2, 2, chunks=2), False),
    (Case("1f1b", 4, 8, 3, 2), False),
    (Case("interleaved", 4, 8, 3, 2, chunks=2), False),
    (Case("zero_bubble", 4, 8, 3, 2), False),
    (Case("interleaved", 2, 4, 3, 2, 2, chunks=2, gather="step"), False),
    # With two layers a chunk, in a loop.
    (Case("1f1b", 2, 4, 3, 2, 2), True),
]


@pytest.mark.parametrize(("case", "loop"), keep(ALL, ALL[:1]), ids=str)
def test_collectives_are_the_tables(case, loop):
    more = {"stack": {"unroll": False}} if loop else {}
    layers = case.stages * case.chunks * (1 + loop)
    program = collectives_of(*step_of(case, Scaled(layers), MICRO, SEQUENCE, **more))
    assert one_by_one(program, lambda row: (row.kind, row.dtype, row.axes, row.bytes)) == expected(case, loop)
    for row in program.select(kind="collective-permute"):
        activations = row.bytes == MICRO * SEQUENCE * WIDTH * SIZE["bf16"]
        assert row.axes == ("pipe",)
        assert activations or row.loops == ()  # the layers go to their places and back once a step


LLAMA = LlamaConfig(8, 256, 4, 2, 512, vocab_size=256, attention="xla")  # small next to its activations
TOKENS = 1024


def plan(schedule, chunks, micro):
    case = Case(schedule, 4, micro, chunks=chunks)
    step, trace = step_of(case, model_of(replace(LLAMA, num_layers=4 * chunks)), 1, TOKENS, options={})
    program = trace.lower().compile()
    return memory(program), collectives(program, step.mesh)


@pytest.mark.parametrize(
    ("schedule", "chunks"), some([("1f1b", 1), ("interleaved", 2), ("zero_bubble", 1)], [("zero_bubble", 1)])
)
def test_memory_does_not_grow_with_the_micro_batches(schedule, chunks):
    few, many = (plan(schedule, chunks, micro) for micro in (8, 64))
    assert many[0].peak == pytest.approx(few[0].peak, rel=0.01)
    # What 56 more micro-batches add is runs of a loop: in a tick of it one permute each way.
    steady = [row for row in many[1].select(kind="collective-permute", dtype="bf16") if row.times == 56]
    assert sum(row.operands for row in steady) == 2 * chunks
    assert {row.bytes // row.operands for row in steady} == {TOKENS * LLAMA.d_model * SIZE["bf16"]}
    assert many[1].select(kind="collective-permute").operands - few[1].select(kind="collective-permute").operands == (
        2 * 56 * chunks
    )
