"""Values and keys of the config: accepted, replaced, to come, and what asks for nothing."""

import json

import pytest
from helpers.configs import nest, problem

from jzero.config import Config, keys, screen


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


# ---- keys that something else does, keys to come --------------------------------------------------------------------


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
