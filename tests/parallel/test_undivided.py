"""A vocabulary or heads that `tensor` does not divide are whole on each device, and the run report names their price.

The oracle (`helpers.oracle`) is plain JAX on one device.
"""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from helpers import tensor_models
from helpers.tensor_models import BATCH, WIDTH, assert_one_device, make_step

import jzero
from jzero.display.text_table import size_text

VOCAB, HEAD = 67, WIDTH // 4
# The bytes of one device: tensor 2 halves a divided parameter, and zero 2 the masters and the gradients of each.
EMBED = VOCAB * WIDTH * 4 / 2 * 2 / 2
QKV = 2 * WIDTH * (4 + 2) * HEAD * 4 / 2 * 2 / 2
ODD = {  # (parameter, size): (bytes more per device, the size that fits)
    ("ends/embed [67, 32]", 67): (EMBED, 68),
    ("ends/head/kernel [32, 67]", 67): (EMBED, 68),
    ("stack/attention/qkv/kernel [32, 1, 6, 8]", 1): (QKV, 2),
}


@pytest.fixture(autouse=True)
def _model(monkeypatch):
    cls, config = tensor_models.ZOO["llama"]
    monkeypatch.setitem(tensor_models.ZOO, "odd", (cls, dataclasses.replace(config, vocab_size=VOCAB, num_kv_heads=1)))
    monkeypatch.setitem(tensor_models.DIMENSIONS, "odd", {})


def lines_of(step):
    text = " ".join(jzero.report(step).split())
    return {part.split(": ")[0]: part.split(": ")[1] for part in text.split(" - replicated over tensor: ")[1:]}


def test_one_device_computes_the_same_and_the_report_names_the_price():
    found = lines_of(assert_one_device("odd", tensor=2, zero=2, stage=3, unroll=False))
    assert len(found) == len(ODD)
    for (parameter, size), (price, fits) in ODD.items():
        line = found[f"mesh.tensor = 2 does not divide the {size} of {parameter}"]
        assert line.startswith(f"{size_text(price)} more per device than divided; {fits} would fit")


class Odd(nnx.Module):
    def __init__(self, rngs):
        self.odd, self.even = nnx.Linear(5, 3, rngs=rngs), nnx.Linear(3, 4, rngs=rngs)

    def __call__(self, x):
        return self.even(jnp.tanh(self.odd(x)))


def test_a_table_found_by_trying():
    """No dimension of the first kernel fits; masters, gradients and the copy in use are whole, at stage 0."""
    batch = {"x": jax.ShapeDtypeStruct((BATCH, 5), jnp.float32)}
    model = jzero.from_flax(Odd, lambda net, batch: (net(batch["x"]) ** 2).mean(), example_batch=batch)
    found = lines_of(make_step(model, tensor=2))
    assert list(found) == ["mesh.tensor = 2 does not divide any dimension of odd/kernel [5, 3]"]
    assert found.popitem()[1].startswith(f"{2 * 5 * 3 * 4 // 2} B more per device than divided")


def test_what_is_left_of_a_table_is_divided_and_no_line_where_all_fits():
    held = {leaf.name: leaf.axes_by_dim for leaf in jax.tree.leaves(make_step("odd", tensor=2).layouts)}
    assert (held["ends/embed"], held["stack/mlp/down/kernel"]) == (((), ()), (("tensor",), ()))
    assert lines_of(make_step("gpt2", tensor=2)) == {}
