"""Model-state bytes per device: the ZeRO formula, by accounting from the specs, and what real devices hold."""

from itertools import product
from math import prod

import jax
import jax.numpy as jnp
import pytest
from helpers.cuda import needs_cuda_compiler
from helpers.fp8 import FP8
from helpers.sampling import keep, sample
from helpers.tensor_models import make_step

import jzero
from jzero.planner import gpu_devices
from jzero.planner.state_bytes import bytes_per_device, leaf_bytes, state_bytes
from jzero.run.step_memory import by_module
from models.llama import Llama, LlamaConfig, preset
from models.mlp import MLP, cross_entropy

COUNTERS = 2 * 4  # AdamW's number of updates and the schedule's, int32
TINY = LlamaConfig(3, 64, 4, 2, 96, vocab_size=130, attention="xla")
# The ZeRO paper's 7.5 billion parameters; every width is a multiple of 1,024, or its other dimension is.
PAPER = LlamaConfig(36, 4096, 32, 32, 10_912, vocab_size=32_000)


def llama(config):
    return jzero.from_flax(lambda rngs: Llama(config, rngs=rngs))


def train_step(model, stage, mesh, precision="bf16", accum=1, **more):
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": accum,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        **({} if precision == "fp32" else {precision: {"enabled": True}}),
        **more,
    }
    return jzero.make_train_step(model, config, mesh=mesh)


def gpus(count, data=1):
    return jzero.make_mesh(data=data, devices=gpu_devices("h100", count))


def shapes_of(model):
    """(name, whole shape, shape of what may be partitioned: of one layer) of every parameter."""
    for path, x in jax.tree_util.tree_flatten_with_path(jax.eval_shape(model.init, jax.random.key(0)))[0]:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        yield name, x.shape, x.shape[1:] if name.startswith("stack/") else x.shape


