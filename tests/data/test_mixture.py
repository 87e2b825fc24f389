"""A mixture reads what a loop over its samples would, from any number on and in any layout."""

from fractions import Fraction
from functools import partial
from types import SimpleNamespace
from unittest import mock

import jax.numpy as jnp
import numpy as np
import pytest
from helpers.loaders import Rows, Sizes, take
from helpers.refusals import refuses
from helpers.steps import mesh
from hypothesis import given, settings
from hypothesis import strategies as st

import jzero
from jzero.data import DataLoader, Mixture, TokenFile, interleave, steps_per_epoch
from jzero.data.interleave import Interleaving
from jzero.data.order import ENDLESS


def largest_remainder(weights, block):
    """Seats of a parliament of `block`: Hamilton's method, in exact arithmetic."""
    total = sum(map(Fraction, weights))
    exact = [Fraction(w) / total * block for w in weights]
    seats = [int(x) for x in exact]
    by_remainder = sorted(range(len(weights)), key=lambda k: (seats[k] - exact[k], k))
    for k in by_remainder[: block - sum(seats)]:
        seats[k] += 1
    return seats


def walk(lengths, stages, exhaustion, seed, block, most):
    """The construction that `interleave` documents, sample by sample: [(source, samples of it before)] of an epoch."""
    taken, found = [0] * len(lengths), []
    while len(found) < most:
        start, block_number = len(found), 0
        stage = max(s for s in stages if s <= start)
        stage_end = min((s for s in stages if s > start), default=most)
        weights = [w * (exhaustion == "repeat" or taken[k] < lengths[k]) for k, w in enumerate(stages[stage])]
        if not any(weights):
            break
        seats, changed = largest_remainder(weights, block), False
        while not changed and len(found) < stage_end:
            raw = iter(np.random.PCG64((seed, start, block_number)).random_raw(block).tolist())
            points = [((i + (next(raw) >> 11) * 2.0**-53) / n, k, i) for k, n in enumerate(seats) for i in range(n)]
            for _, k, _ in sorted(points):
                if changed or len(found) == stage_end:
                    break
                found.append((k, taken[k]))
                taken[k] += 1
                if exhaustion != "repeat" and taken[k] == lengths[k]:
                    changed = True
            block_number += 1
        if changed and exhaustion == "stop":
            break
    return found


MANY = 100


@st.composite
def cases(draw):
    lengths = draw(st.lists(st.integers(1, 40), min_size=1, max_size=4))
    starts = [0, *draw(st.lists(st.integers(1, 60), max_size=2, unique=True))]
    weights = st.lists(st.integers(0, 9), min_size=len(lengths), max_size=len(lengths)).filter(any)
    return lengths, {start: draw(weights) for start in sorted(starts)}


@settings(max_examples=60)
@given(cases(), st.sampled_from(["repeat", "drop", "stop"]), st.integers(0, 2**40), st.sampled_from([40, 64]))
def test_any_number_is_what_a_loop_finds(case, exhaustion, seed, block):
    lengths, stages = case
    with mock.patch.object(interleave, "BLOCK", block):
        wanted = walk(lengths, stages, exhaustion, seed, block, MANY)
        if len(wanted) < max(stages) and exhaustion == "drop":
            refuses(lambda: Interleaving(lengths, stages, exhaustion, seed), "are used up at sample")
            return
        found = Interleaving(lengths, stages, exhaustion, seed)
        assert found.length == (ENDLESS if exhaustion == "repeat" else len(wanted)) or len(wanted) == MANY
        numbers = np.arange(len(wanted))
        together = np.stack(found.locate(numbers), axis=1)
        assert together.tolist() == [list(pair) for pair in wanted]
        mixed = np.random.default_rng(0).permutation(numbers)[:20]
        np.testing.assert_array_equal(np.stack(found.locate(mixed), axis=1), together[mixed])
        for number in (*mixed[:9].tolist(), len(wanted)):
            counts = np.bincount([k for k, _ in wanted[:number]], minlength=len(lengths))
            assert found.taken(number).tolist() == counts.tolist()
        if exhaustion == "drop" and found.length < ENDLESS and all(stages[max(stages)]) and len(wanted) < MANY:
            assert len(wanted) == sum(lengths)
        if found.length < ENDLESS:  # the next epoch goes on where this one has left each source
            again = np.stack(found.locate(numbers + found.length), axis=1)
            whole = found.taken(found.length)
            assert again.tolist() == [[k, i + whole[k]] for k, i in wanted]


