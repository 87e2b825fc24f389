"""Limits of state in host memory: what a plan counts, what the report says, what is refused.

The oracle of XLA's memory is the count of the leaves' bytes.
"""

import os
import re
import socket
import subprocess
import sys
from functools import lru_cache
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.offload import BF16, PARAM, run
from layouts import LAYOUTS, Net, settings

import jzero
from jzero.distributed import host_collectives, joining
from jzero.distributed.machine import memory_gb
from jzero.layout import offload
from jzero.planner import gpu_devices, memory
from jzero.planner.state_bytes import state_bytes

# ------------------------------------------------------------------------------------------------- memory, by plan


@lru_cache
def compiled(kind):
    """Compile a model whose weights are most of the memory for one GPU that is not there."""

    class Wide:
        def init(self, rng):
            return {"w": jnp.zeros((1024, 1024)), "v": jnp.zeros((1024, 1024))}

        def loss(self, params, batch, rng):
            return jnp.mean(jnp.square(jnp.tanh(batch @ params["w"]) @ params["v"]))

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


@pytest.mark.usefixtures("no_compilation_cache")
def test_the_report_says_what_is_where():
    text = jzero.report(compiled("cpu")[0])
    assert "of these in host memory  24.0 MiB" in text
    assert "offload: 24.0 MiB of the state in the host's memory for each device" in text
    config = settings(LAYOUTS["stage2"], zero_optimization={"stage": 2, **PARAM})
    assert "offload_param: stage 2 keeps the weights on the device" in jzero.report(
        jzero.make_train_step(Net(), config)
    )


# --------------------------------------------------------------------------------------------------------- limits


INITIALIZE = """
import os
import jax, numpy as np
from flax import nnx
import jzero
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
    done = subprocess.run(
        [sys.executable, "-c", INITIALIZE],
        env=env | {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": "0"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert f"LIMIT {offload.pinnable_gb()}\n" in done.stdout


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


def test_pipelines_keep_their_weights_on_the_device():
    with pytest.raises(jzero.ConfigError, match=r"with mesh.pipe = 2: .* \(offload_optimizer works"):
        run("zero_bubble", PARAM)


def test_more_host_memory_than_jax_may_pin(monkeypatch):
    mesh = jzero.make_mesh(devices=jax.devices()[:2])
    monkeypatch.setattr(offload, "is_gpu", lambda mesh: True)
    monkeypatch.setenv(offload.LIMIT, "2")
    offload.check_pinned(2 * 2**30, mesh)
    with pytest.raises(
        jzero.ConfigError, match=r"takes 3 GiB .* JAX may pin 2 for each GPU of host .*; set .*XLA_PJRT_GPU_HOST_MEMORY"
    ):
        offload.check_pinned(3 * 2**30, mesh)
    monkeypatch.setenv(offload.LIMIT, "100")
    monkeypatch.setattr(offload, "memory_gb", lambda: 100)
    offload.check_pinned(45 * 2**30, mesh)
    message = (
        rf"on host {re.escape(socket.gethostname())} takes 91 GiB, and 90 may be pinned, .*; use more hosts, or lower"
    )
    with pytest.raises(jzero.ConfigError, match=message):
        offload.check_pinned(91 * 2**29, mesh)


def test_no_process_goes_on_when_another_host_has_less_memory(monkeypatch):
    """Another process's error, as the coordination service passes it on, ends this one too."""
    mesh = jzero.make_mesh(devices=jax.devices()[:2])
    monkeypatch.setattr(offload, "is_gpu", lambda mesh: True)
    monkeypatch.setattr(
        host_collectives, "share_problem", lambda topic, own: own or f"lasting:{topic}: host b has less"
    )
    with pytest.raises(jzero.ConfigError, match=r"^pinned memory: host b has less$"):
        offload.check_pinned(1, mesh)


@pytest.mark.parametrize(
    ("groups", "files", "limit"),
    [
        ("0::/job/step\n", {"sys/fs/cgroup/job/memory.max": 3, "sys/fs/cgroup/job/step/memory.max": "max"}, 3),
        ("0::/../pod\n", {"sys/fs/cgroup/memory.max": 2}, 2),
        ("5:cpu:/a\n4:memory:/a\n", {"sys/fs/cgroup/memory/a/memory.limit_in_bytes": 1}, 1),
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


def test_processes_of_a_host_share_its_memory(monkeypatch):
    devices = [SimpleNamespace(process_index=process) for process in (0, 1, 2)]
    mesh = SimpleNamespace(devices=np.array(devices), local_devices=devices[:1])
    monkeypatch.setattr(offload, "is_gpu", lambda mesh: True)
    monkeypatch.setenv(offload.LIMIT, str(offload.pinnable_gb()))
    three_quarters = offload.pinnable_gb() * 2**30 * 3 // 4

    def on(*hosts):
        for module in (joining, offload):
            monkeypatch.setattr(module, "hosts", lambda: list(hosts))

    on(0, 1, 1)
    offload.check_pinned(three_quarters, mesh)
    on(0, 0, 1)
    with pytest.raises(jzero.ConfigError, match="the part of the state on host"):
        offload.check_pinned(three_quarters, mesh)


@pytest.mark.parametrize(
    ("zero", "line"),
    [
        (
            {"stage": 3, **PARAM},
            "offload_param: no parameter has stage3_param_persistence_threshold = 100,000 elements",
        ),
        ({"stage": 2, **PARAM}, "offload_param: stage 2 keeps the weights on the device; use stage 3"),
        ({"stage": 1, "offload_optimizer": {"ratio": 0.5}}, "offload_optimizer: device is none, so all of the state"),
        ({"stage": 1, "offload_optimizer": {"device": "cpu", "ratio": 0}}, "offload_optimizer: ratio is 0, so all of"),
    ],
)
def test_the_report_says_why_nothing_is_offloaded(zero, line):
    config = settings(LAYOUTS["stage2"], zero_optimization={"stage3_param_persistence_threshold": 100_000} | zero)
    assert line in jzero.report(jzero.make_train_step(Net(), config))


def test_the_report_says_what_offload_changes():
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0, **PARAM}
    text = jzero.report(jzero.make_train_step(Net(), settings(LAYOUTS["stage2"], zero_optimization=zero, stack={})))
    assert "layers, scanned for offload_param; activation checkpointing" in text
    assert "copied to the device layer by layer" in text
    assert "ZeRO formula" not in text
