"""The compiled H100 program of the Llama holds DeepSpeed-Ulysses' all-to-alls over `context`, and no other moves.

For each layer that is queries, keys, values and the output, forward and backward (Jacobs et al., arXiv:2309.14509,
section 3). ZeRO gathers and scatters over (`zero`, `context`) in one collective. Besides there are numbers: of the loss
and of the norm. Where the heads do not suffice, keys, values and their gradients go around a ring.
"""

from collections import Counter

import pytest
from helpers.programs import SMALL, collectives_of, counted, h100s, needs_gpu_programs, of_every_leaf, pairs, traced
from helpers.sampling import some

import jzero
from models.llama import Llama, LlamaConfig

pytestmark = needs_gpu_programs

LAYERS, ROWS, SEQUENCE, WIDTH, HEADS, KV_HEADS, BF16 = 2, 4, 128, 256, 8, 4, 2


def compiled(*, stage=0, width=WIDTH, heads=HEADS, kv_heads=KV_HEADS, **mesh):
    """(the collectives of a step, without numbers: (kind, axes, bytes) -> how many; the step)."""
    shape = LlamaConfig(LAYERS, width, heads, kv_heads, 512, vocab_size=1024, attention="cudnn")
    step, trace = traced(
        jzero.from_flax(lambda rngs: Llama(shape, rngs=rngs)), h100s(**mesh), pairs(ROWS, SEQUENCE),
        train_batch_size=ROWS, zero_optimization={"stage": stage, "stage3_param_persistence_threshold": 0},
    )  # fmt: skip
    return counted(collectives_of(step, trace), "kind", "axes", "bytes", smallest=SMALL), step


def all_to_alls(rows):
    """What one device holds of queries and of keys: both forward and backward, with the output and the values."""
    queries = rows * SEQUENCE * WIDTH * BF16 // 2
    both = 2 * 2 * LAYERS
    return {
        ("all-to-all", ("context",), queries): both,
        ("all-to-all", ("context",), queries * KV_HEADS // HEADS): both,
    }


def test_four_all_to_alls_forward_and_backward_in_each_layer():
    found, step = compiled(context=2)
    assert found == all_to_alls(ROWS) | of_every_leaf("all-reduce", ("context",), step)


@pytest.mark.slow
def test_zero_3_gathers_over_both_axes():
    found, step = compiled(stage=3, zero=2, context=2)
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
    for (kind, axes, size), times in compiled(**RINGS[case])[0].items():
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
