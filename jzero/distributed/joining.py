"""Join the other processes of a job.

JAX's own runtime aborts a process whose wait times out, without naming the missing one. So before it starts, process 0
listens on the coordinator's port until all have come; after a timeout every process reports who is missing. A caller
says "JOB RANK SIZE" (connections.py); process 0 answers "go", "missing: ERROR" or "no: WHY".
"""

from __future__ import annotations

import asyncio
import atexit
import builtins
import contextlib
import errno
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from datetime import timedelta
from functools import cache
from typing import NoReturn

import jax

from jzero import _compat
from jzero.distributed import connections, heartbeat, last_words
from jzero.distributed.host_collectives import gather_texts
from jzero.distributed.place import Place, find_place
from jzero.errors import ConfigError, LostProcessError, PassingError, refuse_keywords, some_of

DEFAULT_TIMEOUT = 120.0  # seconds
NOTICE = 20.0  # seconds until process 0 prints which processes are missing

_INSTEAD = {  # what replaces DeepSpeed's arguments
    "dist_backend": "leave it out: JAX takes NCCL between GPUs, and Gloo between CPUs",
    "auto_mpi_discovery": "leave it out: the variables of Open MPI and Slurm are read",
    "distributed_port": "leave it out: jzero --master_port, or MASTER_PORT",
    "verbose": "leave it out: joining prints nothing",
    "init_method": "leave it out: set MASTER_ADDR and MASTER_PORT, or start the script with jzero",
    "dist_init_required": "leave it out: a process that has joined does not join again",
    "config": "leave it out: pass it to jzero.initialize",
    "rank": "leave it out: set RANK, or start the script with jzero",
    "world_size": "leave it out: set WORLD_SIZE, or start the script with jzero",
}


def init_distributed(timeout: float | timedelta | None = None, **deepspeed: object) -> None:
    """Join the other processes of the job. A single process and a second call do nothing.

    `initialize`, `make_train_step` and `make_mesh` call it. A script that uses JAX before them, such as
    `jax.devices()`, must call it first.

    Args:
      timeout: seconds, or a timedelta, to wait for the last process; default `JZERO_TIMEOUT`, or DeepSpeed's
        `DEEPSPEED_TIMEOUT` (in minutes), or 120.
      deepspeed: DeepSpeed's other arguments; each raises an error that says what to do.

    Raises:
      ConfigError: a process did not come in time (all processes name it), or JAX was used before.
    """
    if isinstance(timeout, str):  # DeepSpeed's first argument
        timeout, deepspeed = None, {"dist_backend": timeout, **deepspeed}
    refuse_keywords("init_distributed", deepspeed, _INSTEAD)
    timeout = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    if timeout is not None and not timeout > 0:
        raise ConfigError(f"init_distributed: timeout = {timeout}: must be a positive number of seconds, or None")
    last_words.install()
    place = find_place(os.environ)
    heartbeat.start_step_counter()
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
    secret = os.environ.get(connections.SECRET, "")
    bind = connections.bind_address(host.strip("[]"), one_host, os.environ) if place.rank == 0 else ""
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

    def leaving(status: str | int | None = None) -> NoReturn:
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
    host = host.strip("[]")
    if rank:
        _call(host, int(port), rank, size, timeout, job, secret)
        return
    server, ended, stop = _listen(bind, int(port)), Future[str](), threading.Event()

    def run() -> None:
        try:
            ended.set_result(asyncio.run(_gather(server, f"{host}:{port}", size, timeout, job, secret, stop)))
        except BaseException as error:
            ended.set_exception(error)

    # In a thread: the script may run in an event loop of its own, as a notebook's cells do.
    thread = threading.Thread(target=run, daemon=True, name="jzero joining")
    thread.start()
    try:
        problem = ended.result()
    except BaseException:  # Ctrl-C: the port must be free for the next attempt
        stop.set()
        thread.join(5)
        raise
    if problem:
        raise LostProcessError(problem)


def _listen(bind: str, port: int) -> socket.socket:
    try:
        return connections.listen_at(bind, port)
    except OSError as error:
        at = f"process 0 cannot listen on port {port}{f' at {bind}' if bind else ''}: {os.strerror(error.errno or 0)}"
        if error.errno == errno.EADDRNOTAVAIL:
            raise ConfigError(f"{at}: set JZERO_BIND_ADDRESS to an address of this host") from None
        raise PassingError(  # the command chooses another port for the next start
            f"{at}: another job may use it; pass another --master_port (or MASTER_PORT), or leave it out"
        ) from None


