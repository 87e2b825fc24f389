"""jzero.config: what loads, what each mistake says, and the arithmetic of batch sizes and mesh degrees."""

import ast
import base64
import copy
import doctest
import json
import math
import pickle
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jzero import config as config_module
from jzero.config import Config, keys, screen, suggest
from jzero.config import config as config_class_module
from jzero.errors import ConfigError
from jzero.optimizers import table
from jzero.values import kinds, parameters


def problems(source) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as error:
        Config.load(source)
    return error.value.problems


def problem(source) -> str:
    (only,) = problems(source)
    return only


def nest(path: str, value) -> dict:
    for key in reversed(path.split(".")):
        value = {key: value}
    return value


# ---- real configs load unchanged ------------------------------------------------------------------------------------

TUTORIAL_ZERO3 = {
    "train_batch_size": 64,
    "gradient_accumulation_steps": 2,
    "steps_per_print": 10,
    "zero_optimization": {
        "stage": 3,
        "contiguous_gradients": True,
        "overlap_comm": True,
        "reduce_scatter": True,
        "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9,
        "stage3_prefetch_bucket_size": 1e7,
        "stage3_param_persistence_threshold": 1e5,
        "reduce_bucket_size": 1e7,
        "sub_group_size": 1e9,
        "offload_optimizer": {"device": "none"},
    },
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}},
    "wall_clock_breakdown": False,
}
HF_AUTO = {
    "fp16": {
        "enabled": "auto",
        "loss_scale": 0,
        "loss_scale_window": 1000,
        "initial_scale_power": 16,
        "hysteresis": 2,
        "min_loss_scale": 1,
    },
    "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"},
    },
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "none", "pin_memory": True},
        "offload_param": {"device": "none", "pin_memory": True},
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 1e9,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "steps_per_print": 2000,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "wall_clock_breakdown": False,
}
FP16_DYNAMIC = {
    "train_batch_size": 512,
    "train_micro_batch_size_per_gpu": 4,
    "steps_per_print": 1,
    "gradient_clipping": 0.5,
    "prescale_gradients": True,
    "zero_allow_untested_optimizer": True,
    "optimizer": {"type": "Adam", "params": {"lr": 1.5e-4}},
    "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 2000, "total_num_steps": 10000}},
    "fp16": {
        "enabled": True,
        "auto_cast": False,
        "loss_scale": 0,
        "initial_scale_power": 12,
        "loss_scale_window": 500,
        "hysteresis": 2,
        "min_loss_scale": 1,
    },
    "zero_optimization": {"stage": 1, "reduce_bucket_size": 5e8, "allgather_bucket_size": 5e8},
    "activation_checkpointing": {
        "partition_activations": True,
        "contiguous_memory_optimization": False,
        "cpu_checkpointing": True,
        "number_checkpoints": 8,
        "synchronize_checkpoint_boundary": False,
        "profile": False,
    },
    "tensorboard": {"enabled": False, "output_path": "logs/", "job_name": "run"},
    "flops_profiler": {"enabled": False, "profile_step": 1, "detailed": True},
    "wall_clock_breakdown": False,
}


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
    assert config.optimizer.params == {}
    assert config.scheduler.params == HF_AUTO["scheduler"]["params"], "what the word means depends on the schedule"
    assert config.zero_optimization.stage3_param_persistence_threshold == 100_000
    assert "zero_optimization.reduce_bucket_size" not in {r.key for r in config.replaced}  # "auto" gives nothing
    with pytest.raises(ConfigError, match="no batch size"):
        config.batch(8)


def test_fp16_dynamic_scale_config():
    config = Config.load(FP16_DYNAMIC)
    assert config.precision == "fp16"
    assert (config.fp16.initial_scale_power, config.fp16.loss_scale_window, config.fp16.loss_scale) == (12, 500, 0)
    assert config.activation_checkpointing.policy is None
    assert config.activation_checkpointing.kind == "full", "what cpu_checkpointing asks for"
    assert config.activation_checkpointing.cpu_checkpointing
    by = {r.key: r.by for r in config.replaced}
    assert "tensor axis" in by["activation_checkpointing.partition_activations"]
    assert config.fp16.auto_cast is False
    assert by.keys() >= {"prescale_gradients", "zero_allow_untested_optimizer", "activation_checkpointing.profile"}
    assert config.batch(16).accum == 8


