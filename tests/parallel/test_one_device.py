"""Every layout of unmodified models: the losses, gradient norms and parameters of plain JAX on one device.

Half precision, int8 weights, state and dropout over groups of devices too.
"""

import json
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import mixture_models, tensor_models
from helpers.oracle import largest_error, train
from helpers.plain_flax import Normed, train_module
from helpers.sampling import keep, some
from helpers.steps import assert_close
from helpers.tensor_models import BATCH, assert_one_device, batches, errors, make_step

import jzero

TESTS = pathlib.Path(__file__).parents[1]
CPU = {"device": "cpu"}
REGATHER = {"tensor_parallel": {"regather": True}}
BOTH = {"zero_optimization": {"offload_optimizer": CPU, "offload_param": CPU}}
MASTERS = {"zero_optimization": {"offload_optimizer": CPU}}
HPZ = {"zero_optimization": {"zero_hpz_partition_size": 2}}
ACTIVATIONS = {"activation_checkpointing": {"cpu_checkpointing": True}}
ALL = {"stage": 3, "zero": 2, "context": 2, "tensor": 2}
SCANNED = {"accum": 2, "remat": "full", "unroll": False}

# Each setting once, but for the unrolled layers; pipelines compile for long, so they have the smallest model.
DEFAULT = [
    ("odd, tiled", {"oracle": "odd", **ALL, **SCANNED, "optimizer": "clipped", "more": {**BOTH, **REGATHER}}),
    ("decoder", {"pipe": 2, "tensor": 2, "accum": 2, "stage": 1}),
]
ROWS = [
    *DEFAULT,
    # tensor
    ("nnx", {"tensor": 2, "zero": 2, "stage": 1, "accum": 2, "unroll": False}),
    ("nnx", {"tensor": 2, "data": 2, "zero": 2, "stage": 3, "remat": "matmuls"}),
    ("linen", {"tensor": 4, "zero": 2, "stage": 3, "remat": "full"}),
    ("more", {"tensor": 2, "zero": 2, "stage": 3}),
    ("gpt2", {"tensor": 4, "zero": 2, "stage": 1}),
    ("bert", {"tensor": 2}),
    ("vit", {"tensor": 2, "zero": 2, "stage": 3}),
    ("odd heads", {"tensor": 2, "zero": 2, "stage": 3, "unroll": False}),
    # context
    ("nnx", {"context": 8, "stage": 3}),
    ("nnx", {"context": 2, "zero": 2, "stage": 1, "accum": 2, "unroll": False}),
    ("nnx", {"context": 4, "tensor": 2, "stage": 2, "remat": "matmuls"}),
    ("linen", ALL),
    ("llama", {"context": 2, "tensor": 2, "zero": 2, "stage": 2}),
    # one more all-gather for the input of each matmul
    ("linen", {"tensor": 2, "zero": 2, "stage": 3, "more": REGATHER}),
    # tiles, beside the plain model without tiles
    ("tiled", {"oracle": "llama"}),
    ("tiled", {"oracle": "llama", "context": 2, "tensor": 2, "stage": 2, "unroll": False, "remat": "matmuls"}),
    ("tiled", {"oracle": "llama", "pipe": 2, "tensor": 2, "accum": 2, "stage": 1}),
    # memory
    ("nnx", {"tensor": 2, "zero": 2, "stage": 2, "unroll": False, "more": MASTERS}),
    ("llama", {"tensor": 2, "context": 2, "stage": 3, "unroll": False, "remat": "full", "more": ACTIVATIONS}),
    ("nnx", {"tensor": 2, "zero": 4, "stage": 3, "unroll": False, "more": HPZ}),
    # frozen parameters; the default clips
    ("nnx", {**ALL, **SCANNED, "optimizer": "frozen"}),
]
PIPELINES = [
    ("nnx", "zero_bubble", {"tensor": 2, "zero": 2, "stage": 3}),
    ("llama", "zero_bubble", {"context": 2, "tensor": 2, "stage": 2, "remat": "matmuls"}),
    ("llama", "gpipe", {"tensor": 2, "data": 2, "stage": 1, "unroll": False}),
    ("four", "interleaved", {"context": 2, "tensor": 2, "stage": 2, "accum": 2, "unroll": False}),
    ("layers", "1f1b", {"tensor": 2, "zero": 2, "stage": 3}),
    ("layers", "zero_bubble", {"pipe": 4, "tensor": 2, "remat": "matmuls"}),
]
STAGED = [
    (name, {"pipe": 2, "accum": 4, **layout, "pipeline": {"schedule": kind, "chunks": 1 + (kind == "interleaved")}})
    for name, kind, layout in PIPELINES
]


def name_of(value):
    return "-".join(f"{k}{name_of(v)}" for k, v in value.items()) if isinstance(value, dict) else str(value)


