"""Loading safetensors gives equal logits on any layout and reads only local slices; mistakes are errors."""

import json
import random
import shutil

import jax
import numpy as np
import pytest
from helpers.refusals import says
from llamas import TOKENS, Net, engine, same, step
from safetensors.numpy import load_file, save_file

from jzero import weights
from jzero.weights.safetensors import File

BATCH = {"inputs": TOKENS, "labels": TOKENS}
FREQUENCIES = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32) for i in range(4)}


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    path = tmp_path_factory.mktemp("exported")
    made = engine(seed=1)
    made.save_checkpoint(path / "ckpt").wait()
    weights.export(path / "ckpt", path / "out", max_shard_size="30KB")
    return path / "out", made


@pytest.fixture
def copy(tmp_path, exported):
    return shutil.copytree(exported[0], tmp_path / "copy")


@pytest.fixture
def read(monkeypatch):
    sizes, windows = [], File.windows

    def spy(self, name, box):
        for part, view in windows(self, name, box):
            sizes.append(view.nbytes)
            yield part, view

    monkeypatch.setattr(File, "windows", spy)
    return sizes


LAYOUTS = [{"stage": 1, "zero": 4, "data": 2}, {"stage": 3, "pipe": 2, "zero": 2}]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_any_layout_has_the_same_bits(exported, read, layout):
    """A process with all devices reads the bytes of the parameters once, regardless of replicas."""
    (path, saved), made = exported, step(**layout)
    params = weights.load(path, made)
    assert sum(read) == sum(x.nbytes for x in jax.tree.leaves(params))
    assert jax.tree.map(lambda x: x.sharding, params) == made.state_shardings.params
    state = made.init(jax.random.key(0), params)
    assert jax.tree.map(lambda x: x.sharding, state) == made.state_shardings
    assert same(state.params, saved.state.params)


