"""Batch sizes and mesh degrees: arithmetic, and advice that is right."""

import pytest
from helpers.configs import problem
from helpers.refusals import refuses
from hypothesis import given, settings
from hypothesis import strategies as st

from jzero.config import Config
from jzero.errors import ConfigError

sizes = st.integers(1, 64)
TRAIN, MICRO, ACCUM = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"


@settings(max_examples=40)
@given(sizes, sizes, sizes, st.sets(st.sampled_from([TRAIN, MICRO, ACCUM]), min_size=1).filter(lambda x: x != {ACCUM}))
def test_consistent_sizes_give_the_rest(micro, accum, replicas, kept):
    """One size alone means one accumulation step."""
    accum = accum if len(kept) > 1 else 1
    whole = {TRAIN: micro * accum * replicas, MICRO: micro, ACCUM: accum}
    got = Config.load({key: whole[key] for key in kept}).batch(replicas)
    assert got[:3] == tuple(whole.values())
    assert got.inferred == ", ".join(f"{key} = {value}" for key, value in whole.items() if key not in kept)


@settings(max_examples=40)
@given(st.integers(1, 200), st.none() | sizes, st.none() | sizes, st.integers(1, 16))
def test_batch_is_consistent_or_its_advice_is(train, micro, accum, replicas):
    config = Config.load({TRAIN: train, MICRO: micro, ACCUM: accum})
    try:
        got = config.batch(replicas)
    except ConfigError as error:
        assert train % ((micro or 1) * (accum or 1) * replicas) or (micro and accum)
        advice = str(error).split("nearest valid: ")[1]
        for fix in advice.split(", or "):
            key, values = fix.split(" = ")
            for value in values.split(" or "):
                fixed = Config.load({TRAIN: train, MICRO: micro, ACCUM: accum, key: int(value)}).batch(replicas)
                assert fixed.train == fixed.micro * fixed.accum * replicas
    else:
        assert got.train == train == got.micro * got.accum * replicas
        assert micro in (None, got.micro)
        assert accum in (None, got.accum)


@pytest.mark.parametrize(
    ("given", "replicas", "sizes"),
    [
        ((32, None, 2), 2, (32, 8, 2, f"{MICRO} = 8")),
        ((32, "auto", 2), 8, (32, 2, 2, f"{MICRO} = 2")),
        (("auto", "auto", 2), 2, (32, 8, 2, f"{TRAIN} = 32")),  # "auto" means 8 in a fresh run
        ((32, 4, 2), 2, (32, 4, 4, f"{ACCUM} = 4 instead of the config's 2")),
        ((32, None, 8), 8, (32, 4, 1, f"{MICRO} = 4, {ACCUM} = 1 instead of the config's 8")),
        ((32, None, None), 2, (32, 4, 4, f"{MICRO} = 4, {ACCUM} = 4")),
        ((None, 4, 2), 1, (32, 4, 8, f"{TRAIN} = 32, {ACCUM} = 8 instead of the config's 2")),
    ],
)
def test_a_resume_on_other_devices_keeps_the_sizes_that_fit(given, replicas, sizes):
    """The run of the checkpoint had the same config: 32 = 4 x 2 x 4 replicas."""
    config = Config.load(dict(zip((TRAIN, MICRO, ACCUM), given, strict=True)))
    numbers = [None if size == "auto" else size for size in given]
    former = {"train": 32, "micro": 4, "replicas": 4, "given": numbers}
    assert config.batch(replicas, former) == sizes


axis = st.none() | st.integers(1, 8)


@settings(max_examples=40)
@given(st.integers(1, 32), axis | st.just(-1), axis, st.integers(-1, 8).filter(bool))
def test_mesh_degrees_use_every_device_or_say_what_fits(devices, data, zero, mics):
    """A shard size sets zero and leaves the rest to data."""
    mesh = {k: v for k, v in (("data", data), ("zero", zero)) if v}
    source = {"mesh": mesh, "zero_optimization": {"mics_shard_size": mics}}
    if mics > 0 and zero not in (None, mics):
        assert "keep one" in problem(source)
        return
    shard = mics if mics > 0 else zero  # None: the rest
    if data == -1 and shard is None:
        assert "one axis only" in problem(source)
        return
    outer = None if data == -1 else data or (None if mics > 0 else 1)
    fixed = (shard or 1) * (outer or 1)
    if devices % fixed == 0 if None in (shard, outer) else devices == fixed:
        got = Config.load({**source, "data_parallel_size": devices}).mesh_degrees(devices)
        degrees = {"data": outer or devices // fixed, "zero": shard or devices // fixed}
        expected = {"pipe": 1, **degrees, "expert": 1, "context": 1, "tensor": 1}
        assert list(got.items()) == list(expected.items())
    else:
        refuses(lambda: Config.load(source).mesh_degrees(devices), rf"the number of devices, {devices}; what fits: ")


def test_no_size():
    refuses(lambda: Config().batch(2), "give train_batch_size")
    refuses(lambda: Config.load({ACCUM: 3}).batch(2), f"{ACCUM} = 3 alone")
    refuses(lambda: Config.load({TRAIN: 1}).batch(0), "replicas = 0")
    words = "8: must be at least 16 .* 2 × 8 replicas., and a multiple of it; nearest valid: train_batch_size = 16, or "
    refuses(lambda: Config.load({TRAIN: 8, MICRO: 2}).batch(8), words)  # no size of 0 is inferred
    words = f"33: must equal {MICRO} 4 × {ACCUM} 4 .inferred. × 2 replicas = 32; nearest valid: {TRAIN} = 32 or 40"
    refuses(lambda: Config.load({TRAIN: 33, MICRO: 4}).batch(2), words)
    refuses(lambda: Config().mesh_degrees(0), "num_devices = 0")
    refuses(
        lambda: Config.load({"mesh": {"data": 2}}).mesh_degrees(1), "to simulate 8 devices on a CPU, begin with jax"
    )
