"""bf16, and fp16 with a dynamic loss scale, where groups of devices act as one, beside float32 on one device.

The oracles are plain JAX. Products and what lies between layers are rounded to the half precision; masters, the loss
and the norm of the gradients are float32. So errors of single elements average out in loss and norm: one machine
epsilon of the dtype bounds them. Of the parameters four bound the largest error of an element, which accumulates over
three steps, and which no average hides.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import mixture_models, tensor_models
from helpers.sampling import keep, some
from test_expert_parallel import config_of
from test_expert_parallel import reference as reference_of_mixture

EPSILON = {"fp16": float(jnp.finfo(jnp.float16).eps), "bf16": float(jnp.finfo(jnp.bfloat16).eps)}
# Far too large for fp16, whose largest number is 65,504.
SECTIONS = {"fp16": {"initial_scale_power": 24, "hysteresis": 1, "loss_scale_window": 1000}, "bf16": {}}
EXPERT = [
    ({"expert": 2, "zero": 2, "stage": 2}, None),
    ({"expert": 2, "zero": 2, "stage": 3}, 1.0),
    ({"expert": 2, "tensor": 2, "stage": 3}, 1.0),
    ({"pipe": 2, "expert": 2, "stage": 2, "accum": 2}, None),
]
TENSOR = [
    ("nnx", {"tensor": 2}),
    ("llama", {"tensor": 2, "zero": 2, "stage": 3}),
    ("llama", {"tensor": 2, "context": 2, "stage": 2, "remat": "full"}),
    ("llama", {"pipe": 2, "tensor": 2, "stage": 1, "accum": 2}),
]
PRECISIONS = ("fp16", "bf16")


def section(precision):
    return {precision: {"enabled": True, **SECTIONS[precision]}}


def check(precision, step, start, batches, known, params):
    """Train; a batch whose step is skipped comes again, with the smaller scale."""
    state, seen, skipped = step.init(jax.random.key(0), start), [], 0
    for batch in batches:
        state, metrics = step(state, batch)
        while metrics["skipped"]:
            skipped += 1
            assert skipped < 20
            state, metrics = step(state, batch)
        seen.append((float(metrics["loss"]), float(metrics["grad_norm"])))
    assert (skipped > 0) == (precision == "fp16")
    assert np.abs(np.array(seen) / known - 1).max() < EPSILON[precision]
    for x, other in zip(jax.tree.leaves(jax.device_get(state.params)), jax.tree.leaves(params), strict=True):
        assert x.dtype == np.float32
        assert np.abs(x - other).max() < 4 * EPSILON[precision] * max(np.abs(other).max(), 1e-2)


EXPERT_CASES = [(precision, *case) for precision in PRECISIONS for case in EXPERT]
TENSOR_CASES = [(precision, *case) for precision in PRECISIONS for case in TENSOR]


@pytest.mark.parametrize(("precision", "layout", "factor"), some(EXPERT_CASES, [EXPERT_CASES[0]]), ids=str)
def test_experts(precision, layout, factor):
    config = config_of(layout, factor)
    step = mixture_models.make_step(config, more=section(precision), **layout)
    check(precision, step, mixture_models.initial(config), mixture_models.batches(), *reference_of_mixture(config))


@pytest.mark.parametrize(("precision", "name", "layout"), keep(TENSOR_CASES, [TENSOR_CASES[4]]), ids=str)
def test_divided_weights(precision, name, layout):
    step = tensor_models.make_step(name, precision=section(precision), **layout)
    check(precision, step, tensor_models.initial(name), tensor_models.batches(name), *tensor_models.reference(name))
