"""A resumed run is the run: bit for bit on its own layout, to rounding on any other; or the parts of it that fit."""

import dataclasses
import weakref
from functools import cache, partial
from itertools import product

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.refusals import refuses
from helpers.resuming import NEXT, SAVED, STEPS, no_signal_handler  # noqa: F401
from helpers.sampling import keep
from layouts import LAYOUTS, TRAIN, Net, assert_same, batch, build, data

import jzero

FP16 = {"fp16": {"enabled": True, "initial_scale_power": 24, "hysteresis": 2, "loss_scale_window": 2}}
RESUMED = [*((name, {}) for name in LAYOUTS), ("stage3", FP16), ("interleaved", FP16)]


@pytest.mark.parametrize(("layout", "more"), keep(RESUMED, [("stage3", FP16)]))
def test_a_resumed_run_is_the_straight_one(tmp_path, layout, more):
    layout = LAYOUTS[layout]
    straight = build(layout, noise=True, training_data=data(), **more)
    expected = [straight.train_batch() for _ in range(STEPS)]

    step = straight.step_fn
    stopped = jzero.Engine(step, jax.random.key(0), jzero.data.DataLoader(data(), step))
    losses = [stopped.train_batch() for _ in range(SAVED)]
    stopped.save_checkpoint(tmp_path, client_state={"note": "here"})
    lost = [stopped.train_batch() for _ in range(2)]  # buffers that the snapshot was taken from
    resumed = jzero.Engine(step, jax.random.key(0), jzero.data.DataLoader(data(), step), resume=tmp_path)
    assert resumed.client_state == {"note": "here"}
    assert (resumed.global_steps, resumed.global_samples) == (SAVED, SAVED * TRAIN)
    losses += [resumed.train_batch() for _ in range(STEPS - SAVED)]
    np.testing.assert_array_equal(losses, expected)
    np.testing.assert_array_equal(lost, expected[SAVED : SAVED + 2])
    assert_same(resumed.state, straight.state)
    assert resumed.get_lr() == straight.get_lr()
    assert resumed.training_dataloader.position == straight.training_dataloader.position
    if more is FP16:  # the scaler is in the middle of something: it has skipped, halved and doubled
        assert stopped.skipped_steps > 0
        assert len({float(resumed.loss_scale), 2.0**24}) == 2


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """name -> (an engine after `SAVED` steps, the losses of the `NEXT` ones, where it was saved)."""
    directory = tmp_path_factory.mktemp("layouts")

    @cache
    def run(name):
        engine = build(LAYOUTS[name])
        for step in range(SAVED):
            engine.train_batch(batch(step))
        engine.save_checkpoint(directory, tag=name, client_state={"epoch": 7}).wait()
        saved = jax.jit(partial(jax.tree.map, jnp.copy))(engine.state)
        return engine, saved, [float(engine.train_batch(batch(SAVED + step))) for step in range(NEXT)], directory

    return run


@pytest.mark.parametrize(("source", "target"), keep(product(LAYOUTS, LAYOUTS), [("stage1", "gpipe")]))
def test_every_layout_loads_on_every_other(runs, source, target):
    """90 pairs, and each layout on itself."""
    _, saved, expected, directory = runs(source)
    loaded, *_ = runs(target)
    assert loaded.load_checkpoint(directory, tag=source) == (str(directory / source), {"epoch": 7})
    assert_same(loaded.state, saved)
    assert jax.tree.map(lambda x: x.sharding, loaded.state) == loaded.step_fn.state_shardings
    counted = SAVED, SAVED * TRAIN, SAVED * runs(source)[0].gradient_accumulation_steps()
    assert (loaded.global_steps, loaded.global_samples, loaded.micro_steps) == counted
    losses = [float(loaded.train_batch(batch(SAVED + step))) for step in range(NEXT)]
    np.testing.assert_allclose(losses, expected, rtol=1e-6)


def test_the_batch_was_changed_in_the_run(tmp_path, capfd):
    """A config that names the global batch is right, one that does not has the checkpoint's."""
    engine = build((2, {"zero": 2}, 2, {}), gradient_accumulation_steps=8)
    engine.save_checkpoint(tmp_path / "32")
    engine.set_train_batch_size(48)
    engine.save_checkpoint(tmp_path / "48")
    fewer = build((2, {"zero": 1}, 2, {}), gradient_accumulation_steps=8, resume=tmp_path / "32")
    line = "train_batch_size 32 as in the checkpoint: 16 micro-batches instead of the config's 8"
    assert line in capfd.readouterr().out
    fewer.load_checkpoint(tmp_path / "48")
    assert "the checkpoint's train_batch_size was 48; from here on it is 32" in capfd.readouterr().out
    assert fewer.get_batch_info() == (32, 2, 16)


