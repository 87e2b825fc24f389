"""Configs: what loads unchanged and where it comes from, all problems at once, every value and key, reprs."""

import base64
import copy
import json
import pickle
import re

import pytest
from helpers.configs import TUTORIAL_ZERO3, nest, problem, problems
from test_config_corpus import MANNERS, SCALER

from jzero import config as config_module
from jzero.config import Config, keys, screen
from jzero.errors import ConfigError
from jzero.optimizers import table

HF_AUTO = MANNERS["the Trainer, ZeRO-3"]
FP16_DYNAMIC = {
    "train_batch_size": 512, "train_micro_batch_size_per_gpu": 4, "steps_per_print": 1, "gradient_clipping": 0.5,
    "prescale_gradients": True, "zero_allow_untested_optimizer": True, "wall_clock_breakdown": False,
    "optimizer": {"type": "Adam", "params": {"lr": 1.5e-4}},
    "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 2000, "total_num_steps": 10000}},
    "fp16": {"enabled": True, "auto_cast": False, **SCALER, "initial_scale_power": 12, "loss_scale_window": 500},
    "zero_optimization": {"stage": 1, "reduce_bucket_size": 5e8, "allgather_bucket_size": 5e8},
    "activation_checkpointing": {
        "partition_activations": True, "contiguous_memory_optimization": False, "cpu_checkpointing": True,
        "number_checkpoints": 8, "synchronize_checkpoint_boundary": False, "profile": False,
    },
    "tensorboard": {"enabled": False, "output_path": "logs/", "job_name": "run"},
    "flops_profiler": {"enabled": False, "profile_step": 1, "detailed": True},
}  # fmt: skip


def test_tutorial_zero3_config():
    config = Config.load(TUTORIAL_ZERO3)
    assert config.precision == "bf16"
    assert config.batch(8) == (64, 4, 2, "train_micro_batch_size_per_gpu = 4")
    assert (config.zero_optimization.stage, config.zero_optimization.stage3_param_persistence_threshold) == (3, 100_000)
    assert config.optimizer.params["betas"] == [0.9, 0.95]
    assert {r.key.removeprefix("zero_optimization.") for r in config.replaced} == {
        "contiguous_gradients", "overlap_comm", "reduce_scatter", "stage3_max_live_parameters", "sub_group_size",
        "stage3_max_reuse_distance", "stage3_prefetch_bucket_size", "reduce_bucket_size",
    }  # fmt: skip
    bucket = next(r for r in config.replaced if r.key == "zero_optimization.reduce_bucket_size")
    assert bucket.value == 1e7
    assert "combiner" in bucket.by


def test_hugging_face_auto_config():
    given = copy.deepcopy(HF_AUTO)
    config = Config.load(given)
    assert given == HF_AUTO, "load must not change the caller's dict"
    assert config.precision == "fp32"
    assert config.gradient_clipping == 1.0
    assert config.optimizer.params == HF_AUTO["optimizer"]["params"], "what the word means depends on the type"
    assert config.scheduler.params == HF_AUTO["scheduler"]["params"]
    assert config.zero_optimization.stage3_param_persistence_threshold == 100_000
    assert ("zero_optimization.reduce_bucket_size", "auto") in {(r.key, r.value) for r in config.replaced}
    assert config.batch(4) == (32, 8, 1, "train_batch_size = 32, gradient_accumulation_steps = 1")


def test_fp16_dynamic_scale_config():
    config = Config.load(FP16_DYNAMIC)
    assert config.precision == "fp16"
    assert (config.fp16.initial_scale_power, config.fp16.loss_scale_window, config.fp16.loss_scale) == (12, 500, 0)
    assert config.activation_checkpointing.policy is None
    assert config.activation_checkpointing.kind == "full", "what cpu_checkpointing asks for"
    assert config.activation_checkpointing.cpu_checkpointing
    by = {r.key: r.by for r in config.replaced}
    assert "mesh.tensor" in by["activation_checkpointing.partition_activations"]
    assert config.fp16.auto_cast is False
    assert by.keys() >= {"prescale_gradients", "zero_allow_untested_optimizer", "activation_checkpointing.profile"}
    assert config.batch(16).accum == 8