def held(shapes, group):
    """Elements of the parameters that one device of a ZeRO group holds: a leaf that nothing divides, it holds whole."""
    return sum(prod(s) // (group if any(d % group == 0 for d in part) else 1) for _, s, part in shapes)


@needs_cuda_compiler
@pytest.mark.parametrize(("stage", "devices"), sample(product([0, 1, 2, 3], [8, 64, 1024]), strength=1))
def test_1b_llama(stage, devices):
    model, mesh = llama(preset("1b")), gpus(devices)
    found = state_bytes(train_step(model, stage, mesh))
    parameters = preset("1b").num_parameters
    assert sum(prod(s) for _, s, _ in shapes_of(model)) == parameters
    group = 1 if stage == 0 else devices
    # The preset's shapes are all multiples of 1,024 somewhere, so no leaf is replicated: 12/N to the byte.
    assert (found.masters, found.optimizer) == (4 * parameters // group, 8 * parameters // group + COUNTERS)
    assert found.persistent == 12 * parameters // group + COUNTERS
    assert found.parameters == 2 * parameters // (devices if stage == 3 else 1)
    assert found.gradients == 2 * parameters // (devices if stage >= 2 else 1)
    assert found.total == pytest.approx(found.formula, abs=COUNTERS)


@needs_cuda_compiler
@pytest.mark.parametrize("devices", [8, 64, 1024])
def test_leaves_that_stay_replicated(devices):
    """A layer of 100,000 elements and less stays whole, as stated in the layout: in the 1b Llama the norms."""
    model = llama(preset("1b"))
    zero_section = {"stage": 3, "stage3_param_persistence_threshold": 100_000}
    step = train_step(model, 3, gpus(devices), zero_optimization=zero_section)
    found = state_bytes(step)
    whole = sum(prod(s) for _, s, part in shapes_of(model) if prod(part) < 100_000)
    rest = preset("1b").num_parameters - whole
    assert whole == 2048 * (2 * 16 + 1)
    assert found.persistent == 12 * whole + 12 * rest // devices + COUNTERS
    assert (found.parameters, found.gradients) == (2 * whole + 2 * rest // devices,) * 2
    stated = [leaf for leaf in jax.tree.leaves(step.layouts) if "stage3_param_persistence_threshold" in leaf.why]
    assert sum(prod(leaf.shape) for leaf in stated) == whole
    assert found.formula == pytest.approx(16 * (whole + rest) / devices, abs=COUNTERS)


# Table 1 of arXiv:1910.02054, 7.5 B parameters: GB per device for P_os, P_os+g, P_os+g+p; 120 at stage 0.
ZERO_PAPER = {
    4: (52.5, 41.3, 30.0), 16: (35.6, 21.6, 7.5), 64: (31.4, 16.6, 1.88), 256: (30.4, 15.4, 0.47),
    1024: (30.1, 15.1, 0.12),
}  # fmt: skip


@needs_cuda_compiler
@pytest.mark.parametrize("devices", keep(ZERO_PAPER, [4, 1024]))
def test_zero_papers_table(devices):
    model, mesh = llama(PAPER), gpus(devices)
    assert PAPER.num_parameters == pytest.approx(7.5e9, rel=1e-3)
    for stage, printed in enumerate((120.0, *ZERO_PAPER[devices])):
        found = state_bytes(train_step(model, stage, mesh))
        gigabytes = found.total / PAPER.num_parameters * 7.5
        digits = 2 if printed < 2 else 1
        assert gigabytes == pytest.approx(printed, abs=0.51 * 10**-digits), f"stage {stage}"
        assert found.total == pytest.approx(found.formula, abs=COUNTERS)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_fp32_has_no_copy_but_what_is_gathered(stage):
    shapes = list(shapes_of(llama(TINY)))
    found = state_bytes(train_step(llama(TINY), stage, jzero.make_mesh(), precision="fp32"))
    partitioned = [(n, s, part) for n, s, part in shapes if any(d % 8 == 0 for d in part)]
    assert found.parameters == (4 * sum(prod(s) for _, s, _ in partitioned) if stage in (1, 2) else 0)
    assert found.gradients == 4 * held(shapes, 8 if stage >= 2 else 1)


@pytest.mark.parametrize(
    ("accum", "more", "size"),
    [
        (1, {}, 2),
        (4, {}, 4),
        (4, {"data_types": {"grad_accum_dtype": "bf16"}}, 2),
        (1, {"communication_data_type": "fp32"}, 4),
    ],
    ids=["acc1", "acc4", "acc4-in-bf16", "acc1-reduced-in-fp32"],
)
def test_gradients_are_in_the_dtype_they_wait_in(accum, more, size):
    found = state_bytes(train_step(llama(TINY), 3, jzero.make_mesh(), accum=accum, **more))
    assert found.gradients == size * held(shapes_of(llama(TINY)), 8)


@pytest.mark.parametrize("stage", keep([0, 1, 2, 3], [3]))
def test_a_frozen_parameter_is_there_once_in_the_compute_dtype(stage):
    """LoRA's base weights: 2 bytes each (2 / N under stage 3), no gradient, no moments, no second copy."""
    step = train_step(llama(TINY), stage, jzero.make_mesh(), frozen_parameters=["^ends/"])
    found, shapes = state_bytes(step), list(shapes_of(llama(TINY)))
    trained = [leaf for leaf in shapes if leaf[0].startswith("stack/")]
    frozen = [leaf for leaf in shapes if leaf[0].startswith("ends/")]
    group = 8 if stage else 1
    assert found.masters == 4 * held(trained, group) + 2 * held(frozen, 8 if stage == 3 else 1)
    assert found.optimizer == 8 * held(trained, group) + COUNTERS
    assert found.gradients == 2 * held(trained, 8 if stage >= 2 else 1)
    assert found.parameters == 2 * held(trained, 8 if stage == 3 else 1)
    state = step.init(jax.random.key(0))
    here = [s.data.nbytes for x in jax.tree.leaves(state.params) for s in x.addressable_shards if s.device.id == 0]
    assert sum(here) == found.masters
    assert {x.dtype for x in jax.tree.leaves(state.params["ends"])} == {jnp.dtype(jnp.bfloat16)}


@pytest.mark.parametrize(
    ("model", "stage", "data"),
    keep(product(["llama", "mlp"], [0, 1, 2, 3], [1, 2]), [("llama", 3, 1), ("mlp", 1, 2)]),
    ids=str,
)
def test_devices_hold_what_the_accounting_says(model, stage, data):
    model = llama(TINY) if model == "llama" else jzero.from_flax(MLP, cross_entropy)
    mesh = jzero.make_mesh(data=data)
    step = train_step(model, stage, mesh)
    state = step.init(jax.random.key(0))

    def on_device_0(tree):
        arrays = [jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
                  for x in jax.tree.leaves(tree)]  # fmt: skip
        return sum(s.data.nbytes for x in arrays for s in x.addressable_shards if s.device == jax.devices()[0])

    found = state_bytes(step)
    assert on_device_0(state.params) == found.masters
    assert on_device_0(state.opt_state) == found.optimizer
    assert on_device_0(state) == bytes_per_device(step.state_shapes, step.state_specs, mesh)
    group = 8 // data if stage else 1
    assert found.persistent == 12 * held(shapes_of(model), group) + COUNTERS


@pytest.mark.parametrize(
    ("stage", "axis"), keep(product([0, 1, 2, 3], ["zero", "context"]), [(3, "zero"), (2, "context")])
)
def test_bytes_of_each_parameter(stage, axis):
    """By the ZeRO table: masters 4, moments 8, bf16 weights 2, bf16 gradients 2 bytes, each divided or not."""
    mesh = jzero.make_mesh(**{"zero": 1, axis: 2}, devices=jax.devices()[:2])
    step = train_step(llama(TINY), stage, mesh)
    found = leaf_bytes(step)
    state, weights, gradients = (2 if stage >= s else 1 for s in (1, 3, 2))
    for name, shape, _ in shapes_of(llama(TINY)):
        size = prod(shape)  # every matrix of TINY and every norm divides by 2
        expected = 4 * size / state, 8 * size / state, 2 * size / weights, 2 * size / gradients, 0
        assert tuple(found.pop(name)) == expected
    assert tuple(found.pop("")) == (0, COUNTERS, 0, 0, 0)
    assert not found


OFFLOADED = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
KINDS = [({}, 3), ({"optimizer": {"type": "adafactor", "params": {"lr": 1e-3}}}, 0), (OFFLOADED, 2)]


@pytest.mark.parametrize(("more", "stage"), KINDS, ids=["adamw", "adafactor", "offload"])
def test_parameters_add_up_to_the_whole(more, stage):
    step = train_step(llama(TINY), stage, jzero.make_mesh(devices=jax.devices()[:2]), **more)
    masters, optimizer, parameters, gradients, host = map(sum, zip(*leaf_bytes(step).values(), strict=True))
    whole = state_bytes(step)
    assert (masters + optimizer, parameters, gradients, host) == (
        whole.persistent, whole.parameters, whole.gradients, whole.host,
    )  # fmt: skip
    assert (host > 0) == (more is OFFLOADED)


def test_the_table_by_module():
    step = train_step(llama(TINY), 3, jzero.make_mesh(devices=jax.devices()[:2]))
    rows = {line.split("  ")[0] or line.strip().split("  ")[0]: line.split() for line in by_module(step).splitlines()}
    norms = {name: row for name, row in rows.items() if name.endswith("norm")}
    assert norms["mlp_norm"][1:] == ["384", "B", "768", "B", "192", "B", "192", "B", "1.50", "KiB"]  # 3 layers x 64 / 2
    assert rows["embed"][1:3] == rows["head"][1:3]
    assert rows["other optimizer state"][-2:] == [str(COUNTERS), "B"]


def test_the_bytes_of_fp8_histories_are_counted():
    recipes = FP8, FP8 | {"fp8": {**FP8["fp8"], "recipe": "delayed"}}
    current, delayed = (make_step("llama", precision=precision, zero=8, stage=2) for precision in recipes)
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(delayed.state_shapes.fp8))
    assert state_bytes(delayed).optimizer - state_bytes(current).optimizer == size > 0