async def _gather(
    server: socket.socket, coordinator: str, size: int, timeout: float, job: str, secret: str, stop: threading.Event
) -> str:
    """Wait for the other processes, then let them all go on; return what is wrong, "" if nothing is."""
    came, refused = dict[int, asyncio.StreamWriter](), set[int]()

    async def talk(words: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        rank, why = _claim(words, job, size)
        if rank in came:
            why = f"reports that rank {rank} has already joined: correct RANK"
        if why:
            writer.write(f"no: {why}\n".encode())
            return
        came[rank] = writer
        try:
            await reader.read(1)  # it has nothing more to send, so it has gone
        finally:
            del came[rank]

    def note(words: str) -> None:
        rank, why = _claim(words, job, size)
        if not why:
            refused.add(rank)

    serving = await connections.serve(server, secret, talk, note)
    deadline, notice = time.monotonic() + timeout, time.monotonic() + NOTICE
    while (missing := _missing(came, size)) and (now := time.monotonic()) < deadline and not stop.is_set():
        if now > notice:
            notice = deadline  # print once
            port = coordinator.rpartition(":")[2]
            waiting = f"waiting for rank {missing} of {size} at port {port}{_why(refused, came)}"
            print(waiting, file=sys.stderr, flush=True)
        await asyncio.sleep(0.02)
    serving.close()
    problem = missing and (
        f"rank {missing} of {size} did not come to {coordinator} within {timeout:g} s{_why(refused, came)}: "
        "see its output, or raise JZERO_TIMEOUT (seconds)"
    )
    writers = list(came.values())
    for writer in writers:
        writer.write((f"missing: {problem}\n" if problem else "go\n").encode())
        writer.close()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(5):
            await asyncio.gather(*(writer.wait_closed() for writer in writers), return_exceptions=True)
    return problem


def _claim(words: str, job: str, size: int) -> tuple[int, str]:
    """Return the rank that a caller claims, and why it is refused: "" if it is not."""
    match = re.fullmatch(r"(.*) (\d{1,9}) (\d{1,9})", words, re.ASCII)
    if not match or match[1] != job or int(match[3]) != size:
        return 0, "belongs to another job; pass another --master_port (or MASTER_PORT)"
    rank = int(match[2])
    return rank, "" if 0 < rank < size else f"waits for ranks 1 to {size - 1}: correct RANK"


def _why(refused: set[int], came: Iterable[int]) -> str:
    """Return which missing ranks were refused, and the fix; "" if none was."""
    ranks = sorted(refused - set(came))
    who = f"refused rank {some_of(ranks)}, which did not prove that it knows the secret"
    return f" ({who}: {connections.FIX})" if ranks else ""


def _call(host: str, port: int, rank: int, size: int, timeout: float, job: str, secret: str) -> None:
    deadline = time.monotonic() + timeout
    answer, why = "", "no answer"
    while not answer and (left := deadline - time.monotonic()) > 0:
        try:
            with socket.create_connection((host, port), timeout=left) as connection:
                connections.authenticate(connection, f"{job} {rank} {size}", secret)
                # Process 0 may have started later, and its timeout with it.
                answer = connections.read_line(connection, deadline + 5, most=2**20)
        except connections.AuthenticationError as error:
            answer = f"no: {error}"
        except OSError as error:
            why = error.strerror or str(error)
        if not answer:
            time.sleep(0.1)
    kind, _, text = answer.partition(": ")
    if kind == "missing":
        raise LostProcessError(text)
    if kind == "no":
        raise LostProcessError(f"process {rank} of {size}: process 0 at {host}:{port} {text[:300]}")
    if answer != "go":
        raise LostProcessError(
            f"process {rank} of {size} timed out after {timeout:g} s waiting for process 0 at {host}:{port}: "
            f"{answer[:60] or why}; start process 0, check MASTER_ADDR and MASTER_PORT, or raise JZERO_TIMEOUT "
            "(seconds)"
        )


def _missing(came: Iterable[int], size: int) -> str:
    return ", ".join(map(str, sorted(set(range(1, size)) - set(came))))


@cache
def hosts() -> list[int]:
    """Return the host number of every process, by rank; hosts are numbered in the order of their first process.

    All processes must call it.
    """
    if jax.process_count() == 1:
        return [0]
    names = gather_texts("hosts", os.environ.get("CROSS_RANK") or socket.gethostname())
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return [numbers[name] for name in names]


def host_of(device: jax.Device) -> int:
    """Return the number of a device's host, see `hosts`; a process that only a plan describes is on a host of its own.

    All processes must call it.
    """
    process, of_process = device.process_index, hosts()
    return of_process[process] if process < len(of_process) else process