def test_defaults():
    config = Config.load({})
    assert config == Config()
    assert repr(config) == str(config) == "Config()"
    assert config.replaced == ()
    assert config.activation_checkpointing is None
    assert (config.gradient_clipping, config.gradient_allreduce_op) == (1.0, "mean")
    assert config.communication_data_type is None
    assert (config.data_types.grad_accum_dtype, config.steps_per_print, config.seed) == ("fp32", None, 0)
    assert (config.stack.unroll, config.compiler_options, config.frozen_parameters) == ("auto", {}, ())
    assert (config.managed_gradient_accumulation, config.dataloader_drop_last) == (True, False)
    assert config.timers.throughput.enabled
    assert config.fp16.model_dump() == {
        "enabled": False, "loss_scale": 0, "initial_scale_power": 16, "loss_scale_window": 1000, "hysteresis": 2,
        "consecutive_hysteresis": False, "min_loss_scale": 1, "fp16_master_weights_and_grads": False,
        "auto_cast": False,
    }  # fmt: skip
    assert config.bf16.model_dump() == {
        "enabled": False, "check_grad_overflow": True, "bf16_master_weights_and_grads": False,
        "bf16_optimizer_states": False,
    }  # fmt: skip


# ---- sources --------------------------------------------------------------------------------------------------------


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


# ---- values ---------------------------------------------------------------------------------------------------------


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
        ("train_batch_size", 32.0, 32),
        ("zero_optimization", True, None),
        ("frozen_parameters", ["embed.*", "^head$"], ("embed.*", "^head$")),
        ("stack.unroll", True, True),
        ("compiler_options", {"a": True, "b": 1, "c": 1.5, "d": "auto"}, {"a": True, "b": 1, "c": 1.5, "d": "auto"}),
        ("zero_optimization.mics_shard_size", -1, -1),
        ("activation_checkpointing.policy", "matmuls", "matmuls"),
        ("activation_checkpointing.policy", None, None),
        ("fp16.auto_cast", True, True),
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


