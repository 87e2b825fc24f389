"""Real jobs for tests: the command as a process, what it leaves and where it listens, and scripts that do as told."""

import contextlib
import ipaddress
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
A, B = "198.51.100.1", "198.51.100.2"  # reserved for documentation (RFC 5737), so no machine has them
PATIENCE = 180  # seconds to start processes; a busy machine is slow

# What conftest.py sets for the tests themselves, for the jobs that train: their processes compile the same programs.
QUICK = {
    "JAX_COMPILATION_CACHE_DIR": str(ROOT / ".jax_cache"),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    **{name: os.environ[name] for name in ("XLA_FLAGS",) if name in os.environ},
}


class Command:
    """A running `jzero` (or `main`) with these arguments. Its processes have its token on their command line."""

    def __init__(self, *arguments, cwd, env=None, prefix=(), main=("-m", "jzero")):
        self.token = f"token-{secrets.token_hex(6)}"
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_", "JZERO_")) and k != "RANK"}
        self.out, self.err = cwd / f"{self.token}.out", cwd / f"{self.token}.err"
        self.started = time.monotonic()
        with self.out.open("w") as out, self.err.open("w") as err:
            self.process = subprocess.Popen(
                [*prefix, sys.executable, *main, *map(str, arguments), self.token],
                cwd=cwd, env=clean | {"PYTHONPATH": f"{ROOT}:{ROOT}/tests"} | (env or {}), stdout=out, stderr=err,
                stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip

    def wait(self, seconds=PATIENCE):
        return self.process.wait(seconds)

    def ended(self, code=0, seconds=PATIENCE):
        """Wait for the end with this exit code; return the command."""
        assert self.wait(seconds) == code, self.errors
        return self

    @property
    def output(self):
        return self.out.read_text()

    @property
    def errors(self):
        return self.err.read_text()

    def until(self, text, seconds=PATIENCE):
        """Wait until the output contains a text, or (text, n) n times."""
        wanted, times = text if isinstance(text, tuple) else (text, 1)
        wait_for(lambda: self.output.count(wanted) >= times, seconds, lambda: f"{self.output}\n{self.errors}")
        return self

    def processes(self, having=""):
        """pid -> command line of the job's running processes that contain `having`; zombies do not count."""
        found = {}
        for path in Path("/proc").glob("[0-9]*"):
            try:
                words = (path / "cmdline").read_bytes().decode(errors="replace").replace("\0", " ")
                state = (path / "stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                continue
            if self.token in words and having in words and state != "Z":
                found[int(path.name)] = words
        return found

    def rank(self, number):
        (pid,) = [pid for pid, words in self.processes("worker.py").items() if f"--local_rank={number}" in words]
        return pid

    def agents_and_guards(self):
        """The pids of the agents, and of their parents, which run the same program."""
        both = [pid for pid, words in self.processes("os.read(0").items() if "ssh -T" not in words]
        parents = {int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]) for pid in both}
        return [pid for pid in both if pid not in parents], [pid for pid in both if pid in parents]

    def gone(self, seconds=10):
        """Wait until nothing is left of the job, its command included."""
        wait_for(lambda: not self.processes(), seconds, lambda: str(self.processes()))

    def kill(self, pid, number=signal.SIGKILL):
        os.kill(pid, number)
        self.killed = time.monotonic()

    def took(self):
        return time.monotonic() - self.killed

    def end(self):
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(5)


def stand_in(folder, name, lines):
    """Write a shell script in the place of a program; return the PATH on which it comes first."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{lines}")
    (folder / name).chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


def call(port, *lines):
    """Connect to a port of this machine as soon as somebody listens, send lines, and return the connection."""
    end = time.monotonic() + 20
    while True:
        with contextlib.suppress(ConnectionRefusedError):
            connection = socket.create_connection(("127.0.0.1", port), timeout=20)
            break
        assert time.monotonic() < end
        time.sleep(0.005)
    for line in lines:
        connection.sendall(line)
    return connection


def wait_for(condition, seconds, say):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, say()
        time.sleep(0.05)


WORKER = r"""
import json, os, signal, subprocess, sys, time

rank, what = os.environ["RANK"], sys.argv[2] if len(sys.argv) > 2 else ""
wait = [sys.executable, "-c", "import time; time.sleep(1000)", sys.argv[-1]]
if "show" in what:
    names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE", "MASTER_ADDR"]
    print(json.dumps([sys.argv[1:-1], {name: os.environ[name] for name in names}, os.environ.get("SEEN_KEY")]))
if "lines" in what:
    for i in range(3000):
        print(f"{rank}:{i}")
    print("x" * 200_000, file=sys.stderr)
    print("a\rb\rc", end="")
if "much" in what:  # more than a pipe holds until it is read
    for i in range(3000):
        print("x" * 100)
    while not os.path.exists("read"):
        time.sleep(0.1)
    sys.exit()
if "children" in what:
    for i in range(2):  # one of them leaves the process group
        subprocess.Popen(wait, start_new_session=i == 1)
if "hidden" in what:  # an orphan in a session of its own, without the environment and the output of its parents
    subprocess.run(["sh", "-c", 'setsid env -i "$@" </dev/null >/dev/null 2>&1 &', "sh", *wait])
if "show" in what:
    sys.exit()
if "save" in what:
    def save(number, frame):
        os.write(1, f"saved {rank} {number}\n".encode())
        sys.exit(0)
    signal.signal(signal.SIGTERM, save)
    signal.signal(signal.SIGINT, save)
if "deaf" in what:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
print("ready", rank, flush=True)
time.sleep(1000)
"""

CPU = ("--platform", "cpu", "--num_gpus")

# One write that begins a line, so that the lines of other threads and of gloo neither split it nor precede it.
TRIED = r"""
def tried(name, f):
    try:
        print(f"\n{name}: {f()}\n", end="", flush=True)
    except (jzero.ConfigError, jzero.CheckpointError) as error:
        print(f"\n{name}: {type(error).__name__}: {error}\n", end="", flush=True)
"""


def said(job):
    """What the two ranks tried: name -> result or error."""
    found = re.findall(r"^\[(\d)\] (\w+): (.*)$", job.output, re.M)
    return [{name: text for number, name, text in found if number == rank} for rank in "01"]


MEET = """
import os, time
import jzero
while jzero.get_rank() and not os.path.exists("go"):
    time.sleep(0.1)
jzero.init_distributed()
print("joined", os.environ.get("NCCL_SOCKET_IFNAME"), flush=True)
while not os.path.exists("heard"):
    time.sleep(0.1)
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
    """The addresses at which processes that MEET listen: those of the rendezvous, and of JAX's service after it."""
    wait_for(lambda: len(job.processes("--local_rank")) >= 2, PATIENCE, lambda: job.errors)
    wait_for(lambda: listening(job.processes()), PATIENCE, lambda: job.errors)
    first = listening(job.processes("worker.py"))
    (tmp_path / "go").touch()
    job.until(("joined", 2))
    then = listening(job.processes("worker.py"))
    (tmp_path / "heard").touch()
    return first, then
