"""jzero: data and pipeline parallelism and ZeRO 1, 2, 3 for JAX, from one config and one compiled train step.

Names are imported on first use, so that the `jzero` command starts without loading JAX.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jzero import checkpoint, weights
    from jzero.adapters.from_flax import from_flax
    from jzero.attention_kernels import attention
    from jzero.config import Config
    from jzero.data import RepeatingLoader
    from jzero.distributed.joining import init_distributed
    from jzero.distributed.place import get_local_rank, get_rank, get_world_size, log_dist
    from jzero.errors import CheckpointError, ConfigError, OutOfMemoryError
    from jzero.layout.replicas import all_gather, axis_index, mean
    from jzero.loss import Mean
    from jzero.mesh import make_mesh
    from jzero.moe.expert_layer import experts
    from jzero.moe.routing import Routing, balance_loss, balanced_bias, route
    from jzero.optimizers.groups import mup_groups
    from jzero.pipeline.module import LayerSpec, PipelineModule, TiedLayerSpec
    from jzero.planner.plan import plan
    from jzero.run.diagnosis.replay import replay
    from jzero.run.engine import Engine
    from jzero.run.initialize import add_config_arguments, initialize
    from jzero.run.run_report import report
    from jzero.spread.dimension_search import find_dimensions
    from jzero.spread.rules import Operation
    from jzero.step.evaluate import make_eval_step
    from jzero.step.state import TrainState
    from jzero.step.train_step import TrainStep, make_train_step
    from jzero.tiling import tiled

__version__ = "0.2.0"

_HOME = {
    "CheckpointError": "errors",
    "Config": "config",
    "ConfigError": "errors",
    "Engine": "run.engine",
    "LayerSpec": "pipeline.module",
    "Mean": "loss",
    "Operation": "spread.rules",
    "OutOfMemoryError": "errors",
    "PipelineModule": "pipeline.module",
    "RepeatingLoader": "data",
    "Routing": "moe.routing",
    "TiedLayerSpec": "pipeline.module",
    "TrainState": "step.state",
    "TrainStep": "step.train_step",
    "add_config_arguments": "run.initialize",
    "all_gather": "layout.replicas",
    "attention": "attention_kernels",
    "axis_index": "layout.replicas",
    "balance_loss": "moe.routing",
    "balanced_bias": "moe.routing",
    "experts": "moe.expert_layer",
    "find_dimensions": "spread.dimension_search",
    "from_flax": "adapters.from_flax",
    "get_local_rank": "distributed.place",
    "get_rank": "distributed.place",
    "get_world_size": "distributed.place",
    "init_distributed": "distributed.joining",
    "initialize": "run.initialize",
    "log_dist": "distributed.place",
    "make_eval_step": "step.evaluate",
    "make_mesh": "mesh",
    "make_train_step": "step.train_step",
    "mean": "layout.replicas",
    "mup_groups": "optimizers.groups",
    "plan": "planner.plan",
    "replay": "run.diagnosis.replay",
    "report": "run.run_report",
    "route": "moe.routing",
    "tiled": "tiling",
}
_ROOMS = (
    "checkpoint",
    "config",
    "data",
    "distributed",
    "ledger",
    "models",
    "optimizers",
    "pictures",
    "pipeline",
    "planner",
    "plots",
    "profiling",
    "weights",
)

__all__ = [
    "CheckpointError",
    "Config",
    "ConfigError",
    "Engine",
    "LayerSpec",
    "Mean",
    "Operation",
    "OutOfMemoryError",
    "PipelineModule",
    "RepeatingLoader",
    "Routing",
    "TiedLayerSpec",
    "TrainState",
    "TrainStep",
    "add_config_arguments",
    "all_gather",
    "attention",
    "axis_index",
    "balance_loss",
    "balanced_bias",
    "checkpoint",
    "experts",
    "find_dimensions",
    "from_flax",
    "get_local_rank",
    "get_rank",
    "get_world_size",
    "init_distributed",
    "initialize",
    "log_dist",
    "make_eval_step",
    "make_mesh",
    "make_train_step",
    "mean",
    "mup_groups",
    "plan",
    "replay",
    "report",
    "route",
    "tiled",
    "weights",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = getattr(importlib.import_module(f"jzero.{_HOME[name]}"), name)
        globals()[name] = value
        return value
    if name in _ROOMS:
        return importlib.import_module(f"jzero.{name}")
    raise AttributeError(f"module 'jzero' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_ROOMS})
