"""The settings of jzero: each key with its type, its default and its effect; more in `precisions` and `observed`."""

from typing import Annotated, Any, Literal, get_args

from pydantic import ConfigDict, Field

from jzero.config import observed
from jzero.config.fields import (
    OR_NULL,
    Count,
    Dimensions,
    Flag,
    LayerSpecs,
    Options,
    Params,
    Patterns,
    PatternsOrNone,
    PositiveInt32,
    PositiveInt32OrNone,
    PositiveOrNone,
    PositiveOrRest,
    PositivesOrNone,
    Section,
    Text,
    TextOrNone,
)
from jzero.config.precisions import BF16Config, FP8Config, FP16Config
from jzero.values import kinds
from jzero.values.kinds import Dtype, OffloadDevice, number, one_of, or_null

Policy = Literal["none", "full", "matmuls"]
Reduction = Literal["mean", "sum"]
Gather = Literal["step", "micro_batch"]
Growth = Literal["fixed_linear", "fixed_root", "fixed_discrete", "custom"]
ContextAttention = Literal["auto", "ulysses", "ring"]
StateDtype = Literal["fp32", "bf16", "fp8"]
NoDecay = Literal["norms_biases", "norms_biases_embeddings"]
ScheduleName = Literal["gpipe", "1f1b", "interleaved", "zero_bubble"]
SCHEDULE_NAMES: tuple[ScheduleName, ...] = get_args(ScheduleName)
CURRICULUM = "data_efficiency.data_sampling.curriculum_learning"


class DataTypes(Section):
    """The dtype in which gradients accumulate over micro-batches (DeepSpeed: the model's; here fp32)."""

    grad_accum_dtype: Annotated[Dtype, kinds.DTYPE] = "fp32"


class OptimizerConfig(Section):
    """An optimizer by name, with its parameters, and with other values for some of them.

    A group of `groups` has `match`, a regular expression, and the values of the parameters whose name it matches:
    `lr_scale` (a factor on the learning rate), `weight_decay`, `betas`. The first group that matches a parameter wins.
    `no_weight_decay` sets the weight decay of norms and biases, or of embeddings too, to 0 where their group sets none.
    `state_dtype` "bf16" or "fp8" keeps the moments in fewer bits, rounded up or down at random; the arithmetic stays in
    fp32.
    """

    type: Text = Field(examples=["AdamW"])
    params: Params = {}
    groups: Annotated[tuple[dict[str, Any], ...], kinds.PARAM_LIST] = ()
    no_weight_decay: Annotated[NoDecay | None, one_of(get_args(NoDecay), none=None)] = None
    state_dtype: Annotated[StateDtype, one_of(get_args(StateDtype))] = "fp32"


class SchedulerConfig(Section):
    """A learning-rate schedule by name, with its parameters."""

    type: Text = Field(examples=["WarmupLR"])
    params: Params = {}


class OffloadOptimizer(Section):
    """Keep the float32 masters and the optimizer's state on the device, or in pinned host memory ("cpu").

    `ratio` is the smallest share of their elements on the host: the largest parameters are offloaded until it is met.
    """

    device: Annotated[OffloadDevice, kinds.OFFLOAD_DEVICE] = "none"
    ratio: Annotated[float, number(0, most=1)] = 1.0


class OffloadParam(Section):
    """Keep the parameters under stage 3 on the device, or in pinned host memory ("cpu").

    A layer's weights are copied to the device when the layer runs, in the forward and again in the backward pass.
    """

    device: Annotated[OffloadDevice, kinds.OFFLOAD_DEVICE] = "none"