def test_an_empty_config():
    """The default of every key is in tests/golden/config.json."""
    config = Config.load({})
    assert config == Config()
    assert repr(config) == str(config) == "Config()"
    assert config.replaced == ()
    assert Config.load({"train_batch_size": 1, "steps_per_print": 9999999999}).steps_per_print == 9999999999  # never


def test_every_source_gives_the_same_config(tmp_path):
    text = json.dumps(FP16_DYNAMIC)
    (tmp_path / "ds.json").write_text(text)
    (tmp_path / "ds.hjson").write_text("# a comment\n" + text.replace('"train_batch_size"', "train_batch_size"))
    encoded = base64.urlsafe_b64encode(text.encode()).decode()
    expected = Config.load(FP16_DYNAMIC)
    file = tmp_path / "ds.json"
    for source in (file, str(file), tmp_path / "ds.hjson", encoded, encoded.rstrip("=")):
        assert Config.load(source) == expected
    assert Config.load(expected) is expected
    assert pickle.loads(pickle.dumps(expected)) == expected


def test_missing_or_unreadable_file_names_the_path_and_the_alternatives(tmp_path):
    message = problem(str(tmp_path / "none.json"))
    assert all(part in message for part in ("none.json", "no such file", "hjson", "dict", "base64"))
    assert "is a directory" in problem(tmp_path)
    assert problem('{"seed": 1}').endswith("is JSON text, not a path; pass json.loads(text)")
    assert "got int" in problem(3)
    (tmp_path / "bad.json").write_text('{"seed": [1,')
    assert "neither JSON nor hjson" in problem(tmp_path / "bad.json")
    (tmp_path / "list.json").write_text("[1, 2]")
    assert "must be a JSON object" in problem(tmp_path / "list.json")
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\xff")
    assert "cannot be read" in problem(tmp_path / "binary.json")


@pytest.mark.parametrize("comment", ["", "# hjson\n"])
def test_duplicate_keys_at_any_depth(tmp_path, comment):
    file = tmp_path / "twice.json"
    file.write_text(comment + '{"seed": 1, "seed": 1, "fp16": {"enabled": true, "enabled": false}}')
    first, second = problems(file)
    assert first.startswith("seed: given twice")
    assert second.startswith("fp16.enabled: given twice")
    assert "given twice" in problem(base64.urlsafe_b64encode(b'{"seed": 1, "seed": 2}').decode())


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


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        ("gradient_allreduce_op", "SUM", "sum"),
        ("communication_data_type", "bfloat16", "bf16"),
        ("communication_data_type", "torch.half", "fp16"),
        ("communication_data_type", "FP32", "fp32"),
        ("communication_data_type", None, None),
        ("data_types.grad_accum_dtype", "bf16", "bf16"),
        ("data_types.grad_accum_dtype", None, "fp32"),
        ("gradient_clipping", 0, 0.0),
        ("gradient_clipping", True, 1.0),
        ("gradient_clipping", False, 0.0),
        ("train_batch_size", 32.0, 32),
        ("zero_optimization", True, None),
        ("frozen_parameters", ["embed.*", "^head$"], ("embed.*", "^head$")),
        ("trainable_parameters", ["lora_"], ("lora_",)),
        ("trainable_parameters", None, None),
        ("stack.unroll", True, True),
        ("compiler_options", {"a": True, "b": 1, "c": 1.5, "d": "auto"}, {"a": True, "b": 1, "c": 1.5, "d": "auto"}),
        ("zero_optimization.mics_shard_size", -1, -1),
        ("activation_checkpointing.policy", "matmuls", "matmuls"),
        ("activation_checkpointing.policy", None, None),
        ("fp16.auto_cast", True, True),
        ("bf16.auto_cast", False, False),
        ("bf16.auto_cast", "auto", "auto"),
        ("fp16.initial_scale_power", 127, 127),
        ("fp16.loss_scale", 3e38, 3e38),
        ("fp16.min_loss_scale", 0.25, 0.25),
        ("timers.throughput.enabled", False, False),
        ("managed_gradient_accumulation", False, False),
    ],
)
def test_accepted_values(path, value, expected):
    node = Config.load(nest(path, value))
    for key in path.split("."):
        node = getattr(node, key)
    if path == "zero_optimization":
        assert node.stage == 1
    else:
        assert node == expected
        assert type(node) is type(expected)


