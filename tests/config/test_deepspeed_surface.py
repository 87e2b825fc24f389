"""All of DeepSpeed's engine, `initialize` and `init_distributed`: each name works, or says what to write."""

import argparse
import datetime
import inspect
import re

import numpy as np
import pytest
from flax import nnx
from helpers.engines import FEATURES, UNIT, Net, assert_same, build, config, engine, mesh, parts, rows, three_calls

import jzero
from jzero.run.deepspeed_names import READ

# The public names of DeepSpeedEngine, PipelineEngine and DeepSpeedHybridEngine (0.19), and the arguments of those with
# which a training loop passes some.
NAMES = """
    destroy get_batch_info set_train_micro_batch_size get_global_grad_norm checkpoint_serialization_enabled
    checkpoint_writer_enabled checkpoint_tag_validation_enabled checkpoint_tag_validation_fail elasticity_enabled
    is_elastic_model_parallel_supported pld_enabled pld_params pld_theta pld_gamma eigenvalue_enabled
    eigenvalue_verbose eigenvalue_max_iter eigenvalue_tol eigenvalue_stability eigenvalue_gas_boundary_resolution
    eigenvalue_layer_name eigenvalue_layer_num curriculum_enabled_legacy curriculum_params_legacy
    data_efficiency_enabled data_efficiency_config data_sampling_enabled data_sampling_config
    curriculum_learning_enabled curriculum_learning_config random_ltd_enabled random_ltd_config random_ltd_initialize
    get_data_parallel_rank get_tensor_parallel_rank get_model_parallel_rank get_sequence_parallel_group
    wall_clock_breakdown flops_profiler_enabled flops_profiler_recompute_fwd_factor flops_profiler_profile_step
    flops_profiler_module_depth flops_profiler_top_modules flops_profiler_detailed flops_profiler_output_file
    memory_breakdown autotuning_enabled autotuning_start_profile_step autotuning_end_profile_step
    autotuning_metric_path autotuning_model_info_path autotuning_metric autotuning_profile_model_info
    sparse_gradients_enabled train_batch_size train_micro_batch_size_per_gpu optimizer_name optimizer_params
    optimizer_legacy_fusion scheduler_name scheduler_params quantize_training zero_optimization
    zero_allow_untested_optimizer zero_force_ds_cpu_optimizer zero_reduce_scatter zero_overlap_comm
    zero_offload_optimizer zero_offload_param zero_use_cpu_optimizer zero_cpu_offload zero_partial_offload
    super_offload cpuadam_cores_perc zero_sub_group_size zero_optimization_stage compile_zero_optimization_stage
    compile_autosp compile_autotp uses_parallelization_pass_only mics_shard_size zero_reduce_bucket_size
    zero_multi_rank_bucket_allreduce zero_allgather_bucket_size zero_optimization_partition_gradients
    zero_optimization_partition_weights is_first_weights_partition_group zero_contiguous_gradients
    zero_load_from_fp32_weights zero_elastic_checkpoint zero_nvme_offload_optimizer zero_max_live_parameters
    zero_max_reuse_distance zero_prefetch_bucket_size zero_module_granularity_threshold
    zero_param_persistence_threshold zero_model_persistence_threshold zero_gather_16bit_weights_on_model_save
    zero_grad_hooks zero_legacy_stage1 zero_ignore_unused_parameters zero_save_muon_momentum_buffer_in_memory
    tensor_parallel_config autotp_size graph_harvesting fp16_enabled bfloat16_enabled
    fp16_master_weights_and_gradients bf16_master_weights_and_gradients bf16_optimizer_states amp_enabled amp_params
    torch_autocast_enabled torch_autocast_dtype torch_autocast_lower_precision_safe_modules fp16_auto_cast loss_scale
    gradient_accumulation_steps managed_gradient_accumulation use_node_local_storage load_universal_checkpoint
    log_level communication_data_type postscale_gradients gradient_predivide_factor steps_per_print
    zero_allgather_partitions zero_round_robin_gradients zero_hpz_partition_size zero_quantized_weights
    zero_quantized_nontrainable_weights zero_quantized_gradients zeropp_loco_param zero_log_trace_cache_warnings
    zero_allgather_sequential is_sanity_checks_enabled dump_state gradient_clipping dynamic_loss_scale
    initial_dynamic_scale dynamic_loss_scale_args swap_tensor_config aio_config zenflow_config get_data_types
    is_map_style_dataset is_iterable_style_dataset dataloader_drop_last was_step_applied deepspeed_io eval forward
    print_forward_breakdown allreduce_gradients no_sync coalesce_grad_reduction is_gradient_accumulation_boundary
    zero_grad clip_fp32_gradients get_wall_clock_timers get_lr get_type get_mom get_pld_theta allreduce_bucket
    allreduce_and_copy allreduce_no_retain buffered_allreduce_fallback sparse_allreduce_no_retain
    sparse_allreduce_bucket sparse_allreduce sparse_all_gather all_gather_scalar module_state_dict load_moe_state_dict
    load_module_state_dict save_fp16_model empty_partition_cache get_autosp_backend get_autotp_backend
    get_deepcompile_backend get_deepspeed_compile_backend get_compile_time register_compile_pass
    is_deepcompile_enabled is_deepcompile_active is_compiled offload_states reload_states set_has_attention_mask
    reset_activation_shape is_first_stage is_last_stage get_pipeline_parallel_rank set_dataloader set_dataiterator
    set_batch_fn log_for_device tput_log get_additional_losses convert_to_linear_transposed new_inference_container
    populate_all_inference_policies fuse_lora_weight unfuse_lora_weight unfuse_lora_weight_non_pinned
    retake_inference_cache generate create_inference_containers create_inference_module
"""
ARGUMENTS = {
    "set_train_batch_size": "train_batch_size",
    "set_data_post_process_func": "post_process_func",
    "set_custom_curriculum_learning_schedule": "schedule_func_dict",
    "train": "mode",
    "scale": "loss",
    "backward": "loss retain_graph scale_wrt_gas",
    "set_gradient_accumulation_boundary": "is_boundary",
    "step": "lr_kwargs",
    "load_checkpoint": "load_dir tag load_module_strict load_optimizer_states"
    " load_lr_scheduler_states load_module_only custom_load_fn",
    "save_checkpoint": "save_dir tag client_state save_latest exclude_frozen_parameters",
    "save_16bit_model": "save_dir save_filename exclude_frozen_parameters",
    "compile": "backend compile_kwargs schedule compiled_autograd_enabled",
    "train_batch": "data_iter",
    "eval_batch": "data_iter return_logits compute_loss reduce_output bcast_loss num_micro_batches",
}
ATTRIBUTES = ["clip_grad_norm", "clip_grad_norm_", "dp_world_size", "mpu", "monitor", "timers", "checkpoint_engine"]


