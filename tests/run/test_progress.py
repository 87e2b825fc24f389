"""What a run shows of itself: notices of slow work, and at its end the summary and the verdict."""

import contextlib
import re
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from helpers.engines import TRAIN, build, engine, printed, rows

from jzero.config import Config
from jzero.display import live
from jzero.display import slow_work as slow
from jzero.optimizers.lr_schedules import make_lr_schedule
from jzero.profiling.device_times import DeviceTimes
from jzero.run import clock as clock_module
from jzero.run import observers, summary
from jzero.run.clock import CHECKPOINT, COMPILE, DATA, DEVICE, EVALUATION, HOST, SCRIPT, START, Clock, Compilations
from jzero.run.lines import Lines
from jzero.run.speed import CompletedSteps, Ideal, Totals
from jzero.run.summary import name_bottleneck
from jzero.step.batch import Amount, amount_of


def test_compiling_and_the_devices_work_count_as_such(monkeypatch):
    """Laps of whole seconds, with known events."""
    now, compiled, worked = [0.0], Compilations(), {}
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
    now, compiled = [0.0], Compilations()
    monkeypatch.setattr(clock_module.time, "perf_counter", lambda: now[0])

    def add(end, seconds, event="/jax/core/compile/jaxpr_trace_duration"):
        now[0] = end
        compiled.add(event, seconds)
        return compiled.seconds

    assert add(5.0, 2.0) == pytest.approx(2.0)
    assert add(6.0, 1.0) == pytest.approx(3.0)
    assert add(8.0, 0.5) == pytest.approx(3.5)
    assert add(9.0, 1.0) == pytest.approx(4.5)
    assert add(10.0, 4.0) == pytest.approx(7.0)  # from 3 to 10
    assert add(12.0, 1.0, "/jax/other") == pytest.approx(7.0)


@pytest.mark.parametrize(
    ("batch", "tokens"),
    [
        ({"labels": np.zeros((8, 4), np.int32), "input_ids": np.zeros((8, 16), np.uint16)}, 128),
        ((np.zeros((8, 16), np.int64), np.zeros((8, 4), np.int64)), 128),
        ({"inputs": np.zeros((8, 784), np.uint8)}, None),  # pixels
        ({"image": np.zeros((8, 16), np.int32)}, None),
        ((np.zeros((8, 16), np.float32), np.zeros((8, 10), np.int32)), None),
    ],
)
def test_only_text_has_tokens(batch, tokens):
    assert amount_of(batch) == (8, tokens)
    assert amount_of({}) == (0, None)


def test_skipped_steps_delay_the_end_of_the_schedule():
    params = {"total_num_steps": 20, "warmup_num_steps": 2, "cos_min_ratio": 0.01}
    schedule = make_lr_schedule("WarmupCosineLR", params, base_lr=0.1)
    config = Config.load({"train_batch_size": 8})
    found = Lines(config, schedule).end_of_schedule
    assert [found(20, 0), found(22, 2)] == ["", ""]
    assert found(23, 2) == "jzero: the schedule ended at step 22; the learning rate stays at 0.001"
    assert found(24, 2) == ""
    for endless in (None, make_lr_schedule("WarmupLR", {}, base_lr=0.1)):
        assert not Lines(config, endless).end_of_schedule(10**6, 0)


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


def test_a_run_ends_with_its_summary(capsys, monkeypatch, tmp_path):
    """And the first call of each of its programs is slow work."""
    monkeypatch.delattr(sys, "last_value", raising=False)
    shown = []
    for module in ("train_step", "call"):
        monkeypatch.setattr(f"jzero.step.{module}.slow_work", lambda what: shown.append(what) or slow.slow_work(what))
    files = {"enabled": True, "output_path": str(tmp_path), "job_name": "run"}
    schedule = {"total_num_steps": 2, "warmup_num_steps": 1, "warmup_max_lr": 0.1, "warmup_min_lr": 0.02}
    more = {"jsonl_monitor": files, "csv_monitor": files, "scheduler": {"type": "WarmupDecayLR", "params": schedule}}
    made = build(more=more)[0]
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


