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
from helpers.oracle import largest_error
from helpers.sampling import some

EPSILON = {"fp16": float(jnp.finfo(jnp.float16).eps), "bf16": float(jnp.finfo(jnp.bfloat16).eps)}
# Far too large for fp16, whose largest number is 65,504.
SECTIONS = {"fp16": {"initial_scale_power": 24, "hysteresis": 1, "loss_scale_window": 1000}, "bf16": {}}
EXPERT = [
    (None, {"expert": 2, "zero": 2, "stage": 2}),
    (1.0, {"expert": 2, "zero": 2, "stage": 3}),
    (1.0, {"expert": 2, "tensor": 2, "stage": 3}),
    (None, {"pipe": 2, "expert": 2, "stage": 2, "accum": 2}),
]
TENSOR = [
    ("nnx", {"tensor": 2, "unroll": False}),
    ("llama", {"tensor": 2, "zero": 2, "stage": 3}),
    ("llama", {"tensor": 2, "context": 2, "stage": 2, "remat": "full"}),
    ("llama", {"pipe": 2, "tensor": 2, "stage": 1, "accum": 2}),
]
EXPERT_CASES, TENSOR_CASES = ([(p, *case) for p in SECTIONS for case in cases] for cases in (EXPERT, TENSOR))


@pytest.mark.parametrize(
    ("precision", "model", "layout"),
    [*some(EXPERT_CASES, EXPERT_CASES[:1]), *some(TENSOR_CASES, TENSOR_CASES[4:5])],
    ids=str,
)
def test_half_precision(precision, model, layout):
    """Train a model, or a mixture with a capacity factor; a batch whose step is skipped comes again."""
    helper = tensor_models if isinstance(model, str) else mixture_models
    model = model if isinstance(model, str) else helper.config_of(layout, model)
    step = helper.make_step(model, more={precision: {"enabled": True, **SECTIONS[precision]}}, **layout)
    state, seen, skipped = step.init(jax.random.key(0), helper.initial(model)), [], 0
    for batch in helper.batches():
        state, metrics = step(state, batch)
        while metrics["skipped"]:
            skipped += 1
            assert skipped < 20
            state, metrics = step(state, batch)
        seen.append((float(metrics["loss"]), float(metrics["grad_norm"])))
    assert (skipped > 0) == (precision == "fp16")
    known = helper.reference(model)
    assert np.abs(np.array(seen) / known.seen - 1).max() < EPSILON[precision]
    assert all(x.dtype == np.float32 for x in jax.tree.leaves(state.params))
    assert largest_error(state.params, known.params) < 4 * EPSILON[precision]
