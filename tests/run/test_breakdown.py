"""The breakdowns of time and memory: lines at the right steps, whose numbers agree with other sources."""

import contextlib
import copy
import io
import itertools
import re
from types import SimpleNamespace

import jax
import pytest
from helpers.engines import TRAIN, assert_same, build, engine, parts, parts_of, rows, three_calls
from helpers.engines import printed as printed_by

from jzero.run import clock as clock_module
from jzero.run import step_memory
from jzero.run.clock import COMPILE, DATA, DEVICE, EVALUATION, HOST, PROFILE, SCRIPT, Clock, per_step
from jzero.run.observers import Observers

TIMES = re.compile(r"step (\d+): ([\d.]+) ms a step = (.*)")
ALL = {"wall_clock_breakdown": True, "memory_breakdown": True, "steps_per_print": 2}


@contextlib.contextmanager
def printed(into):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        yield
    into.extend(out.getvalue().splitlines())


@pytest.fixture(scope="module")
def run():
    """An engine with everything on, after 4 steps; its lines at the start and while it trains."""
    start, lines = [], []
    with printed(start):
        made = build(more=ALL)[0]
    with printed(lines):
        made.train_batch(rows(0))
        made.train_batch(rows(1))
        made.train_batch(iter(parts(2)))
        made.eval_batch(rows(9))
        three_calls(made, parts_of(rows(3)))
    return SimpleNamespace(engine=made, start=start, lines=lines)


def times(lines):
    """{step: (total, {part: milliseconds})}"""
    found = [TIMES.fullmatch(line).groups() for line in lines if TIMES.fullmatch(line)]
    return {
        int(step): (float(total), {k: float(v) for k, v in (term.split(" ") for term in terms.split(" + "))})
        for step, total, terms in found
    }


def test_laps_add_up_to_the_whole(monkeypatch):
    ticks = itertools.accumulate([5.0, 1.0, 2.0, 4.0, 8.0, 0.0, 3.0, 5.0])
    monkeypatch.setattr(clock_module.time, "perf_counter", lambda: next(ticks))
    clock = Clock()
    clock.lap(SCRIPT)
    clock.lap(HOST)
    clock.lap(DEVICE)
    clock.lap(SCRIPT)
    first = clock.lap(HOST)
    assert per_step({}, first.spent, steps=2) == {HOST: 1000.0, DEVICE: 2000.0, SCRIPT: 4500.0}
    clock.lap(DATA)
    assert per_step(first.spent, clock.lap(HOST).spent, steps=1) == {DATA: 3000.0, HOST: 5000.0}


def test_one_line_of_times_beside_each_progress_line(run):
    found = times(run.lines)
    assert list(found) == [2, 4]
    assert list(found[2][1]) == [HOST, COMPILE, DEVICE, PROFILE, SCRIPT]
    assert list(found[4][1]) == [DATA, HOST, COMPILE, DEVICE, EVALUATION, SCRIPT]
    for step, (total, own) in found.items():
        assert total == pytest.approx(sum(own.values()), abs=0.05 * (len(own) + 1))
        before = run.lines[run.lines.index(next(x for x in run.lines if x.startswith(f"step {step}: {total}"))) - 1]
        speed = float(re.fullmatch(rf"step {step}: loss .* ([\d.]+) samples/s", before)[1])
        assert speed == pytest.approx(1000 * TRAIN / total, rel=0.05 / total + 0.05 / speed + 1e-6)
    shown = {part: f"{spent:.1f}" for part, spent in run.engine.get_wall_clock_timers().items()}
    assert shown == {part: f"{spent:.1f}" for part, spent in found[4][1].items()}


@pytest.mark.parametrize("loop", ["train_batch", "three calls"])
def test_only_the_breakdown_waits_for_the_devices(loop, monkeypatch, capsys):
    """And the numbers of the run are the same."""
    waits, block = [], jax.block_until_ready
    monkeypatch.setattr(jax, "block_until_ready", lambda x: waits.append(x) or block(x))
    plain, timed = engine(), engine()
    timed._observers.lines.timed = True
    for made, count in ((plain, 0), (timed, 3)):
        waits.clear()
        for seed in range(3):
            made.train_batch(rows(seed)) if loop == "train_batch" else three_calls(made, parts(seed))
        assert len(waits) == count
    assert_same((plain.state.params, plain.state.opt_state), (timed.state.params, timed.state.opt_state))
    assert plain.get_wall_clock_timers() == {}
    assert not capsys.readouterr().out


