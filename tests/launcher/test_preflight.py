"""The faults of hosts, found before a script starts, and of a process's GPUs and NCCL; with stand-ins."""

import asyncio
import ctypes
import importlib.metadata
import os
import socket
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest
from helpers.refusals import refuses
from helpers.stored_cases import check_cases
from jobs import ROOT

from jzero.distributed import machine
from jzero.launcher import agent, options
from jzero.launcher.connecting import Connecting, faults
from jzero.launcher.job import make_job
from jzero.launcher.machine_check import weak_points
from jzero.launcher.runner import Runner


def hello(gpus=8, **versions):
    """The hello of a host with these versions; None: not installed."""
    changed = {name.replace("_", "-"): version for name, version in versions.items()}
    installed = {"python": "3.12.1", "jzero": "0.1.0", "jax": "0.11.2", "jaxlib": "0.11.2", "driver": "570.1"} | changed
    return {"versions": {name: version for name, version in installed.items() if version}, "gpus": gpus}


def test_faults_and_weak_points(pytestconfig):
    """Of hosts that wait for eight GPUs each; of one host, with much and with little shared memory."""

    def outcome(case):
        hellos = {host: said if "error" in said else hello(**said) for host, said in case.items()}
        found = faults(hellos, dict.fromkeys(hellos, 8))
        if len(hellos) > 1:
            return found
        (said,) = hellos.values()
        much, little = (weak_points(said | {"shared_memory": size}) for size in (2**31, 2**20))
        return [text.replace(str(ROOT), "CLONE") for text in (*much, "with little shared memory:", *little)]

    check_cases(Path(__file__).with_name("hellos.jsonl"), outcome, pytestconfig)


class Host:
    """A link to a host without the host; `reaches`: the coordinators that it can connect to."""

    def __init__(self, host, reaches):
        self.host, self.reaches, self.ready = host, reaches, True

    def tell(self, connect=(), **message):
        self.asked = [host for host, port in connect] or getattr(self, "asked", [])

    async def ask(self, kind, seconds, connect=(), listen=(), **message):
        self.tell(connect, **message)
        if kind == "bound":
            return [None, "Address already in use"] if listen[0] == 7 else [1234, ""]
        return [[i, "198.51.100.1"] for i, host in enumerate(self.asked) if host in self.reaches]

    def give_up(self):
        pass


@pytest.fixture
def connect(tmp_path, monkeypatch):
    """Start processes on hosts that reach some of the others; return the runner."""

    def connect(reaches, *words):
        async def greet(connecting, host):
            connecting.links[host] = Host(host, reaches[host])
            return hello(0) | {"addresses": []}

        async def run():
            runner = Runner(job)
            await runner.connecting.run(print)
            runner.start()
            return runner

        monkeypatch.setattr(Connecting, "greet", greet)
        (tmp_path / "hostfile").write_text("".join(f"{host} slots=1\n" for host in reaches))
        words = ["--platform", "cpu", "-H", f"{tmp_path}/hostfile", *words, "--no_python", "true"]
        job = make_job(options.parse(words), {}, "/")
        return asyncio.run(run())

    return connect


def test_a_secret_that_is_given_and_a_port_that_is_taken(connect, monkeypatch):
    monkeypatch.setenv("JZERO_SECRET", "my own")
    assert connect({"a": "a"}).connecting.secret == "my own"
    words = "a: port 7 at 127.0.0.1: Address already in use; another"
    refuses(lambda: connect({"a": "a"}, "--master_port", "7"), words)


