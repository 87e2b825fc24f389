"""transformers and safetensors read the files of `jzero export`; `engine.save_16bit_model` writes the same ones."""

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers.named_models import model_of
from helpers.refusals import says
from launcher.jobs import ROOT, Command
from llamas import Net, One, engine, same
from safetensors.numpy import load_file

import jzero
from jzero import weights
from jzero.cli import main
from jzero.tree import named
from jzero.weights.export import CheckpointParameters
from jzero.weights.save import _part, gather_params
from models import config_from_hf
from models.lora import LoRAConfig


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("saved")
    made = engine(stage=3, pipe=2, zero=2)
    made.save_checkpoint(path).wait()
    return path, made


@pytest.fixture(scope="module")
def half():
    return engine(Net(), zero=2, more={"fp16": {"enabled": True}})


def export(*arguments):
    return main(["export", *map(str, arguments)])


def exported(made, directory):
    made.save_checkpoint(directory / "ckpt").wait()
    assert export(directory / "ckpt", directory / "out") == 0
    return directory / "out"


def names(directory):
    return {path.name for path in directory.iterdir()}


@pytest.mark.slow
def test_frozen_parameters_get_the_dtype_of_the_others(tmp_path):
    made = engine(more={"bf16": {"enabled": True}, "frozen_parameters": ["embed", "attention"]})
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(made.state.params)} == {"float32", "bfloat16"}
    found = load_file(exported(made, tmp_path) / "model.safetensors")
    assert {str(x.dtype) for x in found.values()} == {"float32"}
    assert same(found["model.embed_tokens.weight"], made.state.params["ends"]["embed"].astype("float32"))


def test_shards(tmp_path, saved, capsys):
    path, made = saved
    out = tmp_path / "out"
    assert export(path, out, "--max_shard_size", "20KB") == 0
    assert "in model-00001-of-" in capsys.readouterr().out
    index = json.loads((out / "model.safetensors.index.json").read_text())
    found = {f.name: load_file(f) for f in sorted(out.glob("*.safetensors"))}
    count = len(found)
    assert [*found] == [f"model-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)]
    assert count > 2
    assert {t: name for name, some in found.items() for t in some} == index["weight_map"]
    sizes = [sum(x.nbytes for x in some.values()) for some in found.values()]
    assert sum(sizes) == index["metadata"]["total_size"]
    assert max(sizes) <= 20_000
    back = pytest.importorskip("transformers").AutoModelForCausalLM.from_pretrained(out)
    np.testing.assert_array_equal(back.lm_head.weight.detach(), made.state.params["ends"]["head"]["kernel"].T)


def pipeline_module():
    block = jzero.LayerSpec(nnx.Linear, 8, 8)
    layers = [jzero.LayerSpec(nnx.Linear, 4, 8), block, block, block, nnx.relu, jzero.LayerSpec(nnx.Linear, 8, 2)]
    return jzero.PipelineModule(layers, loss_fn=lambda outputs, labels: ((outputs - labels) ** 2).mean())


@pytest.mark.slow
@pytest.mark.parametrize("make", [pipeline_module, One])
def test_a_model_without_a_table_keeps_its_names(tmp_path, make):
    made = make()
    saved, loaded = engine(made, 3, zero=2), engine(made, 1, seed=1, zero=2)
    out = exported(saved, tmp_path)
    paths = jax.tree_util.tree_leaves_with_path(saved.state.params)
    there = {jax.tree_util.keystr(path, simple=True, separator=".") or "params": x for path, x in paths}
    assert same(load_file(out / "model.safetensors"), there)
    assert not same(loaded.state.params, saved.state.params)
    loaded.load_weights(out)
    assert same(loaded.state.params, saved.state.params)


def test_a_functional_checkpoint_says_no_names(tmp_path, saved, capsys):
    made, unnamed = saved[1], "tensors have the names of the leaves"
    jzero.checkpoint.save(made.state, tmp_path / "bare").wait()
    assert export(tmp_path / "bare", tmp_path / "out") == 0
    assert unnamed in capsys.readouterr().out
    leaves = {name.replace("/", "."): x for name, x in named(made.state.params).items()}
    assert same(load_file(tmp_path / "out" / "model.safetensors"), leaves)
    table = made.step_fn.model.weights_layout()
    jzero.checkpoint.save(made.state, tmp_path / "named", notes={"weights": table}).wait()
    assert export(tmp_path / "named", tmp_path / "named-out") == 0
    assert unnamed not in capsys.readouterr().out
    assert "model.norm.weight" in load_file(tmp_path / "named-out" / "model.safetensors")


COMPANIONS = ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "chat_template.jinja", "generation_config.json")


