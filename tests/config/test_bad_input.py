"""A user's mistake is a ConfigError with the key, its value, what is allowed and the fix, before anything compiles."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers.refusals import refused
from jax.sharding import Mesh

import jzero
import models
from jzero.data import DataLoader
from jzero.mesh import AXES
from models.mlp import MLP, cross_entropy

CONFIG = {"train_batch_size": 16, "optimizer": {"type": "Adam", "params": {"lr": 1e-3}}}
IMAGES, LABELS = np.zeros((16, 784), np.float32), np.zeros(16, np.int32)
MODEL = jzero.from_flax(MLP, cross_entropy)


def make(changes=None, *, model=MODEL, mesh=None, optimizer=None):
    return jzero.make_train_step(model, {**CONFIG, **(changes or {})}, mesh=mesh, optimizer=optimizer)


@pytest.fixture(scope="module")
def step():
    return make()


@pytest.fixture(scope="module")
def engine():
    return jzero.initialize(model=MODEL, config=CONFIG)[0]


def test_a_mesh_that_is_not_the_configs():
    shards = {"zero_optimization": {"stage": 3, "mics_shard_size": 3}}
    refused(lambda: jzero.make_mesh(data=4, zero=4), "mesh.data", "= 16", "the number of devices, 8", "mesh.data = 2")
    refused(lambda: jzero.make_mesh(zero="4"), 'mesh.zero = "4"', "-1 or a positive integer", "without quotes")
    refused(lambda: jzero.make_mesh(data=-1), "mesh.data = -1", "mesh.zero = -1", "one axis only")
    refused(lambda: jzero.make_mesh({"mesh": {"data": 2}}, data=2), "not both", "'data': 2")
    refused(lambda: jzero.make_mesh(shards), "mics_shard_size = 3", "the number of devices, 8")
    refused(lambda: make({"mesh": {"data": 2}}, mesh=jzero.make_mesh()), "mesh.data", "2", "data 1")
    refused(lambda: make(mesh={"zero": 8}), "{'zero': 8}", "jax.sharding.Mesh", "jzero.make_mesh")
    for names, shape in ((("x", "y"), (2, 4)), (AXES[::-1], (1, 1, 1, 4, 2, 1))):
        mesh = Mesh(np.array(jax.devices()).reshape(shape), names)
        refused(lambda mesh=mesh: make(mesh=mesh), str(names), "jzero.make_mesh")


def functions(params, **loss):
    return SimpleNamespace(init=lambda rng: params, **loss)


VECTOR = {"w": jnp.zeros(8)}
VECTOR_LOSS = functions(VECTOR, loss=lambda params, *_: params["w"])
NETWORK = MLP(rngs=nnx.Rngs(0))
PROTOCOL = ["init(rng)", "loss(params, batch, rng)", "jzero.from_flax"]


@pytest.mark.parametrize(
    ("call", "parts"),
    [
        (lambda: make({"train_batch_size": None}), ["no batch size", "train_batch_size or train_micro_batch_size_per"]),
        (lambda: make({"frozen_parameters": [".*"]}), ["frozen_parameters", "every parameter is frozen"]),
        (lambda: make({"frozen_parameters": ["fc9", "fc1"]}), ["frozen_parameters: ['fc9'] match no", "fc1/kernel"]),
        (lambda: make({"trainable_parameters": ["fc9", "fc1"]}), ["trainable_parameters: ['fc9'] match", "fc1/kernel"]),
        (lambda: make({"trainable_parameters": ["fc1"], "frozen_parameters": ["1"]}),
            ["['fc1'], frozen_parameters = ['1']: every"]),
        (lambda: make({"optimizer": None}), ["optimizer: none given", '"type": "AdamW"', "optimizer=optax.adamw"]),
        (lambda: jzero.make_train_step(MODEL, None), ["config = null", "a dict", "NoneType"]),
        (lambda: make(model=object()), ["model is object", *PROTOCOL]),
        (lambda: make(model=functions(VECTOR)), ["model is SimpleNamespace", *PROTOCOL]),
        (lambda: make(model=NETWORK), ["model is MLP", *PROTOCOL]),
        (lambda: make(model=cross_entropy), ["model is function", *PROTOCOL]),
        (lambda: make(model=functions({}, loss=lambda *_: 0.0)), ["no parameters"]),
        (lambda: make(model=VECTOR_LOSS).lower((IMAGES, LABELS)), ["loss", "(8,)", "scalar"]),
        (lambda: make().init(0), ["rng", "0", "jax.random.key(0)"]),
        (lambda: jzero.from_flax(MLP), ["loss_fn(module, batch) is missing"]),
        (lambda: jzero.from_flax(3, cross_entropy), ["3 is neither", "rngs -> nnx.Module"]),
        (lambda: models.from_hf("a b/c"), ["hf download 'a b/c' --local-dir c"]),
    ],
)  # fmt: skip
def test_what_makes_no_step(call, parts):
    refused(call, *parts)


@pytest.mark.parametrize(
    ("value", "dtype", "becomes"),
    [
        (2**40 + 7, "int64", "7 as int32"),
        (-(2**31) - 1, "int64", "2147483647 as int32"),
        (2**32, "uint64", "0 as uint32"),
        (1e300, "float64", "inf as float32"),
        (-1e39, "float64", "-inf as float32"),
    ],
)
def test_values_that_32_bits_do_not_hold(step, value, dtype, becomes):
    x = np.zeros((16, 2), dtype)
    x[9, 1] = value
    if dtype == "float64":
        x[3], x[5] = np.nan, np.inf
    batch, words = {"a": {"b": x}}, ("'a/b'", f"dtype {dtype} and contains {value}", f"becomes {becomes}", "enable_x64")
    refused(lambda: step.place(batch), *words)
    refused(lambda: step.place_micro_batch(batch), *words)
    refused(lambda: next(iter(DataLoader(batch, step))), *words)
    with jax.enable_x64(True):
        np.testing.assert_array_equal(step.place(batch)["a"]["b"], x)


def test_values_that_32_bits_hold(step):
    for values, dtype in (
        ([2**31 - 1, -(2**31)], "int64"), ([2**32 - 1], "uint64"), ([3.4028235e38, np.inf, -np.inf, np.nan], "float64"),
    ):  # fmt: skip
        x = np.tile(np.array(values, dtype), (16, 1))
        np.testing.assert_array_equal(step.place(x), x.astype(dtype.replace("64", "32")))


STRINGS = np.array(["a"] * 16)
DATES = np.array(["2026-01-01"] * 16, "datetime64[D]")


@pytest.mark.parametrize("leaf", [STRINGS, np.array([object()] * 16), DATES, "abc"])
def test_a_leaf_that_is_no_number(step, leaf):
    """JAX's own TypeError does not name the leaf."""
    batch = {"images": IMAGES, "ids": {"text": leaf}}
    for call in (lambda: step(None, batch), lambda: step.evaluate(None, batch), lambda: step.place_micro_batch(batch)):
        refused(call, "'ids/text'", "leaves are arrays of numbers", "leave it out, or")