@pytest.mark.parametrize(
    ("min_nodes", "reaches", "hosts"),
    [
        (1, {"a": "abcd", "b": "abcd", "c": "abcd", "d": "abcd"}, "abcd"),
        (2, {"a": "abcd", "b": "bcd", "c": "bcd", "d": "bcd"}, "bcd"),  # no host reaches the first
        (2, {"a": "abcd", "b": "abcd", "c": "abcd", "d": "d"}, "abc"),
        (1, {"a": "ab", "b": "b"}, "a"),
        (2, {"a": "ab", "b": "b"}, None),
        (-1, {"a": "abcd", "b": "bcd", "c": "bcd", "d": "bcd"}, None),
    ],
)
def test_a_host_that_others_do_not_reach(connect, min_nodes, reaches, hosts):
    words = ["--min_nodes", f"{min_nodes}"]
    if hosts is None:
        refuses(lambda: connect(reaches, *words), "nothing was started")
        return
    runner = connect(reaches, *words)
    attempt, connecting = runner.attempt, runner.connecting
    assert attempt.job.hosts_here == list(hosts) == list(connecting.links)
    address, bind = (hosts[0], "198.51.100.1") if len(hosts) > 1 else ("127.0.0.1", "127.0.0.1")
    assert (connecting.address, connecting.bind) == (address, bind)
    assert [process.env["WORLD_SIZE"] for process in attempt.left.values()] == [str(len(hosts))] * len(hosts)


def test_what_an_agent_cannot_do(tmp_path):
    """It says so: the port is taken; the folder of the logs is a file."""

    async def run():
        one, said = agent.Agent(0), []
        one.say = lambda **message: said.append(message)
        one.show_life = lambda: None
        with socket.create_server(("127.0.0.1", 0)) as taken:
            await one.listen([taken.getsockname()[1], "127.0.0.1"])
        (tmp_path / "file").touch()
        process = {"rank": 3, "env": {}, "argv": ["true"]}
        await one.start({"job": "j", "cwd": "/", "processes": [process], "logs": f"{tmp_path}/file/logs", "time": ""})
        os.rmdir(one.folder)
        return said

    bound, out, end = asyncio.run(run())
    assert bound == {"bound": [None, "Address already in use"]}
    assert out == {"out": [3, 2, f"{tmp_path}/file/logs: Not a directory\n"]}
    assert end == {"exit": [3, 127]}


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


def test_devices_that_are_not_the_visible_ones(pytestconfig):
    def outcome(case):
        there = [SimpleNamespace(platform=name) for name in case["devices"]]
        jax.config.update("jax_platforms", case["platforms"])
        return machine.device_fault({"CUDA_VISIBLE_DEVICES": case["visible"]}, case["local_size"], there)

    before = jax.config.jax_platforms
    try:
        check_cases(Path(__file__).with_name("devices.jsonl"), outcome, pytestconfig)
    finally:
        jax.config.update("jax_platforms", before)


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
    # A process that has loaded it is told too; the versions alone are equal.
    both = {"jax-cuda12-plugin": "0.11.2", "nvidia-nccl-cu12": "2.30.7", "nvidia-nccl-cu13": "2.30.7"}
    monkeypatch.setattr(machine, "installed_wheels", lambda: both)
    monkeypatch.setattr(machine, "loaded_nccl", lambda: (str(path), "2.30.7"))
    (fault,) = machine.process_faults({}, 1)
    assert f"NCCL 2.30.7 (nvidia-nccl-cu13) is loaded from {path}, but nvidia-nccl-cu12 2.30.7 belongs" in fault
    for loaded, installed, found in (("2.28.9", "2.27.3", True), ("2.27.3", "2.27.3.1", False), ("2.1.0", "", False)):
        assert bool(machine.nccl_fault("x", loaded, both | {"nvidia-nccl-cu12": installed})) == found
    hello["versions"] |= {"nccl": "2.30.7 (nvidia-nccl-cu12)"}
    assert weak_points(hello) == []
    sizes.clear()
    monkeypatch.setenv("LD_LIBRARY_PATH", f":{tmp_path / 'none'}:{tmp_path}")
    assert machine.nccl_to_load() == (str(path), "? (no wheel's)")
    monkeypatch.delenv("LD_LIBRARY_PATH")
    assert machine.nccl_to_load()[0] == ""
