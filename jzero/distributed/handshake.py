"""Two ends of a connection prove to each other that they know the job's secret, which is never sent.

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
SECONDS = 5.0  # until a caller must have proved itself
MOST = 256  # callers that have not; then the oldest has to go
FIX = f"set the same {VARIABLE} on every process, or on none"


class Stranger(ConnectionError):
    """The other end does not know the secret, or does not speak this protocol."""


def introduce(connection: socket.socket, words: str, secret: str, seconds: float = SECONDS) -> None:
    """Prove to the end that was called that this one knows the secret, and check the same of it.

    Raises:
      Stranger: it does not.
      OSError: it closed the connection, or was silent for `seconds`.
    """
    nonce, end = secrets.token_hex(16), time.monotonic() + seconds
    connection.settimeout(seconds)
    connection.sendall(f"jzero {nonce} {words}\n".encode())
    answer = read_line(connection, end)
    theirs, _, proof = answer.partition(" ")
    if not _equal(proof, _proof(secret, "called", nonce, theirs, words)):
        knows = f"does not know this process's secret: {FIX}"
        raise Stranger(knows if proof else f"answers {answer[:60]!r}: it is not a process of this job")
    connection.sendall(_proof(secret, "caller", nonce, theirs, words).encode() + b"\n")


def read_line(connection: socket.socket, end: float, most: int = LINE) -> str:
    """Read a line of at most `most` bytes until the time `end`.

    Raises:
      Stranger: the line is longer.
      OSError: the connection was closed, or no line came in time.
    """
    line = b""
    while not line.endswith(b"\n"):
        if len(line) >= most:
            raise Stranger(f"answers {line[:60]!r}, and more in one line")
        if (left := end - time.monotonic()) <= 0:
            raise TimeoutError("timed out")
        connection.settimeout(left)
        if not (data := connection.recv(most - len(line))):
            raise ConnectionResetError("closed the connection")
        line += data
    return line.decode(errors="replace").rstrip("\n")


class Door:
    """Lets in the callers of a listening socket that know the secret.

    A stranger costs LINE bytes for SECONDS, and at most MOST of them wait: neither silence nor 300 MB in one line nor
    a byte per second delays the others.

    Attributes:
      refused: the words of the callers that did not prove, in the last `wait`, that they know the secret. A caller with
        another secret hangs up, because this end does not know its secret either. Anybody can send such words.
    """

    def __init__(self, server: socket.socket, secret: str):
        self._server, self._secret = server, secret
        server.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(server, selectors.EVENT_READ)
        self._outside: dict[socket.socket, _Caller] = {}  # the oldest first
        self._inside: set[socket.socket] = set()
        self.refused: list[str] = []

    def __enter__(self) -> Door:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def fileno(self) -> int:
        """Return a file descriptor that is readable when `wait` has something to do."""
        return self._selector.fileno()

    def close(self) -> None:
        """Close the socket and all connections."""
        for connection in [self._server, *self._outside, *self._inside]:
            connection.close()
        self._selector.close()

    def wait(self, seconds: float) -> list[tuple[socket.socket, str | None]]:
        """Handle what comes within `seconds`; return connections with the words of their callers.

        The words are None for a connection that was let in before and has been closed by its caller.
        """
        found: list[tuple[socket.socket, str | None]] = []
        self.refused = []
        for key, _ in self._selector.select(seconds):
            connection: Any = key.fileobj
            if connection is self._server:
                self._accept()
            elif connection in self._inside:  # a caller has nothing more to say
                self.drop(connection)
                found.append((connection, None))
            elif connection in self._outside and self._hears(connection):
                self._inside.add(connection)
                found.append((connection, self._outside.pop(connection).words))
        now = time.monotonic()
        for connection in [one for one, caller in self._outside.items() if now > caller.end]:
            self.drop(connection)
        return found

    def drop(self, connection: socket.socket, last: str = "") -> None:
        """Close a connection, after a last line."""
        self._outside.pop(connection, None)
        self._inside.discard(connection)
        self._selector.unregister(connection)
        try:
            if last:
                connection.sendall(f"{last}\n".encode())
        except OSError:
            pass  # it has gone
        connection.close()

    def _accept(self) -> None:
        for _ in range(32):  # then those that have come before are heard
            if len(self._outside) >= MOST:
                self.drop(next(iter(self._outside)))
            try:
                connection, _ = self._server.accept()
            except BlockingIOError:
                return
            except OSError:  # such as too many open files
                for oldest in list(self._outside)[:1]:
                    self.drop(oldest)
                return
            connection.setblocking(False)
            self._selector.register(connection, selectors.EVENT_READ)
            self._outside[connection] = _Caller()

    def _hears(self, connection: socket.socket) -> bool:
        """Read what a caller sends; return whether it has proved itself now. Drop a stranger."""
        caller = self._outside[connection]
        try:
            data = connection.recv(LINE)
            caller.line += data
            if data and not caller.line.endswith(b"\n") and len(caller.line) < LINE:
                return False
            line, caller.line = caller.line.decode(), b""
            if line.find("\n") != len(line) - 1:  # no whole line, or a second one before it was asked for
                raise Stranger
            if caller.proof:
                if not _equal(line.rstrip("\n"), caller.proof):
                    raise Stranger
                return True
            name, nonce, caller.words = line.rstrip("\n").split(" ", 2)
            if name != "jzero":
                raise Stranger
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
    """A caller at the door: what it has sent, and the proof that it must send, "" until it has said its words."""

    def __init__(self) -> None:
        self.line, self.words, self.proof, self.end = b"", "", "", time.monotonic() + SECONDS


def _proof(secret: str, role: str, *parts: str) -> str:
    if not secret:
        return "-"
    return hmac.new(secret.encode(), "\n".join([role, *parts]).encode(), "sha256").hexdigest()


def _equal(one: str, other: str) -> bool:
    return hmac.compare_digest(one.encode(), other.encode())
