"""The run report of a step with `tensor`: what is moved, in bytes counted by hand, with the model's lines."""

import inspect
import re
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers.tensor_models import BATCH, GPT, SEQUENCE, WIDTH, Block, batches, make_step

import jzero
from jzero.planner.traced_operations import moves
from jzero.run.run_report import step_report

LAYERS = 2
ACTIVATION = BATCH * SEQUENCE * WIDTH * 4
TOKENS = jax.ShapeDtypeStruct((BATCH, SEQUENCE), jnp.int32)


def line_of(cls, text):
    """ "tensor_models.py:31": the only line of a class that contains a text."""
    lines, first = inspect.getsourcelines(cls)
    (number,) = (first + i for i, line in enumerate(lines) if text in line)
    return f"tensor_models.py:{number}"


ATTENTION, FEED_FORWARD = line_of(Block, "self.attn(self"), line_of(Block, "self.down(nnx")
EMBED, HEAD = line_of(GPT, "self.embed(tokens)"), line_of(GPT, "self.head(self")


def moved(step, tokens=TOKENS):
    found = moves(step.trace({"inputs": tokens, "labels": tokens}), step.mesh)
    assert not found.whole
    return {(m.part, m.kind, m.scope, m.line): (m.bytes, m.times) for m in found.all if m.bytes >= ACTIVATION // 4}


def megatrons(size, layers, forward=("forward",)):
    """Two gathers and two scatters a layer and direction; embedding and head once each."""
    gather, scatter, whole = "all-gather", "reduce-scatter", (size, layers)
    layer = {
        (gather, "stack/attn/query", ATTENTION), (scatter, "stack/attn/out", ATTENTION),
        (gather, "stack/up", FEED_FORWARD), (scatter, "stack/down", FEED_FORWARD),
    }  # fmt: skip
    ends = {(scatter, "prefix", EMBED), (gather, "suffix/head", HEAD)}
    other = {gather: scatter, scatter: gather}
    found = {(part, *move): whole for move in layer for part in forward}
    found |= {("backward", other[kind], *where): whole for kind, *where in layer}
    found |= {("forward", *move): (size, layers // LAYERS) for move in ends}
    return found | {("backward", other[kind], *where): (size, layers // LAYERS) for kind, *where in ends}


def test_micro_batches_and_a_second_forward_pass():
    """Two micro-batches move halves twice as often, and nothing else: no entry of an earlier trace is left."""
    step = make_step("nnx", tensor=2, zero=2, stage=3, accum=2, remat="full", unroll=False)
    first = moved(step)
    assert first == moved(step)
    # The last product of a layer is not needed again.
    layer = megatrons(ACTIVATION // 4, 2 * LAYERS, ("forward", "recomputed"))
    layer.pop(("recomputed", "reduce-scatter", "stack/down", FEED_FORWARD))
    assert first == layer


def test_the_report_after_the_first_trace():
    step = make_step("nnx", tensor=2, zero=2, stage=2, unroll=False)
    before = jzero.report(step)
    assert "Moved over" not in before
    assert "stage 2: parameters gathered once a step" in before
    step.prepare([batches()[0]])
    section = re.search(r"Moved over tensor in a step, per device\n(.*?)(\n\n|\Z)", jzero.report(step), re.S)[1]
    rows = [re.split(r"\s{2,}", line.strip()) for line in section.splitlines()]
    row = ["all-gather", "tensor", "8.00 KiB", "2", "16.0 KiB", "forward", "stack/up", FEED_FORWARD]
    assert row in rows
    assert "whole arrays" not in section


class Incomplete:
    """The incomplete gamma function has no rule."""

    divided: ClassVar = {"tensor": {"up": 1}}

    def init(self, rng):
        return {"up": 0.3 * jax.random.normal(rng, (8, 16))}

    def loss(self, params, batch, rng):
        return jax.scipy.special.betainc(2.0, 3.0, jax.nn.sigmoid(batch["x"] @ params["up"])).mean()


class Mixed(nnx.Module):
    """A model without a layer stack, whose tokens are mixed by a function that JAX compiles (FNet)."""

    def __init__(self, rngs):
        self.embed, self.out = nnx.Embed(16, 8, rngs=rngs), nnx.Linear(8, 4, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        return self.out(x + jnp.fft.fft(x, axis=1).real) + jnp.linalg.svd(x, compute_uv=False)[:, None, :1]


def mixed(**more):
    config = {"train_batch_size": 8, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "mesh": {"context": 4}}
    model = jzero.from_flax(lambda rngs: Mixed(rngs=rngs), lambda module, batch: (module(batch) ** 2).mean())
    return jzero.make_train_step(model, config | more)


def test_keys_that_change_nothing_are_named():
    keys = {"context_parallel": {"attention": "ring"}, "tensor_parallel": {"regather": True}}
    text = " ".join(jzero.report(mixed(mesh={"zero": 8}, **keys, expert_parallel={"autoep_size": 4})).split())
    assert "context_parallel.attention: mesh.context is 1, so it changes nothing" in text
    assert "tensor_parallel.regather: mesh.tensor is 1, so it changes nothing" in text
    assert "expert_parallel.autoep_size: expert_parallel.enabled is false" in text
    assert "stage 1, but mesh.zero = 1" in jzero.report(make_step(Incomplete(), tensor=2, stage=1))


def first(length=SEQUENCE):
    return {name: x[:, :length] for name, x in batches()[0].items()}


def scanned(name, **layout):
    return lambda: make_step(name, unroll=False, **layout)


ODD = "mesh.tensor = 2 does not divide the sequence of 3 between layers"
# The price is that of the trace: a layer's queries [16, 8, 4, 8], half of the heads, in float32, of two layers.
GATHERED = rf"XLA's own attention at attention.py:\d+ gathers .* over context, {BATCH * 8 * 2 * 8 * 8 // 1024}.0 KiB"
TILES = r"2 tiles of the sequence of 8 at \w+.py:.*: mesh.context = 4 and mesh.tensor = 2 do not divide a tile"
WHOLE = r"ran on whole arrays: {} \(test_tensor_report\.py:{}\)"
LINE = inspect.getsourcelines(Incomplete.loss)[1] + 1
BOTH, X, MIXED = {"tensor": 2, "context": 2}, {"x": np.ones((BATCH, 8), np.float32)}, jnp.zeros((8, 8), jnp.int32)
FOUND = [  # (step, its batch, what is in the report; after "not" what is not there)
    # Of 8 tokens both axes take their part, of 6 context alone; of a tile of 4 three axes of 8 devices none.
    (scanned("tiled", **BOTH), first(), GATHERED, "not", "does not divide", "tiles of the sequence"),
    (scanned("tiled", context=4, tensor=2), first(), TILES + " of 4, so the sequence is .*; fix: 1 tiles"),
    (scanned("decoder", **BOTH), first(6), ODD, "a multiple of 4", "not", "mesh.context"),
    # An operation of JAX's own functions has the line of the model's call; a divided sequence is no warning.
    (mixed, MIXED, WHOLE.format("svd", r"\d+"), "not", r"fft \(", "does not divide the sequence"),
    (mixed, MIXED[:, :6], "mesh.context = 4 does not divide the sequence of 6: every device computes the whole"),
    (lambda: make_step(Incomplete(), tensor=2), X, WHOLE.format("regularized_incomplete_beta", LINE)),
]  # fmt: skip


@pytest.mark.parametrize("case", FOUND, ids=lambda case: case[2] if case[2] != "not" else "no " + case[3])
def test_what_the_report_says_of_a_trace(case):
    make, batch, *patterns = case
    step = make()
    step.prepare([batch])
    text = " ".join(step_report(step).split())
    there = patterns.index("not") if "not" in patterns else len(patterns)
    for i, pattern in enumerate(patterns):
        assert pattern == "not" or (re.search(pattern, text) is not None) == (i < there), (pattern, text)
