"""The profile of a step, without a run: the parts of a program, overlapping kernels, and the table of collectives."""

import re

import jax
import pytest

import jzero
from jzero.planner.collectives import Collective, Collectives
from jzero.profiling import device_times as module
from jzero.profiling.device_times import BACKWARD, COLLECTIVES, FORWARD, OTHER, UPDATE, Kernel, Profile, communication

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
    found = module.device_times(reversed(kernels), PARTS)
    assert found.parts == pytest.approx(parts)
    assert found.hidden == pytest.approx(hidden)


class Chain:
    def init(self, rng):
        return {name: 0.1 * jax.random.normal(rng, (8, 8)) for name in "uvw"}

    def loss(self, params, batch, rng):
        return ((batch @ params["u"] @ params["v"] @ params["w"]) ** 2).mean()


def test_the_parts_of_a_program():
    """A layer has one product in the forward pass and two in the backward pass, the first layer one."""
    config = {"train_batch_size": 8, "optimizer": {"type": "Muon", "params": {"lr": 0.1}}, "gradient_clipping": 0}
    step = jzero.make_train_step(Chain(), config, mesh=jzero.make_mesh(devices=jax.devices()[:2]))
    text = step.lower(jax.ShapeDtypeStruct((8, 8), "float32")).compile().as_text()
    found = module.parts_of_instructions(text)

    def parts(operation):
        names = re.findall(rf"^\s*(?:ROOT )?%?([\w.\-]+) = .*? (?:{operation})\(", text, re.MULTILINE)
        return [found[name] for name in names]

    dots = parts("dot")
    assert (dots.count(FORWARD), dots.count(BACKWARD)) == (3, 5)
    assert UPDATE in dots  # Muon's
    assert set(parts("all-reduce|all-gather")) == {COLLECTIVES}


def test_a_profile_that_fails_says_why(tmp_path, monkeypatch):
    another, empty = Profile(), Profile()
    with jax.profiler.trace(str(tmp_path)):
        another.start()
        another.stop()
    assert "profile" in another.problem.lower()
    assert another.kernels == []
    monkeypatch.setattr(module, "_read", lambda file: [])
    empty.start()
    empty.stop()
    assert empty.problem == "the profiler saw no kernels"


# -------------------------------------------------------------------------------------------------- collectives


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
    assert module.collective_times(kernels) == times
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
