"""transformers and safetensors read the files of `jzero export`; mistakes are one-line errors."""

import json
import os
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.sampling import keep
from llamas import GROUPED, TIED, TOKENS, Net, One, engine, logits, model, same, step
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


def names(directory):
    return {path.name for path in directory.iterdir()}


def torch_logits(directory):
    torch = pytest.importorskip("torch")
    made = pytest.importorskip("transformers").AutoModelForCausalLM.from_pretrained(directory)
    with torch.no_grad():
        return made(torch.tensor(TOKENS)).logits.float().numpy(), made


@pytest.mark.parametrize(("shape", "stage"), keep([(GROUPED, 0), (TIED, 3)], [(TIED, 3)]), ids=["grouped-0", "tied-3"])
def test_transformers_computes_the_same_logits(tmp_path, shape, stage, capsys):
    made = engine(model(shape), stage, zero=4)
    made.save_checkpoint(tmp_path / "ckpt").wait()
    assert main(["export", str(tmp_path / "ckpt"), str(tmp_path / "out")]) == 0
    assert "in model.safetensors" in capsys.readouterr().out
    there, torch_model = torch_logits(tmp_path / "out")
    here = logits(model(shape), made.state.params)
    assert abs(here).max() > 0.1
    np.testing.assert_allclose(there, here, atol=1e-5, rtol=0)
    assert str(torch_model.dtype) == "torch.float32"
    assert names(tmp_path / "out") == {"config.json", "model.safetensors"}


@pytest.mark.slow
def test_frozen_parameters_get_the_dtype_of_the_others(tmp_path):
    more = {"bf16": {"enabled": True}, "frozen_parameters": ["embed", "attention"]}
    made = engine(more=more)
    stored = {str(leaf.dtype) for leaf in jax.tree.leaves(made.state.params)}
    assert stored == {"float32", "bfloat16"}
    made.save_checkpoint(tmp_path / "ckpt").wait()
    assert main(["export", str(tmp_path / "ckpt"), str(tmp_path / "out")]) == 0
    there, torch_model = torch_logits(tmp_path / "out")
    params = jax.tree.map(lambda x: x.astype(jnp.float32), made.state.params)
    np.testing.assert_allclose(there, logits(model(), params), atol=1e-5, rtol=0)
    assert {str(p.dtype) for p in torch_model.parameters()} == {"torch.float32"}
    assert {str(x.dtype) for x in load_file(tmp_path / "out" / "model.safetensors").values()} == {"float32"}


def test_shards(tmp_path, saved):
    path, made = saved
    assert main(["export", str(path), str(tmp_path / "out"), "--max_shard_size", "20KB"]) == 0
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert [f.name for f in files] == [f"model-{i:05}-of-{len(files):05}.safetensors" for i in range(1, len(files) + 1)]
    assert len(files) > 2
    found = {f.name: load_file(f) for f in files}
    assert {t: name for name, some in found.items() for t in some} == index["weight_map"]
    sizes = {name: sum(x.nbytes for x in some.values()) for name, some in found.items()}
    assert sum(sizes.values()) == index["metadata"]["total_size"]
    assert max(sizes.values()) <= 20_000
    np.testing.assert_allclose(torch_logits(tmp_path / "out")[0], logits(model(), made.state.params), atol=1e-5, rtol=0)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_dtypes(tmp_path, saved, dtype):
    path, made = saved
    assert main(["export", str(path), str(tmp_path / "out"), "--dtype", dtype]) == 0
    found = load_file(tmp_path / "out" / "model.safetensors")
    qkv = made.state.params["stack"]["attention"]["qkv"]["kernel"].astype(dtype)
    here = found["model.layers.3.self_attn.k_proj.weight"]
    assert here.dtype == jnp.dtype(dtype)
    np.testing.assert_array_equal(here, np.asarray(qkv[3, :, :, 2]).reshape(32, 16).T)
    assert str(torch_logits(tmp_path / "out")[1].dtype) == f"torch.{dtype}"


@pytest.mark.slow
def test_a_model_without_a_table_keeps_its_names(tmp_path):
    for name, made in {"net": Net(), "pipeline": pipeline_module(), "one array": One()}.items():
        saved = engine(made, 3, zero=2)
        saved.save_checkpoint(tmp_path / name).wait()
        weights.export(tmp_path / name, tmp_path / f"{name}-out")
        found = load_file(tmp_path / f"{name}-out" / "model.safetensors")
        there = {
            jax.tree_util.keystr(path, simple=True, separator=".") or "params": x
            for path, x in jax.tree_util.tree_flatten_with_path(saved.state.params)[0]
        }
        assert found.keys() == there.keys()
        assert same(found, there)
        loaded = engine(made, 1, seed=1, zero=2)
        assert not same(loaded.state.params, saved.state.params)
        loaded.load_weights(tmp_path / f"{name}-out")
        assert same(loaded.state.params, saved.state.params)
        other = engine(made, 1, seed=1, zero=2)
        other.load_checkpoint(tmp_path / name, load_module_only=True)
        assert same(other.state.params, saved.state.params)


