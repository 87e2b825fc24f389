"""DeepSpeed's names that jzero does not have: those that read the config, and what to write instead of the others."""

from __future__ import annotations

import re
from collections.abc import Callable
from operator import attrgetter
from typing import Any, TypeVar

from jzero.errors import ConfigError

T = TypeVar("T", bound=type)

KEYWORDS = {  # call -> keyword -> what to write
    "initialize": {
        "model_parameters": "leave it out: the model makes its own; groups and frozen parameters are in the config "
        "(optimizer.groups, frozen_parameters)",
        "config_params": "write config=",
        "dist_init_required": "leave it out: the processes join by themselves",
        "distributed_port": "leave it out: jzero --master_port, or MASTER_PORT",
        "mpu": "pass mesh=jzero.make_mesh(...), or the config's mesh section",
        "mesh_param": "pass mesh=jzero.make_mesh(...), or the config's mesh section",
        "collate_fn": "give training_data as arrays, or call train_batch with batches of your own loader",
    },
    "backward": {"retain_graph": "leave it out: a micro-batch has one loss; add further terms in the loss function"},
    "step": {"lr_kwargs": "leave it out: the schedule counts the steps; engine.set_lr(lr) sets a rate"},
    "eval_batch": {
        "return_logits": "write engine.predict(x)",
        "compute_loss": "write engine.predict(x) for outputs without a loss",
        "reduce_output": "leave it out: the loss is the mean over all micro-batches",
        "bcast_loss": "leave it out: every process gets the loss",
        "num_micro_batches": "leave it out, and pass a batch with any multiple of micro-batch x replicas rows",
    },
    "save_16bit_model": {
        "exclude_frozen_parameters": "leave it out: all weights are written; for adapters alone engine.save_adapters"
    },
}


def _same(prefix: str, *names: str) -> dict[str, Callable[[Any], Any]]:
    return {name: attrgetter(f"{prefix}.{name}") for name in names}


def _asked(key: str) -> Callable[[Any], bool]:
    """Return a reader of a flag that jzero replaces: whether the config, as it was given, sets it."""
    return lambda engine: any(row.key == key and row.value in (True, 1) for row in engine.config.replaced)


READ: dict[str, Callable[[Any], Any]] = {  # method -> what it returns, from the engine
    **_same("config", "dataloader_drop_last", "gradient_clipping", "managed_gradient_accumulation"),
    **_same("config", "memory_breakdown", "steps_per_print", "wall_clock_breakdown"),
    **_same("config.zero_optimization", "mics_shard_size", "zero_hpz_partition_size"),
    **_same("config.zero_optimization", "zero_quantized_gradients", "zero_quantized_weights"),
    **{
        f"flops_profiler_{name}": attrgetter(f"config.flops_profiler.{name}")
        for name in ("enabled", "profile_step", "module_depth", "top_modules", "detailed", "output_file")
    },
    "bfloat16_enabled": attrgetter("config.bf16.enabled"),
    "bf16_master_weights_and_gradients": attrgetter("config.bf16.bf16_master_weights_and_grads"),
    "bf16_optimizer_states": attrgetter("config.bf16.bf16_optimizer_states"),
    "fp16_enabled": attrgetter("config.fp16.enabled"),
    "fp16_auto_cast": attrgetter("config.fp16.auto_cast"),
    "fp16_master_weights_and_gradients": attrgetter("config.fp16.fp16_master_weights_and_grads"),
    "dynamic_loss_scale": lambda engine: engine.config.fp16.loss_scale == 0,
    "initial_dynamic_scale": lambda engine: 2**engine.config.fp16.initial_scale_power,
    "optimizer_name": lambda engine: engine.config.optimizer and engine.config.optimizer.type,
    "optimizer_params": lambda engine: engine.config.optimizer and engine.config.optimizer.params,
    "scheduler_name": lambda engine: engine.config.scheduler and engine.config.scheduler.type,
    "scheduler_params": lambda engine: engine.config.scheduler and engine.config.scheduler.params,
    "zero_optimization": lambda engine: engine.config.zero_optimization.stage > 0,
    "zero_optimization_partition_gradients": lambda engine: engine.config.zero_optimization.stage > 1,
    "zero_optimization_partition_weights": lambda engine: engine.config.zero_optimization.stage > 2,
    "zero_param_persistence_threshold": attrgetter("config.zero_optimization.stage3_param_persistence_threshold"),
    "zero_offload_optimizer": attrgetter("config.zero_optimization.offload_optimizer"),
    "zero_offload_param": attrgetter("config.zero_optimization.offload_param"),
    "zero_cpu_offload": lambda engine: engine.config.zero_optimization.offload_optimizer.device == "cpu",
    "zero_use_cpu_optimizer": lambda engine: engine.config.zero_optimization.offload_optimizer.device == "cpu",
    "zero_partial_offload": attrgetter("config.zero_optimization.offload_optimizer.ratio"),
    "tensor_parallel_config": attrgetter("config.tensor_parallel"),
    "autotp_size": attrgetter("config.tensor_parallel.autotp_size"),
    "curriculum_enabled_legacy": attrgetter("config.curriculum_learning.enabled"),
    "curriculum_params_legacy": attrgetter("config.curriculum_learning"),
    "data_efficiency_enabled": attrgetter("config.data_efficiency.enabled"),
    "data_efficiency_config": attrgetter("config.data_efficiency"),
    "data_sampling_enabled": attrgetter("config.data_efficiency.data_sampling.enabled"),
    "data_sampling_config": attrgetter("config.data_efficiency.data_sampling"),
    "curriculum_learning_enabled": attrgetter("config.data_efficiency.data_sampling.curriculum_learning.enabled"),
    "curriculum_learning_config": attrgetter("config.data_efficiency.data_sampling.curriculum_learning"),
    "amp_enabled": _asked("amp.enabled"),
    "dump_state": _asked("dump_state"),
    "graph_harvesting": _asked("graph_harvesting"),
    "sparse_gradients_enabled": _asked("sparse_gradients"),
    "super_offload": _asked("zero_optimization.offload_optimizer.super_offload"),
    "torch_autocast_enabled": _asked("torch_autocast.enabled"),
    # What jzero does not have is not enabled.
    **dict.fromkeys(
        (
            "autotuning_enabled", "eigenvalue_enabled", "elasticity_enabled", "pld_enabled", "random_ltd_enabled",
            "zero_nvme_offload_optimizer",
        ),
        lambda engine: False,
    ),
}  # fmt: skip

