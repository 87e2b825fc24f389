"""A user's mistake is a ConfigError with the key, its value, what is allowed and the fix, before anything compiles."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers.refusals import compilations, refused
from jax.sharding import Mesh

import jzero
import models
from jzero.data import DataLoader
from jzero.mesh import AXES
from models.mlp import MLP, cross_entropy

CONFIG = {"train_batch_size": 16, "optimizer": {"type": "Adam", "params": {"lr": 1e-3}}}
IMAGES, LABELS = np.zeros((16, 784), np.float32), np.zeros(16, np.int32)
FULL_BATCH = "train_batch_size 16 = micro-batch 2 x accumulation 1 x 8 replicas"
ON = {"enabled": True}


def mlp():
    return jzero.from_flax(MLP, cross_entropy)


def make(changes=None, *, model=None, mesh=None, optimizer=None):
    return jzero.make_train_step(model or mlp(), {**CONFIG, **(changes or {})}, mesh=mesh, optimizer=optimizer)


def named(value):
    """A test's name from the config it is about."""
    return "-".join(map(str, value)) if isinstance(value, dict) else ""


def test_compilations_are_seen():
    compilations.clear()
    step = make()
    assert compilations == []
    step(step.init(jax.random.key(0)), (IMAGES, LABELS))
    assert compilations


@pytest.mark.parametrize(
    ("degrees", "parts"),
    [
        ({"zero": 3}, ["mesh.zero = 3", "the number of devices, 8", "mesh.zero = 8"]),
        ({"data": 3}, ["mesh.data = 3", "the number of devices, 8", "mesh.data = 1, 2, 4 or 8"]),
        ({"data": 4, "zero": 4}, ["mesh.data", "mesh.zero", "= 16", "mesh.data = 2", "mesh.zero = 2"]),
        ({"zero": 0}, ["mesh.zero = 0", "-1 or a positive integer"]),
        ({"zero": "4"}, ['mesh.zero = "4"', "positive integer", "without quotes"]),
        ({"zero": 2.5}, ["mesh.zero = 2.5", "positive integer"]),
        ({"data": -1}, ["mesh.data = -1", "mesh.zero = -1", "one axis only"]),
        ({"tensor": 3}, ["mesh.tensor = 3", "the number of devices, 8", "1, 2, 4 or 8"]),
    ],
    ids=named,
)
def test_mesh_that_does_not_fit(degrees, parts):
    refused(lambda: jzero.make_mesh(**degrees), *parts)
    refused(lambda: make({"mesh": degrees}), *parts)


def test_mesh_from_a_config_and_from_degrees():
    refused(lambda: jzero.make_mesh({"mesh": {"data": 2}}, data=2), "not both", "'data': 2")
    refused(
        lambda: jzero.make_mesh({"zero_optimization": {"stage": 3, "mics_shard_size": 3}}),
        "mics_shard_size = 3",
        "the number of devices, 8",
        "1, 2, 4 or 8",
    )


@pytest.mark.parametrize(
    ("names", "shape", "parts"),
    [
        (("x", "y"), (2, 4), ["('x', 'y')", str(AXES), "jzero.make_mesh"]),
        (AXES[::-1], (1, 1, 1, 4, 2, 1), [str(AXES[::-1]), "jzero.make_mesh"]),
        (AXES, (2, 1, 4, 1, 1, 1), ["mesh.pipe = 2", "no layer stack", "jzero.PipelineModule"]),
        (AXES, (1, 1, 4, 1, 1, 2), ["mesh.tensor = 2", "no table", "tensor_parallel.dimensions"]),
    ],
    ids=["foreign", "other-order", "pipe", "tensor"],
)
def test_foreign_mesh(names, shape, parts):
    mesh = Mesh(np.array(jax.devices()).reshape(shape), names)
    refused(lambda: make(mesh=mesh), *parts)


def test_mesh_that_is_none():
    refused(lambda: make(mesh={"zero": 8}), "{'zero': 8}", "jax.sharding.Mesh", "jzero.make_mesh")


@pytest.mark.parametrize(
    ("sizes", "parts"),
    [
        ({"train_batch_size": 12}, ["train_batch_size = 12", "8 replicas", "nearest valid", "8 or 16"]),
        ({"gradient_accumulation_steps": 3}, ["gradient_accumulation_steps 3", "8 replicas", "train_batch_size = 24"]),
        ({"train_micro_batch_size_per_gpu": 3}, ["train_micro_batch_size_per_gpu 3", "train_batch_size = 24"]),
        ({"train_batch_size": None}, ["no batch size", "train_batch_size or train_micro_batch_size_per_gpu"]),
    ],
    ids=named,
)
def test_batch_equation(sizes, parts):
    refused(lambda: make(sizes), *parts)