def test_advice_fits_the_value():
    assert "quotes" not in problem({"seed": "x"})
    assert problem({"zero_optimization": 3}) == (
        "zero_optimization = 3: must be a section {...} with the keys mics_shard_size, offload_optimizer, "
        "offload_param, stage, stage3_param_persistence_threshold, zero_hpz_partition_size, "
        "zero_quantized_gradients, zero_quantized_weights"
    )


@pytest.mark.parametrize("path", filter(keys.is_replaced, keys.KEYS))
def test_every_replaced_key_loads_and_is_reported(path):
    row = keys.KEYS[path]
    value = next(v for v in (True, 4, ["a"], "fp32", "info", "Fail") if _parses(row.kind, v))
    required = {"type": "adam"} if path.startswith("optimizer.") else {}
    data = nest(path, value)
    if required:
        data["optimizer"] |= required
    (entry,) = Config.load(data).replaced
    assert entry == (path, value, row.text)
    wrong = nest(path, {"a": 1})
    if required:
        wrong["optimizer"] |= required
    assert problem(wrong).startswith(f'{path} = {{"a": 1}}: must be')


def _parses(kind, value) -> bool:
    try:
        kind(value)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("elasticity.enabled", True),
        ("zero_optimization.zero_quantized_nontrainable_weights", True),
        ("zero_optimization.zeropp_loco_param.reset_T", 9),
        ("zero_optimization.stage3_model_persistence_threshold", 1),
        ("checkpoint.use_node_local_storage", True), ("nebula.enabled", True), ("progressive_layer_drop.enabled", True),
        ("compile.offload_opt_states", True), ("datastates_ckpt.host_cache_size", 16),
    ],
)  # fmt: skip
def test_key_to_come_is_refused_by_name(path, value):
    message = problem(nest(path, value))
    assert message.startswith(f"{path} = {json.dumps(value)}: not yet supported: ")
    assert message.endswith("leave it out")


def test_nested_compression_is_refused():
    section = {"weight_quantization": {"shared_parameters": {"enabled": False}, "different_groups": {}}}
    assert Config.load({"compression_training": section}) == Config()
    section["weight_quantization"]["shared_parameters"]["enabled"] = True
    message = problem({"compression_training": section})
    assert message.startswith("compression_training.weight_quantization = {")
    assert "quantize in the model" in message
    pruned = problem({"compression_training": {"row_pruning": {"shared_parameters": {"enabled": True}}}})
    assert "masks in the model" in pruned


@pytest.mark.parametrize(
    "given",
    [
        {"tensorboard": {}}, {"nebula": False}, {"elasticity": {"enabled": False, "min_gpus": 2}}, {"aio": {}},
        {"zero_optimization": {"offload_param": {"device": "none"}}},
        {"zero_optimization": {"offload_optimizer": None, "cpu_offload": False, "zenflow": {}}},
        {"zero_optimization": {"zero_quantized_weights": False, "zeropp_loco_param": None}},
        {"pipeline": {"stages": "auto"}}, {"sequence_parallel_size": 1},
        {"tensor_parallel": {"autotp_size": 0, "tp": {"tp_size": 1}, "keep_module_on_host": False}},
        {"checkpoint": {"use_node_local_storage": False, "writer": {}}}, {"sparse_attention": {}},
        {"amp": {"enabled": False}},
        {"torch_autocast": {"enabled": False, "dtype": "bfloat16"}}, {"vocabulary_size": None}, {"mesh": {"pipe": 1}},
        {"autotuning": {"enabled": "auto", "fast": True}},
        {"optimizer": None}, {"compile": {"passes": None}}, {"zero_optimization": {"overlap_comm": None}},
        {"log_level": None},
    ],
)  # fmt: skip
def test_what_asks_for_nothing_loads_in_silence(given):
    config = Config.load(given)
    assert repr(config) == "Config()"
    assert config.replaced == ()


def test_no_row_hides_a_field_and_every_table_key_is_reachable():
    assert not set(screen.FIELDS) & set(keys.KEYS)
