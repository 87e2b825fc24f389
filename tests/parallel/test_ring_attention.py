"""Training where the heads do not suffice for `context`: the losses, gradient norms and parameters of one device.

The oracle is plain JAX with XLA's attention. cuDNN's kernels are replaced by plain JAX (`helpers.attention_kernels`);
their rules on arrays are in spread/test_ring, the compiled program in test_context_collectives.
"""

import jax
import pytest
from helpers import attention_kernels
from helpers.cuda import needs_cuda_compiler
from helpers.sampling import keep
from helpers.tensor_models import batches, errors, make_step

from jzero.errors import ConfigError
from jzero.planner.traced_collectives import moves
from jzero.planner.traced_matmuls import BACKWARD, FORWARD

pytestmark = needs_cuda_compiler  # with which cuDNN comes, whose version JAX asks for
LAYOUTS = [
    {"context": 4, "zero": 2, "stage": 3},
    {"context": 4, "zero": 2, "stage": 3, "remat": "full", "unroll": False, "accum": 2},
    {"context": 2, "tensor": 2, "zero": 2, "stage": 2},
    {"context": 2, "tensor": 2, "zero": 2, "stage": 3, "remat": "matmuls"},
    {"context": 4, "tensor": 2, "stage": 1, "unroll": False},
    {"context": 4, "pipe": 2, "accum": 4, "stage": 1},
]
SAMPLE = [LAYOUTS[1]]


@pytest.fixture(autouse=True, scope="module")
def on_cpus():
    attention_kernels.install()


@pytest.mark.parametrize("layout", keep(LAYOUTS, SAMPLE), ids=lambda x: "-".join(f"{k}{v}" for k, v in x.items()))
def test_one_device_computes_the_same(layout):
    """Two heads: two devices of `context` share them where `tensor` does not divide them, and the rest makes a ring."""
    losses, parameters, step, _ = errors("ring", oracle="two-heads", **layout)
    assert losses < 1e-6
    assert parameters < 2e-6
    attention = moves_of_attention(step)
    assert {move.kind for move in attention} <= {"collective-permute", "all-to-all"}
    assert {move.part for move in attention if move.kind == "collective-permute"} >= {FORWARD, BACKWARD}


def moves_of_attention(step):
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batches("ring")[0])
    found = moves(step.trace(shapes), step.mesh)
    assert not found.whole
    return [move for move in found.all if move.line.startswith("attention.py")]


# ------------------------------------------------------------------ context_parallel.attention

CHOICES = [
    ("auto", {"context": 2}, {"all-to-all"}),
    ("ulysses", {"context": 2}, {"all-to-all"}),
    ("ring", {"context": 2}, {"collective-permute"}),
    ("ring", {"context": 4, "zero": 2, "stage": 3}, {"collective-permute"}),
]


@pytest.mark.parametrize(("attention", "layout", "kinds"), keep(CHOICES, CHOICES[1:3]))
def test_a_choice_is_what_runs(attention, layout, kinds):
    """Two heads suffice for two devices; a ring by choice shares no heads."""
    losses, parameters, step, _ = errors("ring", oracle="two-heads", attention=attention, **layout)
    assert losses < 1e-6
    assert parameters < 2e-6
    assert {move.kind for move in moves_of_attention(step)} == kinds


def refusal(name, batch, **layout):
    step = make_step(name, **layout)
    with pytest.raises(ConfigError) as error:
        step.trace(jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch))
    return str(error.value)


def test_ulysses_needs_heads():
    text = refusal("ring", batches("ring")[0], attention="ulysses", context=4, tensor=1)
    assert text.startswith(
        'context_parallel.attention = "ulysses": context 4 do not divide the 2 heads, with 2 of keys'
    )
    assert "attention.py:" in text
    assert text.endswith('what fits: mesh.context = 2 or "auto", which adds a ring where it can')
    text = refusal("ring", batches("ring")[0], attention="ulysses", context=2, tensor=2)
    assert "tensor 2 and context 2 do not divide the 2 heads" in text
    assert 'what fits: "auto"' in text


def test_a_ring_needs_plain_attention():
    """Segments are a mask of their own; two devices need sequences of four parts under a causal mask."""
    text = refusal("ring", batches()[0], attention="ring", context=2, precision={"bf16": {"enabled": True}})
    assert 'context_parallel.attention = "ring": the attention at attention.py' in text
    assert "has a bias or a mask of its own" in text
    short = {key: x[:, :6] for key, x in batches("ring")[0].items()}
    assert "two parts for each of its devices" in refusal("ring", short, attention="ring", context=2)
