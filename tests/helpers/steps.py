"""A config of plain SGD, meshes of the first devices, runs of a few steps, and how they compare with plain JAX."""

import math

import jax
import numpy as np
from helpers.drawn import random_params
from helpers.oracle import plain_loop

import jzero
from jzero.tree import named


def settings(rows, stage=0, accum=1, lr=0.1, **more):
    """A config of SGD on so many rows (None: what `more` says) that clips nothing and partitions every parameter."""
    return {
        "train_batch_size": rows,
        "gradient_accumulation_steps": accum,
        "gradient_clipping": 0,
        "optimizer": {"type": "SGD", "params": {"lr": lr}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        **more,
    }


def mesh(zero=4, **degrees):
    degrees = {"zero": zero, **degrees}
    return jzero.make_mesh(**degrees, devices=jax.devices()[: math.prod(degrees.values())])


def started(model, config, mesh=None, params=None):
    step = jzero.make_train_step(model, config, mesh=mesh)
    return step, step.init(jax.random.key(0), params)


def started_with_numpy(model, config, mesh=None):
    """Like `started`, from `random_params`."""
    return started(model, config, mesh, random_params(model))


def run(step, batches, params=None, extras=None):
    """Train from these parameters, or from the step's own; return (those at the start, losses, state)."""
    state, losses = step.init(jax.random.key(0), params), []
    start = jax.device_get(state.params)
    for i, batch in enumerate(batches):
        state, metrics = step(state, batch, *(() if extras is None else (extras[i],)))
        losses.append(float(metrics["loss"]))
    return start, losses, state


def compare(step, batches, loss, tx, params=None, extras=None, join=lambda params: params, rtol=1e-5, close=1e-4):
    """Train, and compare with optax on one device; return (parameters at the start, state).

    `loss(params, batch, extra)` is plain JAX, of the parameters as `join` gives them.
    """
    start, losses, state = run(step, batches, params, extras)
    both = list(zip(batches, extras or [None] * len(batches), strict=True))
    plain = plain_loop(lambda params, both: loss(params, *both), join(start), both, tx)
    np.testing.assert_allclose(losses, plain.losses, rtol=rtol)
    assert_close(join(jax.device_get(state.params)), plain.params, rtol=close)
    return start, state


def assert_close(params, expected, rtol=1e-4, atol=1e-6):
    for name, x in named(jax.device_get(params)).items():
        np.testing.assert_allclose(x, named(expected)[name], rtol=rtol, atol=atol, err_msg=name)