class ZeroConfig(Section):
    """The ZeRO stage: 1 shards the optimizer state over the mesh's `zero` axis, 2 also gradients, 3 also parameters.

    `mics_shard_size` sets the size of that axis; the other devices go to the `data` axis. Stage 3 replicates
    parameters with fewer elements per layer than `stage3_param_persistence_threshold`.

    ZeRO++ reduces the traffic of stage 3: `zero_quantized_weights` gathers matrices as int8, `zero_quantized_gradients`
    reduces their gradients as 4-bit integers, and `zero_hpz_partition_size` keeps a second copy of the weights during
    a step, sharded over groups of that many devices, from which the layers are gathered.
    """

    stage: Annotated[int, kinds.STAGE] = 0
    stage3_param_persistence_threshold: Count = 100_000
    mics_shard_size: PositiveOrRest = -1
    zero_quantized_weights: Flag = False
    zero_quantized_gradients: Flag = False
    zero_hpz_partition_size: Count = 1
    offload_optimizer: Annotated[OffloadOptimizer, OR_NULL] = OffloadOptimizer()
    offload_param: Annotated[OffloadParam, OR_NULL] = OffloadParam()


class ActivationCheckpointing(Section):
    """Recomputation in the backward pass: of a whole layer, or of the operations between its matmuls."""

    policy: Annotated[Policy | None, one_of(get_args(Policy), none=None)] = None
    cpu_checkpointing: Flag = False

    @property
    def kind(self) -> Policy:
        """The policy; without one "full" if `cpu_checkpointing` is true, else "none", as in DeepSpeed."""
        return self.policy or ("full" if self.cpu_checkpointing else "none")


class MeshConfig(Section):
    """Devices along each axis; -1 means all that remain."""

    pipe: PositiveOrRest = 1
    data: PositiveOrRest = 1
    zero: PositiveOrRest = -1
    expert: PositiveOrRest = 1
    context: PositiveOrRest = 1
    tensor: PositiveOrRest = 1


class TensorGroup(Section):
    """DeepSpeed's older key for the same degree as `autotp_size`."""

    tp_size: PositiveInt32 = 1


class PartitionConfig(Section):
    """DeepSpeed's rules (AutoTP), from which jzero makes the table `tensor_parallel.dimensions`.

    Each of `layer_specs` has `patterns`, regular expressions that match the beginning of a weight's name as PyTorch
    writes it (`layers.0.up.weight`) or the model (`layers.0.up.kernel`), and a `partition_type`: column divides the
    outputs, row the inputs, skip nothing. The first spec that matches decides. `shape` and `partition_dim` are
    PyTorch's, for weights with a dimension of their own for fused parts or experts. With `use_default_specs` the
    model's own table `divided` decides about the other parameters.
    """

    use_default_specs: Flag = True
    layer_specs: LayerSpecs = ()


class TensorParallelConfig(Section):
    """The devices that act as one, and the dimension of each parameter that they divide.

    `autotp_size` and `tp.tp_size` are other names of `mesh.tensor`; 0 and 1 leave it alone. `dimensions` maps regular
    expressions of names to dimensions, in a layer stack those of one layer. It replaces the model's own table,
    `divided`; `tensor_parallel.partition_config` has DeepSpeed's rules instead. With `regather` the inputs of matmuls
    are gathered over `tensor` again in the backward pass instead of kept whole; activation checkpointing does that
    anyway.
    """

    autotp_size: Count = 0
    tp: TensorGroup = TensorGroup()
    dimensions: Dimensions = {}
    regather: Flag = False
    partition_config: Annotated[PartitionConfig, OR_NULL] = PartitionConfig()


class ContextParallelConfig(Section):
    """Choose how cuDNN's attention runs on sequences that `mesh.context` divides.

    "ulysses" moves the division to the heads, "ring" sends keys and values from device to device; where that cannot
    be, it is an error. "auto": Ulysses where the heads suffice, else a ring with as many of them as fit.
    """

    attention: Annotated[ContextAttention, one_of(get_args(ContextAttention))] = "auto"


class ExpertParallelConfig(Section):
    """The devices that divide the experts among themselves, and the dimension of their parameters.

    `autoep_size` is another name of `mesh.expert` if `enabled` is true. `dimensions` is a table as in
    `tensor_parallel`; it replaces the model's own.
    """

    enabled: Flag = False
    autoep_size: PositiveInt32 = 1
    dimensions: Dimensions = {}


