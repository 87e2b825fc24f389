"""The breakdowns of time and memory: lines at the right steps, whose numbers agree with other sources."""

import contextlib
import io
import json
import re
from itertools import pairwise
from types import SimpleNamespace

import jax
import pytest
from helpers.engines import TRAIN, assert_same, build, engine, parts, parts_of, rows, three_calls
from helpers.refusals import compilations

from jzero.planner import GPUS
from jzero.run import step_memory
from jzero.run.clock import COMPILE, DATA, DEVICE, EVALUATION, HOST, PROFILE, SCRIPT
from jzero.run.speed import ideal

TIMES = re.compile(r"step (\d+): ([\d.]+) ms a step = (.*)")
BOTH = {"wall_clock_breakdown": True, "memory_breakdown": True}


def test_the_lines_of_times_and_of_memory(tmp_path):
    """An engine with everything on: the parts add up to the total, which is that of the speed in the line before."""
    files = {"enabled": True, "output_path": str(tmp_path), "job_name": ""}
    with contextlib.redirect_stdout(io.StringIO()) as start:
        made = build(more=BOTH | {"steps_per_print": 2, "jsonl_monitor": files})[0]
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
        if times := TIMES.fullmatch(line):
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
