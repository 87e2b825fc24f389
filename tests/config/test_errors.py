"""Mistakes in a config: each is one problem, whose text has these parts."""

import pytest
from helpers.configs import nest, problem

ON, AUTO = {"enabled": True}, {"type": "auto", "params": {"lr": "auto"}}
CLIP = {"optimizer": {"type": "Adam", "params": {"max_grad_norm": 1.0}}}
RECOMPUTE = {"activation_checkpointing": {"policy": "none", "cpu_checkpointing": True}}
SAVE = ["stage3_gather_fp16_weights_on_model_save", "stage3_gather_16bit_weights_on_model_save"]
MASTER = "master_weights_and_grads"
TENSOR = "= 4: both are the degree of tensor; keep one"


def assert_problem(given, *parts):
    message = problem(given)
    assert [part for part in parts if part not in message] == [], message


@pytest.mark.parametrize(
    ("path", "value", "parts"),
    [
        ("train_batch_size", "32", ['train_batch_size = "32"', "positive integer", "without quotes"]),
        ("gradient_clipping", -1, ["gradient_clipping = -1", "a non-negative number, true", "default 1.0"]),
        ("communication_data_type", "int8", ['communication_data_type = "int8"', '"fp32", "fp16", "bf16" or null']),
        ("zero_optimization.stage", 4, ["zero_optimization.stage = 4", "0, 1, 2 or 3"]),
        ("stack.unroll", "no", ['stack.unroll = "no"', 'true, false or "auto"']),
        ("optimizer", {"type": "Adamm"}, ["optimizer.type: 'Adamm'", "did you mean 'Adam'", "AdamW, SGD"]),
        ("optimizer", {"type": "Adam", "params": {"lr": "1e-3"}}, ["optimizer.params.lr", "'1e-3'", "number >= 0"]),
        ("mesh.zero", "3", ["quotes"]),
        ("train_batch_size", 0, ["= 0", "positive integer"]),
        ("train_micro_batch_size_per_gpu", 1.5, ["= 1.5", "positive integer"]),
        ("gradient_accumulation_steps", True, ["= true", "positive integer"]),
        ("gradient_clipping", float("inf"), ["non-negative number"]),
        ("gradient_allreduce_op", "maen", ['"mean" or "sum"', 'did you mean "mean"']),
        ("zero_optimization.stage", True, ["0, 1, 2 or 3"]),
        ("zero_optimization.mics_shard_size", 0, ["-1 or a positive integer"]),
        ("zero_optimization.stage3_param_persistence_threshold", -1, ["non-negative integer", "100000"]),
        ("zero_optimization.reduce_bucket_size", "big", ["non-negative number", "combiner"]),
        ("zero_optimization.overlap_comm", "yes", ["true or false", "latency-hiding"]),
        ("prescale_gradients", "true", ["true or false", "without quotes"]),
        ("dataloader_drop_last", "true", ["true or false", "without quotes", "default false"]),
        ("fp16.hysteresis", 0, ["an integer >= 1 and <= 2147483647", "default 2"]),
        ("fp16.loss_scale_window", 2**31, ["<= 2147483647", "default 1000"]),
        ("fp16.initial_scale_power", 128, ["= 128", "an integer >= 0 and <= 127", "default 16"]),
        ("fp16.initial_scale_power", -1, ["= -1", "an integer >= 0 and <= 127"]),
        ("fp16.loss_scale", 1e39, ["1e+39", "a number >= 0 in float32's range"]),
        ("fp16.loss_scale", -1, ["= -1", "a number >= 0 in float32's range"]),
        ("fp16.min_loss_scale", 0, ["= 0", "a number > 0 in float32's range", "default 1.0"]),
        ("fp16.min_loss_scale", 1e-46, ["1e-46", "a number > 0 in float32's range"]),
        ("fp16.auto_cast", "yes", ["true or false", "default false"]),
        ("bf16.auto_cast", "yes", ['true, false or "auto"']),
        ("optimizer", {"type": "adamw", "params": {"lrr": 1}}, ["params.lrr: unknown parameter", "did you mean 'lr'"]),
        ("scheduler", {"type": "WarmupLr"}, ["scheduler.type: 'WarmupLr'", "did you mean 'WarmupLR'"]),
        ("scheduler", {"type": "OneCycle", "params": {"cycle_min_lr": 0}}, ["cycle_max_lr: missing"]),
        ("fp16", True, ["must be a section", "loss_scale_window", '{"enabled": true}']),
        ("optimizer", "Adam", ["must be a section", "state_dtype, type", 'did you mean {"type": "Adam"}?']),
        ("bf16", False, ["must be a section", 'did you mean {"enabled": false}?']),
        ("optimizer", {"type": "Adam", "params": {"max_grad_norm": {}}}, ["max_grad_norm = {}", "gradient_clipping"]),
        ("optimizer.params", {"lr": 1}, ["optimizer.type: required", "AdamW"]),
        ("scheduler", {"type": "OneCycle", "params": [1]}, ["scheduler.params = [1]", "names and values"]),
        ("mesh.zero", 0, ["-1 or a positive integer"]),
        ("frozen_parameters", ["ok", "("], ['"(" does not compile', "regular expressions"]),
        ("frozen_parameters", "embed", ['write ["embed"]']),
        ("frozen_parameters", [1], ["1 is not a string"]),
        ("trainable_parameters", "lora_", ['write ["lora_"]', "or null"]),
        ("compiler_options", {"a": [1]}, ["a = [1]", "true, false, a number or a string"]),
        ("seed", -1, ["non-negative integer"]),
        ("activation_checkpointing.policy", "matmul", ['did you mean "matmuls"']),
        ("aio", 3, ["must be a section", "queue_depth"]),
        ("tensorboard", True, ["must be a section", '{"enabled": true}']),
    ],
)
def test_a_wrong_value(path, value, parts):
    assert_problem(nest(path, value), *parts)
    assert problem(nest(path, value)).startswith(path.split(".")[0])


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
        ("fp16.bf16", "the keys here are auto_cast, "),
        ("mesh.model", "the keys here are context, data, expert, pipe, tensor, zero"),
        ("timers.throughput.synchronised", 'did you mean "synchronized"?'),
        ("flops_profiler.step", "the keys here are detailed, "),
        ("tensorboard.jobname", 'did you mean "job_name"?'),
        ("zero_optimization.offload_optimizer.pin_memry", 'did you mean "pin_memory"?'),
        ("checkpoint.writer.typ", 'did you mean "type"?'),
        ("qqqq", "docs/configuration.md lists all"),
        ("zero_optimization.fp16", "the keys here are"),
    ],
)
def test_unknown_key(path, advice):
    message = problem(nest(path, 7))
    assert message.startswith(f"{path} = 7: unknown key; ")
    assert advice in message


