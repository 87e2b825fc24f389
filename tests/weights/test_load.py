"""Loading safetensors gives equal logits on any layout and reads only local slices; mistakes are errors."""

import json
import random
import shutil
from itertools import product

import chex
import jax
import numpy as np
import optax
import pytest
from helpers.sampling import keep, sample
from llamas import GROUPED, TIED, TOKENS, engine, logits, model, same, step
from safetensors.numpy import load_file, save_file

import jzero
from jzero import weights
from jzero.weights.safetensors import File

LAYOUTS = [
    {"stage": 0, "zero": 8},
    {"stage": 1, "zero": 4, "data": 2},
    {"stage": 3, "zero": 8},
    {"stage": 2, "pipe": 2, "zero": 2},
    {"stage": 3, "pipe": 4, "zero": 2},
]


def hugging_face(directory, shape=GROUPED, **options):
    """(directory of a Llama that transformers made and saved, its logits)."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    table = model(shape).weights_layout()["config"]
    config = {key: value for key, value in table.items() if key not in ("rope_theta", "rope_scaling", "architectures")}
    made = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config, initializer_range=0.2))
    made.save_pretrained(directory, **options)
    with torch.no_grad():
        return made(torch.tensor(TOKENS)).logits.numpy()


@pytest.mark.parametrize(
    ("shape", "options"),
    sample(product([GROUPED, TIED], [{}, {"max_shard_size": "20KB"}]), lambda case: map(str, case), strength=1),
    ids=["grouped-one", "grouped-shards", "tied-one", "tied-shards"],
)
def test_what_transformers_saved(tmp_path, shape, options):
    there = hugging_face(tmp_path, shape, **options)
    assert (len([*tmp_path.glob("*.safetensors")]) > 1) == bool(options)
    made = engine(model(shape), 3, zero=2)
    made.load_weights(tmp_path)
    assert abs(there).max() > 0.5
    np.testing.assert_allclose(logits(model(shape), made.state.params), there, atol=1e-5, rtol=0)


def test_tables_of_older_downloads(copy):
    """Files of Llama 1 and 2 contain the rotary frequencies too."""
    frequencies = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32) for i in range(4)}
    rewrite(copy, lambda found: found | frequencies)
    weights.load(copy, step())
    rewrite(copy, lambda found: found | {"model.layers.0.rotary": np.ones(4, np.float32)})
    refused(copy, "extra model.layers.0.rotary (4,)")


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """(an export, the engine of its checkpoint)."""
    path = tmp_path_factory.mktemp("exported")
    made = engine(seed=1)
    made.save_checkpoint(path / "ckpt").wait()
    weights.export(path / "ckpt", path / "out", max_shard_size="30KB")
    return path / "out", made


@pytest.fixture
def copy(tmp_path, exported):
    """A copy that a test may change."""
    return shutil.copytree(exported[0], tmp_path / "copy")


@pytest.mark.parametrize(
    "layout", keep(LAYOUTS, LAYOUTS[3:4]), ids=lambda layout: "-".join(f"{k}{v}" for k, v in layout.items())
)
def test_any_layout_has_the_same_bits(exported, layout):
    path, saved = exported
    made = step(**layout)
    params = weights.load(path, made)
    assert jax.tree.map(lambda x: x.sharding, params) == made.state_shardings.params
    assert same(params, saved.state.params)
    state = made.init(jax.random.key(0), params)
    assert jax.tree.map(lambda x: x.sharding, state) == made.state_shardings
    assert same(state.params, saved.state.params)


@pytest.mark.slow
def test_a_loaded_run_is_a_new_run_from_these_weights(exported):
    path, saved = exported
    batch = {"inputs": TOKENS, "labels": TOKENS}
    made = engine(stage=2, zero=2)
    made.train_batch(batch)
    made.load_weights(path)
    assert (made.global_steps, made.global_samples, made.micro_steps, int(made.state.step)) == (0, 0, 0, 0)
    assert made.metrics == {}
    other = engine(stage=2, zero=2)
    other.state = other.step_fn.init(jax.random.key(0), saved.state.params)
    for _ in range(2):
        assert made.train_batch(batch) == other.train_batch(batch)
    assert same(made.state, other.state)


@pytest.mark.slow
def test_an_optimizer_that_keeps_the_parameters(exported):
    """Its copy of the loaded parameters has buffers of its own, because the step donates both."""
    path, saved = exported
    keeps = optax.GradientTransformation(lambda params: {"first": params}, lambda grads, state, params: (grads, state))
    made = jzero.make_train_step(model(), step().config, mesh=step().mesh, optimizer=keeps)
    state = made.init(jax.random.key(0), weights.load(path, made))
    assert same(state.opt_state["first"], saved.state.params)
    state, _ = made(state, {"inputs": TOKENS[:1], "labels": TOKENS[:1]})
    assert same(state.opt_state["first"], saved.state.params)
    assert not same(state.params, saved.state.params)


def test_half_precision_files_become_masters(tmp_path, exported):
    _, saved = exported
    weights.export(exported[0].parent / "ckpt", tmp_path / "bf16", dtype="bfloat16")
    params = weights.load(tmp_path / "bf16", step())
    assert same(params, jax.tree.map(lambda x: x.astype("bfloat16").astype("float32"), saved.state.params))
    assert {str(x.dtype) for x in jax.tree.leaves(params)} == {"float32"}


@pytest.fixture
def read(monkeypatch):
    """The sizes in bytes of all reads."""
    sizes, windows = [], File.windows

    def spy(self, name, box):
        for part, view in windows(self, name, box):
            sizes.append(view.nbytes)
            yield part, view

    monkeypatch.setattr(File, "windows", spy)
    return sizes


@pytest.mark.parametrize("layout", [{"zero": 8}, {"zero": 4, "data": 2}, {"pipe": 2}], ids=str)
def test_every_slice_is_read_once(exported, read, layout):
    """A process with all devices reads the bytes of the parameters once, regardless of replicas."""
    made = step(stage=3, **layout)
    params = weights.load(exported[0], made)
    assert sum(read) == sum(x.nbytes for x in jax.tree.leaves(params))


def test_a_process_reads_its_own_slices(copy, read, monkeypatch):
    """Simulates one of two processes: the other's devices request nothing, so the files have no checksums."""
    rewrite(copy, lambda found: found)
    made = step(stage=3, zero=8)
    make = jax.make_array_from_callback

    def mine(shape, sharding, part):
        places = sharding.devices_indices_map(shape)
        for device in sharding.mesh.devices.flat[:4]:
            part(places[device])
        return make(shape, sharding, np.zeros(shape, np.float32).__getitem__)

    monkeypatch.setattr(jax, "make_array_from_callback", mine)
    weights.load(copy, made)
    leaves = jax.tree.leaves(made.layouts)
    expected = sum(4 * np.prod(leaf.shape) // (2 if leaf.dim is not None else 1) for leaf in leaves)
    assert sum(read) == expected


# ------------------------------------------------------------------------------------------- mistakes


def refused(path, *words, made=None):
    with pytest.raises(jzero.ConfigError) as error:
        weights.load(path, made or step())
    assert [word for word in words if word not in str(error.value)] == [], str(error.value)


def rewrite(directory, change):
    """Apply `change` to all tensors and write them to one file."""
    found = {}
    for file in sorted(directory.glob("*.safetensors")):
        found |= load_file(file)
        file.unlink()
    (directory / "model.safetensors.index.json").unlink(missing_ok=True)
    save_file(change(found), directory / "model.safetensors")


def test_tensors_of_another_model(copy):
    def change(found):
        found["model.norm.bias"] = found["model.norm.weight"]
        found["lm_head.weight"] = found["lm_head.weight"][:-1].copy()
        found["model.layers.1.mlp.up_proj.weight"] = found["model.layers.1.mlp.up_proj.weight"].astype("int32")
        del found["model.layers.2.self_attn.q_proj.weight"]
        return found

    made = engine()
    before = made.state
    rewrite(copy, change)
    words = (
        "another model: missing model.layers.2.self_attn.q_proj.weight (32, 32), extra model.norm.bias (32,)",
        "lm_head.weight is (63, 32), not (64, 32)",
        "model.layers.1.mlp.up_proj.weight is int32, not float32",
    )
    refused(copy, *words)
    with pytest.raises(jzero.ConfigError, match=r"extra model\.norm\.bias"):
        made.load_weights(copy)
    assert made.state is before


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rope_theta": 10000.0, "rope_parameters": None}, "config.json has rope_theta = 10000.0, not 1234.0"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1234.0}}, 'rope_type = "llama3", not "default"'),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling = {"),
        ({"num_attention_heads": 8}, "num_attention_heads = 8, not 4"),
        ({"model_type": "mistral"}, 'model_type = "mistral", not "llama"'),
        ({"rope_theta": ..., "rope_parameters": ...}, "rope_theta = 10000.0, not 1234.0"),  # the default of old files
        ({"eos_token_id": 2, "max_position_embeddings": 8192, "unknown": 1}, None),
    ],
)
def test_a_config_of_another_model(copy, change, words):
    """The shapes are equal, but the logits would be wrong."""
    config = json.loads((copy / "config.json").read_text()) | change
    (copy / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))
    if words:
        refused(copy, words)
    else:
        weights.load(copy, step())


