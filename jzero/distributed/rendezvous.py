"""Processes wait for each other before JAX starts, so that the error names the process that is missing.

JAX's own runtime aborts a process whose wait times out, without naming the missing one. Here process 0 listens on the
coordinator's port, before JAX's service does, until all have come; after a timeout every process reports who is
missing. Each line of the protocol is text: "JOB RANK SIZE" to process 0; "go", "missing 1, 3" or "another job" back.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import sys
import time
from collections.abc import Iterable

from jzero.distributed.bind_address import listen_at
from jzero.errors import ConfigError, LostProcessError

NOTICE = 20.0  # seconds until process 0 prints which processes are missing


def meet(coordinator: str, rank: int, size: int, timeout: float, job: str = "", bind: str = "") -> None:
    """Return once `size` processes have come to `coordinator`, "host:port"; process 0 listens there.

    Args:
      rank: this process's rank.
      timeout: seconds to wait for the last process.
      job: the job's id; processes with another id are turned away.
      bind: the address on which process 0 listens; "": all.

    Raises:
      LostProcessError: processes are missing (all that came report the same ones), or process 0 does not answer.
      ConfigError: process 0 cannot listen.
    """
    host, _, port = coordinator.rpartition(":")
    if rank == 0:
        _listen(host.strip("[]"), int(port), size, timeout, job, bind)
    else:
        _call(host.strip("[]"), int(port), rank, size, timeout, job)


def _listen(host: str, port: int, size: int, timeout: float, job: str, bind: str) -> None:
    deadline, came = time.monotonic() + timeout, dict[int, socket.socket]()
    with contextlib.ExitStack() as stack:
        try:
            server = stack.enter_context(listen_at(bind, port))
        except OSError as error:
            fix = "another job may use it; pass another --master_port (or MASTER_PORT), or leave it out"
            if error.errno == errno.EADDRNOTAVAIL:
                fix = "set JZERO_BIND_ADDRESS to an address of this host"
            at = f" at {bind}" if bind else ""
            raise ConfigError(
                f"process 0 cannot listen on port {port}{at}: {os.strerror(error.errno or 0)}: {fix}"
            ) from None
        notice = time.monotonic() + NOTICE
        while len(came) < size - 1 and (left := deadline - time.monotonic()) > 0:
            if time.monotonic() > notice:
                notice = deadline  # print once
                print(f"waiting for rank {_missing(came, size)} of {size} at port {port}", file=sys.stderr, flush=True)
            server.settimeout(min(left, 1))
            with contextlib.suppress(OSError, ValueError):  # ValueError: not a line of the protocol, as a port scan's
                connection, _ = server.accept()
                stack.enter_context(connection)
                connection.settimeout(min(left, 5))  # a stranger that sends nothing must not block the others for long
                name, number, number_of = connection.makefile().readline().rstrip("\n").rsplit(" ", 2)
                if (name, int(number_of)) != (job, size):
                    connection.sendall(b"another job\n")
                    continue
                came[int(number)] = connection
        missing = _missing(came, size)
        answer = f"missing {missing}\n" if missing else "go\n"
        for connection in came.values():
            with contextlib.suppress(OSError):
                connection.sendall(answer.encode())
    if missing:
        raise _never_came(missing, size, timeout, host, port)


def _call(host: str, port: int, rank: int, size: int, timeout: float, job: str) -> None:
    deadline = time.monotonic() + timeout
    answer, why = "", "no answer"
    while not answer and (left := deadline - time.monotonic()) > 0:
        try:
            with socket.create_connection((host, port), timeout=left) as connection:
                connection.settimeout(left + 5)  # process 0 may have started later, and its timeout with it
                connection.sendall(f"{job} {rank} {size}\n".encode())
                answer = connection.makefile().readline().strip()
        except OSError as error:
            why = error.strerror or str(error)
        if not answer:
            time.sleep(0.1)
    if answer.startswith("missing"):
        raise _never_came(answer.removeprefix("missing "), size, timeout, host, port)
    if answer == "another job":
        raise LostProcessError(
            f"process {rank} of {size}: process 0 at {host}:{port} belongs to another job; pass another --master_port "
            "(or MASTER_PORT)"
        )
    if answer != "go":
        raise LostProcessError(
            f"process {rank} of {size} timed out after {timeout:g} s waiting for process 0 at {host}:{port}: "
            f"{answer or why}; start process 0, check MASTER_ADDR and MASTER_PORT, or raise JZERO_TIMEOUT (seconds)"
        )


def _missing(came: Iterable[int], size: int) -> str:
    return ", ".join(map(str, sorted(set(range(1, size)) - set(came))))


def _never_came(missing: str, size: int, timeout: float, host: str, port: int) -> LostProcessError:
    return LostProcessError(
        f"rank {missing} of {size} did not come to {host}:{port} within {timeout:g} s: see its output, or raise "
        "JZERO_TIMEOUT (seconds)"
    )
