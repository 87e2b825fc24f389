"""The plan of a job: its processes on their hosts, made from options, hostfile and environment. Starts nothing."""

from __future__ import annotations

import argparse
import os
import shutil
import socket
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from jzero.distributed.bind_address import is_own
from jzero.distributed.host_names import MOST_HOSTS, host_fault, slurm_hosts
from jzero.distributed.place import DEFAULT_PORT, number_from
from jzero.errors import ConfigError
from jzero.launcher import environment, hostfile
from jzero.launcher.hostfile import LOCAL, Hosts
from jzero.launcher.options import parser
from jzero.values.masking import masked

HOSTFILE = "/job/hostfile"
NOT_HANDED_OVER = (
    "venv_script", "enable_each_rank_log", "max_restarts", "min_nodes", "ssh_port", "hang_timeout", "grace",
    "force_multi", "save_pid",
)  # fmt: skip


@dataclass(frozen=True)
class Process:
    """One rank; `env` is added to its host's environment."""

    rank: int
    local_rank: int
    host: str
    device_ids: hostfile.Devices
    env: dict[str, str]


@dataclass(frozen=True)
class Job:
    """The plan.

    Attributes:
      hosts: host -> device ids.
      argv: the script's command line without `--local_rank`.
      flag_at: the index in `argv` at which `--local_rank` is inserted.
      shared: the variables that every process gets, whatever its rank.
    """

    options: argparse.Namespace
    hosts: Hosts
    argv: list[str]
    flag_at: int
    cwd: str
    shared: dict[str, str]

    @property
    def port(self) -> int:
        return self.options.master_port or DEFAULT_PORT

    @property
    def address(self) -> str:
        """The coordinator's host before the hosts are asked; coordinator.py may choose another address."""
        return self.options.master_addr or ("127.0.0.1" if len(self.hosts) == 1 else next(iter(self.hosts)))

    @cached_property
    def processes(self) -> list[Process]:
        """All ranks, host by host."""
        o, result = self.options, list[Process]()
        counts = [1 if o.one_process_per_node else len(ids) for ids in self.hosts.values()]
        for node, (host, ids) in enumerate(self.hosts.items()):
            for local in range(counts[node]):
                mine = ids if o.one_process_per_node else [ids[local]]
                place = {
                    "RANK": len(result), "WORLD_SIZE": sum(counts),
                    "LOCAL_RANK": local, "LOCAL_SIZE": counts[node],
                    "CROSS_RANK": node, "CROSS_SIZE": len(self.hosts),
                    "MASTER_ADDR": self.address, "MASTER_PORT": self.port,
                }  # fmt: skip
                if o.platform == "cpu":
                    place |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": len(mine)}
                else:
                    place |= {"CUDA_VISIBLE_DEVICES": ",".join(map(str, ids))}
                if o.no_ssh and len(self.hosts) > 1:  # no command sees all hosts, so JAX must notice a lost process
                    place |= {"JZERO_HEARTBEAT_SECONDS": 8}
                text = {name: str(value) for name, value in place.items()}
                result.append(Process(len(result), local, host, mine, self.shared | text))
        return result

    def without(self, hosts: Collection[str]) -> Job:
        """Return the plan without these hosts, with the ranks renumbered."""
        return replace(self, hosts={host: ids for host, ids in self.hosts.items() if host not in hosts})

    def is_here(self, host: str) -> bool:
        """Return whether the host is this machine."""
        return not self.options.force_multi and is_this_machine(host)

    def of(self, host: str) -> list[Process]:
        """Return the processes on a host."""
        return [process for process in self.processes if process.host == host]

    def flag(self, process: Process) -> list[str]:
        """Return the words that jzero adds to the script's command line."""
        return [] if self.options.no_local_rank else [f"--local_rank={process.local_rank}"]

    def as_json(self, commands: list[list[str]]) -> dict[str, Any]:
        """Return the plan as `--dry_run` prints it, with secrets masked."""
        return {
            "hosts": self.hosts,
            "coordinator": f"{self.address}:{self.port}",
            "processes": [vars(process) | {"env": masked(process.env)} for process in self.processes],
            "commands": commands,
        }


