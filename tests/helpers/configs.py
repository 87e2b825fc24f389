"""What is wrong with a config, and one that people have."""

import pytest

from jzero.config import Config
from jzero.errors import ConfigError


def problems(source) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as error:
        Config.load(source)
    return error.value.problems


def problem(source) -> str:
    (only,) = problems(source)
    return only


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