def test_missing_and_damaged_files(tmp_path, copy):
    refused(tmp_path / "nowhere", "no such directory or .safetensors file")
    empty = tmp_path / "empty"
    empty.mkdir()
    refused(empty, "contains no *.safetensors")
    (empty / "pytorch_model.bin").write_bytes(b"x")
    refused(empty, "contains pytorch_model.bin, which jzero does not read: convert it to safetensors")
    first = min(copy.glob("model-*.safetensors"))
    data = first.read_bytes()
    for broken, words in {
        data[:-1]: "it is truncated",
        data[:20]: "its header is longer than the file",
        b"\x02" + bytes(7) + b"{}"[:1] + b"x": "is not a complete safetensors file",
        b"": "is not a complete safetensors file",
    }.items():
        first.write_bytes(broken)
        refused(copy, words)
    first.unlink()
    refused(copy, f"{first.name}: No such file or directory")
    (copy / "model.safetensors.index.json").write_text("[]")
    refused(copy, "is not an index of safetensors files")


@pytest.mark.parametrize("number", [60, pytest.param(1500, marks=pytest.mark.slow)])
def test_no_damaged_byte_gives_other_weights(copy, exported, number):
    """A load of a file with changed bytes is an error with the file's name."""
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
            refused(copy, file.name, made=made)
        file.write_bytes(good)
    assert same(weights.load(copy, made), exported[1].state.params)


