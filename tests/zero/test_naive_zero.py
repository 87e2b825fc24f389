"""`naive_gradient`, the ZeRO table in plain JAX: against one device, and the storages of a step against it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jzero
from jzero.layout import sharding, storage
from jzero.layout.zero import naive_gradient
from jzero.model import ModelFacts
from jzero.precision import Precision

MICRO, ACCUM, DEVICES = 2, 3, 4
W = np.random.default_rng(0).normal(size=(8, 6)).astype(np.float32)
X = np.random.default_rng(1).normal(size=(DEVICES * ACCUM, MICRO, 8)).astype(np.float32)


def loss(w, x):
    return (jnp.tanh(x @ w) ** 2).sum()


def on_devices(mesh, layout, gradient):
    """Run gradient(master, micro-batches) on every device, with the specs of a step."""
    specs = (layout.spec, P("zero"))
    run = jax.shard_map(gradient, mesh=mesh, in_specs=specs, out_specs=layout.spec, check_vma=False)
    return np.asarray(jax.jit(run)(W, X))


@pytest.mark.parametrize("stage", range(4))
def test_naive_and_stored_gradients(stage):
    mesh = jzero.make_mesh(devices=jax.devices()[:DEVICES])
    config = jzero.Config.load(
        {"train_batch_size": 24, "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}}
    )
    precision = Precision.from_config(config)
    facts = ModelFacts(None, {"w": jax.ShapeDtypeStruct(W.shape, W.dtype)}, False, (), None)
    layout = sharding.param_layouts(facts, config, mesh)["w"]
    assert (layout.dim is None) == (stage == 0)

    def naive(master, xs):
        return naive_gradient(stage, loss, master, list(xs))

    def stored(master, xs):
        diff, nondiff = storage.store_weight(layout, master, precision)

        def one(diff, x):
            return loss(storage.fetch_weight(layout, diff, nondiff, precision), x)

        return storage.reduce_gradient(layout, sum(jax.grad(one)(diff, x) for x in xs), mesh, precision)

    expected = jax.grad(lambda w: sum(loss(w, x) for x in X))(W)
    found = on_devices(mesh, layout, naive)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(on_devices(mesh, layout, stored), found)
