"""The recipes: their configs are valid, the planner says that each fits; and `jzero demo` learns."""

import functools
import importlib
import json
import operator
from pathlib import Path

import numpy as np
import pytest
from helpers.cuda import needs_cuda_compiler

import jzero
from jzero import cli
from jzero.planner.named_models import tokens
from jzero.recipes import recipe_table
from jzero.recipes.demo import PROMPTS, train_demo
from jzero.recipes.recipe_table import load_recipes

ROOT = Path(__file__).parents[2]
RECIPES, NAME = load_recipes(), operator.attrgetter("name")
find_model = functools.cache(recipe_table.find_model)


@pytest.mark.parametrize("recipe", RECIPES, ids=NAME)
def test_configs_are_valid_and_figures_are_plausible(recipe, monkeypatch):
    """A run takes all its tokens; a GPU has no more memory than it has, nor computes faster than its peak in bf16."""
    monkeypatch.setattr(recipe_table, "find_model", find_model)  # recipes share models
    config = jzero.Config.load(recipe.config)
    rows, micro = config.train_batch_size, config.train_micro_batch_size_per_gpu
    assert rows % (micro * recipe.gpus) == 0
    schedule, rate = recipe.config["scheduler"]["params"], recipe.config["optimizer"]["params"]["lr"]
    assert schedule["init_value"] == pytest.approx(rate / schedule["warmup_steps"], rel=0.05)
    assert schedule["peak_value"] == rate
    steps = schedule["decay_steps"]
    assert steps * rows * recipe.sequence == pytest.approx(recipe.tokens, rel=0.06)
    assert 0 < recipe.plan["peak_gib"] < {"h100": 79, "h200": 139}[recipe.gpu]
    trained = 6 if recipe.method == "pretrain" else 4  # FLOPs a parameter: LoRA has no gradient of the weights
    parameters = 1e9 * float(recipe.model.split("-")[1].rstrip("b"))
    assert 0.1 < recipe.plan["tokens_per_s_gpu"] * trained * parameters / 989e12 < 1


@pytest.mark.slow
@pytest.mark.gpu_compile
@needs_cuda_compiler
@pytest.mark.parametrize("recipe", RECIPES, ids=NAME)
def test_each_fits_and_its_figures_are_those_of_the_planner(recipe, no_compilation_cache):
    cluster = {"gpu": recipe.gpu, "nodes": recipe.nodes, "gpus_per_node": recipe.gpus_per_node}
    made = jzero.plan(recipe.make_model(), recipe.config, tokens(recipe.sequence), **cluster)
    assert made.memory.fits
    assert made.memory.peak_bytes / 2**30 == pytest.approx(recipe.plan["peak_gib"], rel=0.03)
    speed = recipe.config["train_batch_size"] * recipe.sequence / made.time.step_s / recipe.gpus
    assert speed == pytest.approx(recipe.plan["tokens_per_s_gpu"], rel=0.05)


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.gpu_compile
@needs_cuda_compiler
@pytest.mark.parametrize("recipe", [recipe for recipe in RECIPES if recipe.searched], ids=NAME)
def test_a_search_finds_none_more_than_5_percent_faster(recipe, monkeypatch):
    """Of micro-batch and recomputation. A commit runs a part of the recipes, `--matrix-part`."""
    monkeypatch.syspath_prepend(ROOT / "docs")
    assert importlib.import_module("recipes").searched(recipe).config == recipe.config


def test_the_command_lists_them_and_prints_a_config(capsys, monkeypatch):
    """Some of them: the figures of each are computed from its model."""
    some = [recipe for recipe in RECIPES if recipe.name.startswith("llama3-8b-pretrain-")][:3]
    monkeypatch.setattr("jzero.recipes.recipe_table.load_recipes", lambda: some)
    assert cli.main(["recipes", "--price", "3"]) == 0
    printed = capsys.readouterr().out
    for recipe in some:
        assert recipe.name in printed
        assert f"${recipe.hours * recipe.gpus * 3:,.0f}" in printed
    assert cli.main(["recipes", "--price", "-1"]) == 2
    assert "--price -1.0: must be a number of dollars" in capsys.readouterr().err
    assert cli.main(["recipes", recipe.name]) == 0
    assert jzero.Config.load(json.loads(capsys.readouterr().out)) == jzero.Config.load(recipe.config)
    assert cli.main(["recipes", "llama3-8b-pretrain-9xh100"]) == 2
    assert "must be one of jzero recipes; did you mean" in capsys.readouterr().err


@pytest.mark.slow
def test_the_demo_learns(capsys):
    """A byte at random costs log 256 = 5.5 nats; knowing how often each byte comes about 3.1."""
    found = train_demo(steps=60)
    printed = capsys.readouterr().out
    assert len(found.losses) == 60
    assert found.losses[0] == pytest.approx(np.log(256), abs=0.6)
    assert np.mean(found.losses[-10:]) < 2.7
    assert found.held_out < 2.7
    for prompt, sample in zip(PROMPTS, found.samples, strict=True):
        assert sample.startswith(prompt)
        assert len(sample) == len(prompt) + 160
        assert sample in printed
    assert "1 .. 60 steps" in printed
