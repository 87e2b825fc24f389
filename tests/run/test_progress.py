"""What a run shows of itself: notices of slow work, its breakdowns, and at its end the summary and the verdict."""

import contextlib
import io
import json
import re
import sys
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from helpers.engines import LINE, TRAIN, assert_same, build, engine, parts, parts_of, printed, rows, three_calls
from helpers.refusals import compilations
from helpers.stored_cases import check_cases

from jzero.config import Config
from jzero.display import live
from jzero.display import slow_work as slow
from jzero.planner import GPUS
from jzero.profiling.device_times import DeviceTimes
from jzero.run import clock as clock_module
from jzero.run import observers, step_memory, summary
from jzero.run.clock import CHECKPOINT, COMPILE, DATA, DEVICE, EVALUATION, HOST, PROFILE, SCRIPT, START, Clock
from jzero.run.speed import CompletedSteps, Ideal, Totals, ideal
from jzero.run.summary import name_bottleneck
from jzero.step.batch import Amount, amount_of


def test_compiling_and_the_devices_work_count_as_such(monkeypatch):
    """Laps of whole seconds, with known events."""
    now, compiled, worked = [0.0], clock_module.Compilations(), {}
    monkeypatch.setattr(clock_module.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(clock_module, "compilations", compiled)
    clock = Clock(lambda since, until: worked)

    def lap(part, seconds, compiling=0.0, **work):
        now[0] += seconds
        compiled.seconds += compiling
        worked.clear()
        worked.update(work)
        clock.lap(part)

    lap(START, 2.0)
    lap(HOST, 5.0, compiling=4.0)  # 1 s is not compilation
    lap(SCRIPT, 3.0, device=3.0)  # the script waits for the devices
    lap(SCRIPT, 3.0, device=1.0)
    lap(SCRIPT, 2.0, device=0.5, evaluation=1.0)
    lap(HOST, 2.0, compiling=1.5, device=2.0)  # compiled while they work
    lap(EVALUATION, 1.0, compiling=7.0)  # in other threads too: no lap is longer than its time
    assert clock.total == {
        START: 2.0, HOST: 1.0, COMPILE: 4.0 + 1.5 + 1.0, DEVICE: 3.0 + 1.0 + 0.5 + 0.5, SCRIPT: 2.0 + 0.5,
        EVALUATION: 1.0,
    }  # fmt: skip
    assert sum(clock.total.values()) == now[0]


def test_the_compilation_inside_another_counts_once(monkeypatch):
    """Events arrive when they end; one at 10 s of 4 s contains those before it that end after 6 s."""
    compiled, found = clock_module.Compilations(), []
    for end, seconds in ((5.0, 2.0), (6.0, 1.0), (8.0, 0.5), (9.0, 1.0), (10.0, 4.0)):
        monkeypatch.setattr(clock_module.time, "perf_counter", lambda end=end: end)
        compiled.add("/jax/core/compile/jaxpr_trace_duration", seconds)
        found.append(compiled.seconds)
    compiled.add("/jax/other", 1.0)
    assert [*found, compiled.seconds] == pytest.approx([2.0, 3.0, 3.5, 4.5, 7.0, 7.0])  # 7 s: from 3 to 10


def test_only_text_has_tokens():
    for batch, tokens in (
        ({"labels": np.zeros((8, 4), np.int32), "input_ids": np.zeros((8, 16), np.uint16)}, 128),
        ((np.zeros((8, 16), np.int64), np.zeros((8, 4), np.int64)), 128),
        ({"inputs": np.zeros((8, 784), np.uint8)}, None),  # pixels
        ({"image": np.zeros((8, 16), np.int32)}, None),
        ((np.zeros((8, 16), np.float32), np.zeros((8, 10), np.int32)), None),
    ):
        assert amount_of(batch) == (8, tokens), batch
    assert amount_of({}) == (0, None)


def test_the_parts_of_a_summary_add_up():
    seconds = {START: 1.0, COMPILE: 62.0, HOST: 2.0, DEVICE: 37.99, CHECKPOINT: 3.0, SCRIPT: 0.01}
    completed = CompletedSteps()
    completed.recent.append(Totals(20, 160, 81920, 1))
    completed.ideal, completed.metrics = Ideal(0.8, Amount(8, 4096)), {"loss": 1.5}
    assert summary.summary_text(seconds, 2, completed, ["verdict", ""], {"checkpoints": "runs/a"}) == (
        "jzero: 20 steps in 1 min 46 s = compile 1 min 2 s (2 programs from the cache) + steps 40.0 s + saves 3.0 s"
        " + start 1.0 s\n"
        "  160 samples, 81,920 tokens; 4.0 samples/s, 2,048 tokens/s, MFU 40.0 %; last loss 1.5000; 1 skipped\n"
        "  verdict\n"
        "  checkpoints in runs/a"
    )
    completed.ideal = Ideal(0.8, Amount(8, 4095))  # the batches had other lengths than the step that was counted
    assert "MFU" not in summary.summary_text(seconds, 2, completed, [], {})


def test_a_run_ends_with_its_summary(capsys, monkeypatch, tmp_path):
    """And the first call of each of its programs is slow work."""
    monkeypatch.delattr(sys, "last_value", raising=False)
    shown = []
    for module in ("train_step", "call"):
        monkeypatch.setattr(f"jzero.step.{module}.slow_work", lambda what: shown.append(what) or slow.slow_work(what))
    files = {"enabled": True, "output_path": str(tmp_path), "job_name": "run"}
    schedule = {"total_num_steps": 2, "warmup_num_steps": 1, "warmup_max_lr": 0.1, "warmup_min_lr": 0.02}
    more = {"jsonl_monitor": files, "csv_monitor": files, "scheduler": {"type": "WarmupDecayLR", "params": schedule}}
    made = build(model=LINE, more=more)[0]
    losses = [float(made.train_batch(rows(seed))) for seed in range(4)]
    for _ in range(2):
        made.eval_batch(rows(9))
    made.save_checkpoint(tmp_path / "checkpoints").wait()
    assert [re.sub(r" \(.*", "", what) for what in shown] == [
        "initialising the state", "compiling the step", "compiling the evaluation"
    ]  # fmt: skip
    engine()  # another one, without steps, changes nothing
    lines = [line for line in printed(made, capsys).splitlines() if "schedule ended" in line]
    assert lines == ["jzero: the schedule ended at step 2; the learning rate stays at 0.02"]
    observers.print_last()
    first, second, third = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"jzero: 4 steps in ([\d.]+ s|\d+ min \d+ s)( = .*)?", first)
    assert re.fullmatch(rf"  {4 * TRAIN} samples; [\d,.]+ samples/s; last loss {losses[-1]:.4f}; 0 skipped", second)
    assert third == f"  curves in {tmp_path}/run; checkpoints in {tmp_path}/checkpoints"
    observers.print_last()
    assert not capsys.readouterr().out  # once
    assert {START, HOST, CHECKPOINT} <= made._observers.clock.total.keys()


