"""Processes wait for each other before JAX starts, so that the error names the process that is missing.

JAX's own runtime aborts a process whose wait times out, without naming the missing one. Here process 0 listens on the
coordinator's port, before JAX's service does, until all have come; after a timeout every process reports who is
missing. A caller says "JOB RANK SIZE" (handshake.py); process 0 answers "go", "missing: ERROR" or "no: WHY".
"""

from __future__ import annotations

import errno
import os
import re
import socket
import sys
import time
from collections.abc import Collection, Iterable

from jzero.distributed import handshake
from jzero.distributed.bind_address import listen_at
from jzero.errors import ConfigError, LostProcessError, PassingError, some_of

NOTICE = 20.0  # seconds until process 0 prints which processes are missing


def meet(
    coordinator: str, rank: int, size: int, timeout: float, job: str = "", bind: str = "", secret: str = ""
) -> None:
    """Return once `size` processes have come to `coordinator`, "host:port"; process 0 listens there.

    Args:
      rank: this process's rank.
      timeout: seconds to wait for the last process.
      job: the job's id; processes with another id are refused.
      bind: the address on which process 0 listens; "": all.
      secret: known to all processes of the job; others are refused. "": no authentication.

    Raises:
      LostProcessError: processes are missing (all that came report the same ones), or process 0 does not answer.
      ConfigError: process 0 cannot listen.
    """
    host, _, port = coordinator.rpartition(":")
    if rank == 0:
        _listen(host.strip("[]"), int(port), size, timeout, job, bind, secret)
    else:
        _call(host.strip("[]"), int(port), rank, size, timeout, job, secret)


def _listen(host: str, port: int, size: int, timeout: float, job: str, bind: str, secret: str) -> None:
    deadline, came, refused = time.monotonic() + timeout, dict[int, socket.socket](), set[int]()
    try:
        server = listen_at(bind, port)
    except OSError as error:
        at = f"process 0 cannot listen on port {port}{f' at {bind}' if bind else ''}: {os.strerror(error.errno or 0)}"
        if error.errno == errno.EADDRNOTAVAIL:
            raise ConfigError(f"{at}: set JZERO_BIND_ADDRESS to an address of this host") from None
        raise PassingError(  # the command chooses another port for the next start
            f"{at}: another job may use it; pass another --master_port (or MASTER_PORT), or leave it out"
        ) from None
    with handshake.Listener(server, secret) as listener:
        notice = time.monotonic() + NOTICE
        while len(came) < size - 1 and (left := deadline - time.monotonic()) > 0:
            if time.monotonic() > notice:
                notice = deadline  # print once
                waiting = f"waiting for rank {_missing(came, size)} of {size} at port {port}{_why(refused, came)}"
                print(waiting, file=sys.stderr, flush=True)
            for connection, words in listener.wait(min(left, 1)):
                if words is None:  # it came, and has gone
                    came = {rank: one for rank, one in came.items() if one is not connection}
                elif why := _refusal(words, job, size, came):
                    listener.drop(connection, f"no: {why}")
                else:
                    came[_rank(words)] = connection
            refused |= {_rank(words) for words in listener.refused if not _refusal(words, job, size, ())}
        problem = ""
        if missing := _missing(came, size):
            problem = (
                f"rank {missing} of {size} did not come to {host}:{port} within {timeout:g} s{_why(refused, came)}: "
                "see its output, or raise JZERO_TIMEOUT (seconds)"
            )
        for connection in came.values():
            listener.drop(connection, f"missing: {problem}" if problem else "go")
    if problem:
        raise LostProcessError(problem)


def _refusal(words: str, job: str, size: int, came: Collection[int]) -> str:
    """Return why a caller is refused; "" if it is not."""
    match = re.fullmatch(r"(.*) (\d{1,9}) (\d{1,9})", words, re.ASCII)
    if not match or match[1] != job or int(match[3]) != size:
        return "belongs to another job; pass another --master_port (or MASTER_PORT)"
    if not 0 < (rank := int(match[2])) < size:
        return f"waits for ranks 1 to {size - 1}: correct RANK"
    return f"reports that rank {rank} has already joined: correct RANK" if rank in came else ""


def _rank(words: str) -> int:
    return int(words.rsplit(" ", 2)[1])


def _why(refused: Collection[int], came: Collection[int]) -> str:
    """Return which missing ranks were refused, and the fix; "" if none was."""
    ranks = sorted(set(refused) - set(came))
    who = f"refused rank {some_of(ranks)}, which did not prove that it knows the secret"
    return f" ({who}: {handshake.FIX})" if ranks else ""


def _call(host: str, port: int, rank: int, size: int, timeout: float, job: str, secret: str) -> None:
    deadline = time.monotonic() + timeout
    answer, why = "", "no answer"
    while not answer and (left := deadline - time.monotonic()) > 0:
        try:
            with socket.create_connection((host, port), timeout=left) as connection:
                handshake.authenticate(connection, f"{job} {rank} {size}", secret)
                # Process 0 may have started later, and its timeout with it.
                answer = handshake.read_line(connection, deadline + 5, most=2**20)
        except handshake.AuthenticationError as error:
            answer = f"no: {error}"
        except OSError as error:
            why = error.strerror or str(error)
        if not answer:
            time.sleep(0.1)
    if answer.startswith("missing: "):
        raise LostProcessError(answer.removeprefix("missing: "))
    if answer.startswith("no: "):
        why = answer.removeprefix("no: ")[:300]
        raise LostProcessError(f"process {rank} of {size}: process 0 at {host}:{port} {why}")
    if answer != "go":
        raise LostProcessError(
            f"process {rank} of {size} timed out after {timeout:g} s waiting for process 0 at {host}:{port}: "
            f"{answer[:60] or why}; start process 0, check MASTER_ADDR and MASTER_PORT, or raise JZERO_TIMEOUT "
            "(seconds)"
        )


def _missing(came: Iterable[int], size: int) -> str:
    return ", ".join(map(str, sorted(set(range(1, size)) - set(came))))
