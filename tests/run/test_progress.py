"""What a run shows of itself: notices of slow work, and at its end the summary and the verdict."""

import contextlib
import gc
import re
import sys
import weakref
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


def test_finished_steps_add_up():
    finished = CompletedSteps()
    finished.add(1, Amount(8, 80), {"loss": 2.0, "skipped": 1.0}, 10.0)
    finished.add(2, Amount(4, 20), {"loss": 0.5}, 11.0)
    assert (finished.number, finished.metrics) == (2, {"loss": 0.5})
    assert finished.totals == (2, 12, 100, 1, 11.0)
    finished.add(3, Amount(4), {"loss": 0.25}, 12.0)
    assert finished.totals == (3, 16, None, 1, 12.0)


@pytest.mark.parametrize(
    ("batch", "amount"),
    [
        ({"labels": np.zeros((8, 4), np.int32), "inputs": np.zeros((8, 16), np.int32)}, (8, 128)),
        ({"input_ids": np.zeros((8, 16), np.uint16)}, (8, 128)),
        ((np.zeros((8, 16), np.int64), np.zeros((8, 16), np.int64)), (8, 128)),
        (np.zeros((8, 16), np.int32), (8, 128)),
        ({"inputs": np.zeros((8, 784), np.uint8)}, (8, None)),  # pixels
        ({"inputs": np.zeros((8, 16), np.float32)}, (8, None)),
        ({"image": np.zeros((8, 16), np.int32)}, (8, None)),
        ((np.zeros((8, 16), np.float32), np.zeros((8, 10), np.int32)), (8, None)),
        ({}, (0, None)),
    ],
)
def test_only_text_has_tokens(batch, amount):
    assert amount_of(batch) == amount


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
    assert summary.summary_text(seconds, 2, completed, ["", ""], {"checkpoints": "runs/a"}) == (
        "jzero: 20 steps in 1 min 46 s = compile 1 min 2 s (2 programs from the cache) + steps 40.0 s + saves 3.0 s"
        " + start 1.0 s\n"
        "  160 samples, 81,920 tokens; 4.0 samples/s, 2,048 tokens/s, MFU 40.0 %; last loss 1.5000; 1 skipped\n"
        "  checkpoints in runs/a"
    )


def test_a_run_ends_with_its_summary(capsys, monkeypatch, tmp_path):
    monkeypatch.delattr(sys, "last_value", raising=False)
    files = {"enabled": True, "output_path": str(tmp_path), "job_name": "run"}
    schedule = {"total_num_steps": 2, "warmup_num_steps": 1, "warmup_max_lr": 0.1, "warmup_min_lr": 0.02}
    more = {"jsonl_monitor": files, "csv_monitor": files, "scheduler": {"type": "WarmupDecayLR", "params": schedule}}
    made = build(more=more)[0]
    losses = [float(made.train_batch(rows(seed))) for seed in range(4)]
    made.eval_batch(rows(9))
    made.save_checkpoint(tmp_path / "checkpoints").wait()
    engine()  # another one, without steps, changes nothing
    lines = [line for line in printed(made, capsys).splitlines() if "schedule ended" in line]
    assert lines == ["jzero: the schedule ended at step 2; the learning rate stays at 0.02"]
    assert float(made.metrics["lr"]) == pytest.approx(0.02)
    observers.print_last()
    first, second, third = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"jzero: 4 steps in ([\d.]+ s|\d+ min \d+ s)( = .*)?", first)
    speed = r"[\d,.]+ samples/s"
    assert re.fullmatch(rf"  {4 * TRAIN} samples; {speed}; last loss {losses[-1]:.4f}; 0 skipped", second)
    assert third == f"  curves in {tmp_path}/run; checkpoints in {tmp_path}/checkpoints"
    observers.print_last()
    assert not capsys.readouterr().out  # once
    total = made._observers.clock.total
    assert {START, HOST, CHECKPOINT} <= total.keys()
    assert sum(total.values()) > 0


