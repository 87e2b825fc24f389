"""What a config value may be, and the table of DeepSpeed keys that are not settings of jzero.

`REPLACED` keys have no meaning under XLA: they load, and `Config.replaced` says what does their work.
`REFUSED` keys would change what the run does: they load at a value that asks for nothing, else they are errors.
A key is a row. When a feature arrives its row leaves this file and becomes a field of `jzero.config`.
"""

import difflib
import json
import math
import numbers
import re
from collections.abc import Callable, Collection, Container, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple


def show(value: object, width: int = 70) -> str:
    """The value as one would write it in the JSON file, cut to one readable line."""
    text = json.dumps(value, default=repr, ensure_ascii=False)
    return text if len(text) <= width else text[: width - 3] + "..."


@dataclass(frozen=True)
class Kind:
    """A kind of value: `parse` returns the value in jzero's spelling or raises ValueError (its text is a hint).

    >>> number(1, whole=True)("8")
    Traceback (most recent call last):
    ValueError: must be a positive integer; it is a string: write it without quotes
    """

    allowed: str
    parse: Callable[[Any], Any]

    def __call__(self, value: Any) -> Any:
        try:
            return self.parse(value)
        except (ValueError, TypeError, OverflowError) as hint:
            raise ValueError(f"must be {self.allowed}" + (f"; {hint}" if str(hint) else "")) from None


def number(least: float = -math.inf, *, whole: bool = False, none: bool = False, or_: float | None = None) -> Kind:
    """A finite number >= `least` (or exactly `or_`); whole numbers may be written as 5e8."""

    def parse(value: Any) -> Any:
        if value is None and none:
            return None
        if isinstance(value, str):
            raise ValueError("it is a string: write it without quotes")
        if isinstance(value, bool) or not isinstance(value, numbers.Real) or not math.isfinite(value):
            raise ValueError
        result = (int(value) if isinstance(value, numbers.Integral) else int(float(value))) if whole else float(value)
        if result != value or (result < least and result != or_):
            raise ValueError
        return result

    noun = "integer" if whole else "number"
    plain = {0: f"a non-negative {noun}", 1: f"a positive {noun}" if whole else "a number >= 1", -math.inf: f"a {noun}"}
    allowed = plain[least].replace("a integer", "an integer")
    return Kind((f"{or_} or " if or_ is not None else "") + allowed + (" or null" if none else ""), parse)


def one_of(choices: Collection[str], spellings: Mapping[str, str | None] | None = None, *, none: Any = ...) -> Kind:
    """One of `choices`, in any letter case; `spellings` are accepted too, and null means `none` where it is given."""
    known = {**{c: c for c in choices}, **(spellings or {})}

    def parse(value: Any) -> str | None:
        if value is None and none is not ...:
            return none
        if not isinstance(value, str):
            raise ValueError
        if value.lower() not in known:
            close = difflib.get_close_matches(value.lower(), choices, n=1)
            raise ValueError(f"did you mean {show(close[0])}?" if close else "")
        return known[value.lower()]

    return Kind(" or ".join([show(c) for c in choices] + (["null"] if none is None else [])), parse)


def instance(allowed: str, *types: type) -> Kind:
    """A value of one of the Python types, as it is."""

    def parse(value: Any) -> Any:
        if not isinstance(value, types):
            raise ValueError("write it without quotes" if bool in types and value in ("true", "false") else "")
        return value

    return Kind(allowed, parse)


def _each(item: Kind) -> Callable[[Any], dict[str, Any]]:
    def parse(value: Any) -> dict[str, Any]:
        if not isinstance(value, Mapping):
            raise ValueError
        for key, entry in value.items():
            try:
                item(entry)
            except ValueError as wrong:
                raise ValueError(f"{key} = {show(entry)} {wrong}") from None
        return dict(value)

    return parse