@pytest.fixture
def download(tmp_path):
    """The directory of a small Llama, with a tokenizer's files, and of what stays."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=16, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, bos_token_id=1,
        eos_token_id=7, pad_token_id=0, max_position_embeddings=96, attention_dropout=0.25,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "download")
    for name in (*COMPANIONS, "notes.md"):
        (tmp_path / "download" / name).write_text(f'{{"of": "{name}"}}')
    return tmp_path / "download"


def of_download(directory, **changes):
    return engine(model_of(config_from_hf(directory, **changes)), 3, zero=2)


def test_a_download_goes_back_with_its_config_and_tokenizer(download, tmp_path):
    """Its adapters are merged."""
    made, saved = of_download(download, lora=LoRAConfig(r=2)), tmp_path / "saved"
    made.save_16bit_model(saved)
    for out in (saved, exported(made, tmp_path)):
        assert names(out) == {"config.json", "model.safetensors", *COMPANIONS}
        assert all((out / name).read_bytes() == (download / name).read_bytes() for name in COMPANIONS)
        before, after = (json.loads((path / "config.json").read_text()) for path in (download, out))
        del before["dtype"]
        assert {key: after.get(key) for key in before} == before


def test_a_download_that_has_gone(download, tmp_path, capsys):
    made = of_download(download, rope_theta=77.0)
    download.rename(tmp_path / "elsewhere")
    out = exported(made, tmp_path)
    assert f"{download} is not there any more: copy its tokenizer and generation files to" in capsys.readouterr().out
    assert names(out) == {"config.json", "model.safetensors"}
    config = json.loads((out / "config.json").read_text())
    assert (config["eos_token_id"], config["max_position_embeddings"]) == (7, 96)
    # what was changed is not the download's
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 77.0


def test_what_is_no_checkpoint(tmp_path, saved, capsys):
    """Only the parameters are read, wherever they are in the data file, and the manifest."""
    path, out = saved[0], tmp_path / "out"
    damaged = shutil.copytree(path, tmp_path / "damaged", ignore=shutil.ignore_patterns(".lock*"))

    def says(words, *arguments):
        assert export(*arguments) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert words in line
        assert "tensorstore_spec" not in line

    says("(it has no file 'latest')", tmp_path, out)
    says("global_step9 does not exist", path, out, "--tag", "global_step9")
    (tmp_path / "broken" / "a").mkdir(parents=True)
    (tmp_path / "broken" / "latest").write_text("a")
    says("not complete", tmp_path / "broken", out)
    for name in ("ocdbt.process_0/d", "d"):
        for file in damaged.glob(f"*/state/{name}/*"):
            file.write_bytes(file.read_bytes()[:1])
        says("cannot be read", damaged, out)
    assert not out.exists()


def test_what_is_no_place_to_write(tmp_path, saved, half, monkeypatch):
    path, full = saved[0], tmp_path / "full"
    full.mkdir()
    (full / "mine").write_text("x")
    says(lambda: weights.export(path, full), f"{full} is not empty")
    for out in (full / "mine", full / "mine" / "out"):
        says(lambda out=out: weights.export(path, out), f"{out} cannot be written: Not a directory")
    for name in ("pytorch_model.bin", "a/b.safetensors"):
        says(lambda name=name: half.save_16bit_model(full, name), f"save_filename = '{name}': must be a name that")
    says(lambda: half.save_16bit_model(full / "mine"), "cannot be written: File exists")
    assert names(full) == {"mine"}

    def fallocate(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", fallocate)
    says(lambda: weights.export(path, tmp_path / "out"), "No space left on device")
    assert names(tmp_path) == {"full"}


def test_an_interrupted_export_is_not_taken_for_one(tmp_path, saved, monkeypatch):
    """An interrupted export leaves nothing; a killed one leaves a directory that the next export replaces."""
    (path, made), out, read = saved, tmp_path / "out", CheckpointParameters.read

    def interrupted(self, name):
        if name.startswith("stack"):
            raise KeyboardInterrupt
        return read(self, name)

    with monkeypatch.context() as m:
        m.setattr(CheckpointParameters, "read", interrupted)
        with pytest.raises(KeyboardInterrupt):
            weights.export(path, out)
        assert not out.exists()
        m.setattr("shutil.rmtree", lambda *_, **__: None)  # as after a kill
        with pytest.raises(KeyboardInterrupt):
            weights.export(path, out)
    says(lambda: weights.load(out, made.step_fn), "contains no")
    weights.export(path, out)
    assert names(out) == {"config.json", "model.safetensors"}


# ------------------------------------------------------------------------------------------- engine.save_16bit_model


def test_it_is_the_export_in_bfloat16(tmp_path, saved):
    path, made = saved
    weights.export(path, tmp_path / "out", dtype="bfloat16")
    assert made.save_16bit_model(tmp_path / "new" / "saved") is True
    files = [{file.name: file.read_bytes() for file in (tmp_path / name).iterdir()} for name in ("new/saved", "out")]
    assert files[0].keys() == {"config.json", "model.safetensors"}
    assert files[0] == files[1]
    assert json.loads(files[0]["config.json"])["torch_dtype"] == "bfloat16"
    loaded = weights.load(tmp_path / "out", made.step_fn)
    assert {str(x.dtype) for x in jax.tree.leaves(loaded)} == {"float32"}
    assert same(loaded, jax.tree.map(lambda x: x.astype("bfloat16").astype("float32"), made.state.params))


def test_names_dtypes_and_what_is_there_already(saved, half, tmp_path):
    for name in ("config.json", "a.safetensors"):
        (tmp_path / name).write_text("mine")
    saved[1].save_16bit_model(tmp_path, "a.safetensors")
    assert (tmp_path / "config.json").read_text() == "mine"
    half.save_16bit_model(tmp_path, "a.safetensors")
    found = load_file(tmp_path / "a.safetensors")
    assert {x.dtype for x in found.values()} == {np.dtype("float16")}
    np.testing.assert_array_equal(found["stack.w"], half.state.params["stack"]["w"].astype("float16"))
    assert names(tmp_path) == {"a.safetensors", "config.json"}


def test_values_beyond_float16(half, tmp_path, monkeypatch):
    params = half.state.params
    w = params["stack"]["w"].at[1].set(1e5)
    large = dataclasses.replace(half.state, params=params | {"stack": params["stack"] | {"w": w}})
    monkeypatch.setattr(half, "state", large)
    words = "stack.w has values beyond the range of float16: jzero export --dtype bfloat16"
    says(lambda: half.save_16bit_model(tmp_path), words)
    assert [*tmp_path.iterdir()] == []


@pytest.mark.slow
def test_a_layer_at_a_time_is_gathered():
    """Also where the layers are divided among pipeline stages."""
    made, name = engine(stage=3, pipe=2, zero=2), "stack/mlp/gate_up/kernel"
    leaves = zip(*(jax.tree.leaves(tree) for tree in (made.step_fn.layouts, made.state.params)), strict=True)
    params = {layout.name: (layout, x) for layout, x in leaves}
    shapes = [x.shape for _, _, x in gather_params(params, made.mesh, np.dtype("float32"))]
    assert shapes.count((1, 32, 2, 48)) == 4
    layout, x = params[name]
    text = _part(layout, made.mesh, np.dtype("float32")).lower(x, jnp.int32(0)).compile().as_text()
    gathered = {tuple(map(int, m.split(","))) for m in re.findall(r"f32\[([\d,]+)\]\S* all-gather", text)}
    assert gathered == {(1, 32, 2, 48)}


PROGRAM = """
import pathlib
import shutil
import jax
import numpy as np
import jzero
jzero.init_distributed()
from llamas import GROUPED, TOKENS, model
from jzero import weights

