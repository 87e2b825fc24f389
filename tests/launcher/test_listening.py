"""A job listens only where its own processes call: on loopback, or on the address that the other hosts use."""

import ipaddress
import os
import socket
from pathlib import Path

import pytest
from hosts import NEEDS, can_run
from jobs import PATIENCE, wait_for
from workers import CPU

from jzero import ConfigError
from jzero.distributed import connections
from jzero.distributed.connections import bind_address, listen_at

WORKER = """
import os, time
import jzero
rank = jzero.get_rank()
while rank and not os.path.exists("go"):
    time.sleep(0.1)
jzero.init_distributed()
print("joined", os.environ.get("NCCL_SOCKET_IFNAME"), flush=True)
time.sleep(1000)
"""


def listening(pids):
    """The addresses on which these processes listen."""
    found = set()
    for pid in pids:
        for family, name in ((socket.AF_INET, "tcp"), (socket.AF_INET6, "tcp6")):
            try:
                rows = [line.split() for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]]
                own = {os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir()}
            except OSError:  # the process, or one of its files, has gone
                continue
            for row in rows:
                if row[3] == "0A" and f"socket:[{row[9]}]" in own:
                    words = bytes.fromhex(row[1].partition(":")[0])
                    turned = b"".join(words[i : i + 4][::-1] for i in range(0, len(words), 4))
                    address = ipaddress.ip_address(socket.inet_ntop(family, turned))
                    found.add(str(getattr(address, "ipv4_mapped", None) or address))
    return found


def heard_at(job, tmp_path):
    """The addresses of the rendezvous, and those of JAX's service after it."""
    wait_for(lambda: len(job.processes("--local_rank")) >= 2, PATIENCE, lambda: job.errors)
    wait_for(lambda: listening(job.processes()), PATIENCE, lambda: job.errors)
    first = listening(job.processes("worker.py"))
    (tmp_path / "go").touch()
    job.until(("joined", 2))
    return first, listening(job.processes("worker.py"))


@pytest.mark.processes
def test_one_machine(start, tmp_path):
    job = start(*CPU, 2, "worker.py", program=WORKER)
    assert heard_at(job, tmp_path) == ({"127.0.0.1"}, {"127.0.0.1"})
    assert job.output.count("joined lo") == 2


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.skipif(not can_run(), reason=NEEDS)
def test_two_hosts(launch, hosts, tmp_path):
    job = launch("worker.py", slots=1, program=WORKER)
    assert heard_at(job, tmp_path) == ({hosts.addresses["a"]}, {hosts.addresses["a"]})
    assert job.output.count("joined None") == 2


NAMES = {
    "both": ["192.0.2.1", "2001:db8::1"], "debian": ["127.0.1.1"], "six": ["2001:db8::1"],
    "several": ["192.0.2.1", "192.0.2.2"], "elsewhere": ["203.0.113.1"], "localhost": ["127.0.0.1", "::1"],
}  # fmt: skip


def test_the_address_of_a_name(monkeypatch):
    for name, one_host, chosen in (
        ("both", False, "192.0.2.1"),
        ("six", False, "2001:db8::1"),
        ("several", False, ""),
        ("elsewhere", False, ""),
        ("nowhere", False, ""),
        ("debian", False, ""),  # the other hosts know the name by another address
        ("debian", True, "127.0.1.1"),
        ("localhost", False, ""),  # some systems set MASTER_ADDR so on the first of several hosts
        ("localhost", True, "127.0.0.1"),
        ("127.0.0.1", False, ""),
        ("::1", True, "::1"),
    ):

        def lookup(host, *_, **__):
            if host == "nowhere":
                raise socket.gaierror("no such name")
            return [(0, 0, 0, "", (address, 0)) for address in NAMES.get(host, [host])]

        monkeypatch.setattr(socket, "getaddrinfo", lookup)
        monkeypatch.setattr(connections, "is_own", lambda address: not address.startswith("203."))
        assert bind_address(name, one_host, {}) == chosen
        loopback = one_host and name in ("localhost", "::1")  # the processes call it, so nothing else will do
        assert bind_address(name, one_host, {"JZERO_BIND_ADDRESS": "192.0.2.9"}) == (
            chosen if loopback else "192.0.2.9"
        )


def test_a_bind_address_that_is_none():
    with pytest.raises(ConfigError, match=r"JZERO_BIND_ADDRESS = 'eth0': must be an IPv4 or IPv6 address"):
        bind_address("localhost", True, {"JZERO_BIND_ADDRESS": "eth0"})


def test_sockets_listen_where_they_are_told():
    for address, shown in (("127.0.0.1", "127.0.0.1"), ("::", "::"), ("", "::"), ("0.0.0.0", "0.0.0.0")):
        if ":" in shown and not socket.has_dualstack_ipv6():
            continue
        with listen_at(address, 0) as server:
            assert server.getsockname()[0] == shown
