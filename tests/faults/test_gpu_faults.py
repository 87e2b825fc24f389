"""The NCCL that is loaded against the wheels, and a process's GPUs against CUDA_VISIBLE_DEVICES; with stand-ins."""

import ctypes
import importlib.metadata
from types import SimpleNamespace

import jax
import pytest

from jzero.distributed import machine
from jzero.launcher import agent
from jzero.launcher.machine_check import weak_points


def test_the_loaded_nccl(tmp_path, monkeypatch):
    def version(pointer):
        pointer._obj.value = 22703

    opened = []
    monkeypatch.setattr(ctypes, "CDLL", lambda path: opened.append(path) or SimpleNamespace(ncclGetVersion=version))
    maps = tmp_path / "maps"
    maps.write_text("7f00-7f01 r-xp 00000000 08:01 42    /usr/lib/libc.so.6\n")
    assert machine.loaded_nccl(str(maps)) is None
    path = "/env/nvidia/nccl/lib/libnccl.so.2"
    maps.write_text(f"7f00-7f01 r-xp 0 08:01 42  /usr/lib/libc.so.6\n7f02-7f03 r-xp 0 08:01 43    {path}\n")
    assert machine.loaded_nccl(str(maps)) == (path, "2.27.3")
    assert opened == [path]


def test_another_nccl_than_the_plugins():
    installed = {"jax-cuda12-plugin": "0.11.2", "nvidia-nccl-cu12": "2.27.3", "nvidia-nccl-cu13": "2.28.9"}
    fault = machine.nccl_fault("/x/libnccl.so.2", "2.28.9", installed)
    assert "NCCL 2.28.9 is loaded from /x/libnccl.so.2, but nvidia-nccl-cu12 2.27.3 belongs to jax-cuda12" in fault
    assert machine.nccl_fault("/x/libnccl.so.2", "2.27.3", installed | {"nvidia-nccl-cu12": "2.27.3.1"}) == ""
    assert machine.nccl_fault("/x/libnccl.so.2", "2.1.0", {"jax-cuda12-plugin": "0.11.2"}) == ""


def test_another_wheel_of_the_same_version(monkeypatch):
    """A process that has loaded the library of the wrong CUDA is told, although the versions are equal."""
    both = {"jax-cuda12-plugin": "0.11.2", "nvidia-nccl-cu12": "2.28.9", "nvidia-nccl-cu13": "2.28.9"}
    monkeypatch.setattr(machine, "installed_wheels", lambda: both)
    monkeypatch.setattr(machine, "loaded_nccl", lambda: ("/x/libnccl.so.2", "2.28.9"))
    for wheel in ("", "nvidia-nccl-cu12", "nvidia-nccl-cu13"):
        monkeypatch.setattr(machine, "wheel_of", {"/x/libnccl.so.2": wheel}.get)
        found = machine.process_faults({}, 1)
        assert len(found) == (wheel == "nvidia-nccl-cu13"), wheel
    assert "NCCL 2.28.9 (nvidia-nccl-cu13) is loaded from /x/libnccl.so.2, but nvidia-nccl-cu12 2.28.9" in found[0]


@pytest.mark.parametrize(
    ("visible", "local_size", "devices", "platforms", "words"),
    [
        ("0,1", 2, ["gpu"], None, ""),
        ("GPU-1f", 4, ["gpu"], "cuda", ""),
        ("-1", 1, ["cpu"], None, ""),
        ("0,1", 1, ["cpu"], "cpu", ""),
        ("0,1", 2, ["cpu"], None, "expected 1 GPUs in this process, JAX has 1 x cpu"),
        ("0,1", 2, ["gpu", "gpu"], None, "expected 1 GPUs in this process, JAX has 2 x gpu"),
    ],
)
def test_devices_that_are_not_the_visible_ones(visible, local_size, devices, platforms, words):
    there, before = [SimpleNamespace(platform=name) for name in devices], jax.config.jax_platforms
    jax.config.update("jax_platforms", platforms)
    try:
        fault = machine.device_fault({"CUDA_VISIBLE_DEVICES": visible}, local_size, there)
    finally:
        jax.config.update("jax_platforms", before)
    assert words in fault
    assert bool(words) == bool(fault)


def test_wheels_that_overwrite_each_other(tmp_path, monkeypatch):
    """Both wheels claim one file; its size is that of the wheel for CUDA 13, installed last."""
    path = tmp_path / "libnccl.so.2"
    path.write_bytes(b"x" * 300)
    sizes = {"nvidia-nccl-cu12": 200, "nvidia-nccl-cu13": 300}

    def files(name):
        if name not in sizes:
            raise importlib.metadata.PackageNotFoundError(name)
        return [SimpleNamespace(name="libnccl.so.2", size=sizes[name], locate=lambda: path)]

    monkeypatch.setattr(importlib.metadata, "files", files)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: {"nvidia-nccl-cu13": "2.30.7"}.get(name, "1"))
    hello = agent.hello() | {"gpus": 1, "shared_memory": 2**40}
    assert (hello["versions"]["nccl"], hello["nccl_path"]) == ("2.30.7 (nvidia-nccl-cu13)", str(path))
    hello["versions"] = {"jaxlib": "1", "jax-cuda12-plugin": "1", "nccl": hello["versions"]["nccl"]}
    (fault,) = weak_points(hello)
    assert f"NCCL 2.30.7 (nvidia-nccl-cu13) is loaded from {path}, but nvidia-nccl-cu12 belongs to jax-cuda12" in fault
    hello["versions"] |= {"nccl": "2.30.7 (nvidia-nccl-cu12)"}
    assert weak_points(hello) == []
    sizes.clear()
    monkeypatch.setenv("LD_LIBRARY_PATH", f":{tmp_path / 'none'}:{tmp_path}")
    assert machine.nccl_to_load() == (str(path), "? (no wheel's)")
    monkeypatch.delenv("LD_LIBRARY_PATH")
    assert machine.nccl_to_load()[0] == ""