def test_only_the_script_between_the_steps_is_a_wait(monkeypatch):
    """A model is loaded before the first, and exported after the last."""
    made, found = engine(), []
    monkeypatch.setattr(observers, "name_bottleneck", lambda seconds, *_: found.append(seconds[SCRIPT]) or [])
    total = made._observers.clock.total
    for seconds in (100, 10):
        total[SCRIPT] = total.get(SCRIPT, 0) + seconds
        made.train_batch(rows(0))
    total[SCRIPT] += 1000
    made._observers.summary()
    assert 10 <= found[0] < 50


@pytest.mark.parametrize(
    ("case", "lines"), [(ValueError("no"), 0), (KeyboardInterrupt(), 2), ("fork", 0), ("no step", 0)], ids=str
)
def test_which_runs_end_with_a_summary(case, lines, capsys, monkeypatch):
    observers.print_last()  # of earlier tests
    made = engine()
    if case != "no step":
        made.train_batch(rows(0))
    capsys.readouterr()
    monkeypatch.delattr(sys, "last_value", raising=False)
    with monkeypatch.context() as child:
        if isinstance(case, BaseException):
            child.setattr(sys, "last_value", case, raising=False)
        if case == "fork":
            child.setattr(observers.os, "getpid", lambda: -1)
        observers.print_last()
    assert len(capsys.readouterr().out.splitlines()) == lines
    made._observers._config = Config.load({"train_batch_size": 8, "progress": {"summary": False}})
    assert made._observers.summary() == ""