@pytest.mark.parametrize(
    ("case", "lines"),
    [(ValueError("no"), 0), (KeyboardInterrupt(), 2), ("fork", 0), ("no step", 0), ("switched off", 0)],
    ids=str,
)
def test_which_runs_end_with_a_summary(case, lines, capsys, monkeypatch):
    monkeypatch.delattr(sys, "last_value", raising=False)
    observers.print_last()  # of earlier tests
    made = build(more={"progress": {"summary": False, "panel": False}})[0] if case == "switched off" else engine()
    if case != "no step":
        made.train_batch(rows(0))
    capsys.readouterr()
    if isinstance(case, BaseException):
        monkeypatch.setattr(sys, "last_value", case, raising=False)
    with monkeypatch.context() as child:
        if case == "fork":
            child.setattr(observers.os, "getpid", lambda: -1)
        observers.print_last()
    assert len(capsys.readouterr().out.splitlines()) == lines


def test_the_ending_of_a_run_keeps_no_step():
    made = build()[0]
    made.train_batch(rows(0))
    step, ending = weakref.ref(made.step_fn), made._observers
    del made
    gc.collect()
    assert step() is None
    ending.summary()


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


def watched(monkeypatch, seconds, takes):
    work = slow.SlowWork("compiling the step", seconds.now)
    seconds.takes = takes
    monkeypatch.setattr(slow, "_open", [work])
    monkeypatch.setattr(live, "kind", lambda: live.PLAIN)
    slow._watch(work, seconds.wait)


def test_slow_work_has_a_line_whenever_its_time_has_doubled(monkeypatch, seconds, capsys):
    """Where no panel shows it."""
    watched(monkeypatch, seconds, takes=4.9)
    assert capsys.readouterr() == ("", "")
    seconds.now = 100.0
    with slow.shown_elsewhere():
        watched(monkeypatch, seconds, takes=47.0)
    assert capsys.readouterr() == ("", "")
    assert str(slow.current()) == "compiling the step, 47 s"
    seconds.now = 100.0
    watched(monkeypatch, seconds, takes=47.0)
    out = capsys.readouterr()
    assert out.err.splitlines() == [
        *(f"jzero: compiling the step, {n} s" for n in (5, 10, 20, 40)),
        "jzero: compiling the step: done after 47 s",
    ]
    assert not out.out


def test_work_that_ends_while_its_line_is_printed_has_no_error(monkeypatch, seconds, capsys):
    class Emptied(list):
        """The work that another thread ends after a look at it."""

        def __bool__(self):
            return True

    monkeypatch.setattr(slow, "_open", Emptied())
    seconds.takes = 6.0
    slow._print(slow.SlowWork("saving", seconds.now), seconds.wait)
    assert capsys.readouterr() == ("", "")


def test_the_innermost_work_is_named(monkeypatch):
    """Also after an exception; and what has begun within five seconds has no name yet."""
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


def test_only_process_0_has_notices(monkeypatch):
    monkeypatch.setattr(slow.jax, "process_index", lambda: 1)
    monkeypatch.setattr(slow, "backends_are_initialized", lambda: True)
    monkeypatch.setattr(slow, "FIRST", 0.0)
    with slow.slow_work("saving"):
        assert slow.current() is None


def test_the_cache_of_jax_is_named(monkeypatch):
    config = SimpleNamespace(**dict.fromkeys((slow.ENABLED, slow.DIRECTORY), "/cache"))
    monkeypatch.setattr(slow, "jax", SimpleNamespace(config=config))
    assert slow.compiling("the step") == "compiling the step (cached for the next start)"
    monkeypatch.setattr(config, slow.DIRECTORY, None)
    assert slow.compiling("the step") == "compiling the step"


