"""A resumed run is the run: bit for bit on its own layout, to rounding on any other."""

import dataclasses
import json
import os
import shutil
import weakref
from itertools import product

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers.sampling import keep
from layouts import LAYOUTS, TRAIN, assert_same, batch, build, data

import jzero
from jzero.distributed import preemption

STEPS, SAVED, NEXT = 7, 3, 5


def samples():
    """Data without a length."""
    whole = data()
    return ({name: x[i] for name, x in whole.items()} for i in range(100))


@pytest.fixture(autouse=True)
def no_signal_handler(monkeypatch):
    """SIGTERM stays pytest's."""
    monkeypatch.setattr(preemption, "listen", lambda: None)


# ------------------------------------------------------------------------------------------- bit for bit

FP16 = {"fp16": {"enabled": True, "initial_scale_power": 24, "hysteresis": 2, "loss_scale_window": 2}}


@pytest.mark.parametrize(
    ("layout", "more"),
    keep(
        [(name, {}) for name in LAYOUTS]
        + [("stage0", FP16), ("stage3", FP16), ("interleaved", FP16), ("stage2", {"bf16": {"enabled": True}})],
        [("hsdp", {}), ("stage3", FP16)],
    ),
    ids=[*LAYOUTS, "stage0-fp16", "stage3-fp16", "interleaved-fp16", "stage2-bf16"],
)
def test_a_resumed_run_is_the_straight_one(tmp_path, layout, more):
    layout = LAYOUTS[layout]
    straight = build(layout, noise=True, training_data=data(), **more)
    expected = [straight.train_batch() for _ in range(STEPS)]

    stopped = build(layout, noise=True, training_data=data(), **more)
    losses = [stopped.train_batch() for _ in range(SAVED)]
    stopped.save_checkpoint(tmp_path, client_state={"note": "here"})
    lost = [stopped.train_batch() for _ in range(2)]  # buffers that the snapshot was taken from
    resumed = build(layout, noise=True, training_data=data(), resume=tmp_path, **more)
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


def test_the_three_calls_resume_too(tmp_path):
    def train(engine, steps):
        losses = []
        loader = jzero.RepeatingLoader(engine.training_dataloader)
        for _ in range(steps * engine.gradient_accumulation_steps()):
            losses.append(engine(next(loader)))
            engine.backward(losses[-1])
            engine.step()
        return [float(loss) for loss in losses]

    layout = LAYOUTS["stage1"]
    straight, stopped = (build(layout, noise=True, training_data=data()) for _ in range(2))
    expected = train(straight, 6)
    losses = train(stopped, 2)
    stopped.save_checkpoint(tmp_path)
    assert losses + train(build(layout, noise=True, training_data=data(), resume=tmp_path), 4) == expected


# ------------------------------------------------------------------------------------------- any layout to any other


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """name -> (an engine after `SAVED` steps, the losses of the `NEXT` ones, where it was saved)."""
    directory, made = tmp_path_factory.mktemp("layouts"), {}

    def run(name):
        if name not in made:
            engine = build(LAYOUTS[name])
            for step in range(SAVED):
                engine.train_batch(batch(step))
            engine.save_checkpoint(directory, tag=name).wait()
            saved = jax.tree.map(jnp.copy, engine.state)
            losses = [float(engine.train_batch(batch(SAVED + step))) for step in range(NEXT)]
            made[name] = engine, saved, losses, directory
        return made[name]

    return run


# By default three pairs of different kinds, and one layout on itself.
DEFAULT = [("one", "zero_bubble"), ("stage2", "interleaved"), ("interleaved", "stage2"), ("stage2", "stage2")]


@pytest.mark.parametrize(("source", "target"), keep(product(LAYOUTS, LAYOUTS), DEFAULT))
def test_every_layout_loads_on_every_other(runs, source, target):
    """90 pairs, and each layout on itself."""
    _, saved, expected, directory = runs(source)
    loaded, *_ = runs(target)
    loaded.load_checkpoint(directory, tag=source)
    assert_same(loaded.state, saved)
    assert jax.tree.map(lambda x: x.sharding, loaded.state) == loaded.step_fn.state_shardings
    losses = [float(loaded.train_batch(batch(SAVED + step))) for step in range(NEXT)]
    np.testing.assert_allclose(losses, expected, rtol=1e-6)


