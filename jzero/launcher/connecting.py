"""Start an agent on every host, find the hosts' faults before any script starts, and find the coordinator's address.

The agents try real connections. A host's name may resolve to an address that only the host itself can reach, and
networks and firewalls differ by interface.
"""

from __future__ import annotations

import asyncio
import os
import resource
import secrets
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import TypedDict

from jzero.distributed import connections
from jzero.errors import ConfigError
from jzero.launcher.job import Job
from jzero.launcher.link import Link

Faults = dict[str, list[str]]  # host -> its faults; only hosts that have some
SAME = (  # versions (nccl: of the file that JAX loads) that must be the same on all hosts
    "python", "jzero", "jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin", "nvidia-nccl-cu12",
    "nvidia-nccl-cu13", "nccl", "driver",
)  # fmt: skip


class Hello(TypedDict, total=False):
    """The words of an agent about its host; `error` alone if it says nothing."""

    versions: dict[str, str]
    gpus: int
    models: list[str]  # of the GPUs
    addresses: list[str]  # of the interfaces, loopback last
    nccl_path: str  # of the NCCL that JAX would load; "": none
    shared_memory: int  # free bytes in /dev/shm
    topology: str  # of several GPUs, for `jzero report`
    error: str


class Connecting:
    """A job's agents, while they start and afterwards.

    Attributes:
      job: the plan; with `--min_nodes`, without the hosts that have a fault.
      links: host -> its agent.
      address, port: the coordinator's.
      bind: the address on which it listens; "": process 0 decides.
      secret: the job's; "": none.
    """

    def __init__(self, job: Job, id: str):
        self.job, self._id, self.links = job, id, dict[str, Link]()
        self.address, self.port, self.bind = job.address, job.port, ""
        self.secret = os.environ.get(connections.SECRET, "")
        if not self.secret and (len(job.hosts) == 1 or not job.options.no_ssh):  # else each host has its own command
            self.secret = secrets.token_hex(32)

    async def run(self, say: Callable[[str], None]) -> None:
        """Start and check the agents; with `--min_nodes`, drop hosts with a fault, and say so.

        Raises:
          ConfigError: hosts have faults; the message is a table of them.
        """
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 65536)), hard))  # three pipes for each host
        hellos = await self._greet_all()
        while found := await self._check(hellos):
            rows = host_table(hellos, found)
            well = [host for host in self.job.hosts_here if host not in found]
            if not 0 < self.job.options.min_nodes <= len(well):
                raise ConfigError(f"nothing was started:\n{rows}")
            say(f"going on without {', '.join(found)}:\n{rows}")
            for host in found:
                if link := self.links.pop(host, None):
                    link.give_up()
            self.job = self.job.without(found)
            hellos = {host: hellos[host] for host in well}

    async def _greet_all(self) -> dict[str, Hello]:
        """Return host -> its hello; if one raises, the others end before it is raised again."""
        hosts = self.job.hosts_here
        tasks = [asyncio.create_task(self.greet(host)) for host in hosts]
        try:
            return dict(zip(hosts, await asyncio.gather(*tasks), strict=True))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks, timeout=3)

    async def greet(self, host: str) -> Hello:
        """Start a host's agent; return its hello, or {"error": why there is none}."""
        try:
            self.links[host] = await Link.to(self.job, host, self._id)
        except OSError as error:
            return {"error": f"{error.filename or 'its agent'}: {error.strerror}"}
        return await self.links[host].answer("hello", 20)

    async def _check(self, hellos: Mapping[str, Hello]) -> Faults:
        """Return host -> faults; if there are none, set the coordinator's address and port."""
        o = self.job.options
        wanted = {host: len(ids) * (o.platform == "gpu") for host, ids in self.job.hosts.items()}
        found = faults(hellos, wanted)
        for link in self.links.values():
            link.tell(know=self.secret)
        self.address, self.port = self.job.address, self.job.port
        if found or (o.no_ssh and o.node_rank != 0):
            return found
        first, *others = [self.links[host] for host in self.job.hosts_here]
        self.bind = self._bind_given()
        self.port, found = await reserve_port(first, self.port if o.master_port or o.no_ssh else 0, self.bind)
        if others and not found:
            interfaces = [a for a in hellos[first.host]["addresses"] if not a.startswith("127.")]
            tries = [o.master_addr] if o.master_addr else list(dict.fromkeys([first.host, *interfaces]))
            self.address, used, found = await common_address(first, others, tries, self.port)
            if not found and not self.bind:
                self.bind = await bound_to_one(first, self.port, used)
        return found

    def _bind_given(self) -> str:
        """Return the address that is known before the hosts are asked; "": none."""
        env, o, one_host = self.job.shared, self.job.options, len(self.job.hosts) == 1
        # The names of another host may mean other addresses here. With no_ssh the first host is this one.
        here = o.no_ssh or (one_host and connections.is_loopback(self.address))
        known = here or connections.BIND_ADDRESS in env
        return connections.bind_address(self.address, one_host, env) if known else ""


