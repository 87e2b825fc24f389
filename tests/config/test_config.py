"""Configs that load unchanged, and where they come from."""

import base64
import copy
import json
import pickle

import pytest
from helpers.configs import TUTORIAL_ZERO3, problem, problems

from jzero.config import Config

SCALER = {"loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16, "hysteresis": 2, "min_loss_scale": 1}
NOWHERE = {"device": "none", "pin_memory": True}
HF_AUTO = {
    "fp16": {"enabled": "auto", **SCALER}, "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": dict.fromkeys(["lr", "betas", "eps", "weight_decay"], "auto")},
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"},
    },
    "zero_optimization": {
        "stage": 3, "offload_optimizer": NOWHERE, "offload_param": NOWHERE, "overlap_comm": True,
        "contiguous_gradients": True, "sub_group_size": 1e9, "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto", "stage3_param_persistence_threshold": "auto",
        "stage3_max_live_parameters": 1e9, "stage3_max_reuse_distance": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "gradient_accumulation_steps": "auto", "gradient_clipping": "auto", "steps_per_print": 2000,
    "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "wall_clock_breakdown": False,
}  # fmt: skip
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


def test_defaults():
    config = Config.load({})
    assert config == Config()
    assert repr(config) == str(config) == "Config()"
    assert config.replaced == ()
    assert config.activation_checkpointing is None
    assert (config.gradient_clipping, config.gradient_allreduce_op) == (1.0, "mean")
    assert config.communication_data_type is None
    assert (config.data_types.grad_accum_dtype, config.steps_per_print, config.seed) == ("fp32", None, 0)
    assert Config.load({"train_batch_size": 1, "steps_per_print": 9999999999}).steps_per_print == 9999999999  # never
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
        "bf16_optimizer_states": False, "auto_cast": "auto",
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
