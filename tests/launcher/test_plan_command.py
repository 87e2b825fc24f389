"""The command `jzero plan`: what it prints and writes, and one line for each mistake."""

import dataclasses
import json
import re
import shlex
import sys
from importlib.metadata import PackageNotFoundError, version
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import jax
import pytest
from helpers.cuda import on_gpu
from helpers.regression import Regression
from helpers.sampling import keep
from helpers.stored_cases import check_cases

from jzero import cli, make_train_step
from jzero.planner import gpus, named_models, plan_command, plan_facts
from jzero.planner.memory import CUDA_ROOM, NCCL_ROOM
from jzero.planner.state_bytes import state_bytes
from jzero.recipes.recipe_table import load_recipes
from models import named as published

CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
}
TINY = "--model llama:tiny --set num_layers=1 --seq 128"


@pytest.fixture
def jzero_plan(tmp_path, monkeypatch, capsys):
    """Run `jzero plan` on a config; returns (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])

    def run(options="", **changes):
        (tmp_path / "config.json").write_text(json.dumps(CONFIG | changes))
        code = cli.main(["plan", "config.json", *options.split()])
        return code, *capsys.readouterr()

    return run


@on_gpu
def test_a_plan(jzero_plan, tmp_path, monkeypatch):
    """In a source tree that is not installed, too: only the record names versions."""
    made, lower = [], plan_command.lower_step

    def once(*arguments):  # compiled once, printed and recorded
        lowered = lower(*arguments)
        return SimpleNamespace(plan=lambda rates: made[0] if made else made.append(lowered.plan(rates)) or made[0])

    monkeypatch.setattr(plan_command, "lower_step", once)
    (tmp_path / "mine_of_tokens.py").write_text(
        "import jax, jax.numpy as jnp\n"
        "class make:\n"
        "    def init(self, rng): return {'w': jnp.zeros((256, 64))}\n"
        "    def loss(self, params, batch, rng): return jnp.mean(params['w'][batch['inputs']] ** 2)\n"
    )
    options = "--model mine_of_tokens:make --seq 128 --gpu h100 --nodes 2 --gpus_per_node 2 --tokens 1e9 --price 2"
    with monkeypatch.context() as patch:
        patch.setattr(plan_facts, "version", Mock(side_effect=PackageNotFoundError("jzero")))
        code, out, _ = jzero_plan(options)
    assert code == 0
    for words in ("on 4 x NVIDIA H100", "batch 4 = 1 per GPU", "peak", "reduce-scatter", "GPU-hours", "cost"):
        assert words in out
    assert jzero_plan(f"{options} --json plan.json")[:2] == (0, out)
    record = json.loads((tmp_path / "plan.json").read_text())
    assert (record["gpu"]["nodes"], record["gpu"]["count"], record["layout"]["tokens"]) == (2, 4, 4 * 128)
    assert record["budget"]["cost"] == pytest.approx(2 * record["budget"]["gpu_hours"])


@pytest.mark.slow
@on_gpu
def test_a_step_that_cannot_fit(jzero_plan, monkeypatch):
    monkeypatch.setitem(gpus.GPUS, "h100", dataclasses.replace(gpus.GPUS["h100"], memory=NCCL_ROOM + CUDA_ROOM + 2**20))
    code, out, said = jzero_plan(f"{TINY} --gpu h100 --gpus_per_node 2")
    assert code == 2
    assert "does not fit" in out
    assert "largest: " in said


def test_a_missing_config_comes_before_a_missing_compiler(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(gpus, "_topology", None)
    assert cli.main(["plan", "absent.json"]) == 2
    assert "absent.json" in capsys.readouterr().err


WITHOUT = [
    ("llama3-70b", None, True), ("qwen3-32b", None, False), ("gpt2:small", "b200", False),
    *((model, "h100", True) for model in sorted({recipe.model for recipe in load_recipes()})),
]  # fmt: skip


@pytest.mark.parametrize(("model", "gpu", "recipe"), keep(WITHOUT, [WITHOUT[0], WITHOUT[2]]))
def test_without_a_config_it_names_commands_that_work(tmp_path, monkeypatch, capsys, model, gpu, recipe):
    """A published model's recipe on the GPU that was asked for; otherwise a config whose open keys a search chooses."""
    monkeypatch.chdir(tmp_path)
    assert cli.main(["plan", "--model", model, *(["--gpu", gpu] if gpu else [])]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    write, plan = line.partition("these commands plan one: ")[2].split("; ")
    words = shlex.split(write)
    assert words[-2:] == [">", "plan.json"]  # a directory of `transformers` has a config.json of its own
    assert (words[0] == "jzero", plan.endswith(" --search")) == (recipe, not recipe)
    if recipe:
        assert cli.main(words[1:-2]) == 0
        written = capsys.readouterr().out
    else:
        written = words[1]
    (tmp_path / "plan.json").write_text(written)
    assert cli.main([*shlex.split(plan.removesuffix(" --search"))[1:], "--formula"]) == 0
    table = capsys.readouterr().out
    assert "model state per GPU" in table
    assert gpus.GPUS[gpu or "h200"].description in table


def test_without_a_config_adapters_have_their_recipe(capsys):
    assert cli.main(["plan", "--model", "llama3-8b", "--gpu", "h100", "--adapters", "qlora"]) == 2
    plan = "jzero plan plan.json --model llama3-8b --gpu h100 --adapters qlora --nodes 1 --gpus_per_node 1"
    assert f"jzero recipes llama3-8b-qlora-1xh100 > plan.json; {plan}\n" in capsys.readouterr().err


def test_the_formula_needs_no_compiler(jzero_plan, monkeypatch):
    """Stage 3: 16 bytes of each parameter over 8 GPUs, and the sum of one micro-batch is in bf16."""
    name, size = "moe:mixtral-8x7b", 46_702_792_704  # the elements in the files of mistralai/Mixtral-8x7B-v0.1
    assert published.find_model(name).shape.num_parameters == size
    monkeypatch.setattr(gpus, "_topology", None)
    code, out, _ = jzero_plan(f"--model {name} --formula")
    assert code == 0
    (row,) = [line for line in out.splitlines() if "<- the config's" in line]
    assert row.split()[0] == "3"
    assert f"{16 * size / 8 / 2**30:.1f} GiB" in row


LLAMA_TINY = {
    "model_type": "llama", "num_hidden_layers": 1, "hidden_size": 128, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 384, "vocab_size": 256,
}  # fmt: skip


def test_adapters_of_ones_own_model(jzero_plan, tmp_path, monkeypatch):
    """Masters have 4 bytes of a trained element and 2 of a frozen one; of those in NF4 4.13 bits.

    The model of a name and of a directory are the same.
    """
    (tmp_path / "directory").mkdir()
    (tmp_path / "directory" / "config.json").write_text(json.dumps(LLAMA_TINY))
    seen = []
    monkeypatch.setattr(
        plan_command, "formula", lambda *given: seen.append(state_bytes(make_train_step(*given[:2]))) or ""
    )
    for model, adapters in (("directory", "lora"), ("llama:tiny --set num_layers=1", "qlora")):
        options = f"--model {model} --adapters {adapters} --rank 8 --seq 128 --formula"
        assert jzero_plan(options, zero_optimization={"stage": 0})[0] == 0
    lora, qlora = seen
    # q and o, k and v, gate and up and down: in + out for each element of the rank.
    trained = 8 * (2 * (128 + 128) + 2 * (128 + 64) + 3 * (128 + 384))
    shape = named_models._changed(published.find_model("llama:tiny").shape, ["num_layers=1"])
    assert lora.masters == 4 * trained + 2 * shape.num_parameters
    assert lora.gradients == qlora.gradients == 2 * trained
    matrices = 2 * 128 * (128 + 64) + 3 * 128 * 384
    assert lora.masters - qlora.masters == pytest.approx(matrices * (16 - 4.13) / 8, rel=0.01)


SIZES = {
    "llama:8b": 7.242, "llama3.2-1b": 1.236, "llama3.2-3b": 3.213, "llama3.1-8b": 8.030, "llama3.1-70b": 70.554,
    "llama3.1-405b": 405.853, "mistral-7b": 7.248, "qwen3-0.6b": 0.596, "qwen3-1.7b": 1.721, "qwen3-4b": 4.022,
    "qwen3-8b": 8.191, "qwen3-14b": 14.768, "qwen3-32b": 32.762, "moe:qwen3-30b-a3b": 30.532,
}  # fmt: skip


@pytest.mark.parametrize("name", keep(SIZES, ["llama:8b", "llama3.2-1b", "qwen3-8b", "moe:qwen3-30b-a3b"]))
def test_published_models_have_their_sizes(name):
    """The numbers of elements in the files of these downloads, in billions."""
    assert published.find_model(name).shape.num_parameters / 1e9 == pytest.approx(SIZES[name], abs=6e-4)


def test_a_preset_says_what_it_is_and_its_fields_change():
    said = "llama:8b has the layers of llama3-8b, and a vocabulary of 32,000 instead of 128,256"
    assert named_models.about("llama:8b") == said
    assert named_models.about("llama:8b", ["vocab_size=128256"]) == named_models.about("qwen3-8b") == ""
    for name, field, text, value in (
        ("llama:8b", "rope_theta", "1000000", 1e6),
        ("llama:8b", "family", "123", "123"),
        ("moe:mixtral-8x7b", "mixture.capacity_factor", "1.25", 1.25),
    ):
        shape = named_models._changed(published.find_model(name).shape, [f"{field}={text}"])
        assert attrgetter(field)(shape) == value


VIT = {
    "model_type": "vit", "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64,
    "image_size": 16, "patch_size": 4, "num_channels": 3,
}  # fmt: skip


def test_one_line_for_each_mistake(jzero_plan, tmp_path, pytestconfig):
    """Nothing is compiled: `--formula` reads the same options."""

    def outcome(options):
        code, _, said = jzero_plan(f"--formula {options}")
        assert (code, said.count("\n")) == (2, 1)
        return re.sub("((?:one of|allowed:) [^,]+), [^;]*", r"\1, ...", said.strip())  # lists that grow

    (tmp_path / "broken.py").write_text("def make():\n    raise RuntimeError('no weights here')\n")
    (tmp_path / "vit").mkdir()
    (tmp_path / "vit" / "config.json").write_text(json.dumps(VIT))
    check_cases(Path(__file__).with_name("plan_mistakes.jsonl"), outcome, pytestconfig)
    code, _, said = jzero_plan("--formula", trainable_parameters=["lora_"])
    assert (code, "has lora_: llama:8b has none; add --adapters lora or qlora" in said) == (2, True)
    code, _, said = jzero_plan("--formula", mesh={"pipe": 3})
    assert (code, "mesh.pipe = 3" in said) == (2, True)


def test_a_plugin_of_another_jaxlib(jzero_plan, monkeypatch):
    versions = {"jaxlib": "0.10.2", "jax-cuda12-plugin": "0.9.9"}
    monkeypatch.setattr(gpus.topologies, "get_topology_desc", Mock(side_effect=NotImplementedError("cuda")))
    monkeypatch.setattr(gpus, "version", lambda name: versions.get(name) or version("absent"))
    monkeypatch.setattr(gpus.importlib.util, "find_spec", lambda name: versions)
    gpus._topology.cache_clear()
    code, _, said = jzero_plan(TINY)
    assert (code, said.count("\n")) == (2, 1)
    assert "jax-cuda12-plugin 0.9.9 is not for jaxlib 0.10.2" in said


def with_batch():
    return Regression(), lambda rows: {"x": jax.ShapeDtypeStruct((rows, 3), "float32")}


@on_gpu
def test_a_batch_that_does_not_fit(jzero_plan, monkeypatch):
    """Its own model takes no tokens: they cannot be counted, or the loss fails on them."""
    code, _, said = jzero_plan("--model helpers.regression:Regression --gpus_per_node 1")
    assert (code, "the loss fails on the planned batch: KeyError: 'x'" in said) == (2, True)
    monkeypatch.setattr(plan_command, "lower_step", lambda *_, **__: pytest.fail("compiled before it was refused"))
    code, _, said = jzero_plan("--model test_plan_command:with_batch --gpus_per_node 1 --tokens 1e9")
    assert (code, said.count("\n")) == (2, 1)
    assert "--tokens: the batch of test_plan_command:with_batch has no tokens" in said