@pytest.fixture(scope="module")
def whole():
    return engine()


@pytest.mark.parametrize("name", [*NAMES.split(), *ARGUMENTS, *ATTRIBUTES])
def test_every_name_of_deepspeeds_engine(whole, name):
    """It is there and takes DeepSpeed's arguments; or it is an AttributeError that says what to write."""
    if not hasattr(whole, name):
        with pytest.raises(AttributeError) as error:
            getattr(whole, name)
        assert isinstance(error.value, jzero.ConfigError)
        assert re.fullmatch(rf"engine.{name}: .*\b(leave it out|write|read|pass)\b.*", str(error.value))
        return
    parameters = inspect.signature(getattr(whole, name)).parameters if name in ARGUMENTS else {}
    required = [p for p in parameters.values() if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    for argument in ARGUMENTS.get(name, "").split():
        if argument not in parameters:
            with pytest.raises(jzero.ConfigError, match=r": .*\b(leave it out|write|read|pass)\b"):
                getattr(whole, name)(*map(id, required), **{argument: object()})


def test_what_reads_the_config():
    e, *_ = build(
        3,
        zero=4,
        more={
            "bf16": {"enabled": True},
            "gradient_clipping": 0.5,
            "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 3}},
            "flops_profiler": {"profile_step": 7},
        },
    )
    expected = {
        "bfloat16_enabled": True,
        "fp16_enabled": False,
        "amp_enabled": False,
        "dynamic_loss_scale": True,
        "initial_dynamic_scale": 2**16,
        "zero_optimization": True,
        "zero_optimization_partition_gradients": True,
        "zero_optimization_partition_weights": True,
        "zero_param_persistence_threshold": 0,
        "zero_cpu_offload": False,
        "gradient_clipping": 0.5,
        "steps_per_print": None,
        "flops_profiler_profile_step": 7,
        "optimizer_name": "AdamW",
        "optimizer_params": {"lr": 0.01},
        "scheduler_name": "WarmupLR",
        "scheduler_params": {"warmup_num_steps": 3},
        "managed_gradient_accumulation": True,
        "autotp_size": 0,
    }
    assert {name: getattr(e, name)() for name in expected} == expected
    for name in READ:
        getattr(e, name)()
    assert build(1, more={"bf16": {"enabled": "auto"}})[0].bfloat16_enabled() is False
    replaced = {
        "amp_enabled": {"amp": {"enabled": True}},
        "torch_autocast_enabled": {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
        "dump_state": {"dump_state": True},
        "sparse_gradients_enabled": {"sparse_gradients": True},
        "graph_harvesting": {"graph_harvesting": True},
    }
    for name, more in replaced.items():
        e = build(1, more=more)[0]
        assert [other for other in replaced if getattr(e, other)()] == [name]
    with pytest.raises(jzero.ConfigError, match=r"engine.loss_scale\(\): write engine.loss_scale, without parentheses"):
        e.loss_scale()
    with pytest.raises(AttributeError, match="no attribute 'nonsense'") as error:
        e.nonsense  # noqa: B018
    assert not isinstance(error.value, jzero.ConfigError)


def test_a_batch_by_its_names():
    """Hugging Face's line: `engine(**batch)`."""
    named, plain_loop = engine(), engine()
    for part in parts(0):
        loss = named(**part)
        assert not hasattr(loss, "loss")
        named.backward(loss)
        named.step()
    three_calls(plain_loop, parts(0))
    assert_same(named.state.params, plain_loop.state.params)
    part = parts(1)[0]
    assert named.eval()(**part) == plain_loop.eval()(part)
    with pytest.raises(jzero.ConfigError, match=r"loss\.loss: leave it out: engine"):
        loss.loss  # noqa: B018
    for call in (lambda: named(), lambda: named(part["x"], part["y"]), lambda: named(part, mask=part["mask"])):
        with pytest.raises(
            jzero.ConfigError, match=r"a micro-batch is one argument: engine\(batch\) or engine\(\*\*batch"
        ):
            call()
    for none_or_both in ({}, {"batch": part, "data_iter": iter(parts(2))}):
        with pytest.raises(jzero.ConfigError, match="eval_batch: pass one of batch and data_iter"):
            named.eval_batch(**none_or_both)
    assert named.eval_batch(data_iter=iter(parts(2))) == plain_loop.eval_batch(iter(parts(2)))


def test_inputs_by_their_names():
    """With a criterion outside of the model the engine takes the inputs, here as a dict."""

    class Linear(nnx.Linear):
        def __call__(self, inputs):
            return super().__call__(inputs["x"])

    network = lambda rngs: Linear(FEATURES, 1, rngs=rngs)  # noqa: E731
    e = jzero.initialize(model=network, criterion=lambda outputs, labels: outputs.mean(), config=config(), mesh=mesh())[
        0
    ]
    x = rows(0, UNIT)["x"]
    np.testing.assert_allclose(e(x=x), e({"x": x}))


def test_initialize_without_names():
    with pytest.raises(
        jzero.ConfigError, match=r"initialize: 2 arguments without a name: write .*model=\.\.\., config="
    ):
        jzero.initialize(argparse.Namespace(), Net())
    with pytest.raises(jzero.ConfigError, match=r"initialize: model is missing"):
        jzero.initialize(config=config())


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"dist_backend": "nccl"}, "init_distributed(dist_backend=...): leave it out: JAX"),
        ({"timeout": "nccl"}, "init_distributed(dist_backend=...): leave it out: JAX"),
        ({"timeout": -1}, "init_distributed: timeout = -1: must be a positive number of seconds"),
        ({"backend": "nccl"}, "unknown argument"),
        *(
            ({name: 1}, f"init_distributed({name}=...): ")
            for name in ("auto_mpi_discovery", "distributed_port", "verbose", "init_method", "dist_init_required")
        ),
    ],
)
def test_arguments_of_deepspeeds_init_distributed(given, words):
    with pytest.raises(jzero.ConfigError) as error:
        jzero.init_distributed(**given)
    assert words in str(error.value)
    assert ("unknown" in words) == ("unknown" in str(error.value))


def test_a_timeout_of_torch():
    jzero.init_distributed(timeout=datetime.timedelta(minutes=1))  # a single process does not wait
