"""Prices one collective: its seconds on the communication stream and the bytes that each GPU sends."""

from __future__ import annotations

import math
from dataclasses import dataclass

from jax.sharding import Mesh

from jzero.errors import ConfigError
from jzero.planner.hlo import Computation, Instruction, Module
from jzero.planner.kernels import UnreadableProgram, at_most
from jzero.planner.rates import Rates
from jzero.planner.replica_groups import group_text, groups

# Seconds per hop of NCCL's rings and trees, protocol LL128 (hwLat in NCCL's src/graph/tuning.cc): NVLink, network.
_RING, _TREE = (1.9e-6, 4.0e-6), (1.25e-6, 8.5e-6)


@dataclass(frozen=True)
class Message:
    """One collective: its kind, seconds, and the bytes that a GPU sends."""

    kind: str
    seconds: float
    wire: float


class Wire:
    """The costs of a module's collectives.

    A ring sends the same bytes over each of its links. Inside a host each GPU sends at `rates.gather` or `.scatter`. A
    group of g GPUs on each of several hosts has one ring through each GPU's network card, so that a GPU sends at the
    slower of its NVLink's rate and g times `rates.hosts`: the bus bandwidth of nccl-tests' PERFORMANCE.md, which
    makes a gather or scatter of S bytes among n GPUs take S (n-1)/n / bandwidth, an all-reduce twice. Latency grows
    by a hop per GPU of a ring, and with the logarithm of the hosts for an all-reduce, which takes a tree.
    """

    def __init__(self, module: Module, rates: Rates, mesh: Mesh | None, gpus_per_node: int):
        if mesh is not None and mesh.size != module.devices:
            raise ConfigError(f"mesh has {mesh.size} devices, but the program was compiled for {module.devices}")
        self.module, self.rates = module, rates
        ids = range(module.devices) if mesh is None else [d.id for d in mesh.devices.flat]
        self.host = [i // gpus_per_node for i in ids]

    def message(self, op: Instruction, scope: Computation) -> Message:
        """Price one collective.

        Raises:
            UnreadableProgram: its groups have a spelling that this reader does not know.
        """
        kind = op.opcode.removesuffix("-start")
        sizes = [scope[name].bytes for name in op.operands]
        size = min(sizes[:2]) if kind == "ragged-all-to-all" else sum(sizes)
        text, pairs = group_text(op)
        try:
            members = groups(text, self.module.devices)
        except ValueError as error:
            raise UnreadableProgram(op, str(error)) from error
        if pairs:
            return self._permute(size, members)
        n = max(map(len, members))
        if n == 1:
            return Message(kind, self.rates.latency, 0.0)
        group = max(members, key=lambda group: (len({self.host[i] for i in group}), len(group)))
        hosts = len({self.host[i] for i in group})
        each = math.ceil(n / hosts)
        if kind in ("all-to-all", "ragged-all-to-all"):
            return self._all_to_all(kind, size, n, each, hosts)
        factor = {"all-gather": n - 1.0, "all-reduce": 2 * (n - 1) / n}.get(kind, (n - 1) / n)
        table = self.rates.gather if kind in ("all-gather", "collective-broadcast") else self.rates.scatter
        inside = at_most(table, each if hosts > 1 else n) if each > 1 else math.inf
        rate = inside if hosts == 1 else min(inside, each * self.rates.hosts)
        return Message(kind, self._latency(kind, n, hosts) + factor * size / rate, factor * size)

    def _latency(self, kind: str, n: int, hosts: int) -> float:
        if hosts == 1:  # measured with its hops
            return self.rates.latency
        if kind == "all-reduce":
            return self.rates.latency + 2 * ((n / hosts - 1) * _TREE[0] + math.log2(hosts) * _TREE[1])
        return self.rates.latency + (n - hosts) * _RING[0] + (hosts - 1) * _RING[1]

    def _permute(self, size: float, pairs: list[list[int]]) -> Message:
        crosses = any(self.host[source] != self.host[target] for source, target in pairs)
        rate = min(self.rates.permute, self.rates.hosts) if crosses else self.rates.permute
        return Message("collective-permute", self.rates.latency + size / rate, size)

    def _all_to_all(self, kind: str, size: float, n: int, each: int, hosts: int) -> Message:
        """Price pairwise messages: those to other hosts go through the GPU's own network card, at the same time."""
        inside = size * (each - 1) / n / at_most(self.rates.gather, each)
        outside = size * (n - each) / n / self.rates.hosts if hosts > 1 else 0.0
        return Message(kind, self.rates.latency + max(inside, outside), size * (n - 1) / n)
