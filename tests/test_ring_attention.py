"""Training where the heads do not suffice for `context`: the losses, gradient norms and parameters of one device.

The oracle is plain JAX with XLA's attention. cuDNN's kernels are replaced by plain JAX (`helpers.attention_kernels`);
their rules on arrays are in spread/test_ring, the compiled program in test_context_collectives.
"""

import jax
import pytest
from helpers import attention_kernels
from helpers.cuda import needs_cuda_compiler
from helpers.sampling import keep
from helpers.tensor_models import batches, errors

from jzero.planner.moves import moves
from jzero.planner.products import BACKWARD, FORWARD

pytestmark = needs_cuda_compiler  # with which cuDNN comes, whose version JAX asks for
LAYOUTS = [
    {"context": 4, "zero": 2, "stage": 3},
    {"context": 4, "zero": 2, "stage": 3, "remat": "full", "unroll": False, "accum": 2},
    {"context": 2, "tensor": 2, "zero": 2, "stage": 2},
    {"context": 2, "tensor": 2, "zero": 2, "stage": 3, "remat": "matmuls"},
    {"context": 4, "tensor": 2, "stage": 1, "unroll": False},
    {"context": 4, "pipe": 2, "accum": 4, "stage": 1},
]
SAMPLE = [LAYOUTS[1], LAYOUTS[2]]


@pytest.fixture(autouse=True, scope="module")
def on_cpus():
    attention_kernels.install()


@pytest.mark.parametrize("layout", keep(LAYOUTS, SAMPLE), ids=lambda x: "-".join(f"{k}{v}" for k, v in x.items()))
def test_one_device_computes_the_same(layout):
    """Two heads: two devices of `context` share them where `tensor` does not divide them, and the rest makes a ring."""
    losses, parameters, step, _ = errors("ring", oracle="two-heads", **layout)
    assert losses < 1e-6
    assert parameters < 2e-6
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batches("ring")[0])
    found = moves(step.trace(shapes), step.mesh)
    assert not found.whole
    attention = [move for move in found.all if move.line.startswith("attention.py")]
    assert {move.kind for move in attention} <= {"collective-permute", "all-to-all"}
    assert {move.part for move in attention if move.kind == "collective-permute"} >= {FORWARD, BACKWARD}
