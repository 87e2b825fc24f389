"""transformers and safetensors read the files of `jzero export`; mistakes are one-line errors."""

import json
import os
import shutil

import jax
import numpy as np
import pytest
from flax import nnx
from llamas import TOKENS, Net, One, engine, logits, model, refused, same, step
from safetensors.numpy import load_file

import jzero
from jzero import weights
from jzero.cli import main
from jzero.weights.export import CheckpointParameters, parse_size
from models import config_from_hf
from models.decoder import Decoder
from models.lora import LoRAConfig


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """(directory of a checkpoint that 4 devices wrote, its engine)."""
    path = tmp_path_factory.mktemp("saved")
    made = engine(stage=3, pipe=2, zero=2)
    made.save_checkpoint(path).wait()
    return path, made


def export(*arguments):
    """Run the command; return its exit code."""
    return main(["export", *map(str, arguments)])


def exported(made, directory):
    """Save a checkpoint in a directory, and export it there; return the export."""
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
    assert export(path, tmp_path / "out", "--max_shard_size", "20KB") == 0
    assert "in model-00001-of-" in capsys.readouterr().out
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert [f.name for f in files] == [f"model-{i:05}-of-{len(files):05}.safetensors" for i in range(1, len(files) + 1)]
    assert len(files) > 2
    found = {f.name: load_file(f) for f in files}
    assert {t: name for name, some in found.items() for t in some} == index["weight_map"]
    sizes = {name: sum(x.nbytes for x in some.values()) for name, some in found.items()}
    assert sum(sizes.values()) == index["metadata"]["total_size"]
    assert max(sizes.values()) <= 20_000
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert back.dtype == torch.float32
    with torch.no_grad():
        there = back(torch.tensor(TOKENS)).logits.numpy()
    assert abs(there).max() > 0.1
    np.testing.assert_allclose(there, logits(model(), made.state.params), atol=1e-5, rtol=0)


def pipeline_module():
    block = jzero.LayerSpec(nnx.Linear, 8, 8)
    layers = [jzero.LayerSpec(nnx.Linear, 4, 8), block, block, block, nnx.relu, jzero.LayerSpec(nnx.Linear, 8, 2)]
    return jzero.PipelineModule(layers, loss_fn=lambda outputs, labels: ((outputs - labels) ** 2).mean())


@pytest.mark.slow
@pytest.mark.parametrize("make", [Net, pipeline_module, One])
def test_a_model_without_a_table_keeps_its_names(tmp_path, make):
    made = make()
    saved = engine(made, 3, zero=2)
    out = exported(saved, tmp_path)
    there = {
        jax.tree_util.keystr(path, simple=True, separator=".") or "params": x
        for path, x in jax.tree_util.tree_flatten_with_path(saved.state.params)[0]
    }
    assert same(load_file(out / "model.safetensors"), there)
    loaded = engine(made, 1, seed=1, zero=2)
    assert not same(loaded.state.params, saved.state.params)
    loaded.load_weights(out)
    assert same(loaded.state.params, saved.state.params)


def test_a_functional_checkpoint_says_no_names(tmp_path, capsys):
    made, unnamed = engine(), "tensors have the names of the leaves"
    jzero.checkpoint.save(made.state, tmp_path / "bare").wait()
    assert export(tmp_path / "bare", tmp_path / "out") == 0
    assert unnamed in capsys.readouterr().out
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
    shape = config_from_hf(directory, **changes)
    made = step(jzero.from_flax(lambda rngs: Decoder(shape, rngs=rngs)), 3, zero=2)
    return jzero.Engine(made, jax.random.key(0), params=weights.load(directory, made) if not changes else None)


@pytest.mark.parametrize("way", ["export", "save_16bit_model of merged adapters"])
def test_a_download_goes_back_with_its_config_and_tokenizer(download, tmp_path, way):
    if way == "export":
        out = exported(of_download(download), tmp_path)
    else:
        out = tmp_path / "out"
        of_download(download, lora=LoRAConfig(r=2)).save_16bit_model(out)
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


# ------------------------------------------------------------------------------------------- mistakes


def test_what_is_no_checkpoint(tmp_path, saved, capsys):
    """Only the parameters are read, wherever they are in the data file, and the manifest."""
    path, out = saved[0], tmp_path / "out"
    damaged = shutil.copytree(path, tmp_path / "damaged", ignore=shutil.ignore_patterns(".lock*"))

    def says(words, *arguments):
        assert export(*arguments) == 2
        said = capsys.readouterr().err
        assert words in said
        assert said.count("\n") == 1
        assert "tensorstore_spec" not in said

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


def test_what_is_no_place_to_write(tmp_path, saved, monkeypatch):
    (path, _), full, empty = saved, tmp_path / "full", tmp_path / "empty"
    full.mkdir()
    empty.mkdir()
    (full / "mine").write_text("x")
    refused(lambda: weights.export(path, full), f"{full} is not empty")
    for out in (full / "mine", full / "mine" / "out"):
        refused(lambda out=out: weights.export(path, out), f"{out} cannot be written: Not a directory")
    assert names(full) == {"mine"}

    def fallocate(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", fallocate)
    refused(lambda: weights.export(path, empty), "No space left on device")
    assert names(empty) == set()


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
    refused(lambda: weights.load(out, made.step_fn), "contains no")
    weights.export(path, out)
    assert names(out) == {"config.json", "model.safetensors"}


def test_sizes():
    for size in ("0", "-1GB", "GB", "5,000MB", "1.5.2GB", "5GB junk", "5Gbit", "5 bananas"):
        refused(lambda size=size: parse_size(size), f"max_shard_size = '{size}'", "must be a size such as 5GB")
    for size in ("40", " 1.5 "):
        refused(lambda size=size: parse_size(size), f"did you mean {size.strip()}GB?")
