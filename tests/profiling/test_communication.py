"""The table of collectives: by hand from the ZeRO table, and its bandwidth from kernels of known times."""

import pytest
from helpers.engines import ACCUM, FEATURES, REPLICAS, build, rows

import jzero
from jzero.planner.collectives import Collective, Collectives
from jzero.profiling.device_times import Kernel, collective_times, communication


def row(kind, size, devices=4, **more):
    return Collective(kind, "bf16", 1, size, ("zero",), devices, **more)


def kernel(name, start, end, operation="x"):
    return Kernel(name, operation, start * 1e6, end * 1e6)


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
    assert cells(communication(FOUND))[2:6] == [
        ["all-gather", "zero", "bf16", "3", "x", "2", "4", "12", "1", "kB", "12", "kB"],
        ["reduce-scatter", "zero", "bf16", "3", "4", "3", "2", "kB", "6", "kB"],
        ["all-reduce", "zero", "bf16", "-", "4", "1", "400", "B", "400", "B"],
        ["collective-permute", "zero", "bf16", "-", "2", "1", "50", "B", "50", "B"],
    ]
    each = cells(communication(FOUND, each=True))
    assert [line[7:] for line in each[2:4]] == [["6", "1", "kB", "6", "kB"]] * 2
    assert [line[-1] for line in cells(communication(FOUND, names=True))[2:4]] == [
        "jit(step)/stack/a",
        "jit(step)/stack/b",
    ]
    assert communication(FOUND, ["all-to-all"]) == "collectives of a step: none of all-to-all"


def test_bandwidth_is_that_of_nccl_tests():
    """algbw = bytes / time; busbw = algbw x (n - 1) / n, twice that for all-reduce."""
    kernels = [
        kernel("ncclDevKernel_AllGather_RING_LL(x)", 0, 2), kernel("ncclDevKernel_AllGather_RING_LL(x)", 1, 3),
        kernel("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(x)", 5, 6), kernel("gemm", 0, 100),
        kernel("ncclDevKernel_SendRecv(x)", 7, 9, "collective-permute-start.1"), kernel("x", 10, 11, "all_reduce.3"),
    ]  # fmt: skip
    assert collective_times(kernels) == {"all-gather": 3, "reduce-scatter": 1, "all-reduce": 1, "collective-permute": 2}
    big = Collectives(tuple(row(r.kind, r.bytes * 10**6, r.group_size, loops=r.loops) for r in FOUND))
    wait = "(the time contains the wait for the slowest device)"
    assert communication(big, kernels=kernels).splitlines()[-4:] == [
        f"all-gather: 12 a step, 12 GB in 3.00 ms: 4000.0 GB/s, bus 3000.0 GB/s {wait}",
        f"reduce-scatter: 3 a step, 6 GB in 1.00 ms: 6000.0 GB/s, bus 4500.0 GB/s {wait}",
        f"all-reduce: 1 a step, 400 MB in 1.00 ms: 400.0 GB/s, bus 600.0 GB/s {wait}",
        f"collective-permute: 1 a step, 50 MB in 2.00 ms: 25.0 GB/s, bus 25.0 GB/s {wait}",
    ]


def test_no_bandwidth_where_the_count_is_a_guess():
    found = Collectives((row("all-gather", 1000, in_branch=True), row("all-reduce", 8, loops=(None,))))
    text = communication(found, kernels=[kernel("ncclDevKernel_AllGather_RING_LL(x)", 0, 2)])
    assert "GB/s" not in text
    assert cells(text)[2][:4] == ["all-gather,", "in", "a", "branch"]
    assert text.count("is not known") == 2


def test_an_engine_prints_its_collectives_after_the_first_step(capsys):
    """Stage 2: weights gathered once, gradients reduced for each micro-batch, those of scanned layers one by one."""
    found = []
    for more in ({}, {"prof_all": False, "prof_ops": ["all_gather_into_tensor"]}):
        made = build(more={"comms_logger": {"enabled": True, **more}})[0]
        capsys.readouterr()
        for seed in range(2):
            made.train_batch(rows(seed))
            found.append(capsys.readouterr().out.splitlines())
    first, second, chosen, _ = found
    assert second == []
    one = FEATURES**2 * 4  # a matrix in float32
    n, a, cells = str(REPLICAS), str(ACCUM), {tuple(line.split()) for line in first}
    for expected in (
        ("all-gather", "zero", "f32", "-", n, "1", f"{one}", "B", f"{one}", "B"),
        ("all-gather", "zero", "f32", "-", n, "1", f"{2 * one}", "B", f"{2 * one}", "B"),
        ("reduce-scatter", "zero", "f32", a, n, a, f"{one}", "B", f"{ACCUM * one}", "B"),
        ("reduce-scatter", "zero", "f32", a, "x", "2", n, f"{2 * ACCUM}", f"{one}", "B", "1.54", "kB"),
    ):
        assert expected in cells
    assert any(line.startswith("all-gather: 2 a step, 768 B") for line in first)
    assert not any("GB/s" in line for line in first)  # simulated devices have no links
    assert {line.split(":")[0].split()[0] for line in chosen[2:]} == {"all-gather"}


def test_what_the_config_says():
    def section(**given):
        return jzero.Config.load({"train_batch_size": 8, "comms_logger": given}).comms_logger

    assert section(prof_ops=["all_reduce", "send", "recv"]).prof_ops == ("all-reduce", "collective-permute")
    with pytest.raises(
        jzero.ConfigError, match=r"comms_logger.prof_ops = .*must be a list of all_reduce.*'barrier' is"
    ):
        section(prof_ops=["barrier"])
