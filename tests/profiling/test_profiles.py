"""The profiles of a run: its trace, device line and tables; and without a run, kernels, parts and collectives."""

import re

import jax
import pytest
from helpers.engines import ACCUM, FEATURES, REPLICAS, build, rows

from jzero.config.observed import ProfilerConfig
from jzero.planner.collectives import Collective, Collectives
from jzero.profiling import device_times, profiles
from jzero.profiling.device_times import BACKWARD, COLLECTIVES, FORWARD, OTHER, UPDATE, Kernel, Profile, communication
from jzero.profiling.profiles import Trace


def annotated(directory):
    """The numbers of the steps in the files of a directory."""
    (file,) = directory.rglob("*.xplane.pb")
    planes = jax.profiler.ProfileData.from_file(str(file)).planes
    events = [dict(e.stats) for plane in planes for line in plane.lines for e in line.events if e.name == "step"]
    return sorted(int(stats["step_num"]) for stats in events)


def train(engine, capsys, steps):
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
        "comms_logger": {"enabled": True, "prof_all": False, "prof_ops": ["all_gather", "reduce_scatter", "send"]},
        "flops_profiler": {"enabled": True, "profile_step": 5, "output_file": str(file)},
        "profiler": {"steps": [2, 3], "output_path": str(tmp_path / "trace")},
    }  # fmt: skip
    engine = build(more=more)[0]
    assert engine.config.comms_logger.prof_ops == ("all-gather", "reduce-scatter", "collective-permute")
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
    ],
)
def test_kernels_add_up(kernels, parts, hidden):
    found = device_times.device_times(reversed(kernels), PARTS)
    assert found.parts == pytest.approx(parts)
    assert found.hidden == pytest.approx(hidden)


def test_a_profile_that_fails_says_why(tmp_path, monkeypatch):
    another, empty = Profile(), Profile()
    with jax.profiler.trace(str(tmp_path)):
        another.start()
        another.stop()
    assert "profile" in another.problem.lower()
    assert another.kernels == []
    monkeypatch.setattr(device_times, "_read", lambda file: [])
    empty.start()
    empty.stop()
    assert empty.problem == "the profiler saw no kernels"


def row(kind, size, devices=4, **more):
    return Collective(kind, "bf16", 1, size, ("zero",), devices, **more)


FOUND = Collectives(
    (
        row("all-gather", 1000, loops=(3, 2), op_name="jit(step)/stack/a"),
        row("all-gather", 1000, loops=(3, 2), op_name="jit(step)/stack/b"),
        row("reduce-scatter", 2000, loops=(3,)),
        row("all-reduce", 400),
        row("collective-permute", 50, devices=2),
    )
)


def cells(text):
    return [line.split() for line in text.splitlines()]


def test_rows_that_are_alike_are_one():
    assert [" ".join(line) for line in cells(communication(FOUND))[2:6]] == [
        "all-gather zero bf16 3 x 2 4 12 1 kB 12 kB",
        "reduce-scatter zero bf16 3 4 3 2 kB 6 kB",
        "all-reduce zero bf16 - 4 1 400 B 400 B",
        "collective-permute zero bf16 - 2 1 50 B 50 B",
    ]
    assert [line[7:] for line in cells(communication(FOUND, each=True))[2:4]] == [["6", "1", "kB", "6", "kB"]] * 2
    named = [line[-1] for line in cells(communication(FOUND, names=True))[2:4]]
    assert named == ["jit(step)/stack/a", "jit(step)/stack/b"]
    assert communication(FOUND, ["all-to-all"]) == "collectives of a step: none of all-to-all"


def test_bandwidth_is_that_of_nccl_tests():
    """algbw = bytes / time; busbw = algbw x (n - 1) / n, twice that for all-reduce."""
    kernels = [
        *[kernel("x", start, start + 2, "ncclDevKernel_AllGather_RING_LL(x)") for start in (0, 1)],
        kernel("x", 5, 6, "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(x)"), kernel("x", 0, 100, "gemm"),
        kernel("collective-permute-start.1", 7, 9, "ncclDevKernel_SendRecv(x)"), kernel("all_reduce.3", 10, 11, "x"),
    ]  # fmt: skip
    times = {"all-gather": 3, "reduce-scatter": 1, "all-reduce": 1, "collective-permute": 2}
    assert device_times.collective_times(kernels) == times
    big = Collectives(tuple(row(r.kind, r.bytes * 10**6, r.group_size, loops=r.loops) for r in FOUND))
    wait = "(the time contains the wait for the slowest device)"
    assert communication(big, kernels=kernels).splitlines()[-4:] == [
        f"all-gather: 12 a step, 12 GB in 3.00 ms: 4000.0 GB/s, bus 3000.0 GB/s {wait}",
        f"reduce-scatter: 3 a step, 6 GB in 1.00 ms: 6000.0 GB/s, bus 4500.0 GB/s {wait}",
        f"all-reduce: 1 a step, 400 MB in 1.00 ms: 400.0 GB/s, bus 600.0 GB/s {wait}",
        f"collective-permute: 1 a step, 50 MB in 2.00 ms: 25.0 GB/s, bus 25.0 GB/s {wait}",
    ]
    guessed = Collectives((row("all-gather", 1000, in_branch=True), row("all-reduce", 8, loops=(None,))))
    text = communication(guessed, kernels=kernels)
    assert "GB/s" not in text
    assert cells(text)[2][:4] == ["all-gather,", "in", "a", "branch"]
    assert text.count("is not known") == 2
