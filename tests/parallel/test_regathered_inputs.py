"""`tensor_parallel.regather`: the numbers of one device, one more all-gather for each product's input, fewer bytes.

The oracle is plain JAX on one device (`helpers.tensor_models`).
"""

import dataclasses
import re

import jax
import jax.numpy as jnp
import pytest
from helpers import tensor_models
from helpers.sampling import keep
from helpers.tensor_models import BATCH, PACKED, SEQUENCE, Llama, errors, make_step

from jzero.errors import ConfigError

LAYOUTS = [
    ("llama", {"tensor": 2}),
    ("llama", {"tensor": 2, "zero": 2, "stage": 3}),
    ("llama", {"tensor": 2, "zero": 2, "stage": 3, "unroll": False, "accum": 2}),
    ("llama", {"tensor": 2, "context": 2, "zero": 2, "stage": 2}),
    ("llama", {"tensor": 2, "zero": 2, "stage": 2, "remat": "matmuls"}),
    ("nnx", {"tensor": 2, "zero": 2, "stage": 3}),
    ("linen", {"tensor": 2, "zero": 2, "stage": 3}),
    ("tiled", {"tensor": 2, "unroll": False}),
    ("more", {"tensor": 2, "stage": 3, "zero": 2}),
]
SAMPLE = [LAYOUTS[2]]


def name_of(value):
    return "-".join(f"{k}{v}" for k, v in value.items()) if isinstance(value, dict) else value


@pytest.mark.parametrize(("name", "layout"), keep(LAYOUTS, SAMPLE), ids=name_of)
def test_one_device_computes_the_same(name, layout):
    losses, parameters, *_ = errors(name, regather=True, **layout)
    assert losses < 1e-6
    assert parameters < 2e-6


def test_a_pipeline_refuses_it():
    with pytest.raises(ConfigError, match=r"mesh.tensor = 2 with tensor_parallel.regather = true and mesh.pipe = 2"):
        make_step("llama", tensor=2, pipe=2, accum=4, regather=True)


LAYERS, ROWS, LENGTH, WIDTH = 4, 16, 128, 128
SHAPE = dataclasses.replace(PACKED, num_layers=LAYERS, d_model=WIDTH, num_heads=4, num_kv_heads=4, d_ff=2 * WIDTH)


def compiled(monkeypatch, regather, **layout):
    monkeypatch.setitem(tensor_models.ZOO, "wide", (Llama, SHAPE))
    monkeypatch.setitem(tensor_models.DIMENSIONS, "wide", {})
    tensor_models.model.cache_clear()
    step = make_step("wide", tensor=4, unroll=False, regather=regather, **layout)
    shapes = {name: jax.ShapeDtypeStruct((ROWS, LENGTH), jnp.int32) for name in ("inputs", "labels")}
    program = step.lower(shapes).compile()
    gathers = len(re.findall(r" all-gather(?:-start)?\(", program.as_text()))
    products = len(re.findall(r" dot\(", program.as_text()))
    return gathers, products, program.memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("layout", keep([{}, {"zero": 2, "stage": 3}], [{"zero": 2, "stage": 3}]), ids=name_of)
def test_two_gathers_a_layer_for_two_inputs_kept(monkeypatch, layout):
    """In a scanned layer, whose program is written once: [rows, length, width] in float32 twice.

    A device's own part of it is not kept either: it is a norm's result, and computed again.
    """
    before, after = (compiled(monkeypatch, regather, **layout) for regather in (False, True))
    assert after[0] == before[0] + 2
    assert after[1] == before[1]  # no product is computed again
    rows = ROWS // layout.get("zero", 1)
    saved = 2 * LAYERS * rows * LENGTH * WIDTH * 4
    assert before[2] - after[2] == pytest.approx(saved, rel=0.15)


def test_without_the_axis_it_changes_nothing():
    texts = [
        make_step("nnx", zero=2, stage=3, regather=regather)
        .lower({name: jax.ShapeDtypeStruct((BATCH, SEQUENCE), jnp.int32) for name in ("inputs", "labels")})
        .as_text()
        for regather in (False, True)
    ]
    assert texts[0] == texts[1]