def test_without_steps_per_print_every_tenth_step_has_lines(capsys):
    made = engine()
    config = made.step_fn.config.model_copy(update={"wall_clock_breakdown": True, "memory_breakdown": True})
    step = copy.copy(made.step_fn)
    step.config = config
    made._observers = Observers(step)
    capsys.readouterr()
    for step in range(1, 12):
        made.train_batch(rows(0))
        out = printed_by(made, capsys)
        for words in (f"step {step}: loss ", "ms a step", f"memory after step {step}"):
            assert (words in out) == (step == 10)
    made._observers.lines.prints = False  # every process has its times, not only the one that prints
    for _ in range(9):
        made.train_batch(rows(0))
    assert HOST in made.get_wall_clock_timers()
    assert "ms a step" not in printed_by(made, capsys)


def test_memory_lines_come_at_their_phases(run):
    begin = [line for line in run.start if line.startswith("memory")]
    assert [line.split(":")[0] for line in begin] == ["memory before the state", "memory with the state"]
    middle = [line.split(":")[0] for line in run.lines if line.startswith("memory")]
    planned, first = "memory of a step, planned", "memory after the first step"
    assert middle == [planned, first, "memory after step 2", "memory after step 4"]
    host = r"memory [\w ]+: host [\d.]+ [KMG]iB, peak [\d.]+ [KMG]iB \(cpu devices report none of their own\)"
    both = [line for line in [*begin, *run.lines] if line.startswith("memory") and "host" in line]
    assert all(re.fullmatch(host, line) for line in both)


def test_the_planned_memory_is_the_compilers(run):
    stats = run.engine.step_fn.lower(rows(0)).compile().memory_analysis()
    new, kept = stats.output_size_in_bytes - stats.alias_size_in_bytes, stats.argument_size_in_bytes
    sizes = kept + new + stats.temp_size_in_bytes, kept, new, stats.temp_size_in_bytes
    total, arguments, outputs, temporaries = map(step_memory.size_text, sizes)
    words = f"{total} per device = arguments {arguments} + outputs {outputs} + temporaries {temporaries}"
    assert f"memory of a step, planned: {words}" in run.lines


def test_planning_compiles_nothing():
    made, compiled = engine(), []
    made.train_batch(rows(0))
    jax.monitoring.register_event_duration_secs_listener(lambda event, *_, **__: compiled.append(event))
    step_memory.planned(made.step_fn)
    assert not [event for event in compiled if "backend_compile" in event]
    jax.jit(lambda x: x + 3).lower(1.0).compile()
    assert [event for event in compiled if "backend_compile" in event]  # this is how JAX calls it


def test_the_fullest_device_is_shown(monkeypatch, tmp_path):
    def device(number, now, peak):
        stats = {"bytes_in_use": now * 2**30, "peak_bytes_in_use": peak * 2**30, "bytes_limit": 75 * 2**30}
        return SimpleNamespace(id=number, platform="gpu", memory_stats=lambda: stats)

    (tmp_path / "status").write_text("Name:\tpython\nVmHWM:\t 3145728 kB\nVmRSS:\t 2097152 kB\n")
    fullest = "3.00 GiB in use, peak 4.00 GiB of 75.0 GiB on device 1, the fullest of 2; host 2.00 GiB, peak 3.00 GiB"
    alone = "1.00 GiB in use, peak 2.00 GiB of 75.0 GiB on device 0; host memory unknown on this system"
    one, two = device(0, 1, 2), device(1, 3, 4)
    for devices, status, words in (([one, two], "status", fullest), ([one], "missing", alone)):
        monkeypatch.setattr(jax, "local_devices", lambda devices=devices: devices)
        monkeypatch.setattr(step_memory, "STATUS", tmp_path / status)
        assert step_memory.used("now") == f"memory now: {words}"