def test_slow_work_has_a_line_whenever_its_time_has_doubled(monkeypatch, capsys):
    """Where no panel shows it; only waits move the clock."""
    time = SimpleNamespace(now=100.0)
    monkeypatch.setattr(slow.time, "monotonic", lambda: time.now)

    def lines(takes):
        def wait(period):
            end, time.now = time.now + period, min(time.now + period, 100.0 + takes)
            return time.now < end

        time.now = 100.0
        work = slow.SlowWork("compiling the step", time.now)
        monkeypatch.setattr(slow, "_open", [work])
        slow._watch(work, wait)
        out = capsys.readouterr()
        assert not out.out
        return out.err.splitlines()

    monkeypatch.setattr(live, "kind", lambda: live.PLAIN)
    assert lines(takes=4.9) == []
    with slow.shown_elsewhere():
        assert lines(takes=47.0) == []
    assert str(slow.current()) == "compiling the step, 47 s"
    expected = [f"jzero: compiling the step{words}" for words in (", 5 s", ", 10 s", ", 20 s", ", 40 s")]
    assert lines(takes=47.0) == [*expected, "jzero: compiling the step: done after 47 s"]


def test_the_innermost_work_is_named(monkeypatch):
    """Also after an exception; on process 0 alone; what has begun within five seconds has no name yet."""
    monkeypatch.setattr(slow, "FIRST", 0.0)
    monkeypatch.setattr(live, "kind", lambda: live.TERMINAL)
    with slow.shown_elsewhere():
        with slow.slow_work("reading a checkpoint"):
            with contextlib.suppress(ValueError), slow.slow_work("compiling"):
                assert slow.current().what == "compiling"
                raise ValueError
            assert slow.current().what == "reading a checkpoint"
            monkeypatch.setattr(slow, "FIRST", 1e9)
            assert slow.current() is None
        monkeypatch.setattr(slow, "FIRST", 0.0)
        assert slow.current() is None
    monkeypatch.setattr(slow.jax, "process_index", lambda: 1)
    monkeypatch.setattr(slow, "backends_are_initialized", lambda: True)
    with slow.slow_work("saving"):
        assert slow.current() is None


def test_the_verdict(pytestconfig):
    """The largest wait is named, and what is advised is off and faster; a profile tells communication apart.

    CPUs compute more slowly in bf16; a run must be long enough.
    """

    def outcome(case):
        config = Config.load({"train_batch_size": 8, **case.get("config", {})})
        devices = [SimpleNamespace(platform=platform) for platform in case.get("devices", ["gpu"])]
        times = DeviceTimes(*case["profile"]) if "profile" in case else None
        return name_bottleneck(case["seconds"], config, devices, times)

    check_cases(Path(__file__).with_name("verdicts.jsonl"), outcome, pytestconfig)


