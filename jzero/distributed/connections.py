"""Connections between a job's processes: the address on which process 0 listens, and the proof that both ends belong.

JAX's coordination service accepts every call that reaches it, so it must not listen where nobody of the job calls:
process 0 listens only on the address that its peers use.

Two ends of a connection prove that they know the job's secret, which is never sent. The caller sends "jzero NONCE
WORDS", the other end answers "NONCE PROOF", and the caller sends its own "PROOF": each is the HMAC-SHA256 of both
nonces and the words under the secret. Without a secret every proof is "-", and a caller only has to speak the
protocol. The launcher sends this module to its agents, so it imports the standard library and jzero.errors alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import secrets
import socket
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import cast

from jzero.errors import ConfigError

SECRET, BIND_ADDRESS = "JZERO_SECRET", "JZERO_BIND_ADDRESS"  # environment variables
LINE = 512  # bytes
SECONDS = 5.0  # until a caller must be authenticated
MOST = 256  # unauthenticated connections; then the oldest is closed
BACKLOG = 4096  # connections that the kernel keeps until they are accepted: all processes of a job come at once
FIX = f"set the same {SECRET} on every process, or on none"

Talk = Callable[[str, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def bind_address(coordinator: str, one_host: bool, env: Mapping[str, str]) -> str:
    """Return an address of this machine, or "" for all of them.

    Args:
      coordinator: the host that the processes call, a name or an address.
      one_host: whether all processes run on this host.
      env: JZERO_BIND_ADDRESS in it comes first, unless the processes call a loopback address of their one host.

    Raises:
      ConfigError: JZERO_BIND_ADDRESS is not an address.
    """
    if given := env.get(BIND_ADDRESS):
        if not _is_address(given):
            raise ConfigError(f"{BIND_ADDRESS} = {given!r}: must be an IPv4 or IPv6 address of process 0's host, or ::")
        if not one_host or not (coordinator == "localhost" or is_loopback(coordinator)):
            return given
    try:
        found = {str(info[4][0]) for info in socket.getaddrinfo(coordinator, None, type=socket.SOCK_STREAM)}
    except OSError:
        return ""
    # One IPv4 address, or else one IPv6 address. With several, only the peers know which they use.
    own = sorted(address for address in found if is_own(address))
    usable = [a for a in own if ":" not in a] or own
    if len(usable) != 1:
        return ""
    # A name may mean a loopback address here (Debian's 127.0.1.1) and another address on the other hosts, and some
    # systems set MASTER_ADDR to localhost on the first host alone.
    return "" if not one_host and is_loopback(usable[0]) else usable[0]


def is_loopback(address: str) -> bool:
    """Return whether an address, not a name, is a loopback address."""
    return _is_address(address) and ipaddress.ip_address(address).is_loopback


def is_own(address: str) -> bool:
    """Return whether this machine has the address: a socket binds to no other."""
    with contextlib.suppress(OSError), socket.socket(_family(address), socket.SOCK_DGRAM) as s:
        s.bind((address, 0))
        return True
    return False


def listen_at(address: str, port: int) -> socket.socket:
    """Return a socket that listens on an address of this machine; on all of them for "" and "::"."""
    if address in ("", "::") and socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=BACKLOG)
    return socket.create_server((address, port), family=_family(address), backlog=BACKLOG)


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _is_address(text: str) -> bool:
    with contextlib.suppress(ValueError):
        return bool(ipaddress.ip_address(text))
    return False


class AuthenticationError(ConnectionError):
    """The other end does not know the secret, or does not speak this protocol."""


def authenticate(connection: socket.socket, words: str, secret: str, seconds: float = SECONDS) -> None:
    """Authenticate this end of a connection to the listening end, and that one to this one.

    Raises:
      AuthenticationError: the listening end does not know the secret, or does not speak this protocol.
      OSError: it closed the connection, or was silent for `seconds`.
    """
    nonce, end = secrets.token_hex(16), time.monotonic() + seconds
    connection.settimeout(seconds)
    connection.sendall(f"jzero {nonce} {words}\n".encode())
    answer = read_line(connection, end)
    theirs, _, proof = answer.partition(" ")
    if not _equal(proof, _proof(secret, "called", nonce, theirs, words)):
        knows = f"does not know this process's secret: {FIX}"
        raise AuthenticationError(knows if proof else f"answers {answer[:60]!r}: it is not a process of this job")
    connection.sendall(_proof(secret, "caller", nonce, theirs, words).encode() + b"\n")


def read_line(connection: socket.socket, end: float, most: int = LINE) -> str:
    """Read a line of at most `most` bytes until the time `end`.

    Raises:
      AuthenticationError: the line is longer.
      OSError: the connection was closed, or no line came in time.
    """
    line = b""
    while not line.endswith(b"\n"):
        if len(line) >= most:
            raise AuthenticationError(f"answers {line[:60]!r}, and more in one line")
        if (left := end - time.monotonic()) <= 0:
            raise TimeoutError("timed out")
        connection.settimeout(left)
        if not (data := connection.recv(most - len(line))):
            raise ConnectionResetError("closed the connection")
        line += data
    return line.decode(errors="replace").rstrip("\n")


async def serve(
    server: socket.socket, secret: str, talk: Talk | None = None, refused: Callable[[str], object] = lambda words: None
) -> asyncio.Server:
    """Authenticate the callers of a listening socket, run `talk(words, reader, writer)` for each, and hang up.

    An unauthenticated connection costs LINE bytes for SECONDS, and there are at most MOST: neither silence nor 300 MB
    in one line nor a byte per second delays the others.

    Args:
      refused: called with the words of callers that did not prove that they know the secret. A caller with another
        secret hangs up, because this end does not know its secret either. Anybody can send such words.
    """
    pending: dict[asyncio.Task[None], None] = {}  # the oldest first

    async def admit(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> str | None:
        async with asyncio.timeout(SECONDS):
            name, nonce, words = (await reader.readline()).decode().rstrip("\n").split(" ", 2)
            if name != "jzero":
                return None
            own = secrets.token_hex(16)
            writer.write(f"{own} {_proof(secret, 'called', nonce, own, words)}\n".encode())
            proof = (await reader.readline()).decode().rstrip("\n")
        if _equal(proof, _proof(secret, "caller", nonce, own, words)):
            return words
        refused(words)
        return None

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = cast("asyncio.Task[None]", asyncio.current_task())
        if len(pending) >= MOST:
            oldest = next(iter(pending))
            del pending[oldest]  # now: a cancelled task runs later
            oldest.cancel()
        pending[task] = None
        try:
            words = await admit(reader, writer)
            pending.pop(task, None)
            if talk and words is not None:
                await talk(words, reader, writer)
        # It was slow or has gone; its line is too long, not text, or not three words; it gave way to others.
        # A cancellation ends here, because Python 3.11 logs a handler that is cancelled as an error.
        except (OSError, ValueError, asyncio.CancelledError):
            pass
        finally:
            pending.pop(task, None)
            writer.close()

    serving = await asyncio.start_server(handle, sock=server, limit=LINE, backlog=32)  # then it reads what has come
    server.listen(BACKLOG)
    return serving


def _proof(secret: str, role: str, *parts: str) -> str:
    if not secret:
        return "-"
    return hmac.new(secret.encode(), "\n".join([role, *parts]).encode(), "sha256").hexdigest()


def _equal(one: str, other: str) -> bool:
    return hmac.compare_digest(one.encode(), other.encode())