def test_a_functional_checkpoint_says_no_names(tmp_path, capsys):
    made = engine()
    jzero.checkpoint.save(made.state, tmp_path / "bare").wait()
    assert main(["export", str(tmp_path / "bare"), str(tmp_path / "out")]) == 0
    assert "tensors have the names of the leaves" in capsys.readouterr().out
    table = made.step_fn.model.weights_layout()
    jzero.checkpoint.save(made.state, tmp_path / "named", notes={"weights": table}).wait()
    assert main(["export", str(tmp_path / "named"), str(tmp_path / "named-out")]) == 0
    assert "tensors have the names of the leaves" not in capsys.readouterr().out
    assert "model.norm.weight" in load_file(tmp_path / "named-out" / "model.safetensors")


EOS, COUNTER = 7, {"vocab_size": 16, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
                   "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 96,
                   "bos_token_id": 1, "pad_token_id": 0, "attention_dropout": 0.25}  # fmt: skip


@pytest.fixture
def counter(tmp_path):
    """The directory of a Llama that answers each token with the next number, and of its tokenizer."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    from tokenizers import Tokenizer, models, pre_tokenizers

    made = transformers.LlamaForCausalLM(transformers.LlamaConfig(**COUNTER, eos_token_id=EOS))
    with torch.no_grad():
        for name, x in made.named_parameters():
            x.fill_(1.0 if "norm" in name else 0.0)
        made.model.embed_tokens.weight[:, :16] = torch.eye(16)
        made.lm_head.weight[:, :16] = torch.eye(16).roll(1, 0)
    made.generation_config.update(eos_token_id=EOS, max_length=64)
    made.save_pretrained(tmp_path / "download")
    plain = Tokenizer(models.WordLevel({f"n{i}": i for i in range(16)}, unk_token="n0"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=plain, eos_token=f"n{EOS}")
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    tokenizer.save_pretrained(tmp_path / "download")
    (tmp_path / "download" / "vocab.txt").write_text("a word")
    (tmp_path / "download" / "notes.md").write_text("stays")
    return tmp_path / "download"


@pytest.mark.parametrize("way", ["export", "save_16bit_model of merged adapters"])
def test_a_download_goes_back_with_its_config_and_tokenizer(counter, tmp_path, capsys, way):
    """Generation stops at the eos token of the download, and its tokenizer is there."""
    import torch
    import transformers

    shape = config_from_hf(counter, **({} if way == "export" else {"lora": LoRAConfig(r=2)}))
    there = step(jzero.from_flax(lambda rngs: Decoder(shape, rngs=rngs)), 3, zero=2)
    made = jzero.Engine(there, jax.random.key(0), params=weights.load(counter, there))
    before, out = json.loads((counter / "config.json").read_text()), tmp_path / "out"
    if way == "export":
        made.save_checkpoint(tmp_path / "ckpt").wait()
        assert main(["export", str(tmp_path / "ckpt"), str(out)]) == 0
    else:
        made.save_16bit_model(out)
    assert names(out) == names(counter) - {"notes.md"}
    after, keys = json.loads((out / "config.json").read_text()), before.keys() - {"dtype"}
    assert {key: after.get(key) for key in keys} == {key: before[key] for key in keys}

    prompt = transformers.AutoTokenizer.from_pretrained(out)("n3 n4", return_tensors="pt").input_ids
    missing = [(), ("generation_config.json",), ("generation_config.json", "config.json")]
    for without in missing if way == "export" else missing[:1]:
        if "config.json" in without:  # the eos token is what stops it
            (out / "config.json").write_text(json.dumps(after | {"eos_token_id": None}))
        elif without:
            (out / without[0]).unlink()
        found = transformers.AutoModelForCausalLM.from_pretrained(out)
        text = found.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=8, do_sample=False)
        assert text[0].tolist() == [3, 4, *range(5, 13 if "config.json" in without else EOS + 1)]


def test_a_download_that_has_gone(counter, tmp_path, capsys):
    shape = config_from_hf(counter, rope_theta=77.0)
    there = step(jzero.from_flax(lambda rngs: Decoder(shape, rngs=rngs)))
    params = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), there.state_shapes.params)
    jzero.Engine(there, jax.random.key(0), params=params).save_checkpoint(tmp_path / "ckpt").wait()
    counter.rename(tmp_path / "elsewhere")
    assert main(["export", str(tmp_path / "ckpt"), str(tmp_path / "out")]) == 0
    assert f"{counter} is not there any more: copy its tokenizer and generation files to" in capsys.readouterr().out
    assert names(tmp_path / "out") == {"config.json", "model.safetensors"}
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["eos_token_id"], config["max_position_embeddings"]) == (EOS, 96)
    # what was changed is not the download's
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 77.0


def pipeline_module():
    from flax import nnx

    block = jzero.LayerSpec(nnx.Linear, 8, 8)
    layers = [jzero.LayerSpec(nnx.Linear, 4, 8), block, block, block, nnx.relu, jzero.LayerSpec(nnx.Linear, 8, 2)]
    return jzero.PipelineModule(layers, loss_fn=lambda outputs, labels: ((outputs - labels) ** 2).mean())


# ------------------------------------------------------------------------------------------- former shapes


def test_a_checkpoint_whose_model_kept_other_shapes_reaches_the_new_one(tmp_path, saved):
    """A former Llama stored q, k and v side by side, with a table for that; its error names the way."""
    new = saved[1].state.params
    weights.save(new, saved[1].step_fn, tmp_path / "new", "model.safetensors", np.dtype("float32"))
    found, table, old = load_file(tmp_path / "new" / "model.safetensors"), model().weights_layout(), {}
    for leaf, *parts in (("attention/qkv", "q", "k", "v"), ("mlp/gate_up", "gate", "up")):
        begin, module = 0, "mlp" if "mlp" in leaf else "self_attn"
        places = [f"model.layers.{{layer}}.{module}.{part}_proj.weight" for part in parts]
        for place in places:
            columns = [begin, begin := begin + len(found[place.format(layer=0)])]
            rows = [row for row in table["tensors"] if row["name"] != place]
            row = {"name": place, "leaf": f"stack/{leaf}/kernel", "columns": columns, "transposed": True}
            table = table | {"tensors": [*rows, row]}
        layers = ([found[place.format(layer=i)].T for place in places] for i in range(4))
        old[leaf] = np.stack([np.concatenate(layer, 1) for layer in layers])
    params = jax.tree.map(jnp.copy, new)
    params["stack"]["attention"]["qkv"]["kernel"] = jnp.asarray(old["attention/qkv"])
    params["stack"]["mlp"]["gate_up"]["kernel"] = jnp.asarray(old["mlp/gate_up"])
    former, out = tmp_path / "former", tmp_path / "out"
    jzero.checkpoint.save({"params": params}, former, tag="last", notes={"weights": table}).wait()
    with pytest.raises(jzero.ConfigError) as error:
        engine().load_checkpoint(former, load_module_only=True)
    for words in (
        "params/stack/attention/qkv/kernel is (4, 32, 64), not (4, 32, 2, 4, 8)",
        "params/stack/mlp/gate_up/kernel is (4, 32, 96), not (4, 32, 2, 48)",
        f"To load the parameters in their new shapes: jzero export {former} OUT, then engine.load_weights(OUT)",
    ):
        assert words in str(error.value)
    assert "load_module_only" not in str(error.value)
    assert main(["export", str(former), str(out)]) == 0
    assert same(load_file(out / "model.safetensors"), found)
    assert same(weights.load(out, step(stage=3, zero=2)), new)


# ------------------------------------------------------------------------------------------- mistakes


def refused(capsys, *arguments):
    assert main(["export", *map(str, arguments)]) == 2
    said = capsys.readouterr().err
    assert "Traceback" not in said
    return said


def test_what_is_no_checkpoint(tmp_path, saved, capsys):
    (path, _), out, broken = saved, tmp_path / "out", tmp_path / "broken"
    assert "(it has no file 'latest')" in refused(capsys, tmp_path, out)
    assert "nowhere: no such directory: pass the one" in refused(capsys, tmp_path / "nowhere", out)
    assert "global_step9 does not exist" in refused(capsys, path, out, "--tag", "global_step9")
    (broken / "a").mkdir(parents=True)
    (broken / "latest").write_text("a")
    assert "not complete" in refused(capsys, broken, out)
    (broken / "a" / "state").mkdir()
    (broken / "a" / "notes.json").write_text("{}")
    assert "a is damaged: notes.json" in refused(capsys, broken, out)
    shutil.copy(path / (path / "latest").read_text() / "notes.json", broken / "a" / "notes.json")
    assert "cannot be read" in refused(capsys, broken, out)
    # an export reads only the parameters, wherever they are in the data file, and the manifest
    damaged = shutil.copytree(path, tmp_path / "damaged", ignore=shutil.ignore_patterns(".lock*"))
    for name in ("ocdbt.process_0/d", "d"):
        for file in damaged.glob(f"*/state/{name}/*"):
            file.write_bytes(file.read_bytes()[:1])
        said = refused(capsys, damaged, out)
        assert "cannot be read" in said
        assert "tensorstore_spec" not in said
    assert not out.exists()


def test_what_is_no_place_to_write(tmp_path, saved, capsys, monkeypatch):
    path, _ = saved
    full = tmp_path / "full"
    full.mkdir()
    (full / "mine").write_text("x")
    assert f"{full} is not empty" in refused(capsys, path, full)
    (tmp_path / "file").write_text("x")
    assert "file cannot be written: Not a directory" in refused(capsys, path, tmp_path / "file")
    assert "cannot be written: Not a directory" in refused(capsys, path, tmp_path / "file" / "out")
    assert "cannot be written" in refused(capsys, path, "/proc/out")
    assert names(full) == {"mine"}

    def fallocate(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", fallocate)
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "No space left on device" in refused(capsys, path, empty)
    assert names(empty) == set()


def test_an_interrupted_export_is_not_taken_for_one(tmp_path, saved, monkeypatch):
    """An interrupted export leaves nothing; a killed one leaves a directory that the next export replaces."""
    path, _ = saved
    out = tmp_path / "out"
    read = CheckpointParameters.read

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
    with pytest.raises(jzero.ConfigError, match="contains no"):
        weights.load(out, saved[1].step_fn)
    weights.export(path, out)
    assert names(out) == {"config.json", "model.safetensors"}


def test_sizes_and_ranges(tmp_path, saved, capsys):
    assert "max_shard_size = '5 bananas'" in refused(
        capsys, saved[0], tmp_path / "out", "--max_shard_size", "5 bananas"
    )
    for size in ("0", "-1GB", "GB", "5,000MB", "1.5.2GB", "5GB junk", "5Gbit"):
        with pytest.raises(jzero.ConfigError, match="must be a size such as 5GB"):
            parse_size(size)
    for size in ("40", " 1.5 "):
        with pytest.raises(jzero.ConfigError, match=rf"must be .* did you mean {size.strip()}GB\?"):
            parse_size(size)
    large = engine(Net())
    large.state.params["stack"]["w"] = large.state.params["stack"]["w"].at[0, 0, 0].set(1e6)
    large.save_checkpoint(tmp_path / "large").wait()
    said = refused(capsys, tmp_path / "large", tmp_path / "out", "--dtype", "float16")
    assert "stack.w has values beyond the range of float16: jzero export --dtype bfloat16" in said
    assert not (tmp_path / "out").exists()


def test_a_bias_that_is_state_keeps_its_dtype(tmp_path):
    """Near 4, bfloat16 would round away what balances the experts of a DeepSeek-V3; transformers keeps float32 too."""
    shape = {"hidden_size": 16, "intermediate_size": 16, "moe_intermediate_size": 8, "num_hidden_layers": 1,
             "num_attention_heads": 2, "vocab_size": 32, "kv_lora_rank": 8, "q_lora_rank": None, "v_head_dim": 4,
             "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "n_routed_experts": 8, "n_group": 2, "topk_group": 1,
             "num_experts_per_tok": 2, "first_k_dense_replace": 0}  # fmt: skip
    config = config_from_hf({"model_type": "deepseek_v3", **shape})
    there = step(jzero.from_flax(lambda rngs: Decoder(config, rngs=rngs)), stage=1, zero=2)
    params = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), there.state_shapes.params)
    params["stack"]["mlp"]["bias"] = bias = (4 + 0.001 * np.arange(8, dtype="f4"))[None]
    made = jzero.Engine(there, jax.random.key(0), params=params)
    made.save_checkpoint(tmp_path / "ckpt").wait()
    weights.export(tmp_path / "ckpt", tmp_path / "out", dtype="bfloat16")
    made.save_16bit_model(tmp_path / "saved")
    for directory in ("out", "saved"):
        found = load_file(tmp_path / directory / "model.safetensors")
        dtypes = {str(x.dtype) for name, x in found.items() if "correction_bias" not in name}
        assert dtypes == {"bfloat16"}
        np.testing.assert_array_equal(found["model.layers.0.mlp.gate.e_score_correction_bias"], bias[0])
