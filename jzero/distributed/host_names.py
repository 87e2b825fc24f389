"""Names of hosts: which are allowed, and what Slurm's node lists contain."""

from __future__ import annotations

import re

from jzero.errors import ConfigError

MOST_HOSTS = 65536


def host_fault(name: str) -> str:
    """Return why a name cannot be a host's, as the rest of a sentence; "" if it can.

    >>> host_fault("gpu-1.example.com"), host_fault("worker..1"), host_fault("-oProxyCommand=sh")
    ('', 'must have 1 to 63 characters between its dots', 'cannot begin with -')
    """
    host = name.rpartition("@")[2]  # as in root@worker-1
    if name.startswith("-") or host.startswith("-"):  # ssh and srun would read it as an option
        return "cannot begin with -"
    if not host or len(host) > 253 or not host.isprintable() or " " in host:
        return "must have 1 to 253 characters, without spaces and control characters"
    try:
        host.encode("idna")  # as getaddrinfo does, which raises a UnicodeError and no OSError
    except UnicodeError:
        return "must have 1 to 63 characters between its dots"
    return ""


def slurm_hosts(nodelist: str) -> list[str]:
    """List the hosts of a Slurm node list.

    Raises:
      ConfigError: a range that is not one, or more than MOST_HOSTS hosts.

    >>> slurm_hosts("gpu[08-10,12],login1")
    ['gpu08', 'gpu09', 'gpu10', 'gpu12', 'login1']
    """
    hosts: list[str] = []
    for part in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", nodelist):
        names = [""]
        for text, inside in re.findall(r"([^\[]+)|\[([^\]]*)\]", part):
            pieces = [text] if text else _numbers(inside)
            if len(hosts) + len(names) * len(pieces) > MOST_HOSTS:
                raise ConfigError(f"Slurm's node list {nodelist!r}: has more than {MOST_HOSTS} hosts")
            names = [name + piece for name in names for piece in pieces]
        hosts += names
    return hosts


def _numbers(text: str) -> list[str]:
    """Expand ranges: `08-10,12` -> 08, 09, 10, 12."""
    numbers: list[str] = []
    for piece in text.split(","):
        match = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", piece, re.ASCII)
        if not match or int(match[2] or match[1]) - int(match[1]) >= MOST_HOSTS:
            raise ConfigError(f"Slurm's node list {f'[{text}]'!r}: {piece!r} must be a number or a range such as 08-10")
        numbers += [f"{n:0{len(match[1])}}" for n in range(int(match[1]), int(match[2] or match[1]) + 1)]
    return numbers