def make_job(options: argparse.Namespace, env: Mapping[str, str], cwd: str) -> Job:
    """Make the plan.

    Raises:
      ConfigError: options that exclude each other, a malformed hostfile, a missing script or device.
    """
    _check(options)
    argv, flag_at = _script(options, env)
    hosts = _hosts(options, env)
    if options.node_rank >= len(hosts):
        raise ConfigError(f"--node_rank = {options.node_rank}: there are {len(hosts)} hosts, numbered from 0")
    if options.min_nodes > len(hosts):
        raise ConfigError(f"--min_nodes = {options.min_nodes}: there are {len(hosts)} hosts: {', '.join(hosts)}")
    shared = environment.propagated(env, cwd, env.get("HOME", cwd), options.export)
    return Job(options, hosts, argv, flag_at, cwd, shared | ({"JZERO_RESUME": "auto"} if options.resume else {}))


@cache
def is_this_machine(host: str) -> bool:
    """Return whether a name or address belongs to this machine."""
    if host in (LOCAL, "127.0.0.1", "::1", socket.gethostname(), socket.getfqdn()):
        return True
    try:
        found = {info[4][0] for info in socket.getaddrinfo(host, None)}
    except OSError:
        return False
    return any(is_own(str(address)) for address in found)


def _check(options: argparse.Namespace) -> None:
    problems = []
    if options.no_python and options.module:
        problems.append("--no_python and --module: the script is a program or a module; keep one")
    if options.no_ssh and options.node_rank < 0:
        problems.append(f"--no_ssh: needs --node_rank (found {options.node_rank}): this host's number, from 0")
    if options.no_ssh and not options.master_addr and options.num_nodes != 1:
        problems.append("--no_ssh: needs --master_addr: the address of host number 0")
    if options.no_ssh and options.launcher != "ssh":
        problems.append(f"--no_ssh and --launcher {options.launcher}: keep one")
    if options.node_rank >= 0 and not options.no_ssh:
        problems.append(f"--node_rank = {options.node_rank}: needs --no_ssh; add it, or leave --node_rank out")
    if options.master_addr and (fault := host_fault(options.master_addr)):
        problems.append(f"--master_addr = {options.master_addr!r}: a host's name {fault}")
    if options.master_port is not None and not 0 < options.master_port < 65536:
        problems.append(f"--master_port = {options.master_port}: must be 1 to 65535")
    if options.ssh_port is not None and not 0 < options.ssh_port < 65536:
        problems.append(f"--ssh_port = {options.ssh_port}: must be 1 to 65535")
    if options.min_nodes != -1 and options.min_nodes < 1:
        problems.append(f"--min_nodes = {options.min_nodes}: must be at least 1; leave it out to need all hosts")
    if options.min_nodes != -1 and (options.no_ssh or options.launcher == "k8s"):
        problems.append("--min_nodes: works only over ssh; leave it out")
    if options.min_nodes != -1 and options.master_addr:
        problems.append(
            "--min_nodes and --master_addr: the job may go on without that host; leave --master_addr out, and jzero "
            "finds an address"
        )
    for name, most in (("num_nodes", MOST_HOSTS), ("num_gpus", hostfile.MOST_DEVICES)):
        if (value := getattr(options, name)) > most:
            problems.append(f"--{name} = {value}: must be at most {most}")
    for name in ("max_restarts", "hang_timeout", "grace"):
        if not (value := getattr(options, name)) >= 0:
            problems.append(f"--{name} = {value}: must be 0 or more")
    system = f"--launcher {options.launcher}"
    if options.launcher != "ssh" and ":" in options.include + options.exclude:
        problems.append(f"{system}: that system chooses devices itself; name only hosts in --include and --exclude")
    if options.launcher in ("slurm", "openmpi"):
        for name in NOT_HANDED_OVER:
            if getattr(options, name) != parser().get_default(name):
                problems.append(
                    f"--{name}: does not work with {system}; leave it out, and use that system's own option "
                    "(--launcher_args)"
                )
    if problems:
        raise ConfigError(*problems)


def _script(options: argparse.Namespace, env: Mapping[str, str]) -> tuple[list[str], int]:
    script = options.script
    if options.module:
        head = [sys.executable, "-u", "-m", script]
    elif options.no_python:
        if not shutil.which(script, path=env.get("PATH")):
            raise ConfigError(f"{script}: no such program, or it is not executable")
        head = [script]
    elif not Path(script).is_file():
        module = f"; for a module write --module {script}" if "/" not in script and not script.endswith(".py") else ""
        raise ConfigError(f"{script}: no such file in {os.getcwd()}{module}")
    else:
        head = [sys.executable, "-u", script]
    return [*head, *options.script_args], len(head)


