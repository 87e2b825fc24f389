"""The compiled H100 program moves what ZeRO++ says: kind, dtype, bytes, group, and how often.

Eight GPUs on two hosts train the small decoder in bf16; full recomputation gathers a layer's weights twice per
micro-batch, those of the ends once. qwZ gathers s8 over N; qgZ exchanges 4 bits inside a node and then across; hpZ
gathers the second copy across once a step, and inside of its group. Scales are f32, one a block; vectors stay whole.
"""

from collections import Counter
from math import prod

import jax
import jax.numpy as jnp
import pytest
from helpers.programs import collectives_of, h100s, needs_gpu_programs, one_by_one, traced
from helpers.reference import Layout, batches, model
from helpers.sampling import some

pytestmark = needs_gpu_programs

N, HOST, ACCUM, LAYERS = 8, 4, 2, 2
MATRICES = {"embed": ((64, 16), 1), "head": ((16, 64), 1), "w": ((16, 16), LAYERS)}
BIAS = 16


def compiled(plus, unroll):
    section = {"stage": 3, "stage3_param_persistence_threshold": 0, **plus}
    config = Layout(3, N, ACCUM, "full", unroll, "bf16").config(zero_optimization=section)
    batch = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, batches("decoder")[0]))
    return collectives_of(*traced(model("decoder"), h100s(zero=N, per_host=HOST), batch, **config))


def expected(weights, gradients, n, unroll):
    moved = Counter()

    def gathered(elements, layers, times, quantized):
        one, group = (elements, n) if n else (elements, N)
        if n:  # the second copy: of a scanned stack all layers at once
            count, whole = (layers, 1) if unroll else (1, layers)
            place(quantized, elements // n * whole, elements // N, N // n, count, False)
        place(quantized, one, elements // (n or N), group, times * layers * ACCUM, True)

    def place(quantized, elements, part, group, times, inside):
        if quantized:
            moved["all-gather", "s8", elements, group, inside] += times
            moved["all-gather", "f32", 4 * elements // block(part), group, inside] += times
        else:
            moved["all-gather", "bf16", 2 * elements, group, inside] += times

    def block(part):
        return max(size for size in range(16, 65, 2) if part % size == 0)

    for name, (shape, layers) in MATRICES.items():
        elements, times = prod(shape), layers * ACCUM
        gathered(elements, layers, 2 if name == "w" else 1, weights)
        if gradients:
            node = n or HOST
            for size, group in ((elements, node), (elements // node, N // node)):
                moved["all-to-all", "u8", size // 2, group, True] += times
                moved["all-to-all", "f32", 4 * size // block(elements // N), group, True] += times
        else:
            moved["reduce-scatter", "bf16", 2 * elements, N, True] += times
    gathered(BIAS, LAYERS, 2, False)
    moved["reduce-scatter", "bf16", 2 * BIAS, N, True] += LAYERS * ACCUM
    return moved


CASES = [(1, 0, 0, True), (0, 1, 0, False), (0, 0, 4, False), (0, 0, 2, True), (1, 1, 2, False)]


@pytest.mark.parametrize(("weights", "gradients", "n", "unroll"), some(CASES, CASES[-1:]))
def test_the_program_moves_what_the_table_says(weights, gradients, n, unroll):
    plus = {
        "zero_quantized_weights": bool(weights), "zero_quantized_gradients": bool(gradients),
        "zero_hpz_partition_size": n,
    }  # fmt: skip

    def key(row):
        assert row.axes == ("zero",)
        if row.kind != "all-reduce":  # losses, counts and norms, as at every stage
            return row.kind, row.dtype, row.bytes, row.group_size, ACCUM in row.loops[:1]

    assert one_by_one(compiled(plus, unroll), key) == expected(weights, gradients, n, unroll)