@pytest.mark.slow
def test_another_precision(tmp_path):
    """fp16 with a scale of 2**24 goes on in bf16 and fp32 without a scale, and with masters of half the size."""
    first = build(LAYOUTS["stage2"], **FP16)
    for step in range(SAVED):
        first.train_batch(batch(step))
    first.save_checkpoint(tmp_path)
    for more in ({}, {"bf16": {"enabled": True}}):
        other = build(LAYOUTS["stage3"], resume=tmp_path, **more)
        chex.assert_trees_all_equal(*(jax.device_get(e.state.params) for e in (other, first)))
        assert other.loss_scale == 1
        assert other.skipped_steps == first.skipped_steps > 0
        assert other.get_lr() == first.get_lr()
        other.train_batch(batch(9))
    low = {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}}
    half = build(LAYOUTS["stage3"], resume=tmp_path, **low)
    rounded = jax.tree.map(lambda x: np.asarray(x.astype(jnp.bfloat16)), first.state.params)
    chex.assert_trees_all_equal(jax.device_get(half.state.params), rounded)
    half.train_batch(batch(9))
    half.save_checkpoint(tmp_path)
    again = build(LAYOUTS["one"], resume=tmp_path)
    assert {x.dtype for x in jax.tree.leaves(again.state.params)} == {jnp.dtype("float32")}


def scheduled(engine):
    """The steps at which the optimizer looks up its rates; `get_lr` does at state.step, if none was skipped."""
    nodes = jax.tree.leaves(engine.state.opt_state, is_leaf=lambda node: isinstance(node, optax.ScaleByScheduleState))
    return {int(n) for node in nodes if isinstance(node, optax.ScaleByScheduleState) for n in np.ravel(node.count)}


@pytest.fixture(scope="module")
def run(runs, tmp_path_factory):
    """(the directory of a checkpoint, its engine)."""
    step = runs("stage1")[0].step_fn
    engine = jzero.Engine(step, jax.random.key(0), jzero.data.DataLoader(data(), step))
    directory = tmp_path_factory.mktemp("run")
    for _ in range(SAVED):
        engine.train_batch()
    engine.save_checkpoint(directory).wait()
    return directory, engine


def test_the_optimizer_changes(run):
    """The parameters and the schedule go on, the optimizer is new."""
    directory, saved = run
    engine = build(LAYOUTS["one"], optimizer={"type": "SGD", "params": {"lr": 0.01}})
    refuses(lambda: engine.load_checkpoint(directory), r"belongs to another model or optimizer: .* load_module_only=T")
    engine.load_checkpoint(directory, load_optimizer_states=False)
    assert scheduled(engine) == {SAVED}
    assert engine.get_lr() == saved.get_lr()
    engine.train_batch(batch(9))
    assert scheduled(engine) == {SAVED + 1}


@pytest.mark.slow
def test_parts_of_a_checkpoint(run):
    directory, saved = run

    def loaded(**how):
        engine = build(LAYOUTS["stage1"])
        engine.train_batch(batch(8))
        before = jax.device_get((engine.state.opt_state, engine.state.step))
        path, _ = engine.load_checkpoint(directory, **how)
        assert path == str(directory / "global_step3")
        chex.assert_trees_all_equal(*(jax.device_get(e.state.params) for e in (engine, saved)))
        same = [
            all(map(np.array_equal, jax.tree.leaves(jax.device_get(now)), jax.tree.leaves(then)))
            for now, then in zip((engine.state.opt_state, engine.state.step), before, strict=True)
        ]
        assert scheduled(engine) == {int(engine.state.step)}
        engine.train_batch(batch(9))
        return same, engine.global_steps

    assert loaded() == ([False, False], 4)
    assert loaded(load_optimizer_states=False) == ([False, False], 4)  # its place in the schedule
    assert loaded(load_lr_scheduler_states=False) == ([False, True], 4)
    assert loaded(load_module_only=True) == ([True, True], 2)
    words = r"custom_load_fn: read with jzero\.checkpoint\.restore"
    refuses(lambda: saved.load_checkpoint(directory, custom_load_fn=print), words)