class PipelineConfig(Section):
    """Choose how the stages on the `pipe` axis work together.

    `stages` is another name for `mesh.pipe`; `chunks` is the number of slices of the layers on one stage. `gather`
    chooses when ZeRO-3 gathers a stage's parameters, by default for every micro-batch. One activation checkpoint spans
    `activation_checkpoint_interval` layers.
    """

    stages: PositiveInt32OrNone = None
    schedule: Annotated[ScheduleName, one_of(SCHEDULE_NAMES)] = "1f1b"
    chunks: PositiveInt32 = 1
    gather: Annotated[Gather | None, one_of(get_args(Gather), none=None)] = None
    activation_checkpoint_interval: Count = 0


class StackConfig(Section):
    """Run the layer stack unrolled, as a scan, or "auto"."""

    unroll: Annotated[bool | Literal["auto"], kinds.FLAG_OR_AUTO] = "auto"


class CheckpointConfig(Section):
    """The directory of checkpoints, for saves and resumes, and the number of those with default tags to keep."""

    dir: TextOrNone = None
    max_to_keep: PositiveOrNone = None


class EmaConfig(Section):
    """A moving average of the trained parameters, in float32: ema <- decay * ema + (1 - decay) * parameters.

    It is part of the optimizer's state. `engine.eval_batch(batch, ema=True)` evaluates it, `step.averaged(state)` and
    `engine.save_16bit_model(dir, ema=True)` return and export it.
    """

    decay: Annotated[float, kinds.FRACTION] = 0.999


class ScheduleConfig(Section):
    """The parameters of a schedule of difficulties.

    `fixed_linear` and `fixed_root` take `total_curriculum_step` and `difficulty_step`, `fixed_root` also `root_degree`;
    `fixed_discrete` takes `difficulty`, and `max_step` with one entry fewer: the last step of each.
    """

    total_curriculum_step: PositiveOrNone = None
    difficulty_step: PositiveOrNone = None
    root_degree: Annotated[float | None, or_null(number(above=0))] = None
    difficulty: PositivesOrNone = None
    max_step: PositivesOrNone = None


class CurriculumMetric(Section):
    """A schedule of sequence lengths, as in `curriculum_learning`."""

    min_difficulty: PositiveOrNone = None
    max_difficulty: PositiveOrNone = None
    schedule_type: Annotated[Growth | None, one_of(get_args(Growth), none=None)] = None
    schedule_config: ScheduleConfig = ScheduleConfig()


class CurriculumLearning(CurriculumMetric):
    """Sequences that grow from `min_difficulty` tokens to `max_difficulty`, their length in the batch.

    The engine truncates the batch of every training step. The step compiles once per length; `difficulty_step` limits
    their number.
    """

    enabled: Flag = False
    curriculum_type: Annotated[Literal["seqlen"], one_of(("seqlen",))] = "seqlen"


class CurriculumMetrics(Section):
    """The difficulties that grow: the length of the sequences. Others have any name, and are refused."""

    model_config = ConfigDict(frozen=True, extra="allow")

    seqlen: CurriculumMetric | None = None


class SamplingCurriculum(Section):
    """Curriculum learning by DeepSpeed's newer name.

    Other metrics than `seqlen` select samples, under any name. With `enabled` true they are refused.
    """

    enabled: Flag = False
    curriculum_metrics: CurriculumMetrics = CurriculumMetrics()


class DataSampling(Section):
    """The choice of training samples: a curriculum by sequence length."""

    enabled: Flag = False
    curriculum_learning: SamplingCurriculum = SamplingCurriculum()


class DataEfficiency(Section):
    """DeepSpeed's data efficiency library."""

    enabled: Flag = False
    data_sampling: DataSampling = DataSampling()


