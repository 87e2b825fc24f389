"""The compiled H100 program of an unmodified NNX model holds Megatron's collectives over `tensor`, and no others.

Expected are, for each layer, 2 all-gathers and 2 reduce-scatters of an activation forward, and as many backward
(Korthikanti et al., arXiv:2205.05198, figure 5); for the embedding one reduce-scatter forward and one all-gather
backward, for the head the reverse. Once a step the gradients of norms and of biases of row-divided products are
all-reduced. Per token the loss needs the maximum of its logits, the sum of their exponentials and the label's logit; no
device gets all logits.
"""

import jax
import pytest
from helpers.programs import collectives_of, counted, h100s, needs_gpu_programs, pairs, traced
from helpers.tensor_models import BATCH, DIMENSIONS, SEQUENCE, WIDTH, model

import jzero
from models.llama import Llama, LlamaConfig

pytestmark = needs_gpu_programs

LAYERS, TENSOR, F32, BF16 = 2, 2, 4, 2
LLAMA = LlamaConfig(LAYERS, 64, 4, 2, 96, vocab_size=128, attention="xla")


def compiled(subject, dimensions, *, stage=0, zero=1):
    """The collectives of a step, one by one: (kind, dtype, axes, bytes) -> how many."""
    step, trace = traced(
        subject, h100s(zero=zero, tensor=TENSOR), pairs(BATCH, SEQUENCE), train_batch_size=BATCH,
        zero_optimization={"stage": stage, "stage3_param_persistence_threshold": 0},
        tensor_parallel={"dimensions": dimensions},
    )  # fmt: skip
    return counted(collectives_of(step, trace), "kind", "dtype", "axes", "bytes")


def over_tensor(found):
    return {row[:2] + row[3:]: times for row, times in found.items() if row[2] == ("tensor",)}


def moved(rows):
    """What `tensor` moves, with GPT's positions, which are float32, so that its activations are too."""
    tokens = rows * SEQUENCE * F32  # a number for each token
    whole_leaves = 6 * LAYERS + 2  # two norms, the biases of `out` and `down`; the last norm
    return {
        ("all-gather", "f32", WIDTH * tokens): 4 * LAYERS + 2,
        ("reduce-scatter", "f32", WIDTH * tokens): 4 * LAYERS + 2,
        ("all-gather", "f32", TENSOR * tokens): 1,  # the maximum of the logits, which has no gradient
        ("all-reduce", "f32", tokens): 2,  # the sum of the exponentials, forward and backward
        ("reduce-scatter", "f32", tokens): 1,  # the label's logit
        ("all-gather", "f32", tokens): 1,
    }, whole_leaves


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "zero"), [(0, 1), (3, 2)])
def test_a_layer_moves_two_and_two_forward_and_backward(stage, zero):
    """With ZeRO-3 rows are half as many, `zero` gathers halves of the divided weights, and no more changes."""
    found = compiled(model("nnx"), DIMENSIONS["nnx"], stage=stage, zero=zero)
    expected, whole_leaves = moved(BATCH // zero)
    expected[("all-reduce", "bf16", WIDTH * BF16 // zero)] = whole_leaves
    ours = over_tensor(found)
    sums = ours.pop(("all-reduce", "f32", F32), 0)
    if stage == 0:
        divided = len(jax.tree.leaves(jax.eval_shape(model("nnx").init, jax.random.key(0)))) - 8
        expected[("all-reduce", "f32", F32 * divided)] = 1  # the gradient's norm: one number per parameter
        assert sums == 2  # of the loss, and of its gradient
    else:
        largest = max(row[3] for row in found if row[0] == "all-gather" and row[2] == ("zero",))
        assert largest == 4 * WIDTH * WIDTH * BF16 // TENSOR  # a feed-forward kernel's part
    assert ours == expected


@pytest.mark.slow
def test_a_llamas_fused_weights_move_nothing_more():
    """Queries, keys and values are one product, and so are gate and up: a layer moves what it would with them apart."""
    found = over_tensor(compiled(jzero.from_flax(lambda rngs: Llama(LLAMA, rngs=rngs)), {}))
    tokens, width, divided = BATCH * SEQUENCE, 64, 6  # divided: embedding, head, and a layer's four kernels
    assert found == {
        ("all-gather", "bf16", width * tokens * BF16): 4 * LAYERS + 2,
        ("reduce-scatter", "bf16", width * tokens * BF16): 4 * LAYERS + 1,
        ("reduce-scatter", "f32", width * tokens * F32): 1,  # the embedding's lookup, which is in float32
        ("all-reduce", "bf16", width * BF16): 2 * LAYERS + 1,  # the norms' gradients
        ("all-gather", "f32", TENSOR * tokens * F32): 1,  # the maximum of the logits
        ("all-reduce", "f32", tokens * F32): 3,  # the exponentials' sum and the label's logit, and one backward
        ("all-reduce", "f32", F32 * divided): 1,  # the gradient's norm: one number per parameter
    }


@pytest.mark.slow
@pytest.mark.parametrize("tensor", [1, 2])
def test_a_pipeline_sends_this_devices_part_of_the_sequence(tensor):
    """Both ways, with `tensor` 2 half the bytes: activations are divided between layers, and so between stages."""
    rows, accum, width = 2, 4, 64
    step, trace = traced(
        jzero.from_flax(lambda rngs: Llama(LLAMA, rngs=rngs)), h100s(pipe=2, tensor=tensor),
        pairs(rows * accum, SEQUENCE), train_micro_batch_size_per_gpu=rows, gradient_accumulation_steps=accum,
    )  # fmt: skip
    found = counted(collectives_of(step, trace).select(kind="collective-permute"), "axes", "dtype", "bytes")
    ticks = accum + 1  # with a forward pass, and as many with a backward pass
    # Nobody reads what the last tick sends back, and XLA drops it.
    assert found == {(("pipe",), "bf16", rows * SEQUENCE * width * BF16 // tensor): 2 * ticks - 1}
