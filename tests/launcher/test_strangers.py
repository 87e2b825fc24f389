"""A job listens only where its own processes call, and these meet; strangers at its port do no harm."""

import asyncio
import contextlib
import resource
import socket
import struct
import threading
import time

import pytest
from jobs import call

from jzero import ConfigError
from jzero.distributed import connections
from jzero.distributed.connections import authenticate, bind_address, listen_at
from jzero.distributed.joining import meet
from jzero.launcher import agent


@pytest.fixture
def port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


class Process(threading.Thread):
    """A process of the job that comes to the port; `error` is its end, "" a good one, after `seconds`."""

    def __init__(self, port, rank, size, secret="", timeout=60, job="job"):
        super().__init__(daemon=True)
        self.arguments = f"127.0.0.1:{port}", rank, size, timeout, job, "127.0.0.1", secret
        self.start()

    def run(self):
        start = time.monotonic()
        try:
            meet(*self.arguments)
            self.error = ""
        except ConfigError as error:
            self.error = str(error)
        self.seconds = time.monotonic() - start

    def ended(self):
        self.join(90)
        return self.error


def claim(port, words, secret=""):
    with call(port) as connection:
        authenticate(connection, words, secret)
        return connections.read_line(connection, time.monotonic() + 20)


def test_everyone_hears_who_is_missing(port):
    """A process of another job is turned away at once, and does not count."""
    other = Process(port, 1, 5, job="other")
    processes = [Process(port, rank, 5, timeout=3) for rank in (0, 2, 4)]
    (said,) = {process.ended() for process in processes}
    assert said.startswith(f"rank 1, 3 of 5 did not come to 127.0.0.1:{port} within 3 s: see its output")
    assert max(process.seconds for process in processes) < 15
    assert f"process 0 at 127.0.0.1:{port} belongs to another job" in other.ended()
    assert other.seconds < 30


def test_process_0_cannot_listen_or_does_not(port):
    process = Process(port, 1, 2, timeout=0.3)
    what = f"timed out after 0.3 s waiting for process 0 at 127.0.0.1:{port}: Connection refused"
    assert process.ended().startswith(f"process 1 of 2 {what}")
    assert "check MASTER_ADDR and MASTER_PORT" in process.error
    assert 0.3 <= process.seconds < 20
    with socket.create_server(("127.0.0.1", port)):
        process = Process(port, 0, 2, timeout=10)
        said = process.ended()
    assert said.startswith(f"process 0 cannot listen on port {port} at 127.0.0.1: Address already in use")
    assert "pass another --master_port" in said
    assert process.seconds < 5


def test_strangers_do_no_harm(port, caplog):
    """Silence, one byte after another, and 300 MB without a newline, while the job's processes come."""
    secret = "known to the job"
    before, over = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, threading.Event()
    first = Process(port, 0, 3, secret, job="with spaces")
    silent = [call(port, b"" if i % 2 else b"jzero ") for i in range(300)]

    def endless():
        with contextlib.suppress(OSError), call(port) as connection:
            for _ in range(300):
                connection.sendall(b"x" * 2**20)

    def dripping():
        while not over.wait(0.01):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
                for byte in b"jzero 0 job 1 3":
                    connection.sendall(bytes([byte]))
                    over.wait(0.2)

    strangers = [threading.Thread(target=work, daemon=True) for work in (endless, dripping, dripping)]
    for stranger in strangers:
        stranger.start()
    strangers[0].join(30)
    others = [Process(port, rank, 3, secret, job="with spaces") for rank in (1, 2)]
    assert [process.ended() for process in (first, *others)] == ["", "", ""]
    socket.create_server(("", port)).close()  # the port is free
    over.set()
    assert max(process.seconds for process in others) < 10  # 0.05 s on a quiet machine
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50 * 1024  # KiB
    for connection in silent:
        connection.close()
    assert caplog.messages == []


def test_wrong_ranks_are_refused(port):
    """Without a secret too; the honest ones still meet."""
    first = Process(port, 0, 3)
    for reset in (0, 1):  # it has come, but does not stay; or its connection is reset
        with call(port) as gone:
            authenticate(gone, "job 1 3", "")
            gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", reset, 0))
            time.sleep(0.3)
    answers = [claim(port, f"job {words}") for words in ("3 3", "0 3", "-1 3", "99999 3", "1 4", "x 3")]
    assert answers[:2] == ["no: waits for ranks 1 to 2: correct RANK"] * 2
    assert answers[3] == answers[0]
    assert all("belongs to another job" in answers[i] for i in (2, 4, 5))
    with call(port) as held:
        authenticate(held, "job 2 3", "")
        assert claim(port, "job 2 3") == "no: reports that rank 2 has already joined: correct RANK"
    assert first.is_alive()
    others = [Process(port, rank, 3) for rank in (1, 2)]
    assert [process.ended() for process in (first, *others)] == ["", "", ""]


@pytest.mark.parametrize(("mine", "theirs"), [("", "secret"), ("other", "secret"), ("secret", "")])
def test_who_does_not_know_the_secret(port, mine, theirs):
    first, stranger = Process(port, 0, 2, theirs, timeout=30), Process(port, 1, 2, mine)
    assert "set the same JZERO_SECRET on every process, or on none" in stranger.ended()
    assert stranger.seconds < 20
    assert first.is_alive()
    assert [Process(port, 1, 2, theirs).ended(), first.ended()] == ["", ""]


