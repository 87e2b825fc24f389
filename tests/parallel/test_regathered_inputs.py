"""`tensor_parallel.regather`: one more all-gather for each product's input, fewer bytes; see also `test_one_device`."""

import dataclasses
import re

import pytest
from helpers import tensor_models
from helpers.programs import pairs
from helpers.sampling import some
from helpers.tensor_models import PACKED, Llama, make_step

LAYERS, ROWS, LENGTH, WIDTH = 4, 16, 128, 128
SHAPE = dataclasses.replace(PACKED, num_layers=LAYERS, d_model=WIDTH, num_heads=4, num_kv_heads=4, d_ff=2 * WIDTH)


def compiled(monkeypatch, regather, **layout):
    monkeypatch.setitem(tensor_models.ZOO, "wide", (Llama, SHAPE))
    monkeypatch.setitem(tensor_models.DIMENSIONS, "wide", {})
    tensor_models.model.cache_clear()
    step = make_step("wide", more={"tensor_parallel": {"regather": regather}}, tensor=4, unroll=False, **layout)
    program = step.lower(pairs(ROWS, LENGTH)).compile()
    gathers = len(re.findall(r" all-gather(?:-start)?\(", program.as_text()))
    products = len(re.findall(r" dot\(", program.as_text()))
    return gathers, products, program.memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("layout", some([{}, {"zero": 2, "stage": 3}], [{}]), ids=str)
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
