"""Properties of every pipeline schedule, and the numbers of the table in `jzero.pipeline.schedules`."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jzero.config.sections import SCHEDULE_NAMES
from jzero.errors import ConfigError
from jzero.pipeline.draw import draw_figure
from jzero.pipeline.schedules import forward_only, make_schedule, slots

costs = st.tuples(*[st.floats(0.1, 10)] * 3)


@st.composite
def schedules(draw, stages=16, micro_batches=64):
    """Any schedule, about half of them with a number of micro-batches that is a multiple of S."""
    name = draw(st.sampled_from(SCHEDULE_NAMES))
    S, V = draw(st.integers(1, stages)), draw(st.integers(1, 1 if name in ("gpipe", "1f1b") else 4))
    M = draw(st.integers(1, micro_batches) | st.integers(1, max(1, micro_batches // S)).map(lambda groups: S * groups))
    return make_schedule(name, S, M, V)


def sizes(schedule):
    return schedule.stages, schedule.micro_batches, schedule.chunks


def when(schedule, work):
    """[slices of the layers, micro-batches]: the tick of an operation; checks that each occurs exactly once."""
    S, M, V = sizes(schedule)
    assert work.chunk.shape == work.micro.shape == (schedule.ticks, S)
    ticks, stages = np.nonzero(work.active)
    chunk, micro = work.chunk[ticks, stages], work.micro[ticks, stages]
    at = np.full((V * S, M), -1)
    at[chunk * S + stages, micro] = ticks
    assert len(ticks) == at.size  # with no tick missing below, none occurs twice
    assert at.min() >= 0
    assert (work.chunk[~work.active] == -1).all()
    assert (work.micro[~work.active] == -1).all()
    return at


def most_in_flight(schedule, first, last):
    """[stages]: the maximum number of chunks between the ticks of `first` and `last`, inclusive."""
    S = schedule.stages
    begin, end = when(schedule, first), when(schedule, last)
    begin, end = (x.reshape(-1, S, x.shape[1]).swapaxes(0, 1).reshape(S, -1) for x in (begin, end))
    ticks = np.arange(schedule.ticks)[:, None, None]
    return ((begin <= ticks) & (ticks <= end)).sum(axis=2).max(axis=0)


@settings(max_examples=150, deadline=None)
@given(schedules())
def test_dependencies(schedule):
    at = {letter: when(schedule, work) for letter, work in schedule.works.items()}
    F, B = at["F"], at["B"]
    # A message is used exactly one tick later, so no stage stores messages.
    np.testing.assert_array_equal(F[1:], F[:-1] + 1)
    np.testing.assert_array_equal(B[:-1], B[1:] + 1)
    # A tick runs F before B before W. Only the last slice has F and B in one tick, and none in gpipe.
    assert (B[:-1] > F[:-1]).all()
    if schedule.name == "gpipe":
        assert F.max() < B.min()
    else:
        np.testing.assert_array_equal(B[-1], F[-1])
    assert ("W" in at) == (schedule.name == "zero_bubble")
    if "W" in at:
        # A stage runs W with B, except at most one per preceding stage, which it delays until it has no B left.
        for stage in range(schedule.stages):
            b, w = B[stage :: schedule.stages], at["W"][stage :: schedule.stages]
            assert (w >= b).all()
            assert (w != b).sum() <= stage
            assert (w[w != b] > b.max()).all()


@settings(max_examples=150, deadline=None)
@given(schedules())
def test_in_flight(schedule):
    S, M, V = sizes(schedule)
    s = np.arange(S)
    bound = {
        "gpipe": np.full(S, M),
        "1f1b": 2 * S - 1 - 2 * s,
        "interleaved": S * V + S - 1 - 2 * s,
        "zero_bubble": S * V + S - 1 - s,
    }[schedule.name]
    *_, last = schedule.works.values()
    np.testing.assert_array_equal(schedule.in_flight, most_in_flight(schedule, schedule.forward, last))
    assert (schedule.in_flight <= np.minimum(bound, M * V)).all()
    if V == 1 or M % S == 0:
        np.testing.assert_array_equal(schedule.in_flight, np.minimum(bound, M * V))


@settings(max_examples=200, deadline=None)
@given(schedules(), costs)
def test_the_bubble_is_the_idle_part_of_every_stages_time_and_the_tables(schedule, cost):
    """The table is that of full groups of micro-batches; an incomplete last one costs at most as much."""
    S, M, V = sizes(schedule)
    F, B, W = cost
    price = {"F": F, "B": B, "W": W} if "W" in schedule.works else {"F": F, "B": B + W}
    used = {letter: work.active.any(axis=1) for letter, work in schedule.works.items()}
    letters = ["".join(letter for letter in used if used[letter][tick]) for tick in range(schedule.ticks)]
    assert letters == [works for works, ticks in schedule.phases for _ in range(ticks)]
    assert all(letters)
    assert all(a[0] != b[0] for a, b in zip(schedule.phases, schedule.phases[1:], strict=False))
    time = sum(price[letter] for works in letters for letter in works)
    for stage in range(S):
        busy = sum(price[letter] * work.active[:, stage].sum() for letter, work in schedule.works.items())
        assert schedule.bubble(*cost) == pytest.approx(1 - busy / time, abs=1e-12)
    assert schedule.ticks <= make_schedule(schedule.name, S, -(-M // S) * S, V).ticks
    if V > 1 and M % S:
        return
    phases, bubble = {
        "gpipe": ([("F", M + S - 1), ("B", M + S - 1)], (S - 1) / (M + S - 1)),
        "1f1b": ([("F", S - 1), ("FB", M), ("B", S - 1)], (S - 1) / (M + S - 1)),
        "interleaved": ([("F", S * V - 1), ("FB", M * V + S - S * V), ("B", S * V - 1)], (S - 1) / (M * V + S - 1)),
        "zero_bubble": (
            [("F", S * V - 1), ("FB", S - 1), ("FBW", M * V + 1 - S * V), ("BW", S * V - 1)],
            (S - 1) * (F + B) / (M * V * (F + B + W) + (S - 1) * (F + B)),
        ),
    }[schedule.name]
    assert schedule.bubble(*cost) == pytest.approx(bubble, abs=1e-12)
    if schedule.name != "zero_bubble" or M >= S:
        assert schedule.phases == [(works, ticks) for works, ticks in phases if ticks]
    assert {used["F"].sum(), used["B"].sum()} == {M * V + S - 1}


@settings(max_examples=60, deadline=None)
@given(schedules(), st.data())
def test_slots_keep_what_waits(schedule, data):
    works = list(schedule.works.values())
    first, last = data.draw(st.sampled_from(list(combinations(works, 2))))
    write, read, size = slots(first, last)
    assert 0 <= size - most_in_flight(schedule, first, last).max() <= 1
    assert write.shape == read.shape == first.micro.shape
    assert min(write.min(), read.min()) >= 0
    assert max(write.max(), read.max()) < size
    stages = np.arange(schedule.stages)
    buffer = np.full((size, schedule.stages, 2), -1)
    for tick in range(schedule.ticks):  # idle stages write -1 too and must not overwrite a used slot
        buffer[write[tick], stages] = np.stack([first.chunk[tick], first.micro[tick]], axis=1)
        expected = np.stack([last.chunk[tick], last.micro[tick]], axis=1)
        active = last.active[tick]
        np.testing.assert_array_equal(buffer[read[tick], stages][active], expected[active])


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 16), st.integers(1, 64), st.integers(1, 4), costs)
def test_forward_only(S, M, V, cost):
    schedule = forward_only(S, M, V)
    assert list(schedule.works) == ["F"]
    assert not schedule.backward.active.any()
    assert schedule.backward.micro.shape == (schedule.ticks, S)
    at = when(schedule, schedule.forward)
    np.testing.assert_array_equal(at[1:], at[:-1] + 1)
    assert schedule.phases == [("F", schedule.ticks)]
    assert schedule.bubble(*cost) == pytest.approx(1 - M * V / schedule.ticks)
    if V == 1 or M % S == 0:
        assert schedule.ticks == M * V + S - 1
    assert (schedule.in_flight == 1).all()


@pytest.mark.parametrize(
    ("arguments", "problems"),
    [
        (("1F1B", 2, 2, 1), ["pipeline.schedule = '1F1B': choose one of gpipe, 1f1b, interleaved, zero_bubble"]),
        (("1f1b", 2, -1, 1), ["micro_batches = -1: must be a positive integer"]),
        (("zero_bubble", 2, 2.0, 0), ["micro_batches = 2.0: must be a", "chunks = 0: must be a positive integer"]),
        (("1f1b", 2, 2, 3), ['pipeline.chunks = 3: schedule "1f1b" has one chunk per stage; set pipeline.sch']),
        ((None, 0, 1, 1), ["stages = 0: must be a positive integer", "pipeline.schedule = None: choose one of gpipe"]),
    ],
)
def test_errors(arguments, problems):
    with pytest.raises(ConfigError) as error:
        make_schedule(*arguments)
    assert len(error.value.problems) == len(problems)
    for got, start in zip(error.value.problems, problems, strict=True):
        assert got.startswith(start)


@settings(max_examples=3, deadline=None)
@given(schedules(stages=5, micro_batches=13))
def test_draw_figure(schedule):
    pytest.importorskip("matplotlib")
    (axes,) = draw_figure(schedule).axes
    assert axes.get_title(loc="left") == repr(schedule)
    corners = {(round(patch.get_x()), round(patch.get_y())) for patch in axes.patches}
    cells = sum(int(work.active.sum()) for work in schedule.works.values())
    assert len(corners) == len(axes.patches) == len(axes.texts) == cells  # no two overlap
    # As wide as the time in lockstep: one column for every operation of a tick.
    width = sum(len(letters) * ticks for letters, ticks in schedule.phases)
    assert {x for x, _ in corners} == set(range(width))
