"""Every layout of unmodified models: the losses, gradient norms and parameters of one device.

The oracle (`helpers.oracle`) is plain JAX. A row of each part is a default test; `-m slow` runs all.
"""

import jax
import numpy as np
import pytest
from helpers.oracle import train
from helpers.sampling import keep, some
from helpers.tensor_models import assert_one_device, batches, initial, make_step, reference

CPU = {"device": "cpu"}
REGATHER = {"tensor_parallel": {"regather": True}}
BOTH = {"zero_optimization": {"offload_optimizer": CPU, "offload_param": CPU}}
MASTERS = {"zero_optimization": {"offload_optimizer": CPU}}
ACTIVATIONS = {"activation_checkpointing": {"cpu_checkpointing": True}}
ALL = {"stage": 3, "zero": 2, "context": 2, "tensor": 2}


def schedule(name, chunks=1):
    return {"pipeline": {"schedule": name, "chunks": chunks}}


TENSOR = [
    ("nnx", {"tensor": 4}),
    ("nnx", {"tensor": 2, "zero": 2, "stage": 0, "accum": 2}),
    ("nnx", {"tensor": 2, "zero": 2, "stage": 1, "accum": 2, "unroll": False}),
    ("nnx", {"tensor": 2, "zero": 2, "stage": 2, "accum": 2, "remat": "matmuls"}),
    ("nnx", {"tensor": 2, "zero": 2, "stage": 3, "accum": 2, "remat": "full", "unroll": False}),
    ("nnx", {"tensor": 2, "data": 2, "zero": 2, "stage": 3, "remat": "matmuls"}),
    ("linen", {"tensor": 2}),
    ("linen", {"tensor": 4, "zero": 2, "stage": 3, "remat": "full"}),
    ("more", {"tensor": 2, "zero": 2, "stage": 3}),
    ("multi-query", {"tensor": 2, "zero": 2, "stage": 2}),
    ("gpt2", {"tensor": 4, "zero": 2, "stage": 1}),
    ("bert", {"tensor": 2}),
    ("vit", {"tensor": 2, "zero": 2, "stage": 3}),
]
CONTEXT = [
    ("nnx", {"context": 8, "stage": 3}),
    ("nnx", {"context": 2, "zero": 2, "stage": 1, "accum": 2, "unroll": False}),
    ("nnx", {"context": 2, "zero": 2, "stage": 2, "remat": "matmuls"}),
    ("nnx", {"context": 2, "data": 2, "zero": 2, "stage": 3}),
    ("nnx", {**ALL, "accum": 2, "remat": "full"}),
    ("nnx", {"context": 4, "tensor": 2, "stage": 2}),
    ("linen", ALL),
    ("llama", {"context": 2, "zero": 2, "stage": 3}),
    ("llama", {"context": 2, "tensor": 2, "zero": 2, "stage": 2}),
]
REGATHERED = [  # one more all-gather for the input of each matmul
    ("llama", {"tensor": 2, "zero": 2, "stage": 3, "unroll": False, "accum": 2}),
    ("llama", {"tensor": 2, "context": 2, "zero": 2, "stage": 2}),
    ("llama", {"tensor": 2, "zero": 2, "stage": 2, "remat": "matmuls"}),
    ("nnx", {"tensor": 2, "zero": 2, "stage": 3}),
    ("linen", {"tensor": 2, "zero": 2, "stage": 3}),
    ("tiled", {"tensor": 2, "unroll": False}),
    ("more", {"tensor": 2, "stage": 3, "zero": 2}),
]
TILED = [  # beside the plain model without tiles
    {},
    {"context": 2, "zero": 2, "stage": 3},
    {"tensor": 2, "zero": 2, "stage": 3, "remat": "full"},
    ALL,
    {"context": 2, "tensor": 2, "stage": 2, "unroll": False, "remat": "matmuls"},
    {"context": 2, "pipe": 2, "tensor": 2, "accum": 4, "stage": 1, "more": schedule("zero_bubble")},
    {"pipe": 2, "zero": 2, "accum": 4, "stage": 1},
    {"context": 2, "pipe": 2, "tensor": 2, "accum": 2, "stage": 1},
]
MEMORY = [
    ("llama", {**ALL, "unroll": False, "more": BOTH}),
    ("nnx", {"tensor": 2, "zero": 2, "stage": 2, "unroll": False, "more": MASTERS}),
    ("llama", {"tensor": 2, "context": 2, "stage": 3, "unroll": False, "remat": "full", "more": ACTIVATIONS}),
    ("nnx", {"tensor": 2, "stage": 1, "unroll": False, "remat": "matmuls", "more": ACTIVATIONS}),
    ("nnx", {
        "tensor": 2, "zero": 4, "stage": 3, "unroll": False,
        "more": {"zero_optimization": {"zero_hpz_partition_size": 2}},
    }),
    ("llama", {**ALL, "accum": 2, "unroll": False, "more": {**BOTH, **REGATHER}}),
]  # fmt: skip
PIPELINES = [
    ("nnx", "1f1b", {"tensor": 2}),
    ("nnx", "zero_bubble", {"tensor": 2, "zero": 2, "stage": 3}),
    ("llama", "zero_bubble", {"context": 2, "tensor": 2, "stage": 2, "remat": "matmuls"}),
    ("llama", "1f1b", {"context": 2, "zero": 2, "stage": 3, "remat": "full"}),
    ("llama", "gpipe", {"tensor": 2, "data": 2, "stage": 1, "unroll": False}),
    ("four", "interleaved", {"tensor": 2, "stage": 1}),
    ("four", "interleaved", {"context": 2, "zero": 2, "stage": 3, "remat": "full"}),
    ("four", "interleaved", {"context": 2, "tensor": 2, "stage": 2, "accum": 2, "unroll": False}),
    ("layers", "1f1b", {"tensor": 2, "zero": 2, "stage": 3}),
    ("layers", "zero_bubble", {"pipe": 4, "tensor": 2, "remat": "matmuls"}),
    ("layers", "gpipe", {"context": 2, "zero": 2, "stage": 2, "unroll": False}),
    ("layers", "interleaved", {"context": 2, "tensor": 2, "stage": 3}),
]
STAGED = [
    (name, {"pipe": 2, "accum": 4, **layout, "more": schedule(kind, 2 if kind == "interleaved" else 1)})
    for name, kind, layout in PIPELINES
]
REGATHERED = [(name, {**layout, "more": REGATHER}) for name, layout in REGATHERED]
TILED = [("tiled", {"oracle": "llama", **layout}) for layout in TILED]
ROWS = [*TENSOR, *CONTEXT, *REGATHERED, *TILED, *MEMORY]
DEFAULT = [TILED[-1], MEMORY[-1]]  # with "clipped" below they have all of TENSOR's and CONTEXT's settings


def name_of(value):
    return "-".join(f"{k}{name_of(v)}" for k, v in value.items()) if isinstance(value, dict) else str(value)


@pytest.mark.parametrize(("name", "layout"), [*keep(ROWS, DEFAULT), *some(STAGED, [STAGED[2]])], ids=name_of)
def test_one_device_computes_the_same(name, layout):
    assert_one_device(name, **layout)


@pytest.mark.parametrize("optimizer", keep(["clipped", "AdamW", "frozen"], ["clipped"]))
def test_optimizers_do_what_they_do_on_one_device(optimizer):
    known = reference("nnx", optimizer)
    assert known.norms[0] > 0.5  # it is clipped
    step = make_step("nnx", optimizer=optimizer, accum=2, remat="full", **ALL)
    seen, state = train(step, initial("nnx"), batches())
    np.testing.assert_allclose(seen, known.seen, rtol=1e-6)
    for x, expected in zip(jax.tree.leaves(state.params), jax.tree.leaves(known.params), strict=True):
        np.testing.assert_allclose(x, expected, rtol=1e-5, atol=2e-6)
