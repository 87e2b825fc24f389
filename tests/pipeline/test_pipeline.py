"""A step through the pipeline equals the step without one, in every layout and with every kind of model."""

from collections import Counter
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import pipelines
from helpers.offload import scans
from helpers.pipelines import ROWS, Case, Decoder, Dropout, Everything, assert_close, batch_of, check, model, run
from helpers.reference import ADAMW, SEQUENCE, VOCAB, WIDTH, assert_bitwise, place
from helpers.refusals import refused
from helpers.sampling import keep, some
from jax import lax
from test_pipeline_module import batch_of_layers, layers

import jzero
from jzero.planner import memory
from jzero.run.run_report import report
from jzero.tracing.slots import DEVICE_SPACE, HOST_SPACE
from models.llama import Llama
from models.mlp import MLP, cross_entropy

KINDS = (("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zero_bubble", 1), ("zero_bubble", 2))
ZEROS = ((0, None), (1, None), (2, None), (3, "micro_batch"), (3, "step"))


def layouts():
    """All kinds of schedule at all ZeRO stages, the other dimensions spread so that all pairs are met."""
    for (k, (schedule, chunks)), (z, (stage, gather)) in product(enumerate(KINDS), enumerate(ZEROS)):
        stages = (2, 4)[(k + z) % 2]
        data = 2 if (k + z) % 4 == 0 or (stages == 4 and not stage) else 1
        zero = 8 // stages // data if data == 2 else 2
        micro = (stages, 2 * stages, 3)[(k + z) % 3]  # 3: more than the stages, or fewer
        tied = (k + z // 2) % 2 == 0
        yield Case(schedule, stages, micro, stage, zero, data, chunks, gather, tied)


# By default gpipe is in tests/checkpoint/test_resume.py, the others are below.
@pytest.mark.parametrize("case", keep(layouts(), []), ids=str)
def test_layouts(case):
    """Tied ends too: what both ends add to the gradient of the embedding, of different micro-batches, is all there."""
    check(model(Decoder, case.layers, tied=case.tied), case)


def recomputing(policy=None, on_host=False, interval=0, **pipeline):
    """Recompute layers; an interval alone is policy "full"."""
    section = {"activation_checkpointing": {"policy": policy, "cpu_checkpointing": on_host}}
    return section | ({"pipeline": {"activation_checkpoint_interval": interval, **pipeline}} if interval else {})


SCANNED = {"stack": {"unroll": False}}
ZERO_BUBBLE = "recomputed on the host, zero_bubble"
CASES = {  # name: (model, its layers, case, changes of the config)
    "one micro-batch": (Decoder, 4, Case("1f1b", 2, 1, 1, 2), {}),
    "one micro-batch, zero_bubble": (Decoder, 4, Case("zero_bubble", 4, 1), {}),
    "two layers in each of two chunks": (Decoder, 8, Case("interleaved", 2, 4, chunks=2), {}),
    "a loop over layers": (Everything, 8, Case("1f1b", 2, 3, 1, 2), SCANNED),
    "a loop over checkpoints": (
        Decoder, 8, Case("gpipe", 2, 3, 3, 2), recomputing(interval=2, schedule="gpipe", gather="step") | SCANNED
    ),
    "llama": (Llama, 4, Case("interleaved", 2, 4, 3, 2, chunks=2), {}),
    "dropout": (Dropout, 4, Case("1f1b", 4, 4), {}),
    "dropout in recomputed layers": (Dropout, 4, Case("zero_bubble", 2, 2, chunks=2), recomputing("full")),
    # Dropout, integers and masks between the layers, parameters that are integers.
    "everything, 1f1b, an odd vocabulary": (Everything, 2, Case("1f1b", 2, 4, tied=True), {}),
    "everything, zero_bubble": (Everything, 2, Case("zero_bubble", 2, 3), {}),
    "everything on the host": (Everything, 4, Case("zero_bubble", 2, 3, chunks=2), recomputing("full", True)),
    "an odd vocabulary, zero_bubble": (Decoder, 4, Case("zero_bubble", 4, 4, 2, 2), {}),
    # Two layers to a stage.
    "recomputed llama": (Llama, 4, Case("gpipe", 2, 3), recomputing("matmuls", True)),
    ZERO_BUBBLE: (
        Decoder, 4, Case("zero_bubble", 2, 3, 3, 2, chunks=2),
        recomputing("matmuls", True, interval=1, schedule="zero_bubble", chunks=2),
    ),
    "recomputed by intervals": (Decoder, 4, Case("zero_bubble", 2, 3), recomputing(interval=2, schedule="zero_bubble")),
    # Layers of different structure, whose stages keep their packed input, and a stack of layers.
    "layers that differ": ("different", 3, Case("gpipe", 2, 3), {}),
    "layers that differ, on the host": ("different", 3, Case("gpipe", 2, 3), recomputing("full", True)),
    "five layers": (
        "five", 5, Case("1f1b", 2, 2, 3, 2), {
            "frozen_parameters": ["tied/.*", "bias"],
            "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 20},
        }
    ),
    "four layers, on the host": ("four", 4, Case("interleaved", 2, 2, 3, 2, chunks=2), recomputing("full", True)),
}  # fmt: skip


@pytest.mark.parametrize("name", keep(CASES, ["everything, 1f1b, an odd vocabulary", ZERO_BUBBLE]))
def test_one_step(name):
    """The step without a pipeline recomputes nothing."""
    kind, depth, case, more = CASES[name]
    frozen = {key: patterns for key, patterns in more.items() if key == "frozen_parameters"}
    if kind in ("different", "four", "five"):
        of, batch = layers(kind), batch_of_layers(kind, ROWS * case.micro * case.zero)
    else:
        of, batch = model(kind, depth, **({"tied": case.tied, "vocab": VOCAB + 1} if "odd" in name else {})), None
    expected = run(of, case.unpipelined, batch, **frozen)
    assert_close(run(of, case, batch, **more), expected)
    if kind is Dropout:
        assert abs(expected.loss / run(model(Decoder, depth), case.unpipelined).loss - 1) > 1e-3


@pytest.mark.parametrize("tied", [False, True])
def test_a_vocabulary_that_the_stages_do_not_divide_lies_on_all_of_them(tied):
    for rows, on_pipe in ((VOCAB, True), (VOCAB + 1, False)):
        step = Case("1f1b", 2, 3).step(model(Decoder, 4, tied=tied, vocab=rows))
        assert {leaf.on_pipe for leaf in jax.tree.leaves(step.layouts["ends"])} == {on_pipe}
        ends = "divided among the stages" if on_pipe else "computed by all stages together"
        assert step.setup.passes.facts.pipeline(3).endswith(f"prefix and suffix {ends}")


FREEZING = [
    (Case("interleaved", 2, 2, 3, 2, chunks=2), ("stack/b", "embed"), SCANNED),
    (Case("interleaved", 2, 2, 1, 2, chunks=2), ("stack",), {}),
    (Case("zero_bubble", 2, 3, 2, 2), ("ends",), {}),
]


@pytest.mark.parametrize(("case", "frozen", "more"), keep(FREEZING, FREEZING[:1]), ids=str)
def test_frozen_parameters(case, frozen, more):
    ours = check(model(Decoder, 8), case, frozen_parameters=list(frozen), **more)
    for name, gradient in ours.gradients.items():
        assert (np.abs(gradient).max() == 0) == any(pattern in name for pattern in frozen), name


STALE = [Case("1f1b", 4, 4), Case("interleaved", 2, 3, chunks=2), Case("zero_bubble", 4, 3)]


@pytest.mark.parametrize("case", some(STALE, STALE[:1]), ids=str)
def test_stale_data_leaks_nothing(case, monkeypatch):
    """What an idle stage makes is NaN here: of the zeros that it has at first or is sent, of what its buffers hold."""
    monkeypatch.setattr(lax, "empty", lambda shape, dtype: jnp.full(shape, jnp.nan if dtype == jnp.float32 else -1))
    fragile, batch = model(pipelines.Fragile, case.layers), batch_of(case)
    layer = jax.tree.map(lambda w: w[0], fragile.init(jax.random.key(0))["stack"])
    for x, dy in ((0.0, 1.0), (1.0, 0.0)):
        y, pullback = jax.vjp(lambda x: fragile.block(layer, x, None), jnp.full((1, WIDTH), x))
        assert jnp.isnan(pullback(jnp.full(y.shape, dy))[0]).all()
    batch["labels"][:, 0] = 1  # no micro-batch without any, whose gradient is zero
    assert_close(run(fragile, case, batch), run(fragile, case.unpipelined, batch))


def test_the_report_says_what_a_switch_costs():
    case = Case("1f1b", 2, 2, 3)
    text = " ".join(report(case.step(layers("five"), pipeline={"activation_checkpoint_interval": 2})).split())
    assert "stages x chunks = 2 does not divide the 5 equal layers" in text
    assert "in one piece whatever activation_checkpoint_interval says" in text
    assert "no run of equal layers holds half" in " ".join(report(case.step(layers("different"))).split())


@pytest.mark.slow
def test_what_an_interval_keeps():
    """Of the three micro-batches in flight the input of each checkpoint: four on each stage, or one."""
    case, tokens, peaks = Case("1f1b", 2, 4), jax.ShapeDtypeStruct((4 * ROWS, 4096), jnp.int32), []
    for interval in (1, 4):
        step = case.step(model(Decoder, 8), **recomputing(interval=interval, schedule="1f1b"))
        peaks.append(memory(step.lower({"inputs": tokens, "labels": tokens}).compile()).peak)
    assert peaks[0] - peaks[1] == pytest.approx(3 * (4 - 1) * ROWS * 4096 * WIDTH * 4, rel=0.01)


KEPT = [("none", 2 + 1, 2), ("matmuls", 2 + 1, 2), ("full", 2, 1)]


@pytest.mark.parametrize(("policy", "unrolled", "looped"), keep(KEPT, KEPT[1:2]))
def test_what_a_stage_keeps(policy, unrolled, looped):
    """Each of two layers keeps its input and its product, but no weight, gathered or not.

    But for "full", unrolled layers keep the first input alone: products and elementwise operations give the others.
    """
    case = Case("1f1b", 2, 7, 3, 2)
    slots, depth, size = 2 * 2 - 1, 2, (ROWS, SEQUENCE, WIDTH)
    for unroll, buffer, n in ((True, (slots, *size), unrolled), (False, (slots * depth, *size), looped)):
        step = case.step(model(Decoder, 4), **recomputing(policy), stack={"unroll": unroll})
        loops = [Counter(x.aval.shape for x in eqn.outvars) for eqn in scans(step.trace(batch_of(case)).jaxpr.jaxpr)]
        ticks = [carried for carried in loops if (7, 2) in carried]  # with the losses of seven micro-batches
        assert len(ticks) == 3
        for carried in ticks:
            assert carried[buffer] == n
            assert {shape for shape in carried if shape and shape[0] in (slots, slots * depth)} == {buffer}


LIMITS = [(Case("1f1b", 2, 4), 36), (Case("interleaved", 2, 4, chunks=2), 40)]


@pytest.mark.parametrize(("case", "layers"), LIMITS, ids=str)
def test_many_layers_run_in_a_loop(case, layers):
    """72 layers are unrolled in a step; the phases of these schedules have them 4 and 7 times."""
    for n, unrolled in ((layers, True), (layers + case.stages * case.chunks, False)):
        step = case.step(model(Decoder, n))
        assert step.setup.passes.facts.unrolled == unrolled
        assert f"{n} layers, {'unrolled' if unrolled else 'scanned'}; " in report(step)


FORWARD = [Case("1f1b", 2, 3, 3, 2), Case("zero_bubble", 4, 2, chunks=2)]


@pytest.mark.parametrize("case", some(FORWARD, FORWARD[:1]), ids=str)
def test_evaluate_and_micro_loss(case):
    """Any number of micro-batches; without dropout, and with that of a micro-batch of the next step."""
    noisy, losses = model(Dropout, case.layers), []
    for one in (case, case.unpipelined):
        step = one.step(noisy)
        state = place(step, pipelines.initial(noisy))
        batch = batch_of(case._replace(micro=5))
        part = jax.tree.map(lambda x, n=step.micro_size: x[-n:], batch)
        losses.append([step.evaluate(state, batch), step.evaluate(state, part), step.micro_loss(state, part, 1)])
    np.testing.assert_allclose(*losses, rtol=pipelines.BOUND)
    assert abs(losses[0][1] / losses[0][2] - 1) > 1e-3


def test_a_step_that_overflows_changes_nothing():
    case = Case("1f1b", 2, 2)
    step = case.step(model(Decoder, 2), fp16={"enabled": True, "loss_scale": 2.0**40}, optimizer=ADAMW)
    state = step.init(jax.random.key(0))
    before = jax.device_get((state.params, state.opt_state))
    state, metrics = step(state, batch_of(case))
    assert metrics["skipped"]
    assert_bitwise(before, (state.params, state.opt_state))


# ------------------------------------------------------------------------------------------- residuals in host memory


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
    loops = list(carried(case.step(model(Decoder, 4), **recomputing(policy, True)), batch_of(case)))
    assert loops
    for there, here in loops:
        assert there == {buffer: arrays}
        assert buffer not in here
    assert not list(carried(case.step(model(Decoder, 4), **recomputing(policy)), batch_of(case)))


def test_packed_inputs_lie_on_the_host():
    case, _, slots = SLOTS["1f1b"]
    batch = batch_of_layers("different", 6 * ROWS)
    loops = list(carried(case.step(layers("different"), **recomputing("full", True)), batch))
    assert loops
    for there, here in loops:
        (shape,) = there.elements()  # the floats; integers are small
        assert shape[0] == slots
        assert not there.keys() & here.keys()


# ---------------------------------------------------------------------------- what is refused, besides test_refused


class Widening(Decoder):
    def block(self, layer, x, rng):
        return jnp.pad(x, [(0, 0), (0, 0), (0, 1)])


FOUR, TWO = Case("1f1b", 4, 2), Case("1f1b", 2, 2)
INTERVAL = {"activation_checkpoint_interval": 3}
REFUSED = {
    "other shapes": (
        lambda: FOUR.step(Widening(4)).lower(batch_of(FOUR)), "float32[2, 8, 16]", "float32[2, 8, 17]",
        "each layer's output must match the next layer's input",
    ),
    "chunks": (
        lambda: Case("interleaved", 2, 2, chunks=3).step(Decoder(4)),
        "mesh.pipe = 2", "pipeline.chunks = 3", "use fewer chunks",
    ),
    "stages and chunks": (
        lambda: Case("zero_bubble", 4, 2, chunks=2).step(Decoder(12)),
        "pipeline.chunks = 2", "12 layers", "2, 3 or 6 stages fit with 2 chunks",
    ),
    "a loop over checkpoints that do not divide a chunk": (
        lambda: TWO.step(Decoder(8), pipeline=INTERVAL, **SCANNED),
        "stack.unroll = false", "mesh.pipe = 2", "activation_checkpoint_interval = 3", "the 4 layers",
    ),
    "a loop over layers of different structure": (
        lambda: Case("gpipe", 2, 3).step(layers("different"), **SCANNED),
        "stack.unroll = false", "mesh.pipe = 2", "always unrolled",
    ),
    "a mesh of other stages": (
        lambda: jzero.make_train_step(Decoder(4), TWO.config(mesh={"pipe": 2}), mesh=jzero.make_mesh()),
        "mesh.pipe = 2", "has pipe 1",
    ),
    "a model without a stack": (
        lambda: TWO.step(jzero.from_flax(MLP, cross_entropy)),
        "mesh.pipe = 2", "no layer stack", "block", "jzero.PipelineModule",
    ),
    **{f"recomputing that is {policy}": (
        lambda policy=policy: TWO.step(layers("five"), **recomputing(policy)),
        "activation_checkpointing", "always recomputed",
    ) for policy in ("none", "matmuls")},
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refused_by_name(case):
    call, *parts = REFUSED[case]
    refused(call, *parts)


@pytest.mark.parametrize(
    ("case", "zero", "other"),
    [
        (FOUR, {}, "mesh.pipe = 4 stages"),
        (
            Case(None, 1, 2, zero=4), {"zero_hpz_partition_size": 3},
            "zero_optimization.zero_hpz_partition_size = 3: must divide the mesh's zero 4; allowed: 2",
        ),
        (
            TWO, {"offload_param": {"device": "cpu"}},
            'zero_optimization.offload_param.device = "cpu" with mesh.pipe = 2',
        ),
    ],
)  # fmt: skip
def test_the_problem_of_the_batch_comes_with_that_of_the_layout(case, zero, other):
    with pytest.raises(jzero.ConfigError) as error:
        case.step(Decoder(6), train_batch_size=7, zero_optimization={"stage": 3, **zero})
    batch, layout = error.value.problems
    assert batch.startswith("train_batch_size = 7: must equal ")
    assert layout.startswith(other)


def test_frozen_layers_in_chunks_keep_the_compute_dtype():
    """With a reduction wider than the compute dtype the layers move in the wide one; frozen ones are not cast."""
    case = Case("interleaved", 2, 2, chunks=2)
    more = {"bf16": {"enabled": True}, "communication_data_type": "fp32", "frozen_parameters": ["stack/b"]}
    case.step(model(Decoder, 4), **more).lower(batch_of(case))
