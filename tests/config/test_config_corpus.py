"""Config files of many projects, if they are at hand: each loads, or is refused by one line for each cause it has.

The directory is `JZERO_DS_CONFIGS`, else `shared/ds_configs` beside the repository. The configs of the other
test are written for it in the manner of the projects that they name, and train a step.
"""

import os
import re
from pathlib import Path

import jax
import numpy as np
import pytest
from helpers.sampling import keep

import jzero
from jzero.config import Config
from jzero.errors import ConfigError
from models.mlp import MLP, cross_entropy

PLACE = Path(os.environ.get("JZERO_DS_CONFIGS") or Path(__file__).resolve().parents[3] / "shared/ds_configs")
FILES = sorted(PLACE.glob("*.json"))
# What jzero does not do, as the line that says so begins. Whatever else stops a file is a fault of jzero's reader.
CAUSES = (
    r"zero_optimization\.offload_optimizer\.device = ",
    r"zero_optimization\.offload_param\.device = ",
    r"sequence_parallel_size = \d+: not yet supported",
    r"pipeline\.chunks = \d+: schedule \"1f1b\" has one chunk per stage",
)


@pytest.mark.skipif(not FILES, reason="no directory of configs (JZERO_DS_CONFIGS)")
def test_configs_of_many_projects():
    stopped, wrong = 0, []
    for file in FILES:
        try:
            Config.load(file)
        except ConfigError as error:
            lines, stopped = error.problems, stopped + 1
            causes = [next((cause for cause in CAUSES if re.match(cause, line)), None) for line in lines]
            if None in causes or len(set(causes)) < len(causes) or max(map(len, lines)) > 500:
                wrong.append((file.name, lines))
    assert wrong == []
    assert len(FILES) != 62 or stopped <= 1


A = "auto"
SCALER = {"loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16, "hysteresis": 2, "min_loss_scale": 1}
LEFT_OPEN = {
    "train_batch_size": A, "train_micro_batch_size_per_gpu": A, "gradient_accumulation_steps": A,
    "gradient_clipping": A, "fp16": {"enabled": A, **SCALER}, "bf16": {"enabled": A}, "wall_clock_breakdown": False,
}  # fmt: skip
BUCKETS = {"reduce_bucket_size": A, "stage3_prefetch_bucket_size": A, "stage3_param_persistence_threshold": A}
ADAMW = {"type": "AdamW", "params": {"lr": A, "betas": A, "eps": A, "weight_decay": A}}
WARMUP = {"warmup_min_lr": A, "warmup_max_lr": A, "warmup_num_steps": A}
NOWHERE = {"device": "none", "pin_memory": True}
MANNERS = {
    "the Trainer, ZeRO-3": {
        **LEFT_OPEN, "optimizer": ADAMW,
        "scheduler": {"type": "WarmupDecayLR", "params": {**WARMUP, "total_num_steps": A}},
        "zero_optimization": {
            "stage": 3, **BUCKETS, "sub_group_size": 1e14, "stage3_max_live_parameters": 1e9, "overlap_comm": True,
            "stage3_max_reuse_distance": 1e9, "gather_16bit_weights_on_model_save": True, "offload_param": NOWHERE,
        },
    },
    "LLaMA-Factory": {
        **LEFT_OPEN, "_comment": "see the wiki", "zero_allow_untested_optimizer": True, "optimizer": ADAMW,
        "comms_config": {"verbose": False}, "monitor_config": {"enabled": True, "csv_monitor": {"enabled": False}},
        "zero_optimization": {"stage": 3, **BUCKETS, "sub_group_size": 1e9, "round_robin_gradients": True},
    },
    "gpt-neox": {
        "train_micro_batch_size_per_gpu": 4, "gradient_clipping": 1.0, "steps_per_print": 10,
        "fp16": {"fp16": True, "enabled": True, **SCALER}, "wall_clock_breakdown": False,
        "optimizer": {"type": "Adam", "params": {"lr": 6e-4, "betas": [0.9, 0.95], "eps": 1e-8}},
        "zero_optimization": {
            "stage": 1, "allgather_partitions": True, "allgather_bucket_size": 500000000, "overlap_comm": True,
            "reduce_scatter": True, "reduce_bucket_size": 500000000, "contiguous_gradients": True,
        },
    },
    "DeepSpeed-Chat": {
        "train_batch_size": 64, "train_micro_batch_size_per_gpu": 4, "steps_per_print": 10, "gradient_clipping": 1.0,
        "bfloat16": {"enabled": True}, "prescale_gradients": False, "wall_clock_breakdown": False,
        "zero_optimization": {
            "stage": 3, "offload_param": {"device": "none"}, "offload_optimizer": {"device": "none"},
            "param_persistence_threshold": 1e4, "max_live_parameters": 3e7, "prefetch_bucket_size": 3e7,
            "memory_efficient_linear": False,
        },
        "hybrid_engine": {"enabled": False, "max_out_tokens": 512, "inference_tp_size": 1, "pin_parameters": True},
        "tensorboard": {"enabled": False, "output_path": "logs", "job_name": "chat"},
        "optimizer": {"type": "Adam", "params": {"lr": "auto"}},
    },
    "Megatron-DeepSpeed": {
        "train_batch_size": 16, "train_micro_batch_size_per_gpu": 1, "steps_per_print": 10, "prescale_gradients": False,
        "zero_optimization": {"stage": "1"}, "bf16": {"enabled": True, **SCALER}, "wall_clock_breakdown": False,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-4}, "eps": 1e-8, "weight_decay": 0.01},
        "data_types": {"grad_accum_dtype": "fp32"}, "checkpoint": {"tag_validation": "Warn"}, "log": True,
    },
}  # fmt: skip


@pytest.mark.parametrize("manner", keep(MANNERS, ["gpt-neox", "DeepSpeed-Chat"]))
def test_a_step_in_the_manner_of(manner, capsys):
    images = np.random.default_rng(0).normal(size=(64, 784)).astype(np.float32)
    labels = np.arange(64, dtype=np.int32) % 10
    model = jzero.from_flax(MLP, cross_entropy)
    engine, *_ = jzero.initialize(model=model, config=MANNERS[manner], training_data=(images, labels))
    report = capsys.readouterr().out
    before = jax.device_get(engine.state.params)
    for _ in range(3):  # a warm-up's first two steps run at rate 0
        rows = engine.train_batch_size()
        assert np.isfinite(float(engine.train_batch((images[:rows], labels[:rows]))))
    after = jax.device_get(engine.state.params)
    assert any((a != b).any() for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True))
    assert [entry.key for entry in (*engine.config.ignored, *engine.config.replaced) if entry.key not in report] == []
