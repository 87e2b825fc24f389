"""The profiles of a run: the trace of chosen steps, the device line, the tables of collectives and FLOPs."""

import re

import jax
import pytest
from helpers.engines import ACCUM, FEATURES, REPLICAS, build, rows
from helpers.refusals import refuses

import jzero
from jzero.config.observed import ProfilerConfig
from jzero.profiling import profiles
from jzero.profiling.device_times import BACKWARD, COLLECTIVES, FORWARD, OTHER, UPDATE
from jzero.profiling.profiles import Trace


def annotated(directory):
    """The numbers of the steps in the files of a directory."""
    (file,) = directory.rglob("*.xplane.pb")
    planes = jax.profiler.ProfileData.from_file(str(file)).planes
    events = [dict(e.stats) for plane in planes for line in plane.lines for e in line.events if e.name == "step"]
    return sorted(int(stats["step_num"]) for stats in events)


def train(engine, capsys, steps):
    """What each step prints."""
    capsys.readouterr()
    printed = {}
    for step in range(1, steps + 1):
        engine.train_batch(rows(step))
        printed[step] = capsys.readouterr().out
    return printed


def test_each_profile_has_its_step(tmp_path, capsys):
    """The device line of the breakdown, due at step 2, comes at step 4, since others are traced; none comes twice."""
    file = tmp_path / "new" / "flops.txt"
    more = {
        "wall_clock_breakdown": True, "steps_per_print": 2,
        "comms_logger": {"enabled": True, "prof_all": False, "prof_ops": ["all_gather", "reduce_scatter"]},
        "flops_profiler": {"enabled": True, "profile_step": 5, "output_file": str(file)},
        "profiler": {"steps": [2, 3], "output_path": str(tmp_path / "trace")},
    }  # fmt: skip
    engine = build(more=more)[0]
    printed = train(engine, capsys, 6)
    words = ("collectives of a step", "traced", ", profiled", "FLOPs of")
    assert [[step for step, out in printed.items() if word in out] for word in words] == [[1], [3], [4], [5]]
    assert annotated(tmp_path / "trace") == [2, 3]
    assert f"steps 2 to 3: traced to {tmp_path / 'trace'}; open it" in printed[3]
    check_collectives(printed[1].splitlines())
    check_device_line(printed[4].splitlines())
    kernels = [kernel.operation for kernel in engine._observers.profiles.device.kernels]
    assert max(map(kernels.count, kernels)) % ACCUM == 0  # what is in the loop ran for each micro-batch
    assert f"FLOPs of step 5: matmuls on one of 4 devices: written to {file}\n" in printed[5]
    assert re.search(r"^  stack +128 ", file.read_text(), re.M)  # two layers of 8 x 8
    assert "TFLOP/s" not in file.read_text()  # CPUs have no rate


def check_collectives(lines):
    """Stage 2: weights gathered once, gradients reduced for each micro-batch, those of scanned layers one by one."""
    one = FEATURES**2 * 4  # a matrix in float32
    found = {" ".join(line.split()) for line in lines}
    assert {
        f"all-gather zero f32 - {REPLICAS} 1 {one} B {one} B",
        f"all-gather zero f32 - {REPLICAS} 1 {2 * one} B {2 * one} B",
        f"reduce-scatter zero f32 {ACCUM} {REPLICAS} {ACCUM} {one} B {ACCUM * one} B",
        f"reduce-scatter zero f32 {ACCUM} x 2 {REPLICAS} {2 * ACCUM} {one} B 1.54 kB",
    } <= found
    assert any(line.startswith("all-gather: 2 a step, 768 B") for line in lines)
    assert not any("all-reduce" in line or "GB/s" in line for line in lines)  # simulated devices have no links


def check_device_line(lines):
    (line,) = (line for line in lines if "profiled" in line)
    total, terms = re.fullmatch(r"step 4, profiled: device ([\d.]+) ms = (.*) \(and [\d.]+ overlapped\)", line).groups()
    terms = dict(term.split(" ") for term in terms.split(" + "))
    assert {FORWARD, BACKWARD, UPDATE} <= set(terms) <= {FORWARD, BACKWARD, UPDATE, OTHER, COLLECTIVES}
    assert float(total) == pytest.approx(sum(map(float, terms.values())), abs=0.05 * 6)
    assert "profile" in next(line for line in lines if "ms a step" in line)


@pytest.mark.slow
def test_a_run_that_resumes_after_the_step_has_its_table(capsys, tmp_path):
    before = build()[0]
    train(before, capsys, 3)
    before.save_checkpoint(tmp_path).wait()
    engine = build(more={"flops_profiler": {"enabled": True, "profile_step": 2}}, resume=tmp_path)[0]
    printed = train(engine, capsys, 4)
    assert [out.partition(":")[0] for out in printed.values()] == ["", "FLOPs of step 5", "", ""]


def test_a_program_that_no_one_can_read_trains_on(capsys, monkeypatch):
    def fail(*_):
        raise ValueError("a new form\nof two lines")

    monkeypatch.setattr(profiles, "step_flops", fail)
    monkeypatch.setattr(profiles, "collectives", fail)
    engine = build(more={"flops_profiler": {"enabled": True}, "comms_logger": {"enabled": True}})[0]
    lines = "".join(train(engine, capsys, 2).values()).splitlines()
    tables = [line.split(":")[0] for line in lines if "no table" in line]
    assert tables == ["comms_logger", "flops_profiler"]
    assert engine.global_steps == 2


@pytest.mark.parametrize(
    ("process", "processes", "every", "directory"),
    [(0, 2, False, "runs"), (1, 2, False, ""), (1, 2, True, "runs/process_1"), (0, 1, True, "runs")],
)
def test_processes_of_one_host_write_no_file_of_each_other(process, processes, every, directory, monkeypatch):
    """XProf names the file after the host."""
    monkeypatch.setattr(jax, "process_index", lambda: process)
    monkeypatch.setattr(jax, "process_count", lambda: processes)
    section = ProfilerConfig(steps=[1, 2], output_path="runs", all_processes=every)
    assert Trace(section).directory == directory


A_FIRST = r"profiler.steps = .*must be a list of the first and the last step"


@pytest.mark.parametrize(
    ("section", "given", "words"),
    [
        ("profiler", {"steps": [3, 2]}, f"{A_FIRST}.*the last is before the first"),
        ("flops_profiler", {"module_depth": -2}, "module_depth = -2: must be an integer >= -1"),
        ("comms_logger", {"prof_ops": ["barrier"]}, "comms_logger.prof_ops = .*a list of all_reduce.*'barrier' is"),
    ],
)
def test_what_the_config_refuses(section, given, words):
    refuses(lambda: jzero.Config.load({"train_batch_size": 8, section: given}), words)


def test_what_the_config_says():
    sections = {"flops_profiler": {"enabled": True, "recompute_fwd_factor": 0.0}}
    config = jzero.Config.load(
        {"train_batch_size": 8, "comms_logger": {"prof_ops": ["all_reduce", "send", "recv"]}, **sections}
    )
    assert config.comms_logger.prof_ops == ("all-reduce", "collective-permute")
    assert [(r.key, r.by) for r in config.replaced] == [
        ("flops_profiler.recompute_fwd_factor", "the compiled step, which shows what is recomputed")
    ]
