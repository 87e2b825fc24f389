"""Functions of whole arrays, run on a group of devices that acts as one.

A model is written, and traced, for one device. `spread` runs the trace (a jaxpr) on shards, inside `jax.shard_map`:
every primitive by its rule, which moves what has to be moved. A primitive without a rule runs on whole arrays. So a
table of how weights are divided decides how much is moved, never what is computed.

    value          an array as one device holds it: divided, partial or whole; collectives between these forms
    rules          the table of rules, and those of elementwise primitives
    shapes, products, lookups    rules of primitives that change shapes, that multiply, that index
    kernels        rules of fused attention
    ring           fused attention of sequences that stay divided
    collectives    rules of a program's own collectives, over other axes
    control        rules of primitives that contain programs: calls, checkpoints, scans, custom derivatives
    operation      functions of a model with a way of their own to run on shards
    interpreter    runs a jaxpr by the rules
    ledger         what was moved, and what ran on whole arrays, with the model's source lines
    division       which dimension of each parameter an axis divides, from a table
    search         finds such a table by trying
    model          prefix, block, suffix and loss of a model, on shards
    limits         the tables of `expert` and `tensor`, and what these axes and `context` cannot do yet
"""

from jzero.spread import collectives, control, kernels, lookups, products, shapes  # they fill the table of rules
from jzero.spread.interpreter import spread
from jzero.spread.ledger import Fallback, Ledger, Move
from jzero.spread.value import Dims, Group, Value, whole

__all__ = [
    "Dims", "Fallback", "Group", "Ledger", "Move", "Value", "collectives", "control", "kernels", "lookups",
    "products", "shapes", "spread", "whole",
]  # fmt: skip
