"""The config: DeepSpeed's JSON file, read strictly.

Every key is a field (`sections`), a key whose work something else does, or one that jzero refuses by name (`keys`). A
key that DeepSpeed ignores too loads with a warning. Any other key is unknown, and the message suggests the nearest one.
All problems are reported together.

>>> config = Config.load({"train_batch_size": 32, "bf16": {"enabled": True}, "zero_optimization": {"stage": 3}})
>>> config
Config(train_batch_size=32, bf16=BF16Config(enabled=True), zero_optimization=ZeroConfig(stage=3))
>>> config.precision, config.batch(replicas=8).micro, config.mesh_degrees(8)
('bf16', 4, {'pipe': 1, 'data': 1, 'zero': 8, 'expert': 1, 'context': 1, 'tensor': 1})
>>> Config.load({"zero_optimization": {"stge": 3}})
Traceback (most recent call last):
jzero.errors.ConfigError: zero_optimization.stge = 3: unknown key; did you mean "stage"?
"""

from jzero.config.config import Config, without_curriculum
from jzero.config.keys import Ignored, Replaced
from jzero.config.observed import ThroughputConfig, TimersConfig, WatchdogConfig
from jzero.config.sections import (
    ActivationCheckpointing,
    BF16Config,
    DataTypes,
    EmaConfig,
    FP16Config,
    MeshConfig,
    OptimizerConfig,
    SchedulerConfig,
    StackConfig,
    ZeroConfig,
)
from jzero.config.sizes import BatchSizes

__all__ = [
    "ActivationCheckpointing",
    "BF16Config",
    "BatchSizes",
    "Config",
    "DataTypes",
    "EmaConfig",
    "FP16Config",
    "Ignored",
    "MeshConfig",
    "OptimizerConfig",
    "Replaced",
    "SchedulerConfig",
    "StackConfig",
    "ThroughputConfig",
    "TimersConfig",
    "WatchdogConfig",
    "ZeroConfig",
    "without_curriculum",
]
