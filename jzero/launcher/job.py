"""The plan of a job: its processes on their hosts, made from options, hostfile and environment. Starts nothing."""

from __future__ import annotations

import argparse
import os
import shutil
import socket
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path

from jzero.distributed.connections import is_own
from jzero.distributed.place import DEFAULT_PORT, MOST_HOSTS, host_fault, number_from, slurm_hosts
from jzero.errors import ConfigError
from jzero.launcher import environment, hostfile
from jzero.launcher.hostfile import LOCAL, Hosts, select_hosts
from jzero.launcher.options import parser

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
        """The coordinator's host before the hosts are asked; connecting.py may choose another address."""
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

    @property
    def hosts_here(self) -> list[str]:
        """The hosts on which this command starts processes."""
        names, o = list(self.hosts), self.options
        return [names[o.node_rank]] if o.no_ssh else names

    def is_here(self, host: str) -> bool:
        return not self.options.force_multi and is_this_machine(host)

    def of(self, host: str) -> list[Process]:
        return [process for process in self.processes if process.host == host]

    def per_host(self, devices: bool = False) -> int:
        """Return the number of processes, or of devices, on every host; a ConfigError if it is not the same."""
        counts = {len(ids) if devices else len(self.of(host)) for host, ids in self.hosts.items()}
        if len(counts) > 1:
            each = ", ".join(f"{host} {len(ids)}" for host, ids in self.hosts.items())
            raise ConfigError(
                f"--launcher {self.options.launcher}: needs the same number of devices on every host: {each}"
            )
        return counts.pop()

    def command(self, process: Process) -> list[str]:
        """Return a rank's command line: the script's, with `--local_rank` before its own options."""
        flag = [] if self.options.no_local_rank else [f"--local_rank={process.local_rank}"]
        return self.argv[: self.flag_at] + flag + self.argv[self.flag_at :]


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


def _check(o: argparse.Namespace) -> None:
    """Raise a ConfigError with all options that are wrong alone or exclude each other."""
    fault = host_fault(o.master_addr) if o.master_addr else ""
    ports = [(name, port) for name in ("master_port", "ssh_port") if (port := getattr(o, name)) is not None]
    most = {"num_nodes": MOST_HOSTS, "num_gpus": hostfile.MOST_DEVICES}
    other = NOT_HANDED_OVER if o.launcher in ("slurm", "openmpi") else ()
    system, asked = f"--launcher {o.launcher}", o.min_nodes != -1
    rules = [
        (o.no_python and o.module, "--no_python and --module: the script is a program or a module; keep one"),
        (
            o.no_ssh and o.node_rank < 0,
            f"--no_ssh: needs --node_rank (found {o.node_rank}): this host's number, from 0",
        ),
        (
            o.no_ssh and not o.master_addr and o.num_nodes != 1,
            "--no_ssh: needs --master_addr: the address of host number 0",
        ),
        (o.no_ssh and o.launcher != "ssh", f"--no_ssh and {system}: keep one"),
        (
            o.node_rank >= 0 and not o.no_ssh,
            f"--node_rank = {o.node_rank}: needs --no_ssh; add it, or leave --node_rank out",
        ),
        (fault, f"--master_addr = {o.master_addr!r}: a host's name {fault}"),
        *((not 0 < port < 65536, f"--{name} = {port}: must be 1 to 65535") for name, port in ports),
        (asked and o.min_nodes < 1, f"--min_nodes = {o.min_nodes}: must be at least 1; leave it out to need all hosts"),
        (asked and (o.no_ssh or o.launcher == "k8s"), "--min_nodes: works only over ssh; leave it out"),
        (
            asked and o.master_addr,
            "--min_nodes and --master_addr: the job may go on without that host; leave --master_addr out, and jzero "
            "finds an address",
        ),
        *((getattr(o, name) > n, f"--{name} = {getattr(o, name)}: must be at most {n}") for name, n in most.items()),
        *(
            (not getattr(o, name) >= 0, f"--{name} = {getattr(o, name)}: must be 0 or more")
            for name in ("max_restarts", "hang_timeout", "grace")
        ),
        (
            o.launcher != "ssh" and ":" in o.include + o.exclude,
            f"{system}: that system chooses devices itself; name only hosts in --include and --exclude",
        ),
        *(
            (
                getattr(o, name) != parser().get_default(name),
                f"--{name}: does not work with {system}; leave it out, and use that system's own option "
                "(--launcher_args)",
            )
            for name in other
        ),
    ]
    if problems := [text for wrong, text in rules if wrong]:
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


