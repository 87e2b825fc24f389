"""What each device holds under `tensor`, `context` and ZeRO; evaluation; DeepSpeed's names.

Layouts: `test_one_device`.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.tensor_models import batches, initial, make_step

import jzero
from jzero.tree import named


def parts(step):
    """The part of each parameter that a device holds."""
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


class Odd:
    """Parameters that the whole group does not divide, or nothing divides."""

    def init(self, rng):
        return {"six": jnp.ones((6, 3)), "three": jnp.ones(3)}

    def loss(self, params, batch, rng):
        return ((batch @ params["six"] + params["three"]) ** 2).mean()


def test_what_the_whole_group_does_not_divide_zero_alone_partitions():
    odd = make_step(Odd(), context=4, zero=2, stage=3).state_specs.params
    assert [tuple(spec) for spec in odd.values()] == [("zero",), ()]


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