@pytest.mark.parametrize(
    ("given", "parts"),
    [
        ({"fp16": ON, "bf16": ON}, ["fp16.enabled = true and bf16.enabled = true", "only one", "remove"]),
        ({"bf16": {"bf16_optimizer_states": True}}, ["needs bf16.bf16_master_weights_and_grads"]),
        ({"bf16": ON, "bfloat16": ON}, ["bfloat16", "another name of bf16"]),
        ({"zero_optimization": {"mics_shard_size": 2}, "mesh": {"zero": 4}}, ["mics_shard_size = 2", "mesh.zero = 4"]),
        ({"mesh": {"data": -1}}, ["mesh.data = -1 and mesh.zero = -1", "one axis only", "default of mesh.zero"]),
        ({"mesh": {"data": -1, "zero": -1}}, ["mesh.data = -1 and mesh.zero = -1", "one axis only"]),
        (CLIP, ["optimizer.params.max_grad_norm = 1.0", '"gradient_clipping"', "top level"]),
        (RECOMPUTE, ["cpu_checkpointing = true", 'policy "full"']),
        ({"zero_optimization": dict.fromkeys(SAVE, True)}, [f"deprecated name of zero_optimization.{SAVE[1]}"]),
        ({"zero_optimization": {"cpu_offload": False, "offload_optimizer": {"device": "none"}}},
            ["cpu_offload = false", "deprecated name of zero_optimization.offload_optimizer"]),
        ({"tensor_parallel": {"autotp_size": 2, "tp": {"tp_size": 4}}}, ["autotp_size = 2 and ", TENSOR]),
        ({"tensor_parallel": {"autotp_size": 2}, "mesh": {"tensor": 4}}, ["autotp_size = 2 and ", TENSOR]),
        ({"zero_optimization": 3, "mesh": {"data": -1}}, ["zero_optimization = 3"]),
        ({"bf16": {"bf16_optimizer_states": True, f"bf16_{MASTER}": "yes"}}, [f"bf16.bf16_{MASTER} = "]),
        ({"zero_optimization.stage": 3}, ["nested sections"]),
        ({3: 4}, ["3 = 4: unknown key"]),
        ({"fp16": {"a.b": 4}}, ["fp16.a.b = 4: unknown key"]),
        ({"checkpoint": {"use_node_local_storage": True}}, ["checkpoints on the disks of each host"]),
        ({"progressive_layer_drop": {"enabled": True, "theta": 0.5, "gamma": 0.001}}, ["progressive layer dropping"]),
        ({"quantize_training": {"enabled": True, "quantize_bits": {"start_bits": 16}}}, ["quantize in the model"]),
        ({"learning_rate": 1e-3}, ["write it as optimizer.params.lr"]),
        ({"optimizer": {"type": "Adam", "learning_rate": 1e-3}}, ["write it as optimizer.params.lr"]),
        ({"optimizer": {"type": "AdmaW"}}, ["did you mean 'AdamW'?"]),
        (nest("optimizer.type", "DeepSpeedCPUAdam"), ['write "type": "Adam" and zero_opt', '{"device": "cpu"}']),
        ({"zero_optimization": {"offload_optimizer": True}}, ['did you mean {"device": "cpu"}?']),
        ({"zero_optimization": {"offload_param": "cpu"}}, ['did you mean {"device": "cpu"}?']),
        ({"zero_optimization": {"offload_optimizer": False}}, ['did you mean {"device": "none"}?']),
        ({"offload_optimizer": True}, ["it belongs in zero_optimization"]),
        ({"tensorboard": True}, ['did you mean {"enabled": true}?']),
        ({"amp": {"enabled": True, "opt_level": "O3"}}, ['amp.opt_level = "O3"', "fp16_master_weights_and_grads"]),
        ({"amp": {"enabled": True, "loss_scale": "big"}}, ['amp.loss_scale = "big"', '"dynamic" or a positive number']),
        ({"amp": {"enabled": True, "optlevel": "O1"}}, ["amp.optlevel", 'did you mean "opt_level"?']),
        ({"amp": {"enabled": "yes"}}, ['amp.enabled = "yes"', "true or false"]),
        ({"amp": ON, "bf16": ON}, ["amp.enabled = true: means fp16, and bf16.enabled = true bf16; keep one"]),
        ({"torch_autocast": {**ON, "dtype": "int8"}}, ['dtype = "int8"', '"bfloat16" or "float16"']),
        ({"torch_autocast": {**ON, "dtype": "bf16"}, "fp16": ON}, ["true: means bf16", "fp16.enabled = true"]),
        (nest("optimizer", AUTO), ['optimizer.type = "auto": ', 'write "type": "AdamW", the Trainer\'s optimizer']),
        (nest("scheduler", AUTO), ['scheduler.type = "auto": ', "or leave the section out for a constant rate"]),
        (nest("elasticity.enabled", True), ["only false is accepted"]),
        ({"fp16": {**ON, "type": "bfloat16"}}, ['write "bf16": {"enabled": true}']),
    ],
)  # fmt: skip
def test_contradictions_and_slips(given, parts):
    assert_problem(given, *parts)


@pytest.mark.parametrize(
    ("given", "start"),
    [
        ({"optimizer": {"typ": "Adam"}}, 'optimizer.typ = "Adam": unknown key; did you mean "type"?'),
        ({"optimizer": {"type": 3}}, "optimizer.type = 3: must be a string"),
        ({"zero_optimization": {"stge": 3, "zero_quantized_weights": True}}, "zero_optimization.stge = 3: unknown key"),
        ({"bf16": {"bf16_optimizer_states": True, "bf16_masterweights_and_grads": True}}, "bf16.bf16_masterweights"),
        ({"stage": 3, "zero_optimization": {"zero_quantized_weights": True}}, "stage = 3: unknown key; it belongs in"),
        ({"autotuning": 3}, "autotuning = 3: must be a section {...}"),
        ({"optimizer": {"type": "Adam", "params": {"zero": {"a": "b" * 500}}}}, "optimizer.params.zero: unknown par"),
    ],
)
def test_a_misspelled_key_is_one_short_line(given, start):
    """No contradiction follows from a key that was meant to be there."""
    line = problem(given)
    assert line.startswith(start)
    assert len(line) < 250