@pytest.fixture
def seconds(monkeypatch):
    """A clock that only `wait` moves: work takes `seconds.takes`."""
    time = SimpleNamespace(now=100.0, takes=0.0)
    monkeypatch.setattr(slow.time, "monotonic", lambda: time.now)

    def wait(period):
        begin = time.now
        time.now = min(begin + period, 100.0 + time.takes)
        return time.now < begin + period

    time.wait = wait
    return time


def test_slow_work_has_a_line_whenever_its_time_has_doubled(monkeypatch, seconds, capsys):
    """Where no panel shows it."""

    def lines(takes):
        seconds.now, seconds.takes = 100.0, takes
        work = slow.SlowWork("compiling the step", seconds.now)
        monkeypatch.setattr(slow, "_open", [work])
        slow._watch(work, seconds.wait)
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


GPU, CPU = SimpleNamespace(platform="gpu"), SimpleNamespace(platform="cpu")
BUSY = {DEVICE: 95.0, DATA: 3.0, HOST: 1.0, SCRIPT: 1.0}
BF16, ADVICE = {"bf16": {"enabled": True}}, summary.MICRO[1]
HIDDEN = DeviceTimes({"forward": 50.0, "backward": 40.0, "collectives": 10.0}, 200.0)
EXPOSED = DeviceTimes({"forward": 40.0, "backward": 30.0, "collectives": 30.0}, 0.0)
COMPUTE = "compute-bound: the devices computed, 95% of the time of the steps"
COLLECTIVES = "communication-bound: collectives that no computation hides took, 30% of a profiled step"


def verdict(seconds=BUSY, devices=(GPU,), times=None, stage=0, **more):
    config = Config.load({"train_batch_size": 8, "zero_optimization": {"stage": stage}, **more})
    return name_bottleneck(seconds, config, list(devices), times)


@pytest.mark.parametrize(
    ("seconds", "arguments", "first"),
    [
        ({DEVICE: 60.0, DATA: 30.0, HOST: 5.0, SCRIPT: 5.0}, {}, "data-bound: the devices waited for data, 30% of the"),
        ({DEVICE: 70.0, DATA: 9.0, HOST: 1.0, SCRIPT: 20.0}, {}, "script-bound: the devices waited for the script"),
        ({DEVICE: 70.0, HOST: 30.0}, {}, "host-bound: the devices waited for the host to start a step, 30%"),
        ({**BUSY, COMPILE: 900.0}, {}, COMPUTE),
        (BUSY, {"devices": [GPU] * 8, "times": HIDDEN, "stage": 3}, "compute-bound"),
        (BUSY, {"devices": [GPU] * 8, "times": EXPOSED, "stage": 3}, COLLECTIVES),
    ],
)
def test_the_largest_wait_is_named(seconds, arguments, first):
    """A profile tells communication from computation."""
    lines = verdict(seconds, **arguments)
    assert lines[0].startswith(first)
    assert lines[1].startswith("try ")
    assert 1 <= len(lines[1].split("; or ")) <= 3


def test_what_is_advised_is_off_and_faster():
    """CPUs compute more slowly in bf16; a run must be long enough."""
    assert verdict()[1] == f"try bf16.enabled: true; or {ADVICE}"
    assert verdict(devices=[CPU]) == [COMPUTE]
    full = verdict(**BF16, activation_checkpointing={"policy": "full"})[1]
    assert "bf16" not in full
    assert 'policy: "matmuls"' in full
    assert "matmuls" not in verdict(**BF16, activation_checkpointing={"policy": "none"})[1]
    for stage in (1, 3):
        advice = verdict(devices=[GPU] * 8, times=EXPOSED, stage=stage)[1]
        assert ("zero_optimization.stage: 2" in advice) == (stage == 3)
    (unknown,) = verdict(devices=[GPU] * 8, stage=3)
    assert "wall_clock_breakdown" in unknown
    assert verdict({part: spent / 10 for part, spent in BUSY.items()}) == []
