"""Checks of a run's steps: replicas that differ, and who is late. The oracle is the fault that each test plants."""

import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.cuda import needs_cuda_compiler
from helpers.engines import UNIT, build, config, printed, rows
from jobs import CPU, QUICK

import jzero
import jzero.run.diagnosis.step_checks
import jzero.tree
from jzero.planner import gpu_devices
from jzero.run.diagnosis import stragglers
from jzero.run.diagnosis.stragglers import Report, late, slow

ONE = {"gradient_accumulation_steps": 1}
EVERY = {"desync_check": {"every": 2}, **ONE}
LATE = {"straggler_check": {"every": 2}, **ONE}


def flip(x, number):
    """Flip the lowest bit of one element of one device's part."""
    shards = x.addressable_shards
    parts = [np.array(shard.data) for shard in shards]
    bits = parts[number].reshape(-1).view(np.uint32)
    bits[len(bits) // 2] ^= 1
    copies = [jax.device_put(part, shard.device) for part, shard in zip(parts, shards, strict=True)]
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, copies)


def lines(capsys):
    return [line for line in capsys.readouterr().out.splitlines() if "replicas differ" in line]


def train(engine, steps):
    for i in range(steps):
        engine.train_batch(rows(i, UNIT))


def test_one_bit_on_one_device(capsys):
    """Of a parameter, a moment and a counter; with two copies there is no majority."""
    engine = build(1, more=EVERY, data=2, zero=2)[0]
    train(engine, 5)
    assert lines(capsys) == []
    state, replicas = engine.state, engine._checks._replicas
    leaves, tree = jax.tree.flatten(state.opt_state)
    names = [name for name in jzero.tree.named(state) if name.startswith("opt_state/")]
    where = next(i for i, name in enumerate(names) if name.endswith("stack/w"))
    leaves[where] = flip(leaves[where], 1)
    step, opt_state = flip(state.step, 3), jax.tree.unflatten(tree, leaves)
    changed = jzero.TrainState(step, state.params, opt_state, state.loss_scale, state.rng, names=state.names)
    found = replicas.differing(np.asarray(replicas.sums(changed)))
    assert found == [f"{names[where]} on device 1 (process 0), device 3 (process 0)", "step on device 3 (process 0)"]
    state.params["stack"]["w"] = flip(state.params["stack"]["w"], 2)
    engine._checks.restart()
    train(engine, 3)  # the sixth step is compared, and read after the seventh
    (said,) = lines(capsys)
    assert said.startswith("jzero: step 6: replicas differ: ")
    assert "params/stack/w on device 0 (process 0), device 2 (process 0)" in said


def test_a_save_reports_what_the_last_step_found(tmp_path, capsys):
    engine = build(0, data=4, zero=1, more=EVERY)[0]
    train(engine, 1)
    engine.state.params["stack"]["w"] = flip(engine.state.params["stack"]["w"], 2)
    train(engine, 1)
    assert lines(capsys) == []
    engine.save_checkpoint(tmp_path).wait()
    (said,) = lines(capsys)
    assert said.startswith("jzero: step 2: replicas differ: ")
    train(engine, 2)
    engine.load_checkpoint(tmp_path)  # the checksums of step 4 belong to the state that it replaces
    train(engine, 1)
    assert lines(capsys) == []


@pytest.mark.gpu_compile
@needs_cuda_compiler
@pytest.mark.usefixtures("no_compilation_cache")
def test_the_comparison_needs_no_memory():
    wide = SimpleNamespace(
        init=lambda rng: {"w": jnp.zeros((1024, 1024))}, loss=lambda params, batch, rng: (batch @ params["w"]).mean()
    )
    step = jzero.make_train_step(wide, config(0), mesh=jzero.make_mesh(devices=gpu_devices("h100", 2)))
    sums = jzero.run.diagnosis.step_checks.Replicas(step, None).sums
    shapes = jax.tree.map(lambda x, sharding: x.update(sharding=sharding), step.state_shapes, step.state_shardings)
    memory = sums.lower(shapes).compile().memory_analysis()
    assert memory.argument_size_in_bytes > 3 * 4 * 2**20
    assert memory.temp_size_in_bytes + memory.output_size_in_bytes < 0.01 * memory.argument_size_in_bytes


