"""Read from the environment which process this is: its rank, the number of processes, the coordinator.

One process per GPU is started by the launcher, or by another system that sets one of these rows:

| started by            | rank                   | number of processes    | rank on this host            |
|-----------------------|------------------------|------------------------|------------------------------|
| `jzero`, `torchrun`   | `RANK`                 | `WORLD_SIZE`           | `LOCAL_RANK`                 |
| `srun`                | `SLURM_PROCID`         | `SLURM_STEP_NUM_TASKS` | `SLURM_LOCALID`              |
| `mpirun` (Open MPI)   | `OMPI_COMM_WORLD_RANK` | `OMPI_COMM_WORLD_SIZE` | `OMPI_COMM_WORLD_LOCAL_RANK` |

The coordinator is `MASTER_ADDR`:`MASTER_PORT`; under Slurm it defaults to the job's first host, or to
127.0.0.1 if there is one host. A Kubernetes job runs
`jzero` in every pod, which sets the first row. This module imports no JAX, because the launcher uses it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from jzero.errors import ConfigError, escaped

DEFAULT_PORT = 29500
MOST_HOSTS = 65536


class Place(NamedTuple):
    """This process among the others. `coordinator` is "host:port", or "" for a process that is alone."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    coordinator: str = ""


def find_place(env: Mapping[str, str]) -> Place:
    """Read the table above.

    Raises:
      ConfigError: a rank without the number of processes, or the reverse; a value that is not a number; a coordinator
        that is not a host name.
    """
    port = DEFAULT_PORT
    if "RANK" in env and "WORLD_SIZE" in env:
        names = "RANK", "WORLD_SIZE", "LOCAL_RANK"
        local_size = number_from(env, "LOCAL_SIZE", number_from(env, "LOCAL_WORLD_SIZE", 1))
    elif "SLURM_PROCID" in env and "SLURM_STEP_NUM_TASKS" in env:
        names = "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"
        # Jobs that share a host must not share a port; 49152 to 65535 are IANA's dynamic ports.
        port = 49152 + number_from(env, "SLURM_JOB_ID", 0) % 16384
        tasks = env.get("SLURM_STEP_TASKS_PER_NODE", "1")  # as 2(x3),1: three hosts with two tasks, one with one
        local_size = max((int(n[:9]) for n in re.findall(r"\d+(?!\d*\))", tasks)), default=1)
    elif "OMPI_COMM_WORLD_RANK" in env:
        names = "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"
        local_size = number_from(env, "OMPI_COMM_WORLD_LOCAL_SIZE", 1)
    else:
        _check_no_part(env)
        return Place()
    rank, size, local_rank = names
    place = Place(number_from(env, rank), number_from(env, size), number_from(env, local_rank, 0), local_size)
    port = number_from(env, "MASTER_PORT", port)
    if rank == "RANK" and "TORCHELASTIC_RUN_ID" in env:  # torchrun itself listens on MASTER_PORT
        port += 1
    address = env.get("MASTER_ADDR") or next(iter(slurm_hosts(env.get("SLURM_STEP_NODELIST", ""))), "")
    if "MASTER_ADDR" not in env and address and place.size == place.local_size:  # all are on this host
        address = "127.0.0.1"
    if place.size > 1 and not address:
        raise ConfigError(f"process {place.rank} of {place.size}: MASTER_ADDR is not set; set it to process 0's host")
    if place.size > 1 and (fault := host_fault(address)):
        raise ConfigError(f"MASTER_ADDR = {address!r}: a host's name {fault}; set it to process 0's host")
    if not 0 <= place.rank < place.size:
        raise ConfigError(f"rank = {place.rank} of {place.size} processes: ranks are 0 to {place.size - 1}")
    return place._replace(coordinator=f"{address}:{port}")