def _patterns(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list | tuple):
        raise ValueError(f"write [{show(value)}]" if isinstance(value, str) else "")
    for pattern in value:
        if not isinstance(pattern, str):
            raise ValueError(f"{show(pattern)} is not a string")
        try:
            re.compile(pattern)
        except re.error as wrong:
            raise ValueError(f"{show(pattern)} does not compile: {wrong}") from None
    return tuple(value)


def _stage(value: Any) -> int:
    if isinstance(value, bool) or value not in (0, 1, 2, 3):
        raise ValueError
    return int(value)


_DTYPES = {"float32": "fp32", "float": "fp32", "float16": "fp16", "half": "fp16", "bfloat16": "bf16"}
DTYPE_NAMES = ("fp32", "fp16", "bf16")
DTYPE_SPELLINGS = _DTYPES | {f"torch.{name}": dtype for name, dtype in _DTYPES.items()}

FLAG = instance("true or false", bool)
UNROLL = Kind('true, false or "auto"', lambda value: value if value == "auto" else FLAG.parse(value))
TEXT = instance("a string", str)
COUNT = number(0, whole=True)
POSITIVE = number(1, whole=True)
PARAMS = Kind("an object of names and values", _each(Kind("anything", lambda value: value)))
OPTIONS = Kind(
    "an object of XLA option names and values",
    _each(instance("true, false, a number or a string", bool, int, float, str)),
)
STAGE = Kind("0, 1, 2 or 3", _stage)
PATTERNS = Kind("a list of regular expressions", _patterns)
_NAMES = instance("a list of names", list, tuple)
_FLAG_OR_NULL = instance("true, false or null", bool, type(None))
_DTYPE = one_of(DTYPE_NAMES, DTYPE_SPELLINGS, none=None)


# ---- keys that something else replaces ----------------------------------------------------------------------------


class Replaced(NamedTuple):
    """A key the user gave that has no meaning under JAX, and what does its work."""

    key: str
    value: Any
    by: str


class Row(NamedTuple):
    kind: Kind
    by: str


def _replaced(section: str, by: str, kind: Kind, keys: str) -> dict[str, Row]:
    return {f"{section}.{key}" if section else key: Row(kind, by) for key in keys.split()}


_ZERO = "zero_optimization"
_ONE_STEP = "the compiled step: XLA fuses, combines and orders the collectives"
_SCHEDULER = "XLA's latency-hiding scheduler, which overlaps communication and compute at every stage"
_LAYERWISE = "the layer stack: a layer's parameters are gathered where it runs and freed after it"
_NO_HOOKS = "the compiled step: there are no module hooks to tune"
_ANY_LAYOUT = "global arrays: a parameter always has its full shape and loads on any layout"
_COMPILED = "jit: every step is one compiled XLA program"

