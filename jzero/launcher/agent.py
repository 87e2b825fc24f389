"""The agent starts a job's processes on one host, watches them, and leaves none behind (descendants.py).

The command sends this file through ssh's standard input to a Python on every host, this machine included. So the agent
uses only the standard library and the modules that it is sent with, needs nothing installed, and has the
command's version. Then both sides exchange lines of JSON. If the command ends, or sends nothing for COMMAND_SILENCE
seconds, the agent kills all processes of the job: it cannot know whether the command, the network or this host failed,
and surviving processes would keep GPUs and ports.

From the command: {"know": SECRET}, {"listen": [PORT or 0, ADDRESS or "" for all]}, {"connect": [[HOST, PORT], ...]},
{"start": {...}}, {"signal": N}, {"dump": true}, {"stop": SECONDS}, {"sweep": JOB}, {"topology": true}, {"ping": true}.
To the command: {"hello": {...}}, {"bound": [PORT or null, WHY]}, {"reached": [[INDEX, ADDRESS], ...]},
{"out": [RANK, 1 or 2, LINE]}, {"died": [RANK, CODE]} at once, {"exit": [RANK, CODE]} after its last output,
{"status": {RANK: [FINISHED, BEGUN, STATE]}}, {"swept": true}, {"topology": TEXT}.
"""

import asyncio
import concurrent.futures
import contextlib
import fcntl
import glob
import json
import os
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
import traceback

from jzero.distributed import connections, machine
from jzero.launcher import descendants

COMMAND_SILENCE = 8.0  # seconds without a message from the command


def hello():
    """Return this host's versions, devices and addresses."""
    versions = {"python": ".".join(map(str, sys.version_info[:3]))}
    versions |= machine.installed_wheels("jzero", "jax", "jaxlib")
    nccl_path, nccl_version = machine.nccl_to_load()
    if nccl_path:
        versions["nccl"] = nccl_version
    with contextlib.suppress(OSError), open("/proc/driver/nvidia/version") as file:
        words = file.readline().split()
        versions["driver"] = next((word for word in words if word[:1].isdigit() and "." in word), "?")
    models = []
    for path in glob.glob("/proc/driver/nvidia/gpus/*/information"):
        with contextlib.suppress(OSError), open(path) as file:
            models += [line.partition(":")[2].strip() for line in file if line.startswith("Model:")]
    shared = os.statvfs("/dev/shm")
    return {
        "versions": versions,
        "gpus": machine.count_gpus(),
        "models": sorted(set(models)),
        "addresses": addresses(),
        "nccl_path": nccl_path,
        "shared_memory": shared.f_bavail * shared.f_frsize,
    }


def addresses():
    """List the IPv4 addresses of this host's interfaces, loopback last."""
    found = []
    for _, name in socket.if_nameindex():
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s, contextlib.suppress(OSError):
            packed = fcntl.ioctl(s.fileno(), 0x8915, struct.pack("256s", name.encode()[:15]))  # SIOCGIFADDR
            found.append(socket.inet_ntoa(packed[20:24]))
    return sorted(found, key=lambda address: address.startswith("127."))


def reach(host, port, secret):
    """Return the address of the agent that listens there and knows the secret; None if there is none."""
    with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=3) as connection:
        connections.authenticate(connection, "agent", secret, seconds=3)
        return connection.getpeername()[0]
    return None