def test_the_parameters_for_other_data(run):
    directory, first = run
    fewer = build(LAYOUTS["one"], training_data=data(8))
    refuses(lambda: fewer.load_checkpoint(directory), r"position belongs to other data; .*load_module_only=True")
    fewer.load_checkpoint(directory, load_module_only=True)
    chex.assert_trees_all_equal(*(jax.device_get(e.state.params) for e in (first, fewer)))


@pytest.mark.slow
def test_a_checkpoint_without_the_frozen_parameters(tmp_path):
    frozen = {"frozen_parameters": ["first"]}
    saved = build(LAYOUTS["stage3"], **frozen)
    saved.train_batch(batch(0))
    saved.save_checkpoint(tmp_path, exclude_frozen_parameters=True).wait()
    assert "params/ends/first" not in jzero.checkpoint.Checkpoint.find(tmp_path).shapes
    other = build(LAYOUTS["one"], **frozen)
    ends = other.state.params["ends"] | {"first": 2 * other.state.params["ends"]["first"]}
    other.state = dataclasses.replace(other.state, params=other.state.params | {"ends": ends})
    words = "was saved without params/ends/first, and this engine holds other"
    refuses(lambda: other.load_checkpoint(tmp_path), words)
    assert_same(build(LAYOUTS["stage1"], resume=tmp_path, **frozen).state, saved.state)


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [("fp32", "bf16"), ("bf16", "fp32")])
def test_frozen_parameters_left_out_at_another_precision(tmp_path, before, after, capsys):
    """They have the compute dtype: compared in the narrower one, or not at all, but never refused for it."""
    saved, engine = (
        build(LAYOUTS["stage1"], frozen_parameters=["first"], bf16={"enabled": precision == "bf16"})
        for precision in (before, after)
    )
    saved.train_batch(batch(0))
    saved.save_checkpoint(tmp_path, exclude_frozen_parameters=True).wait()
    engine.load_checkpoint(tmp_path)
    line = f"jzero: the checkpoint's run computed in {before}, and this one computes in {after}\n"
    assert line in capsys.readouterr().err
    np.testing.assert_array_equal(engine.state.params["stack"]["w"], saved.state.params["stack"]["w"])
    engine.save_checkpoint(tmp_path / "again")
    engine.load_checkpoint(tmp_path / "again")
    assert "computed in" not in capsys.readouterr().err


def test_the_former_state_makes_room_for_the_new_one(run, monkeypatch):
    directory, engine = run[0], build(LAYOUTS["stage1"])
    former, read, alive = [weakref.ref(x) for x in jax.tree.leaves(engine.state)], jzero.checkpoint.Checkpoint.read, []

    def counted(self, shardings):
        alive.append(sum(x() is not None for x in former))
        return read(self, shardings)

    monkeypatch.setattr(jzero.checkpoint.Checkpoint, "read", counted)
    engine.load_checkpoint(directory)
    assert alive == [0]


class Other(Net):
    """Its head has another shape."""

    def init(self, rng):
        params = super().init(rng)
        return params | {"ends": params["ends"] | {"last": jnp.ones((8, 8, 1))}}

    def suffix(self, ends, x, batch, rng):
        return super().suffix(ends | {"last": ends["last"][..., 0]}, x, batch, rng)


def test_what_fits_of_another_model(run, tmp_path):
    """load_module_strict=False: fine-tuning with another head."""
    directory, saved = run
    engine = build(LAYOUTS["one"], model=Other())
    words = r"another model or optimizer: .*params/ends/last is \(8, 8\), not \(8, 8, 1\)"
    refuses(lambda: engine.load_checkpoint(directory), words)
    engine.load_checkpoint(directory, load_module_strict=False)
    jzero.checkpoint.save({"something": jnp.ones(3)}, tmp_path, "else").wait()
    words = "else has nothing for this model: its leaves are something"
    refuses(lambda: engine.load_checkpoint(tmp_path, "else", load_module_strict=False), words)
    # Its state is still there.
    np.testing.assert_array_equal(engine.state.params["stack"]["w"], saved.state.params["stack"]["w"])
    np.testing.assert_array_equal(engine.state.params["ends"]["last"], np.ones((8, 8, 1)))
    jax.device_get(engine.state)  # all of its state is still there