_COMPILED = "leave it out: the step is always compiled, by XLA"
_NO_SUCH = "leave it out: jzero does not have it"
_LOADED = "pass training_data to jzero.initialize, or batches to engine.train_batch"
_LAYOUT = "read engine.mesh for the axes, engine.step_fn.replicas, jzero.get_rank(); a process may have several devices"

INSTEAD = {  # regular expression of names, the first that matches -> what to write
    "clip_grad_norm_?|clip_fp32_gradients": "write gradient_clipping in the config; engine.step() clips, and "
    "engine.get_global_grad_norm() is the norm before that",
    "allreduce_.*|buffered_allreduce_.*|sparse_.*|all_gather_scalar": "leave it out: engine.step() does it",
    "coalesce_grad_reduction": "leave it out: engine.step() reduces the gradients of all backward calls at once",
    "destroy": "leave it out: del engine frees the memory",
    "set_train_micro_batch_size": "write train_micro_batch_size_per_gpu in the config; "
    "engine.set_train_batch_size(...) changes the accumulation",
    "deepspeed_io|is_(map|iterable)_style_dataset|set_data(loader|iterator)|set_batch_fn": _LOADED,
    "save_fp16_model": "write engine.save_16bit_model(directory)",
    "module_state_dict": "read engine.state.params, or write engine.save_16bit_model(directory)",
    "load_(module|moe)_state_dict": "write engine.load_weights(directory) or engine.load_checkpoint(directory)",
    "checkpoint_.*|load_universal_checkpoint|use_node_local_storage": "read engine.config.checkpoint; "
    "engine.save_checkpoint and load_checkpoint need no engine of their own",
    "get_(data|tensor|model|pipeline)_parallel_rank|get_sequence_parallel_group|is_(first|last)_stage": _LAYOUT,
    "mpu|[dm]p_world_size|is_first_weights_partition_group": _LAYOUT,
    "get_mom|get_type": "read engine.config.optimizer",
    "(offload|reload)_states|cpuadam_cores_perc": "write zero_optimization.offload_optimizer in the config",
    "autotuning_.*": "leave it out: jzero plan finds the fastest config",
    "(get_)?pld_.*|eigenvalue_.*|random_ltd_.*|quantize_training|is_elastic_.*|amp_params|torch_autocast_.*": _NO_SUCH,
    "zenflow_config|aio_config|swap_tensor_config|zeropp_loco_param": _NO_SUCH,
    "compile_.*|get_.*_backend|get_compile_time|register_compile_pass|is_(deep)?compile.*": _COMPILED,
    "uses_parallelization_pass_only": _COMPILED,
    "get_data_types|dynamic_loss_scale_args": "read engine.step_fn.precision and engine.config.fp16",
    "communication_data_type": "read engine.config.communication_data_type",
    "log_level|log_for_device|tput_log": "write jzero.log_dist(message)",
    "flops_profiler_.*": "leave it out: the FLOPs are counted in the program that runs",
    "timers|tput_timer|print_forward_breakdown": "read engine.get_wall_clock_timers(), with wall_clock_breakdown",
    "monitor": "write tensorboard, wandb, csv_monitor or another such section in the config",
    "get_additional_losses": "read engine.metrics, which has what the loss returns with has_aux=True",
    "set_has_attention_mask|reset_activation_shape": "leave it out: each batch has its own shapes",
    "(new|create)_inference_.*|populate_all_.*|(un)?fuse_lora_.*|retake_inference_cache|convert_to_linear_transposed":
    "leave it out: engine.generate(tokens, max_new_tokens) runs the model in training",
    "optimizer_legacy_fusion|postscale_gradients|gradient_predivide_factor|is_sanity_checks_enabled|zero_.*"
    "|empty_partition_cache": "leave it out: XLA plans memory and communication; the run report lists what replaces "
    "each key of the config",
}  # fmt: skip


class NoSuchNameError(ConfigError, AttributeError):
    """A name that jzero does not have, so that `hasattr` is false, with what to write instead."""


def deepspeed_names(cls: T) -> T:
    """Give an engine the methods in READ; the names in INSTEAD raise an error that says what to write."""

    def getter(name: str, read: Callable[[Any], Any]) -> Callable:
        def method(self: Any) -> Any:
            return read(self)

        method.__name__, method.__doc__ = name, "Return what the config says."
        return method

    def missing(self: Any, name: str) -> Any:
        """Explain a name that is not there; Python calls it for no other."""
        if text := next((text for pattern, text in INSTEAD.items() if re.fullmatch(pattern, name)), ""):
            raise NoSuchNameError(f"engine.{name}: {text}")
        return object.__getattribute__(self, name)  # raises the error again, also one from inside a property

    for name, read in READ.items():
        setattr(cls, name, getter(name, read))
    cls.__getattr__ = missing  # type: ignore[attr-defined]  # not in the class, where mypy would take any name
    return cls