def _hosts(o: argparse.Namespace, env: Mapping[str, str]) -> Hosts:
    """Choose among the hosts of the hostfile, of Slurm's allocation, or among this machine's devices."""
    path = o.hostfile or HOSTFILE
    known: Mapping[str, Sequence[int | str]]
    if Path(path).is_file():
        known = {host: range(n) for host, n in hostfile.read_hostfile(path).items()}
        known = _visible(known, env, o.no_ssh) if o.platform == "gpu" else known
    elif o.hostfile:
        raise ConfigError(f"--hostfile = {path}: no such file")
    elif o.no_ssh:  # each host starts its own processes, so any names will do
        known = dict.fromkeys(unnamed(max(o.num_nodes, 1)), _devices(o, env))
    elif o.launcher in ("slurm", "k8s") and o.num_nodes > 0:  # Slurm or Kubernetes chooses the hosts
        if o.num_gpus < 1 or o.include or o.exclude:
            raise ConfigError(
                f"--launcher {o.launcher} without a hostfile: needs --num_nodes and --num_gpus (found {o.num_nodes} "
                f"and {o.num_gpus}), and no filter"
            )
        known = dict.fromkeys(unnamed(o.num_nodes), range(o.num_gpus))
    elif allocated := slurm_hosts(env.get("SLURM_JOB_NODELIST", "")):
        known = dict.fromkeys(allocated, range(_slots_in_slurm(o, env, allocated)))
    elif o.num_nodes > 1:
        raise ConfigError(
            f"--num_nodes = {o.num_nodes}: there is no hostfile {path} that names them; write one and pass "
            "--hostfile FILE, or run on each host with --no_ssh --node_rank R --master_addr HOST"
        )
    else:
        known = {LOCAL: _devices(o, env)}
    hosts = select_hosts(known, include=o.include, exclude=o.exclude, num_nodes=o.num_nodes, num_gpus=o.num_gpus)
    if bare := [host for host, ids in hosts.items() if not ids]:
        raise ConfigError(
            f"{', '.join(bare)}: CUDA_VISIBLE_DEVICES = {env['CUDA_VISIBLE_DEVICES']!r} leaves none of its slots; "
            "unset it, or --exclude that host"
        )
    return hosts


def unnamed(count: int) -> list[str]:
    """Name hosts that nobody has named."""
    return [f"node{n}" for n in range(count)]


def _slots_in_slurm(o: argparse.Namespace, env: Mapping[str, str], allocated: Sequence[str]) -> int:
    """Return the number of devices on each host of Slurm's allocation."""
    if problems := [
        f"SLURM_JOB_NODELIST: {name!r}: a host's name {fault}" for name in allocated if (fault := host_fault(name))
    ]:
        raise ConfigError(*problems[:8])
    on_node = "SLURM_GPUS_ON_NODE"
    slots = number_from(env, on_node, max(o.num_gpus, 0)) if o.platform == "gpu" else max(o.num_gpus, 1)
    if slots > hostfile.MOST_DEVICES:
        raise ConfigError(f"{on_node} = {slots}: must be at most {hostfile.MOST_DEVICES}")
    if slots < 1:
        raise ConfigError(f"--num_gpus: needed in this Slurm job, which sets no {on_node}")
    return slots


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


def _visible(
    hosts: Mapping[str, Sequence[int | str]], env: Mapping[str, str], no_ssh: bool
) -> Mapping[str, Sequence[int | str]]:
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