def mixture(exhaustion="repeat", times=1, **more):
    sources = {"web": (Rows(70 * times), 0.7), "code": (Rows(30 * times), 0.2), "books": (Rows(11 * times), 0.1)}
    stages = {40: {"code": 1, "books": 1}, 60: {"web": 3, "code": 1}}
    return Mixture(sources, stages=stages, exhaustion=exhaustion, **more)


def test_every_source_is_shuffled_anew_in_each_of_its_epochs():
    mixed = mixture(seed=3)
    which, indices = mixed.locate(np.arange(400))
    orders = []
    for k, length in enumerate((70, 30, 11)):
        own = indices[which == k]
        for begin in range(0, len(own) - length + 1, length):
            assert sorted(own[begin : begin + length]) == list(range(length))
            orders.append(tuple(own[begin : begin + length]))
    assert len(orders) > 5
    assert len(set(orders)) == len(orders)
    assert sorted(orders[0]) != list(orders[0])
    np.testing.assert_array_equal(mixed.locate(np.arange(390, 400))[1], indices[390:])
    other = Mixture({"books": (Rows(11), 1)}, seed=3).locate(np.arange(11))[1]
    assert other.tolist() == indices[which == 2][:11].tolist()  # by its name, whatever is beside it
    plain = mixture(shuffle=False).locate(np.arange(30))
    assert plain[1][plain[0] == 0].tolist() == list(range((plain[0] == 0).sum()))


@settings(max_examples=15)
@given(
    exhaustion=st.sampled_from(["repeat", "drop", "stop"]),
    layout=st.sampled_from([(1, 1, 1), (2, 1, 3), (1, 4, 2), (3, 2, 1), (4, 4, 1)]),
    stop=st.integers(1, 5),
    then=st.sampled_from([(1, 1, 1), (2, 2, 1), (1, 8, 1)]),
)
def test_any_layout_reads_the_same_and_resumes_exactly(exhaustion, layout, stop, then):
    mixed = mixture(exhaustion, times=5, seed=4)
    assert len(mixed) > 150

    def samples(begin, end):
        return mixed.rows(np.arange(begin, end))["x"].tolist()

    first = DataLoader(mixed, Sizes(*layout), seed=5)
    at = stop * first.step.batch_sizes.train
    assert take(first, at) == samples(0, at)
    assert first.seen == mixed.seen(at)
    second = DataLoader(mixed, Sizes(*then), seed=6)
    second.seek(first.position)
    assert take(second, 16) == samples(at, at + 16)


def test_epochs_go_on():
    """The second epoch has the same mixture, with other samples; a batch is filled up with those of its own epoch."""
    mixed = Mixture({"a": (Rows(9), 2), "b": (Rows(40), 1)}, exhaustion="stop")
    length, loader = len(mixed), DataLoader(mixed, Sizes(4, 1, 1))
    numbers = [*range(length), *range(-length % 4)]
    one, other = (mixed.rows(np.array([n + epoch * length for n in numbers]))["x"].tolist() for epoch in (0, 1))
    assert take(loader, 4 * 2 * len(loader)) == one + other
    assert one != other
    assert loader.position == {"epoch": 2, "samples": 0}
    assert loader.seen["a"] == {"samples": 18, "epochs": 2.0}


def test_a_run_knows_what_it_read():
    tokens = {"a": (TokenFile(np.arange(401), 8), 1), "b": (TokenFile(np.arange(81), 8), 3)}
    mixed = Mixture(tokens, stages={100: {"a": 1}})
    assert mixed.seen(100) == {
        "a": {"samples": 25, "epochs": 0.5, "tokens": 200}, "b": {"samples": 75, "epochs": 7.5, "tokens": 600},
    }  # fmt: skip
    assert mixed.seen({"epoch": 0, "samples": 300})["a"]["tokens"] == 8 * 225
    loader = DataLoader(mixed, Sizes(5, 2, 1))
    assert loader.report_notes() == [
        "mixture of a (50 samples), b (10 samples)", "from sample 0: a 25%, b 75%", "from sample 100: a 100%",
        "no end: sources that are used up are read again",
    ]  # fmt: skip
    loader.seek({"epoch": 0, "samples": 100})
    assert loader.report_notes()[-1] == "read so far: a 25 samples, b 75 samples"
    assert steps_per_epoch(mixed, 10) == 0
    assert len(mixed) == ENDLESS
    dropped = Mixture({"a": (Rows(4), 1), "b": (Rows(90), 1)}, exhaustion="drop")
    assert len(dropped) == 94
    ends = [f"{name} is used up after sample {n}: left out from there" for name, n in (("a", 7), ("b", 94))]
    assert dropped.report_notes()[-2:] == ends


