"""Context parallelism of unmodified models: the losses, gradient norms and parameters of one device.

The oracle (`helpers.tensor_models.reference`) is plain JAX. Default tests are a covering sample; `-m slow` runs all.
The rules of fused attention, which move heads, are in spread/test_fused_attention.
"""

import jax
import numpy as np
import pytest
from helpers.sampling import keep
from helpers.tensor_models import BATCH, SEQUENCE, batches, errors, initial, make_step, model

import jzero
from jzero.errors import ConfigError
from jzero.tree import named

LAYOUTS = [
    ("nnx", {"context": 2}),
    ("nnx", {"context": 8, "stage": 3}),
    ("nnx", {"context": 2, "zero": 2, "stage": 1, "accum": 2, "unroll": False}),
    ("nnx", {"context": 2, "zero": 2, "stage": 2, "remat": "matmuls"}),
    ("nnx", {"context": 2, "data": 2, "zero": 2, "stage": 3}),
    ("nnx", {"context": 2, "tensor": 2, "zero": 2, "stage": 3, "accum": 2, "remat": "full"}),
    ("nnx", {"context": 4, "tensor": 2, "stage": 2}),
    ("linen", {"context": 2, "zero": 2, "stage": 3}),
    ("linen", {"context": 2, "tensor": 2, "zero": 2, "stage": 3}),
    ("llama", {"context": 2, "zero": 2, "stage": 3}),
    ("llama", {"context": 2, "tensor": 2, "zero": 2, "stage": 2}),
]
SAMPLE = [LAYOUTS[5]]


def name_of(value):
    return "-".join(f"{k}{v}" for k, v in value.items()) if isinstance(value, dict) else value


@pytest.mark.parametrize(("name", "layout"), keep(LAYOUTS, SAMPLE), ids=name_of)
def test_one_device_computes_the_same(name, layout):
    losses, parameters, *_ = errors(name, **layout)
    assert losses < 1e-6
    assert parameters < 2e-6  # one unit in the last place of an element is 1e-7 of the leaf; three steps add up


def test_zero_partitions_over_context_too():
    """What the whole group does not divide, `zero` alone partitions."""
    step = make_step("nnx", context=4, zero=2, stage=3)
    parts = {
        name: np.prod(shape.shape) // np.prod(sharding.shard_shape(shape.shape))
        for (name, shape), sharding in zip(
            named(step.state_shapes.params).items(), jax.tree.leaves(step.state_shardings.params), strict=True
        )
    }
    of_heads = {name for name in parts if name.endswith(("query/bias", "key/bias", "value/bias"))}  # [2 layers, 4, 8]
    assert len(of_heads) == 3
    assert {parts[name] for name in of_heads} == {8}
    assert set(parts.values()) == {8}
    odd = jzero.make_train_step(
        Odd(), CONFIG, mesh=jzero.make_mesh(context=4, zero=2, devices=jax.devices())
    ).state_specs.params
    assert [tuple(spec) for spec in odd.values()] == [("zero",), ()]


class Odd:
    """Parameters that the whole group does not divide, or nothing divides."""

    def init(self, rng):
        return {"six": jax.numpy.ones((6, 3)), "three": jax.numpy.ones(3)}

    def loss(self, params, batch, rng):
        return ((batch @ params["six"] + params["three"]) ** 2).mean()


CONFIG = {
    "train_batch_size": 8,
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
}


@pytest.mark.slow
def test_a_sequence_that_context_does_not_divide():
    """Every device computes whole sequences then: slow, and right."""
    step, one = make_step("nnx", context=4, zero=2, stage=3), make_step("nnx")
    batch = {key: x[:, :-1] for key, x in batches()[0].items()}
    assert batch["inputs"].shape == (BATCH, SEQUENCE - 1)
    found, expected = (s(s.init(jax.random.key(0), initial("nnx")), batch)[1] for s in (step, one))
    for key in ("loss", "grad_norm"):
        np.testing.assert_allclose(found[key], expected[key], rtol=1e-6)


# ------------------------------------------------------------------ configuration


def test_deepspeeds_name():
    config = {**CONFIG, "sequence_parallel_size": 2}
    assert dict(jzero.make_mesh(config).shape) == {
        "pipe": 1,
        "data": 1,
        "zero": 4,
        "expert": 1,
        "context": 2,
        "tensor": 1,
    }
    with pytest.raises(ConfigError, match=r"sequence_parallel_size = 2 and mesh.context = 4: both are the degree"):
        jzero.make_mesh({**config, "mesh": {"context": 4}})
    mesh = jzero.make_mesh(context=4)
    with pytest.raises(
        ConfigError, match="sequence_parallel_size = 2 in the config, but the mesh passed in has context 4"
    ):
        jzero.make_train_step(model("nnx"), config, mesh=mesh)


REFUSED = [
    ({"zero_optimization": {"stage": 3, "zero_quantized_gradients": True}}, ["zero_quantized_gradients", "not yet"]),
    ({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2}}, ["zero_hpz_partition_size", "not yet"]),
]


@pytest.mark.parametrize(("changes", "parts"), REFUSED, ids=lambda value: next(iter(value)) if value else "")
def test_refused_by_name(changes, parts):
    mesh = jzero.make_mesh(context=2, zero=2, devices=jax.devices()[:4])
    with pytest.raises(ConfigError) as error:
        jzero.make_train_step(model("nnx"), CONFIG | changes, mesh=mesh)
    for part in ("mesh.context = 2 with", *parts):
        assert part in str(error.value)