def test_a_late_process_has_a_line():
    """One that waits for the others is not late; nor is a device among equal ones."""
    for own, names in (
        ([1.0, 5.9, 1.0], []),  # 4.9 ms of about 100
        ([1.0, 7.0, 1.0], [1]),
        ([30.0, 1.0, 30.0, 1.0, 1.0], [0, 2]),
        ([40.0, 1.0], [0]),
        ([40.0, 40.0], []),  # nobody waits for another
        ([40.0], []),
    ):
        reports = [Report(f"host{i}", {"data": ms, "device": 100.0 - ms}, {}) for i, ms in enumerate(own)]
        assert [int(re.search(r"process (\d+) on host\1:", text)[1]) for text in late(reports)] == names
        (text,) = late([Report("a", {"data": 1.0, "peers": 50.0}, {}), Report("b", {"data": 51.0}, {})])
        assert "process 1 on b" in text
        assert slow([Report("a", {}, {"0": 2.0, "1": 2.25})]) == []


def test_a_slow_device_is_named_in_the_run(capsys, monkeypatch):
    monkeypatch.setattr(stragglers, "time_matmuls", lambda devices: {str(d.id): 2.0 + (d.id == 3) for d in devices})
    made = build(more=LATE)[0]
    train(made, 5)
    lines = [line for line in printed(made, capsys).splitlines() if "straggler" in line]
    assert [line[:29] for line in lines] == [f"jzero: step {step}: straggler: dev" for step in (2, 4)]
    text = r"device 3 on \S+ computes a matmul in 3.00 ms, the median of 4 devices in 2.00"
    assert all(re.search(text, line) for line in lines)


def test_the_program_that_is_timed_keeps_its_values_finite(monkeypatch):
    monkeypatch.setattr(stragglers, "SIZE", 64)
    x = np.random.default_rng(0).normal(size=(64, 64)).astype("float32")
    assert np.isfinite(stragglers._chain(x)).all()
    assert stragglers._time(stragglers._chain, stragglers.jax.devices()[1]) > 0


def test_a_run_that_goes_back_measures_again(monkeypatch):
    """As after a step that is not finite, and stopped the run."""
    monkeypatch.setattr(stragglers, "time_matmuls", lambda devices: {})
    made = build(more=LATE)[0]
    check = made._checks._stragglers
    for number in (1, 2, 2, 3, 4):
        made._observers.clock.lap("script")  # time passes
        check.take(SimpleNamespace(global_steps=number), {}, None)
    assert check._mark[0] == 4


PROGRAM = """
import time
import jax, numpy as np
import jzero
from helpers.regression import CONFIG, Regression


def batches():
    while True:
        if jax.process_index() == 1:
            time.sleep(0.5)
        yield {"x": np.ones((8, 3), "float32"), "y": np.ones(8, "float32")}


engine = jzero.initialize(model=Regression(), config=CONFIG | {"straggler_check": {"every": 4}})[0]
source = batches()
for _ in range(4):
    engine.train_batch(source)
"""


@pytest.mark.slow
@pytest.mark.processes
def test_the_process_whose_data_are_slow_is_named(start):
    job = start(*CPU, 2, "worker.py", program=PROGRAM, env=QUICK).ended()
    (text,) = re.findall(r"jzero: step 4: straggler: (.*)$", job.output, re.M)
    data = re.match(r"process 1 on \S+: its devices wait .* elsewhere\): data ([\d.]+)", text)
    assert float(data[1]) >= 250.0  # of 500; the devices may still work on the step before
