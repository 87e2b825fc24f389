"""State and activations in host memory: what lies there, the numbers bit for bit as without."""

import os
import socket
import subprocess
import sys
from functools import lru_cache
from types import SimpleNamespace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers.offload import BF16, BOTH, CPU, OPTIMIZER, PARAM, on_host, run, scans
from helpers.refusals import refused
from helpers.sampling import keep
from jax.sharding import NamedSharding, PartitionSpec
from layouts import LAYOUTS, Net, assert_same, batch, make_mesh, settings

import jzero
from jzero.checkpoint import async_save
from jzero.checkpoint.checksums import checksums
from jzero.checkpoint.snapshot import layer_sharding
from jzero.distributed import heartbeat, host_collectives, joining
from jzero.distributed.machine import memory_gb
from jzero.layout import offload
from jzero.planner import gpu_devices, memory
from jzero.planner.state_bytes import state_bytes

SIZE = 2 * 64 + 4 * (64 + 8)  # elements of Net
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 20, "hysteresis": 1}}  # the first steps are skipped
FULL = {"activation_checkpointing": {"policy": "full"}}
CASES = [
    *[(name, OPTIMIZER, {}) for name in ("one", "hsdp", "interleaved", "zero_bubble")],
    ("stage3", OPTIMIZER, FP16),
    ("stage3", BOTH, {"train_micro_batch_size_per_gpu": 4}),
    ("stage3", BOTH, BF16 | FULL),
    ("stage1", OPTIMIZER, {"optimizer": {"type": "Muon", "params": {"lr": 0.01}}}),
    ("stage2", OPTIMIZER, {"ema": {"decay": 0.9}}),
    ("stage2", OPTIMIZER, {"optimizer": {"type": "noisy_sgd", "params": {"lr": 0.01}}}),  # which has random numbers
    ("stage2", {"offload_optimizer": {**CPU, "ratio": 0.5}}, BF16),
]


@pytest.mark.parametrize(("name", "offloaded", "more"), keep(CASES, CASES[5:6]), ids=str)
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
    assert on_host(engine.state.params) == (256 if "ratio" in offloaded["offload_optimizer"] else SIZE)
    assert jax.tree.map(lambda x: x.sharding, engine.state) == engine.step_fn.state_shardings
    assert engine.skipped_steps == expected.skipped_steps
    assert (engine.skipped_steps > 0) == ("fp16" in more)
    assert engine.skipped_steps < steps


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
    state = jax.tree.map(
        lambda x, to: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=to), step.state_shapes, step.state_shardings
    )
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


# ------------------------------------------------------------------------------------------- limits


WIDE = SimpleNamespace(
    init=lambda rng: {name: jnp.zeros((1024, 1024)) for name in "wv"},
    loss=lambda params, batch, rng: jnp.mean(jnp.square(jnp.tanh(batch @ params["w"]) @ params["v"])),
)


@lru_cache
def compiled(kind):
    zero = {"stage": 2, "offload_optimizer": {"device": kind}}
    config = {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {}}, "zero_optimization": zero}
    step = jzero.make_train_step(WIDE, config | BF16, mesh=jzero.make_mesh(devices=gpu_devices("h100", 1)))
    return step, step.lower(jax.ShapeDtypeStruct((8, 1024), jnp.float32)).compile()


@pytest.mark.usefixtures("no_compilation_cache")
def test_a_plan_for_absent_gpus_counts_host_memory_as_such():
    state = 3 * 4 * 2 * 1024 * 1024
    (step, program), (usual, usual_program) = compiled("cpu"), compiled("none")
    planned, without = memory(program, step), memory(usual_program, usual)
    assert (step.host_bytes, planned.host, without.host) == (state, state, 0)
    assert planned.peak <= without.peak - state + 2**20
    assert planned.arguments < 2**20
    b, usual_b = state_bytes(step), state_bytes(usual)
    assert (b.host, b.persistent) == (state, usual_b.persistent - state)
    assert b.persistent < 100
    assert b.total == usual_b.total - state
    assert "host 0.023" in repr(planned)


def stage(number, offloaded, threshold=0):
    zero = {"stage": number, "stage3_param_persistence_threshold": threshold, **offloaded}
    return jzero.make_train_step(Net(), settings(LAYOUTS["stage2"], zero_optimization=zero, stack={}))


def optimizer(**section):
    return {"offload_optimizer": section}


LARGE = "offload_param: no parameter has stage3_param_persistence_threshold = 100,000 elements"
REPORTS = [
    (lambda: compiled("cpu")[0], "of these in host memory 24.0 MiB"),
    (lambda: stage(3, PARAM), "layers, scanned for offload_param; activation checkpointing"),
    (lambda: stage(3, PARAM), "copied to the device layer by layer"),
    (lambda: stage(3, PARAM, 10**5), LARGE),
    (lambda: stage(2, PARAM), "offload_param: stage 2 keeps the weights on the device; use stage 3"),
    (lambda: stage(1, optimizer(ratio=0.5)), "offload_optimizer: device is none, so all of the state"),
    (lambda: stage(1, optimizer(device="cpu", ratio=0)), "offload_optimizer: ratio is 0, so all of"),
]


@pytest.mark.usefixtures("no_compilation_cache")
@pytest.mark.parametrize(("step", "part"), REPORTS, ids=[part for _, part in REPORTS])
def test_the_report_says_what_is_where_and_why_nothing_is(step, part):
    text = " ".join(jzero.report(step()).split())
    assert part in text
    assert ("ZeRO formula" in text) == part.startswith("offload_")  # of state on the device


