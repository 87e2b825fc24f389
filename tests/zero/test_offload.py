"""State and activations in host memory: what lies there, the numbers bit for bit as without."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers.offload import BF16, BOTH, CPU, OPTIMIZER, PARAM, on_host, run, scans
from helpers.sampling import keep
from jax.sharding import NamedSharding, PartitionSpec
from layouts import LAYOUTS, Net, assert_same, batch, make_mesh, settings

import jzero
from jzero.checkpoint import async_save
from jzero.checkpoint.checksums import checksums
from jzero.checkpoint.snapshot import layer_sharding
from jzero.distributed import heartbeat

SIZE = 2 * 64 + 4 * (64 + 8)  # elements of Net
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 20, "hysteresis": 1}}  # the first steps are skipped
FULL = {"activation_checkpointing": {"policy": "full"}}
CASES = [
    *[(name, OPTIMIZER, {}) for name in ("one", "hsdp", "interleaved", "zero_bubble")],
    ("stage3", OPTIMIZER, FP16),
    ("stage3", BOTH, {}),
    ("stage3", BOTH, BF16 | FULL),
    ("stage1", OPTIMIZER, {"optimizer": {"type": "Muon", "params": {"lr": 0.01}}}),
    ("stage2", OPTIMIZER, {"ema": {"decay": 0.9}}),
    ("stage2", {"offload_optimizer": {**CPU, "ratio": 0.5}}, BF16),
]


@pytest.mark.parametrize(("name", "offloaded", "more"), keep(CASES, [("stage3", BOTH, {})]), ids=str)
def test_the_numbers_are_the_same_bit_for_bit(name, offloaded, more):
    steps = 6 if "fp16" in more else 3
    engine, losses = run(name, offloaded, steps, **more)
    expected, expected_losses = run(name, {}, steps, **more)
    if name == "interleaved" or "activation_checkpointing" in more:  # XLA fuses these otherwise, and rounds otherwise
        np.testing.assert_allclose(losses, expected_losses, rtol=1e-6)
        chex.assert_trees_all_close(*(jax.device_get(one.state.params) for one in (engine, expected)), rtol=1e-5)
    else:
        assert losses == expected_losses
        assert_same(engine.state, expected.state)
    assert on_host(expected.state.params) == on_host(expected.state.opt_state) == 0
    assert on_host(engine.state.params) > 0
    assert engine.skipped_steps == expected.skipped_steps
    assert (engine.skipped_steps > 0) == ("fp16" in more)
    assert engine.skipped_steps < steps


@pytest.mark.slow
def test_an_optimizer_passed_in():
    """Its constants and random numbers are the device's; JAX alone would refuse to mix them with the host's arrays."""
    found = []
    for offloaded in (OPTIMIZER, {}):
        config = settings(LAYOUTS["stage2"], zero_optimization={"stage": 2, **offloaded})
        del config["optimizer"], config["scheduler"]
        tx = optax.chain(
            optax.clip_by_global_norm(0.1), optax.add_noise(0.1, 0.5, 1), optax.trace(0.9), optax.scale(-0.01)
        )
        step = jzero.make_train_step(Net(), config, mesh=jzero.make_mesh(), optimizer=tx)
        found.append(step.init(jax.random.key(0)))
        for i in range(3):
            found[-1], _ = step(found[-1], batch(i))
    state, like = found
    chex.assert_trees_all_close(jax.device_get(state.params), jax.device_get(like.params), rtol=1e-6)
    assert on_host(state.params) == on_host(state.opt_state) == SIZE


FROZEN = {"frozen_parameters": ["first", "w"]}
PLACES = [  # and the elements on the host of the masters, and of Adam's two moments
    ("stage2", OPTIMIZER, {}, SIZE, SIZE),
    ("stage3", PARAM, {}, SIZE, 0),
    # A threshold of more than the 8 elements of a bias.
    ("stage3", PARAM | {"stage3_param_persistence_threshold": 9}, {}, SIZE - 4 * 8, 0),
    ("stage3", OPTIMIZER, FROZEN, 64 + 4 * 8, 64 + 4 * 8),
    ("stage3", BOTH, FROZEN, SIZE, 64 + 4 * 8),
    # The stack's 256 elements of 416 are more than half; the next largest has 64.
    *[
        ("stage2", {"offload_optimizer": {**CPU, "ratio": ratio}}, {}, elements, elements)
        for ratio, elements in ((0, 0), (0.5, 256), (0.65, 256 + 64))
    ],
]


@pytest.mark.parametrize(("name", "offloaded", "more", "masters", "moments"), PLACES, ids=str)
def test_what_lies_on_the_host(name, offloaded, more, masters, moments):
    layout = LAYOUTS[name]
    zero = settings(layout)["zero_optimization"] | offloaded
    step = jzero.make_train_step(Net(), settings(layout, zero_optimization=zero, **more), mesh=make_mesh(layout))
    state = step.init(jax.random.key(0))
    assert (on_host(state.params), on_host(state.opt_state)) == (masters, 2 * moments)
    assert step.host_bytes == (masters + 2 * moments) * 4 // 8


@pytest.mark.slow
def test_parameters_from_elsewhere_and_a_large_state_go_there_too(monkeypatch, tmp_path):
    engine, _ = run("stage3", BOTH, steps=1)
    params = jax.device_get(engine.state.params)
    given = engine.step_fn.init(jax.random.key(1), params)
    assert_same(given.params, params)
    monkeypatch.setattr("jzero.step.state.LARGE", 0)
    in_parts = jzero.make_train_step(Net(noise=True), engine.step_fn.config, mesh=engine.step_fn.mesh)
    fresh, around = in_parts.init(jax.random.key(1)), in_parts.init(jax.random.key(1), params)
    traced, init = [], Net.init
    monkeypatch.setattr(Net, "init", lambda *args: traced.append(args) or init(*args))
    some = in_parts.init(jax.random.key(1), params | {"stack": {"w": None, "b": None}})
    assert len(traced) == 2  # a program for each missing leaf
    monkeypatch.undo()
    assert_same(some.params, params | {"stack": fresh.params["stack"]})
    assert_same(fresh, engine.step_fn.init(jax.random.key(1)))
    assert_same(around, given)
    engine.save_16bit_model(tmp_path)
    engine.load_weights(tmp_path)
    for state in (given, fresh, some, engine.state):
        assert (on_host(state.params), on_host(state.opt_state)) == (SIZE, 2 * SIZE)
    np.testing.assert_array_equal(engine.state.params["stack"]["w"], params["stack"]["w"].astype(jnp.bfloat16))


@pytest.mark.slow
def test_the_watchdog_sees_a_save_until_it_is_complete(monkeypatch, tmp_path):
    engine, _ = run("one", OPTIMIZER, steps=1)
    write, seen = async_save._write, []
    monkeypatch.setattr(async_save, "_write", lambda *args: write(*args) or seen.append(heartbeat.pending()[0] > 0))
    engine.save_checkpoint(tmp_path)
    assert seen == [True]


def test_layers_of_a_listed_stack_are_read_into_host_memory():
    to = NamedSharding(jzero.make_mesh(), PartitionSpec(None, "zero"), memory_kind="pinned_host")
    assert layer_sharding(to, (4, 8, 8)).memory_kind == "pinned_host"


def test_checksums_of_host_arrays_are_copied_to_the_devices():
    """Without the copy, XLA for GPUs refuses the program (E1200); the CPU's compiles either way."""
    x = jnp.arange(12.0).reshape(4, 3)
    there = jax.device_put(x, x.sharding.with_memory_kind("pinned_host"))
    for leaf, copies in ((x, 0), (there, 1)):
        assert str(jax.make_jaxpr(checksums)({"x": leaf})).count("device_put") == copies
    assert int(checksums({"x": there})[0]) == int(checksums({"x": x})[0])