REPLACED: dict[str, Row] = {
    **_replaced("", "the mean over the global batch inside the compiled step", FLAG, "prescale_gradients"),
    **_replaced("", "the mean over the global batch inside the compiled step", number(), "gradient_predivide_factor"),
    **_replaced("", _ONE_STEP, FLAG, "disable_allgather"),
    **_replaced("", "optax: every optimizer works at every stage", FLAG, "zero_allow_untested_optimizer"),
    **_replaced("", "optax: one optimizer for every memory", FLAG, "zero_force_ds_cpu_optimizer"),
    **_replaced("", "XLA's command buffers (CUDA graphs), on by default", FLAG, "graph_harvesting"),
    **_replaced("", "steps_per_print: jzero prints the run report and progress lines", TEXT, "log_level"),
    **_replaced("", "the order of the mesh axes", FLAG, "use_data_before_expert_parallelism"),
    **_replaced("data_types", 'the "bf16" and "fp16" sections', _DTYPE, "param_dtype buffer_dtype"),
    **_replaced("optimizer", "jit: the update is one fused program", FLAG, "legacy_fusion"),
    **_replaced("fp16", "the dtype policy: floating batch leaves are cast to the compute dtype", FLAG, "auto_cast"),
    **_replaced("timers.throughput", "steps are timed when their result is ready", FLAG, "synchronized"),
    **_replaced(
        "activation_checkpointing",
        "XLA's memory planner and the profiler",
        FLAG,
        "contiguous_memory_optimization synchronize_checkpoint_boundary profile",
    ),
    **_replaced(
        "activation_checkpointing",
        "the layer stack: every layer is a checkpoint",
        number(1, whole=True, none=True),
        "number_checkpoints",
    ),
    **_replaced("activation_checkpointing", "nothing: no tensor axis to partition over", FLAG, "partition_activations"),
    **_replaced("pipeline", "random keys: each layer's key is folded from the seed", FLAG, "seed_layers"),
    **_replaced("pipeline", "the mesh", FLAG, "pipe_partitioned grad_partitioned"),
    **_replaced("pipeline", "jax.checkpoint", FLAG, "use_reentrant"),
    **_replaced(
        _ZERO,
        _ONE_STEP,
        FLAG,
        "contiguous_gradients reduce_scatter use_multi_rank_bucket_allreduce allgather_partitions round_robin_gradients"
        " legacy_stage1 mics_hierarchical_params_gather stage3_use_all_reduce_for_fetch_params"
        " stage3_allgather_sequential",
    ),
    **_replaced(
        _ZERO,
        "XLA's collective combiner; its thresholds can be set in compiler_options",
        COUNT,
        "reduce_bucket_size allgather_bucket_size",
    ),
    **_replaced(_ZERO, _SCHEDULER, _FLAG_OR_NULL, "overlap_comm"),
    **_replaced(_ZERO, "one fused optimizer update, which needs no sub-groups", POSITIVE, "sub_group_size"),
    **_replaced(
        _ZERO, _LAYERWISE, COUNT, "stage3_prefetch_bucket_size stage3_max_live_parameters stage3_max_reuse_distance"
    ),
    **_replaced(
        _ZERO,
        _ANY_LAYOUT,
        FLAG,
        "load_from_fp32_weights elastic_checkpoint pipeline_loading_checkpoint"
        " stage3_gather_16bit_weights_on_model_save stage3_gather_fp16_weights_on_model_save",
    ),
    **_replaced(_ZERO, _NO_HOOKS, COUNT, "stage3_module_granularity_threshold"),
    **_replaced(f"{_ZERO}.leaf_module", _NO_HOOKS, _NAMES, "classes names name_suffixes"),
    **_replaced(
        _ZERO,
        _NO_HOOKS,
        FLAG,
        "memory_efficient_linear log_trace_cache_warnings override_module_apply enable_sanity_checks",
    ),
    **_replaced(_ZERO, "autodiff: an unused parameter has gradient zero", FLAG, "ignore_unused_parameters"),
    **_replaced(_ZERO, "the sharded optimizer state", FLAG, "save_muon_momentum_buffer_in_memory"),
    **_replaced(
        "compile",
        _COMPILED,
        FLAG,
        "deepcompile free_activation double_buffer symmetric_memory debug_log sync_before_reduce sync_after_reduce"
        " sync_before_allgather sync_after_allgather keep_int_input_tensors keep_all_input_tensors",
    ),
    **_replaced("compile", _COMPILED, COUNT, "free_activation_threshold"),
}


# ---- keys that are refused when they ask for something ------------------------------------------------------------


class Refused(NamedTuple):
    """`off` holds the values that ask for nothing; for any other value `text` says why not and what to do."""

    off: Container[Any]
    text: str

    def message(self, key: str, value: Any) -> str:
        only = f"; only {show(self.off[-1])} is accepted, or leave it out" if isinstance(self.off, tuple) else ""
        return f"{key} = {show(value)}: {self.text}{only}"


class _Anything:
    """The values of a detail key: it asks for nothing on its own, the section's switch does."""

    def __contains__(self, value: Any) -> bool:
        return True