@pytest.mark.parametrize(
    ("path", "value", "parts"),
    [
        ("train_batch_size", "32", ['= "32"', "positive integer", "without quotes"]),
        ("train_batch_size", 0, ["= 0", "positive integer"]),
        ("train_micro_batch_size_per_gpu", 1.5, ["= 1.5", "positive integer"]),
        ("gradient_accumulation_steps", True, ["= true", "positive integer"]),
        ("gradient_clipping", -1, ["= -1", "non-negative number", "default 1.0"]),
        ("gradient_clipping", float("inf"), ["non-negative number"]),
        ("gradient_allreduce_op", "maen", ['"mean" or "sum"', 'did you mean "mean"']),
        ("communication_data_type", "int8", ['"fp32", "fp16", "bf16" or null']),
        ("zero_optimization.stage", 4, ["0, 1, 2 or 3"]),
        ("zero_optimization.stage", True, ["0, 1, 2 or 3"]),
        ("zero_optimization.mics_shard_size", 0, ["-1 or a positive integer"]),
        ("zero_optimization.stage3_param_persistence_threshold", -1, ["non-negative integer", "100000"]),
        ("zero_optimization.reduce_bucket_size", "big", ["non-negative integer", "combiner"]),
        ("zero_optimization.overlap_comm", "yes", ["true or false", "latency-hiding"]),
        ("fp16.enabled", "true", ["true or false", "without quotes", "default false"]),
        ("fp16.hysteresis", 0, ["an integer >= 1 and <= 2147483647", "default 2"]),
        ("fp16.loss_scale_window", 2**31, ["<= 2147483647", "default 1000"]),
        ("fp16.initial_scale_power", 128, ["= 128", "an integer >= 0 and <= 127", "default 16"]),
        ("fp16.initial_scale_power", -1, ["= -1", "an integer >= 0 and <= 127"]),
        ("fp16.loss_scale", 1e39, ["1e+39", "a number >= 0 in float32's range"]),
        ("fp16.loss_scale", -1, ["= -1", "a number >= 0 in float32's range"]),
        ("fp16.min_loss_scale", 0, ["= 0", "a number > 0 in float32's range", "default 1.0"]),
        ("fp16.min_loss_scale", 1e-46, ["1e-46", "a number > 0 in float32's range"]),
        ("fp16.auto_cast", "yes", ["true or false", "default false"]),
        ("optimizer", {"type": "Adamm"}, ["optimizer.type: 'Adamm'", "did you mean 'Adam'"]),
        ("optimizer", {"type": "adamw", "params": {"lrr": 1}}, ["optimizer.params.lrr", "did you mean 'lr'"]),
        ("scheduler", {"type": "WarmupLr"}, ["scheduler.type: 'WarmupLr'", "did you mean 'WarmupLR'"]),
        ("scheduler", {"type": "OneCycle", "params": {"cycle_min_lr": 0}}, ["cycle_max_lr: missing"]),
        ("fp16", True, ["must be a section", "loss_scale_window", '{"enabled": true}']),
        ("optimizer", "Adam", ["must be a section", "params, type", 'did you mean {"type": "Adam"}?']),
        ("bf16", False, ["must be a section", 'did you mean {"enabled": false}?']),
        ("optimizer", {"type": "Adam", "params": {"max_grad_norm": {}}}, ["max_grad_norm = {}", "gradient_clipping"]),
        ("optimizer.params", {"lr": 1}, ["optimizer.type: required", "AdamW"]),
        ("scheduler", {"type": "OneCycle", "params": [1]}, ["scheduler.params = [1]", "names and values"]),
        ("mesh.zero", 0, ["-1 or a positive integer"]),
        ("frozen_parameters", ["ok", "("], ['"(" does not compile', "regular expressions"]),
        ("frozen_parameters", "embed", ['write ["embed"]']),
        ("frozen_parameters", [1], ["1 is not a string"]),
        ("stack.unroll", "no", ['true, false or "auto"']),
        ("compiler_options", {"a": [1]}, ["a = [1]", "true, false, a number or a string"]),
        ("seed", -1, ["non-negative integer"]),
        ("activation_checkpointing.policy", "matmul", ['did you mean "matmuls"']),
        ("aio", 3, ["must be a section", "queue_depth"]),
        ("tensorboard", True, ["must be a section", '{"enabled": true}']),
    ],
)
def test_rejected_values(path, value, parts):
    message = problem(nest(path, value))
    assert message.startswith(path.split(".")[0])
    for part in parts:
        assert part in message


def test_advice_fits_the_value():
    assert "quotes" not in problem({"seed": "x"})
    assert "quotes" in problem({"zero_optimization": {"stage": "3"}})
    assert problem({"zero_optimization": 3}) == (
        "zero_optimization = 3: must be a section {...} with the keys mics_shard_size, stage, "
        "stage3_param_persistence_threshold"
    )


# ---- unknown keys ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "advice"),
    [
        ("grandient_accumulation_steps", 'did you mean "gradient_accumulation_steps"?'),
        ("Train_Batch_Size", 'did you mean "train_batch_size"?'),
        ("zero_optimization.stge", 'did you mean "stage"?'),
        ("zero_optimization.gradient_clipping", "it belongs at the top level"),
        ("stage", "it belongs in zero_optimization"),
        ("loss_scale", "it belongs in fp16"),
        ("stge", "did you mean zero_optimization.stage?"),
        ("lr", "it belongs in optimizer.params"),
        ("warmup_num_steps", "it belongs in scheduler.params"),
        ("max_grad_norm", 'write "gradient_clipping" with this value at the top level'),
        ("mesh.model", "the keys here are data, pipe, tensor, zero"),
        ("timers.throughput.synchronised", 'did you mean "synchronized"?'),
        ("flops_profiler.step", "the keys here are detailed"),
        ("tensorboard.jobname", 'did you mean "job_name"?'),
        ("zero_optimization.offload_optimizer.pin_memry", 'did you mean "pin_memory"?'),
        ("checkpoint.writer.typ", 'did you mean "type"?'),
        ("qqqq", "the keys here are activation_checkpointing, bf16"),
    ],
)
def test_unknown_key(path, advice):
    message = problem(nest(path, 7))
    assert message.startswith(f"{path} = 7: unknown key; ")
    assert advice in message


