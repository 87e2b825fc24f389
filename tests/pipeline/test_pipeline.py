"""A step through the pipeline equals the step without one, in every layout and with every kind of model."""

from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.pipelines import (
    VOCAB,
    WIDTH,
    Case,
    Decoder,
    Dropout,
    Everything,
    Fragile,
    assert_close,
    batch_of,
    check,
    model,
    named,
    run,
    unpipelined,
)
from helpers.sampling import assert_pairs, keep, some
from jax import lax

from models.llama import Llama

# --------------------------------------------------------------------------------------- every layout: gradients

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


LAYOUTS = list(layouts())


def settings(case):
    size = {1: "S", 2: "2S"}.get(case.micro / case.stages, "other")
    return (case.schedule, case.chunks), case.stages, size, (case.stage, case.gather), case.tied


def test_the_layouts_are_a_covering_set():
    levels = KINDS, (2, 4), ("S", "2S", "other"), ZEROS, (False, True), (1, 2)
    assert_pairs(levels, [(*settings(case), case.data) for case in LAYOUTS])


def of_case(kind, case):
    return model(kind, case.layers, **{"tied": True} if case.tied else {})


@named(keep(LAYOUTS, LAYOUTS[22:23]))  # of each other schedule there is a test below
def test_layouts(case):
    """Tied ends too: what both ends add to the gradient of the embedding, of different micro-batches, is all there."""
    check(of_case(Decoder, case), case)


@pytest.mark.slow
def test_one_stage_is_the_step_without_a_pipeline():
    for schedule, chunks in KINDS:
        case = Case(schedule, 1, 2, 3, 2, chunks=chunks)
        programs = [
            c.step(model(Decoder, 4)).lower(batch_of(case)).as_text() for c in (case, case._replace(schedule=None))
        ]
        assert programs[0] == programs[1], schedule
    check(model(Decoder, 4), case._replace(gather="step"))  # which is for that step too


ONE = [Case("1f1b", 2, 1, 1, 2), Case("interleaved", 2, 1, chunks=2), Case("zero_bubble", 4, 1)]


@named(keep(ONE, ONE[:1]))
def test_one_micro_batch(case):
    check(model(Decoder, case.layers), case)


@pytest.mark.parametrize("schedule", some(["interleaved", "zero_bubble"], ["interleaved"]))
def test_two_layers_in_each_of_two_chunks(schedule):
    check(model(Decoder, 8), Case(schedule, 2, 4, chunks=2))


SCANNED = [  # and the layers of an activation checkpoint
    (Everything, Case("1f1b", 2, 3, 1, 2), 0),
    (Decoder, Case("interleaved", 2, 2, 3, 2, chunks=2), 0),
    (Everything, Case("zero_bubble", 2, 3, 2, 2), 0),
    (Decoder, Case("gpipe", 2, 3, 3, 2, gather="step"), 2),
]


@pytest.mark.parametrize(("kind", "case", "interval"), keep(SCANNED, SCANNED[1:2]), ids=str)
def test_a_loop_over_the_layers_of_a_chunk(kind, case, interval):
    pipeline = case.config()["pipeline"] | {"activation_checkpoint_interval": interval}
    ours = run(model(kind, 8), case, stack={"unroll": False}, pipeline=pipeline)
    assert_close(ours, unpipelined(model(kind, 8), case.unpipelined))


# ------------------------------------------------------------------------------------------ every kind of model


LLAMAS = [
    Case("gpipe", 4, 4, 2, 2),
    Case("1f1b", 2, 4, 1, 2, 2),
    Case("interleaved", 2, 4, 3, 2, chunks=2),
    Case("zero_bubble", 4, 6),
    Case("1f1b", 2, 2, tied=True),
]


@named(some(LLAMAS, LLAMAS[2:3]))
def test_llama(case):
    check(of_case(Llama, case), case)


@pytest.mark.parametrize(
    ("case", "tied"),
    keep(
        product([Case("1f1b", 4, 3), Case("zero_bubble", 4, 4, 2, 2)], (False, True)),
        [(Case("1f1b", 4, 3), True)],
    ),
    ids=str,
)
def test_a_vocabulary_that_the_stages_do_not_divide_lies_on_all_of_them(case, tied):
    odd = model(Decoder, case.layers, tied=tied, vocab=VOCAB + 1)
    assert not any(leaf.on_pipe for leaf in jax.tree.leaves(case.step(odd).layouts["ends"]))
    assert all(leaf.on_pipe for leaf in jax.tree.leaves(case.step(model(Decoder, 4, tied=tied)).layouts["ends"]))
    check(odd, case)


FREEZING = [
    (Case("1f1b", 2, 3, 3, 2), ("stack/b", "embed")),
    (Case("interleaved", 2, 2, 1, 2, chunks=2), ("stack",)),
    (Case("interleaved", 2, 2, 1, 2, chunks=2), ("stack/b", "embed")),
    (Case("zero_bubble", 2, 3, 2, 2), ("ends",)),
    (Case("zero_bubble", 2, 3, 2, 2), ("stack",)),
]


@pytest.mark.parametrize(("case", "frozen"), keep(FREEZING, FREEZING[:1]), ids=str)
def test_frozen_parameters(case, frozen):
    ours = check(model(Decoder, case.layers), case, frozen_parameters=list(frozen))
    for name, gradient in ours.gradients.items():
        assert (np.abs(gradient).max() == 0) == any(pattern in name for pattern in frozen), name


EVERYTHING = [
    Case("gpipe", 2, 3),
    Case("1f1b", 4, 3),
    Case("interleaved", 2, 2, 3, 2, chunks=2),
    Case("zero_bubble", 2, 3),
]


@named(keep(EVERYTHING, EVERYTHING[:1]))
def test_a_model_with_everything(case):
    """Dropout, integers and masks between the layers, parameters that are integers."""
    check(model(Everything, case.stages * case.chunks), case)


DRAWN = [Case("1f1b", 4, 4), Case("zero_bubble", 2, 2, chunks=2)]


@named(some(DRAWN, DRAWN[1:]))
def test_the_dropout_masks_are_those_of_the_unpipelined_step(case):
    noisy = model(Dropout, case.layers)
    assert abs(check(noisy, case).loss / unpipelined(model(Decoder, case.layers), case.unpipelined).loss - 1) > 1e-3


STALE = [
    Case("gpipe", 4, 3),
    Case("1f1b", 4, 4),
    Case("interleaved", 2, 3, chunks=2),
    Case("zero_bubble", 4, 3),
    Case("zero_bubble", 2, 3, chunks=2),
]


@named(some(STALE, STALE[1:2]))
def test_stale_data_leaks_nothing(case, monkeypatch):
    """What an idle stage makes is NaN here: of the zeros that it has at first or is sent, of what its buffers hold."""
    monkeypatch.setattr(lax, "empty", lambda shape, dtype: jnp.full(shape, jnp.nan if dtype == jnp.float32 else -1))
    fragile, batch = model(Fragile, case.layers), batch_of(case)
    layer = jax.tree.map(lambda w: w[0], fragile.init(jax.random.key(0))["stack"])
    for x, dy in ((0.0, 1.0), (1.0, 0.0)):
        y, pullback = jax.vjp(lambda x: fragile.block(layer, x, None), jnp.full((1, WIDTH), x))
        assert jnp.isnan(pullback(jnp.full(y.shape, dy))[0]).all()
    batch["labels"][:, 0] = 1  # no micro-batch without any, whose gradient is zero
    assert_close(run(fragile, case, batch), run(fragile, case.unpipelined, batch))
