"""jzero: data and pipeline parallelism and ZeRO 1, 2, 3 for JAX, from one config and one compiled train step."""

from jzero import checkpoint
from jzero.config import Config
from jzero.data import RepeatingLoader
from jzero.distributed import get_local_rank, get_rank, get_world_size, init_distributed, log_dist
from jzero.engine import Engine
from jzero.errors import CheckpointError, ConfigError
from jzero.initialize import initialize
from jzero.mesh import make_mesh
from jzero.model import from_flax
from jzero.pipeline.module import LayerSpec, PipelineModule, TiedLayerSpec
from jzero.report import report
from jzero.state import TrainState
from jzero.train_step import TrainStep, make_train_step

__all__ = [
    "CheckpointError",
    "Config",
    "ConfigError",
    "Engine",
    "LayerSpec",
    "PipelineModule",
    "RepeatingLoader",
    "TiedLayerSpec",
    "TrainState",
    "TrainStep",
    "checkpoint",
    "from_flax",
    "get_local_rank",
    "get_rank",
    "get_world_size",
    "init_distributed",
    "initialize",
    "log_dist",
    "make_mesh",
    "make_train_step",
    "report",
]
__version__ = "0.1.0"