@pytest.mark.parametrize(
    ("batch", "parts"),
    [
        ((IMAGES[:15], LABELS[:15]), ["'0'", "(15, 784)", "must be 16", FULL_BATCH]),
        ((IMAGES, LABELS[:8]), ["'1'", "(8,)", "must be 16", FULL_BATCH]),
        ({"x": {"y": IMAGES[:0]}}, ["'x/y'", "(0, 784)", "must be 16", FULL_BATCH]),
        ((IMAGES, np.float32(1)), ["'1'", "shape ()", "must be 16"]),
        ([1, 2], ["'0'", "shape ()", "must be 16"]),
        (None, ["batch", "no arrays"]),
        ({}, ["batch", "no arrays"]),
    ],
    ids=["15-rows", "leaves-disagree", "no-rows", "scalar", "list-of-numbers", "none", "empty"],
)
def test_batch_that_does_not_divide(batch, parts):
    step = make()
    refused(lambda: step(None, batch), *parts)
    refused(lambda: step.lower(jax.tree.map(lambda x: x, batch)), *parts)


def test_evaluation_batch_is_a_multiple():
    step = make()
    refused(lambda: step.evaluate(None, (IMAGES[:9], LABELS[:9])), "(9, 784)", "multiple of 16")


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
def test_values_that_32_bits_do_not_hold(value, dtype, becomes):
    step, x = make(), np.zeros((16, 2), dtype)
    x[9, 1] = value
    if dtype == "float64":
        x[3], x[5] = np.nan, np.inf
    batch, words = {"a": {"b": x}}, ("'a/b'", f"dtype {dtype} and contains {value}", f"becomes {becomes}", "enable_x64")
    refused(lambda: step.place(batch), *words)
    refused(lambda: step.place_micro_batch(batch), *words)
    refused(lambda: next(iter(DataLoader(batch, step))), *words)
    with jax.enable_x64(True):
        np.testing.assert_array_equal(step.place(batch)["a"]["b"], x)


def test_values_that_32_bits_hold():
    step = make()
    for values, dtype in (
        ([2**31 - 1, -(2**31)], "int64"), ([2**32 - 1], "uint64"), ([3.4028235e38, np.inf, -np.inf, np.nan], "float64"),
    ):  # fmt: skip
        x = np.tile(np.array(values, dtype), (16, 1))
        np.testing.assert_array_equal(step.place(x), x.astype(dtype.replace("64", "32")))


def test_two_batches_and_leaves_that_disagree():
    engine, *_ = jzero.initialize(model=mlp(), config=CONFIG)
    whole = (IMAGES, LABELS)
    refused(lambda: engine.train_batch(whole, data_iter=iter([whole])), "a batch and a data_iter")
    data = (IMAGES, LABELS[:9])
    refused(lambda: jzero.initialize(model=mlp(), config=CONFIG, training_data=data), "training_data", "[9, 16]")


@pytest.mark.parametrize(
    ("keys", "parts"),
    [
        ({"frozen_parameters": [".*"]}, ["frozen_parameters", "every parameter is frozen"]),
        ({"frozen_parameters": ["fc9", "fc1"]}, ["frozen_parameters", "['fc9']", "match no parameter", "fc1/kernel"]),
        ({"trainable_parameters": []}, ["trainable_parameters = []: every parameter is frozen"]),
        ({"trainable_parameters": ["fc9", "fc1"]}, ["trainable_parameters: ['fc9'] match no parameter", "fc1/kernel"]),
        ({"trainable_parameters": ["fc1"], "frozen_parameters": ["1"]}, ["['fc1'], frozen_parameters = ['1']: every"]),
    ],
    ids=["frozen", "frozen nothing", "trainable nothing", "trainable unknown", "both"],
)
def test_trainable_and_frozen_parameters(keys, parts):
    refused(lambda: make(keys), *parts)


class OnlyInit:
    def init(self, rng):
        return {"w": jnp.zeros(8)}


@pytest.mark.parametrize(
    ("model", "name"),
    [(object(), "object"), (OnlyInit(), "OnlyInit"), (MLP(rngs=nnx.Rngs(0)), "MLP"), (cross_entropy, "function")],
    ids=["object", "no-loss", "flax-module", "function"],
)
def test_model_without_the_protocol(model, name):
    refused(lambda: make(model=model), f"model is {name}", "init(rng)", "loss(params, batch, rng)", "jzero.from_flax")


def test_from_flax():
    refused(lambda: jzero.from_flax(MLP), "loss_fn(module, batch) is missing")
    refused(lambda: jzero.from_flax(3, cross_entropy), "3 is neither", "rngs -> nnx.Module")


class NoParameters(OnlyInit):
    def init(self, rng):
        return {}

    def loss(self, params, batch, rng):
        return 0.0


class VectorLoss(OnlyInit):
    def loss(self, params, batch, rng):
        return params["w"]


def test_model_without_parameters():
    refused(lambda: make(model=NoParameters()), "no parameters")


def test_loss_that_is_no_scalar():
    step = make(model=VectorLoss())
    refused(lambda: step.lower((IMAGES, LABELS)), "loss", "(8,)", "scalar")


