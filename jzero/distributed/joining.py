"""The processes of a job: joining them, and who is who.

One process per GPU is started by the launcher, or by whatever sets one of these environments:

| started by            | rank                   | of                     | on this host                 |
|-----------------------|------------------------|------------------------|------------------------------|
| `jzero`, `torchrun`   | `RANK`                 | `WORLD_SIZE`           | `LOCAL_RANK`                 |
| `srun`                | `SLURM_PROCID`         | `SLURM_STEP_NUM_TASKS` | `SLURM_LOCALID`              |
| `mpirun` (Open MPI)   | `OMPI_COMM_WORLD_RANK` | `OMPI_COMM_WORLD_SIZE` | `OMPI_COMM_WORLD_LOCAL_RANK` |

The coordinator is `MASTER_ADDR`:`MASTER_PORT`; where Slurm does not say, the first host of the job. A Kubernetes job
runs `jzero` in every pod, which sets the first row.
"""

from __future__ import annotations

import atexit
import os
import re
import socket
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple, NoReturn

import jax

from jzero.distributed import heartbeat
from jzero.distributed.host_collectives import agree
from jzero.distributed.rendezvous import meet
from jzero.errors import ConfigError

DEFAULT_PORT = 29500
DEFAULT_TIMEOUT = 120.0


