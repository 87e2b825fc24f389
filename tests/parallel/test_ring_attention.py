"""Rings of `context` where heads do not suffice: plain JAX on one device; plain JAX also plays cuDNN's kernels."""

import jax
import pytest
from helpers import attention_kernels
from helpers.cuda import needs_cuda_compiler
from helpers.refusals import says
from helpers.sampling import keep
from helpers.tensor_models import assert_one_device, batches, make_step

from jzero.planner.traced_operations import BACKWARD, FORWARD, moves

pytestmark = needs_cuda_compiler  # with which cuDNN comes, whose version JAX asks for
LAYOUTS = [  # `context_parallel.attention` and the layout: where the heads do not suffice, and where they do
    ("auto", {"context": 4, "stage": 3, "remat": "full", "unroll": False}),
    ("auto", {"context": 2, "tensor": 2, "zero": 2, "stage": 3, "remat": "matmuls"}),
    ("auto", {"context": 4, "tensor": 2, "stage": 1, "unroll": False}),
    ("auto", {"context": 4, "pipe": 2, "accum": 4, "stage": 1}),
    ("ulysses", {"context": 2}),
    ("ring", {"context": 2, "unroll": False}),
    ("ring", {"context": 4, "zero": 2, "stage": 3}),
]
DEFAULT = LAYOUTS[:1]  # it shares the heads, too, as "ulysses" does


@pytest.fixture(autouse=True, scope="module")
def on_cpus():
    attention_kernels.install()


def choice(attention):
    return {"context_parallel": {"attention": attention}}


@pytest.mark.parametrize(("attention", "layout"), keep(LAYOUTS, DEFAULT), ids=str)
def test_one_device_computes_the_same(attention, layout):
    """Two heads: two devices of `context` share them where `tensor` does not divide them, and the rest makes a ring.

    A ring by choice shares no heads.
    """
    step = assert_one_device("ring", oracle="two-heads", more=choice(attention), **layout)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batches("ring")[0])
    found = moves(step.trace(shapes), step.mesh)
    assert not found.whole
    of_attention = [move for move in found.all if move.line.startswith("attention.py")]
    kinds = {move.kind for move in of_attention}
    if attention != "auto":
        assert kinds == {"collective-permute" if attention == "ring" else "all-to-all"}
    else:
        assert kinds <= {"collective-permute", "all-to-all"}
        assert {move.part for move in of_attention if move.kind == "collective-permute"} >= {FORWARD, BACKWARD}


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
    says(lambda: step.trace(jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch)), *parts)
