"""Find the coordinator: a free port on the first host, and an address by which all other hosts reach it.

The agents try real connections. A host's name may resolve to an address that only the host itself can reach, and
networks and firewalls differ by interface.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from jzero.errors import ConfigError
from jzero.launcher.link import Link

Faults = dict[str, list[str]]  # host -> its faults


async def reserve_port(first: Link, port: int) -> tuple[int, Faults]:
    """Have the first host's agent listen on `port` (0: any free one) until the processes start; return the port.

    Raises:
      ConfigError: another program listens there.
    """
    first.tell(listen=port)
    answer = await first.answer("bound", 10)
    if answer.get("error"):
        return port, {first.host: [answer["error"]]}
    if answer["bound"] is None:
        raise ConfigError(
            f"nothing was started: {first.host}: port {port}: {answer['why']}; another job may use it: pass another "
            "--master_port, or none"
        )
    return answer["bound"], {}


async def common_address(
    first: Link, others: Sequence[Link], candidates: Sequence[str], port: int
) -> tuple[str, Faults]:
    """Return the first candidate that all other hosts can connect to, or the hosts' faults."""
    for link in others:
        link.tell(connect=[[address, port] for address in candidates])
    reached = await asyncio.gather(*(link.answer("reached", 10) for link in others))
    for index, address in enumerate(candidates):
        if all(isinstance(r, list) and index in r for r in reached):
            return address, {}
    places = f"{', '.join(candidates)} (port {port}): pass --master_addr"
    deaf = [link.host for link, r in zip(others, reached, strict=True) if not isinstance(r, list) or not r]
    if not deaf or len(deaf) > max(1, len(others) / 2):  # more likely the first host has the fault
        return "", {first.host: [f"{', '.join(deaf) or 'the other hosts'} cannot reach it at {places}"]}
    return "", {host: [f"cannot reach {first.host} at {places}"] for host in deaf}


def candidates(master_addr: str, first_host: str, hello: Mapping[str, Any]) -> list[str]:
    """List the addresses to try: --master_addr alone, or the first host's name, then its interfaces' addresses."""
    own = [address for address in hello["addresses"] if not address.startswith("127.")]
    return [master_addr] if master_addr else list(dict.fromkeys([first_host, *own]))