class _NothingEnabled:
    """Nested sections in which no `enabled` is on."""

    def __contains__(self, value: Any) -> bool:
        if not isinstance(value, Mapping):
            return value in (None, False)
        return value.get("enabled", False) is False and all(v in self for v in value.values() if isinstance(v, Mapping))


def _switched(
    section: str, what: str, details: str, *, switch: str = "enabled", off: tuple[Any, ...] = (False,)
) -> dict[str, Refused]:
    """A section that one key turns on; its other keys are details."""
    rows = {f"{section}.{switch}": Refused((None, *off), f"not yet: {what}")}
    return rows | {f"{section}.{key}": Refused(_Anything(), "") for key in details.split()}


def _defaults(section: str, what: str, **defaults: Any) -> dict[str, Refused]:
    """Keys each of which asks for something unless it has its default."""
    keys = {(f"{section}." if section else "") + key.replace("__", "."): value for key, value in defaults.items()}
    return {key: Refused((None, value), f"not yet: {what}") for key, value in keys.items()}


def _nested(section: str, what: str, keys: str) -> dict[str, Refused]:
    return {f"{section}.{key}": Refused(_NothingEnabled(), f"not yet: {what}; leave it out") for key in keys.split()}


_USE_BF16 = 'jzero casts by one dtype policy, not operation by operation: write "bf16": {"enabled": true} instead'
_CLIP = 'clipping is no optimizer parameter: write "gradient_clipping" with this value at the top level'
_PIN = "pin_memory nvme_path buffer_count"

