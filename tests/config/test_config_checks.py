"""All problems at once; what asks for recomputation; reprs."""

import re

import pytest
from helpers.configs import TUTORIAL_ZERO3, problems

from jzero import config as config_module
from jzero.config import Config
from jzero.errors import ConfigError
from jzero.optimizers import table


def test_all_problems_come_at_once():
    found = problems({
        "train_batch_sise": 1, "seed": "x", "fp16": {"enabled": True, "hysteresis": -1}, "bf16": {"enabled": True},
        "wandb": {"enabled": "on", "projet": "p"}, "zero_optimization": {"stage": 9, "reduce_bucket_size": "big"},
        "optimizer": {}, "mesh": {"tensor": 0},
    })  # fmt: skip
    expected = [
        "train_batch_sise", "seed", "fp16.hysteresis", "fp16.enabled = true and bf16", "wandb.enabled", "wandb.projet",
        "zero_optimization.stage", "zero_optimization.reduce_bucket_size", "optimizer.type", "mesh.tensor",
    ]  # fmt: skip
    assert sorted(found) == sorted(next(f for f in found if f.startswith(start)) for start in expected)
    with pytest.raises(ConfigError, match="- seed = ") as error:
        Config(seed="x", stage=1)
    assert len(error.value.problems) == 2, "the constructor checks like load"


def test_the_optimizers_and_the_schedulers_problems_come_with_the_others():
    wrong = {"optimizer": {"type": "Adamm"}, "scheduler": {"type": "X"}, "gradient_cliping": 1, "mesh": {"tensor": 0}}
    found = problems(wrong)
    starts = ["gradient_cliping = 1", "mesh.tensor = 0", "optimizer.type: 'Adamm'", "scheduler.type: 'X'"]
    assert [start for start, line in zip(starts, sorted(found), strict=True) if not line.startswith(start)] == []
    several = {
        "optimizer": {"type": "SGD", "params": {"lr": -1, "max_grad_norm": 1.0, "epsilon": 1}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": -1, "warmup_typ": "log"}},
    }
    keys_of = [re.match(r"[\w.]+", line)[0].split(".params.")[1] for line in problems(several)]
    assert sorted(keys_of) == ["epsilon", "lr", "max_grad_norm", "warmup_num_steps", "warmup_typ"]


@pytest.mark.parametrize("name", [*table.DEEPSPEED, *table.OPTAX_ELEMENTWISE, *table.OPTAX_PER_PARAMETER])
def test_an_optimizer_needs_little_but_its_type(name):
    assert Config.load({"optimizer": {"type": name, "params": {}}}).optimizer.params == {}


@pytest.mark.parametrize(
    ("section", "kind"),
    [
        ({}, "none"),
        ({"partition_activations": False, "cpu_checkpointing": False, "number_checkpoints": None}, "none"),
        ({"partition_activations": True, "contiguous_memory_optimization": True, "profile": True}, "none"),
        ({"cpu_checkpointing": True}, "full"),
        ({"policy": "matmuls"}, "matmuls"),
        ({"policy": "matmuls", "cpu_checkpointing": True}, "matmuls"),
        ({"policy": "none"}, "none"),
        ({"policy": "full"}, "full"),
    ],
)
def test_only_what_asks_for_recomputation_gets_it(section, kind):
    assert Config.load({"activation_checkpointing": section}).activation_checkpointing.kind == kind


def test_config_is_frozen():
    with pytest.raises(ValueError, match="frozen"):
        Config().seed = 1


def test_repr_shows_the_differences_and_builds_the_config_again():
    config = Config.load({**TUTORIAL_ZERO3, "activation_checkpointing": {}, "mesh": {"data": 2}})
    assert repr(Config.load({"seed": 3, "zero_optimization": {"stage": 2}})) == (
        "Config(zero_optimization=ZeroConfig(stage=2), seed=3)"
    )
    again = eval(repr(config), vars(config_module))
    assert again.model_dump() == config.model_dump()