class Place(NamedTuple):
    """This process among the others."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    coordinator: str = ""


def find_place(env: Mapping[str, str]) -> Place:
    """Read the table above.

    Raises:
      ConfigError: an environment that says half of it.
    """
    if "RANK" in env and "WORLD_SIZE" in env:
        port = _number(env, "MASTER_PORT", DEFAULT_PORT)
        if "TORCHELASTIC_RUN_ID" in env:  # torchrun itself listens on MASTER_PORT
            port += 1
        local = _number(env, "LOCAL_SIZE", _number(env, "LOCAL_WORLD_SIZE", 1))
        place = Place(_number(env, "RANK"), _number(env, "WORLD_SIZE"), _number(env, "LOCAL_RANK", 0), local)
    elif "SLURM_PROCID" in env and "SLURM_STEP_NUM_TASKS" in env:
        port = _number(env, "MASTER_PORT", 49152 + _number(env, "SLURM_JOB_ID", 0) % 16384)
        tasks = env.get("SLURM_STEP_TASKS_PER_NODE", "1")
        place = Place(
            _number(env, "SLURM_PROCID"), _number(env, "SLURM_STEP_NUM_TASKS"), _number(env, "SLURM_LOCALID", 0),
            max(map(int, re.findall(r"\d+(?!\d*\))", tasks)), default=1),
        )  # fmt: skip
    elif "OMPI_COMM_WORLD_RANK" in env:
        port = _number(env, "MASTER_PORT", DEFAULT_PORT)
        place = Place(
            _number(env, "OMPI_COMM_WORLD_RANK"), _number(env, "OMPI_COMM_WORLD_SIZE"),
            _number(env, "OMPI_COMM_WORLD_LOCAL_RANK", 0), _number(env, "OMPI_COMM_WORLD_LOCAL_SIZE", 1),
        )  # fmt: skip
    elif _number(env, "WORLD_SIZE", 1) > 1:
        raise ConfigError(f"WORLD_SIZE = {env['WORLD_SIZE']} and RANK is not set: set both, or start this with jzero")
    else:
        return Place()
    address = env.get("MASTER_ADDR") or next(iter(slurm_hosts(env.get("SLURM_STEP_NODELIST", ""))), "")
    if place.size > 1 and not address:
        raise ConfigError(f"process {place.rank} of {place.size}: MASTER_ADDR is not set; set it to process 0's host")
    if not 0 <= place.rank < place.size:
        raise ConfigError(f"rank = {place.rank} of {place.size} processes: ranks are 0 to {place.size - 1}")
    return place._replace(coordinator=f"{address}:{port}")


def _number(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = env.get(name, default)
    if text is None or not re.fullmatch(r"\d+", str(text)):
        raise ConfigError(f"{name} = {text!r} in the environment: must be a number; the launcher sets it")
    return int(text)


def slurm_hosts(nodelist: str) -> list[str]:
    """The hosts of a Slurm list.

    >>> slurm_hosts("gpu[08-10,12],login1")
    ['gpu08', 'gpu09', 'gpu10', 'gpu12', 'login1']
    """
    hosts: list[str] = []
    for part in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", nodelist):
        names = [""]
        for text, inside in re.findall(r"([^\[]+)|\[([^\]]*)\]", part):
            names = [name + piece for name in names for piece in ([text] if text else _numbers(inside))]
        hosts += names
    return hosts


def _numbers(text: str) -> list[str]:
    """`08-10,12` -> 08, 09, 10, 12."""
    ends = [piece.partition("-")[::2] for piece in text.split(",")]
    return [f"{n:0{len(first)}}" for first, last in ends for n in range(int(first), int(last or first) + 1)]


def init_distributed(timeout: float | None = None) -> None:
    """Join the other processes of the job; for one process, or a second time, nothing.

    `initialize`, `make_train_step` and `make_mesh` call it. Call it yourself before any use of JAX in a script that
    wants, say, `jax.devices()` first.

    Args:
      timeout: seconds to wait for the last process; default `JZERO_TIMEOUT`, or DeepSpeed's `DEEPSPEED_TIMEOUT` (in
        minutes), or 120.

    Raises:
      ConfigError: the processes that never came; JAX was used before.
    """
    place = find_place(os.environ)
    heartbeat.start()
    if place.size == 1 or jax.distributed.is_initialized():
        return
    from jax._src import xla_bridge

    if xla_bridge.backends_are_initialized():
        raise ConfigError(
            f"process {place.rank} of {place.size} used JAX before it joined the others: call jzero.init_distributed() "
            "at the top of the script"
        )
    if timeout is None:
        minutes = float(os.environ.get("DEEPSPEED_TIMEOUT", DEFAULT_TIMEOUT / 60))
        timeout = float(os.environ.get("JZERO_TIMEOUT", 60 * minutes))
    meet(place.coordinator, place.rank, place.size, timeout, os.environ.get("JZERO_MEETING", ""))
    # JAX would take SIGTERM from the script.
    jax.config.update("jax_enable_preemption_service", False)
    jax.distributed.initialize(
        place.coordinator, place.size, place.rank,
        local_device_ids=_devices(place, os.environ),
        cluster_detection_method="deactivate",
        heartbeat_timeout_seconds=int(os.environ.get("JZERO_HEARTBEAT_SECONDS", 100)),
    )  # fmt: skip
    _leave_at_once_on_errors()


def _devices(place: Place, env: Mapping[str, str]) -> list[int] | None:
    """Which of the host's visible GPUs are this process's; None: all."""
    if place.local_size == 1:
        return None
    visible = env.get("CUDA_VISIBLE_DEVICES")
    return [0] if visible and "," not in visible else [place.local_rank]


def _leave_at_once_on_errors() -> None:
    """An exception or sys.exit(n) ends this process at once: JAX would wait minutes for those that wait for it."""
    code, on_exit = [0], sys.exit

    def leaving(status: Any = None) -> NoReturn:
        code[0] = status if isinstance(status, int) else int(status is not None)
        on_exit(status)

    def leave() -> None:
        if failed := hasattr(sys, "last_type") or code[0]:  # an exception that nothing caught
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code[0] or failed)

    sys.exit = leaving  # type: ignore[assignment]
    atexit.register(leave)  # runs before JAX's, which was registered earlier


# ---------------------------------------------------------------- who is who


def get_rank() -> int:
    """This process's number; 0 if it is alone."""
    return find_place(os.environ).rank


def get_world_size() -> int:
    """The number of processes."""
    return find_place(os.environ).size


def get_local_rank() -> int:
    """This process's number on its host."""
    return find_place(os.environ).local_rank


def log_dist(message: str, ranks: Sequence[int] | None = None) -> None:
    """Print on these ranks: by default on rank 0, for [-1] on all, with the rank before it."""
    ranks = [0] if ranks is None else ranks
    if (rank := get_rank()) in ranks or -1 in ranks:
        marked = ranks == [0] or "JZERO_JOB_ID" in os.environ  # by the launcher
        print(message if marked else f"[rank {rank}] {message}", flush=True)


@cache
def hosts() -> list[int]:
    """For every process the number of its host, in the order in which the processes meet them. Shared with all."""
    if jax.process_count() == 1:
        return [0]
    names = agree("hosts", os.environ.get("CROSS_RANK") or socket.gethostname())
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return [numbers[name] for name in names]
