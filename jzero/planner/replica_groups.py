"""Reads which devices take part in a collective."""

import math
import re

import numpy as np

from jzero.planner.hlo import Instruction


def group_text(instruction: Instruction) -> tuple[str, bool]:
    """Return the text of a collective's replica groups or source-target pairs, and whether it is pairs."""
    if pairs := instruction.attribute(r"source_target_pairs=(\{\{.*?\}\})"):
        return pairs, True
    return instruction.attribute(r"replica_groups=(.*?)(?=, \w+=[^(]|$)") or "{}", False


def groups(text: str, devices: int) -> list[list[int]]:
    """Parse replica groups, in any form that XLA prints, into lists of device numbers (positions in the mesh)."""
    text = text.strip()
    if text == "{}":
        return [list(range(devices))]
    if text.startswith("{{"):  # {{0,1},{2,3}}
        return [_ints(group) for group in re.findall(r"\{([\d,\s]+)\}", text)]
    if iota := re.match(r"(\[[\d,]+\])<=(\S+)$", text):  # [4,2]<=[2,4]T(1,0)
        return _iota(iota[2]).reshape(_ints(iota[1])).tolist()
    if named := re.match(r"mesh\[(.*?)\](?:, device_ids=\((.*?)\))? \{(.*?)\}$", text):  # mesh['a'=2,'b'=4] {'b'}
        sizes = {name: int(size) for name, size in re.findall(r"([^,=]+)=(\d+)", named[1])}
        ids = _iota(f"[{devices}]") if named[2] is None else _iota(named[2])
        shape: list[int] = []  # every axis, divided where a group takes part of it: 'a':(pre)size
        inside: list[int] = []  # dimensions of `shape` that vary inside a group
        parts = [re.fullmatch(r"(.*?)(?::\((\d+)\)(\d+))?", part.strip()) for part in named[3].split(",") if part]
        for name, size in sizes.items():
            cuts = sorted((int(p[2] or 1), int(p[3] or size)) for p in parts if p and p[1] == name)
            done = 1
            for before, taken in cuts:
                shape += [before // done, taken]
                inside.append(len(shape) - 1)
                done = before * taken
            shape.append(size // done)
        outside = [d for d in range(len(shape)) if d not in inside]
        return ids.reshape(shape).transpose(outside + inside).reshape(-1, math.prod(shape[d] for d in inside)).tolist()
    raise ValueError(f"replica_groups have an unknown form: {text[:120]!r}")


def _iota(text: str) -> np.ndarray:
    """Parse device numbers from ``[8]``, ``[2,4]T(1,0)`` or a plain list ``0,2,1,3``."""
    if counted := re.match(r"\[([\d,]+)\](?:T\(([\d,]+)\))?$", text):
        dims = _ints(counted[1])
        ids = np.arange(math.prod(dims)).reshape(dims)
        return (ids.transpose(_ints(counted[2])) if counted[2] else ids).reshape(-1)
    return np.array(_ints(text))


def _ints(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


def longest_chain(pairs: list[list[int]]) -> int:
    """Return the size of the largest set of devices that the pairs connect."""
    member: dict[int, set[int]] = {}
    for pair in pairs:
        source, target = pair
        joined = member.get(source, {source}) | member.get(target, {target})
        member |= dict.fromkeys(joined, joined)  # every device of a connected set maps to the whole set
    return max((len(group) for group in member.values()), default=1)