def test_keys_that_are_no_names():
    assert "nested sections" in problem({"zero_optimization.stage": 3})
    assert problem({3: 4}).startswith("3 = 4: unknown key")
    assert problem({"fp16": {"a.b": 4}}).startswith("fp16.a.b = 4: unknown key")


# ---- keys that something else does, keys to come --------------------------------------------------------------------


@pytest.mark.parametrize("path", keys.REPLACED)
def test_every_replaced_key_loads_and_is_reported(path):
    row = keys.REPLACED[path]
    value = next(v for v in (True, 4, ["a"], "fp32", "info") if _parses(row.kind, v))
    required = {"type": "adam"} if path.startswith("optimizer.") else {}
    data = nest(path, value)
    if required:
        data["optimizer"] |= required
    (entry,) = Config.load(data).replaced
    assert entry == (path, value, row.by)
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
        ("tensorboard.enabled", True), ("wandb.enabled", True), ("csv_monitor.enabled", True), ("comet.enabled", True),
        ("flops_profiler.enabled", True), ("comms_logger.enabled", True), ("elasticity.enabled", True),
        ("autotuning.enabled", True), ("data_efficiency.enabled", True), ("curriculum_learning.enabled", True),
        ("zero_optimization.offload_optimizer.device", "cpu"), ("zero_optimization.offload_param.device", "nvme"),
        ("zero_optimization.cpu_offload", True), ("zero_optimization.zenflow.topk_ratio", 0.1),
        ("zero_optimization.zero_quantized_weights", True), ("zero_optimization.zero_quantized_gradients", True),
        ("zero_optimization.stage3_model_persistence_threshold", 1), ("aio.queue_depth", 16),
        ("sparse_gradients", True),
        ("tensor_parallel.autotp_size", 2), ("sequence_parallel_size", 2), ("expert_parallel.enabled", True),
        ("checkpoint.use_node_local_storage", True), ("nebula.enabled", True), ("progressive_layer_drop.enabled", True),
        ("hybrid_engine.enabled", True), ("sparse_attention.mode", "fixed"), ("eigenvalue.enabled", True),
        ("wall_clock_breakdown", True), ("memory_breakdown", True), ("dump_state", True), ("vocabulary_size", 50257),
        ("mesh.tensor", 2), ("bf16.immediate_grad_update", True),
        ("compile.offload_opt_states", True), ("datastates_ckpt.host_cache_size", 16),
    ],
)  # fmt: skip
def test_key_to_come_is_refused_by_name(path, value):
    message = problem(nest(path, value))
    assert message.startswith(f"{path} = {json.dumps(value)}: not yet supported: ")
    assert message.endswith("leave it out")


