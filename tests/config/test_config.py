"""Configs: what loads and where it comes from, and mistakes, which come all at once, a line each."""

import base64
import copy
import json
import pickle
import re
from pathlib import Path

import pytest
from helpers.configs import TUTORIAL_ZERO3, nest, problem, problems
from helpers.curricula import LEGACY
from helpers.refusals import refuses
from helpers.stored_cases import check_cases

from jzero import config as config_module
from jzero.config import Config, keys, screen
from jzero.errors import ConfigError
from jzero.optimizers import table


def test_every_source_gives_the_same_config(tmp_path):
    given, text = copy.deepcopy(TUTORIAL_ZERO3), json.dumps(TUTORIAL_ZERO3)
    expected = Config.load(given)
    assert given == TUTORIAL_ZERO3, "load must not change the caller's dict"
    file, with_comment = tmp_path / "ds.json", tmp_path / "ds.hjson"
    file.write_text(text)
    with_comment.write_text("# a comment\n" + text.replace('"train_batch_size"', "train_batch_size"))
    encoded = base64.urlsafe_b64encode(text.encode()).decode()
    for source in (file, str(file), with_comment, encoded, encoded.rstrip("=")):
        assert Config.load(source) == expected
    assert Config.load(expected) is expected
    assert pickle.loads(pickle.dumps(expected)) == expected
    assert eval(repr(expected), vars(config_module)).model_dump() == expected.model_dump()


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        (b'{"seed": [1,', ["neither JSON nor hjson"]),
        (b"[1, 2]", ["must be a JSON object"]),
        (b"\xff\xfe\xff", ["cannot be read"]),
        (None, ["ds.json", "no such file", "hjson", "dict", "base64"]),
    ],
)
def test_a_file_that_is_no_config(content, parts, tmp_path):
    if content is not None:
        (tmp_path / "ds.json").write_bytes(content)
    message = problem(str(tmp_path / "ds.json"))
    assert [part for part in parts if part not in message] == []


def test_what_is_no_source(tmp_path):
    assert "is a directory" in problem(tmp_path)
    assert problem('{"seed": 1}').endswith("is JSON text, not a path; pass json.loads(text)")
    assert "got int" in problem(3)


@pytest.mark.parametrize("comment", ["", "# hjson\n"])
def test_duplicate_keys_at_any_depth(tmp_path, comment):
    file = tmp_path / "twice.json"
    file.write_text(comment + '{"seed": 1, "seed": 1, "fp16": {"enabled": true, "enabled": false}}')
    first, second = problems(file)
    assert first.startswith("seed: given twice")
    assert second.startswith("fp16.enabled: given twice")
    assert "given twice" in problem(base64.urlsafe_b64encode(b'{"seed": 1, "seed": 2}').decode())


def test_each_mistake_is_one_line(pytestconfig):
    """No contradiction follows from a key that is misspelled."""

    def outcome(given):
        (line,) = refuses(lambda: Config.load(given).mesh_degrees(8)).splitlines()
        return line

    check_cases(Path(__file__).with_name("mistakes.jsonl"), outcome, pytestconfig)
    assert problem({3: 4}).startswith("3 = 4: unknown key")


