"""What each device holds under `tensor`, `context` and ZeRO, what is not divided, `regather`, DeepSpeed's names."""

import dataclasses
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers.named_models import model_of
from helpers.programs import pairs
from helpers.sampling import some
from helpers.tensor_models import BATCH, PACKED, WIDTH, batches, initial, make_step

import jzero
from jzero.display.text_table import size_text
from jzero.tree import named


def parts(step):
    shardings = jax.tree.leaves(step.state_shardings.params)
    shapes = named(step.state_shapes.params).items()
    return {
        name: np.prod(sharding.shard_shape(x.shape)) / np.prod(x.shape)
        for (name, x), sharding in zip(shapes, shardings, strict=True)
    }


def test_each_device_holds_its_part():
    """Of a divided weight 1 / (tensor x zero), of another 1 / zero; under `context` ZeRO partitions over both."""
    found = parts(make_step("nnx", tensor=2, zero=2, stage=3))
    whole = {name for name in found if "norm" in name or name.endswith(("out/bias", "down/bias"))}
    assert len(whole) == 8
    assert found == {name: 1 / 2 if name in whole else 1 / 4 for name in found}
    assert set(parts(make_step("nnx", context=4, zero=2, stage=3)).values()) == {1 / 8}


def test_what_the_whole_group_does_not_divide_zero_alone_partitions():
    odd = SimpleNamespace(
        init=lambda rng: {"six": jnp.ones((6, 3)), "three": jnp.ones(3)},
        loss=lambda params, batch, rng: ((batch @ params["six"] + params["three"]) ** 2).mean(),
    )
    specs = make_step(odd, context=4, zero=2, stage=3).state_specs.params
    assert [tuple(spec) for spec in specs.values()] == [("zero",), ()]


@pytest.mark.slow
def test_a_sequence_that_context_does_not_divide():
    """Every device computes whole sequences then: slow, and right."""
    batch = {key: x[:, :-1] for key, x in batches()[0].items()}
    steps = make_step("nnx", context=4, zero=2, stage=3), make_step("nnx")
    found, expected = (s(s.init(jax.random.key(0), initial("nnx")), batch)[1] for s in steps)
    for key in ("loss", "grad_norm"):
        np.testing.assert_allclose(found[key], expected[key], rtol=1e-6)


def test_deepspeeds_names():
    assert jzero.make_mesh({"pipeline": {"stages": 4}}).shape["pipe"] == 4
    mesh = jzero.make_mesh({"train_batch_size": 8, "sequence_parallel_size": 2})
    assert tuple(mesh.shape.items()) == (
        ("pipe", 1), ("data", 1), ("zero", 4), ("expert", 1), ("context", 2), ("tensor", 1)
    )  # fmt: skip
    for enabled, degree in ((True, 2), (False, 1)):
        section = {"enabled": enabled, "autoep_size": 2}
        assert jzero.make_mesh({"train_batch_size": 8, "expert_parallel": section}).shape["expert"] == degree


# The bytes of one device: tensor 2 halves a divided parameter, and zero 2 the masters and the gradients of each.
EMBED = 67 * WIDTH * 4 / 2 * 2 / 2
QKV = 2 * WIDTH * (4 + 2) * (WIDTH // 4) * 4 / 2 * 2 / 2
PRICES = {  # (parameter, size): (bytes more per device, the size that fits)
    ("ends/embed [67, 32]", 67): (EMBED, 68),
    ("ends/head/kernel [32, 67]", 67): (EMBED, 68),
    ("stack/attention/qkv/kernel [32, 1, 6, 8]", 1): (QKV, 2),
}


def lines_of(step):
    text = " ".join(jzero.report(step).split())
    return {part.split(": ")[0]: part.split(": ")[1] for part in text.split(" - replicated over tensor: ")[1:]}


def test_the_report_names_the_price():
    """Of the model that `test_one_device` trains."""
    found = lines_of(make_step("odd heads", tensor=2, zero=2, stage=3, unroll=False))
    assert len(found) == len(PRICES)
    for (parameter, size), (price, fits) in PRICES.items():
        line = found[f"mesh.tensor = 2 does not divide the {size} of {parameter}"]
        assert line.startswith(f"{size_text(price)} more per device than divided; {fits} would fit")
    assert lines_of(make_step("gpt2", tensor=2)) == {}  # where all fits


def test_a_table_found_by_trying():
    """No dimension of the first kernel fits; masters, gradients and the copy in use are whole, at stage 0."""
    batch = {"x": jax.ShapeDtypeStruct((BATCH, 5), jnp.float32)}
    build = lambda rngs: nnx.Sequential(nnx.Linear(5, 3, rngs=rngs), jnp.tanh, nnx.Linear(3, 4, rngs=rngs))  # noqa: E731
    model = jzero.from_flax(build, lambda net, batch: (net(batch["x"]) ** 2).mean(), example_batch=batch)
    found = lines_of(make_step(model, tensor=2))
    assert list(found) == ["mesh.tensor = 2 does not divide any dimension of layers/0/kernel [5, 3]"]
    assert found.popitem()[1].startswith(f"{2 * 5 * 3 * 4 // 2} B more per device than divided")


def test_what_is_left_of_a_table_is_divided():
    held = {leaf.name: leaf.axes_by_dim for leaf in jax.tree.leaves(make_step("odd", tensor=2).layouts)}
    assert (held["ends/embed"], held["stack/mlp/down/kernel"]) == (((), ()), (("tensor",), ()))


LAYERS, ROWS, LENGTH, WIDE = 4, 16, 128, 128
SHAPE = dataclasses.replace(PACKED, num_layers=LAYERS, d_model=WIDE, num_heads=4, num_kv_heads=4, d_ff=2 * WIDE)


def compiled(regather, **layout):
    step = make_step(model_of(SHAPE), regather=regather, tensor=4, unroll=False, **layout)
    program = step.lower(pairs(ROWS, LENGTH)).compile()
    gathers = len(re.findall(r" all-gather(?:-start)?\(", program.as_text()))
    products = len(re.findall(r" dot\(", program.as_text()))
    return gathers, products, program.memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("layout", some([{}, {"zero": 2, "stage": 3}], [{}]), ids=str)
def test_a_gather_more_for_each_input_that_is_not_kept(layout):
    """`regather`, in a scanned layer, whose program is written once: [rows, length, width] in float32 twice."""
    before, after = (compiled(regather, **layout) for regather in (False, True))
    assert after[0] == before[0] + 2
    assert after[1] == before[1]  # no product is computed again
    rows = ROWS // layout.get("zero", 1)
    saved = 2 * LAYERS * rows * LENGTH * WIDE * 4
    assert before[2] - after[2] == pytest.approx(saved, rel=0.15)