def _hosts(options: argparse.Namespace, env: Mapping[str, str]) -> Hosts:
    choice = {name: getattr(options, name) for name in ("include", "exclude", "num_nodes", "num_gpus")}
    path = options.hostfile or HOSTFILE
    if options.hostfile and not Path(path).is_file():
        raise ConfigError(f"--hostfile = {path}: no such file")
    if Path(path).is_file():
        everywhere = {host: list[int | str](range(n)) for host, n in hostfile.read_hostfile(path).items()}
        if options.platform == "gpu":
            everywhere = _visible(everywhere, env, options.no_ssh)
        hosts = hostfile.choose(everywhere, **choice)
        if bare := [host for host, ids in hosts.items() if not ids]:
            raise ConfigError(
                f"{', '.join(bare)}: CUDA_VISIBLE_DEVICES = {env['CUDA_VISIBLE_DEVICES']!r} leaves none of its slots; "
                "unset it, or --exclude that host"
            )
        return hosts
    if options.no_ssh:  # each host starts its own processes, so any names will do
        ids = _devices(options, env)
        return hostfile.choose({f"node{n}": ids for n in range(max(options.num_nodes, 1))}, **choice)
    if options.launcher in ("slurm", "k8s") and options.num_nodes > 0:  # Slurm or Kubernetes chooses the hosts
        if options.num_gpus < 1 or options.include or options.exclude:
            raise ConfigError(
                f"--launcher {options.launcher} without a hostfile: needs --num_nodes and --num_gpus (found "
                f"{options.num_nodes} and {options.num_gpus}), and no filter"
            )
        return {f"node{n}": list[int | str](range(options.num_gpus)) for n in range(options.num_nodes)}
    if allocated := slurm_hosts(env.get("SLURM_JOB_NODELIST", "")):
        if problems := [
            f"SLURM_JOB_NODELIST: {name!r}: a host's name {fault}" for name in allocated if (fault := host_fault(name))
        ]:
            raise ConfigError(*problems[:8])
        slots = max(options.num_gpus, 1)
        if options.platform == "gpu":
            slots = number_from(env, "SLURM_GPUS_ON_NODE", max(options.num_gpus, 0))
        if slots > hostfile.MOST_DEVICES:
            raise ConfigError(f"SLURM_GPUS_ON_NODE = {slots}: must be at most {hostfile.MOST_DEVICES}")
        if slots < 1:
            raise ConfigError("--num_gpus: needed in this Slurm job, which sets no SLURM_GPUS_ON_NODE")
        return hostfile.choose({host: range(slots) for host in allocated}, **choice)
    if options.num_nodes > 1:
        raise ConfigError(
            f"--num_nodes = {options.num_nodes}: there is no hostfile {path} that names them; write one and pass "
            "--hostfile FILE, or run on each host with --no_ssh --node_rank R --master_addr HOST"
        )
    return hostfile.choose({LOCAL: _devices(options, env)}, **choice)


def _devices(options: argparse.Namespace, env: Mapping[str, str]) -> hostfile.Devices:
    if options.platform == "cpu":
        named = hostfile.parse_filter(options.include, "--include") if options.include else {}
        return list(range(max([options.num_gpus, 1, *(i + 1 for ids in named.values() for i in ids or ())])))
    ids = hostfile.devices_here(env)
    if not ids and options.dry_run and options.num_gpus > 0:  # plan for another machine
        return list(range(options.num_gpus))
    if not ids:
        visible = env.get("CUDA_VISIBLE_DEVICES")
        raise ConfigError(
            "no GPU is visible on this machine: pass --platform cpu for processes without GPUs, or a hostfile"
            + (f"; CUDA_VISIBLE_DEVICES = {visible!r}" if visible is not None else "")
        )
    return ids


def _visible(hosts: Hosts, env: Mapping[str, str], no_ssh: bool) -> Hosts:
    """Keep only this machine's devices that CUDA_VISIBLE_DEVICES lists, in its order.

    Raises:
      ConfigError: with --no_ssh, if it lists fewer than the hostfile: the other hosts would number ranks differently.
    """
    visible = hostfile.visible_devices(env)
    if visible is None:
        return hosts
    result = {}
    for host, slots in hosts.items():
        ids = slots
        if is_this_machine(host):
            ids = [id for id in visible if id in slots or isinstance(id, str)][: len(slots)]
        if no_ssh and len(ids) < len(slots):
            raise ConfigError(
                f"{host}: CUDA_VISIBLE_DEVICES = {env['CUDA_VISIBLE_DEVICES']!r} leaves {len(ids)} of {len(slots)} "
                "slots, which the other hosts cannot see with --no_ssh: unset it"
            )
        result[host] = ids
    return result