def test_all_problems_come_at_once():
    found = problems({
        "train_batch_sise": 1, "seed": "x", "fp16": {"enabled": True, "hysteresis": -1}, "bf16": {"enabled": True},
        "wandb": {"enabled": "on", "projet": "p"}, "zero_optimization": {"stage": 9, "reduce_bucket_size": "big"},
        "optimizer": {"type": "Adamm"}, "scheduler": {"type": "X"}, "mesh": {"tensor": 0}, "ema": {"decay": 1},
        "curriculum_learning": {"enabled": True},
    })  # fmt: skip
    expected = [
        "train_batch_sise", "seed", "fp16.hysteresis", "fp16.enabled = true and bf16", "wandb.enabled", "wandb.projet",
        "zero_optimization.stage", "zero_optimization.reduce_bucket_size", "optimizer.type: 'Adamm'",
        "scheduler.type: 'X'", "mesh.tensor = 0", "ema.decay", "curriculum_learning.min_difficulty: required",
        "curriculum_learning.max_difficulty: required", "curriculum_learning.schedule_type: required",
    ]  # fmt: skip
    assert sorted(found) == sorted(next(f for f in found if f.startswith(start)) for start in expected)
    assert not any("quotes" in line for line in found if line.startswith("seed")), "advice fits the value"
    several = {
        "optimizer": {"type": "SGD", "params": {"lr": -1, "max_grad_norm": 1.0, "epsilon": 1}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": -1, "warmup_typ": "log"}},
    }
    keys_of = [re.match(r"[\w.]+", line)[0].split(".params.")[1] for line in problems(several)]
    assert sorted(keys_of) == ["epsilon", "lr", "max_grad_norm", "warmup_num_steps", "warmup_typ"]
    with pytest.raises(ConfigError, match="- seed = ") as error:
        Config(seed="x", stage=1)
    assert len(error.value.problems) == 2, "the constructor checks like load"


def test_an_optimizer_needs_little_but_its_type():
    for name in (*table.DEEPSPEED, *table.OPTAX_ELEMENTWISE, *table.OPTAX_PER_PARAMETER):
        assert Config.load({"optimizer": {"type": name, "params": {}}}).optimizer.params == {}


@pytest.mark.parametrize(
    ("section", "kind"),
    [
        ({}, "none"),
        ({"partition_activations": True, "contiguous_memory_optimization": True, "profile": True}, "none"),
        ({"cpu_checkpointing": True}, "full"),
        ({"policy": "matmuls", "cpu_checkpointing": True}, "matmuls"),
        ({"policy": "none"}, "none"),
    ],
)
def test_only_what_asks_for_recomputation_gets_it(section, kind):
    assert Config.load({"activation_checkpointing": section}).activation_checkpointing.kind == kind


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        ("gradient_allreduce_op", "SUM", "sum"),
        ("communication_data_type", "bfloat16", "bf16"),
        ("communication_data_type", "torch.half", "fp16"),
        ("data_types.grad_accum_dtype", None, "fp32"),
        ("gradient_clipping", True, 1.0),
        ("gradient_clipping", False, 0.0),
        ("train_batch_size", 32.0, 32),
        ("frozen_parameters", ["embed.*", "^head$"], ("embed.*", "^head$")),
        ("compiler_options", {"a": True, "b": 1, "c": 1.5, "d": "auto"}, {"a": True, "b": 1, "c": 1.5, "d": "auto"}),
        ("zero_optimization.mics_shard_size", -1, -1),
        ("zero_optimization", True, config_module.ZeroConfig(stage=1)),
        ("bf16.auto_cast", "auto", "auto"),
        ("fp16.initial_scale_power", 127, 127),
        ("fp16.loss_scale", 3e38, 3e38),
        ("fp16.min_loss_scale", 0.25, 0.25),
    ],
)
def test_accepted_values(path, value, expected):
    node = Config.load(nest(path, value))
    for key in path.split("."):
        node = getattr(node, key)
    assert node == expected
    assert type(node) is type(expected)


def test_every_replaced_key_loads_and_is_reported():
    for path in filter(keys.is_replaced, keys.KEYS):
        row = keys.KEYS[path]
        value = next(v for v in (True, 4, ["a"], "fp32", "info", "Fail") if _parses(row.kind, v))
        good, wrong = nest(path, value), nest(path, {"a": 1})
        if path.startswith("optimizer."):
            for given in (good, wrong):
                given["optimizer"]["type"] = "adam"
        (entry,) = Config.load(good).replaced
        assert entry == (path, value, row.text)
        message = problem(wrong)
        assert message.startswith(f'{path} = {{"a": 1}}: must be')
        assert message.endswith(f"; or leave it out (replaced by {row.text})")


def _parses(kind, value) -> bool:
    try:
        kind(value)
    except ValueError:
        return False
    return True


def test_what_asks_for_nothing_loads_in_silence():
    """The default of every key is in tests/golden/config.json."""
    given = {
        "tensorboard": {}, "nebula": False, "elasticity": {"enabled": False, "min_gpus": 2}, "aio": {},
        "pipeline": {"stages": "auto"}, "sequence_parallel_size": 1, "sparse_attention": {}, "log_level": None,
        "tensor_parallel": {"autotp_size": 0, "tp": {"tp_size": 1}, "keep_module_on_host": False},
        "checkpoint": {"use_node_local_storage": False, "writer": {}}, "amp": {"enabled": False},
        "torch_autocast": {"enabled": False, "dtype": "bfloat16"}, "vocabulary_size": None, "mesh": {"pipe": 1},
        "autotuning": {"enabled": "auto", "fast": True}, "optimizer": None, "compile": {"passes": None},
        "zero_optimization": {
            "offload_param": {"device": "none"}, "offload_optimizer": None, "cpu_offload": False, "zenflow": {},
            "zero_quantized_weights": False, "zeropp_loco_param": None, "overlap_comm": None,
        },
        "compression_training": {
            "weight_quantization": {"shared_parameters": {"enabled": False}, "different_groups": {}},
        },
    }  # fmt: skip
    config = Config.load(given)
    assert repr(config) == str(config) == "Config()"
    assert (config.replaced, config.ignored) == ((), ())


def test_no_row_hides_a_field():
    assert not set(screen.FIELDS) & set(keys.KEYS)


def test_a_curriculum_that_is_off_loads():
    learning = {"enabled": False, "curriculum_metrics": {"any": {}}}
    sampling = {"enabled": True, "curriculum_learning": learning, "num_epochs": 3, "pin_memory": True}
    newer = {"data_efficiency": {"enabled": True, "data_sampling": sampling}}
    config = Config.load({"curriculum_learning": {**LEGACY, "enabled": False}, **newer})
    assert config.curricula == {}
    assert [r.key.rpartition(".")[2] for r in config.replaced] == ["num_epochs", "pin_memory"]
