"""A resumed run is the run: bit for bit on its own layout, to rounding on any other."""

from itertools import product

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers.resuming import NEXT, SAVED, STEPS, no_signal_handler  # noqa: F401
from helpers.sampling import keep, some
from layouts import LAYOUTS, TRAIN, assert_same, batch, build, data

import jzero

# ------------------------------------------------------------------------------------------- bit for bit

FP16 = {"fp16": {"enabled": True, "initial_scale_power": 24, "hysteresis": 2, "loss_scale_window": 2}}


@pytest.mark.parametrize(
    ("layout", "more"),
    keep(
        [(name, {}) for name in LAYOUTS]
        + [("stage0", FP16), ("stage3", FP16), ("interleaved", FP16), ("stage2", {"bf16": {"enabled": True}})],
        [("stage3", FP16)],
    ),
    ids=[*LAYOUTS, "stage0-fp16", "stage3-fp16", "interleaved-fp16", "stage2-bf16"],
)
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


@pytest.mark.slow
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
            engine.save_checkpoint(directory, tag=name, client_state={"epoch": 7}).wait()
            saved = jax.tree.map(jnp.copy, engine.state)
            losses = [float(engine.train_batch(batch(SAVED + step))) for step in range(NEXT)]
            made[name] = engine, saved, losses, directory
        return made[name]

    return run


# By default into a pipeline.
DEFAULT = [("stage2", "zero_bubble")]


@pytest.mark.parametrize(("source", "target"), keep(product(LAYOUTS, LAYOUTS), DEFAULT))
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
BATCHES = [[None, 2, 2], [32, 2, 2], [32, None, 2], [32, 2, None]]


@pytest.mark.parametrize("sizes", some(BATCHES, [BATCHES[0], BATCHES[2]]), ids=str)
def test_fewer_devices_keep_the_global_batch(tmp_path, sizes):
    """And the accumulation if the config gives no micro-batch, or else the micro-batch."""
    sizes = dict(zip(SIZES, sizes, strict=True))
    eight = build((2, {"zero": 8}, 2, {}), training_data=data(), **sizes)
    straight = [float(eight.train_batch()) for _ in range(2)]
    eight.save_checkpoint(tmp_path)
    straight += [float(eight.train_batch()) for _ in range(4)]
    for zero in (4, 2, 1):
        fewer = build((2, {"zero": zero}, 2, {}), training_data=data(), resume=tmp_path, **sizes)
        there = (32, 2, 16 // zero) if sizes["train_micro_batch_size_per_gpu"] else (32, 16 // zero, 2)
        assert fewer.get_batch_info() == there
        losses = [float(fewer.train_batch())]
        fewer.save_checkpoint(tmp_path / f"{zero}")
        for _ in range(3):  # and restarted there, once and again
            again = build((2, {"zero": zero}, 2, {}), training_data=data(), resume=tmp_path / f"{zero}", **sizes)
            assert again.get_batch_info() == there
            losses.append(float(again.train_batch()))
            again.save_checkpoint()
        np.testing.assert_allclose(losses, straight[2:], rtol=1e-6)


@pytest.mark.slow
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
    assert more.get_batch_info() == (32, 1, 4)
    few["train_micro_batch_size_per_gpu"], few["gradient_accumulation_steps"] = None, 2
    build((0, {}, 4, {}), **few).save_checkpoint(tmp_path)  # micro-batches of 16, which 8 replicas have no room for
    assert build((2, {"zero": 8}, 4, {}), resume=tmp_path, **few).get_batch_info() == (32, 2, 2)


def test_the_batch_was_changed_in_the_run(tmp_path, capfd):
    """A config that names the global batch is right, one that does not has the checkpoint's."""
    two = (2, {"zero": 2}, 2, {})
    for sizes, now in (((32, 2, None), 32), ((None, 2, 8), 48)):
        said = dict(zip(SIZES, sizes, strict=True))
        engine = build(two, **said)
        engine.set_train_batch_size(48)
        engine.save_checkpoint(tmp_path / str(now))
        assert build(two, resume=tmp_path / str(now), **said).train_batch_size() == now
    full = dict(zip(SIZES, (32, 2, 8), strict=True))
    build(two, **full).save_checkpoint(tmp_path)
    fewer = build((2, {"zero": 1}, 2, {}), resume=tmp_path, **full)
    line = "train_batch_size 32 as in the checkpoint: 16 micro-batches instead of the config's 8"
    assert line in capfd.readouterr().out
    fewer.load_checkpoint(tmp_path / "48")
    assert "the checkpoint's train_batch_size was 48; from here on it is 32" in capfd.readouterr().out
    assert fewer.get_batch_info() == (32, 2, 16)


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