def test_a_secondary_copy_of_the_weights_is_refused_with_the_way_out():
    """DeepSpeed 0.19.8, runtime/zero/partition_parameters.py, line 1307: hpZ keeps a second partition of the weights
    inside a group (2 bytes per parameter over its n devices), and the first, with all other state, over all N devices.
    """
    message = problem({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2}})
    assert message.startswith("zero_optimization.zero_hpz_partition_size = 2: not yet supported: ")
    for part in ("16/N + 2/n bytes", '"mics_shard_size": n', '"mesh": {"data": N/n, "zero": n}', "16/n bytes", "16/N"):
        assert part in message
    for nothing in (0, 1, None, "auto"):
        config = Config.load({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": nothing}})
        assert config.mesh_degrees(8)["zero"] == 8
    for instead in ({"zero_optimization": {"mics_shard_size": 2}}, {"mesh": {"data": 4, "zero": 2}}):
        assert Config.load(instead).mesh_degrees(8) == {"pipe": 1, "data": 4, "zero": 2, "tensor": 1}


def test_nested_compression_is_refused():
    section = {"weight_quantization": {"shared_parameters": {"enabled": False}, "different_groups": {}}}
    assert Config.load({"compression_training": section}) == Config()
    section["weight_quantization"]["shared_parameters"]["enabled"] = True
    assert "compression_training.weight_quantization" in problem({"compression_training": section})


@pytest.mark.parametrize(
    "given",
    [
        {"tensorboard": {}}, {"tensorboard": False}, {"wandb": {"enabled": False, "project": "p"}}, {"aio": {}},
        {"aio": {"queue_depth": 8, "block_size": 1048576}},
        {"zero_optimization": {"offload_param": {"device": "none"}}},
        {"zero_optimization": {"offload_optimizer": None, "cpu_offload": False, "zenflow": {}}},
        {"zero_optimization": {"zero_quantized_weights": False, "zeropp_loco_param": None}},
        {"pipeline": {"stages": "auto"}}, {"sequence_parallel_size": 1},
        {"tensor_parallel": {"autotp_size": 1}}, {"tensor_parallel": {"autotp_size": 0, "tp": {"tp_size": 1}}},
        {"checkpoint": {"use_node_local_storage": False, "writer": {}}}, {"sparse_attention": {}},
        {"amp": {"enabled": False}},
        {"torch_autocast": {"enabled": False, "dtype": "bfloat16"}}, {"vocabulary_size": None}, {"mesh": {"pipe": 1}},
        {"autotuning": {"enabled": "auto", "fast": True}}, {"seq_parallel_communication_data_type": "fp32"},
        {"optimizer": None}, {"compile": {"passes": None}}, {"zero_optimization": {"overlap_comm": None}},
        {"log_level": None},
    ],
)  # fmt: skip
def test_what_asks_for_nothing_loads_in_silence(given):
    config = Config.load(given)
    assert repr(config) == "Config()"
    assert config.replaced == ()


@pytest.mark.parametrize("section", ["amp", "torch_autocast"])
def test_autocast_is_refused_with_the_fix(section):
    message = problem({section: {"enabled": True}})
    assert message.startswith(f"{section}.enabled = true")
    assert 'write "bf16": {"enabled": true} instead' in message


def test_no_row_hides_a_field_and_every_table_key_is_reachable():
    assert not set(screen.FIELDS) & (set(keys.REPLACED) | set(keys.REFUSED))
    assert not set(keys.REPLACED) & set(keys.REFUSED)


# ---- contradictions -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "parts"),
    [
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, ["fp16.enabled = true and bf16.enabled = true"]),
        ({"bf16": {"bf16_optimizer_states": True}}, ["needs bf16.bf16_master_weights_and_grads"]),
        ({"bf16": {"enabled": True}, "bfloat16": {"enabled": True}}, ["bfloat16", "deprecated name of bf16"]),
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


def test_all_problems_come_at_once():
    found = problems({
        "train_batch_sise": 1, "seed": "x", "fp16": {"enabled": True, "hysteresis": -1}, "bf16": {"enabled": True},
        "wandb": {"enabled": True, "projet": "p"}, "zero_optimization": {"stage": 9, "reduce_bucket_size": "big"},
        "optimizer": {}, "mesh": {"tensor": 2},
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
    wrong = {"optimizer": {"type": "Adamm"}, "scheduler": {"type": "X"}, "gradient_cliping": 1, "mesh": {"tensor": 2}}
    found = problems(wrong)
    starts = ["gradient_cliping = 1", "mesh.tensor = 2", "optimizer.type: 'Adamm'", "scheduler.type: 'X'"]
    assert [start for start, line in zip(starts, sorted(found), strict=True) if not line.startswith(start)] == []
    several = {
        "optimizer": {"type": "SGD", "params": {"lr": -1, "max_grad_norm": 1.0, "epsilon": 1}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 0, "warmup_typ": "log"}},
    }
    keys_of = [re.match(r"[\w.]+", line)[0].split(".params.")[1] for line in problems(several)]
    assert sorted(keys_of) == ["epsilon", "lr", "max_grad_norm", "warmup_num_steps", "warmup_typ"]


@pytest.mark.parametrize("name", [*table.DEEPSPEED, *table.OPTAX_ELEMENTWISE, *table.OPTAX_PER_PARAMETER])
def test_an_optimizer_needs_nothing_but_its_type(name):
    assert Config.load({"optimizer": {"type": name}}).optimizer.params == {}


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


# ---- batch sizes ----------------------------------------------------------------------------------------------------

sizes = st.integers(1, 64)
TRAIN, MICRO, ACCUM = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"


@given(sizes, sizes, sizes, st.sets(st.sampled_from([TRAIN, MICRO, ACCUM]), min_size=2))
def test_two_or_three_consistent_sizes_give_the_third(micro, accum, replicas, kept):
    whole = {TRAIN: micro * accum * replicas, MICRO: micro, ACCUM: accum}
    got = Config.load({key: whole[key] for key in kept}).batch(replicas)
    assert got[:3] == tuple(whole.values())
    assert got.inferred == ", ".join(f"{key} = {value}" for key, value in whole.items() if key not in kept)


@given(sizes, sizes)
def test_one_size_means_one_accumulation_step(size, replicas):
    assert Config.load({MICRO: size}).batch(replicas)[:3] == (size * replicas, size, 1)
    assert Config.load({TRAIN: size * replicas}).batch(replicas)[:3] == (size * replicas, size, 1)


@given(st.integers(1, 200), st.none() | sizes, st.none() | sizes, st.integers(1, 16))
def test_batch_is_consistent_or_its_advice_is(train, micro, accum, replicas):
    config = Config.load({TRAIN: train, MICRO: micro, ACCUM: accum})
    try:
        got = config.batch(replicas)
    except ConfigError as error:
        assert train % ((micro or 1) * (accum or 1) * replicas) or (micro and accum)
        advice = str(error).split("nearest valid: ")[1]
        for fix in advice.split(", or "):
            key, values = fix.split(" = ")
            for value in values.split(" or "):
                fixed = Config.load({TRAIN: train, MICRO: micro, ACCUM: accum, key: int(value)}).batch(replicas)
                assert fixed.train == fixed.micro * fixed.accum * replicas
    else:
        assert got.train == train == got.micro * got.accum * replicas
        assert micro in (None, got.micro)
        assert accum in (None, got.accum)


def test_batch_error_prints_the_equation():
    with pytest.raises(ConfigError) as error:
        Config.load({TRAIN: 33, MICRO: 4}).batch(2)
    message = str(error.value)
    assert message.startswith("train_batch_size = 33: must equal")
    assert f"{MICRO} 4 × {ACCUM} 4 (inferred) × 2 replicas = 32" in message
    assert "nearest valid: train_batch_size = 32 or 40" in message


def test_no_batch_size():
    for given_, part in (({}, "give train_batch_size"), ({ACCUM: 3}, f"{ACCUM} = 3 alone")):
        with pytest.raises(ConfigError, match=part):
            Config.load(given_).batch(2)
    with pytest.raises(ConfigError, match="replicas = 0"):
        Config.load({TRAIN: 1}).batch(0)


# ---- mesh degrees ---------------------------------------------------------------------------------------------------


@given(st.integers(1, 16), st.integers(1, 16), st.sampled_from([None, "data", "zero"]))
def test_mesh_degrees_resolve_the_rest(data, zero, rest):
    mesh = {"data": data, "zero": zero} | ({rest: -1} if rest else {})
    got = Config.load({"mesh": mesh, "data_parallel_size": data * zero}).mesh_degrees(data * zero)
    assert got == {"pipe": 1, "data": data, "zero": zero, "tensor": 1}
    assert list(got) == ["pipe", "data", "zero", "tensor"]


@given(st.integers(1, 12), st.integers(2, 12))
def test_a_shard_size_sets_zero_and_leaves_the_rest_to_data(groups, shard):
    for mesh in ({}, {"zero": -1}, {"zero": shard}, {"data": -1}, {"data": groups}):
        config = Config.load({"zero_optimization": {"mics_shard_size": shard}, "mesh": mesh})
        assert config.mesh_degrees(groups * shard) == {"pipe": 1, "data": groups, "zero": shard, "tensor": 1}


axis = st.none() | st.integers(1, 8)


@given(st.integers(1, 32), axis, axis, st.integers(-1, 8).filter(bool))
def test_mesh_degrees_use_every_device_or_say_what_fits(devices, data, zero, mics):
    mesh = {k: v for k, v in (("data", data), ("zero", zero)) if v}
    source = {"mesh": mesh, "zero_optimization": {"mics_shard_size": mics}}
    if mics > 0 and zero not in (None, mics):
        assert "keep one" in problem(source)
        return
    shard = mics if mics > 0 else zero  # None: the rest
    outer = data or (None if mics > 0 else 1)
    fixed = (shard or 1) * (outer or 1)
    if devices % fixed == 0 if None in (shard, outer) else devices == fixed:
        got = Config.load(source).mesh_degrees(devices)
        assert math.prod(got.values()) == devices
        assert (got["data"], got["zero"]) == (outer or devices // fixed, shard or devices // fixed)
    else:
        with pytest.raises(ConfigError, match=rf"the number of devices, {devices}; what fits: "):
            Config.load(source).mesh_degrees(devices)


@pytest.mark.parametrize(
    ("given", "devices", "parts"),
    [
        ({"mesh": {"data": 3}}, 8, ["mesh.data = 3: must divide the number of devices, 8", "mesh.data = 1, 2, 4 or 8"]),
        (
            {"mesh": {"data": 2, "zero": 2}},
            8,
            ["mesh.data 2 × mesh.zero 2 = 4 devices: must equal", "mesh.data = 4", "mesh.zero = 4"],
        ),
        (
            {"mesh": {"data": 3, "zero": 3}},
            8,
            ["mesh.data 3 × mesh.zero 3 = 9 devices: must equal", "whose product is 8"],
        ),
        ({"zero_optimization": {"mics_shard_size": 3}}, 8, ["zero_optimization.mics_shard_size = 3", "1, 2, 4 or 8"]),
        (
            {"zero_optimization": {"mics_shard_size": 4}, "mesh": {"data": 1}},
            8,
            ["zero_optimization.mics_shard_size = 4", "the number of devices, 8", "mesh.data = 2"],
        ),
        (
            {"mesh": {"tensor": -1, "zero": 2}},
            8,
            ["mesh.tensor = -1: gives 4", "not yet supported: tensor parallelism"],
        ),
        ({"data_parallel_size": 4}, 8, ["data_parallel_size = 4", "data 1 × zero 8 = 8"]),
        ({}, 0, ["num_devices = 0"]),
    ],
)
def test_mesh_errors(given, devices, parts):
    config = Config.load(given)
    with pytest.raises(ConfigError) as error:
        config.mesh_degrees(devices)
    for part in parts:
        assert part in str(error.value)
    assert "mesh.pipe = 2" not in str(error.value), "no advice for what was not asked for"


# ---- the imports ----------------------------------------------------------------------------------------------------

ROOMS = ("errors", "tree", "values", "optimizers", "config")  # in import order: none imports a later one


@pytest.mark.parametrize("room", ROOMS)
def test_imports_point_one_way(room):
    package = Path(config_module.__file__).parents[1]
    files = sorted(package.glob(f"{room}/*.py")) or [package / f"{room}.py"]
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else names
            names = [f"jzero.{alias.name}" for alias in node.names] if names == ["jzero"] else names
            for name in names:
                if name.startswith("jzero"):
                    assert name.split(".")[1] in ROOMS[: ROOMS.index(room) + 1], f"{file.name} imports {name}"


# ---- the module -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("module", [config_module, config_class_module, kinds, parameters, suggest])
def test_doctests(module):
    result = doctest.testmod(module)
    assert result.attempted > 0
    assert result.failed == 0