REFUSED: dict[str, Refused] = {
    "optimizer.params.max_grad_norm": Refused(_NothingEnabled(), _CLIP),
    **{
        key: row._replace(text=_USE_BF16)
        for key, row in {
            **_switched("torch_autocast", "", "dtype lower_precision_safe_modules"),
            **_switched(
                "amp",
                "",
                "opt_level cast_model_type patch_torch_functions keep_batchnorm_fp32 master_weights"
                " cast_model_outputs num_losses verbosity min_loss_scale max_loss_scale loss_scale",
            ),
        }.items()
    },
    # precision, communication
    **_defaults("bf16", "updating gradients inside the backward pass", immediate_grad_update=False),
    **_defaults("", "sparse gradients; embeddings get dense ones", sparse_gradients=False),
    "seq_parallel_communication_data_type": Refused(
        (None, "float32", "fp32"), "not yet: a communication dtype for sequence parallelism"
    ),
    # ZeRO
    **_defaults(
        _ZERO,
        "quantized collectives (ZeRO++)",
        zero_quantized_weights=False,
        zero_quantized_nontrainable_weights=False,
        zero_quantized_gradients=False,
        zeropp_loco_param__err_beta=None,
        zeropp_loco_param__reset_T=None,
    ),
    **_defaults(_ZERO, "a cap on the replicated parameters", stage3_model_persistence_threshold=2**63 - 1),
    **_switched(
        f"{_ZERO}.offload_optimizer",
        "optimizer state outside the device",
        f"{_PIN} pipeline_read pipeline_write pipeline fast_init ratio super_offload cpuadam_cores_perc",
        switch="device",
        off=("none",),
    ),
    **_switched(
        f"{_ZERO}.offload_param",
        "parameters outside the device",
        f"{_PIN} buffer_size max_in_cpu",
        switch="device",
        off=("none",),
    ),
    **_defaults(_ZERO, "offload", cpu_offload=False, cpu_offload_params=False, cpu_offload_use_pin_memory=False),
    **_defaults(
        f"{_ZERO}.zenflow",
        "ZenFlow offload",
        **dict.fromkeys(
            [
                "topk_ratio",
                "select_strategy",
                "select_interval",
                "update_interval",
                "overlap_step",
                "offload",
                "auto_ratio",
                "full_warm_up_rounds",
                "pt_reserved_cores_perc",
                "steps_per_epoch",
            ]
        ),
    ),
    **_defaults(
        "aio",
        "NVMe offload",
        block_size=1048576,
        queue_depth=8,
        intra_op_parallelism=1,
        single_submit=False,
        overlap_events=True,
        use_gds=False,
    ),
    **_defaults("compile", "offload", offload_activation=False, offload_opt_states=False, offload_parameters=False),
    **_defaults("compile", "a choice of compiler passes", passes=[]),
    # other ways to be parallel
    **_defaults("pipeline", "pipeline stages", stages=1, partition="best", activation_checkpoint_interval=0),
    **_switched(
        "tensor_parallel",
        "tensor parallelism",
        "preset_model tp_overlap_comm partition_config tp_grain_size",
        switch="autotp_size",
        off=(1, 0),
    ),
    **_switched("tensor_parallel.tp", "tensor parallelism", "tp_grain_size", switch="tp_size", off=(1,)),
    **_defaults("", "sequence parallelism", sequence_parallel_size=1),
    **_switched(
        "expert_parallel",
        "expert parallelism",
        "autoep_size preset_model use_grouped_mm score_func top_k moe_layer_pattern router_pattern expert_pattern",
    ),
    # what a run reports
    **_switched("tensorboard", "TensorBoard output", "output_path job_name"),
    **_switched("csv_monitor", "CSV output", "output_path job_name"),
    **_switched("wandb", "Weights & Biases output", "group team project"),
    **_switched(
        "comet",
        "Comet output",
        "samples_log_interval project workspace api_key experiment_name experiment_key online mode",
    ),
    **_switched(
        "flops_profiler",
        "the FLOPS profiler",
        "recompute_fwd_factor profile_step module_depth top_modules detailed output_file",
    ),
    **_switched("comms_logger", "the collectives report", "prof_all prof_ops verbose debug"),
    **_defaults("", "breakdowns of a step", wall_clock_breakdown=False, memory_breakdown=False),
    **_defaults("", "the state dump", dump_state=False),
    **_defaults("", "the vocabulary check", vocabulary_size=None),
    # checkpoints
    **_defaults(
        "checkpoint",
        "checkpoint settings",
        tag_validation="WARN",
        load_universal=False,
        use_node_local_storage=False,
        parallel_write__pipeline_stage=False,
        checkpoint_serialization=True,
        writer__type=None,
        writer__io_buffer_size=67108864,
        writer__io_buffer_double=True,
        writer__show_statistics=False,
        writer__data_parallel=None,
        writer__decoupled=False,
        writer__io_multiplier=1,
    ),
    **_switched(
        "nebula",
        "asynchronous checkpoints",
        "persistent_storage_path persistent_time_interval"
        " num_of_version_in_retention enable_nebula_load nebula_load_path",
    ),
    **_defaults("datastates_ckpt", "asynchronous checkpoints", host_cache_size=None, parser_threads=None),
    # elastic runs, tuning, data
    **_switched(
        "elasticity",
        "elastic batch sizes",
        "max_train_batch_size micro_batch_sizes min_gpus max_gpus min_time"
        " prefer_larger_batch version ignore_non_elastic_batch_info num_gpus_per_node model_parallel_size",
    ),
    **_switched(
        "autotuning",
        "autotuning",
        "fast results_dir exps_dir overwrite metric start_profile_step end_profile_step"
        " tuner_type tuner_early_stopping tuner_num_trials mp_size num_tuning_micro_batch_sizes arg_mappings"
        " max_train_batch_size min_train_batch_size max_train_micro_batch_size_per_gpu"
        " min_train_micro_batch_size_per_gpu model_info model_info_path metric_path",
    ),
    **_switched("data_efficiency", "data efficiency", "seed data_sampling data_routing"),
    **_switched(
        "curriculum_learning",
        "curriculum learning",
        "curriculum_type min_difficulty max_difficulty schedule_type schedule_config",
    ),
    # training methods
    **_switched("progressive_layer_drop", "progressive layer dropping", "theta gamma"),
    **_switched(
        "hybrid_engine",
        "the hybrid engine",
        "max_out_tokens inference_tp_size release_inference_cache"
        " pin_parameters tp_gather_partition_size enable_cuda_graph",
    ),
    **_switched(
        "eigenvalue", "eigenvalues", "verbose max_iter tol stability gas_boundary_resolution layer_name layer_num"
    ),
    **_defaults(
        "sparse_attention",
        "sparse attention",
        **dict.fromkeys(
            [
                "mode",
                "block",
                "different_layout_per_head",
                "num_local_blocks",
                "num_global_blocks",
                "attention",
                "horizontal_global_attention",
                "num_different_global_patterns",
                "num_random_blocks",
                "local_window_blocks",
                "global_block_indices",
                "global_block_end_indices",
                "num_sliding_window_blocks",
            ]
        ),
    ),
    **_nested(
        "compression_training",
        "compression",
        "weight_quantization activation_quantization sparse_pruning row_pruning"
        " head_pruning channel_pruning layer_reduction",
    ),
    **{
        key: Refused(_NothingEnabled(), "not yet: quantized training; leave it out")
        for key in ("weight_quantization", "quantize_training")
    },
}