@pytest.mark.parametrize(("name", "layout"), [*keep(ROWS, DEFAULT), *some(STAGED, [STAGED[1]])], ids=name_of)
def test_one_device_computes_the_same(name, layout):
    assert_one_device(name, **layout)


@pytest.mark.processes
@pytest.mark.parametrize("schedule", some(["1f1b", "gpipe", "interleaved", "zero_bubble"], ["zero_bubble"]))
def test_all_six_axes_at_once(schedule):
    """On 64 simulated devices: losses, parameters, text and a checkpoint of one device, by Flax and optax."""
    path = os.pathsep.join(map(str, (TESTS, TESTS.parent)))
    command = [sys.executable, "-m", "helpers.all_axes", schedule]
    run = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=900)
    assert not run.returncode, run.stderr[-3000:]
    found = json.loads(next(line for line in run.stdout.splitlines() if line.startswith("{")))
    assert (found["devices"], found["other tokens"]) == (64, 0)
    bounds = {"losses": 1e-6, "parameters": 5e-6, "loss after loading": 1e-6, "parameters after loading": 5e-6}
    assert all(found[name] < bound for name, bound in bounds.items()), found


# Products and what lies between layers are rounded to the half precision; masters, the loss and the norm of the
# gradients are float32. So errors of single elements average out in loss and norm: one machine epsilon of the dtype
# bounds them. Of the parameters four bound the largest error of an element, which accumulates over three steps.
EPSILON = {"fp16": float(jnp.finfo(jnp.float16).eps), "bf16": float(jnp.finfo(jnp.bfloat16).eps)}
# Far too large for fp16, whose largest number is 65,504.
SECTIONS = {"fp16": {"initial_scale_power": 24, "hysteresis": 1, "loss_scale_window": 1000}, "bf16": {}}
CASES = [  # the capacity factor of a mixture, or a model
    ("fp16", None, {"expert": 2, "zero": 2, "stage": 2}),
    ("bf16", 1.0, {"expert": 2, "tensor": 2, "stage": 3}),
    ("bf16", None, {"pipe": 2, "expert": 2, "stage": 2, "accum": 2}),
    ("fp16", "llama", {"pipe": 2, "tensor": 2, "stage": 1, "accum": 2}),
    ("bf16", "nnx", {"tensor": 2, "unroll": False}),
]


@pytest.mark.parametrize(("precision", "model", "layout"), some(CASES, [CASES[0], CASES[4]]), ids=str)
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


@pytest.mark.slow
@pytest.mark.parametrize("axis", ["context", "tensor"])
def test_quantized_weights_stay_as_near_as_without_the_axis(axis):
    """int8 codes round losses, norms and parameters as much as they do under ZeRO alone, within a factor of two."""
    layout = {"stage": 3, "zero": 2, "more": {"zero_optimization": {"zero_quantized_weights": True}}, "unroll": False}
    alone, found = (errors("llama", **layout, **more)[:2] for more in ({}, {axis: 2}))
    for mine, plain in zip(found, alone, strict=True):
        assert plain / 4 < mine < 2 * plain


@pytest.mark.parametrize("stage", keep([0, 3], [3]))
def test_batch_norms_statistics(stage):
    """Losses, parameters and statistics of a plain loop in Flax, three SGD steps on one device."""

    def loss(net, batch):
        return ((net(batch["x"]) - batch["y"]) ** 2).mean()

    rng = np.random.default_rng(0)
    data = [{k: rng.normal(size=(BATCH, n)).astype("float32") for k, n in (("x", 6), ("y", 3))} for _ in range(3)]
    dimensions = {"first/kernel": 1, "last/kernel": 0}
    step = make_step(jzero.from_flax(Normed, loss), dimensions=dimensions, **{**ALL, "stage": stage})
    net = Normed(nnx.Rngs(0))
    start = nnx.to_pure_dict(nnx.state(net, nnx.Not(nnx.RngState)))
    seen, state = train(step, jax.tree.map(np.asarray, start), data)
    np.testing.assert_allclose(seen[:, 0], train_module(net, loss, data), rtol=1e-6)
    assert {"norm/mean", "norm/var"} == set(step.model.state)
    assert_close(state.params, nnx.to_pure_dict(nnx.state(net, nnx.Not(nnx.RngState))), rtol=1e-5)


@pytest.mark.slow
def test_dropout_draws_the_masks_of_one_device():
    """A mask belongs to the micro-batch, not to the devices that share it: the same with and without the axes."""
    steps = make_step("dropping", stage=3, zero=2), make_step("dropping", **ALL)
    np.testing.assert_allclose(*(train(step, None, batches())[0] for step in steps), rtol=1e-6)
