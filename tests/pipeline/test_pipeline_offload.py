"""`cpu_checkpointing` in pipelines: the numbers without it bit for bit, and residuals on the host."""

from collections import Counter

import chex
import pytest
from helpers.layer_lists import batch_of_layers, layers
from helpers.offload import scans
from helpers.pipelines import ROWS, SEQUENCE, WIDTH, Case, Decoder, Everything, batch_of, model, run
from helpers.sampling import keep

from jzero.pipeline.carry import DEVICE_SPACE, HOST_SPACE


def section(policy, on_host=True):
    return {"activation_checkpointing": {"policy": policy, "cpu_checkpointing": on_host}}


NUMBERS = [
    (Decoder, Case("interleaved", 2, 2, 3, 2, chunks=2), "full"),
    (Decoder, Case("gpipe", 2, 3), "matmuls"),
    (Everything, Case("zero_bubble", 2, 3, chunks=2), "full"),
    ("different", Case("gpipe", 2, 3), "full"),  # layers, whose stages keep their packed input
]


@pytest.mark.parametrize(("kind", "case", "policy"), keep(NUMBERS, NUMBERS[1:2]), ids=str)
def test_the_numbers_are_the_same_bit_for_bit(kind, case, policy):
    of, batch = (model(kind, case.layers), None) if isinstance(kind, type) else (layers(kind), batch_of_layers(kind, 6))
    on_host, on_device = (run(of, case, batch, **section(policy, there)) for there in (True, False))
    chex.assert_trees_all_equal(on_host, on_device)


def carried(step, batch):
    """Yield, for each loop over ticks, Counters of the shapes that it carries in host memory and on the device."""
    for eqn in scans(step.trace(batch).jaxpr.jaxpr):
        types = [x.aval for x in eqn.outvars]
        there, here = ([x.shape for x in types if x.memory_space == s] for s in (HOST_SPACE, DEVICE_SPACE))
        if there:
            yield Counter(there), Counter(here)


SLOTS = {  # of two stages and six micro-batches: with fewer, some ticks are in no loop
    "gpipe": (Case("gpipe", 2, 6), "full", 6 + 1),
    "1f1b": (Case("1f1b", 2, 6), "matmuls", 2 * 2 - 1),
    "interleaved": (Case("interleaved", 2, 6, chunks=2), "full", 2 * 2 + 2 - 1),
    "zero_bubble": (Case("zero_bubble", 2, 6), "matmuls", 2 + 2 - 1),
}


@pytest.mark.parametrize("schedule", keep(SLOTS, ["zero_bubble"]))
def test_all_residuals_lie_on_the_host(schedule):
    """A layer's input, and under "matmuls" its product; gpipe's suffix also waits for the output of the last layer."""
    case, policy, slots = SLOTS[schedule]
    depth, buffer = 4 // case.stages // case.chunks, (slots, ROWS, SEQUENCE, WIDTH)
    arrays = depth * {"full": 1, "matmuls": 2}[policy] + (case.schedule == "gpipe")
    loops = list(carried(case.step(model(Decoder, 4), **section(policy)), batch_of(case)))
    assert loops
    for there, here in loops:
        assert there == {buffer: arrays}
        assert buffer not in here
    assert not list(carried(case.step(model(Decoder, 4), **section(policy, False)), batch_of(case)))


def test_packed_inputs_lie_on_the_host():
    case, _, slots = SLOTS["1f1b"]
    batch = batch_of_layers("different", 6 * ROWS)
    loops = list(carried(case.step(layers("different"), **section("full")), batch))
    assert loops
    for there, here in loops:
        (shape,) = there.elements()  # the floats; integers are small
        assert shape[0] == slots
        assert not there.keys() & here.keys()