def _check_no_part(env: Mapping[str, str]) -> None:
    """Raise a ConfigError if the environment names a rank without the number of processes, or the reverse."""
    for one, other in (("RANK", "WORLD_SIZE"), ("WORLD_SIZE", "RANK"), ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS")):
        # A job of one process is whole without the other variable; a batch script of Slurm's is its process 0.
        if one in env and number_from(env, one) > (one == "WORLD_SIZE"):
            raise ConfigError(f"{one} = {env[one]} and {other} is not set: set both, or start this with jzero")


def number_from(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    """Read a variable that must be a number; `default` if it is not set."""
    text = env.get(name, default)
    if text is None or not re.fullmatch(r"\d{1,18}", str(text), re.ASCII):
        raise ConfigError(f"{name} = {text!r} in the environment: must be a number; the launcher sets it")
    return int(text)


def get_rank() -> int:
    """Return this process's rank; 0 for a process that is alone."""
    return find_place(os.environ).rank


def get_world_size() -> int:
    """Return the number of processes."""
    return find_place(os.environ).size


def get_local_rank() -> int:
    """Return this process's rank among those on its host."""
    return find_place(os.environ).local_rank


def log_dist(message: str, ranks: Sequence[int] | None = None) -> None:
    """Print a message on some ranks.

    Args:
      ranks: default: rank 0; [-1]: all ranks. The rank is printed before the message, unless the launcher does that.
    """
    ranks = [0] if ranks is None else ranks
    if (rank := get_rank()) in ranks or -1 in ranks:
        marked = ranks == [0] or "JZERO_JOB_ID" in os.environ  # the launcher marks lines with their rank
        print(escaped(message if marked else f"[rank {rank}] {message}"), flush=True)


def host_fault(name: str) -> str:
    """Return why a name cannot be a host's, as the rest of a sentence; "" if it can.

    >>> host_fault("gpu-1.example.com"), host_fault("worker..1"), host_fault("-oProxyCommand=sh")
    ('', 'must have 1 to 63 characters between its dots', 'cannot begin with -')
    >>> host_fault("a$(reboot)")
    "cannot contain '$'; it may have letters, digits, . _ - : % and [ ]"
    """
    host = name.rpartition("@")[2]  # as in root@worker-1
    if name.startswith("-") or host.startswith("-"):  # ssh and srun would read it as an option
        return "cannot begin with -"
    if not host or len(host) > 253 or not host.isprintable() or " " in host:
        return "must have 1 to 253 characters, without spaces and control characters"
    if wrong := re.search(r"[^\w.:%@+\[\]-]", name):  # a shell may read it, as that of ssh's ProxyCommand does
        return f"cannot contain {wrong[0]!r}; it may have letters, digits, . _ - : % and [ ]"
    try:
        host.encode("idna")  # as getaddrinfo does, which raises a UnicodeError and no OSError
    except UnicodeError:
        return "must have 1 to 63 characters between its dots"
    return ""


def slurm_hosts(nodelist: str) -> list[str]:
    """List the hosts of a Slurm node list.

    Raises:
      ConfigError: a range that is not one, or more than MOST_HOSTS hosts.

    >>> slurm_hosts("gpu[08-10,12],login1")
    ['gpu08', 'gpu09', 'gpu10', 'gpu12', 'login1']
    """
    hosts: list[str] = []
    for part in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", nodelist):
        names = [""]
        for text, inside in re.findall(r"([^\[]+)|\[([^\]]*)\]", part):
            pieces = [text] if text else _numbers(inside)
            if len(hosts) + len(names) * len(pieces) > MOST_HOSTS:
                raise ConfigError(f"Slurm's node list {nodelist!r}: has more than {MOST_HOSTS} hosts")
            names = [name + piece for name in names for piece in pieces]
        hosts += names
    return hosts


def _numbers(text: str) -> list[str]:
    """Expand ranges: `08-10,12` -> 08, 09, 10, 12."""
    numbers: list[str] = []
    for piece in text.split(","):
        match = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", piece, re.ASCII)
        if not match or int(match[2] or match[1]) - int(match[1]) >= MOST_HOSTS:
            raise ConfigError(f"Slurm's node list {f'[{text}]'!r}: {piece!r} must be a number or a range such as 08-10")
        numbers += [f"{n:0{len(match[1])}}" for n in range(int(match[1]), int(match[2] or match[1]) + 1)]
    return numbers
