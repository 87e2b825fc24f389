"""The compiled H100 program of a mixture of experts holds two all-to-alls a layer forward, and two backward.

Tokens go to their experts and come back (Lepikhin et al., arXiv:2006.16668, section 3). Experts are never gathered or
all-reduced over `expert`; other parameters' gradients are all-reduced once a step at stage 0. Besides there are
numbers: counts, the loss, the balance of the experts.
"""

from collections import Counter
from math import prod

import jax
import jax.numpy as jnp
import pytest
from helpers.cuda import needs_cuda_compiler

import jzero
from jzero.planner import collectives, gpu_devices
from jzero.planner.traced_collectives import moves
from models.decoder import Decoder
from models.decoder_config import DecoderConfig
from models.moe import MixtureConfig

pytestmark = [pytest.mark.gpu_compile, needs_cuda_compiler, pytest.mark.usefixtures("no_compilation_cache")]

LAYERS, ROWS, SEQUENCE, WIDTH, EXPERTS, TOP, BF16 = 2, 16, 256, 256, 4, 2, 2
SMALL = 128  # bytes
SEPARATE = {f"xla_gpu_{kind}_combine_threshold_bytes": 0 for kind in ("all_gather", "reduce_scatter", "all_reduce")}


def compiled(capacity_factor):
    """The collectives of a step in bf16 on two H100s: (kind, bytes) -> how many a step; and what its trace moves."""
    config = {
        "train_batch_size": ROWS, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "bf16": {"enabled": True},
        "compiler_options": {"xla_gpu_autotune_level": 0} | SEPARATE,
    }  # fmt: skip
    mixture = MixtureConfig(EXPERTS, TOP, 128, capacity_factor=capacity_factor)
    shape = DecoderConfig(LAYERS, WIDTH, 4, 2, 0, vocab_size=512, attention="cudnn", mixture=mixture)
    mesh = jzero.make_mesh(expert=2, zero=1, devices=gpu_devices("h100", 2))
    step = jzero.make_train_step(jzero.from_flax(lambda rngs: Decoder(shape, rngs=rngs)), config, mesh=mesh)
    tokens = jax.ShapeDtypeStruct((ROWS, SEQUENCE), jnp.int32)
    traced = step.trace({"inputs": tokens, "labels": tokens})
    program = collectives(traced.lower().compile(), mesh)
    assert len(program.select(in_branch=True)) == 0
    found = Counter()
    for row in program:
        assert row.axes == ("expert",)
        found[row.kind, row.bytes] += row.operands * row.times
    return {key: times for key, times in found.items() if key[1] > SMALL}, moves(traced, mesh), step


@pytest.mark.slow
@pytest.mark.parametrize(("capacity_factor", "rows"), [(1.0, 1), (None, 2)])  # None: all rows, to each of two devices
def test_all_to_alls_and_nothing_of_the_experts(capacity_factor, rows):
    found, moved, step = compiled(capacity_factor)
    kind, tokens = "all-to-all", rows * ROWS // 2 * SEQUENCE * TOP * WIDTH * BF16
    expected = Counter({(kind, tokens): 2 * 2 * LAYERS})
    for layout in jax.tree.leaves(step.layouts):
        if "expert" not in layout.axes:
            size = prod(layout.shape[layout.stacked :]) * BF16
            expected["all-reduce", size] += LAYERS if layout.stacked else 1
    assert found == expected
    assert sum(move.times for move in moved.all if move.kind == kind) == 2 * 2 * LAYERS
    assert {move.bytes for move in moved.all if move.kind == kind} == {tokens}
    assert not moved.whole