config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "Adam", "params": {"lr": 1e-3}},
          "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}
engine = jzero.initialize(model=model(), config=config)[0]
rank = jzero.get_rank()
engine.save_checkpoint("ckpt").wait()
engine.save_16bit_model("saved")
if rank == 0:
    weights.export("ckpt", "out", dtype="bfloat16")
    weights.export("ckpt", "fp32")

def tried(name, f):
    try:
        print(f"{name}: {f()}")
    except jzero.ConfigError as error:
        print(f"{name}: error: {error}")

jzero.distributed.host_collectives.gather_texts("exported", "")
before = jax.tree.map(lambda x: np.asarray(x.addressable_data(0)), engine.state.params)
engine.load_weights("fp32")
assert jax.tree.all(jax.tree.map(lambda x, y: (x == y.addressable_data(0)).all(), before, engine.state.params))
tried("there", lambda: engine.load_weights("fp32" if rank == 0 else "nowhere"))
shutil.copytree("fp32", f"copy{rank}")
file = weights.safetensors.File.open(pathlib.Path(f"copy{rank}", "model.safetensors"))
start, good = file.entries["model.norm.weight"].start, file.path.read_bytes()
for stage in (0, 3):
    made = jzero.make_train_step(model(), config | {"zero_optimization": {"stage": stage}})
    for damaged in (None, 0, 1):
        data = bytearray(good)
        for at in (start, start + 4 * GROUPED.d_model - 1):  # in both halves
            data[at] ^= damaged == rank
        file.path.write_bytes(data)
        tried(f"copy{stage}{damaged}", lambda: len(weights.load(file.path, made)))
