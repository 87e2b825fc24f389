"""Batch sizes and mesh degrees: arithmetic, and advice that is right."""

from pathlib import Path

from helpers.configs import problem
from helpers.refusals import refuses
from helpers.stored_cases import check_cases
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from jzero.config import Config
from jzero.errors import ConfigError

sizes = st.integers(1, 64)
TRAIN, MICRO, ACCUM = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"


@settings(max_examples=60)
@given(st.none() | st.integers(1, 200), st.none() | sizes, st.none() | sizes, st.integers(1, 16), st.booleans())
def test_batch_is_consistent_or_its_advice_is(train, micro, accum, replicas, fits):
    """Sizes that are given stay, and the accumulation is one step unless two others give it."""
    if train and fits:  # free numbers seldom do
        train = (micro or 1) * (accum or 1) * replicas * (1 if micro and accum else train)
    config = {TRAIN: train, MICRO: micro, ACCUM: accum}
    assume(train or micro)
    try:
        got = Config.load(config).batch(replicas)
    except ConfigError as error:
        assert train % ((micro or 1) * (accum or 1) * replicas) or (micro and accum)
        advice = str(error).split("nearest valid: ")[1]
        for fix in advice.split(", or "):
            key, values = fix.split(" = ")
            for value in values.split(" or "):
                fixed = Config.load({**config, key: int(value)}).batch(replicas)
                assert fixed.train == fixed.micro * fixed.accum * replicas
    else:
        assert got.train == got.micro * got.accum * replicas
        found = {TRAIN: got.train, MICRO: got.micro, ACCUM: got.accum}
        assert found.items() >= {key: value for key, value in config.items() if value}.items()
        assert accum or got.accum == 1 or (train and micro)
        assert got.inferred == ", ".join(f"{key} = {value}" for key, value in found.items() if not config[key])


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


def test_the_sizes_of_a_run_and_of_a_resume(pytestconfig):
    """A resume keeps the global batch of the run, and of its other sizes what fits."""

    def outcome(case):
        former = [case["former"]] if "former" in case else []
        try:
            return list(Config.load(case["config"]).batch(case["replicas"], *former))
        except ConfigError as error:
            return str(error)

    check_cases(Path(__file__).with_name("batches.jsonl"), outcome, pytestconfig)


def test_a_mesh_of_too_few_devices():
    refuses(lambda: Config().mesh_degrees(0), "num_devices = 0")
    words = "to simulate 8 devices on a CPU, begin with jax"
    refuses(lambda: Config.load({"mesh": {"data": 2}}).mesh_degrees(1), words)
