"""DeepSpeed's keys that are not settings of jzero: a key is a row.

`REPLACED` keys have no meaning under XLA: they load, and `Config.replaced` lists them with their replacement.
`REFUSED` keys would change the run: they load at a value that turns the feature off, else they are errors.
When a feature arrives, its row leaves this file and becomes a field of `sections`.
"""

from collections.abc import Container, Mapping
from typing import Any, NamedTuple

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
    either,
    number,
    one_of,
)


def dotted_key(section: str, key: str) -> str:
    """Join a section ("" is the top level) and a key."""
    return f"{section}.{key}" if section else key


# ---- keys whose work something else does ----------------------------------------------------------------------------


class Replaced(NamedTuple):
    """A given key that has no meaning under JAX, and its replacement in words."""

    key: str
    value: Any
    by: str


class Replacement(NamedTuple):
    """The kind of value of a replaced key (null is allowed too), and its replacement in words."""

    kind: Kind
    by: str


def _replaced(*rows: tuple[str, Kind, str, str]) -> dict[str, Replacement]:
    return {dotted_key(section, key): Replacement(kind, by) for section, kind, by, keys in rows for key in keys.split()}


_ZERO, _REMAT = "zero_optimization", "activation_checkpointing"
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

# fmt: off
REPLACED: dict[str, Replacement] = _replaced(
    ("", FLAG, _MEAN, "prescale_gradients"),
    ("", number(), _MEAN, "gradient_predivide_factor"),
    ("", FLAG, _ONE_STEP, "disable_allgather"),
    ("", FLAG, "optax: every optimizer works at every stage", "zero_allow_untested_optimizer"),
    ("", FLAG, "optax: the same optimizer for state on the device and on the host", "zero_force_ds_cpu_optimizer"),
    ("", FLAG, "XLA's command buffers (CUDA graphs), on by default", "graph_harvesting"),
    ("", TEXT, "steps_per_print: jzero prints the run report and progress lines", "log_level"),
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
    (_ZERO, FLAG, _ONE_STEP, "contiguous_gradients reduce_scatter use_multi_rank_bucket_allreduce allgather_partitions"
        " round_robin_gradients legacy_stage1 mics_hierarchical_params_gather stage3_use_all_reduce_for_fetch_params"
        " stage3_allgather_sequential"),
    # The Hugging Face Trainer computes bucket sizes as 0.9 times a square, so they have fractions.
    (_ZERO, NON_NEGATIVE, _COMBINER, "reduce_bucket_size allgather_bucket_size"),
    ("", NON_NEGATIVE, _COMBINER, "allgather_size"),
    ("pipeline", TEXT, "PipelineModule's partition_method", "partition_method"),
    (_ZERO, FLAG, _SCHEDULER, "overlap_comm"),
    (_ZERO, NON_NEGATIVE, "one fused optimizer update, which needs no sub-groups", "sub_group_size"),
    (f"{_ZERO}.zenflow", FLAG, _NO_DELAY, "overlap_step offload"),
    (f"{_ZERO}.zenflow", TEXT, _NO_DELAY, "select_strategy"),
    (f"{_ZERO}.zenflow", NON_NEGATIVE, _NO_DELAY, "topk_ratio select_interval update_interval auto_ratio"
        " full_warm_up_rounds pt_reserved_cores_perc steps_per_epoch"),
    (f"{_ZERO}.offload_optimizer", FLAG, _PINNED, "pin_memory"),
    (f"{_ZERO}.offload_param", FLAG, _PINNED, "pin_memory"),
    (_ZERO, FLAG, _PINNED, "cpu_offload_use_pin_memory"),
    (f"{_ZERO}.offload_optimizer", COUNT, _IN_PLACE, "buffer_count"),
    (f"{_ZERO}.offload_optimizer", FLAG, _IN_PLACE, "pipeline pipeline_read pipeline_write fast_init super_offload"),
    (f"{_ZERO}.offload_optimizer", NON_NEGATIVE, _IN_PLACE, "cpuadam_cores_perc"),
    (f"{_ZERO}.offload_param", NON_NEGATIVE, _LAYERWISE, "buffer_count buffer_size max_in_cpu"),
    (_ZERO, NON_NEGATIVE, _LAYERWISE,
        "stage3_prefetch_bucket_size stage3_max_live_parameters stage3_max_reuse_distance"),
    (_ZERO, FLAG, _ANY_LAYOUT, "load_from_fp32_weights elastic_checkpoint pipeline_loading_checkpoint"
        " stage3_gather_16bit_weights_on_model_save stage3_gather_fp16_weights_on_model_save"),
    (_ZERO, COUNT, _NO_HOOKS, "stage3_module_granularity_threshold"),
    (f"{_ZERO}.leaf_module", NAME_LIST, _NO_HOOKS, "classes names name_suffixes"),
    (_ZERO, FLAG, _NO_HOOKS,
        "memory_efficient_linear log_trace_cache_warnings override_module_apply enable_sanity_checks"),
    (_ZERO, FLAG, "autodiff: an unused parameter has gradient zero", "ignore_unused_parameters"),
    (_ZERO, FLAG, "the sharded optimizer state", "save_muon_momentum_buffer_in_memory"),
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
)
# fmt: on


