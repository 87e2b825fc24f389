"""Choose hosts and devices: the hostfile, the filters, and the GPUs that are visible on this machine."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from itertools import islice, takewhile
from pathlib import Path

from jzero.distributed.machine import count_gpus
from jzero.distributed.place import host_fault
from jzero.errors import ConfigError

MOST_DEVICES = 1024  # of one host
_NUMBER = r"0*\d{1,4}"  # more digits are neither a device nor a count; Python refuses to convert thousands of them

Devices = list[int | str]  # ids, or UUIDs from CUDA_VISIBLE_DEVICES
Hosts = dict[str, Devices]
LOCAL = "localhost"


def read_hostfile(path: str | os.PathLike[str]) -> dict[str, int]:
    """Read lines `host slots=N` to host -> N, in the file's order; empty lines and # comments are allowed.

    Raises:
      ConfigError: all malformed lines, by number; a file without a host.
    """
    slots: dict[str, int] = {}
    first: dict[str, int] = {}
    problems: list[str] = []
    try:
        lines = Path(path).read_text().splitlines()
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path}: cannot be read: {error}; it must be a text file with lines `HOST slots=N`"
        ) from None
    for number, line in enumerate(lines, 1):
        line = line.partition("#")[0].strip()
        if not line:
            continue
        where = f"{path}, line {number}: {line!r}"
        match = re.fullmatch(r"(\S+)\s+slots\s*=\s*(\S+)", line)
        if not match or not re.fullmatch(r"\d+", match[2], re.ASCII):
            problems.append(f"{where}: must be `HOST slots=N`, as in `worker-1 slots=8`")
        elif not re.fullmatch(_NUMBER, match[2]) or int(match[2]) > MOST_DEVICES:
            problems.append(f"{where}: a host has at most {MOST_DEVICES} slots")
        elif int(match[2]) == 0:
            problems.append(f"{where}: 0 slots; give it at least 1, or remove the line")
        elif fault := host_fault(match[1]):
            problems.append(f"{where}: a host's name {fault}")
        elif match[1] in slots:
            problems.append(f"{where}: {match[1]} is already in line {first[match[1]]}; keep one of them")
        else:
            slots[match[1]], first[match[1]] = int(match[2]), number
    if problems:
        raise ConfigError(*problems)
    if not slots:
        raise ConfigError(f"{path}: contains no host; write lines `HOST slots=N`")
    return slots


def parse_filter(text: str, option: str) -> dict[str, list[int] | None]:
    """Parse `host@host:0,2` to {host: None (all devices) or its ids}; repeated ids count once, as in DeepSpeed.

    Raises:
      ConfigError: malformed parts and names; a host that is named both whole and with ids.

    >>> parse_filter("a@b:1,0@b:1,2", "--include")
    {'a': None, 'b': [0, 1, 2]}
    """
    chosen: dict[str, set[int]] = {}  # the empty set: the whole host
    for part in text.split("@"):
        match = re.fullmatch(r"\s*([^:\s]+|\[[^\]]+\])\s*(?::\s*(\d+(?:\s*,\s*\d+)*))?\s*", part)
        if not match:
            raise ConfigError(f"{option} = {text!r}: {part!r} must be HOST or HOST:ID,ID, parts joined by @")
        if fault := host_fault(match[1]):
            raise ConfigError(f"{option} = {text!r}: {match[1]}: a host's name {fault}")
        numbers = [number.strip() for number in match[2].split(",")] if match[2] else []
        if wrong := [n for n in numbers if not re.fullmatch(_NUMBER, n, re.ASCII) or int(n) >= MOST_DEVICES]:
            raise ConfigError(f"{option} = {text!r}: no device {wrong[0]}; ids are 0 to {MOST_DEVICES - 1}")
        host, ids = match[1], set(map(int, numbers))
        if host in chosen and bool(chosen[host]) != bool(ids):
            raise ConfigError(f"{option} = {text!r}: {host} is named both whole and with devices; keep one of them")
        chosen[host] = chosen.get(host, set()) | ids
    return {host: sorted(ids) or None for host, ids in chosen.items()}


def select_hosts(
    hosts: Mapping[str, Sequence[int | str]], *, include: str = "", exclude: str = "", num_nodes: int = -1,
    num_gpus: int = -1,
) -> Hosts:  # fmt: skip
    """Apply filters or counts to host -> device ids, keeping the order of hosts and ids.

    Raises:
      ConfigError: filters combined with each other or with counts; an unknown host or device; nothing left.
    """
    counts = [f"--{name} {n}" for name, n in (("num_nodes", num_nodes), ("num_gpus", num_gpus)) if n != -1]
    filters = [f"{name} {text}" for name, text in (("--include", include), ("--exclude", exclude)) if text]
    if len(filters) > 1 or (filters and counts):
        raise ConfigError(f"{' and '.join(filters + counts)}: give --include, or --exclude, or --num_nodes/--num_gpus")
    for option, n in (("--num_nodes", num_nodes), ("--num_gpus", num_gpus)):
        if n != -1 and n < 1:
            raise ConfigError(f"{option} = {n}: must be at least 1; leave it out to use all")
    if num_nodes > len(hosts):
        raise ConfigError(f"--num_nodes = {num_nodes}: there are {len(hosts)} hosts: {', '.join(hosts)}")
    first = dict(islice(hosts.items(), None if num_nodes == -1 else num_nodes))
    if problems := [
        f"--num_gpus = {num_gpus}: {host} has {len(ids)}: {_ids(ids)}; ask for fewer, or raise its slots"
        for host, ids in first.items()
        if num_gpus > len(ids)
    ]:
        raise ConfigError(*problems)
    if include or exclude:
        return _filtered(hosts, include or exclude, "--include" if include else "--exclude")
    return {host: list(ids)[: None if num_gpus == -1 else num_gpus] for host, ids in first.items()}


def _filtered(hosts: Mapping[str, Sequence[int | str]], text: str, option: str) -> Hosts:
    """Keep the hosts and devices that a filter includes, or does not exclude."""
    named = parse_filter(text, option)
    problems = [f"no host {host!r}; the hosts are {', '.join(hosts)}" for host in named if host not in hosts]
    problems += [
        f"{host} has no device {id}; it has {_ids(hosts[host])}"
        for host, ids in named.items()
        for id in ids or ()
        if host in hosts and id not in hosts[host]
    ]
    if problems:
        raise ConfigError(*(f"{option} = {text!r}: {problem}" for problem in problems))

    def is_named(host: str, id: int | str) -> bool:
        return host in named and (named[host] is None or id in (named[host] or ()))

    left = {host: [id for id in ids if is_named(host, id) == (option == "--include")] for host, ids in hosts.items()}
    if not any(left.values()):
        raise ConfigError(f"{option} = {text!r}: leaves no device of {', '.join(hosts)}")
    return {host: ids for host, ids in left.items() if ids}


def visible_devices(env: Mapping[str, str]) -> Devices | None:
    """Parse CUDA_VISIBLE_DEVICES to ids or UUIDs in its order, up to the first malformed one, as CUDA reads it.

    None if the variable is not set.
    """
    text = env.get("CUDA_VISIBLE_DEVICES")
    if text is None:
        return None
    parts = takewhile(re.compile(rf"{_NUMBER}|(GPU|MIG)-\S+", re.ASCII).fullmatch, map(str.strip, text.split(",")))
    return [int(part) if part.isdigit() else part for part in parts]


def devices_here(env: Mapping[str, str]) -> Devices:
    """List the visible GPUs of this machine."""
    visible = visible_devices(env)
    # CUDA counts from 0, even in a container with nvidia6 and 7.
    return list(range(count_gpus())) if visible is None else visible


def _ids(ids: Sequence[int | str]) -> str:
    return ", ".join(map(str, ids)) or "none"
