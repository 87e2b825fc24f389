"""Model-state bytes per device: the ZeRO formula, by accounting from the specs, and what real devices hold."""

from functools import lru_cache
from math import prod

import jax
import jax.numpy as jnp
import pytest
from helpers.drawn import random_params
from helpers.fp8 import FP8
from helpers.named_models import model_of
from helpers.sampling import keep
from helpers.steps import mesh, settings
from helpers.tensor_models import make_step

import jzero
from jzero.planner.state_bytes import bytes_per_device, leaf_bytes, state_bytes
from jzero.run.step_memory import by_module
from jzero.tree import named
from models.llama import LlamaConfig

COUNTERS = 2 * 4  # AdamW's number of updates and the schedule's, int32
TINY = model_of(LlamaConfig(3, 64, 4, 2, 96, vocab_size=130, attention="xla"))


def tiny_step(stage, on=None, accum=1, **more):
    adamw = {"type": "AdamW", "params": {"lr": 1e-3}}
    config = settings(None, stage, accum, train_micro_batch_size_per_gpu=1, optimizer=adamw, bf16={"enabled": True})
    return jzero.make_train_step(TINY, config | more, mesh=on or mesh(8))


@lru_cache
def shapes_of_tiny():
    """(name, whole shape, shape of what may be partitioned: of one layer) of every parameter."""
    shapes = named(jax.eval_shape(TINY.init, jax.random.key(0)))
    return [(name, x.shape, x.shape[1:] if name.startswith("stack/") else x.shape) for name, x in shapes.items()]


def held(shapes, group):
    """Elements of the parameters that one device of a ZeRO group holds: a leaf that nothing divides, it holds whole."""
    return sum(prod(s) // (group if any(d % group == 0 for d in part) else 1) for _, s, part in shapes)


@pytest.mark.parametrize(
    ("accum", "more", "size"),
    [(4, {}, 4), (4, {"data_types": {"grad_accum_dtype": "bf16"}}, 2), (1, {"communication_data_type": "fp32"}, 4)],
)
def test_gradients_are_in_the_dtype_they_wait_in(accum, more, size):
    assert state_bytes(tiny_step(3, accum=accum, **more)).gradients == size * held(shapes_of_tiny(), 8)


def on_device_0(tree):
    leaves = jax.tree.leaves(tree)
    arrays = [jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x for x in leaves]
    return sum(s.data.nbytes for x in arrays for s in x.addressable_shards if s.device == jax.devices()[0])


@pytest.mark.parametrize("stage", keep([0, 1, 2, 3], [3]))
def test_a_frozen_parameter_is_there_once_in_the_compute_dtype(stage):
    """LoRA's base weights: 2 bytes each (2 / N under stage 3), no gradient, no moments, no second copy."""
    step = tiny_step(stage, frozen_parameters=["^ends/"])
    found, shapes = state_bytes(step), shapes_of_tiny()
    trained, frozen = ([leaf for leaf in shapes if leaf[0].startswith(part)] for part in ("stack/", "ends/"))
    group = 8 if stage else 1
    assert found.masters == 4 * held(trained, group) + 2 * held(frozen, 8 if stage == 3 else 1)
    assert found.optimizer == 8 * held(trained, group) + COUNTERS
    assert found.gradients == 2 * held(trained, 8 if stage >= 2 else 1)
    assert found.parameters == 2 * held(trained, 8 if stage == 3 else 1)
    state = step.init(jax.random.key(0), random_params(step.model))
    assert on_device_0(state.params) == found.masters
    assert on_device_0(state.opt_state) == found.optimizer
    assert on_device_0(state) == bytes_per_device(step.state_shapes, step.state_specs, step.mesh)
    assert {x.dtype for x in jax.tree.leaves(state.params["ends"])} == {jnp.dtype(jnp.bfloat16)}


def test_parameters_add_up_to_the_whole():
    step = tiny_step(0, mesh(2), zero_optimization={"stage": 2, "offload_optimizer": {"device": "cpu"}})
    masters, optimizer, *others = map(sum, zip(*leaf_bytes(step).values(), strict=True))
    whole = state_bytes(step)
    assert [masters + optimizer, *others] == [whole.persistent, whole.parameters, whole.gradients, whole.host]
    assert whole.host > 0


def test_the_table_by_module():
    rows = {line.strip().split("  ")[0]: line.split() for line in by_module(tiny_step(3, mesh(2))).splitlines()}
    assert rows["mlp_norm"][1:] == ["384", "B", "768", "B", "192", "B", "192", "B", "1.50", "KiB"]  # 3 layers x 64 / 2
    assert rows["embed"][1:3] == rows["head"][1:3]
    assert rows["other optimizer state"][-2:] == [str(COUNTERS), "B"]


def test_the_bytes_of_fp8_histories_are_counted():
    recipes = FP8, FP8 | {"fp8": {**FP8["fp8"], "recipe": "delayed"}}
    current, delayed = (make_step("llama", precision=precision, zero=8, stage=2) for precision in recipes)
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(delayed.state_shapes.fp8))
    assert state_bytes(delayed).optimizer - state_bytes(current).optimizer == size > 0