# ---- keys that are refused when they ask for something ------------------------------------------------------------


class Refused(NamedTuple):
    """`off` contains the values that leave the feature off; any other value is an error with `text`, reason and fix."""

    off: Container[Any]
    text: str


class _Anything:
    """Contains every value: for the detail keys of a section whose switch alone turns the feature on."""

    def __contains__(self, value: Any) -> bool:
        return True


class _NothingEnabled:
    """Contains the nested sections in which no `enabled` is true."""

    def __contains__(self, value: Any) -> bool:
        if not isinstance(value, Mapping):
            return value in (None, False)
        return value.get("enabled", False) is False and all(v in self for v in value.values() if isinstance(v, Mapping))


def _details(section: str, keys: str) -> dict[str, Refused]:
    return {dotted_key(section, key): Refused(_Anything(), "") for key in keys.split()}


def _later(section: str, what: str, details: str = "", **off: Any) -> dict[str, Refused]:
    """Make the rows of a future feature.

    Args:
      section: the section of all its keys.
      what: the feature in words.
      details: keys that are accepted at any value, since the feature's switch decides.
      off: key -> the value (or a tuple of values) that leaves it off; None: only null does.
    """
    rows = _details(section, details)
    for key, value in off.items():
        values = value if isinstance(value, tuple) else (value,)
        fix = "leave it out" if value is None else f"only {either(map(as_json, values))} is accepted, or leave it out"
        rows[dotted_key(section, key)] = Refused((None, *values), f"not yet supported: {what}; {fix}")
    return rows


def _in_the_model(section: str, keys: str) -> dict[str, Refused]:
    text = 'the model\'s code decides, see jzero.route and jzero.experts; only "auto" is accepted, or leave it out'
    return {dotted_key(section, key): Refused((None, "auto"), text) for key in keys.split()}


def _elsewhere(section: str, where: str, keys: str) -> dict[str, Refused]:
    text = f"jzero does not change the model; {where}, and leave this out"
    return {dotted_key(section, key): Refused(_NothingEnabled(), text) for key in keys.split()}


def _unset(keys: str) -> dict[str, Any]:
    """Map each key to None, the only value that leaves its feature off."""
    return dict.fromkeys(keys.split())


_SWITCHES = "must be true or false"
CLIP = 'the optimizer does not clip; write "gradient_clipping" with this value at the top level'
_QUANTIZE = "quantize in the model (qwix and aqt fake-quantize Flax modules)"
_PRUNE = "multiply the kernels by masks in the model, or mask the updates with optimizer=optax.chain(...)"
_BY_METRIC = "selecting samples by difficulty; sort training_data yourself and pass an iterable, which keeps its order"
_METRICS = f"{_SAMPLING}.curriculum_learning.curriculum_metrics"