def test_the_lines_of_times_and_of_memory(tmp_path):
    """An engine with everything on: the parts add up to the total, which is that of the speed in the line before."""
    files = {"enabled": True, "output_path": str(tmp_path), "job_name": ""}
    more = {"wall_clock_breakdown": True, "memory_breakdown": True, "steps_per_print": 2, "jsonl_monitor": files}
    with contextlib.redirect_stdout(io.StringIO()) as start:
        made = build(model=LINE, more=more)[0]
    seen, found = {}, {}
    with contextlib.redirect_stdout(io.StringIO()) as out:
        made.train_batch(rows(0))
        for step, batches in ((2, [rows(1)]), (4, [iter(parts(2)), iter(parts_of(rows(3)))])):
            for batch in batches:
                loss = float(made.train_batch(batch))
            seen[step] = loss, made.get_global_grad_norm()
            made.eval_batch(rows(9))
    lines = out.getvalue().splitlines()
    for before, line in pairwise(lines):
        if times := re.fullmatch(r"step (\d+): ([\d.]+) ms a step = (.*)", line):
            step, total = int(times[1]), float(times[2])
            own = found[step] = {part: float(ms) for part, ms in (term.split(" ") for term in times[3].split(" + "))}
            assert total == pytest.approx(sum(own.values()), abs=0.05 * (len(own) + 1))
            loss, norm = seen[step]
            words = rf"step {step}: loss {loss:.4f}, lr 1.000e-02, grad norm {norm:.3f}, skipped 0, ([\d.]+) samples/s"
            speed = float(re.fullmatch(words, before)[1])
            assert speed == pytest.approx(1000 * TRAIN / total, rel=0.05 / total + 0.05 / speed + 1e-6)
    assert {step: list(own) for step, own in found.items()} == {
        2: [HOST, COMPILE, DEVICE, PROFILE, SCRIPT], 4: [DATA, HOST, COMPILE, DEVICE, EVALUATION, SCRIPT],
    }  # fmt: skip
    assert {part: round(ms, 1) for part, ms in made.get_wall_clock_timers().items()} == found[4]
    made._observers.close()
    for line in map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines()):
        times = {name.rpartition("_ms_")[2]: ms for name, ms in line.items() if "elapsed_time_ms_" in name}
        if times:
            assert times.pop("step") == pytest.approx(sum(times.values()))
            assert {part: round(ms, 1) for part, ms in times.items()} == found.pop(line["step"])
    assert not found
    memory = dict(line.split(": ", 1) for line in (start.getvalue() + out.getvalue()).splitlines() if "memory" in line)
    assert [phase.removeprefix("memory ") for phase in memory] == [
        "before the state", "with the state", "of a step, planned", "after the first step", "after step 2",
        "after step 4",
    ]  # fmt: skip
    stats = made.step_fn.lower(rows(0)).compile().memory_analysis()
    new, kept = stats.output_size_in_bytes - stats.alias_size_in_bytes, stats.argument_size_in_bytes
    sizes = kept + new + stats.temp_size_in_bytes, kept, new, stats.temp_size_in_bytes
    total, arguments, outputs, temporaries = map(step_memory.size_text, sizes)
    words = f"{total} per device = arguments {arguments} + outputs {outputs} + temporaries {temporaries}"
    assert memory.pop("memory of a step, planned") == words
    host = r"host [\d.]+ [KMG]iB, peak [\d.]+ [KMG]iB \(cpu devices report none of their own\)"
    assert all(re.fullmatch(host, words) for words in memory.values())


def test_only_the_breakdown_waits_for_the_devices(monkeypatch):
    """And the numbers of the run are the same."""
    waits, block = [], jax.block_until_ready
    monkeypatch.setattr(jax, "block_until_ready", lambda x: waits.append(x) or block(x))
    plain, timed = engine(), engine()
    timed._observers.lines.timed = True
    for made, count in ((plain, 0), (timed, 3)):
        waits.clear()
        made.train_batch(rows(0))
        three_calls(made, parts(1))
        made.train_batch(rows(2))
        assert len(waits) == count
    assert_same((plain.state.params, plain.state.opt_state), (timed.state.params, timed.state.opt_state))
    assert plain.get_wall_clock_timers() == {}


def test_what_is_known_of_a_step_compiles_nothing(monkeypatch):
    made = engine()
    made.train_batch(rows(0))
    compilations.clear()
    step_memory.planned(made.step_fn)
    device = SimpleNamespace(platform="gpu", device_kind=GPUS["t4"].description)
    monkeypatch.setattr(jax, "local_devices", lambda: [device])
    assert ideal(made.step_fn).seconds > 0
    assert not compilations
    jax.jit(lambda x: x + 3).lower(1.0).compile()
    assert compilations  # this is how JAX counts it


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
