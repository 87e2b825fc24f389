"""Which process this is: rank, number of processes and coordinator, read from the environment.

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

from jzero.distributed.host_names import host_fault, slurm_hosts
from jzero.errors import ConfigError

DEFAULT_PORT = 29500


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
    if "RANK" in env and "WORLD_SIZE" in env:
        port = number_from(env, "MASTER_PORT", DEFAULT_PORT)
        if "TORCHELASTIC_RUN_ID" in env:  # torchrun itself listens on MASTER_PORT
            port += 1
        local = number_from(env, "LOCAL_SIZE", number_from(env, "LOCAL_WORLD_SIZE", 1))
        place = Place(
            number_from(env, "RANK"), number_from(env, "WORLD_SIZE"), number_from(env, "LOCAL_RANK", 0), local
        )
    elif "SLURM_PROCID" in env and "SLURM_STEP_NUM_TASKS" in env:
        # Jobs that share a host must not share a port; 49152 to 65535 are IANA's dynamic ports.
        port = number_from(env, "MASTER_PORT", 49152 + number_from(env, "SLURM_JOB_ID", 0) % 16384)
        tasks = env.get("SLURM_STEP_TASKS_PER_NODE", "1")  # as 2(x3),1: three hosts with two tasks, one with one
        local = max((int(n[:9]) for n in re.findall(r"\d+(?!\d*\))", tasks)), default=1)
        rank, size = number_from(env, "SLURM_PROCID"), number_from(env, "SLURM_STEP_NUM_TASKS")
        place = Place(rank, size, number_from(env, "SLURM_LOCALID", 0), local)
    elif "OMPI_COMM_WORLD_RANK" in env:
        port = number_from(env, "MASTER_PORT", DEFAULT_PORT)
        rank, size = number_from(env, "OMPI_COMM_WORLD_RANK"), number_from(env, "OMPI_COMM_WORLD_SIZE")
        local = number_from(env, "OMPI_COMM_WORLD_LOCAL_SIZE", 1)
        place = Place(rank, size, number_from(env, "OMPI_COMM_WORLD_LOCAL_RANK", 0), local)
    else:
        _check_no_part(env)
        return Place()
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
        print(message if marked else f"[rank {rank}] {message}", flush=True)
