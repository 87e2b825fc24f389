"""Checks of a run's steps: replicas that differ, who is late, and what is skipped: spikes, and what is not finite.

The oracle is the fault that each test plants, and NumPy's median.
"""

import re
from functools import lru_cache
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.cuda import on_gpu
from helpers.drawn import random_params
from helpers.engines import UNIT, build, config, printed, rows
from helpers.planted_faults import put, train
from helpers.reference import Layout, assert_bitwise, batches, model
from helpers.sampling import keep
from helpers.steps import mesh, settings

import jzero
import jzero.tree
from jzero.loss_scale import NonFiniteError
from jzero.planner import gpu_devices
from jzero.run.diagnosis import stragglers
from jzero.run.diagnosis.step_checks import Replicas, spike_threshold
from jzero.run.diagnosis.stragglers import Report, late, slow

ONE = {"gradient_accumulation_steps": 1}
EVERY = {"desync_check": {"every": 2}, **ONE}
LATE = {"straggler_check": {"every": 2}, **ONE}
BATCH = rows(0, UNIT)


def flip(x, number):
    """Flip the lowest bit of one element of one device's part."""
    shards = x.addressable_shards
    parts = [np.array(shard.data) for shard in shards]
    bits = parts[number].reshape(-1).view(np.uint32)
    bits[len(bits) // 2] ^= 1
    copies = [jax.device_put(part, shard.device) for part, shard in zip(parts, shards, strict=True)]
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, copies)


def replica_lines(capsys):
    return [line for line in capsys.readouterr().out.splitlines() if "replicas differ" in line]


def test_one_bit_on_one_device(capsys):
    """Of a parameter, a moment and a counter; with two copies there is no majority."""
    engine = build(1, more=EVERY, data=2, zero=2)[0]
    train(engine, *[BATCH] * 5)
    assert replica_lines(capsys) == []
    state, replicas = engine.state, engine._checks._replicas
    arrays, tree = jax.tree.flatten(state.opt_state)
    names = [name for name in jzero.tree.named(state) if name.startswith("opt_state/")]
    where = next(i for i, name in enumerate(names) if name.endswith("stack/w"))
    arrays[where] = flip(arrays[where], 1)
    step, opt_state = flip(state.step, 3), jax.tree.unflatten(tree, arrays)
    changed = jzero.TrainState(step, state.params, opt_state, state.loss_scale, state.rng, names=state.names)
    found = replicas.differing(np.asarray(replicas.sums(changed)))
    assert found == [f"{names[where]} on device 1 (process 0), device 3 (process 0)", "step on device 3 (process 0)"]
    state.params["stack"]["w"] = flip(state.params["stack"]["w"], 2)
    engine._checks.restart()
    train(engine, *[BATCH] * 3)  # the sixth step is compared, and read after the seventh
    (said,) = replica_lines(capsys)
    assert said.startswith("jzero: step 6: replicas differ: ")
    assert "params/stack/w on device 0 (process 0), device 2 (process 0)" in said


def test_a_save_reports_what_the_last_step_found(tmp_path, capsys):
    engine = build(0, data=4, zero=1, more=EVERY)[0]
    train(engine, BATCH)
    engine.state.params["stack"]["w"] = flip(engine.state.params["stack"]["w"], 2)
    train(engine, BATCH)
    assert replica_lines(capsys) == []
    engine.save_checkpoint(tmp_path).wait()
    (said,) = replica_lines(capsys)
    assert said.startswith("jzero: step 2: replicas differ: ")
    train(engine, BATCH, BATCH)
    engine.load_checkpoint(tmp_path)  # the checksums of step 4 belong to the state that it replaces
    train(engine, BATCH)
    assert replica_lines(capsys) == []


@on_gpu
def test_the_comparison_needs_no_memory():
    wide = SimpleNamespace(
        init=lambda rng: {"w": jnp.zeros((1024, 1024))}, loss=lambda params, batch, rng: (batch @ params["w"]).mean()
    )
    step = jzero.make_train_step(wide, config(0), mesh=jzero.make_mesh(devices=gpu_devices("h100", 2)))
    sums = Replicas(step, None).sums
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
    train(made, *[BATCH] * 5)
    lines = [line for line in printed(made, capsys).splitlines() if "straggler" in line]
    assert [line[:29] for line in lines] == [f"jzero: step {step}: straggler: dev" for step in (2, 4)]
    text = r"device 3 on \S+ computes a matmul in 3.00 ms, the median of 4 devices in 2.00"
    assert all(re.search(text, line) for line in lines)


def test_a_run_that_goes_back_measures_again(monkeypatch):
    """As after a step that is not finite, and stopped the run."""
    monkeypatch.setattr(stragglers, "time_matmuls", lambda devices: {})
    made = build(more=LATE)[0]
    check = made._checks._stragglers
    for number in (1, 2, 2, 3, 4):
        made._observers.clock.lap("script")  # time passes
        check.take(SimpleNamespace(global_steps=number), {}, None)
    assert check._mark[0] == 4


