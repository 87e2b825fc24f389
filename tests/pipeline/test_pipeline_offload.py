"""`cpu_checkpointing` in pipelines: the numbers of the pipeline without it, bit for bit, and residuals on the host.

How many slots a buffer has follows from the schedules' table (docs/pipelines.md): the chunks in flight on stage 0, and
under gpipe one more, which idle stages write to.
"""

from collections import Counter
from itertools import product

import chex
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.cuda import needs_cuda_compiler
from helpers.layer_lists import layers
from helpers.offload import scans
from helpers.pipelines import ROWS, SEQUENCE, WIDTH, Case, Decoder, Everything, batch_of, model, run
from helpers.programs import h100s, pairs, traced
from helpers.sampling import keep, some

from jzero.pipeline.carry import DEVICE_SPACE, HOST_SPACE
from jzero.planner import memory
from jzero.run.run_report import report
from models.llama import Llama


def section(policy, on_host=True):
    return {"activation_checkpointing": {"policy": policy, "cpu_checkpointing": on_host}}


# --------------------------------------------------------------------------------------------------- the numbers

NUMBERS = [
    (Llama, Case("1f1b", 2, 4, 1, 2), "full"),
    (Decoder, Case("interleaved", 2, 2, 3, 2, chunks=2), "full"),
    (Decoder, Case("gpipe", 4, 3), "matmuls"),
    (Everything, Case("gpipe", 2, 3), "full"),
    (Everything, Case("1f1b", 2, 3, 2, 2), "matmuls"),
    (Everything, Case("zero_bubble", 2, 3, chunks=2), "matmuls"),
]


@pytest.mark.parametrize(("kind", "case", "policy"), keep(NUMBERS, NUMBERS[2:3]), ids=str)
def test_the_numbers_are_the_same_bit_for_bit(kind, case, policy):
    """`test_pipeline_training` compares the pipeline without it with the step without a pipeline."""
    on_host, on_device = (run(model(kind, case.layers), case, **section(policy, there)) for there in (True, False))
    chex.assert_trees_all_equal(on_host, on_device)


@pytest.mark.slow
def test_layers_of_different_structure():
    """Their stages keep the packed input of their layers."""
    case = Case("gpipe", 2, 3)
    rng, rows = np.random.default_rng(0), ROWS * case.micro
    x = {"x": rng.normal(size=(rows, 3)).astype(np.float32), "ids": rng.integers(0, 2**32, rows, np.uint32)}
    batch = x, np.full((rows, 2), 9, np.float32)
    on_host, on_device = (run(layers("different"), case, batch, **section("full", there)) for there in (True, False))
    chex.assert_trees_all_equal(on_host, on_device)


# ---------------------------------------------------------------------------------------------- what lies where


def carried(step, batch):
    """Yield, for each loop over ticks, Counters of the shapes that it carries in host memory and on the device."""
    for eqn in scans(step.trace(batch).jaxpr.jaxpr):
        types = [x.aval for x in eqn.outvars]
        there, here = ([x.shape for x in types if x.memory_space == s] for s in (HOST_SPACE, DEVICE_SPACE))
        if there:
            yield Counter(there), Counter(here)


SLOTS = {  # of two stages and six micro-batches: with fewer, some ticks are in no loop
    Case("gpipe", 2, 6): 6 + 1,
    Case("1f1b", 2, 6): 2 * 2 - 1,
    Case("interleaved", 2, 6, chunks=2): 2 * 2 + 2 - 1,
    Case("zero_bubble", 2, 6): 2 + 2 - 1,
}


@pytest.mark.parametrize(
    ("case", "policy"),
    keep(product(SLOTS, ["full", "matmuls"]), [(Case("gpipe", 2, 6), "full"), (Case("zero_bubble", 2, 6), "matmuls")]),
    ids=str,
)
def test_all_residuals_lie_on_the_host(case, policy):
    """A layer's input, and under "matmuls" its product; gpipe's suffix also waits for the output of the last layer."""
    depth, buffer = 4 // case.stages // case.chunks, (SLOTS[case], ROWS, SEQUENCE, WIDTH)
    arrays = depth * {"full": 1, "matmuls": 2}[policy] + (case.schedule == "gpipe")
    loops = list(carried(case.step(model(Decoder, 4), **section(policy)), batch_of(case)))
    assert loops
    for there, here in loops:
        assert there == {buffer: arrays}
        assert buffer not in here
    assert not list(carried(case.step(model(Decoder, 4), **section(policy, False)), batch_of(case)))


def test_packed_inputs_lie_on_the_host():
    case = Case("1f1b", 2, 6)
    x = {"x": jnp.ones((6 * ROWS, 3)), "ids": jnp.ones(6 * ROWS, jnp.uint32)}
    loops = list(carried(case.step(layers("different"), **section("full")), (x, jnp.ones((6 * ROWS, 2)))))
    assert loops
    for there, here in loops:
        (shape,) = there.elements()  # the floats; integers are small
        assert shape[0] == SLOTS[case]
        assert not there.keys() & here.keys()


def test_the_report_says_where_activations_wait():
    case = Case("1f1b", 2, 2)
    for there in (True, False):
        for module in (model(Decoder, 4), layers("five"), layers("different")):
            text = report(case.step(module, **section("full", there)))
            assert ("activation checkpointing full, kept in host memory" in text) == there


# ------------------------------------------------------------------------------------------------- memory, by plan

TOKENS = 4096


def planned(case, policy, on_host):
    """Return the planned memory of two GPUs that are not there."""
    config = case.config(bf16={"enabled": False}, **section(policy, on_host))
    step, trace = traced(model(Decoder, 8), h100s(pipe=2), pairs(ROWS * case.micro, TOKENS), {}, **config)
    return memory(trace.lower().compile(), step)


PLANS = [  # and how many times the bytes XLA may take: under zero_bubble it copies some of the buffers
    (Case("gpipe", 2, 12), "full", (12 + 1) * (4 + 1), 1),
    (Case("interleaved", 2, 4, chunks=2), "full", 5 * 2, 1),
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
