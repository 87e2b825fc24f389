"""Keys that do nothing in DeepSpeed either, or start a tool that is no part of training; each row says what to write.

They load, `Config.ignored` lists them, and the run report warns of each one.
"""

import re
from typing import Any, NamedTuple

from jzero.config.keys import dotted_key

_ZERO, _REMAT = "zero_optimization", "activation_checkpointing"


class Ignored(NamedTuple):
    """A given key that does nothing, and what to write instead."""

    key: str
    value: Any
    why: str


def _ignored(*rows: tuple[str, str, str]) -> dict[str, str]:
    return {dotted_key(section, key): why for section, why, keys in rows for key in keys.split()}


CLIP_ABOVE = 'DeepSpeed ignores it here; write "gradient_clipping" with this value at the top level'
_LOG = 'DeepSpeed reads no such key; "steps_per_print" sets how often a progress line comes'
_MONITORS = 'DeepSpeed reads no such key; the sections are "tensorboard", "wandb", "csv_monitor" and "comet"'
_MIXTURE = "DeepSpeed reads no such key; the model's code decides, see jzero.route and jzero.experts"
_STAGES = 'DeepSpeed reads no such key; write "stages" here, or "pipe" in the "mesh" section'
SWITCH = 'only "enabled" turns it on'
_WIDE = "bfloat16 has float32's range, so bf16 has no loss scale"
_LAUNCHER = "DeepSpeed reads no such key; JAX chooses the transport, and the launcher the devices (jzero --include)"
# Parameters that users write one level too high.
OPTIMIZER_PARAMS = "lr betas eps weight_decay momentum bias_correction adam_w_mode torch_adam"
SCHEDULER_PARAMS = (
    "warmup_min_lr warmup_max_lr warmup_num_steps warmup_type total_num_steps warmup_min_ratio cos_min_ratio"
    " last_batch_iteration"
)
_SCALER = "loss_scale initial_scale_power loss_scale_window hysteresis consecutive_hysteresis min_loss_scale"


def _inside(section: str) -> str:
    return f"DeepSpeed ignores it here; write it in {section}"


# fmt: off
IGNORED: dict[str, str] = _ignored(
    ("", _LOG, "log logging log_interval logging_steps verbose debug"),
    ("", _LAUNCHER, "cuda_visible_devices backend dist_backend distributed_backend communication_backend local_rank"
        " world_size"),
    ("", 'DeepSpeed reads no such key; the section is "comms_logger"', "comms_config"),
    ("", _MONITORS, "monitor_config"),
    ("", 'DeepSpeed reads no such key; write "expert" in the "mesh" section', "ep_size expert_parallel_size"),
    ("", _MIXTURE, "moe num_experts moe_top_k capacity_factor eval_capacity_factor min_capacity moe_param_group"),
    ("expert_parallel", _MIXTURE, "num_experts capacity_factor eval_capacity_factor min_capacity"),
    ("", CLIP_ABOVE, "max_grad_norm"),
    ("", "DeepSpeed's engine does not use it either; only a model's own code can", "sparse_attention"),
    ("", "a key of accelerate, which DeepSpeed does not read; parameters are initialized sharded", "zero3_init_flag"),
    ("optimizer", _inside("optimizer.params"), OPTIMIZER_PARAMS),
    ("scheduler", _inside("scheduler.params"), SCHEDULER_PARAMS),
    ("fp16", SWITCH, "fp16 opt_level"),
    ("fp16", "DeepSpeed no longer has it", "fp16_scale_tolerance"),
    ("bf16", _WIDE, _SCALER),
    ("bf16", SWITCH, "bf16 opt_level"),
    ("autotuning", "nothing is tuned; the rest of the config trains as it is. `jzero plan CONFIG --search` chooses the "
        "keys that are \"auto\" or left out", "enabled"),
    ("eigenvalue", "DeepSpeed reads it only under quantize_training", "enabled"),
    ("pipeline", _STAGES, "pipeline_parallel_size num_stages pipeline_num_layers"),
    (_REMAT, 'DeepSpeed reads no such key; write "policy": "full", or "matmuls"', "enabled"),
    (_ZERO, "DeepSpeed no longer has it", "find_unused_parameters max_elements_per_comm grad_hooks"),
    (f"{_ZERO}.offload_param", "belongs to offload_optimizer", "fast_init pipeline_read pipeline_write ratio"),
    (f"{_ZERO}.offload_optimizer", "for NVMe, which jzero does not use", "nvme_path"),
    (f"{_ZERO}.offload_param", "for NVMe, which jzero does not use", "nvme_path"),
    ("compile", "DeepSpeed no longer has it; every step is compiled", "enabled disable backend kwargs"),
    ("aio", "DeepSpeed reads no such key", "enabled thread_count"),
)
# fmt: on


def is_comment(key: str) -> bool:
    """Return whether a key is a comment: it begins like `_comment`, `//`, `# note` or `comment2`.

    >>> [is_comment(key) for key in ("_stage", "comments", "comment_1", "communication_data_type")]
    [True, True, True, False]
    """
    return bool(re.match(r"_|#|//|comments?(?![a-z])", key, re.IGNORECASE))
