"""The compiled H100 program moves over `tensor`, `context` and `expert` what the papers say, and nothing else.

- `tensor`: for each layer 2 all-gathers and 2 reduce-scatters of an activation forward, and as many backward
  (Korthikanti et al., arXiv:2205.05198, figure 5); a gather and a scatter for each end; no device gets all logits.
- `context`: for each layer all-to-alls of queries, keys, values and the output, forward and backward (Jacobs et al.,
  arXiv:2309.14509, section 3). Where the heads do not suffice, keys, values and their gradients go around a ring.
- `expert`: two all-to-alls a layer forward, and two backward (Lepikhin et al., arXiv:2006.16668, section 3).

ZeRO gathers and scatters over (`zero`, `context`) in one collective.
"""

from collections import Counter

import jax
import pytest
from helpers.named_models import model_of
from helpers.programs import SMALL, collectives_of, counted, h100s, needs_gpu_programs, of_every_leaf, pairs, traced
from helpers.sampling import some
from helpers.steps import settings
from helpers.tensor_models import BATCH, DIMENSIONS, model
from helpers.tensor_models import SEQUENCE as SHORT
from helpers.tensor_models import WIDTH as NARROW

from jzero.planner.traced_operations import moves
from models.decoder_config import DecoderConfig
from models.llama import LlamaConfig
from models.moe import MixtureConfig

pytestmark = needs_gpu_programs

LAYERS, TENSOR, F32, BF16 = 2, 2, 4, 2
LLAMA = LlamaConfig(LAYERS, 64, 4, 2, 96, vocab_size=128, attention="xla")


def with_tensor(subject, dimensions, *, stage=0, zero=1):
    config = settings(BATCH, stage, gradient_clipping=1, tensor_parallel={"dimensions": dimensions})
    step, trace = traced(subject, h100s(zero=zero, tensor=TENSOR), pairs(BATCH, SHORT), **config)
    return counted(collectives_of(step, trace), "kind", "dtype", "axes", "bytes")


def over_tensor(found):
    return {row[:2] + row[3:]: times for row, times in found.items() if row[2] == ("tensor",)}


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "zero"), [(0, 1), (3, 2)])
def test_a_layer_moves_two_and_two_forward_and_backward(stage, zero):
    """With ZeRO-3 rows are half as many, and `zero` gathers halves. GPT's activations are float32."""
    found = with_tensor(model("nnx"), DIMENSIONS["nnx"], stage=stage, zero=zero)
    tokens = BATCH // zero * SHORT * F32  # a number for each token
    expected = {
        ("all-gather", "f32", NARROW * tokens): 4 * LAYERS + 2,
        ("reduce-scatter", "f32", NARROW * tokens): 4 * LAYERS + 2,
        ("all-gather", "f32", TENSOR * tokens): 1,  # the maximum of the logits, which has no gradient
        ("all-reduce", "f32", tokens): 2,  # the sum of the exponentials, forward and backward
        ("reduce-scatter", "f32", tokens): 1,  # the label's logit
        ("all-gather", "f32", tokens): 1,
        # Whole leaves: two norms, the biases of `out` and `down`; the last norm.
        ("all-reduce", "bf16", NARROW * BF16 // zero): 6 * LAYERS + 2,
    }
    ours = over_tensor(found)
    sums = ours.pop(("all-reduce", "f32", F32), 0)
    if stage == 0:
        divided = len(jax.tree.leaves(jax.eval_shape(model("nnx").init, jax.random.key(0)))) - 8
        expected[("all-reduce", "f32", F32 * divided)] = 1  # the gradient's norm: one number per parameter
        assert sums == 2  # of the loss, and of its gradient
    else:
        largest = max(row[3] for row in found if row[0] == "all-gather" and row[2] == ("zero",))
        assert largest == 4 * NARROW * NARROW * BF16 // TENSOR  # a feed-forward kernel's part
    assert ours == expected


@pytest.mark.slow
def test_a_llamas_fused_weights_move_nothing_more():
    """Queries, keys and values are one product, and so are gate and up: a layer moves what it would with them apart."""
    found = over_tensor(with_tensor(model_of(LLAMA), {}))
    tokens, width, divided = BATCH * SHORT, 64, 6  # divided: embedding, head, and a layer's four kernels
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


def with_context(*, stage=0, layers=LAYERS, width=WIDTH, heads=HEADS, kv_heads=KV_HEADS, **mesh):
    shape = LlamaConfig(layers, width, heads, kv_heads, 512, vocab_size=1024, attention="cudnn")
    config = settings(ROWS, stage, gradient_clipping=1)
    step, trace = traced(model_of(shape), h100s(**mesh), pairs(ROWS, SEQUENCE), **config)
    return counted(collectives_of(step, trace), "kind", "axes", "bytes", smallest=SMALL), step


def all_to_alls(rows, layers=LAYERS):
    """What one device holds of queries and of keys: both forward and backward, with the output and the values."""
    queries = rows * SEQUENCE * WIDTH * BF16 // 2
    both = 2 * 2 * layers
    return {
        ("all-to-all", ("context",), queries): both,
        ("all-to-all", ("context",), queries * KV_HEADS // HEADS): both,
    }


def test_four_all_to_alls_forward_and_backward_in_each_layer():
    found, step = with_context(context=2, layers=1)  # zero_3 has two
    assert found == all_to_alls(ROWS, 1) | of_every_leaf("all-reduce", ("context",), step)


@pytest.mark.slow
def test_zero_3_gathers_over_both_axes():
    found, step = with_context(stage=3, zero=2, context=2)
    both = ("zero", "context")
    gathers = {key: found.pop(key) for key in list(found) if key[0] == "all-gather"}
    assert gathers.keys() == of_every_leaf("all-gather", both, step).keys()
    assert found == all_to_alls(ROWS // 2) | of_every_leaf("reduce-scatter", both, step)


RINGS = {
    "ring": {"width": 192, "heads": 3, "kv_heads": 1, "context": 2},
    "tensor": {"width": 384, "heads": 6, "kv_heads": 2, "context": 2, "tensor": 2},
    "both": {"width": 128, "heads": 2, "kv_heads": 2, "context": 4},
}


@pytest.mark.parametrize("case", some(RINGS, ["ring"]))  # tests/spread/test_ring.py has the moves by default
def test_a_ring_moves_keys_and_values_alone(case):
    """Zigzag moves the second half of each stop's part, and back; around the ring go keys, values, their gradients.

    XLA combines permutes, so their bytes are compared.
    """
    mesh = {axis: n for axis, n in RINGS[case].items() if axis in ("context", "tensor")}
    bytes_of = Counter()
    for (kind, axes, size), times in with_context(**RINGS[case])[0].items():
        if "context" in axes and kind != "all-reduce":
            bytes_of[kind] += size * times
    part = ROWS * SEQUENCE // mesh["context"]  # tokens
    queries, keys = (part * 64 * RINGS[case][kind] // mesh.get("tensor", 1) * BF16 for kind in ("heads", "kv_heads"))
    sums = part * RINGS[case]["heads"] // mesh.get("tensor", 1) * 4
    zigzag = 5 * queries + 4 * keys + 2 * sums  # queries and gradient; output, twice, and gradient; sums, twice
    ring = 6 * keys  # keys and values, twice, and their gradients
    expected = {"collective-permute": LAYERS * (zigzag // 2 + ring)}
    if case == "both":  # as four all-to-alls forward and backward; the output and the sums once more
        expected["all-to-all"] = LAYERS * (5 * queries + 4 * keys + 2 * sums)
    assert bytes_of == expected


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
