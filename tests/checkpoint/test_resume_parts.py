"""Resuming with another optimizer, precision or model: the parts of a checkpoint that fit."""

import dataclasses
import weakref

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.refusals import refuses
from helpers.resuming import SAVED, no_signal_handler  # noqa: F401
from helpers.sampling import keep
from layouts import LAYOUTS, Net, assert_same, batch, build, data

import jzero


def scheduled(engine):
    """The steps at which the optimizer looks up its rates; `get_lr` does at state.step, if none was skipped."""
    nodes = jax.tree.leaves(engine.state.opt_state, is_leaf=lambda node: isinstance(node, optax.ScaleByScheduleState))
    return {int(n) for node in nodes if isinstance(node, optax.ScaleByScheduleState) for n in np.ravel(node.count)}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """(the directory of a checkpoint, its engine)."""
    directory, engine = tmp_path_factory.mktemp("run"), build(LAYOUTS["stage1"], training_data=data())
    for _ in range(SAVED):
        engine.train_batch()
    engine.save_checkpoint(directory).wait()
    return directory, engine


@pytest.mark.parametrize("other", keep(["Lamb", "Muon", "SGD"], ["Muon"]))
def test_the_optimizer_changes(run, other):
    """The parameters and the schedule go on, the optimizer is new."""
    directory, saved = run
    engine = build(LAYOUTS["one"], optimizer={"type": other, "params": {"lr": 0.01}})
    refuses(lambda: engine.load_checkpoint(directory), "belongs to another model or optimizer")
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
    other = build(LAYOUTS["stage1"], optimizer={"type": "SGD", "params": {"lr": 1e-2}})
    refuses(lambda: other.load_checkpoint(directory), r"another model or optimizer: .* load_module_only=True")
    other.load_checkpoint(directory, load_module_only=True)
    chex.assert_trees_all_equal(*(jax.device_get(e.state.params) for e in (other, saved)))
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
    for resume in (tmp_path, None):
        engine = build(LAYOUTS["stage1"], resume=resume, **frozen)
        if not resume:
            engine.load_checkpoint(tmp_path)
        assert_same(engine.state, saved.state)


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
    np.testing.assert_array_equal(engine.state.params["stack"]["w"], saved.state.params["stack"]["w"])
    np.testing.assert_array_equal(engine.state.params["ends"]["last"], np.ones((8, 8, 1)))
    jzero.checkpoint.save({"something": jnp.ones(3)}, tmp_path, "else").wait()
    words = "else has nothing for this model: its leaves are something"
    refuses(lambda: engine.load_checkpoint(tmp_path, "else", load_module_strict=False), words)
    engine.train_batch(batch(1))  # its state is still there