# fmt: off
REFUSED: dict[str, Refused] = {
    # precision, gradients, communication
    "fp32_allreduce": Refused((None, False), 'an old key of DeepSpeed; write "communication_data_type": "fp32"'),
    "fp16.type": Refused((None, "fp16", "float16"), 'write "bf16": {"enabled": true} and leave the fp16 section out'),
    "optimizer.params.max_grad_norm": Refused((None, 0), CLIP),
    "amp.enabled": Refused((None, False), _SWITCHES),  # true: see `autocast`
    **_details("amp", "opt_level cast_model_type patch_torch_functions keep_batchnorm_fp32 master_weights"
        " cast_model_outputs num_losses verbosity min_loss_scale max_loss_scale loss_scale"),
    "torch_autocast.enabled": Refused((None, False), _SWITCHES),
    **_details("torch_autocast", "dtype lower_precision_safe_modules"),
    # fp8, by Transformer Engine's names
    "fp8.amax_compute_algo": Refused((None, "max"),
        "the largest of the last amax_history_len steps decides; leave it out"),
    "fp8.margin": Refused((None, 0), "scales leave room for elements at least 1.75 times larger; leave it out"),
    "fp8.reduce_amax": Refused((None, True), "maxima are those over all devices; leave it out"),
    # ZeRO
    **_later(_ZERO, "frozen weights stored as int8; zero_quantized_weights gathers them as int8",
        zero_quantized_nontrainable_weights=False),
    **_later(f"{_ZERO}.zeropp_loco_param", "error feedback (LoCo) for quantized gradients; zero_quantized_gradients "
        "works without it", err_beta=None, reset_T=None),
    **_later(_ZERO, "a cap on the replicated parameters", stage3_model_persistence_threshold=2**63 - 1),
    **_later("compile", "compiler passes that offload; write zero_optimization.offload_optimizer or offload_param, or "
        "activation_checkpointing.cpu_checkpointing", "offload_activation_pin_memory", offload_activation=False,
        offload_opt_states=False, offload_parameters=False),
    **_later("compile", "a choice of compiler passes; XLA chooses its own", passes=[]),
    # other ways to be parallel
    **_later("tensor_parallel", "rules by PyTorch's names; write tensor_parallel.dimensions, by the model's",
        injection_policy_tuple=None),
    **_later("tensor_parallel.partition_config", "a check that every layer has a spec; the run report prints the table",
        strict_mode=False),
    **_later("tensor_parallel.partition_config", "rules for embeddings and heads of their own; write layer_specs",
        embedding_partition_dim=1),
    "tensor_parallel.partition_config.lm_head_patterns": Refused((None, ["lm_head", "embed_out"]),
        "not yet supported: rules for embeddings and heads of their own; write layer_specs"),
    "tensor_parallel.partition_config.tp_size": Refused((None, 1), "write mesh.tensor, or tensor_parallel.autotp_size"),
    **_later("tensor_parallel", "kernels for inference", replace_with_kernel_inject=False, kernel_inject=False),
    **_later("tensor_parallel", "weights that stay on the host", keep_module_on_host=False),
    **_later("tensor_parallel.tp", "process groups from outside; the mesh has them", mpu=None, tp_group=None),
    **_in_the_model("expert_parallel", "score_func top_k route_norm route_scale routed_scaling_factor score_apply"
        " load_balance_coeff num_expert_groups num_limited_groups has_shared_experts"),
    "expert_parallel.expert_tensor_parallel_size": Refused((None, 1),
        "write tensor_parallel.dimensions, with the dimension of the experts' weights that mesh.tensor divides"),
    # checkpoints
    **_later("checkpoint", "checkpoints on the disks of each host", use_node_local_storage=False),
    **_later("nebula", "Nebula; checkpoints are asynchronous without it (checkpoint.dir, checkpoint.max_to_keep)",
        "persistent_storage_path persistent_time_interval num_of_version_in_retention enable_nebula_load"
        " nebula_load_path", enabled=False),
    **_later("datastates_ckpt", "DataStates; checkpoints are asynchronous without it", host_cache_size=None,
        parser_threads=None),
    # elastic runs, tuning, data
    **_later("elasticity", "elastic batch sizes; a resume on other GPUs keeps train_batch_size",
        "max_train_batch_size micro_batch_sizes min_gpus max_gpus min_time"
        " prefer_larger_batch version ignore_non_elastic_batch_info num_gpus_per_node model_parallel_size",
        enabled=False),
    **_details("autotuning", "fast results_dir exps_dir overwrite metric start_profile_step"
        " end_profile_step tuner_type tuner_early_stopping tuner_num_trials mp_size num_tuning_micro_batch_sizes"
        " arg_mappings max_train_batch_size min_train_batch_size max_train_micro_batch_size_per_gpu"
        " min_train_micro_batch_size_per_gpu model_info model_info_path metric_path"),
    **_later(f"{_SAMPLING}.dynamic_batching", "batches by number of tokens (jzero.data.Packed fills rows instead)",
        "metrics_path lr_scaling_method min_batch_size max_batch_size sequence_picking_order max_tokens verbose",
        enabled=False),
    **_later(f"{_METRICS}.seqlen", _BY_METRIC, "difficulty_type index_to_sample_path index_to_metric_path",
        clustering_type="single_cluster"),
    **_later(_METRICS, _BY_METRIC, vocabularyrarity=None, seqlen_reshape=None),
    **_details("data_efficiency", "data_routing.enabled"),
    **_later("data_efficiency.data_routing.random_ltd", "dropping tokens between layers; the model itself can"
        " select random positions (jnp.take) and restore the others after its layers", "total_layer_num"
        " random_ltd_layer_num random_ltd_layer_id model_mask_name model_type hidden_state_order random_ltd_schedule"
        " layer_token_lr_schedule", enabled=False),
    # training methods
    **_later("progressive_layer_drop", "progressive layer dropping", "theta gamma", enabled=False),
    **_details("hybrid_engine", "max_out_tokens inference_tp_size release_inference_cache"
        " pin_parameters tp_gather_partition_size enable_cuda_graph"),
    **_details("eigenvalue",
        "verbose max_iter tol stability gas_boundary_resolution layer_name layer_num model_name"),
    **_elsewhere("compression_training", _QUANTIZE, "weight_quantization activation_quantization"),
    **_elsewhere("compression_training", _PRUNE, "sparse_pruning row_pruning head_pruning channel_pruning"),
    **_elsewhere("compression_training", "build the model with fewer layers and copy the teacher's into params=",
        "layer_reduction"),
    **_elsewhere("", _QUANTIZE, "weight_quantization quantize_training"),
}
# fmt: on


