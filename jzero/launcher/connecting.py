"""Start an agent on every host, check the hosts, and find the coordinator's address."""

from __future__ import annotations

import asyncio
import os
import resource
import secrets
from collections.abc import Mapping
from typing import Any

from jzero.distributed import handshake
from jzero.distributed.bind_address import VARIABLE, bind_address, is_loopback
from jzero.errors import ConfigError
from jzero.launcher import preflight
from jzero.launcher.coordinator import Faults, bound_to_one, candidates, common_address, reserve_port
from jzero.launcher.job import Job
from jzero.launcher.link import Link
from jzero.launcher.printer import Printer


class Connecting:
    """Start the agents, check the hosts, find the coordinator's address.

    Attributes:
      job: the plan; with `--min_nodes`, without the hosts that have a fault.
      links: host -> its agent.
      address, port: the coordinator's.
      bind: the address on which it listens; "": process 0 decides.
    """

    def __init__(self, job: Job, printer: Printer):
        self.job, self._printer, self.links = job, printer, dict[str, Link]()
        self.address, self.port, self.bind = job.address, job.port, ""
        self._secret = os.environ.get(handshake.VARIABLE, "")
        if not self._secret and (len(job.hosts) == 1 or not job.options.no_ssh):  # else each host has its own command
            self._secret = secrets.token_hex(32)

    @property
    def hosts(self) -> list[str]:
        """The hosts on which this command starts processes."""
        names, o = list(self.job.hosts), self.job.options
        return [names[o.node_rank]] if o.no_ssh else names

    async def run(self) -> None:
        """Start and check the agents; with `--min_nodes`, drop hosts with a fault.

        Raises:
          ConfigError: hosts have faults; the message is a table of them.
        """
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 65536)), hard))  # three pipes for each host
        hellos = await self._greet_all()
        while found := await self._check(hellos):
            table = preflight.table(hellos, found)
            well = [host for host in self.hosts if host not in found]
            if not 0 < self.job.options.min_nodes <= len(well):
                raise ConfigError(f"nothing was started:\n{table}")
            self._printer.put(f"jzero: going on without {', '.join(found)}:\n{table}", 2)
            for host in found:
                if link := self.links.pop(host, None):
                    link.give_up()
            self.job = self.job.without(found)
            hellos = {host: hellos[host] for host in well}

    async def _greet_all(self) -> dict[str, Any]:
        """Return host -> its hello; if one raises, the others end before it is raised again."""
        hosts = self.hosts
        tasks = [asyncio.create_task(self._greet(host)) for host in hosts]
        try:
            return dict(zip(hosts, await asyncio.gather(*tasks), strict=True))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks, timeout=3)

    async def _greet(self, host: str) -> Any:
        """Start a host's agent; return its hello, or {"error": why there is none}."""
        try:
            self.links[host] = await Link.to(self.job, host)
        except OSError as error:
            return {"error": f"{error.filename or 'its agent'}: {error.strerror}"}
        return await self.links[host].answer("hello", 20)

    async def _check(self, hellos: Mapping[str, Any]) -> Faults:
        """Return host -> faults; if there are none, set the coordinator's address and port."""
        o = self.job.options
        wanted = {host: len(ids) * (o.platform == "gpu") for host, ids in self.job.hosts.items()}
        found = preflight.faults(hellos, wanted)
        for link in self.links.values():
            link.tell(know=self._secret)
        self.address, self.port = self.job.address, self.job.port
        if found or (o.no_ssh and o.node_rank != 0):
            return found
        first, *others = [self.links[host] for host in self.hosts]
        self.bind = self._bind_given()
        self.port, found = await reserve_port(first, self.port if o.master_port or o.no_ssh else 0, self.bind)
        if others and not found:
            tries = candidates(o.master_addr, first.host, hellos[first.host])
            self.address, used, found = await common_address(first, others, tries, self.port)
            if not found and not self.bind:
                self.bind = await bound_to_one(first, self.port, used)
        return found

    def _bind_given(self) -> str:
        """Return the address that is known before the hosts are asked; "": none."""
        env, o, one_host = self.job.shared, self.job.options, len(self.job.hosts) == 1
        if o.no_ssh or one_host or VARIABLE in env:  # with no_ssh the first host is this one
            there = one_host and not o.no_ssh and not is_loopback(self.address)  # its names may mean others here
            return "" if there and VARIABLE not in env else bind_address(self.address, one_host, env)
        return ""
