"""The table found by trying moves no more than one written by hand, and is Megatron's where that is best."""

import re
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from helpers.oracle import train
from helpers.sampling import keep
from helpers.tensor_models import DIMENSIONS, GPT, batches, initial, make_step, model, reference

import jzero
from jzero.errors import ConfigError
from jzero.model import STACK
from jzero.planner.traced_operations import moves
from models.llama import Llama, preset

MEGATRON = {
    "stack/attention/qkv/kernel": 1, "stack/attention/out/kernel": 0, "stack/mlp/gate_up/kernel": 2,
    "stack/mlp/down/kernel": 0, "ends/head/kernel": 1,
}  # fmt: skip


def dims_of(table, names):
    return {name: next((d for pattern, d in table.items() if re.search(pattern, name)), None) for name in names}


def moved(name, dimensions, inside=""):
    """Bytes on the wire that a traced step moves over the axis in this scope: an all-reduce counts twice."""
    step = make_step(name, tensor=2, dimensions=dimensions)
    found = moves(step.trace(batches(name)[0]), step.mesh).all
    return sum(m.total * (2 if m.kind == "all-reduce" else 1) for m in found if m.scope.startswith(inside))


# The tables of BERT and ViT leave matrices of the ends whole, which are divided here: there only the layers compare.
ZOO = {"nnx": "", "linen": "", "llama": "", "multi-query": "", "gpt2": "", "bert": STACK, "vit": STACK}


@pytest.mark.parametrize("name", keep(ZOO, ["llama"]))
def test_no_more_is_moved_than_by_hand(name):
    found = jzero.find_dimensions(model(name), batches(name)[0], 2)
    assert 0 < moved(name, found, ZOO[name]) <= moved(name, DIMENSIONS[name], ZOO[name])


def test_small_matrices_stay_whole_where_that_moves_less():
    """An adapter of rank 1 beside a kernel of 1024 x 1024, which is divided all the same."""

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.kernel = nnx.Param(jnp.zeros((1024, 1024)))
            self.a, self.b = nnx.Param(jnp.zeros((1024, 1))), nnx.Param(jnp.zeros((1, 1024)))

        def __call__(self, x):
            return jnp.tanh(x @ self.kernel[...]) + x @ self.a[...] @ self.b[...]

    net = jzero.from_flax(lambda rngs: Net(rngs), lambda net, batch: (net(batch) ** 2).mean())
    found = jzero.find_dimensions(net, jax.ShapeDtypeStruct((4, 8, 1024), jnp.float32), 2)
    assert "^kernel$" in found
    assert "^a$" not in found  # divided, it would cost a sum; b is divided for nothing


def test_megatrons_table_for_a_large_llama_in_seconds():
    """Llama-70B by its shapes: only one of its 80 layers is tried, and nothing is computed."""
    config = preset("8b", d_model=8192, num_layers=80, num_heads=64, num_kv_heads=8, d_ff=28672, attention="xla")
    tokens = jax.ShapeDtypeStruct((1, 4096), np.int32)
    start = time.process_time()
    found = jzero.find_dimensions(
        jzero.from_flax(lambda rngs: Llama(config, rngs=rngs)), {"inputs": tokens, "labels": tokens}, 8
    )
    assert time.process_time() - start < 60
    assert dims_of(found, MEGATRON) == MEGATRON
    assert not any("norm" in pattern for pattern in found)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.slow), 3])
def test_a_step_without_a_table_finds_one(stage):
    """`autotp_size` alone, as in DeepSpeed; the result is one device's."""
    examples = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in batches()[0].items()}
    untold = jzero.from_flax(GPT, example_batch=examples)
    step = make_step(untold, tensor=2, zero=2, stage=stage, more={"tensor_parallel": {"autotp_size": 2}})
    found = step.config.tensor_parallel.dimensions
    assert dims_of(found, ["stack/up/kernel", "stack/down/kernel"]) == {"stack/up/kernel": 1, "stack/down/kernel": 0}
    assert 'tensor_parallel.dimensions, found by trying: {"^ends/' in re.sub(r"\s+", " ", jzero.report(step))
    seen, _ = train(step, initial("nnx"), batches())
    np.testing.assert_allclose(seen, reference("nnx").seen, rtol=1e-6)


def test_layers_outside_of_a_stack_share_an_expression():
    """Four layers have one entry; the last one, of another shape, has its own."""

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.layers = nnx.List([nnx.Linear(8, 8, rngs=rngs) for _ in range(4)])
            self.last = nnx.Linear(8, 6, use_bias=False, rngs=rngs)

        def __call__(self, x):
            for layer in self.layers:
                x = nnx.relu(layer(x))
            return self.last(x)

    net = jzero.from_flax(Net, lambda net, batch: net(batch).mean())
    found = jzero.find_dimensions(net, jax.ShapeDtypeStruct((4, 6, 8), jnp.float32), 2)
    assert r"^layers/\d+/kernel$" in found
    assert "^last/kernel$" in found


class Gated:
    """A bias and state of one shape; the new state is no function of the old, so that nothing is moved for it."""

    state = ("gate",)

    def init(self, rng):
        return {"bias": jnp.ones(16), "down": jnp.ones((16, 8)), "gate": jnp.ones(16), "up": jnp.ones((8, 16))}

    def loss(self, params, batch, rng):
        hidden = (batch @ params["up"] + params["bias"]) * params["gate"]
        return (hidden @ params["down"]).mean(), {"gate": jnp.zeros(16)}


def test_state_stays_whole_beside_parameters_of_its_shape():
    found = jzero.find_dimensions(Gated(), jax.ShapeDtypeStruct((4, 8), jnp.float32), 2)
    assert found == {"^bias$": 0, "^down$": 0, "^up$": 1}


class Sampling(linen.Module):
    """Draws whenever it is called, as the decoder of Flax's seq2seq example does."""

    @linen.compact
    def __call__(self, x):
        x = linen.Dense(16)(x)
        return linen.Dense(8)(x + jax.random.normal(self.make_rng("noise"), x.shape))


def test_a_model_that_draws_in_any_case():
    batch = jnp.zeros((4, 6, 8))
    net = jzero.from_flax(Sampling(), lambda net, batch: net(batch).mean(), example_batch=batch)
    kernels = {"Dense_0/kernel": 1, "Dense_1/kernel": 0}
    assert dims_of(jzero.find_dimensions(net, batch, 2), kernels) == kernels


def test_nothing_to_divide():
    net = jzero.from_flax(lambda rngs: nnx.Linear(3, 1, rngs=rngs), lambda net, batch: net(batch).mean())
    with pytest.raises(ConfigError, match="tensor = 2 divides no dimension of a parameter"):
        jzero.find_dimensions(net, jax.ShapeDtypeStruct((4, 3), jnp.float32), 2)