def test_what_an_engine_refuses(engine, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    whole = IMAGES, LABELS
    refused(lambda: engine.train_batch(whole, data_iter=iter([whole])), "a batch and a data_iter")
    refused(lambda: engine.train_batch(whole, extra={"t": np.array(["a"])}), "extra: leaf 't' has dtype str")
    refused(lambda: engine.predict((IMAGES, STRINGS)), "'1'", "dtype str")
    for size in ("16", None, [16], 16.0, True, -16, 20):
        words = f"train_batch_size = {size!r}", "must be a multiple of"
        refused(lambda size=size: engine.set_train_batch_size(size), *words)
    engine.set_train_batch_size(np.int64(16))
    assert type(engine.train_batch_size()) is int
    refused(lambda: engine.load_checkpoint("nowhere"), f"{tmp_path}/nowhere: no such directory", "to save_checkpoint")
    name = "Qwen/Qwen3-8B"
    refused(lambda: engine.load_checkpoint(name), "no such directory", "engine.load_weights reads a download")
    download = f"{name}: no such directory; a model of Hugging Face must be downloaded first: hf download {name} "
    for call in (engine.load_weights, models.from_hf):
        refused(lambda call=call: call(name), download)


def test_training_data_smaller_than_a_batch_is_reported_once(capsys):
    jzero.initialize(model=MODEL, config=CONFIG, training_data=(IMAGES[:3], LABELS[:3]))
    said = "".join(capsys.readouterr())
    assert "3 samples are fewer than train_batch_size 16: a step repeats some" in said
    assert said.count("fewer than") == 1