INITIALIZE = """
import os, jax, jzero
from flax import nnx
jax.config.update("jax_num_cpu_devices", 1)
config = {"train_batch_size": 2, "optimizer": {"type": "Adam", "params": {"lr": 1e-3}},
          "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}}
model = jzero.from_flax(lambda rngs: nnx.Linear(4, 4, rngs=rngs), lambda module, batch: module(batch).mean())
jzero.initialize(model=model, config=config)
print("LIMIT", os.environ["XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"])
"""


@pytest.mark.slow
def test_initialize_lets_jax_pin_most_of_the_hosts_memory():
    """JAX reads the limit when it starts its devices, so it is set before."""
    env = {name: value for name, value in os.environ.items() if name != offload.LIMIT}
    env |= {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": "0"}
    done = subprocess.run([sys.executable, "-c", INITIALIZE], env=env, capture_output=True, text=True, check=True)
    assert f"LIMIT {offload.pinnable_gb()}\n" in done.stdout


@pytest.mark.parametrize("on_host", [True, False])
def test_jax_may_pin_most_of_the_hosts_memory_for_activations(on_host, monkeypatch):
    monkeypatch.setattr(offload, "memory_gb", lambda: 100)
    monkeypatch.delenv(offload.LIMIT, raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setattr(offload, "backends_are_initialized", lambda: False)
    offload.allow_pinned(jzero.Config.load({"activation_checkpointing": {"cpu_checkpointing": on_host}}))
    assert os.environ.pop(offload.LIMIT, None) == ("45" if on_host else None)  # for each of two GPUs


def test_the_gpus_of_a_host_share_what_may_be_pinned(tmp_path):
    """JAX has an allocator for each GPU, so a limit for all of them would be passed by every one."""
    (tmp_path / "dev").mkdir()
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidiactl", "nvidia-uvm"):
        (tmp_path / "dev" / name).touch()
    processes = {"RANK": "1", "WORLD_SIZE": "16", "MASTER_ADDR": "a", "LOCAL_SIZE": "8"}
    for env, gpus in (({}, 3), ({"CUDA_VISIBLE_DEVICES": "0,2"}, 2), (processes, 8)):
        assert offload.gpus_of_host(env, tmp_path) == gpus
    assert offload.gpus_of_host({}, tmp_path / "no") == 1


def test_old_names_of_deepspeed():
    config = jzero.Config.load({"zero_optimization": {"stage": 3, "cpu_offload": True, "cpu_offload_params": True}})
    assert config.zero_optimization.offload_optimizer.device == config.zero_optimization.offload_param.device == "cpu"
    for old, device in (({"cpu_offload": False}, "none"), ({"cpu_offload": True, "offload_optimizer": None}, "cpu")):
        assert jzero.Config.load({"zero_optimization": old}).zero_optimization.offload_optimizer.device == device


@pytest.fixture
def mesh(monkeypatch):
    monkeypatch.setattr(offload, "is_gpu", lambda mesh: True)
    return jzero.make_mesh(devices=jax.devices()[:2])


def test_more_host_memory_than_jax_may_pin(monkeypatch, mesh):
    monkeypatch.setenv(offload.LIMIT, "2")
    offload.check_pinned(2 * 2**30, mesh)
    parts = "takes 3 GiB", "JAX may pin 2 for each GPU of host", "set", "XLA_PJRT_GPU_HOST_MEMORY"
    refused(lambda: offload.check_pinned(3 * 2**30, mesh), *parts)
    monkeypatch.setenv(offload.LIMIT, "100")
    monkeypatch.setattr(offload, "memory_gb", lambda: 100)
    offload.check_pinned(45 * 2**30, mesh)
    parts = f"on host {socket.gethostname()} takes 91 GiB, and 90 may be pinned", "use more hosts, or lower"
    refused(lambda: offload.check_pinned(91 * 2**29, mesh), *parts)
    # Another process's error, as the coordination service passes it on, ends this one too.
    less = "lasting:{}: host b has less"
    monkeypatch.setattr(host_collectives, "share_problem", lambda topic, own: own or less.format(topic))
    refused(lambda: offload.check_pinned(1, mesh), "pinned memory: host b has less")


V1, BYTES = "sys/fs/cgroup/memory", "memory.limit_in_bytes"


@pytest.mark.parametrize(
    ("groups", "files", "limit"),
    [
        ("0::/job/step\n", {"sys/fs/cgroup/job/memory.max": 3, "sys/fs/cgroup/job/step/memory.max": "max"}, 3),
        ("0::/../pod\n", {"sys/fs/cgroup/memory.max": 2}, 2),
        ("5:cpu:/b\n4:memory:/a\n", {f"{V1}/a/{BYTES}": 2, f"{V1}/b/{BYTES}": 1}, 2),
        ("0::/\n", {}, None),
        (None, {}, None),
    ],
)
def test_memory_of_a_job(tmp_path, groups, files, limit):
    """Slurm's job limit above its step's, a container that sees only its own, cgroups of version 1, none."""
    if groups is not None:
        (tmp_path / "proc/self").mkdir(parents=True)
        (tmp_path / "proc/self/cgroup").write_text(groups)
    for name, value in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{value if value == 'max' else value * 2**30}\n")
    assert memory_gb(tmp_path) == (limit or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2**30)


def test_processes_of_a_host_share_its_memory(monkeypatch, mesh):
    devices = [SimpleNamespace(process_index=process) for process in (0, 1, 2)]
    mesh = SimpleNamespace(devices=np.array(devices), local_devices=devices[:1])
    monkeypatch.setenv(offload.LIMIT, str(offload.pinnable_gb()))

    def check(*hosts):
        for module in (joining, offload):
            monkeypatch.setattr(module, "hosts", lambda: list(hosts))
        offload.check_pinned(offload.pinnable_gb() * 2**30 * 3 // 4, mesh)

    check(0, 1, 1)
    refused(lambda: check(0, 0, 1), "the part of the state on host")