def test_mesh_and_mesh_section_that_disagree():
    refused(lambda: make({"mesh": {"data": 2}}, mesh=jzero.make_mesh()), "mesh.data", "2", "data 1")


def test_key_that_is_a_number():
    refused(lambda: make().init(0), "rng", "0", "jax.random.key(0)")


def test_a_wrong_config():
    refused(lambda: make({"optimizer": None}), "optimizer: none given", '"type": "AdamW"', "optimizer=optax.adamw")
    changes = {"train_batch_size": "16", "dataloader_drop_last": "true", "zero_optimization": {"stage": 4}}
    refused(lambda: make(changes), *('train_batch_size = "16"', 'dataloader_drop_last = "true"', "stage = 4"))


def test_optimizer_and_config_of_a_wrong_type():
    refused(lambda: make(optimizer="adam"), "'adam'", "optax.GradientTransformation")
    refused(lambda: jzero.make_train_step(mlp(), None), "config = null", "a dict", "NoneType")
    refused(lambda: jzero.make_train_step(mlp(), "nowhere.json"), '"nowhere.json"', "no such file")
    refused(lambda: jzero.initialize(model=mlp(), config=CONFIG, resume=7), "resume = 7", "must be a directory")


STRINGS = {
    "strings": np.array(["a"] * 16), "bytes": np.array([b"a"] * 16), "objects": np.array([object()] * 16),
    "dates": np.array(["2026-01-01"] * 16, "datetime64[D]"), "one": "abc",
}  # fmt: skip


@pytest.mark.parametrize("kind", STRINGS)
def test_a_leaf_that_is_no_number(kind):
    """JAX's own TypeError does not name the leaf."""
    step, batch = make(), {"images": IMAGES, "ids": {"text": STRINGS[kind]}}
    words = ("'ids/text'", "leaves are arrays of numbers", "leave it out, or")
    refused(lambda: step(None, batch), *words)
    refused(lambda: step.evaluate(None, batch), *words)
    refused(lambda: step.place_micro_batch(batch), *words)
    refused(lambda: step.place(batch), *words)


def test_extra_that_is_no_number():
    engine, *_ = jzero.initialize(model=mlp(), config=CONFIG)
    refused(lambda: engine.train_batch((IMAGES, LABELS), extra={"t": np.array(["a"])}), "extra: leaf 't' has dtype str")
    refused(lambda: engine.predict((IMAGES, STRINGS["strings"])), "'1'", "dtype str")


@pytest.mark.parametrize("size", ["16", None, [16], 16.0, True, -16, 20])
def test_a_size_that_is_no_multiple(size):
    engine, *_ = jzero.initialize(model=mlp(), config=CONFIG)
    refused(lambda: engine.set_train_batch_size(size), f"train_batch_size = {size!r}", "must be a multiple of")
    engine.set_train_batch_size(np.int64(16))
    assert type(engine.train_batch_size()) is int


def test_training_data_smaller_than_a_batch_is_reported_once(capsys):
    few = IMAGES[:3], LABELS[:3]
    engine, *_ = jzero.initialize(model=mlp(), config={**CONFIG, "steps_per_print": 1}, training_data=few)
    for _ in range(3):
        engine.train_batch()
    said = capsys.readouterr()
    assert (said.out + said.err).count("3 samples are fewer than train_batch_size 16: a step repeats some") == 1
    jzero.initialize(model=mlp(), config=CONFIG, training_data=(IMAGES, LABELS))
    assert "fewer than" not in capsys.readouterr().out


def test_a_directory_that_does_not_exist(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    engine, *_ = jzero.initialize(model=mlp(), config=CONFIG)
    refused(lambda: engine.load_checkpoint("nowhere"), f"{tmp_path}/nowhere: no such directory", "to save_checkpoint")
    refused(
        lambda: engine.load_checkpoint("Qwen/Qwen3-8B"), "no such directory", "engine.load_weights reads a download"
    )
    for name in ("Qwen/Qwen3-8B", "gpt2"):
        download = f"{name}: no such directory; a model of Hugging Face must be downloaded first: hf download {name} "
        refused(lambda name=name: engine.load_weights(name), download)
        refused(lambda name=name: models.from_hf(name), download)
    refused(lambda: models.from_hf("a b/c"), "hf download 'a b/c' --local-dir c")


def test_numbers_of_another_byte_order_are_refused():
    """Read as they are they would be other numbers; the dtype may change from step to step."""
    step = make(mesh=jzero.make_mesh(devices=jax.devices()[:1]))  # its program takes a batch as it is
    state, _ = step(step.init(jax.random.key(1)), (IMAGES, LABELS))
    for other in ((IMAGES.astype(">f4"), LABELS), (IMAGES, LABELS.astype(">i4"))):
        with pytest.raises(TypeError, match="not a valid JAX array type"):
            step(state, other)
