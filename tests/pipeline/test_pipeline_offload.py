"""`cpu_checkpointing` in pipelines: the numbers of the pipeline without it, bit for bit, and residuals on the host.

How many slots a buffer has follows from the schedules' table (docs/pipelines.md): the chunks in flight on stage 0, and
under gpipe one more, which idle stages write to.
"""

from collections import Counter

import chex
import pytest
from helpers.cuda import needs_cuda_compiler
from helpers.layer_lists import batch_of_layers, layers
from helpers.offload import scans
from helpers.pipelines import ROWS, SEQUENCE, WIDTH, Case, Decoder, Everything, batch_of, model, run
from helpers.programs import h100s, pairs, traced
from helpers.sampling import keep, some

from jzero.pipeline.carry import DEVICE_SPACE, HOST_SPACE
from jzero.planner import memory
from jzero.run.run_report import report


def section(policy, on_host=True):
    return {"activation_checkpointing": {"policy": policy, "cpu_checkpointing": on_host}}


NUMBERS = [
    (Decoder, Case("interleaved", 2, 2, 3, 2, chunks=2), "full"),
    (Decoder, Case("gpipe", 4, 3), "matmuls"),
    (Everything, Case("zero_bubble", 2, 3, chunks=2), "full"),
    ("different", Case("gpipe", 2, 3), "full"),  # layers, whose stages keep their packed input
]


@pytest.mark.parametrize(("kind", "case", "policy"), keep(NUMBERS, NUMBERS[1:2]), ids=str)
def test_the_numbers_are_the_same_bit_for_bit(kind, case, policy):
    """`test_pipeline_training` compares the pipeline without it with the step without a pipeline."""
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


@pytest.mark.parametrize("schedule", keep(SLOTS, ["gpipe", "zero_bubble"]))
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


def test_the_report_says_where_activations_wait():
    case = Case("1f1b", 2, 2)
    for there in (True, False):
        for module in (model(Decoder, 4), layers("five"), layers("different")):
            text = report(case.step(module, **section("full", there)))
            assert ("activation checkpointing full, kept in host memory" in text) == there


TOKENS = 4096


def planned(case, policy, on_host):
    """Return the planned memory of two GPUs that are not there."""
    config = case.config(bf16={"enabled": False}, **section(policy, on_host))
    step, trace = traced(model(Decoder, 8), h100s(pipe=2), pairs(ROWS * case.micro, TOKENS), {}, **config)
    return memory(trace.lower().compile(), step)


PLANS = [  # and how many times the bytes XLA may take: under zero_bubble it copies some of the buffers
    (Case("gpipe", 2, 12), "full", (12 + 1) * (4 + 1), 1),
    (Case("zero_bubble", 2, 4), "matmuls", 3 * 4 * 2, 1.65),
]


@pytest.mark.gpu_compile
@needs_cuda_compiler
@pytest.mark.usefixtures("no_compilation_cache")
@pytest.mark.parametrize(("case", "policy", "arrays", "times"), some(PLANS, PLANS[:1]), ids=str)
def test_a_plan_counts_them_as_host_memory(case, policy, arrays, times):
    """`arrays` of float32: slots x (layers of a chunk; under gpipe one more), under "matmuls" x 2."""
    size = arrays * ROWS * TOKENS * WIDTH * 4
    on_host, on_device = (planned(case, policy, there) for there in (True, False))
    assert size <= on_host.host <= times * size
    assert on_device.host == 0
    assert on_device.peak - on_host.peak >= 0.9 * size
