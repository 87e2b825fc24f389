"""Functions of whole arrays, run on a group of devices that acts as one.

A model is written, and traced, for one device. `spread` runs the trace (a jaxpr) on shards, inside `jax.shard_map`:
every primitive by its rule, which moves what has to be moved. A primitive without a rule runs on whole arrays. So a
table of how weights are divided decides how much is moved, never what is computed.
"""

from jzero.spread import control, fused_attention, matmuls, shapes  # they fill the table of rules
from jzero.spread.interpreter import spread
from jzero.spread.sharded_array import Dims, Fallback, ModelGroup, MovedArray, ShardedArray, TracedMoves, whole

__all__ = [
    "Dims",
    "Fallback",
    "ModelGroup",
    "MovedArray",
    "ShardedArray",
    "TracedMoves",
    "control",
    "fused_attention",
    "matmuls",
    "shapes",
    "spread",
    "whole",
]  # fmt: skip