# An old key and the key that took its place: giving both is an error.
DEPRECATED = {
    "bfloat16": "bf16",
    f"{_ZERO}.cpu_offload": f"{_ZERO}.offload_optimizer",
    f"{_ZERO}.cpu_offload_params": f"{_ZERO}.offload_param",
    f"{_ZERO}.stage3_gather_fp16_weights_on_model_save": f"{_ZERO}.stage3_gather_16bit_weights_on_model_save",
}

# Parameters of an optimizer or schedule that people write one level too high.
PARAM_HOMES = {
    **dict.fromkeys(
        ["lr", "betas", "eps", "weight_decay", "momentum", "bias_correction"], "it belongs in optimizer.params"
    ),
    **dict.fromkeys(
        ["warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "warmup_type", "total_num_steps", "cos_min_ratio"],
        "it belongs in scheduler.params",
    ),
    "max_grad_norm": 'write "gradient_clipping" at the top level',
}


def suggest(section: str, key: str, working: Collection[str], known: Collection[str]) -> str:
    """Where an unknown key belongs or what it looks like, given the dotted `working` keys and all `known` ones.

    >>> suggest("zero_optimization", "gradient_clipping", ["gradient_clipping"], ["zero_optimization.stage"])
    'it belongs at the top level'
    """
    inside, low = f"{section}." if section else "", key.lower()

    def here(keys: Collection[str]) -> list[str]:
        return sorted({k.removeprefix(inside).split(".")[0] for k in keys if k.startswith(inside)})

    def homes(keys: Collection[str]) -> list[str]:
        return sorted({k.rpartition(".")[0] for k in keys if k.rpartition(".")[2] == low})

    leaves: dict[str, list[str]] = {}
    for name in working:
        leaves.setdefault(name.rpartition(".")[2], []).append(name)
    if f"{inside}{key}" in known:
        return "write its dots as nested sections"
    if close := difflib.get_close_matches(low, here(known), n=1, cutoff=0.85):
        return f"did you mean {show(close[0])}?"
    if key in PARAM_HOMES:
        return PARAM_HOMES[key]
    places = homes(working) or homes(known)
    if "" in places:
        return "it belongs at the top level"
    if 0 < len(places) <= 3:
        return "it belongs in " + " or ".join(places)
    if close := difflib.get_close_matches(low, here(known), n=1, cutoff=0.65):
        return f"did you mean {show(close[0])}?"
    if close := difflib.get_close_matches(low, leaves, n=1, cutoff=0.8):
        return "did you mean " + " or ".join(leaves[close[0]]) + "?"
    return f"the keys here are {', '.join(here(working) or here(known))}"