@pytest.mark.slow
def test_the_error_names_who_was_refused(port):
    """Process 0 and the ranks that came name the rank with another secret, and the fix; nobody else's words count."""
    first, other, wrong = (Process(port, rank, 4, f"secret {rank // 2}", timeout=6) for rank in (0, 1, 2))
    assert "JZERO_SECRET" in wrong.ended()
    for words in ("another job 3 4", "job 9 4"):
        with pytest.raises(connections.AuthenticationError):
            claim(port, words, "a third one")
    refused = "did not prove that it knows the secret: set the same JZERO_SECRET on every process, or on none"
    come = f"rank 2, 3 of 4 did not come to 127.0.0.1:{port} within 6 s"
    reason = f"{come} (refused rank 2, which {refused}): see its output, or raise JZERO_TIMEOUT (seconds)"
    assert [first.ended(), other.ended()] == [reason, reason]


def test_a_proof_is_good_for_one_connection(port):
    """Who has heard a whole conversation cannot repeat it; and the secret is not in it."""
    heard, secret = [], "known to the job"

    class Recorder(socket.socket):
        def sendall(self, data, *_):
            heard.append(bytes(data))
            return super().sendall(data)

    first = Process(port, 0, 3, secret)
    call(port).close()
    with Recorder() as connection:
        connection.connect(("127.0.0.1", port))
        authenticate(connection, "job 1 3", secret)
    assert len(heard) == 2
    assert secret.encode() not in b"".join(heard)
    for lines in (heard, heard[:1]):
        with call(port, b"".join(lines)) as again:
            if len(lines) == 1:
                assert len(connections.read_line(again, time.monotonic() + 20).split()) == 2  # its nonce and its proof
                again.sendall(heard[1])
            answer = b"".join(iter(lambda: again.recv(100), b""))  # until it is closed
            assert answer.count(b"\n") == len(lines) - 1  # its nonce and its proof, and no answer
    others = [Process(port, rank, 3, secret) for rank in (1, 2)]
    assert [process.ended() for process in (first, *others)] == ["", "", ""]


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"x" * 2**20, b"0 0\n"])
def test_a_stranger_that_listens(answer):
    """A caller ends with one line, and an agent does not take it for the first host's."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve():
            for _ in range(2):
                connection, _ = server.accept()
                with contextlib.suppress(OSError), connection:
                    connection.sendall(answer)
                    connection.recv(2**20)

        threading.Thread(target=serve, daemon=True).start()
        port = server.getsockname()[1]
        error = Process(port, 1, 2, "secret").ended()
        assert error.startswith(f"process 1 of 2: process 0 at 127.0.0.1:{port} ")
        assert len(error) < 400
        assert agent.reach("127.0.0.1", port, "secret") is None


def served(work):
    """Run `work(port)` while the port is served for a job with a secret."""

    async def run():
        serving = await connections.serve(server, "secret")
        found = await work(port)
        serving.close()
        return found

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        return asyncio.run(run())


def test_an_agent_that_is_reached():
    async def called(port):
        return [await asyncio.to_thread(agent.reach, "127.0.0.1", port, secret) for secret in ("secret", "other")]

    assert served(called) == ["127.0.0.1", None]


def test_silent_callers_are_bounded(monkeypatch):
    """All that come at once, too: the oldest give way, one for each that comes."""
    monkeypatch.setattr(connections, "MOST", 4)

    async def called(port):
        callers = [socket.create_connection(("127.0.0.1", port)) for _ in range(30)]  # the loop sees all at once
        await asyncio.sleep(0.5)
        gone = 0
        for caller in callers:
            caller.setblocking(False)
            with caller, contextlib.suppress(BlockingIOError):
                gone += caller.recv(1) == b""
        return len(callers) - gone

    assert served(called) <= 4


NAMES = {
    "both": ["192.0.2.1", "2001:db8::1"], "debian": ["127.0.1.1"], "six": ["2001:db8::1"],
    "several": ["192.0.2.1", "192.0.2.2"], "elsewhere": ["203.0.113.1"], "localhost": ["127.0.0.1", "::1"],
}  # fmt: skip
# The other hosts know Debian's name by another address; some systems set MASTER_ADDR to localhost on the first of them.
SEVERAL_HOSTS = {
    "both": "192.0.2.1", "six": "2001:db8::1", "several": "", "elsewhere": "", "nowhere": "", "debian": "",
    "localhost": "", "127.0.0.1": "",
}  # fmt: skip
ONE_HOST = {"debian": "127.0.1.1", "localhost": "127.0.0.1", "::1": "::1"}


def test_the_address_of_a_name(monkeypatch):
    def lookup(host, *_, **__):
        if host == "nowhere":
            raise socket.gaierror("no such name")
        return [(0, 0, 0, "", (address, 0)) for address in NAMES.get(host, [host])]

    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    monkeypatch.setattr(connections, "is_own", lambda address: not address.startswith("203."))
    given = {"JZERO_BIND_ADDRESS": "192.0.2.9"}
    for one_host, expected in ((False, SEVERAL_HOSTS), (True, ONE_HOST)):
        assert {name: bind_address(name, one_host, {}) for name in expected} == expected
    # The processes of one host call loopback, so nothing else will do.
    for name, one_host in (("both", False), ("localhost", False), ("debian", True)):
        assert bind_address(name, one_host, given) == "192.0.2.9"
    assert [bind_address(name, True, given) for name in ("localhost", "::1")] == ["127.0.0.1", "::1"]
    with pytest.raises(ConfigError, match=r"JZERO_BIND_ADDRESS = 'eth0': must be an IPv4 or IPv6 address"):
        bind_address("localhost", True, {"JZERO_BIND_ADDRESS": "eth0"})
    with listen_at("127.0.0.1", 0) as server:
        assert server.getsockname()[0] == "127.0.0.1"