def test_the_first_call_of_a_program_is_slow_work(monkeypatch):
    shown = []
    for module in ("train_step", "call"):
        monkeypatch.setattr(f"jzero.step.{module}.slow_work", lambda what: shown.append(what) or slow.slow_work(what))
    made = build()[0]
    for seed in range(2):
        made.train_batch(rows(seed))
        made.eval_batch(rows(9))
    assert [re.sub(r" \(.*", "", what) for what in shown] == [
        "initialising the state", "compiling the step", "compiling the evaluation"
    ]  # fmt: skip


GPUS = [SimpleNamespace(platform="gpu")] * 8
BUSY = {DEVICE: 95.0, DATA: 3.0, HOST: 1.0, SCRIPT: 1.0}


def config(stage=0, **more):
    return Config.load({"train_batch_size": 8, "zero_optimization": {"stage": stage}, **more})


@pytest.mark.parametrize(
    ("seconds", "first"),
    [
        ({DEVICE: 60.0, DATA: 30.0, HOST: 5.0, SCRIPT: 5.0}, "data-bound: the devices waited for data, 30% of the"),
        ({DEVICE: 70.0, DATA: 9.0, HOST: 1.0, SCRIPT: 20.0}, "script-bound: the devices waited for the script"),
        ({DEVICE: 70.0, HOST: 30.0}, "host-bound: the devices waited for the host to start a step, 30%"),
        ({**BUSY, COMPILE: 900.0}, "compute-bound: the devices computed, 95% of the time of the steps"),
    ],
)
def test_the_largest_wait_is_named(seconds, first):
    lines = name_bottleneck(seconds, config(), GPUS[:1])
    assert lines[0].startswith(first)
    assert lines[1].startswith("try ")
    assert 1 <= len(lines[1].split("; or ")) <= 3


def test_a_profile_tells_communication_from_computation():
    hidden = DeviceTimes({"forward": 50.0, "backward": 40.0, "collectives": 10.0}, 200.0)
    exposed = DeviceTimes({"forward": 40.0, "backward": 30.0, "collectives": 30.0}, 0.0)
    assert name_bottleneck(BUSY, config(3), GPUS, hidden)[0].startswith("compute-bound")
    said, advice = name_bottleneck(BUSY, config(3), GPUS, exposed)
    assert said == "communication-bound: collectives that no computation hides took, 30% of a profiled step"
    assert "zero_optimization.stage: 2" in advice
    assert "zero_optimization.stage: 2" not in name_bottleneck(BUSY, config(1), GPUS, exposed)[1]
    (unknown,) = name_bottleneck(BUSY, config(3), GPUS)
    assert "wall_clock_breakdown" in unknown


def test_settings_that_are_on_are_not_advised():
    assert "bf16" in name_bottleneck(BUSY, config(), GPUS[:1])[1]
    full = {"bf16": {"enabled": True}, "activation_checkpointing": {"policy": "full"}}
    advice = name_bottleneck(BUSY, config(**full), GPUS[:1])[1]
    assert "bf16" not in advice
    assert 'policy: "matmuls"' in advice
    none = full | {"activation_checkpointing": {"policy": "none"}}
    assert "matmuls" not in name_bottleneck(BUSY, config(**none), GPUS[:1])[1]


def test_bf16_is_advised_where_it_is_faster():
    """CPUs compute more slowly in bf16."""
    cpu = SimpleNamespace(platform="cpu")
    assert name_bottleneck(BUSY, config(), GPUS[:1])[1] == f"try bf16.enabled: true; or {summary.MICRO[1]}"
    assert name_bottleneck(BUSY, config(), [cpu])[1] == f"try {summary.MICRO[1]}"


def test_the_verdict_is_part_of_the_summary():
    """Of a run that was long enough."""
    verdict = name_bottleneck(BUSY, config(), GPUS[:1])
    lines = summary.summary_text(BUSY, 0, CompletedSteps(), verdict, {}).splitlines()
    assert [line.split(":")[0].strip() for line in lines[2:]] == ["compute-bound", "try bf16.enabled"]
    assert name_bottleneck({part: spent / 10 for part, spent in BUSY.items()}, config(), GPUS[:1]) == []