def test_an_engine_reports_and_resumes_a_mixture(tmp_path, capsys):
    config = {"train_batch_size": 8, "optimizer": {"type": "SGD", "params": {"lr": 0.01}}}
    mean = SimpleNamespace(
        init=lambda rng: {"w": jnp.zeros(2)}, loss=lambda params, batch, rng: jnp.mean((batch["y"] - params["w"]) ** 2)
    )
    make = partial(jzero.initialize, model=mean, config=config, mesh=mesh(1), training_data=mixture(seed=2))
    engine, *_ = make()
    assert "\nTraining data\n  - mixture of web (70 samples), code (30 samples)" in capsys.readouterr().out
    losses = [float(engine.train_batch()) for _ in range(3)]
    engine.save_checkpoint(tmp_path).wait()
    losses += [float(engine.train_batch()) for _ in range(3)]
    seen = mixture(seed=2).seen(24)
    assert jzero.checkpoint.Checkpoint.find(tmp_path).notes["seen"] == seen
    engine, *_ = make(resume=tmp_path)
    assert engine.training_dataloader.seen == seen
    assert f"read so far: web {seen['web']['samples']} samples, code" in capsys.readouterr().out
    assert [float(engine.train_batch()) for _ in range(3)] == losses[3:]


def test_another_mixture_is_other_data():
    """On a resume, the notes of a checkpoint tell mixtures apart; a loader of other data has no such key."""
    orders = [
        DataLoader(mixed, Sizes(1, 1, 1)).order["order"]
        for mixed in (mixture(), mixture("drop"), mixture(seed=1), mixture(shuffle=False), Mixture({Rows(70): 1}))
    ]
    assert len(set(orders)) == len(orders)
    assert orders[0] == DataLoader(mixture(), Sizes(2, 1, 1), seed=7).order["order"]
    assert "order" not in DataLoader(Rows(4), Sizes(1, 1, 1)).order
    assert orders[0] in repr(DataLoader(mixture(), Sizes(1, 1, 1)))


@pytest.mark.parametrize(("one", "other", "same"), [(3, 3 + 1e-9, True), (3.00012205, 3.0001221, False)])
def test_mixtures_of_nearly_the_same_weights(one, other, same):
    """Weights that give another order, however near, are another mixture; between the last two one is rounded up."""
    a, b = (Mixture({"web": (Rows(70), weight), "code": (Rows(30), 1)}) for weight in (one, other))
    numbers = np.arange(2**16)
    assert np.array_equal(a.locate(numbers), b.locate(numbers)) == same
    assert (repr(a) == repr(b)) == same


THREE = (Rows(3), 1)


def test_what_does_not_fit():
    for make, words in (
        (lambda: Mixture({}), "with at least one source"),
        (lambda: Mixture([Rows(3)]), r"must be \{name: \(source, weight\)\}"),
        (lambda: Mixture({"a": Rows(3)}), r"sources\['a'\] is Rows: must be \(source, weight\)"),
        (lambda: Mixture({"a": (Rows(3), -1)}), "the weight of 'a' is -1; must be a number from 0"),
        (lambda: Mixture({"a": (Rows(3), 0)}), "sources: all weights are 0"),
        (lambda: Mixture({"a": (Rows(3), 1e-9), "b": THREE}), "weight = 1e-09: must be at least 1/65,536"),
        (lambda: Mixture({"a": (Rows(0), 1)}), "source 'a': training_data contains no samples"),
        (lambda: Mixture({"a": (lambda: iter([1]), 1)}), "source 'a' has no length"),
        (lambda: Mixture({"a": THREE}, seed=-1), "seed = -1: must be a whole number from 0"),
        (lambda: Mixture({"a": (mixture(), 1)}), "source 'a' is a Mixture: put its sources into this one"),
        (lambda: Mixture({"a": THREE}, stages={0: {"a": 1}}), r"stages\[0\]: must be"),
        (lambda: Mixture({"a": THREE}, stages={5: {"b": 1}}), r"stages\[5\]: unknown source 'b'; the sources are"),
        (lambda: Mixture({"a": THREE}, exhaustion="loop"), "exhaustion = 'loop': must be one of 'repeat', 'stop'"),
        (lambda: Mixture({"a": THREE, "b": (Rows(9), 0)}, stages={5: {"b": 1}}, exhaustion="drop"),
            "used up at sample 3, before the next stage begins at 5"),
        (lambda: Mixture({"a": (np.zeros((3, 2)), 1), "b": (np.zeros((3, 4), int), 1)}),
            r"source 'b' has samples int64\[4\], and 'a' has samples float64\[2\]: all sources must have the same"),
    ):  # fmt: skip
        refuses(make, words)
