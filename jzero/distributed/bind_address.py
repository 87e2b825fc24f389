"""Choose the address on which process 0 listens: only the one that its peers use.

JAX's coordination service accepts every call that reaches it, so it must not listen where nobody of the job calls.
This module imports no JAX, because the launcher uses it.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Mapping

from jzero.errors import ConfigError

VARIABLE = "JZERO_BIND_ADDRESS"


def bind_address(coordinator: str, one_host: bool, env: Mapping[str, str]) -> str:
    """Return an address of this machine, or "" for all of them.

    Args:
      coordinator: the host that the processes call, a name or an address.
      one_host: whether all processes run on this host.
      env: JZERO_BIND_ADDRESS in it comes first, unless the processes call a loopback address of their one host.

    Raises:
      ConfigError: JZERO_BIND_ADDRESS is not an address.
    """
    if given := env.get(VARIABLE):
        if not _is_address(given):
            raise ConfigError(f"{VARIABLE} = {given!r}: must be an IPv4 or IPv6 address of process 0's host, or ::")
        if not one_host or not (coordinator == "localhost" or is_loopback(coordinator)):
            return given
    try:
        found = {str(info[4][0]) for info in socket.getaddrinfo(coordinator, None, type=socket.SOCK_STREAM)}
    except OSError:
        return ""
    # One IPv4 address, or else one IPv6 address. With several, only the peers know which they use.
    own = sorted(address for address in found if is_own(address))
    usable = [a for a in own if ":" not in a] or own
    if len(usable) != 1:
        return ""
    # A name may mean a loopback address here (Debian's 127.0.1.1) and another address on the other hosts, and some
    # systems set MASTER_ADDR to localhost on the first host alone.
    return "" if not one_host and is_loopback(usable[0]) else usable[0]


def is_loopback(address: str) -> bool:
    """Return whether an address, not a name, is a loopback address."""
    return _is_address(address) and ipaddress.ip_address(address).is_loopback


def is_own(address: str) -> bool:
    """Return whether this machine has the address: a socket binds to no other."""
    with socket.socket(_family(address), socket.SOCK_DGRAM) as s:
        try:
            s.bind((address, 0))
        except OSError:
            return False
    return True


def listen_at(address: str, port: int) -> socket.socket:
    """Return a socket that listens on an address of this machine; on all of them for "" and "::"."""
    if address in ("", "::") and socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=4096)
    return socket.create_server((address, port), family=_family(address), backlog=4096)


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True