# ---- names --------------------------------------------------------------------------------------------------------

# Another name of a key -> the key. Giving both is an error.
RENAMED = {
    "bfloat16": "bf16",
    "tensor_parallel.tensor_parallel": "tensor_parallel.tp",
    f"{_METRICS}.seqlen_truncate": f"{_METRICS}.seqlen",  # Megatron-DeepSpeed's name
    # DeepSpeed takes both names of these.
    **{f"{_ZERO}.{name}": f"{_ZERO}.stage3_{name}" for name in (
        "prefetch_bucket_size", "param_persistence_threshold", "model_persistence_threshold", "max_live_parameters",
        "max_reuse_distance", "gather_16bit_weights_on_model_save", "module_granularity_threshold",
        "use_all_reduce_for_fetch_params", "allgather_sequential",
    )},
}  # fmt: skip


def renamed(path: str) -> str:
    """Return the key that a dotted key is another name of, itself if it is none."""
    for other, key in RENAMED.items():
        if path == other or path.startswith(f"{other}."):
            return key + path.removeprefix(other)
    return path


# Old flag -> the section that `true` stands for, with the device "cpu".
OLD_OFFLOAD = {
    f"{_ZERO}.cpu_offload": f"{_ZERO}.offload_optimizer",
    f"{_ZERO}.cpu_offload_param": f"{_ZERO}.offload_param",
    f"{_ZERO}.cpu_offload_params": f"{_ZERO}.offload_param",
}

# Old key -> the key that took its place; giving both is an error.
DEPRECATED = {
    **OLD_OFFLOAD,
    f"{_ZERO}.stage3_gather_fp16_weights_on_model_save": f"{_ZERO}.stage3_gather_16bit_weights_on_model_save",
}

# Sections that DeepSpeed reads through pydantic, which takes numbers and flags in quotes too; those with names or
# paths are left out, since these may look like numbers.
TAKES_QUOTES = frozenset((_ZERO, "fp16", "bf16", "compile", "hybrid_engine", "aio", "timers", "comms_logger"))