def test_own_arithmetic_gets_device_arrays():
    """What JAX refuses to mix with the devices' arrays is copied to them."""

    def loss(module, batch, extra):
        return jnp.mean((module(batch["x"]) - batch["x"] @ extra["kernel"]) ** 2)

    model = jzero.from_flax(lambda rngs: nnx.Linear(8, 8, rngs=rngs), loss)
    config = settings(LAYOUTS["stage2"], zero_optimization={"stage": 2, **OPTIMIZER}, stack={})
    engine = jzero.initialize(model=model, config=config, mesh=jzero.make_mesh(devices=jax.devices()[:8]))[0]
    teacher = engine.step_fn.init(jax.random.key(5)).params
    assert on_host(teacher) == 72
    assert np.isfinite(engine.train_batch(batch(0), extra=teacher))
    assert engine.module()(jnp.ones((1, 8))).shape == (1, 8)


@pytest.mark.parametrize("policy", ["full", "matmuls"])
def test_activations_between_the_passes_lie_on_the_host(policy):
    section = {"policy": policy, "cpu_checkpointing": True}
    config = settings(LAYOUTS["stage3"], activation_checkpointing=section, stack={})
    step = jzero.make_train_step(Net(), config)
    assert not step.setup.passes.facts.unrolled
    kept = [x.aval for eqn in scans(step.trace(batch(0)).jaxpr.jaxpr) for x in eqn.outvars]
    of_layers = [x for x in kept if x.shape[:2] == (4, config["train_micro_batch_size_per_gpu"])]  # [layers, rows, 8]
    assert of_layers
    assert {x.memory_space for x in of_layers} == {jax.memory.Space.Host}


def test_one_gpu_keeps_no_layers_weights_from_forward_to_backward():
    """Under offload_param they come again. Weights are [layers 4, 8, 8], activations [layers 4, rows 2, 8]."""
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0, **BOTH}
    more = {"train_micro_batch_size_per_gpu": 2, "stack": {"unroll": False}, "zero_optimization": zero}
    config = settings(LAYOUTS["one"], **more, **BF16)
    step = jzero.make_train_step(Net(), config, mesh=jzero.make_mesh(devices=jax.devices()[:1]))
    layers = [eqn for eqn in scans(step.trace(batch(0)).jaxpr.jaxpr) if eqn.params["length"] == 4]
    kept = [x.aval.shape for x in next(eqn for eqn in layers if not eqn.params["reverse"]).outvars]
    assert (4, 2, 8) in kept
    assert (4, 8, 8) not in kept