async def reserve_port(first: Link, port: int, bind: str) -> tuple[int, Faults]:
    """Have the first host's agent listen on `port` (0: any free one) until the processes start; return the port.

    Args:
      bind: its address there; "": all of them.

    Raises:
      ConfigError: another program listens there.
    """
    answer = await first.ask("bound", 10, listen=[port, bind])
    if "error" in answer:
        return port, {first.host: [answer["error"]]}
    bound, why = answer
    if bound is None:
        at = f" at {bind}" if bind else ""
        raise ConfigError(
            f"nothing was started: {first.host}: port {port}{at}: {why}; another job may use it: pass another "
            "--master_port, or none"
        )
    return bound, {}


async def common_address(
    first: Link, others: Sequence[Link], candidates: Sequence[str], port: int
) -> tuple[str, set[str], Faults]:
    """Return the first candidate that all other hosts reach, with the addresses behind it, or the hosts' faults."""
    places = [[address, port] for address in candidates]
    answers = await asyncio.gather(*(link.ask("reached", 10, connect=places) for link in others))
    reached = [dict(answer) if isinstance(answer, list) else {} for answer in answers]
    for index, address in enumerate(candidates):
        if all(index in r for r in reached):
            return address, {r[index] for r in reached}, {}
    at = f"{', '.join(candidates)} (port {port}): pass --master_addr"
    deaf = [link.host for link, r in zip(others, reached, strict=True) if not r]
    if not deaf or len(deaf) > max(1, len(others) / 2):  # more likely the first host has the fault
        return "", set(), {first.host: [f"{', '.join(deaf) or 'the other hosts'} cannot reach it at {at}"]}
    return "", set(), {host: [f"cannot reach {first.host} at {at}"] for host in deaf}


async def bound_to_one(first: Link, port: int, addresses: set[str]) -> str:
    """Have the first agent listen on no more than the address that all other hosts use; return it, or "".

    "" if they use several, or one that the first host does not have, because a router in between translates it.
    """
    if len(addresses) == 1:
        (address,) = addresses
        answer = await first.ask("bound", 10, listen=[port, address])
        if "error" not in answer and answer[0]:
            return address
    return ""


def faults(hellos: Mapping[str, Hello], wanted: Mapping[str, int]) -> Faults:
    """Return host -> its faults, without the hosts that have none.

    Args:
      hellos: host -> its agent's hello, or {"error": why it does not answer}.
      wanted: host -> the number of GPUs it must have.
    """
    found = defaultdict(list, {host: [hello["error"]] for host, hello in hellos.items() if "error" in hello})
    heard = {host: hello for host, hello in hellos.items() if "error" not in hello}
    for name in SAME:
        versions = {host: hello["versions"].get(name, "none") for host, hello in heard.items()}
        if len(set(versions.values())) > 1:
            usual = Counter(versions.values()).most_common(1)[0][0]  # in a tie, the first host's
            for host, version in versions.items():
                if version != usual:
                    found[host].append(f"{name} {version}, elsewhere {usual}: install the same")
    for host, hello in heard.items():
        if "jax" not in hello["versions"]:
            python = hello["versions"]["python"]
            found[host].append(f"no jax for Python {python}: install jzero there, at the same path")
        if hello["gpus"] < wanted[host]:
            few = f"{hello['gpus']} GPUs, {wanted[host]} are wanted"
            found[host].append(f"{few}: correct --num_gpus, CUDA_VISIBLE_DEVICES or its slots")
    return dict(found)


def host_table(hellos: Mapping[str, Hello], found: Mapping[str, list[str]]) -> str:
    """Draw one row per host: versions, devices and faults."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    used = [n for n in SAME if any(n in hello.get("versions", {}) for hello in hellos.values())]
    rows = Table(box=box.ASCII2, title="hosts", title_justify="left")
    for name in ("host", *used, "GPUs", "faults"):
        rows.add_column(name, overflow="fold")
    for host, hello in hellos.items():
        rows.add_row(
            host,
            *(hello.get("versions", {}).get(name, "") for name in used),
            " ".join(map(str, [hello.get("gpus", ""), *hello.get("models", [])])),
            "; ".join(found.get(host, [])) or "-",
        )
    # Not the terminal's width: a table in a log file, or read over ssh, must be complete.
    console = Console(width=max(120, min(200, 60 + 12 * len(used))), color_system=None, markup=False, emoji=False)
    with console.capture() as capture:
        console.print(rows)
    return capture.get()
