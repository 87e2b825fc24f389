"""Mutual authentication: two ends of a connection prove that they know the job's secret, which is never sent.

The caller sends "jzero NONCE WORDS", the other end answers "NONCE PROOF", and the caller sends its own "PROOF": each is
the HMAC-SHA256 of both nonces and the words under the secret. Without a secret every proof is "-", and a caller only
has to speak the protocol. This module uses the standard library alone, because the launcher sends it to its agents.
"""

from __future__ import annotations

import hmac
import secrets
import selectors
import socket
import time
from typing import Any

VARIABLE = "JZERO_SECRET"
LINE = 512  # bytes
SECONDS = 5.0  # until a caller must be authenticated
MOST = 256  # unauthenticated connections; then the oldest is closed
FIX = f"set the same {VARIABLE} on every process, or on none"


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


class Listener:
    """Accepts and authenticates the connections of a listening socket.

    An unauthenticated connection costs LINE bytes for SECONDS, and there are at most MOST: neither silence nor 300 MB
    in one line nor a byte per second delays the others.

    Attributes:
      refused: the words of the callers that did not prove, in the last `wait`, that they know the secret. A caller with
        another secret closes the connection, because this end does not know its secret either. Anybody can send such
        words.
    """

    def __init__(self, server: socket.socket, secret: str):
        self._server, self._secret = server, secret
        server.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(server, selectors.EVENT_READ)
        self._pending: dict[socket.socket, _Caller] = {}  # the oldest first
        self._authenticated: set[socket.socket] = set()
        self.refused: list[str] = []

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def fileno(self) -> int:
        """Return a file descriptor that is readable when `wait` has something to do."""
        return self._selector.fileno()

    def close(self) -> None:
        """Close the socket and all connections."""
        for connection in [self._server, *self._pending, *self._authenticated]:
            connection.close()
        self._selector.close()

    def wait(self, seconds: float) -> list[tuple[socket.socket, str | None]]:
        """Handle what comes within `seconds`; return connections with the words of their callers.

        The words are None for an authenticated connection that its caller has closed.
        """
        found: list[tuple[socket.socket, str | None]] = []
        self.refused = []
        for key, _ in self._selector.select(seconds):
            connection: Any = key.fileobj
            if connection is self._server:
                self._accept()
            elif connection in self._authenticated:  # a caller has nothing more to send
                self.drop(connection)
                found.append((connection, None))
            elif connection in self._pending and self._receive(connection):
                self._authenticated.add(connection)
                found.append((connection, self._pending.pop(connection).words))
        now = time.monotonic()
        for connection in [one for one, caller in self._pending.items() if now > caller.end]:
            self.drop(connection)
        return found

    def drop(self, connection: socket.socket, last: str = "") -> None:
        """Close a connection, after a last line."""
        self._pending.pop(connection, None)
        self._authenticated.discard(connection)
        self._selector.unregister(connection)
        try:
            if last:
                connection.sendall(f"{last}\n".encode())
        except OSError:
            pass  # it has gone
        connection.close()

    def _accept(self) -> None:
        for _ in range(32):  # then the data of earlier connections is read
            if len(self._pending) >= MOST:
                self.drop(next(iter(self._pending)))
            try:
                connection, _ = self._server.accept()
            except BlockingIOError:
                return
            except OSError:  # such as too many open files
                for oldest in list(self._pending)[:1]:
                    self.drop(oldest)
                return
            connection.setblocking(False)
            self._selector.register(connection, selectors.EVENT_READ)
            self._pending[connection] = _Caller()

    def _receive(self, connection: socket.socket) -> bool:
        """Read what a caller sends; return whether it is authenticated now. Close the connection if it fails."""
        caller = self._pending[connection]
        try:
            data = connection.recv(LINE)
            caller.line += data
            if data and not caller.line.endswith(b"\n") and len(caller.line) < LINE:
                return False
            line, caller.line = caller.line.decode(), b""
            if line.find("\n") != len(line) - 1:  # no whole line, or a second one before it was asked for
                raise AuthenticationError
            if caller.proof:
                if not _equal(line.rstrip("\n"), caller.proof):
                    raise AuthenticationError
                return True
            name, nonce, caller.words = line.rstrip("\n").split(" ", 2)
            if name != "jzero":
                raise AuthenticationError
            own = secrets.token_hex(16)
            caller.proof = _proof(self._secret, "caller", nonce, own, caller.words)
            proof = _proof(self._secret, "called", nonce, own, caller.words)
            connection.sendall(f"{own} {proof}\n".encode())
        except BlockingIOError:
            return False
        except (OSError, ValueError):  # ValueError: not text, or not three words
            if caller.proof:
                self.refused.append(caller.words)
            self.drop(connection)
        return False


class _Caller:
    """A caller that is not authenticated: what it has sent, and the proof to expect, "" until it has sent its words."""

    def __init__(self) -> None:
        self.line, self.words, self.proof, self.end = b"", "", "", time.monotonic() + SECONDS


def _proof(secret: str, role: str, *parts: str) -> str:
    if not secret:
        return "-"
    return hmac.new(secret.encode(), "\n".join([role, *parts]).encode(), "sha256").hexdigest()


def _equal(one: str, other: str) -> bool:
    return hmac.compare_digest(one.encode(), other.encode())
