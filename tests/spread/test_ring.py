"""cuDNN's attention on a group, played by plain JAX: XLA's values and gradients, and what is moved."""

from collections import Counter
from math import prod

import jax
import numpy as np
import pytest
from helpers import attention_kernels
from helpers.cuda import needs_cuda_compiler
from helpers.refusals import says
from helpers.sampling import keep
from helpers.spreading import on_shards, total
from helpers.tensor_models import assert_one_device, batches, make_step

from jzero.planner.traced_operations import moves

pytestmark = needs_cuda_compiler  # with which cuDNN comes, whose version JAX asks for
LENGTH, WIDTH = 16, 8
FORWARD, BACKWARD = "dot_product_attention_fwd_wrapper", "dot_product_attention_bwd_wrapper"


@pytest.fixture(autouse=True, scope="module")
def on_cpus():
    attention_kernels.install()


def attend(causal=True, implementation="cudnn", window=None):
    @jax.jit
    def f(q, k, v, *bias):
        return jax.nn.dot_product_attention(
            q, k, v, *bias, is_causal=causal, implementation=implementation, local_window_size=window
        )

    return f


# What two axes divide: rows 0, the sequence 1, heads 2; and how many devices they have.
FORMS = {
    "two": (1, None, 2, 1), "alone": (1, None, 4, 1), "rows": (1, 0, 4, 2), "long": (1, 1, 4, 2), "heads": (1, 2, 4, 2),
    "rows alone": (0, None, 2, 1), "heads alone": (None, 2, 1, 2), "no sequence": (0, 2, 2, 2), "all": (1, 2, 2, 2),
}  # fmt: skip


def operands(heads, kv_heads, form, length=LENGTH, kv_length=LENGTH, bias=None):
    rng = np.random.default_rng(0)
    shapes = [(2, length, heads, WIDTH), *[(2, kv_length, kv_heads, WIDTH)] * 2]
    shapes += [(1, bias, length, kv_length)] if bias else []
    arrays = [rng.normal(size=shape).astype(np.float32) for shape in shapes]
    of_keys = tuple(None if at == 2 and kv_heads % 2 else at for at in form[:2])
    forms = [(form[:2], False), (of_keys, False), (of_keys, False), ((None, None), False)]
    return arrays, forms[: len(arrays)], {"a": form[2], "b": form[3]}


def compare(f, plain, arrays, forms, degrees):
    """Compare with plain JAX; return what attention moves, and what runs on whole arrays."""
    results, gradients, group = on_shards(f, arrays, forms, degrees=degrees)
    gradient = jax.grad(lambda *xs: total(plain(*xs)), argnums=range(len(arrays)))
    expected = jax.jit(lambda *xs: (plain(*xs), *gradient(*xs)))(*arrays)
    for found, x in zip((results, *gradients), expected, strict=True):
        assert np.abs(found - x).max() < 1e-6 * np.abs(x).max()
    moves = [move for move in group.traced.moves if move.primitive in (FORWARD, BACKWARD)]
    return moves, {fallback.primitive for fallback in group.traced.fallbacks}


CASES = [  # heads, key-value heads, form, causal; keys' length, heads of the bias
    (1, 1, "two", True, {}),
    (2, 2, "heads", False, {}),
    (6, 2, "heads", True, {}),
    (2, 1, "alone", False, {"kv_length": 2 * LENGTH}),
    (1, 1, "alone", False, {"kv_length": 2 * LENGTH}),
    (6, 3, "rows", True, {}),
    (4, 1, "long", True, {}),
    (8, 2, "rows", True, {}),  # two devices attend to the same key-value head
    (4, 4, "heads alone", True, {"bias": 1}),
    (4, 2, "rows alone", True, {"bias": 4}),
    (4, 1, "no sequence", True, {"bias": 4}),
    (4, 2, "all", False, {"bias": 1}),
]


@pytest.mark.parametrize(("heads", "kv_heads", "form", "causal", "more"), keep(CASES, [CASES[i] for i in (2, 3, 7)]))
def test_one_device_computes_the_same(heads, kv_heads, form, causal, more):
    at, devices = FORMS[form][:2], FORMS[form][2:]
    arrays = operands(heads, kv_heads, FORMS[form], **more)
    moves, whole = compare(attend(causal), attend(causal, "xla"), *arrays)
    assert not whole
    ring = heads % prod(n for d, n in zip(at, devices, strict=True) if d == 1) > 0
    assert {move.primitive for move in moves if move.kind == "collective-permute"} == (
        {FORWARD, BACKWARD} if ring else set()
    )
    if ring:
        assert {move.kind for move in moves} <= {"collective-permute", "all-to-all"}  # no device has all keys


