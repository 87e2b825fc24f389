"""Limits of state in host memory: what a plan counts, what the report says, what is refused."""

import os
import socket
import subprocess
import sys
from functools import lru_cache
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.offload import BF16, PARAM
from helpers.refusals import refused
from layouts import LAYOUTS, Net, settings

import jzero
from jzero.distributed import host_collectives, joining
from jzero.distributed.machine import memory_gb
from jzero.layout import offload
from jzero.planner import gpu_devices, memory
from jzero.planner.state_bytes import state_bytes


class Wide:
    def init(self, rng):
        return {"w": jnp.zeros((1024, 1024)), "v": jnp.zeros((1024, 1024))}

    def loss(self, params, batch, rng):
        return jnp.mean(jnp.square(jnp.tanh(batch @ params["w"]) @ params["v"]))


@lru_cache
def compiled(kind):
    """Compile a model whose weights are most of the memory for one GPU that is not there."""
    zero = {"stage": 2, "offload_optimizer": {"device": kind}}
    config = {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {}}, "zero_optimization": zero}
    step = jzero.make_train_step(Wide(), config | BF16, mesh=jzero.make_mesh(devices=gpu_devices("h100", 1)))
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
    """Two devices that count as GPUs."""
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


def test_no_process_goes_on_when_another_host_has_less_memory(monkeypatch, mesh):
    """Another process's error, as the coordination service passes it on, ends this one too."""
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