class Settings(Section):
    """The top level of a config file.

    With `strict` false, an unknown key is a warning in the run report instead of an error. `gradient_allreduce_op`
    "sum" adds the replicas' gradients at every stage (DeepSpeed refuses it at stage 3).

    `wall_clock_breakdown` and `memory_breakdown` print lines with each progress line: every `steps_per_print` steps, or
    every 10 if that is null or Infinity. `memory_breakdown` also prints the model state by module.
    """

    strict: Flag = True
    train_batch_size: PositiveInt32OrNone = None
    train_micro_batch_size_per_gpu: PositiveInt32OrNone = None
    gradient_accumulation_steps: PositiveInt32OrNone = None
    managed_gradient_accumulation: Flag = True
    steps_per_print: Annotated[int | None, kinds.EVERY] = None
    wall_clock_breakdown: Flag = False
    memory_breakdown: Flag = False
    gradient_clipping: Annotated[float, kinds.CLIP] = 1.0
    gradient_allreduce_op: Annotated[Reduction, one_of(get_args(Reduction))] = "mean"
    communication_data_type: Annotated[Dtype | None, kinds.DTYPE_OR_NULL] = None
    data_types: DataTypes = DataTypes()
    optimizer: OptimizerConfig | None = None
    scheduler: SchedulerConfig | None = None
    fp16: FP16Config = FP16Config()
    bf16: BF16Config = BF16Config()
    fp8: FP8Config = FP8Config()
    zero_optimization: ZeroConfig = ZeroConfig()
    activation_checkpointing: ActivationCheckpointing | None = None
    mesh: MeshConfig = MeshConfig()
    tensor_parallel: TensorParallelConfig = TensorParallelConfig()
    context_parallel: ContextParallelConfig = ContextParallelConfig()
    expert_parallel: ExpertParallelConfig = ExpertParallelConfig()
    pipeline: PipelineConfig = PipelineConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    ema: EmaConfig | None = None
    curriculum_learning: CurriculumLearning = CurriculumLearning()
    data_efficiency: DataEfficiency = DataEfficiency()
    data_parallel_size: PositiveInt32OrNone = None
    sequence_parallel_size: PositiveInt32 = 1
    trainable_parameters: PatternsOrNone = None
    frozen_parameters: Patterns = ()
    stack: StackConfig = StackConfig()
    compiler_options: Options = {}
    seed: Annotated[int, kinds.SEED] = 0
    dataloader_drop_last: Flag = False
    timers: observed.TimersConfig = observed.TimersConfig()
    flops_profiler: observed.FlopsProfilerConfig = observed.FlopsProfilerConfig()
    progress: observed.ProgressConfig = observed.ProgressConfig()
    comms_logger: observed.CommsLoggerConfig = observed.CommsLoggerConfig()
    profiler: observed.ProfilerConfig = observed.ProfilerConfig()
    tensorboard: observed.FilesConfig = observed.FilesConfig()
    csv_monitor: observed.FilesConfig = observed.FilesConfig()
    jsonl_monitor: observed.FilesConfig = observed.FilesConfig()
    wandb: observed.WandbConfig = observed.WandbConfig()
    comet: observed.CometConfig = observed.CometConfig()
    watchdog: observed.WatchdogConfig = observed.WatchdogConfig()
    non_finite: observed.NonFiniteConfig = observed.NonFiniteConfig()
    desync_check: observed.DesyncConfig = observed.DesyncConfig()
    straggler_check: observed.StragglerConfig = observed.StragglerConfig()
    spikes: observed.SpikesConfig = observed.SpikesConfig()

    @property
    def curricula(self) -> dict[str, CurriculumMetric]:
        """The schedules that are on, by their path: DeepSpeed's older key is another name of the newer, at most one."""
        older, newer = self.curriculum_learning, self.data_efficiency.data_sampling.curriculum_learning
        both = {
            "curriculum_learning": older if older.enabled else None,
            f"{CURRICULUM}.curriculum_metrics.seqlen": newer.curriculum_metrics.seqlen if newer.enabled else None,
        }
        return {path: schedule for path, schedule in both.items() if schedule}
