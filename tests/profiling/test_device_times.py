"""The profile of a step: which operations belong to which part, and how overlapping kernels add up."""

import re

import jax
import pytest
from helpers.engines import ACCUM, TRAIN, build, engine, rows

import jzero
from jzero.profiling import device_times as module
from jzero.profiling.device_times import (
    BACKWARD,
    COLLECTIVES,
    FORWARD,
    OTHER,
    UPDATE,
    Kernel,
    Profile,
    device_times,
    parts_of_instructions,
)

PARTS = {"a": FORWARD, "b": BACKWARD, "c": UPDATE, "d": OTHER, "ag": COLLECTIVES, "while.1": ""}
MS = 1e6


def kernel(operation, start, end, name=""):
    return Kernel(name or operation, operation, start * MS, end * MS)


@pytest.mark.parametrize(
    ("kernels", "parts", "hidden"),
    [
        ([kernel("a", 0, 2), kernel("b", 2, 5), kernel("c", 6, 7)], {FORWARD: 2, BACKWARD: 3, UPDATE: 1}, 0),
        ([kernel("a", 0, 2), kernel("ag", 1, 4)], {FORWARD: 2, COLLECTIVES: 2}, 1),
        ([kernel("ag", 0, 10), kernel("b", 2, 5), kernel("b", 4, 6)], {BACKWARD: 4, COLLECTIVES: 6}, 4),
        ([kernel("a", 0, 4), kernel("b", 2, 6)], {FORWARD: 4, BACKWARD: 2}, 0),  # no time counts twice
        ([kernel("while.1", 0, 9), kernel("b", 1, 3)], {BACKWARD: 2}, 0),  # the loop is what runs in it
        ([kernel("unheard", 0, 1), kernel("d", 1, 2)], {OTHER: 2}, 0),
        ([kernel("x", 0, 1, "ncclDevKernel_AllReduce"), kernel("all_gather.9", 1, 2)], {COLLECTIVES: 2}, 0),
        ([], {}, 0),
    ],
)
def test_kernels_add_up(kernels, parts, hidden):
    found = device_times(reversed(kernels), PARTS)
    assert found.parts == pytest.approx(parts)
    assert found.hidden == pytest.approx(hidden)


def dots(text, part):
    """The matrix products of a part, by the names that JAX gave their operations."""
    found = parts_of_instructions(text)
    names = re.findall(r"^\s*(?:ROOT )?%?([\w.\-]+) = \S+ dot\(", text, re.MULTILINE)
    return sum(found[name] == part for name in names)


def test_the_parts_of_a_program():
    """A layer has one product in the forward pass and two in the backward pass, the first layer one."""

    class Chain:
        def init(self, rng):
            return {name: 0.1 * jax.random.normal(rng, (8, 8)) for name in "uvw"}

        def loss(self, params, batch, rng):
            x = batch
            for name in "uvw":
                x = x @ params[name]
            return (x**2).mean()

    config = {"train_batch_size": 8, "optimizer": {"type": "Muon", "params": {"lr": 0.1}}, "gradient_clipping": 0}
    mesh = jzero.make_mesh(devices=jax.devices()[:2])
    step = jzero.make_train_step(Chain(), config, mesh=mesh)
    text = step.lower(jax.ShapeDtypeStruct((8, 8), "float32")).compile().as_text()
    assert (dots(text, FORWARD), dots(text, BACKWARD)) == (3, 5)
    assert dots(text, UPDATE) > 0  # Muon's
    found = parts_of_instructions(text)
    collectives = re.findall(r"^\s*(?:ROOT )?%?([\w.\-]+) = .*? (?:all-reduce|all-gather)\(", text, re.MULTILINE)
    assert collectives
    assert {found[name] for name in collectives} == {COLLECTIVES}


def test_one_line_once_in_a_run(capsys):
    made = build(more={"wall_clock_breakdown": True, "steps_per_print": 2})[0]
    capsys.readouterr()
    for seed in range(6):
        made.train_batch(rows(seed))
    lines = capsys.readouterr().out.splitlines()
    (line,) = (line for line in lines if "profiled" in line)
    assert lines.index(line) == 2  # after the line of step 2 and its times
    total, terms = re.fullmatch(r"step 2, profiled: device ([\d.]+) ms = (.*) \(and [\d.]+ overlapped\)", line).groups()
    terms = dict(term.split(" ") for term in terms.split(" + "))
    assert {FORWARD, BACKWARD, UPDATE} <= set(terms) <= {FORWARD, BACKWARD, UPDATE, OTHER, COLLECTIVES}
    assert float(total) == pytest.approx(sum(map(float, terms.values())), abs=0.05 * 6)
    assert ["profile" in line for line in lines if "ms a step" in line] == [True, False, False]
    names = [k.operation for k in made._observers.profiles.device.kernels]
    assert (TRAIN, max(map(names.count, names)) % ACCUM) == (24, 0)  # what is in the loop ran for each micro-batch


def test_another_profile_is_running(capsys, tmp_path):
    made = engine()
    profile = Profile()
    with jax.profiler.trace(str(tmp_path)):
        profile.start()
        made.train_batch(rows(0)).block_until_ready()
        profile.stop()
    assert "profile" in profile.problem.lower()
    assert profile.kernels == []


def test_a_profile_without_kernels(monkeypatch):
    profile = Profile()
    monkeypatch.setattr(module, "_read", lambda file: [])
    profile.start()
    profile.stop()
    assert profile.problem == "the profiler saw no kernels"
