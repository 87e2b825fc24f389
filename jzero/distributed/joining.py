"""Joining the other processes of a job."""

from __future__ import annotations

import atexit
import builtins
import os
import socket
import sys
from collections.abc import Mapping
from functools import cache
from typing import Any, NoReturn

import jax

from jzero import _compat
from jzero.distributed import handshake, heartbeat, last_words
from jzero.distributed.bind_address import bind_address
from jzero.distributed.host_collectives import agree
from jzero.distributed.place import Place, find_place
from jzero.distributed.rendezvous import meet
from jzero.errors import ConfigError

DEFAULT_TIMEOUT = 120.0  # seconds


def init_distributed(timeout: float | None = None) -> None:
    """Join the other processes of the job. A single process and a second call do nothing.

    `initialize`, `make_train_step` and `make_mesh` call it. A script that uses JAX before them, such as
    `jax.devices()`, must call it first.

    Args:
      timeout: seconds to wait for the last process; default `JZERO_TIMEOUT`, or DeepSpeed's `DEEPSPEED_TIMEOUT` (in
        minutes), or 120.

    Raises:
      ConfigError: a process did not come in time (all processes name it), or JAX was used before.
    """
    last_words.install()
    place = find_place(os.environ)
    heartbeat.start()
    if place.size == 1 or jax.distributed.is_initialized():
        return
    if _compat.backends_are_initialized():
        raise ConfigError(
            f"process {place.rank} of {place.size} used JAX before it joined the others: call jzero.init_distributed() "
            "at the top of the script"
        )
    if timeout is None:
        minutes = float(os.environ.get("DEEPSPEED_TIMEOUT", DEFAULT_TIMEOUT / 60))
        timeout = float(os.environ.get("JZERO_TIMEOUT", 60 * minutes))
    host, _, port = place.coordinator.rpartition(":")
    one_host = place.local_size == place.size
    secret = os.environ.get(handshake.VARIABLE, "")
    bind = bind_address(host.strip("[]"), one_host, os.environ) if place.rank == 0 else ""
    meet(place.coordinator, place.rank, place.size, timeout, os.environ.get("JZERO_MEETING", ""), bind, secret)
    if one_host:  # NCCL would listen on a network interface
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    # JAX's preemption service would replace the script's SIGTERM handler and jzero's own (preemption.py).
    jax.config.update("jax_enable_preemption_service", False)
    jax.distributed.initialize(
        place.coordinator, place.size, place.rank,
        local_device_ids=_devices(place, os.environ),
        cluster_detection_method="deactivate",
        coordinator_bind_address=f"{f'[{bind}]' if ':' in bind else bind}:{port}" if bind else None,
        heartbeat_timeout_seconds=int(os.environ.get("JZERO_HEARTBEAT_SECONDS", 100)),
    )  # fmt: skip
    _leave_at_once_on_errors()


def _devices(place: Place, env: Mapping[str, str]) -> list[int] | None:
    """Return the visible GPUs that this process uses; None: all."""
    if place.local_size == 1:
        return None
    visible = env.get("CUDA_VISIBLE_DEVICES")
    return [0] if visible and "," not in visible else [place.local_rank]


def _leave_at_once_on_errors() -> None:
    """End this process at once after an exception or sys.exit(n).

    JAX's own exit waits minutes at a barrier for the other processes, which in turn wait for this one in a collective.
    The launcher cannot stop them before it sees this process end.
    """
    code, on_exit = [0], sys.exit

    def leaving(status: Any = None) -> NoReturn:
        code[0] = status if isinstance(status, int) else int(status is not None)
        on_exit(status)

    def leave() -> None:
        if failed := code[0] or _compat.exit_code_of_uncaught():
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(failed)

    # atexit callbacks cannot see the exit code; that of a script's own `raise SystemExit(n)` stays unknown.
    sys.exit = builtins.exit = builtins.quit = leaving  # type: ignore[assignment]
    atexit.register(leave)  # runs before JAX's callback, which was registered earlier


@cache
def hosts() -> list[int]:
    """Return the host number of every process, by rank; hosts are numbered in the order of their first process.

    All processes must call it.
    """
    if jax.process_count() == 1:
        return [0]
    names = agree("hosts", os.environ.get("CROSS_RANK") or socket.gethostname())
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return [numbers[name] for name in names]


def host_of(device: Any) -> int:
    """Return the number of a device's host, see `hosts`; a process that only a plan describes is on a host of its own.

    All processes must call it.
    """
    process, of_process = device.process_index, hosts()
    return of_process[process] if process < len(of_process) else process
