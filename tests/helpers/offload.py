"""State in host memory: the settings of the tests, and runs with and without."""

import jax
from layouts import LAYOUTS, batch, build, settings

from jzero._compat import inner_jaxprs

CPU = {"device": "cpu"}
OPTIMIZER, PARAM = {"offload_optimizer": CPU}, {"offload_param": CPU}
BOTH = {**OPTIMIZER, **PARAM}
BF16 = {"bf16": {"enabled": True}}


def run(name, offloaded, steps=3, noise=True, **more):
    """Train a layout for some steps; return the engine, and the losses with one of evaluation."""
    layout = LAYOUTS[name]
    zero = settings(layout)["zero_optimization"] | offloaded
    engine = build(layout, noise=noise, **{"zero_optimization": zero, **more})
    losses = [float(engine.train_batch(batch(i))) for i in range(steps)]
    return engine, [*losses, float(engine.eval_batch(batch(9)))]


def on_host(tree):
    return sum(x.size for x in jax.tree.leaves(tree) if x.sharding.memory_kind == "pinned_host")


def scans(jaxpr):
    """Yield the scans of a traced program, those inside others too."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "scan":
            yield eqn
        for inner in inner_jaxprs(eqn):
            yield from scans(inner)
