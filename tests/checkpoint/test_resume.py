"""A resumed run is the run: bit for bit on its own layout, to rounding on any other."""

from itertools import product

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers.refusals import refuses
from helpers.resuming import NEXT, SAVED, STEPS, no_signal_handler  # noqa: F401
from helpers.sampling import keep
from layouts import LAYOUTS, TRAIN, assert_same, batch, build, data

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


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """name -> (an engine after `SAVED` steps, the losses of the `NEXT` ones, where it was saved)."""
    directory, made = tmp_path_factory.mktemp("layouts"), {}

    def run(name):
        if name not in made:
            engine = build(LAYOUTS[name])
            for step in range(SAVED):
                engine.train_batch(batch(step))
            engine.save_checkpoint(directory, tag=name, client_state={"epoch": 7}).wait()
            saved = jax.tree.map(jnp.copy, engine.state)
            losses = [float(engine.train_batch(batch(SAVED + step))) for step in range(NEXT)]
            made[name] = engine, saved, losses, directory
        return made[name]

    return run


@pytest.mark.parametrize(("source", "target"), keep(product(LAYOUTS, LAYOUTS), [("stage2", "zero_bubble")]))
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


SIZES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def sized(zero, train, micro, accum, **more):
    sizes = dict(zip(SIZES, (train, micro, accum), strict=True))
    return build((2, {"zero": zero}, 2, {}), **sizes, **more)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(None, 2, 2), (32, None, 2)], ids=str)
def test_fewer_devices_keep_the_global_batch(tmp_path, sizes):
    """And the accumulation if the config gives no micro-batch, or else the micro-batch."""
    eight = sized(8, *sizes, training_data=data())
    straight = [float(eight.train_batch()) for _ in range(2)]
    eight.save_checkpoint(tmp_path)
    straight += [float(eight.train_batch()) for _ in range(2)]
    for zero in (4, 1):
        fewer = sized(zero, *sizes, training_data=data(), resume=tmp_path)
        there = (32, 2, 16 // zero) if sizes[1] else (32, 16 // zero, 2)
        assert fewer.get_batch_info() == there
        losses = [float(fewer.train_batch())]
        fewer.save_checkpoint(tmp_path / f"{zero}")  # and restarted there
        again = sized(zero, *sizes, training_data=data(), resume=tmp_path / f"{zero}")
        assert again.get_batch_info() == there
        losses.append(float(again.train_batch()))
        np.testing.assert_allclose(losses, straight[2:], rtol=1e-6)


@pytest.mark.slow
def test_the_config_says_another_batch_by_now(tmp_path):
    sized(8, None, 2, 2).save_checkpoint(tmp_path)
    assert sized(8, None, 2, 4, resume=tmp_path).train_batch_size() == 64
    assert sized(2, 16, 2, 4, resume=tmp_path).train_batch_size() == 16
    words = "train_batch_size = 32: must be a multiple of 24"
    refuses(lambda: build((0, {"data": 3}, 8, {}), resume=tmp_path, **dict.fromkeys(SIZES[:1])), words)
    words = r"train_batch_size = 32: must equal .* 2 × .* 2 × 4 replicas"
    refuses(lambda: sized(4, 32, 2, 2, resume=tmp_path), words)  # all three, and other ones than the checkpoint's
    sized(2, 32, None, 4).save_checkpoint(tmp_path)
    assert sized(8, 32, None, 4, resume=tmp_path).get_batch_info() == (32, 1, 4)
    sized(1, 32, None, 2).save_checkpoint(tmp_path)  # micro-batches of 16, which 8 replicas have no room for
    assert sized(8, 32, None, 2, resume=tmp_path).get_batch_info() == (32, 2, 2)


def test_the_batch_was_changed_in_the_run(tmp_path, capfd):
    """A config that names the global batch is right, one that does not has the checkpoint's."""
    engine = sized(2, None, 2, 8)
    engine.set_train_batch_size(48)
    engine.save_checkpoint(tmp_path / "48")
    assert sized(2, None, 2, 8, resume=tmp_path / "48").train_batch_size() == 48
    assert sized(2, 32, 2, None, resume=tmp_path / "48").train_batch_size() == 32
    sized(2, 32, 2, 8).save_checkpoint(tmp_path)
    fewer = sized(1, 32, 2, 8, resume=tmp_path)
    line = "train_batch_size 32 as in the checkpoint: 16 micro-batches instead of the config's 8"
    assert line in capfd.readouterr().out
    fewer.load_checkpoint(tmp_path / "48")
    assert "the checkpoint's train_batch_size was 48; from here on it is 32" in capfd.readouterr().out
    assert fewer.get_batch_info() == (32, 2, 16)


@pytest.mark.slow
def test_a_list_of_layers_that_the_stages_divide_or_not(tmp_path):
    """Three layers alike: cut by three stages, not by two, which switch between the layers; the leaves are the same."""
    layers = [*[jzero.LayerSpec(nnx.Linear, 8, 8)] * 3, jnp.tanh]
    cut, switched = (
        build(layout, model=jzero.PipelineModule(layers, layout[1]["pipe"], loss_fn=lambda y, x: ((y - x) ** 2).mean()))
        for layout in (
            (1, {"pipe": 3, "zero": 2}, 4, {}),
            (3, {"pipe": 2, "zero": 4}, 2, {"schedule": "interleaved", "chunks": 2}),
        )
    )
    for source, target in ((cut, switched), (switched, cut)):
        source.train_batch(tuple(batch(0).values()))
        source.save_checkpoint(tmp_path).wait()
        target.load_checkpoint(tmp_path)
        assert_same(target.state, source.state)
        losses = [float(engine.train_batch(tuple(batch(1).values()))) for engine in (source, target)]
        np.testing.assert_allclose(*losses, rtol=1e-6)


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
