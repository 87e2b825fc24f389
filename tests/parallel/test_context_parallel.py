"""Context parallelism: what ZeRO partitions beside it, an odd sequence, DeepSpeed's name.

`test_one_device` has the layouts. The rules of fused attention, which move heads, are in spread/test_fused_attention.
"""

import jax
import numpy as np
import pytest
from helpers.tensor_models import BATCH, SEQUENCE, batches, initial, make_step

import jzero
from jzero.tree import named


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
    assert set(parts.values()) == {8}
    odd = make_step(Odd(), context=4, zero=2, stage=3).state_specs.params
    assert [tuple(spec) for spec in odd.values()] == [("zero",), ()]


class Odd:
    """Parameters that the whole group does not divide, or nothing divides."""

    def init(self, rng):
        return {"six": jax.numpy.ones((6, 3)), "three": jax.numpy.ones(3)}

    def loss(self, params, batch, rng):
        return ((batch @ params["six"] + params["three"]) ** 2).mean()


@pytest.mark.slow
def test_a_sequence_that_context_does_not_divide():
    """Every device computes whole sequences then: slow, and right."""
    step, one = make_step("nnx", context=4, zero=2, stage=3), make_step("nnx")
    batch = {key: x[:, :-1] for key, x in batches()[0].items()}
    assert batch["inputs"].shape == (BATCH, SEQUENCE - 1)
    found, expected = (s(s.init(jax.random.key(0), initial("nnx")), batch)[1] for s in (step, one))
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
