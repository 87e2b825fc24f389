"""Processes wait for each other before JAX starts, so that one that never comes is named.

JAX's own runtime ends a process that waits in vain from inside, without saying for whom. Process 0 listens where its
service will, until all have come; a timeout says who is missing, on every process.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
from collections.abc import Iterable

from jzero.errors import ConfigError

PATIENCE = 20.0  # seconds until process 0 says whom it waits for


def meet(coordinator: str, rank: int, size: int, timeout: float, job: str = "") -> None:
    """Return once `size` processes have come to `coordinator`, "host:port"; process 0 listens there.

    Args:
      rank: this process's number, from 0.
      timeout: seconds to wait for the last of them.
      job: its processes meet no other job's.

    Raises:
      ConfigError: the processes that did not come, the same list on all that did; or nobody listens.
    """
    host, _, port = coordinator.rpartition(":")
    (_listen if rank == 0 else _call)(host.strip("[]"), int(port), rank, size, timeout, job)


def _listen(host: str, port: int, rank: int, size: int, timeout: float, job: str) -> None:
    deadline, came = time.monotonic() + timeout, dict[int, socket.socket]()
    answer = "another job"
    with contextlib.ExitStack() as stack:
        try:
            server = stack.enter_context(_server(port))
        except OSError as error:
            raise ConfigError(
                f"process 0 cannot listen on port {port}: {os.strerror(error.errno or 0)}: another job may have it; "
                "pass another --master_port (or MASTER_PORT), or leave it out"
            ) from None
        patience = time.monotonic() + PATIENCE
        while len(came) < size - 1 and (left := deadline - time.monotonic()) > 0:
            if time.monotonic() > patience:
                patience = deadline
                print(f"waiting for rank {_missing(came, size)} of {size} at port {port}", file=sys.stderr, flush=True)
            server.settimeout(min(left, 1))
            with contextlib.suppress(OSError, ValueError):
                connection, _ = server.accept()
                stack.enter_context(connection)
                connection.settimeout(min(left, 5))
                name, number, number_of = connection.makefile().readline().rstrip("\n").rsplit(" ", 2)
                if (name, int(number_of)) != (job, size):
                    connection.sendall(f"{answer}\n".encode())
                    continue
                came[int(number)] = connection
        missing = _missing(came, size)
        answer = f"missing {missing}" if missing else "go"
        for connection in came.values():
            with contextlib.suppress(OSError):
                connection.sendall(f"{answer}\n".encode())
    if missing:
        raise _never_came(missing, size, timeout, host, port)


def _call(host: str, port: int, rank: int, size: int, timeout: float, job: str) -> None:
    deadline = time.monotonic() + timeout
    answer, why = "", "no answer"
    while not answer and (left := deadline - time.monotonic()) > 0:
        try:
            with socket.create_connection((host, port), timeout=left) as connection:
                connection.settimeout(left + 5)  # process 0 may have started to wait later
                connection.sendall(f"{job} {rank} {size}\n".encode())
                answer = connection.makefile().readline().strip()
        except OSError as error:
            why = error.strerror or str(error)
        if not answer:
            time.sleep(0.1)
    if answer.startswith("missing"):
        raise _never_came(answer.removeprefix("missing "), size, timeout, host, port)
    if answer != "go":
        raise ConfigError(
            f"process {rank} of {size} waited {timeout:g} s for process 0 at {host}:{port}: {answer or why}; start it, "
            "check MASTER_ADDR and MASTER_PORT, or raise JZERO_TIMEOUT (seconds)"
        )


def _server(port: int) -> socket.socket:
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=4096)
    return socket.create_server(("", port), backlog=4096)


def _missing(came: Iterable[int], size: int) -> str:
    return ", ".join(map(str, sorted(set(range(1, size)) - set(came))))


def _never_came(missing: str, size: int, timeout: float, host: str, port: int) -> ConfigError:
    return ConfigError(
        f"rank {missing} of {size} never came to {host}:{port} in {timeout:g} s: see their "
        "output, or raise JZERO_TIMEOUT (seconds)"
    )
