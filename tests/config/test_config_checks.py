"""Settings that contradict each other; all problems at once; reprs."""

import re

import pytest
from helpers.configs import TUTORIAL_ZERO3, problem, problems

from jzero import config as config_module
from jzero.config import Config
from jzero.errors import ConfigError
from jzero.optimizers import table


@pytest.mark.parametrize(
    ("given", "parts"),
    [
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, ["fp16.enabled = true and bf16.enabled = true"]),
        ({"bf16": {"bf16_optimizer_states": True}}, ["needs bf16.bf16_master_weights_and_grads"]),
        ({"bf16": {"enabled": True}, "bfloat16": {"enabled": True}}, ["bfloat16", "another name of bf16"]),
        ({"zero_optimization": {"mics_shard_size": 2}, "mesh": {"zero": 4}}, ["mics_shard_size = 2", "mesh.zero = 4"]),
        ({"mesh": {"data": -1}}, ["mesh.data = -1 and mesh.zero = -1", "one axis only", "default of mesh.zero"]),
        ({"mesh": {"data": -1, "zero": -1}}, ["mesh.data = -1 and mesh.zero = -1", "one axis only"]),
        (
            {"optimizer": {"type": "Adam", "params": {"max_grad_norm": 1.0}}},
            ["optimizer.params.max_grad_norm = 1.0", '"gradient_clipping"'],
        ),
        (
            {"activation_checkpointing": {"policy": "none", "cpu_checkpointing": True}},
            ["cpu_checkpointing = true", 'policy "full"'],
        ),
        (
            {"zero_optimization": {k: True for k in (
                "stage3_gather_fp16_weights_on_model_save", "stage3_gather_16bit_weights_on_model_save")}},
            ["deprecated name of zero_optimization.stage3_gather_16bit_weights_on_model_save"],
        ),
        (
            {"zero_optimization": {"cpu_offload": False, "offload_optimizer": {"device": "none"}}},
            ["cpu_offload = false", "deprecated name of zero_optimization.offload_optimizer"],
        ),
    ],
)  # fmt: skip
def test_contradictions(given, parts):
    message = problem(given)
    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    "given",
    [
        {"tensor_parallel": {"autotp_size": 2, "tp": {"tp_size": 4}}},
        {"tensor_parallel": {"autotp_size": 2}, "mesh": {"tensor": 4}},
    ],
)
def test_two_degrees_of_tensor(given):
    assert problem(given).startswith("tensor_parallel.autotp_size = 2 and ")
    assert problem(given).endswith("= 4: both are the degree of tensor; keep one")


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


def test_no_contradiction_is_invented_from_a_wrong_value():
    found = problem({"bf16": {"bf16_optimizer_states": True, "bf16_master_weights_and_grads": "yes"}})
    assert found.startswith("bf16.bf16_master_weights_and_grads")
    assert problem({"zero_optimization": 3, "mesh": {"data": -1}}).startswith("zero_optimization = 3")


def test_the_old_name_of_bf16_works():
    assert Config.load({"bfloat16": {"enabled": True}}).precision == "bf16"


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
