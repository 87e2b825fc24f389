"""Every layout of unmodified models: the losses, gradient norms and parameters of plain JAX on one device."""

import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest
from helpers.oracle import train
from helpers.sampling import keep, some
from helpers.steps import assert_close
from helpers.tensor_models import assert_one_device, batches, initial, make_step, reference

TESTS = pathlib.Path(__file__).parents[1]
CPU = {"device": "cpu"}
REGATHER = {"tensor_parallel": {"regather": True}}
BOTH = {"zero_optimization": {"offload_optimizer": CPU, "offload_param": CPU}}
MASTERS = {"zero_optimization": {"offload_optimizer": CPU}}
ACTIVATIONS = {"activation_checkpointing": {"cpu_checkpointing": True}}
ALL = {"stage": 3, "zero": 2, "context": 2, "tensor": 2}


TENSOR = [
    ("nnx", {"tensor": 4}),
    ("nnx", {"tensor": 2, "zero": 2, "stage": 1, "accum": 2, "unroll": False}),
    ("nnx", {"tensor": 2, "data": 2, "zero": 2, "stage": 3, "remat": "matmuls"}),
    ("linen", {"tensor": 4, "zero": 2, "stage": 3, "remat": "full"}),
    ("more", {"tensor": 2, "zero": 2, "stage": 3}),
    ("gpt2", {"tensor": 4, "zero": 2, "stage": 1}),
    ("bert", {"tensor": 2}),
    ("vit", {"tensor": 2, "zero": 2, "stage": 3}),
    ("odd heads", {"tensor": 2, "zero": 2, "stage": 3, "unroll": False}),
]
CONTEXT = [
    ("nnx", {"context": 8, "stage": 3}),
    ("nnx", {"context": 2, "zero": 2, "stage": 1, "accum": 2, "unroll": False}),
    ("nnx", {"context": 4, "tensor": 2, "stage": 2, "remat": "matmuls"}),
    ("linen", ALL),
    ("llama", {"context": 2, "tensor": 2, "zero": 2, "stage": 2}),
]
REGATHERED = [  # one more all-gather for the input of each matmul
    ("linen", {"tensor": 2, "zero": 2, "stage": 3}),
    ("more", {"tensor": 2, "stage": 3, "zero": 2}),
]
TILED = [  # beside the plain model without tiles
    {},
    {"context": 2, "tensor": 2, "stage": 2, "unroll": False, "remat": "matmuls"},
    {"pipe": 2, "tensor": 2, "accum": 2, "stage": 1},
]
HPZ = {"zero_optimization": {"zero_hpz_partition_size": 2}}
MEMORY = [
    ("nnx", {"tensor": 2, "zero": 2, "stage": 2, "unroll": False, "more": MASTERS}),
    ("llama", {"tensor": 2, "context": 2, "stage": 3, "unroll": False, "remat": "full", "more": ACTIVATIONS}),
    ("nnx", {"tensor": 2, "zero": 4, "stage": 3, "unroll": False, "more": HPZ}),
]
SCANNED = {"accum": 2, "remat": "full", "unroll": False}
# Each setting once, but for the unrolled layers; pipelines compile for long, so they have the smallest model.
DEFAULT = [
    ("odd, tiled", {"oracle": "odd", **ALL, **SCANNED, "optimizer": "clipped", "more": {**BOTH, **REGATHER}}),
    ("decoder", {"pipe": 2, "tensor": 2, "accum": 2, "stage": 1}),
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
REGATHERED = [(name, {**layout, "more": REGATHER}) for name, layout in REGATHERED]
TILED = [("tiled", {"oracle": "llama", **layout}) for layout in TILED]
ROWS = [*DEFAULT, *TENSOR, *CONTEXT, *REGATHERED, *TILED, *MEMORY]


def name_of(value):
    return "-".join(f"{k}{name_of(v)}" for k, v in value.items()) if isinstance(value, dict) else str(value)


@pytest.mark.parametrize(("name", "layout"), [*keep(ROWS, DEFAULT), *some(STAGED, [STAGED[1]])], ids=name_of)
def test_one_device_computes_the_same(name, layout):
    assert_one_device(name, **layout)


@pytest.mark.parametrize("optimizer", keep(["clipped", "AdamW", "frozen"], []))
def test_optimizers_do_what_they_do_on_one_device(optimizer):
    step, known = make_step("nnx", optimizer=optimizer, **SCANNED, **ALL), reference("nnx", optimizer)
    seen, state = train(step, initial("nnx"), batches())
    np.testing.assert_allclose(seen, known.seen, rtol=1e-6)
    assert_close(state.params, known.params, rtol=1e-5, atol=2e-6)


@pytest.mark.processes
@pytest.mark.parametrize("schedule", some(["1f1b", "gpipe", "interleaved", "zero_bubble"], ["zero_bubble"]))
def test_all_six_axes_at_once(schedule):
    """On 64 simulated devices: losses, parameters, text and a checkpoint of one device, by Flax and optax."""
    path = os.pathsep.join(map(str, (TESTS, TESTS.parent)))
    command = [sys.executable, "-m", "helpers.all_axes", schedule]
    run = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=900)
    assert not run.returncode, run.stderr[-3000:]
    found = json.loads(next(line for line in run.stdout.splitlines() if line.startswith("{")))
    assert found["devices"] == 64
    assert found["losses"] < 1e-6
    assert found["parameters"] < 5e-6
    assert found["loss after loading"] < 1e-6
    assert found["parameters after loading"] < 5e-6
    assert found["other tokens"] == 0
