"""DeepSpeed's keys that are not settings of jzero: a key is a row of `KEYS`, with its fate.

- "replaced" has no meaning under XLA: it loads, and `Config.replaced` lists it with its replacement.
- "ignored" does nothing in DeepSpeed either, or starts a tool that is no part of training: it loads, and
  `Config.ignored` lists it with what to write instead.
- "refused" would change the run: it loads at a value that turns the feature off, else it is an error.
- "detail" loads with any value, since the switch of its section decides.

When a feature arrives, its row leaves this file and becomes a field of `sections`.
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

from jzero.values.kinds import (
    COUNT,
    COUNT_OR_FALSE,
    DTYPE_OR_NULL,
    FLAG,
    NAME_LIST,
    NON_NEGATIVE,
    POSITIVE,
    TEXT,
    Kind,
    as_json,
    number,
    one_of,
)

Fate = Literal["replaced", "ignored", "refused", "detail"]


def dotted_key(section: str, key: str) -> str:
    """Join a section ("" is the top level) and a key."""
    return f"{section}.{key}" if section else key


class Replaced(NamedTuple):
    """A given key that has no meaning under JAX, and its replacement in words."""

    key: str
    value: object
    by: str


class Ignored(NamedTuple):
    """A given key that does nothing, and what to write instead."""

    key: str
    value: object
    why: str


class Key(NamedTuple):
    """The fate of a key, its replacement, reason or fix in words, and the kind of the values that load.

    Null always loads. A refused key loads at the values that leave its feature off.
    """

    fate: Fate
    text: str
    kind: Kind | None = None


def _only(*values: object) -> Kind:
    """Make the kind of a few values, those that leave a feature off."""
    return _if(lambda value: value in values)


def _if(is_off: Callable[[object], bool]) -> Kind:
    def parse(value: object) -> object:
        if not is_off(value):
            raise ValueError
        return value

    return Kind("off", parse)


def _enables_nothing(value: object) -> bool:
    """Return whether no `enabled` is true in nested sections."""
    if not isinstance(value, Mapping):
        return value in (None, False)
    inner = [child for child in value.values() if isinstance(child, Mapping)]
    return value.get("enabled", False) is False and all(map(_enables_nothing, inner))


ZERO, _REMAT = "zero_optimization", "activation_checkpointing"
_SAMPLING = "data_efficiency.data_sampling"
_MEAN = "the mean over the global batch inside the compiled step"
_EQUAL_PARTS = "mesh.tensor, which divides into equal parts"
_ONE_STEP = "the compiled step: XLA fuses, combines and orders the collectives"
_COMBINER = "XLA's collective combiner; its thresholds can be set in compiler_options"
_SCHEDULER = "XLA's latency-hiding scheduler, which overlaps communication and compute at every stage"
_LAYERWISE = "the layer stack: a layer's parameters are gathered when it runs and freed afterwards"
_PINNED = "pinned memory, always"
_NO_DELAY = "offload_optimizer, which applies every gradient in its own step; ZenFlow delays the smaller ones"
_IN_PLACE = "the update on the device, which reads and writes the state in host memory"
_NO_HOOKS = "the compiled step: there are no module hooks to tune"
_ANY_LAYOUT = "global arrays: a parameter always has its full shape and loads on any layout"
_ORBAX = "Orbax, from a thread while training goes on"
_COMPILED = "jit: every step is one compiled XLA program"
_NO_NVME = "host memory: nothing is read from or written to NVMe"
_PLANNER = "XLA's memory planner and the profiler"

_SWITCHES = "must be true or false"
_IN_THE_MODEL = 'the model\'s code decides, see jzero.route and jzero.experts; only "auto" is accepted, or leave it out'
CLIP = 'the optimizer does not clip; write "gradient_clipping" with this value at the top level'
_NO_CHANGE = "jzero does not change the model; "
_QUANTIZE = f"{_NO_CHANGE}quantize in the model (qwix and aqt fake-quantize Flax modules), and leave this out"
_PRUNE = (
    f"{_NO_CHANGE}multiply the kernels by masks in the model, or mask the updates with optimizer=optax.chain(...), and "
    "leave this out"
)
BY_METRIC = "selecting samples by difficulty; sort training_data yourself and pass an iterable, which keeps its order"
CURRICULUM_METRICS = f"{_SAMPLING}.curriculum_learning.curriculum_metrics"

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
_IGNORED_HERE = "DeepSpeed ignores it here; write it in "
_ROUTING = "DeepSpeed reads it only in data_efficiency.data_routing"
_SCALER = "loss_scale initial_scale_power loss_scale_window hysteresis consecutive_hysteresis min_loss_scale"
_NOTHING = _if(_enables_nothing)


# ---- rows: section, kind of the values that load, text, keys --------------------------------------------------------

# fmt: off
_REPLACED = (
    ("", FLAG, _MEAN, "prescale_gradients"),
    ("", number(), _MEAN, "gradient_predivide_factor"),
    ("", FLAG, _ONE_STEP, "disable_allgather"),
    ("", FLAG, "optax: every optimizer works at every stage", "zero_allow_untested_optimizer"),
    ("", FLAG, "optax: the same optimizer for state on the device and on the host", "zero_force_ds_cpu_optimizer"),
    ("", FLAG, "XLA's command buffers (CUDA graphs), on by default", "graph_harvesting"),
    ("", TEXT, "steps_per_print: jzero prints the run report and progress lines", "log_level"),
    ("", FLAG, "the run report, printed at the start, and the config's model_dump_json()", "dump_state"),
    ("", FLAG, "the order of the mesh axes", "use_data_before_expert_parallelism"),
    ("", FLAG, "dense gradients of embeddings: the same numbers", "sparse_gradients"),
    ("", POSITIVE, "the model's own vocabulary (models/ take pad_vocab_to)", "vocabulary_size"),
    ("bf16", FLAG, "data_types.grad_accum_dtype, in which gradients accumulate", "immediate_grad_update"),
    ("", DTYPE_OR_NULL, "the mesh: there is no sequence axis to communicate over",
        "seq_parallel_communication_data_type"),
    ("aio", POSITIVE, _NO_NVME, "block_size queue_depth intra_op_parallelism"),
    ("aio", FLAG, _NO_NVME, "single_submit overlap_events use_gds"),
    ("hybrid_engine", FLAG, "engine.generate, which runs under every training layout", "enabled"),
    ("data_types", DTYPE_OR_NULL, 'the "bf16" and "fp16" sections', "param_dtype buffer_dtype"),
    ("optimizer", FLAG, "jit: the update is one fused program", "legacy_fusion"),
    ("flops_profiler", NON_NEGATIVE, "the compiled step, which shows what is recomputed", "recompute_fwd_factor"),
    ("timers.throughput", FLAG, "steps are timed when their result is ready", "synchronized"),
    (_REMAT, FLAG, _PLANNER, "contiguous_memory_optimization synchronize_checkpoint_boundary profile"),
    (_REMAT, COUNT_OR_FALSE, "the layer stack: every layer is a checkpoint", "number_checkpoints"),
    (_REMAT, FLAG, "mesh.tensor, which divides the sequence between layers", "partition_activations"),
    ("tensor_parallel", TEXT, "the model's own table `divided`, or tensor_parallel.dimensions", "preset_model"),
    ("tensor_parallel", TEXT, "the section bf16 or fp16", "dtype"),
    ("tensor_parallel", FLAG, _SCHEDULER, "tp_overlap_comm"),
    ("tensor_parallel", COUNT, _EQUAL_PARTS, "tp_grain_size"),
    ("tensor_parallel.tp", COUNT, _EQUAL_PARTS, "tp_grain_size"),
    ("expert_parallel", TEXT, "the model's own table `divided`, or expert_parallel.dimensions", "preset_model"
        " moe_layer_pattern router_pattern expert_pattern expert_w1 expert_w2 expert_w3 num_experts_attr top_k_attr"
        " shared_experts_gate_pattern shared_experts_pattern"),
    ("expert_parallel", FLAG, "jzero.experts, which chooses the kernel", "use_grouped_mm disable_triton_grouped_mm"),
    ("expert_parallel", TEXT, "jzero.experts, which combines the experts' outputs", "combine_impl"),
    ("expert_parallel", FLAG, "the mesh, which checks its degrees", "validate_folding_routing"),
    ("pipeline", FLAG, "random keys: each layer's key is folded from the seed", "seed_layers"),
    ("pipeline", FLAG, "the mesh", "pipe_partitioned grad_partitioned"),
    ("pipeline", TEXT, "PipelineModule's partition_method", "partition"),
    ("pipeline", FLAG, "jax.checkpoint", "use_reentrant"),
    (ZERO, FLAG, _ONE_STEP, "contiguous_gradients reduce_scatter use_multi_rank_bucket_allreduce allgather_partitions"
        " round_robin_gradients legacy_stage1 mics_hierarchical_params_gather stage3_use_all_reduce_for_fetch_params"
        " stage3_allgather_sequential"),
    # The Hugging Face Trainer computes bucket sizes as 0.9 times a square, so they have fractions.
    (ZERO, NON_NEGATIVE, _COMBINER, "reduce_bucket_size allgather_bucket_size"),
    ("", NON_NEGATIVE, _COMBINER, "allgather_size"),
    ("pipeline", TEXT, "PipelineModule's partition_method", "partition_method"),
    (ZERO, FLAG, _SCHEDULER, "overlap_comm"),
    (ZERO, NON_NEGATIVE, "one fused optimizer update, which needs no sub-groups", "sub_group_size"),
    (f"{ZERO}.zenflow", FLAG, _NO_DELAY, "overlap_step offload"),
    (f"{ZERO}.zenflow", TEXT, _NO_DELAY, "select_strategy"),
    (f"{ZERO}.zenflow", NON_NEGATIVE, _NO_DELAY, "topk_ratio select_interval update_interval auto_ratio"
        " full_warm_up_rounds pt_reserved_cores_perc steps_per_epoch"),
    (f"{ZERO}.offload_optimizer", FLAG, _PINNED, "pin_memory"),
    (f"{ZERO}.offload_param", FLAG, _PINNED, "pin_memory"),
    (ZERO, FLAG, _PINNED, "cpu_offload_use_pin_memory"),
    (f"{ZERO}.offload_optimizer", COUNT, _IN_PLACE, "buffer_count"),
    (f"{ZERO}.offload_optimizer", FLAG, _IN_PLACE, "pipeline pipeline_read pipeline_write fast_init super_offload"),
    (f"{ZERO}.offload_optimizer", NON_NEGATIVE, _IN_PLACE, "cpuadam_cores_perc"),
    (f"{ZERO}.offload_param", NON_NEGATIVE, _LAYERWISE, "buffer_count buffer_size max_in_cpu"),
    (ZERO, NON_NEGATIVE, _LAYERWISE,
        "stage3_prefetch_bucket_size stage3_max_live_parameters stage3_max_reuse_distance"),
    (ZERO, FLAG, _ANY_LAYOUT, "load_from_fp32_weights elastic_checkpoint pipeline_loading_checkpoint"
        " stage3_gather_16bit_weights_on_model_save stage3_gather_fp16_weights_on_model_save"),
    (ZERO, COUNT, _NO_HOOKS, "stage3_module_granularity_threshold"),
    (f"{ZERO}.leaf_module", NAME_LIST, _NO_HOOKS, "classes names name_suffixes"),
    (ZERO, FLAG, _NO_HOOKS,
        "memory_efficient_linear log_trace_cache_warnings override_module_apply enable_sanity_checks"),
    (ZERO, FLAG, "autodiff: an unused parameter has gradient zero", "ignore_unused_parameters"),
    (ZERO, FLAG, "the sharded optimizer state", "save_muon_momentum_buffer_in_memory"),
    ("checkpoint", one_of(("Ignore", "Warn", "Fail")),
        "a check across processes: a tag that differs between them is an error", "tag_validation"),
    ("checkpoint", FLAG, _ANY_LAYOUT, "load_universal"),
    ("checkpoint", FLAG, _ORBAX, "checkpoint_serialization"),
    ("checkpoint.parallel_write", FLAG, "every process writes its part", "pipeline_stage"),
    ("checkpoint.writer", TEXT, _ORBAX, "type data_parallel"),
    ("checkpoint.writer", FLAG, _ORBAX, "io_buffer_double show_statistics decoupled"),
    ("checkpoint.writer", POSITIVE, _ORBAX, "io_buffer_size io_multiplier"),
    ("data_efficiency", COUNT, "seed, which shuffles training_data", "seed"),
    (_SAMPLING, POSITIVE, "training_data, which starts over at its end", "num_epochs"),
    (_SAMPLING, COUNT, "the loader's thread", "num_workers"),
    (_SAMPLING, FLAG, "the loader's thread", "pin_memory"),
    (f"{_SAMPLING}.curriculum_learning", TEXT, "the step's number: lengths need no files", "data_cluster_path"),
    ("compile", FLAG, _COMPILED, "deepcompile free_activation double_buffer symmetric_memory debug_log"
        " sync_before_reduce sync_after_reduce sync_before_allgather sync_after_allgather keep_int_input_tensors"
        " keep_all_input_tensors"),
    ("compile", COUNT, _COMPILED, "free_activation_threshold"),
    ("compile", NAME_LIST, "zero_optimization.stage, sequence_parallel_size and tensor_parallel", "passes"),
)

_IGNORED = (
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
    ("", "DeepSpeed reads no such key; float32 is the default", "fp32"),
    ("", "DeepSpeed reads it only in checkpoint", "use_node_local_storage"),
    ("", "DeepSpeed reads it only in data_efficiency", "data_routing"),
    ("", _ROUTING, "random_ltd"),
    ("data_efficiency", _ROUTING, "random_ltd"),
    ("data_efficiency.data_routing.random_ltd", "DeepSpeed drops tokens only in layers that the script wraps with"
        " convert_to_random_ltd; here the model itself can select random positions (jnp.take)", "enabled"),
    ("", "DeepSpeed no longer has it", "dynamic_train"),
    ("optimizer", _IGNORED_HERE + "optimizer.params", OPTIMIZER_PARAMS),
    ("scheduler", _IGNORED_HERE + "scheduler.params", SCHEDULER_PARAMS),
    ("fp16", SWITCH, "fp16 opt_level"),
    ("fp16", "DeepSpeed no longer has it", "fp16_scale_tolerance"),
    ("bf16", _WIDE, _SCALER),
    ("bf16", SWITCH, "bf16 opt_level"),
    ("autotuning", "nothing is tuned; the rest of the config trains as it is. `jzero plan CONFIG --search` chooses the "
        "keys that are \"auto\" or left out", "enabled"),
    ("eigenvalue", "DeepSpeed reads it only under quantize_training", "enabled"),
    ("pipeline", 'DeepSpeed reads no such key; write "seed" at the top level', "seed seeded"),
    ("pipeline", _STAGES, "pipeline_parallel_size num_stages pipeline_num_layers"),
    (_REMAT, 'DeepSpeed reads no such key; write "policy": "full", or "matmuls"', "enabled"),
    (ZERO, "DeepSpeed no longer has it", "find_unused_parameters max_elements_per_comm grad_hooks"),
    (f"{ZERO}.offload_param", "belongs to offload_optimizer", "fast_init pipeline_read pipeline_write ratio"),
    (f"{ZERO}.offload_optimizer", "for NVMe, which jzero does not use", "nvme_path"),
    (f"{ZERO}.offload_param", "for NVMe, which jzero does not use", "nvme_path"),
    ("compile", "DeepSpeed no longer has it; every step is compiled", "enabled disable backend kwargs"),
    ("aio", "DeepSpeed reads no such key", "enabled thread_count"),
)

_REFUSED = (
    # precision, gradients, communication
    ("", _only(False), 'an old key of DeepSpeed; write "communication_data_type": "fp32"', "fp32_allreduce"),
    ("fp16", _only("fp16", "float16"), 'write "bf16": {"enabled": true} and leave the fp16 section out', "type"),
    ("optimizer.params", _only(0), CLIP, "max_grad_norm"),
    ("amp", _only(False), _SWITCHES, "enabled"),  # true: see `aliases.translate`
    ("torch_autocast", _only(False), _SWITCHES, "enabled"),
    # fp8, by Transformer Engine's names
    ("fp8", _only("max"), "the largest of the last amax_history_len steps decides; leave it out", "amax_compute_algo"),
    ("fp8", _only(0), "scales leave room for elements at least 1.75 times larger; leave it out", "margin"),
    ("fp8", _only(True), "maxima are those over all devices; leave it out", "reduce_amax"),
    # other ways to be parallel
    ("tensor_parallel.partition_config", _only(["lm_head", "embed_out"]),
        "not yet supported: rules for embeddings and heads of their own; write layer_specs", "lm_head_patterns"),
    ("tensor_parallel.partition_config", _only(1), "write mesh.tensor, or tensor_parallel.autotp_size", "tp_size"),
    ("expert_parallel", _only("auto"), _IN_THE_MODEL, "score_func top_k route_norm route_scale routed_scaling_factor"
        " score_apply load_balance_coeff num_expert_groups num_limited_groups has_shared_experts"),
    ("expert_parallel", _only(1), "write tensor_parallel.dimensions, with the dimension of the experts' weights that "
        "mesh.tensor divides", "expert_tensor_parallel_size"),
    # training methods
    ("compression_training", _NOTHING, _QUANTIZE, "weight_quantization activation_quantization"),
    ("compression_training", _NOTHING, _PRUNE, "sparse_pruning row_pruning head_pruning channel_pruning"),
    ("compression_training", _NOTHING, f"{_NO_CHANGE}build the model with fewer layers and copy the teacher's into "
        "params=, and leave this out", "layer_reduction"),
    ("", _NOTHING, _QUANTIZE, "weight_quantization quantize_training"),
)

# The value that leaves the feature off, and the feature in words.
_LATER = (
    (ZERO, False, "frozen weights stored as int8; zero_quantized_weights gathers them as int8",
        "zero_quantized_nontrainable_weights"),
    (f"{ZERO}.zeropp_loco_param", None, "error feedback (LoCo) for quantized gradients; zero_quantized_gradients works "
        "without it", "err_beta reset_T"),
    (ZERO, 2**63 - 1, "a cap on the replicated parameters", "stage3_model_persistence_threshold"),
    ("compile", False, "compiler passes that offload; write zero_optimization.offload_optimizer or offload_param, or "
        "activation_checkpointing.cpu_checkpointing", "offload_activation offload_opt_states offload_parameters"),
    ("tensor_parallel", None, "rules by PyTorch's names; write tensor_parallel.dimensions, by the model's",
        "injection_policy_tuple"),
    ("tensor_parallel.partition_config", False, "a check that every layer has a spec; the run report prints the table",
        "strict_mode"),
    ("tensor_parallel.partition_config", 1, "rules for embeddings and heads of their own; write layer_specs",
        "embedding_partition_dim"),
    ("tensor_parallel", False, "kernels for inference", "replace_with_kernel_inject kernel_inject"),
    ("tensor_parallel", False, "weights that stay on the host", "keep_module_on_host"),
    ("tensor_parallel.tp", None, "process groups from outside; the mesh has them", "mpu tp_group"),
    ("checkpoint", False, "checkpoints on the disks of each host", "use_node_local_storage"),
    ("nebula", False, "Nebula; checkpoints are asynchronous without it (checkpoint.dir, checkpoint.max_to_keep)",
        "enabled"),
    ("datastates_ckpt", None, "DataStates; checkpoints are asynchronous without it", "host_cache_size parser_threads"),
    ("elasticity", False, "elastic batch sizes; a resume on other GPUs keeps train_batch_size", "enabled"),
    (f"{_SAMPLING}.dynamic_batching", False, "batches by number of tokens (jzero.data.Packed fills rows instead)",
        "enabled"),
    (f"{CURRICULUM_METRICS}.seqlen", "single_cluster", BY_METRIC, "clustering_type"),
    ("progressive_layer_drop", False, "progressive layer dropping", "enabled"),
)

_DETAIL = (
    ("amp", "", "opt_level cast_model_type patch_torch_functions keep_batchnorm_fp32 master_weights cast_model_outputs"
        " num_losses verbosity min_loss_scale max_loss_scale loss_scale"),
    ("torch_autocast", "", "dtype lower_precision_safe_modules"),
    ("compile", "", "offload_activation_pin_memory"),
    ("nebula", "", "persistent_storage_path persistent_time_interval num_of_version_in_retention enable_nebula_load"
        " nebula_load_path"),
    ("elasticity", "", "max_train_batch_size micro_batch_sizes min_gpus max_gpus min_time prefer_larger_batch version"
        " ignore_non_elastic_batch_info num_gpus_per_node model_parallel_size"),
    ("autotuning", "", "fast results_dir exps_dir overwrite metric start_profile_step end_profile_step tuner_type"
        " tuner_early_stopping tuner_num_trials mp_size num_tuning_micro_batch_sizes arg_mappings max_train_batch_size"
        " min_train_batch_size max_train_micro_batch_size_per_gpu min_train_micro_batch_size_per_gpu model_info"
        " model_info_path metric_path num_nodes num_gpus"),
    (f"{_SAMPLING}.dynamic_batching", "", "metrics_path lr_scaling_method min_batch_size max_batch_size"
        " sequence_picking_order max_tokens verbose"),
    (f"{CURRICULUM_METRICS}.seqlen", "", "difficulty_type index_to_sample_path index_to_metric_path"),
    ("data_efficiency", "", "data_routing.enabled"),
    ("data_efficiency.data_routing.random_ltd", "", "total_layer_num random_ltd_layer_num random_ltd_layer_id"
        " micro_batch_size global_batch_size model_mask_name model_type hidden_state_order random_ltd_schedule"
        " layer_token_lr_schedule"),
    ("progressive_layer_drop", "", "theta gamma"),
    ("hybrid_engine", "", "max_out_tokens inference_tp_size release_inference_cache pin_parameters"
        " tp_gather_partition_size enable_cuda_graph"),
    ("eigenvalue", "", "verbose max_iter tol stability gas_boundary_resolution layer_name layer_num model_name"),
)
# fmt: on


def _row(fate: Fate | Literal["later"], text: str, value: Any = None) -> Key:
    if fate != "later":
        return Key(fate, text, value)
    fix = "leave it out" if value is None else f"only {as_json(value)} is accepted, or leave it out"
    return Key("refused", f"not yet supported: {text}; {fix}", _only(value))


_FATES: dict[Fate | Literal["later"], tuple[tuple[Any, ...], ...]] = {
    "replaced": _REPLACED, "ignored": _IGNORED, "refused": _REFUSED, "later": _LATER, "detail": _DETAIL,
}  # fmt: skip
KEYS = {
    dotted_key(section, key): _row(fate, text, *value)
    for fate, rows in _FATES.items()
    for section, *value, text, keys in rows
    for key in keys.split()
}


def is_replaced(key: str) -> bool:
    """Return whether something else does the work of a key."""
    return key in KEYS and KEYS[key].fate == "replaced"


# Sections that DeepSpeed reads through pydantic, which takes numbers and flags in quotes too; those with names or
# paths are left out, since these may look like numbers.
TAKES_QUOTES = frozenset((ZERO, "fp16", "bf16", "compile", "hybrid_engine", "aio", "timers", "comms_logger"))