def test_a_damaged_value_names_the_file_and_the_way_out(copy):
    first = min(copy.glob("*.safetensors"))
    data = bytearray(first.read_bytes())
    data[-1] ^= 128
    first.write_bytes(data)
    refused(copy, f"{copy}: damaged: values in {first.name} do not match their checksums; copy or export")
    data[-1] ^= 128
    first.write_bytes(data.replace(b"model.layers.0.", b"model.layers.1.", 1))
    refused(copy, f"{first} is not a complete", "its header does not match its checksum: copy or export it again")
    first.write_bytes(data.replace(b"jzero.checksums", b"jzerp.checksums"))
    refused(copy, "its header does not match its checksum")


def test_other_tensors_in_a_damaged_file_are_not_read(copy):
    """The tensors that are read decide: a part that the model ignores may be damaged."""
    frequencies = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32)}
    rewrite(copy, lambda found: found | frequencies)
    found = load_file(copy / "model.safetensors")
    file = File.create(copy / "model.safetensors", {name: (x.dtype, x.shape) for name, x in found.items()})
    for name, x in found.items():
        for part, view in file.windows(name, tuple(slice(0, n) for n in x.shape)):
            view[...] = x[part]
    file.finish()
    for name, passes in {next(iter(frequencies)): True, "model.norm.weight": False}.items():
        damaged = bytearray((copy / "model.safetensors").read_bytes())
        damaged[file.entries[name].start] ^= 1
        (copy / "model.safetensors").write_bytes(damaged)
        weights.load(copy, step()) if passes else refused(copy, "values in model.safetensors do not match")


def test_an_invalid_config_json(copy):
    for text in ("{", "[]"):
        (copy / "config.json").write_text(text)
        refused(copy, "config.json is not a JSON object")


def test_a_tensor_in_two_files(copy):
    (copy / "model.safetensors.index.json").unlink()
    first, *_ = sorted(copy.glob("*.safetensors"))
    shutil.copy(first, copy / "other.safetensors")
    refused(copy, "some tensors are in two of", "other.safetensors")


def test_params_of_another_model_for_init():
    made = step()
    params = made.init(jax.random.key(0)).params
    params["ends"] = {"embed": params["ends"]["embed"][1:], "norm": params["ends"]["norm"]}
    with pytest.raises(
        jzero.ConfigError, match=r"missing ends/head/kernel \(32, 64\), ends/embed is \(63, 32\), not \(64, 32\)"
    ):
        made.init(jax.random.key(0), params)


@pytest.mark.parametrize("kind", keep(["laid out as the state", "NumPy"], ["laid out as the state"]))
def test_init_copies_the_params_unless_they_are_given_up(kind):
    """The first step deletes the state's buffers: the caller's arrays live on, unless `donate`."""
    made = step()
    params = made.init(jax.random.key(0)).params
    if kind == "NumPy":
        params = jax.tree.map(np.array, params)
    before = jax.tree.map(np.array, params)
    batch = {name: np.zeros((made.batch_sizes.train, 8), np.int32) for name in ("inputs", "labels")}
    made(made.init(jax.random.key(1), params), batch)
    chex.assert_trees_all_equal(jax.tree.map(np.array, params), before)
    if kind != "NumPy":
        made(made.init(jax.random.key(1), params, donate=True), batch)
        assert all(x.is_deleted() for x in jax.tree.leaves(params))