class Agent:
    """Handles the command's messages; a message's name is its method's."""

    def __init__(self, pulse):
        self.pulse, self.processes, self.tasks = pulse, {}, []
        self.job, self.folder, self.listener, self.secret = None, "", None, ""
        self.heard, self.guard = time.monotonic(), os.getppid()

    def say(self, **message):
        data = (json.dumps(message) + "\n").encode()
        while data:
            try:
                data = data[os.write(1, data) :]
            except BlockingIOError:  # sshd may use one socket both ways; asyncio made it non-blocking
                select.select([], [1], [])

    async def run(self):
        reader = asyncio.StreamReader(limit=2**26)
        loop = asyncio.get_running_loop()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(0, "rb"))
        # A terminal or a batch system may signal the agent too. Only the command decides what the processes receive.
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, lambda: None)
        self.tasks.append(asyncio.create_task(self.watch()))
        code = 1
        try:
            os.write(1, b"\n")  # ends a line that the shell's profile may have left open
            self.say(hello=hello())
            while line := await reader.readline():
                self.heard = time.monotonic()
                for name, value in json.loads(line).items():
                    if name in ("stop", "topology"):  # they take long, and pings must still be read
                        self.tasks.append(asyncio.create_task(getattr(self, name)(value)))
                    elif name in ("know", "listen", "connect", "start", "signal", "dump", "sweep"):
                        await getattr(self, name)(value)
            code = 0
        except Exception:
            traceback.print_exc()
        finally:
            self.end(code)

    def end(self, code=0):
        """Kill the job's processes and end, without waiting for threads or tasks that may be blocked."""
        descendants.kill_descendants()
        if self.folder:
            shutil.rmtree(self.folder, ignore_errors=True)
        with contextlib.suppress(OSError):
            os.kill(self.guard, signal.SIGCONT)  # it may be stopped
        sys.stderr.flush()
        os._exit(code)

    async def watch(self):
        """Report the processes' status every second; end when the command is silent."""
        late = 0
        while True:
            await asyncio.sleep(1)
            # Twice in a row: an agent that was itself suspended must first read the messages that have come meanwhile.
            late = late + 1 if time.monotonic() - self.heard > COMMAND_SILENCE else 0
            if late == 2:
                self.end()
            if self.job:
                descendants.reap_orphans({child.pid for child in self.processes.values()})
            try:
                self.say(status={rank: self.status(rank) for rank in self.processes})
                self.show_life()
            except OSError:
                self.end()

    def show_life(self):
        """Tell the guard that this agent runs; an OSError if the guard has been killed."""
        with contextlib.suppress(BlockingIOError):  # it is stopped
            os.write(self.pulse, b".")

    def status(self, rank):
        """Return steps finished, steps begun (-1 if the process does not count steps) and the process's state."""
        finished, begun = -1, -1
        with contextlib.suppress(OSError, ValueError), open(f"{self.folder}/{rank}") as file:
            finished, begun = map(int, file.read().split())
        return [finished, begun, descendants.state_and_parent(self.processes[rank].pid)[0]]

    async def listen(self, where):
        """Reserve the coordinator's port (0: any free one) until the processes start, and answer other agents there."""
        port, address = where
        self.close_listener()
        try:
            server = connections.listen_at(address, port)
        except OSError as error:
            self.say(bound=[None, os.strerror(error.errno or 0)])
            return
        self.listener = await connections.serve(server, self.secret)  # a caller has reached this host
        self.say(bound=[server.getsockname()[1], ""])

    def close_listener(self):
        if self.listener:
            self.listener.close()
            self.listener = None

    async def know(self, secret):
        self.secret = secret

    async def connect(self, places):
        """Try to reach the first host at each [HOST, PORT]; report the addresses behind the names that were reached."""

        async def tried(index, host, port):
            with contextlib.suppress(TimeoutError):
                return index, await asyncio.wait_for(asyncio.to_thread(reach, host, port, self.secret), 6)
            return index, None

        found = await asyncio.gather(*(tried(i, host, port) for i, (host, port) in enumerate(places)))
        self.say(reached=[one for one in found if one[1]])

    async def start(self, what):
        self.close_listener()
        self.show_life()
        self.job, self.folder = what["job"], tempfile.mkdtemp(prefix=f"jzero-{what['job']}-")
        threads = concurrent.futures.ThreadPoolExecutor(len(what["processes"]))
        asyncio.get_running_loop().set_default_executor(threads)  # follow() blocks one thread per process
        for process in what["processes"]:
            rank = process["rank"]
            env = os.environ | process["env"] | {"JZERO_PROGRESS": f"{self.folder}/{rank}"}
            argv, log = process["argv"], None
            try:
                if what["logs"]:
                    os.makedirs(what["logs"], exist_ok=True)
                    path = os.path.join(what["logs"], f"{what['time']}_rank{rank}.log")
                    log = open(path, "wb", buffering=0)  # noqa: SIM115
                child = subprocess.Popen(
                    argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env,
                    cwd=what["cwd"], start_new_session=True, preexec_fn=descendants.die_with_parent,
                )  # fmt: skip
            except OSError as error:
                self.say(out=[rank, 2, f"{error.filename or argv[0]}: {error.strerror}\n"])
                self.say(exit=[rank, 127])
                continue
            self.processes[rank] = child
            self.tasks.append(asyncio.create_task(self.follow(rank, child, log)))

    async def follow(self, rank, child, log):
        """Report the process's end once its output has been read."""
        # subprocess and not asyncio's: asyncio reports an end only when the pipes are closed, and the process's own
        # children may hold them for hours.
        pumps = [asyncio.create_task(self.pump(rank, n, s, log)) for n, s in ((1, child.stdout), (2, child.stderr))]
        code = await asyncio.to_thread(child.wait)
        self.say(died=[rank, code])
        await asyncio.wait(pumps, timeout=0.5)  # then give up on pipes that its children hold
        self.say(exit=[rank, code])
        del self.processes[rank]

    async def pump(self, rank, number, pipe, log):
        """Send a process's output line by line; a line over 64 KiB is cut."""
        stream, rest = asyncio.StreamReader(), b""
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stream), pipe)
        while data := await stream.read(65536):
            with contextlib.suppress(OSError):  # a full disk must not stop the training
                if log:
                    log.write(data)
            *lines, rest = (rest + data).replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
            if len(rest) > 65536:
                lines, rest = [*lines, rest], b""
            for line in lines:
                self.say(out=[rank, number, line.decode(errors="replace")])
        if rest:
            self.say(out=[rank, number, rest.decode(errors="replace")])

    async def signal(self, number):
        """Signal every process group, so children too, as a terminal does."""
        for child in self.processes.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, number)

    async def dump(self, _):
        """Make the processes print their stacks."""
        for rank, child in self.processes.items():
            if os.path.exists(f"{self.folder}/{rank}"):  # it counts steps, so it handles this signal (heartbeat.py)
                child.send_signal(signal.SIGUSR2)

    async def stop(self, grace):
        """Send SIGTERM now and SIGKILL after `grace` seconds."""
        await self.signal(signal.SIGTERM)
        end = time.monotonic() + grace
        while self.processes and time.monotonic() < end:
            await asyncio.sleep(0.05)
        descendants.kill_descendants()

    async def sweep(self, job):
        """Kill what an earlier agent of the job left, itself included; delete its directory."""
        descendants.kill_job(job)
        for folder in glob.glob(f"{tempfile.gettempdir()}/jzero-{job}-*"):
            shutil.rmtree(folder, ignore_errors=True)
        self.say(swept=True)

    async def topology(self, _):
        """Send the connections between the GPUs, as nvidia-smi prints them."""

        def ask():
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                return subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=15).stdout
            return ""

        self.say(topology=await asyncio.to_thread(ask))


if __name__ == "__main__":
    descendants.guarded(lambda pulse: asyncio.run(Agent(pulse).run()))