SPIKE_ROWS = 8
# The gradient is proportional to the batch's `slope`; without an update, the loss is too.
SLOPED = SimpleNamespace(
    init=lambda rng: {"w": np.ones(4, np.float32)},
    loss=lambda params, batch, rng: (batch["slope"] * (params["w"].sum() + 1)).mean(),
)


def sloped(slope):
    return {"slope": np.full(SPIKE_ROWS, slope, np.float32)}


@lru_cache
def step_of(action):
    config = settings(
        SPIKE_ROWS, lr=1e-4, spikes={"window": 40, "action": action},
        scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 1000, "warmup_max_lr": 1e-4}},
    )  # fmt: skip
    return jzero.make_train_step(SLOPED, config, mesh=mesh(2))


def engine_of(action):
    return jzero.Engine(step_of(action), jax.random.key(0))


SLOPES = 1 + 0.1 * np.random.default_rng(0).normal(size=60)


@pytest.mark.parametrize("action", keep(["report", "skip"], ["skip"]))
def test_a_spike_is_reported_and_skipped(action, capsys):
    engine = engine_of(action)
    for i in range(30):
        engine.train_batch(sloped(10.0 if i == 3 else SLOPES[i]))  # without a limit in the first 20 steps
    before, lr = jax.device_get(engine.state.params), engine.get_lr()
    engine.train_batch(sloped(10.0))
    assert np.all(before["w"] == np.asarray(engine.state.params["w"])) == (action == "skip")
    assert (engine.get_lr() == lr) == (action == "skip")
    engine.train_batch(sloped(SLOPES[31]))
    assert np.any(before["w"] != np.asarray(engine.state.params["w"]))
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "spike:" in line)
    found = re.match(r"jzero: step 31: spike: loss ([\d.]+) \(limit ([\d.]+), .*, gradient norm 20 \(limit", line)
    assert float(found[1]) == pytest.approx(50, rel=0.01)
    assert line.endswith("the step changed nothing") == (action == "skip")
    assert engine.skipped_steps == (action == "skip")
    # The limit of step 31 comes from the losses of the steps before 30, which had ended when step 30 was given.
    losses = [5 * (10.0 if i == 3 else SLOPES[i]) for i in range(29)]  # the parameters hardly move
    median = np.median(losses)
    expected = median + 6 * 1.4826 * np.median(np.abs(np.array(losses) - median))
    assert float(found[2]) == pytest.approx(expected, rel=0.01)


def test_a_new_level_becomes_the_median():
    engine, skipped = engine_of("skip"), []
    for i in range(80):
        engine.train_batch(sloped(SLOPES[i % 40] + 3 * (i >= 40)))
        skipped.append(engine.skipped_steps)
    assert 15 <= skipped[69] <= 25  # until half of the window is on the new level
    assert skipped[39] == 0
    assert skipped[79] == skipped[69]


def test_nothing_is_said_about_steps_that_are_not_finite(capsys):
    engine = engine_of("report")
    for i in range(30):
        engine.train_batch(sloped(np.nan if i % 5 == 0 else SLOPES[i]))
    assert "spike:" not in capsys.readouterr().out
    assert np.isfinite(engine._checks._spikes._limits).all()
    assert spike_threshold([2.0] * 30, 6) == pytest.approx(2.12)  # values alike: six times a hundredth of the median


def mlp():
    return random_params(model("mlp"))


def spoiled(batch):
    images, labels = batch
    return put(images.copy(), (-1, 0), np.nan), labels  # one pixel of one row of the last replica


def test_without_the_overflow_check_bf16_takes_what_comes():
    config = Layout(0, 1, 1).config(bf16={"enabled": True, "check_grad_overflow": False})
    step = jzero.make_train_step(model("mlp"), config, mesh=Layout(0, 1, 1).mesh)
    state, metrics = step(step.init(jax.random.key(0), mlp()), spoiled(batches("mlp")[0]))
    assert not metrics["skipped"]
    assert not np.isfinite(state.params["fc2"]["kernel"]).all()


def test_a_run_of_bad_steps(capsys):
    """A warning names its first step; after 20 of them the run ends with the leaves' names, and the engine is whole."""
    layout = Layout(0, 1, 1)
    engine, *_ = jzero.initialize(model=model("mlp"), config=layout.config(), mesh=layout.mesh, params=mlp())
    good, bad = batches("mlp")[0], spoiled(batches("mlp")[0])
    train(engine, good, bad, bad, good, bad, good)
    warning = r"^jzero: step (\d+): the loss is nan, the step changed nothing; set \"non_finite\""
    assert re.findall(warning, capsys.readouterr().out, re.M) == ["2", "5"]
    assert (engine.skipped_steps, engine.global_steps) == (3, 6)
    before = jax.device_get(engine.state.params)
    # fc1/bias is not among them: ReLU's gradient at NaN is 0.
    with pytest.raises(NonFiniteError, match=r"20 optimizer steps .*: fc1/kernel, fc2/bias, fc2/kernel\."):
        train(engine, *[bad] * 40)
    assert engine.skipped_steps == engine.global_steps - 3 >= 20
    assert_bitwise(engine.state.params, before)
