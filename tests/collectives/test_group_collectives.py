"""The compiled H100 program moves over `tensor`, `context` and `expert` what the papers say, and nothing else.

- `tensor`: for each layer 2 all-gathers and 2 reduce-scatters of an activation forward, and as many backward
  (Korthikanti et al., arXiv:2205.05198, figure 5); a gather and a scatter for each end; no device gets all logits.
- `context`: for each layer all-to-alls of queries, keys, values and the output, forward and backward (Jacobs et al.,
  arXiv:2309.14509, section 3). What a ring moves, where the heads do not suffice, is in `spread/test_ring`.
- `expert`: two all-to-alls a layer forward, and two backward (Lepikhin et al., arXiv:2006.16668, section 3).
"""

import pytest
from helpers.named_models import model_of
from helpers.programs import SMALL, collectives_of, counted, h100s, needs_gpu_programs, of_every_leaf, pairs, traced
from helpers.steps import settings
from helpers.tensor_models import BATCH
from helpers.tensor_models import SEQUENCE as SHORT

from jzero.planner.traced_operations import moves
from models.decoder_config import DecoderConfig
from models.llama import LlamaConfig
from models.moe import MixtureConfig

pytestmark = needs_gpu_programs

LAYERS, TENSOR, F32, BF16 = 2, 2, 4, 2
LLAMA = LlamaConfig(LAYERS, 64, 4, 2, 96, vocab_size=128, attention="xla")


@pytest.mark.slow
def test_a_layer_moves_two_and_two_forward_and_backward():
    """Queries, keys and values are one product, and so are gate and up: a layer moves what it would with them apart."""
    config = settings(BATCH, gradient_clipping=1)
    step, trace = traced(model_of(LLAMA), h100s(zero=1, tensor=TENSOR), pairs(BATCH, SHORT), **config)
    tokens, width, divided = BATCH * SHORT, 64, 6  # divided: embedding, head, and a layer's four kernels
    assert counted(collectives_of(step, trace), "kind", "dtype", "bytes") == {
        ("all-gather", "bf16", width * tokens * BF16): 4 * LAYERS + 2,
        ("reduce-scatter", "bf16", width * tokens * BF16): 4 * LAYERS + 1,
        ("reduce-scatter", "f32", width * tokens * F32): 1,  # the embedding's lookup, which is in float32
        ("all-reduce", "bf16", width * BF16): 2 * LAYERS + 1,  # the norms' gradients
        ("all-gather", "f32", TENSOR * tokens * F32): 1,  # the maximum of the logits
        ("all-reduce", "f32", tokens * F32): 3,  # the exponentials' sum and the label's logit, and one backward
        ("all-reduce", "f32", F32 * divided): 1,  # the gradient's norm: one number per parameter
    }


@pytest.mark.slow
def test_a_pipeline_sends_this_devices_part_of_the_sequence():
    """Both ways, half the bytes: activations are divided between layers, and so between stages."""
    rows, accum, width = 2, 4, 64
    config, mesh = settings(rows * accum, accum=accum, gradient_clipping=1), h100s(pipe=2, tensor=TENSOR)
    step, trace = traced(model_of(LLAMA), mesh, pairs(rows * accum, SHORT), **config)
    found = counted(collectives_of(step, trace).select(kind="collective-permute"), "axes", "dtype", "bytes")
    ticks = accum + 1  # with a forward pass, and as many with a backward pass
    # Nobody reads what the last tick sends back, and XLA drops it.
    assert found == {(("pipe",), "bf16", rows * SHORT * width * BF16 // TENSOR): 2 * ticks - 1}


ROWS, SEQUENCE, WIDTH, HEADS, KV_HEADS = 4, 128, 256, 8, 4


def test_four_all_to_alls_forward_and_backward_in_each_layer():
    """Of what one device holds: two of queries' size, with the output, and two of keys', with the values."""
    shape = LlamaConfig(1, WIDTH, HEADS, KV_HEADS, 512, vocab_size=1024, attention="cudnn")
    config = settings(ROWS, gradient_clipping=1)
    step, trace = traced(model_of(shape), h100s(context=2), pairs(ROWS, SEQUENCE), **config)
    queries, both = ROWS * SEQUENCE * WIDTH * BF16 // 2, 2 * 2
    expected = of_every_leaf("all-reduce", ("context",), step)
    expected["all-to-all", ("context",), queries] = both
    expected["all-to-all", ("context",), queries * KV_HEADS // HEADS] = both
    assert counted(collectives_of(step, trace), "kind", "axes", "bytes", smallest=SMALL) == expected


@pytest.mark.slow
@pytest.mark.parametrize(("capacity_factor", "rows"), [(1.0, 1), (None, 2)])  # None: all rows, to each of two devices
def test_all_to_alls_and_nothing_of_the_experts(capacity_factor, rows):
    """Gradients of other parameters are all-reduced once a step at stage 0."""
    batch, length, top = 16, 256, 2
    mixture = MixtureConfig(4, top, 128, capacity_factor=capacity_factor)
    shape = DecoderConfig(LAYERS, WIDTH, 4, 2, 0, vocab_size=512, attention="cudnn", mixture=mixture)
    decoder = model_of(shape)
    step, trace = traced(decoder, h100s(expert=2), pairs(batch, length), train_batch_size=batch)
    kind, tokens = "all-to-all", rows * batch // 2 * length * top * WIDTH * BF16
    expected = of_every_leaf("all-reduce", ("expert",), step, lambda layout: "expert" not in layout.axes)
    expected[kind, ("expert",), tokens] = 2 * 2 * LAYERS
    program = collectives_of(step, trace)
    assert counted(program, "kind", "axes", "bytes", smallest=SMALL) == expected
    assert {row.axes for row in program} == {("expert",)}
    moved = moves(trace, step.mesh)
    assert sum(move.times for move in moved.all if move.kind == kind) == 2 * 2 * LAYERS
    assert {move.bytes for move in moved.all if move.kind == kind} == {tokens}
    assert not moved.whole