def full():
    if rank == 0:
        write, count = weights.safetensors.TensorWriter.write, []
        def failing(self, *part):
            if count.append(0) or len(count) > 3:
                raise OSError(28, "No space left on device")
            write(self, *part)
        weights.safetensors.TensorWriter.write = failing
    engine.save_16bit_model("room")
tried("room", full)
"""


@pytest.mark.slow
@pytest.mark.processes
def test_two_processes(tmp_path):
    (tmp_path / "worker.py").write_text(PROGRAM)
    path = {"PYTHONPATH": f"{ROOT}:{ROOT}/tests:{ROOT}/tests/weights"}
    job = Command("--platform", "cpu", "--num_gpus", 2, "worker.py", cwd=tmp_path, env=path)
    try:
        assert job.wait(120) == 0, job.errors
    finally:
        job.end()
    found = re.findall(r"^\[(\d)\] (\w+): (.*)$", job.output, re.M)
    said = [{name: text for number, name, text in found if number == rank} for rank in "01"]
    files = [[p.read_bytes() for p in sorted((tmp_path / name).iterdir())] for name in ("saved", "out")]
    assert files[0] == files[1] != []
    for one in said:
        assert one["there"].startswith("error: nowhere: no such directory; ")
        assert {one["copy0None"], one["copy3None"]} == {"2"}
        for damaged in ("copy00", "copy01", "copy30", "copy31"):
            assert re.match(r"error: copy\d/model.safetensors: damaged: values in model.saf", one[damaged])
        assert "room/model.safetensors cannot be written: No space left on device" in one["room"]
    assert [*(tmp_path / "room").iterdir()] == []


# ------------------------------------------------------------------------------------------- host memory


LEAF = 384  # MiB
FIXED = 64  # MiB: a mapped window of a file and the process's other allocations
PIECE = 128  # MiB: of a leaf
SHAPE = ("--preset", "tiny", "--tied", "--vocab_size", str(LEAF * 2**20 // 4 // 128))


@pytest.fixture
def phase(tmp_path):
    """The report of a phase of experiments/benchmarks/weights.py, by default on a Llama with a large vocabulary."""
    path = tmp_path / "large"

    def phase(name, devices=4, shape=SHAPE):
        done = subprocess.run(
            [sys.executable, "-m", "experiments.benchmarks.weights", name, path, "--devices", str(devices), *shape],
            cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    return phase


@pytest.mark.slow
def test_host_memory(phase):
    """Export needs two chunks of a leaf (one device's part each); load needs two pieces of one besides the result."""
    phase("make")
    found = phase("export")
    assert found["largest_leaf"] == LEAF
    assert found["largest_part"] == LEAF / 4
    assert found["peak"] <= 2 * LEAF / 4 + FIXED
    for devices in (4, 1):
        found = phase("load", devices)
        assert found["result"] >= LEAF
        assert found["peak"] <= found["result"] + 2 * PIECE + 2 * FIXED  # programs that copy pieces, too
