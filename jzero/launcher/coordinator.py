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


async def reserve_port(first: Link, port: int, bind: str) -> tuple[int, Faults]:
    """Have the first host's agent listen on `port` (0: any free one) until the processes start; return the port.

    Args:
      bind: its address there; "": all of them.

    Raises:
      ConfigError: another program listens there.
    """
    first.tell(listen=[port, bind])
    answer = await first.answer("bound", 10)
    if answer.get("error"):
        return port, {first.host: [answer["error"]]}
    if answer["bound"] is None:
        at = f" at {bind}" if bind else ""
        raise ConfigError(
            f"nothing was started: {first.host}: port {port}{at}: {answer['why']}; another job may use it: pass "
            "another --master_port, or none"
        )
    return answer["bound"], {}


async def common_address(
    first: Link, others: Sequence[Link], candidates: Sequence[str], port: int
) -> tuple[str, set[str], Faults]:
    """Return the first candidate that all other hosts reach, with the addresses behind it, or the hosts' faults."""
    for link in others:
        link.tell(connect=[[address, port] for address in candidates])
    answers = await asyncio.gather(*(link.answer("reached", 10) for link in others))
    reached = [dict(answer) if isinstance(answer, list) else {} for answer in answers]
    for index, address in enumerate(candidates):
        if all(index in r for r in reached):
            return address, {r[index] for r in reached}, {}
    places = f"{', '.join(candidates)} (port {port}): pass --master_addr"
    deaf = [link.host for link, r in zip(others, reached, strict=True) if not r]
    if not deaf or len(deaf) > max(1, len(others) / 2):  # more likely the first host has the fault
        return "", set(), {first.host: [f"{', '.join(deaf) or 'the other hosts'} cannot reach it at {places}"]}
    return "", set(), {host: [f"cannot reach {first.host} at {places}"] for host in deaf}


async def bound_to_one(first: Link, port: int, addresses: set[str]) -> str:
    """Have the first agent listen on no more than the address that all other hosts use; return it, or "".

    "" if they use several, or one that the first host does not have, because a router in between translates it.
    """
    if len(addresses) == 1:
        (address,) = addresses
        first.tell(listen=[port, address])
        if (await first.answer("bound", 10)).get("bound"):
            return address
    return ""


def candidates(master_addr: str, first_host: str, hello: Mapping[str, Any]) -> list[str]:
    """List the addresses to try: --master_addr alone, or the first host's name, then its interfaces' addresses."""
    own = [address for address in hello["addresses"] if not address.startswith("127.")]
    return [master_addr] if master_addr else list(dict.fromkeys([first_host, *own]))
