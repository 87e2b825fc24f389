"""The compiled H100 program of a mixture of experts holds two all-to-alls a layer forward, and two backward.

Tokens go to their experts and come back (Lepikhin et al., arXiv:2006.16668, section 3). Experts are never gathered or
all-reduced over `expert`; other parameters' gradients are all-reduced once a step at stage 0. Besides there are
numbers: counts, the loss, the balance of the experts.
"""

import pytest
from helpers.programs import SMALL, collectives_of, counted, h100s, needs_gpu_programs, of_every_leaf, pairs, traced

import jzero
from jzero.planner.traced_operations import moves
from models.decoder import Decoder
from models.decoder_config import DecoderConfig
from models.moe import MixtureConfig

pytestmark = needs_gpu_programs

LAYERS, ROWS, SEQUENCE, WIDTH, EXPERTS, TOP, BF16 = 2, 16, 256, 256, 4, 2, 2


@pytest.mark.slow
@pytest.mark.parametrize(("capacity_factor", "rows"), [(1.0, 1), (None, 2)])  # None: all rows, to each of two devices
def test_all_to_alls_and_nothing_of_the_experts(capacity_factor, rows):
    mixture = MixtureConfig(EXPERTS, TOP, 128, capacity_factor=capacity_factor)
    shape = DecoderConfig(LAYERS, WIDTH, 4, 2, 0, vocab_size=512, attention="cudnn", mixture=mixture)
    model = jzero.from_flax(lambda rngs: Decoder(shape, rngs=rngs))
    step, trace = traced(model, h100s(expert=2), pairs(ROWS, SEQUENCE), train_batch_size=ROWS)
    kind, tokens = "all-to-all", rows * ROWS // 2 * SEQUENCE * TOP * WIDTH * BF16
    expected = of_every_leaf("all-reduce", ("expert",), step, lambda layout: "expert" not in layout.axes)
    expected[kind, ("expert",), tokens] = 2 * 2 * LAYERS
    program = collectives_of(step, trace)
    assert counted(program, "kind", "axes", "bytes", smallest=SMALL) == expected
    assert {row.axes for row in program} == {("expert",)}
    moved = moves(trace, step.mesh)
    assert sum(move.times for move in moved.all if move.kind == kind) == 2 * 2 * LAYERS
    assert {move.bytes for move in moved.all if move.kind == kind} == {tokens}
    assert not moved.whole
