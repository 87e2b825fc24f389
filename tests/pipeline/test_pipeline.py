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
from helpers.sampling import keep, some
from jax import lax

from models.llama import Llama

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


@named(keep(LAYOUTS, LAYOUTS[22:23]))  # of each other schedule there is a test below
def test_layouts(case):
    """Tied ends too: what both ends add to the gradient of the embedding, of different micro-batches, is all there."""
    check(model(Decoder, case.layers, tied=case.tied), case)


@pytest.mark.slow
def test_one_stage_is_the_step_without_a_pipeline():
    for schedule, chunks in KINDS:
        case = Case(schedule, 1, 2, 3, 2, chunks=chunks)
        steps = (c.step(model(Decoder, 4)) for c in (case, case._replace(schedule=None)))
        assert len({step.lower(batch_of(case)).as_text() for step in steps}) == 1, schedule
    check(model(Decoder, 4), case._replace(gather="step"))  # which is for that step too


SCANNED = {"stack": {"unroll": False}}
CASES = {  # name: (model, its layers, case, changes of the config)
    "one micro-batch": (Decoder, 4, Case("1f1b", 2, 1, 1, 2), {}),
    "one micro-batch, zero_bubble": (Decoder, 4, Case("zero_bubble", 4, 1), {}),
    "two layers in each of two chunks": (Decoder, 8, Case("interleaved", 2, 4, chunks=2), {}),
    "a loop over layers": (Everything, 8, Case("1f1b", 2, 3, 1, 2), SCANNED),
    "a loop over checkpoints": (
        Decoder, 8, Case("gpipe", 2, 3, 3, 2),
        {"pipeline": {"schedule": "gpipe", "gather": "step", "activation_checkpoint_interval": 2}, **SCANNED},
    ),
    "llama": (Llama, 4, Case("interleaved", 2, 4, 3, 2, chunks=2), {}),
    # Dropout, integers and masks between the layers, parameters that are integers.
    "everything, gpipe": (Everything, 2, Case("gpipe", 2, 3), {}),
    "everything, zero_bubble": (Everything, 2, Case("zero_bubble", 2, 3), {}),
}  # fmt: skip


@pytest.mark.parametrize("name", keep(CASES, ["everything, gpipe"]))
def test_one_step(name):
    kind, layers, case, more = CASES[name]
    of = model(kind, layers)
    assert_close(run(of, case, **more), unpipelined(of, case.unpipelined))


ODD = [(Case("1f1b", 2, 3), True), (Case("zero_bubble", 4, 4, 2, 2), False)]


@pytest.mark.parametrize(("case", "tied"), keep(ODD, ODD[:1]), ids=str)
def test_a_vocabulary_that_the_stages_do_not_divide_lies_on_all_of_them(case, tied):
    odd = model(Decoder, case.layers, tied=tied, vocab=VOCAB + 1)
    assert not any(leaf.on_pipe for leaf in jax.tree.leaves(case.step(odd).layouts["ends"]))
    assert all(leaf.on_pipe for leaf in jax.tree.leaves(case.step(model(Decoder, 4, tied=tied)).layouts["ends"]))
    check(odd, case)


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


DRAWN = [Case("1f1b", 4, 4), Case("zero_bubble", 2, 2, chunks=2)]


@named(some(DRAWN, DRAWN[1:]))
def test_the_dropout_masks_are_those_of_the_unpipelined_step(case):
    noisy = model(Dropout, case.layers)
    assert abs(check(noisy, case).loss / unpipelined(model(Decoder, case.layers), case.unpipelined).loss - 1) > 1e-3


STALE = [Case("1f1b", 4, 4), Case("interleaved", 2, 3, chunks=2), Case("zero_bubble", 4, 3)]


@named(some(STALE, STALE[:1]))
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
