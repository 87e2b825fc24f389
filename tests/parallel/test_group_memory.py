"""What saves memory or traffic, where groups of devices act as one: host memory, ZeRO++, and a model's state.

The oracle (`helpers.tensor_models.reference`) is plain JAX on one device.
"""

import jax
import numpy as np
import pytest
from flax import nnx
from helpers.sampling import keep
from helpers.tensor_models import errors

import jzero
from jzero.tree import named

CPU = {"device": "cpu"}
BOTH = {"offload_optimizer": CPU, "offload_param": CPU}
HOST = [
    ("llama", {"context": 2, "tensor": 2, "zero": 2, "stage": 3, "zero_section": BOTH}),
    ("nnx", {"tensor": 2, "zero": 2, "stage": 2, "zero_section": {"offload_optimizer": CPU}}),
    ("llama", {"tensor": 2, "context": 2, "stage": 3, "remat": "full", "checkpointing": {"cpu_checkpointing": True}}),
    ("nnx", {"tensor": 2, "stage": 1, "remat": "matmuls", "checkpointing": {"cpu_checkpointing": True}}),
    ("nnx", {"tensor": 2, "zero": 4, "stage": 3, "zero_section": {"zero_hpz_partition_size": 2}}),
]


@pytest.mark.parametrize(("name", "layout"), keep(HOST, HOST[:1]), ids=str)
def test_one_device_computes_the_same(name, layout):
    losses, parameters, *_ = errors(name, **layout, unroll=False)
    assert losses < 1e-6
    assert parameters < 2e-6


@pytest.mark.slow
@pytest.mark.parametrize("axis", ["context", "tensor"])
def test_quantized_weights_stay_as_near_as_without_the_axis(axis):
    """int8 codes round losses, norms and parameters as much as they do under ZeRO alone, within a factor of two."""
    layout = {"stage": 3, "zero": 2, "zero_section": {"zero_quantized_weights": True}, "unroll": False}
    alone, found = (errors("llama", **layout, **more)[:2] for more in ({}, {axis: 2}))
    for mine, plain in zip(found, alone, strict=True):
        assert plain / 4 < mine < 2 * plain


class Net(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(6, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, momentum=0.8, rngs=rngs)
        self.last = nnx.Linear(8, 3, rngs=rngs)

    def __call__(self, x):
        return self.last(nnx.relu(self.norm(self.first(x))))


def loss(net, batch):
    return ((net(batch["x"]) - batch["y"]) ** 2).mean()


@pytest.mark.parametrize("stage", [0, 3])
def test_batch_norms_statistics(stage):
    """Losses, parameters and statistics of a plain loop in Flax, three SGD steps on one device."""
    rng = np.random.default_rng(0)
    batches = [{"x": rng.normal(size=(16, 6)).astype("float32"), "y": rng.normal(size=(16, 3)).astype("float32")}
               for _ in range(3)]  # fmt: skip
    config = {
        "train_batch_size": 16, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "gradient_clipping": 0,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "tensor_parallel": {"dimensions": {"first/kernel": 1, "last/kernel": 0}},
    }  # fmt: skip
    mesh = jzero.make_mesh(zero=2, context=2, tensor=2)
    step = jzero.make_train_step(jzero.from_flax(Net, loss), config, mesh=mesh)
    net = Net(nnx.Rngs(0))
    start = nnx.to_pure_dict(nnx.state(net, nnx.Not(nnx.RngState)))
    state = step.init(jax.random.key(0), jax.tree.map(np.asarray, start))
    for batch in batches:
        state, metrics = step(state, batch)
        expected, gradient = nnx.value_and_grad(loss)(net, batch)
        nnx.update(net, jax.tree.map(lambda w, g: w - 0.1 * g, nnx.state(net, nnx.Param), gradient))
        assert float(metrics["loss"]) == pytest.approx(float(expected), rel=1e-6)
    whole = named(nnx.to_pure_dict(nnx.state(net, nnx.Not(nnx.RngState))))
    assert {"norm/mean", "norm/var"} == set(step.model.state)
    for name, x in named(state.params).items():
        np.testing.assert_allclose(x, whole[name], rtol=1e-5, atol=1e-6, err_msg=name)