SIZES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


BATCHES = [(None, 2, 2), (32, 2, 2), (32, None, 2), (32, 2, None)]


@pytest.mark.parametrize("sizes", keep([(sizes,) for sizes in BATCHES], [(BATCHES[3],)]), ids=str)
def test_fewer_devices_keep_the_global_batch(tmp_path, sizes):
    """And the micro-batch, though by the config alone one of them would change, or they would not fit."""
    sizes = dict(zip(SIZES, sizes, strict=True))
    eight = build((2, {"zero": 8}, 2, {}), training_data=data(), **sizes)
    straight = [float(eight.train_batch()) for _ in range(2)]
    eight.save_checkpoint(tmp_path)
    straight += [float(eight.train_batch()) for _ in range(4)]
    for zero in (4, 2, 1):
        fewer = build((2, {"zero": zero}, 2, {}), training_data=data(), resume=tmp_path, **sizes)
        assert fewer.train_batch_size() == 32
        assert fewer.get_batch_info() == (32, 2, 16 // zero)
        losses = [float(fewer.train_batch())]
        fewer.save_checkpoint(tmp_path / f"{zero}")
        for _ in range(3):  # and restarted there, once and again
            again = build((2, {"zero": zero}, 2, {}), training_data=data(), resume=tmp_path / f"{zero}", **sizes)
            assert again.get_batch_info() == (32, 2, 16 // zero)
            losses.append(float(again.train_batch()))
            again.save_checkpoint()
        np.testing.assert_allclose(losses, straight[2:], rtol=1e-6)


def test_the_config_says_another_batch_by_now(tmp_path):
    sizes = dict(zip(SIZES, (None, 2, 2), strict=True))
    build((2, {"zero": 8}, 2, {}), **sizes).save_checkpoint(tmp_path)
    changed = sizes | {"gradient_accumulation_steps": 4}
    assert build((2, {"zero": 8}, 2, {}), resume=tmp_path, **changed).train_batch_size() == 64
    given = sizes | {"train_batch_size": 16, "gradient_accumulation_steps": 4}
    assert build((2, {"zero": 2}, 2, {}), resume=tmp_path, **given).train_batch_size() == 16
    with pytest.raises(jzero.ConfigError, match="train_batch_size = 32: must be a multiple of 24"):
        build((0, {"data": 3}, 8, {}), resume=tmp_path, **sizes | {"train_micro_batch_size_per_gpu": 8})
    full = {"train_batch_size": 32, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2}
    with pytest.raises(jzero.ConfigError, match=r"train_batch_size = 32: must equal .* 2 × .* 2 × 4 replicas"):
        build((2, {"zero": 4}, 2, {}), resume=tmp_path, **full)  # all three, and other ones than the checkpoint's
    few = {"train_batch_size": 32, "train_micro_batch_size_per_gpu": None, "gradient_accumulation_steps": 4}
    build((2, {"zero": 2}, 4, {}), **few).save_checkpoint(tmp_path)
    more = build((2, {"zero": 8}, 4, {}), resume=tmp_path, **few)
    assert more.get_batch_info() == (32, 4, 1)
    few["train_micro_batch_size_per_gpu"], few["gradient_accumulation_steps"] = None, 2
    build((0, {}, 4, {}), **few).save_checkpoint(tmp_path)  # micro-batches of 16, which 8 replicas have no room for
    assert build((2, {"zero": 8}, 4, {}), resume=tmp_path, **few).get_batch_info() == (32, 2, 2)


def test_the_batch_was_changed_in_the_run(tmp_path, capfd):
    """A config that names the global batch is right, one that does not has the checkpoint's."""
    for sizes, now in (((32, 2, None), 32), ((None, 2, 2), 48)):
        said = dict(zip(SIZES, sizes, strict=True))
        engine = build((2, {"zero": 8}, 2, {}), **said)
        engine.set_train_batch_size(48)
        engine.save_checkpoint(tmp_path / str(now))
        assert build((2, {"zero": 8}, 2, {}), resume=tmp_path / str(now), **said).train_batch_size() == now
    full = dict(zip(SIZES, (32, 2, 2), strict=True))
    build((2, {"zero": 8}, 2, {}), **full).save_checkpoint(tmp_path)
    fewer = build((2, {"zero": 4}, 2, {}), resume=tmp_path, **full)
    assert "train_batch_size 32 as in the checkpoint: 4 micro-batches" in capfd.readouterr().out
    fewer.load_checkpoint(tmp_path / "48")
    assert "the checkpoint's train_batch_size was 48; from here on it is 32" in capfd.readouterr().out
    assert fewer.get_batch_info() == (32, 2, 4)


@pytest.mark.slow
def test_a_list_of_layers_that_the_stages_divide_or_not(tmp_path):
    """Three layers alike: cut by three stages, not by two, which switch between the layers; the leaves are the same."""
    layouts = {
        "one": (0, {}, 8, {}), "stage3": (3, {"zero": 4}, 4, {}), "cut": (1, {"pipe": 3, "zero": 2}, 4, {}),
        "switched": (3, {"pipe": 2, "zero": 4}, 2, {"schedule": "interleaved", "chunks": 2}),
    }  # fmt: skip
    layer, engines, expected = jzero.LayerSpec(nnx.Linear, 8, 8), {}, {}
    for name, layout in layouts.items():
        layers = [jzero.LayerSpec(nnx.Linear, 8, 8, use_bias=False), layer, layer, layer, jnp.tanh]
        model = jzero.PipelineModule(
            layers, layout[1].get("pipe"), loss_fn=lambda y, labels: ((y - labels) ** 2).mean()
        )
        engines[name] = engine = build(layout, model=model)
        train = [float(engine.train_batch(tuple(batch(step).values()))) for step in range(SAVED)]
        engine.save_checkpoint(tmp_path, tag=name).wait()
        expected[name] = train + [float(engine.train_batch(tuple(batch(SAVED + n).values()))) for n in range(NEXT)]
    for source, target in product(layouts, layouts):
        engine = engines[target]
        engine.load_checkpoint(tmp_path, tag=source)
        assert_same(engine.state, jzero.checkpoint.restore(tmp_path, engine.step_fn.state_shardings, tag=source))
        losses = [float(engine.train_batch(tuple(batch(SAVED + n).values()))) for n in range(NEXT)]
        np.testing.assert_allclose(losses, expected[source][SAVED:], rtol=1e-6, err_msg=f"{source} -> {target}")
        np.testing.assert_allclose(expected[source], expected[target], rtol=1e-6)


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


# ------------------------------------------------------------------------------------------- parts of a checkpoint


def scheduled(engine):
    """The steps at which the optimizer looks up its rates; `get_lr` does at state.step, if none was skipped."""
    nodes = jax.tree.leaves(engine.state.opt_state, is_leaf=lambda node: isinstance(node, optax.ScaleByScheduleState))
    return {int(n) for node in nodes if isinstance(node, optax.ScaleByScheduleState) for n in np.ravel(node.count)}


@pytest.mark.parametrize("other", keep(["Lamb", "Muon", "SGD"], ["Muon"]))
def test_the_optimizer_changes(tmp_path, other):
    """The parameters and the schedule go on, the optimizer is new."""
    saved = build(LAYOUTS["stage1"])
    for step in range(SAVED):
        saved.train_batch(batch(step))
    saved.save_checkpoint(tmp_path)
    engine = build(LAYOUTS["stage3"], optimizer={"type": other, "params": {"lr": 0.01}})
    with pytest.raises(jzero.ConfigError, match="belongs to another model or optimizer"):
        engine.load_checkpoint(tmp_path)
    engine.load_checkpoint(tmp_path, load_optimizer_states=False)
    assert scheduled(engine) == {SAVED}
    assert engine.get_lr() == saved.get_lr()
    engine.train_batch(batch(9))
    assert scheduled(engine) == {SAVED + 1}


def test_parts_of_a_checkpoint(tmp_path):
    saved = build(LAYOUTS["stage1"])
    for step in range(SAVED):
        saved.train_batch(batch(step))
    saved.save_checkpoint(tmp_path)

    def loaded(**how):
        engine = build(LAYOUTS["stage1"])
        engine.train_batch(batch(8))
        before = jax.device_get((engine.state.opt_state, engine.state.step))
        path, _ = engine.load_checkpoint(tmp_path, **how)
        assert path == str(tmp_path / "global_step3")
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
    with pytest.raises(jzero.ConfigError, match=r"another model or optimizer: .* load_module_only=True"):
        other.load_checkpoint(tmp_path)
    other.load_checkpoint(tmp_path, load_module_only=True)
    chex.assert_trees_all_equal(*(jax.device_get(e.state.params) for e in (other, saved)))
    with pytest.raises(jzero.ConfigError, match=r"custom_load_fn: read with jzero\.checkpoint\.restore"):
        saved.load_checkpoint(tmp_path, custom_load_fn=print)


def test_the_parameters_for_other_data(tmp_path):
    first = build(LAYOUTS["stage1"], training_data=data())
    first.train_batch()
    first.save_checkpoint(tmp_path)
    fewer = build(LAYOUTS["stage1"], training_data=data(8))
    with pytest.raises(jzero.ConfigError, match=r"position belongs to other data; .*load_module_only=True"):
        fewer.load_checkpoint(tmp_path)
    fewer.load_checkpoint(tmp_path, load_module_only=True)
    chex.assert_trees_all_equal(*(jax.device_get(e.state.params) for e in (first, fewer)))
    fewer.train_batch()


def test_a_checkpoint_without_the_frozen_parameters(tmp_path):
    frozen = {"frozen_parameters": ["first"]}
    saved = build(LAYOUTS["stage3"], **frozen)
    saved.train_batch(batch(0))
    saved.save_checkpoint(tmp_path, exclude_frozen_parameters=True).wait()
    assert "params/ends/first" not in jzero.checkpoint.Checkpoint.find(tmp_path).shapes
    other = build(LAYOUTS["one"], **frozen)
    ends = other.state.params["ends"] | {"first": 2 * other.state.params["ends"]["first"]}
    other.state = dataclasses.replace(other.state, params=other.state.params | {"ends": ends})
    with pytest.raises(jzero.ConfigError, match="was saved without params/ends/first, and this engine holds other"):
        other.load_checkpoint(tmp_path)
    for resume in (tmp_path, None):
        engine = build(LAYOUTS["stage1"], resume=resume, **frozen)
        if not resume:
            engine.load_checkpoint(tmp_path)
        assert_same(engine.state, saved.state)


@pytest.mark.parametrize(("before", "after"), [("fp32", "bf16"), ("bf16", "fp32")])
def test_frozen_parameters_left_out_at_another_precision(tmp_path, before, after):
    """They have the compute dtype: compared in the narrower one, or not at all, but never refused for it."""
    frozen = {"frozen_parameters": ["first"]}
    saved = build(LAYOUTS["stage1"], **frozen, **({"bf16": {"enabled": True}} if before == "bf16" else {}))
    saved.train_batch(batch(0))
    saved.save_checkpoint(tmp_path, exclude_frozen_parameters=True).wait()
    engine = build(LAYOUTS["stage1"], **frozen, **({"bf16": {"enabled": True}} if after == "bf16" else {}))
    engine.load_checkpoint(tmp_path)
    np.testing.assert_array_equal(engine.state.params["stack"]["w"], saved.state.params["stack"]["w"])


def test_the_former_state_makes_room_for_the_new_one(tmp_path, monkeypatch):
    engine = build(LAYOUTS["stage1"])
    engine.save_checkpoint(tmp_path).wait()
    former, read, alive = [weakref.ref(x) for x in jax.tree.leaves(engine.state)], jzero.checkpoint.Checkpoint.read, []

    def counted(self, shardings):
        alive.append(sum(x() is not None for x in former))
        return read(self, shardings)

    monkeypatch.setattr(jzero.checkpoint.Checkpoint, "read", counted)
    engine.load_checkpoint(tmp_path)
    assert alive == [0]


def test_what_fits_of_another_model(tmp_path):
    """load_module_strict=False: fine-tuning with another head."""
    saved = build(LAYOUTS["stage1"])
    saved.train_batch(batch(0))
    saved.save_checkpoint(tmp_path)

    class Other(type(saved.step_fn.model)):
        def init(self, rng):
            params = super().init(rng)
            return params | {"ends": params["ends"] | {"last": jnp.ones((8, 8, 1))}}

        def suffix(self, ends, x, batch, rng):
            return super().suffix(ends | {"last": ends["last"][..., 0]}, x, batch, rng)

    engine, *_ = jzero.initialize(model=Other(), config=saved.config, mesh=saved.mesh)
    with pytest.raises(
        jzero.ConfigError, match=r"another model or optimizer: .*params/ends/last is \(8, 8\), not \(8, 8, 1\)"
    ):
        engine.load_checkpoint(tmp_path)
    engine.load_checkpoint(tmp_path, load_module_strict=False)
    np.testing.assert_array_equal(engine.state.params["stack"]["w"], saved.state.params["stack"]["w"])
    np.testing.assert_array_equal(engine.state.params["ends"]["last"], np.ones((8, 8, 1)))
    engine.train_batch(batch(1))
    jzero.checkpoint.save({"something": jnp.ones(3)}, tmp_path, "else").wait()
    with pytest.raises(jzero.ConfigError, match="else has nothing for this model: its leaves are something"):
        engine.load_checkpoint(tmp_path, "else", load_module_strict=False)
    engine.train_batch(batch(1))  # its state is still there


# ------------------------------------------------------------------------------------------- choosing one


def test_the_newest_that_can_be_read(tmp_path, capfd):
    engine = build(LAYOUTS["one"], resume=tmp_path)
    assert f"no checkpoint in {tmp_path} yet: starting at step 0" in capfd.readouterr().out
    for step in range(4):
        engine.train_batch(batch(step))
        engine.save_checkpoint(tmp_path)
    jzero.checkpoint.wait()
    (tmp_path / "global_step3" / "notes.json").write_text("{")
    (tmp_path / "global_step4" / "state" / "manifest.ocdbt").write_bytes(b"")
    (tmp_path / "global_step9.saving").mkdir()
    resumed = build(LAYOUTS["one"], resume=tmp_path)
    out, said = capfd.readouterr()
    assert resumed.global_steps == 2
    assert f"resumed from {tmp_path}/global_step2: step 2" in out
    damaged = f"skipped: checkpoint {tmp_path}/global_step3 is damaged: notes.json"
    for words in ("global_step9.saving was not finished", f"skipped: reading {tmp_path}/global_step4: ", damaged):
        assert words in said
    assert said.count("skipped: ") == 3
    (tmp_path / "global_step4" / "notes.json").unlink()  # a known fault is said too, though it is not tried
    shutil.rmtree(tmp_path / "global_step3")
    (tmp_path / "latest").write_text("global_step3")
    assert build(LAYOUTS["one"], resume=tmp_path).global_steps == 2
    out, said = capfd.readouterr()
    for words in ("global_step3 does not exist, and latest names it", "global_step4 is not complete: notes.json"):
        assert f"skipped: checkpoint {tmp_path}/{words}" in said
    (tmp_path / "latest").write_text("global_step1")
    build(LAYOUTS["one"], resume=tmp_path)
    assert "global_step2: step 2 (latest names global_step1)" in capfd.readouterr().out

    for tag in ("global_step1", "global_step2"):
        (tmp_path / tag / "notes.json").unlink()
    with pytest.raises(jzero.CheckpointError, match=r"none of the 3 checkpoints in .* can be read"):
        build(LAYOUTS["one"], resume=tmp_path)
    for path in tmp_path.glob("global_step*"):
        shutil.rmtree(path)
    with pytest.raises(jzero.CheckpointError, match="global_step1 does not exist, and latest names it"):
        build(LAYOUTS["one"], resume=tmp_path)


def test_a_run_that_does_not_resume_beside_checkpoints(tmp_path, capfd):
    """It says so, and does not remove what it did not write."""
    section = {"checkpoint": {"dir": str(tmp_path / "runs"), "max_to_keep": 2}}
    first = build(LAYOUTS["one"], **section)
    for step in range(4):
        first.train_batch(batch(step))
        first.save_checkpoint()
    jzero.checkpoint.wait()
    assert "starting at step 0, though" not in capfd.readouterr().err
    again = build(LAYOUTS["one"], **section)
    words = f"starting at step 0, though {tmp_path}/runs holds global_step4, global_step3: jzero --resume, or resume="
    assert words in capfd.readouterr().err
    for step in range(2):
        again.train_batch(batch(step))
        again.save_checkpoint().wait()
    left = {path.name for path in (tmp_path / "runs").glob("[!.]*")}
    assert left == {"latest", "global_step1", "global_step2", "global_step3", "global_step4"}
    (tmp_path / "file").touch()
    for place in ("file", "file/runs"):
        with pytest.raises(jzero.ConfigError, match=r"checkpoint.dir = .*/file is not a writable directory"):
            build(LAYOUTS["one"], checkpoint={"dir": str(tmp_path / place)})


def test_what_others_left_is_neither_taken_nor_removed(tmp_path, capfd):
    """A directory of DeepSpeed's checkpoints, and other jobs' files."""
    theirs = tmp_path / "global_step1" / "mp_rank_00_model_states.pt"
    others = [tmp_path / name / "theirs" for name in ("x.saving", "y.replaced", "z")]
    for file in (theirs, *others):
        file.parent.mkdir()
        file.touch()
    (tmp_path / "z" / "state").mkdir()
    (tmp_path / "latest").write_text("global_step1")
    with pytest.raises(jzero.CheckpointError, match="global_step1 is not a jzero checkpoint, and latest names it"):
        build(LAYOUTS["one"], resume=tmp_path)
    engine = build(LAYOUTS["one"])
    engine.train_batch(batch(0))
    for tag, place in (("global_step1",) * 2, ("x", r"x\.saving"), ("y", r"y\.replaced"), ("z", "z")):
        with pytest.raises(jzero.ConfigError, match=f"{place} exists and is not a jzero checkpoint: choose another"):
            engine.save_checkpoint(tmp_path, tag)
    with pytest.raises(jzero.ConfigError, match=r"checkpoint .*/y does not exist"):
        engine.load_checkpoint(tmp_path, "y")
    (tmp_path / "empty").mkdir()
    engine.save_checkpoint(tmp_path, tag="empty").wait()
    (tmp_path / "global_step0" / "state").mkdir(parents=True)
    others += [tmp_path / "global_step0" / "theirs", tmp_path / "w" / "notes.json"]
    for file in others[-2:]:
        file.parent.mkdir(exist_ok=True)
        file.write_text("{}")
    with pytest.raises(jzero.ConfigError, match="w exists and is not a jzero checkpoint: choose another"):
        engine.save_checkpoint(tmp_path, "w")
    jzero.checkpoint.save(engine.state, tmp_path, "global_step1000", max_to_keep=1).wait()
    shutil.rmtree(tmp_path / "global_step1000")
    (tmp_path / "notes.json").write_text("[]")
    assert all(file.exists() for file in (theirs, *others))
    (tmp_path / "latest").write_text("global_step1")
    shutil.rmtree(tmp_path / "w")
    assert build(LAYOUTS["one"], resume=tmp_path).global_steps == 1
    (tmp_path / "latest").write_bytes(b"global_\xff\x00")  # damaged, and not needed
    capfd.readouterr()
    assert build(LAYOUTS["one"], resume=tmp_path).global_steps == 1
    assert r"its file 'latest' is damaged: it contains 'global_\udcff" in capfd.readouterr().err


def test_a_damaged_latest(tmp_path, capfd):
    """A resume takes the newest whole checkpoint; a load is an error in one line."""
    engine, runs = build(LAYOUTS["one"]), tmp_path / "runs"
    for step in range(2):
        engine.train_batch(batch(step))
        engine.save_checkpoint(runs).wait()
    engine.save_checkpoint(tmp_path / "other").wait()
    outside = tmp_path / "other" / "global_step2"
    texts = {
        bytes(20): "damaged: it contains '\\x00", b"g" * 10**6: "damaged: it contains 'ggg", b"": "empty",
        b"../other/global_step2": "damaged: it contains '../other/", str(outside).encode(): "damaged: it contains '/",
        b"..": "damaged: it contains '..'", b".": "damaged: it contains '.'", b"global_step1\nx": "damaged",
        b"global_step1.saving": "damaged: it contains 'global_step1.saving'", b"\xff\xfe": "damaged",
    }  # fmt: skip
    faults = [(lambda text=text: (runs / "latest").write_bytes(text), words) for text, words in texts.items()]
    faults += [((runs / "latest").mkdir, "is not a file"), (lambda: os.mkfifo(runs / "latest"), "is not a file")]
    for make, words in faults:
        latest = runs / "latest"
        latest.rmdir() if latest.is_dir() else latest.unlink()
        make()
        with pytest.raises(jzero.ConfigError) as error:
            engine.load_checkpoint(runs)
        assert f"{runs} has no default checkpoint (its " in str(error.value)
        assert words in str(error.value)
        assert "choose a tag: global_step2, global_step1" in str(error.value)
        capfd.readouterr()
        assert build(LAYOUTS["one"], resume=runs).global_steps == 2
        out, err = capfd.readouterr()
        assert f"resumed from {runs}/global_step2: step 2" in out
        (line,) = [line for line in err.splitlines() if line.startswith("jzero: ")]
        assert line.startswith(f"jzero: skipped: {runs}: its ")
        assert words in line
        for problem in (line, str(error.value)):
            assert problem.isprintable()
            assert len(problem) < 2 * len(str(runs)) + 200
    engine.save_checkpoint(runs).wait()  # replaces the pipe
    assert engine.load_checkpoint(runs)[0] == str(runs / "global_step2")
    for tag in ("global_step1", "global_step2"):
        shutil.rmtree(runs / tag)
    (runs / "latest").write_bytes(bytes(9))
    with pytest.raises(jzero.CheckpointError, match=r"none of the 1 checkpoints in .*runs can be read: .*is damaged"):
        build(LAYOUTS["one"], resume=runs)


def test_the_home_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    engine = build(LAYOUTS["one"], resume="auto", checkpoint={"dir": "~/runs"})
    engine.save_checkpoint().wait()
    engine.save_checkpoint("~/others").wait()
    assert {path.name for path in tmp_path.iterdir()} == {"runs", "others"}
    assert build(LAYOUTS["one"]).load_checkpoint("~/runs")[0] == str(tmp_path / "runs" / "global_step0")
    for place, words in (("~nobody-here/runs", "there is no such user"), ("runs\0", "NUL")):
        for more in ({"resume": place}, {"checkpoint": {"dir": place}}):
            with pytest.raises(jzero.ConfigError, match=words):
                build(LAYOUTS["one"], **more)


def test_addresses_are_no_directories():
    for more in ({"resume": "gs://bucket/runs"}, {"checkpoint": {"dir": "s3://bucket/runs"}}):
        with pytest.raises(
            jzero.ConfigError, match="bucket/runs': must be a directory on a file system that all hosts"
        ):
            build(LAYOUTS["one"], **more)
    with pytest.raises(jzero.ConfigError, match="the checkpoint directory = 'gs://b': must be a directory"):
        build(LAYOUTS["one"]).save_checkpoint("gs://b")


def test_any_kind_of_random_key(tmp_path):
    def built(seed, kind, **more):
        return build(LAYOUTS["stage1"], noise=True, rng=jax.random.key(seed, impl=kind), **more)

    straight, stopped = (built(3, "rbg") for _ in range(2))
    for step in range(2):
        straight.train_batch(batch(step))
        stopped.train_batch(batch(step))
    stopped.save_checkpoint(tmp_path)
    for kind in ("rbg", "threefry2x32"):
        resumed = built(4, kind, resume=tmp_path)
        assert_same(resumed.state, stopped.state)
        assert str(jax.random.key_impl(resumed.state.rng)) == "rbg"
    assert float(resumed.train_batch(batch(2))) == float(straight.train_batch(batch(2)))


def test_no_run_starts_from_scratch_in_silence(tmp_path):
    engine = build(LAYOUTS["one"])
    engine.save_checkpoint(tmp_path / "runs").wait()
    with pytest.raises(jzero.ConfigError, match=r"is itself a checkpoint; use its parent, .*/runs$"):
        build(LAYOUTS["one"], resume=tmp_path / "runs" / "global_step0")
    (tmp_path / "file").touch()
    with pytest.raises(jzero.ConfigError, match="is not a writable directory"):
        build(LAYOUTS["one"], resume=tmp_path / "file")
    shutil.rmtree(tmp_path / "runs" / "global_step0" / "state")
    with pytest.raises(jzero.CheckpointError, match="is not complete: it has no state"):
        build(LAYOUTS["one"], resume=tmp_path / "runs")
    engine.state = None
    with pytest.raises(jzero.ConfigError, match="there is no state: reading a checkpoint into its place failed"):
        engine.save_checkpoint(tmp_path / "runs")


@pytest.mark.parametrize(
    ("before", "now", "seed", "words"),
    [
        (data(), data(), 0, ""),
        (data(), data(101), 0, "or in another order from here on: samples was 100, is 101"),
        (data(), data(), 3, "or in another order from here on: seed was 0, is 3"),
        (samples, samples, 3, ""),  # in their own order
        (data(), None, 0, "has a position in training_data, but this run has no training_data"),
        (None, data(), 0, "is of step 1 but has no position in training_data, which begins at its start"),
        (None, None, 3, ""),
    ],
    ids=["same", "samples", "seed", "iterable", "none now", "none before", "none"],
)
def test_other_data_are_said(tmp_path, capfd, before, now, seed, words):
    layout = LAYOUTS["stage1"]
    saved = build(layout, training_data=before)
    saved.train_batch(*[batch(0)] * (before is None))
    saved.save_checkpoint(tmp_path)
    build(layout, training_data=now, resume=tmp_path, seed=seed)
    said = capfd.readouterr().err
    assert words in said
    assert ("training_data" in said or "another order" in said) == bool(words)


def test_load_weights_does_not_undo_a_resume(tmp_path):
    engine = build(LAYOUTS["one"])
    engine.train_batch(batch(0))
    engine.save_checkpoint(tmp_path, client_state={"best": 2}).wait()
    resumed = build(LAYOUTS["one"], resume=tmp_path)
    assert resumed.client_state == {"best": 2}
    with pytest.raises(jzero.ConfigError, match="this run was resumed at step 1 and would start at step 0 again"):
        resumed.load_weights(tmp_path)


def test_the_directory_of_the_config(tmp_path, monkeypatch):
    section = {"checkpoint": {"dir": str(tmp_path / "runs"), "max_to_keep": 2}}
    engine = build(LAYOUTS["one"], resume="auto", **section)
    for step in range(4):
        engine.train_batch(batch(step))
        engine.save_checkpoint()
    engine.save_checkpoint(tag="mine").wait()
    assert sorted(p.name for p in (tmp_path / "runs").glob("[!.]*")) == [
        "global_step3",
        "global_step4",
        "latest",
        "mine",
    ]
    monkeypatch.setenv("JZERO_RESUME", "auto")  # by `jzero --resume`
    assert build(LAYOUTS["one"], **section).global_steps == 4
    assert build(LAYOUTS["one"], resume=False, **section).global_steps == 0
    assert engine.load_checkpoint()[0] == str(tmp_path / "runs" / "mine")


def test_another_model_is_an_error_and_not_skipped(tmp_path):
    engine = build(LAYOUTS["one"])
    engine.save_checkpoint(tmp_path)
    with pytest.raises(jzero.ConfigError, match="another model or optimizer: missing opt_state"):
        build(LAYOUTS["one"], resume=tmp_path, optimizer={"type": "Adagrad", "params": {"lr": 0.1}})


def test_a_functional_checkpoint_in_an_engine_and_back(tmp_path):
    engine = build(LAYOUTS["stage2"])
    engine.train_batch(batch(0))
    own = {"batch": 64, "client": "me"}  # what these words mean to whoever saves so
    jzero.checkpoint.save(engine.state, tmp_path / "functional", notes=own)
    loaded = build(LAYOUTS["stage3"], resume=tmp_path / "functional")
    assert_same(loaded.state, engine.state)
    assert (loaded.global_steps, loaded.client_state) == (1, {})
    half = build(LAYOUTS["stage3"], resume=tmp_path / "functional", fp16={"enabled": True})
    assert (half.loss_scale, half.global_steps) == (2.0**16, 1)  # its own: that was of no scaler
    jzero.checkpoint.save(half.state, tmp_path / "half")
    again = build(LAYOUTS["stage1"], resume=tmp_path / "half", fp16={"enabled": True})
    assert_same(again.state, half.state)
    engine.save_checkpoint(tmp_path / "engine")
    step = loaded.step_fn
    loaded.state = jzero.checkpoint.restore(tmp_path / "engine", step.state_shardings)
    assert_same(loaded.state, engine.state)
    assert json.loads((tmp_path / "engine" / "global_step1" / "notes.json").read_text())["notes"]["notes"]["engine"]