def test_a_process_reads_its_own_slices(copy, read, monkeypatch):
    """Simulates one of two processes: the other's devices request nothing, so the files have no checksums."""
    rewrite(copy, lambda found: found)
    made = step(stage=3, zero=8)
    kind, name = jax.sharding.NamedSharding, "addressable_devices_indices_map"
    whole = getattr(kind, name)

    def mine(sharding, shape):
        places = whole(sharding, shape)
        return {device: places[device] for device in sharding.mesh.devices.flat[:4]}

    def zeros(shape, sharding, shards):
        assert len(shards) == 4
        with monkeypatch.context() as here:
            here.setattr(kind, name, whole)
            return jax.device_put(np.zeros(shape, np.float32), sharding)

    monkeypatch.setattr(kind, name, mine)
    monkeypatch.setattr(jax, "make_array_from_single_device_arrays", zeros)
    weights.load(copy, made)
    leaves = jax.tree.leaves(made.layouts)
    expected = sum(4 * np.prod(leaf.shape) // (2 if leaf.dim is not None else 1) for leaf in leaves)
    assert sum(read) == expected


@pytest.mark.slow
def test_a_loaded_run_is_a_new_run_from_these_weights(exported):
    path, saved = exported
    made = engine(stage=2, zero=2)
    made.train_batch(BATCH)
    made.load_weights(path)
    assert (made.global_steps, made.global_samples, made.micro_steps, int(made.state.step)) == (0, 0, 0, 0)
    assert made.metrics == {}
    other = engine(stage=2, zero=2)
    other.state = other.step_fn.init(jax.random.key(0), saved.state.params)
    for _ in range(2):
        assert made.train_batch(BATCH) == other.train_batch(BATCH)
    assert same(made.state, other.state)


def test_init_copies_the_params_unless_they_are_given_up():
    """The first step deletes the state's buffers: the caller's arrays live on, unless `donate`."""
    made = step(Net())
    params = made.init(jax.random.key(0)).params
    before = jax.tree.map(np.array, params)
    batch = np.zeros((made.batch_sizes.train, 8), np.float32)
    made(made.init(jax.random.key(1), params), batch)
    assert same(params, before)
    made(made.init(jax.random.key(1), params, donate=True), batch)
    assert all(x.is_deleted() for x in jax.tree.leaves(params))


def rewrite(directory, change):
    found = {}
    for file in sorted(directory.glob("*.safetensors")):
        found |= load_file(file)
        file.unlink()
    (directory / "model.safetensors.index.json").unlink(missing_ok=True)
    save_file(change(found), directory / "model.safetensors")


def test_tensors_of_another_model(copy):
    def change(found):
        found |= FREQUENCIES  # which files of Llama 1 and 2 contain, too
        found["model.layers.0.rotary"] = np.ones(4, np.float32)
        found["model.norm.bias"] = found["model.norm.weight"]
        found["lm_head.weight"] = found["lm_head.weight"][:-1].copy()
        found["model.layers.1.mlp.up_proj.weight"] = found["model.layers.1.mlp.up_proj.weight"].astype("int32")
        del found["model.layers.2.self_attn.q_proj.weight"]
        return found

    made = engine()
    before = made.state
    rewrite(copy, change)
    says(
        lambda: made.load_weights(copy),
        "another model: missing model.layers.2.self_attn.q_proj.weight (32, 32), extra "
        "model.layers.0.rotary (4,), extra model.norm.bias (32,), lm_head",
        "lm_head.weight is (63, 32), not (64, 32)",
        "model.layers.1.mlp.up_proj.weight is int32, not float32",
    )
    assert made.state is before
    params = before.params | {"ends": before.params["ends"] | {"embed": before.params["ends"]["embed"][1:]}}
    says(lambda: step().init(jax.random.key(0), params), "ends/embed is (63, 32), not (64, 32)")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rope_theta": 10000.0, "rope_parameters": None}, "config.json has rope_theta = 10000.0, not 1234.0"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1234.0}}, 'rope_type = "llama3", not "default"'),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling = {"),
        ({"num_attention_heads": 8, "model_type": "mistral"}, "num_attention_heads = 8, not 4"),
        ({"rope_theta": ..., "rope_parameters": ...}, "rope_theta = 10000.0, not 1234.0"),  # the default of old files
        ({"eos_token_id": 2, "max_position_embeddings": 8192, "unknown": 1}, None),
        (None, "config.json is not a JSON object"),
    ],
)
def test_a_config_of_another_model(copy, change, words):
    """The shapes are equal, but the logits would be wrong."""
    config = json.loads((copy / "config.json").read_text()) | (change or {})
    changed = {key: value for key, value in config.items() if value is not ...} if change else []
    (copy / "config.json").write_text(json.dumps(changed))
    if words:
        says(lambda: weights.load(copy, step()), words)
    else:
        weights.load(copy, step())


def test_what_is_no_directory_of_weights(tmp_path):
    says(lambda: weights.load(tmp_path / "nowhere", step()), "no such directory or .safetensors file")
    says(lambda: weights.load(tmp_path, step()), "contains no *.safetensors")
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    words = "contains pytorch_model.bin: read pytorch_model*.bin with engine.load_checkpoint, or"
    says(lambda: weights.load(tmp_path, step()), words)


@pytest.mark.parametrize("number", [60, pytest.param(1500, marks=pytest.mark.slow)])
def test_no_damaged_byte_gives_other_weights(copy, exported, number):
    made, chance = step(), random.Random(number)
    files = sorted(copy.glob("*.safetensors"))
    for i in range(number):
        file = files[i % len(files)]
        good = file.read_bytes()
        header, end, sums = 8 + int.from_bytes(good[:8], "little"), len(good), good.index(b"jzero")
        begin, stop = ((0, 8), (8, header), (sums, good.index(b"}")), (header, end), (header, end))[i % 5]
        at, some = chance.randrange(begin, stop), chance.choice([1, 1, 1, 2, 512])
        bits = bytes([1 << chance.randrange(8)]) if some == 1 else chance.randbytes(some)
        block = bytes(a ^ b for a, b in zip(good[at : at + some], bits, strict=False))
        if i % 7 == 0:  # what belongs to another place
            block = good[at - some // 2 :][: len(block)]
        file.write_bytes(good[:at] + block + good[at + len(block) :])
        if file.read_bytes() != good:
            says(lambda: weights.load(copy, made), file.name)
        file.write_bytes(good)
    assert same(weights.load(copy, made), exported[1].state.params)