def test_heads_before_sequence():
    """Of four devices with two heads two share the heads, and two pairs make a ring."""
    moves, _ = compare(attend(), attend(implementation="xla"), *operands(2, 2, FORMS["alone"]))
    found = Counter((move.kind, move.shape) for move in moves if move.primitive == BACKWARD)
    part, half, keys = (2, LENGTH // 4, 2, WIDTH), (2, LENGTH // 4, 1, WIDTH), (2, LENGTH // 2, 1, WIDTH)
    assert found == {
        ("all-to-all", part): 5,  # queries, keys, values, the output and its gradient come
        ("all-to-all", (2, 2, LENGTH // 4)): 1,  # their sums
        ("all-to-all", keys): 3,  # three gradients go
        ("collective-permute", half): 8,  # of two halves one stays where it is
        ("collective-permute", (2, 1, LENGTH // 4)): 1,
        ("collective-permute", keys): 4,  # keys, values and their gradients, around the ring
    }  # fmt: skip


WHOLE = {  # changes of `attend`, and operands: what allows no ring runs on whole arrays
    "window": ({"window": (4, 0)}, (1, 1, FORMS["alone"])),
    "odd": ({}, (1, 1, FORMS["alone"], 12, 12)),  # no two halves of 3 tokens
    "keys": ({}, (1, 1, FORMS["alone"], LENGTH, 2 * LENGTH)),
    "bias": ({}, (6, 2, (1, None, 4, 2), LENGTH, LENGTH, 1)),
    "heads": ({}, (6, 3, FORMS["heads"])),  # three heads of a device need one and a half of keys
}


@pytest.mark.parametrize("case", WHOLE)
def test_what_allows_no_ring_runs_on_whole_arrays(case):
    more, of = WHOLE[case]
    moves, whole = compare(attend(**more), attend(implementation="xla", **more), *operands(*of))
    assert whole == {FORWARD, BACKWARD}
    if case not in ("bias", "heads"):
        assert {move.kind for move in moves} == {"all-gather", "all-reduce"}  # of the output's gradient, in shares


# ------------------------------------------------------------------------------------------- in a step


LAYOUTS = [  # `context_parallel.attention` and the layout: where the heads do not suffice, and where they do
    ("auto", {"context": 4, "stage": 3, "remat": "full", "unroll": False}),
    ("auto", {"context": 2, "tensor": 2, "zero": 2, "stage": 3, "remat": "matmuls"}),
    ("auto", {"context": 4, "tensor": 2, "stage": 1, "unroll": False}),
    ("auto", {"context": 4, "pipe": 2, "accum": 4, "stage": 1}),
    ("ulysses", {"context": 2}),
    ("ring", {"context": 2, "unroll": False}),
    ("ring", {"context": 4, "zero": 2, "stage": 3}),
]


def choice(attention):
    return {"context_parallel": {"attention": attention}}


@pytest.mark.parametrize(("attention", "layout"), keep(LAYOUTS, []), ids=str)
def test_training_is_one_devices(attention, layout):
    assert_one_device("ring", oracle="two-heads", more=choice(attention), **layout)


@pytest.mark.parametrize(("attention", "layout"), keep(LAYOUTS, LAYOUTS[:1]), ids=str)
def test_what_a_step_moves(attention, layout):
    """Two heads: two devices of `context` share them where `tensor` does not divide them, and the rest makes a ring.

    A ring by choice shares no heads.
    """
    step = make_step("ring", more=choice(attention), **layout)
    found = moves(step.trace(batches("ring")[0]), step.mesh)
    assert not found.whole
    of_attention = [move for move in found.all if move.line.startswith("attention.py")]
    kinds = {move.kind for move in of_attention}
    if attention != "auto":
        assert kinds == {"collective-permute" if attention == "ring" else "all-to-all"}
    else:
        assert kinds <= {"collective-permute", "all-to-all"}
        assert {move.part for move in of_attention if move.kind == "collective-permute"} >= {"forward", "backward"}


SHORT = {key: x[:, :6] for key, x in batches("ring")[0].items()}


@pytest.mark.parametrize(
    ("attention", "batch", "layout", "parts"),
    [
        ("ulysses", batches("ring")[0], {"context": 4}, [
            'context_parallel.attention = "ulysses": context 4 do not divide the 2 heads, with 2 of keys',
            "attention.py:", 'what fits: mesh.context = 2 or "auto", which adds a ring where it can',
        ]),
        ("ulysses", batches("ring")[0], {"context": 2, "tensor": 2}, [
            "tensor 2 and context 2 do not divide the 2 heads", 'what fits: "auto"',
        ]),
        # Segments are a mask of their own.
        ("ring", batches()[0], {"context": 2}, [
            'context_parallel.attention = "ring": the attention at attention.py', "has a bias or a mask of its own"
        ]),
        # Two devices need sequences of four parts under a causal mask.
        ("ring", SHORT, {"context": 2}, ["two parts for each of its devices"]),
    ],
    ids=["heads", "heads of tensor", "segments", "length"],
)  # fmt: skip
def test_a_choice_that_cannot_run(attention, batch, layout, parts):
    more = choice(attention) | {"bf16": {"enabled": "segments" in batch}}
    step = make_step("ring", more=more, **layout)
    says(lambda: step.trace(batch), *parts)
