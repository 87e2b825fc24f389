"""`jzero plan --fit`: the smallest cluster of a kind of GPU on which a model trains."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from typing import Any

from jzero.config.sizes import ACCUM, MICRO
from jzero.display.slow_work import slow_work
from jzero.errors import ConfigError
from jzero.planner import choices as keys
from jzero.planner.bounds import Bounds
from jzero.planner.choices import Choice, Space, is_open, merged, value_at
from jzero.planner.gpus import gpu
from jzero.planner.outcomes import Outcome, Pool, Task

MOST_NODES, MOST_STAGES = 2048, 64
TRIED = 3  # of the leanest choices for one number of GPUs


def smallest(
    task: Task, raw: Mapping[str, Any], seen: Callable[[Outcome], None] = lambda found: None
) -> tuple[Task, Outcome]:
    """Find the smallest number of GPUs that fits, and a configuration that does.

    A host is filled before a second one is taken: 1, 2, 4, ... GPUs of one host, then any number of whole hosts. The
    formula rejects, the rest is compiled; state in host memory counts only if the config asks for it.

    Args:
      task: its `gpus_per_node` fills a host; `nodes` does not matter.
      raw: the config's dict, as for `search`.
      seen: called with every outcome.

    Raises:
      ConfigError: no global batch, or not even `MOST_NODES` hosts are enough.
    """
    with Pool() as pool, slow_work("looking for the smallest cluster"):

        def fits(nodes: int, each: int) -> Outcome | None:
            there = replace(task, nodes=nodes, gpus_per_node=each)
            leanest = list(_leanest(there, raw))
            for future in [pool.submit(there, merged(raw, choice), choice) for choice in leanest]:
                try:
                    found = future.result()
                except BrokenProcessPool:
                    raise ConfigError(
                        f"--fit: a process that compiled for {there.gpus} GPUs was killed; free memory on this machine"
                    ) from None
                seen(found)
                if found.fits:
                    return found
            return None

        powers = (2**i for i in range(task.gpus_per_node.bit_length()))
        for each in dict.fromkeys([*(n for n in powers if n < task.gpus_per_node), task.gpus_per_node]):
            if found := fits(1, each):
                return replace(task, nodes=1, gpus_per_node=each), found
        hosts, low, best = _hosts(task, raw), -1, None
        last = len(hosts) - 1
        for high in dict.fromkeys(min(2**i - 1, last) for i in range(len(hosts).bit_length() + 1) if hosts):
            if best := fits(hosts[high], task.gpus_per_node):
                break
            low = high
        if best is None:
            most = f"{(hosts[-1] if hosts else 1) * task.gpus_per_node:,} x {gpu(task.gpu).description}"
            raise ConfigError(
                f"{task.model}: does not fit {most} either, the most whose replicas divide train_batch_size; a larger "
                "one, a shorter sequence or state in host memory may help"
            )
        while high - low > 1:
            middle = (low + high) // 2
            if better := fits(hosts[middle], task.gpus_per_node):
                high, best = middle, better
            else:
                low = middle
        return replace(task, nodes=hosts[high]), best


def _hosts(task: Task, raw: Mapping[str, Any]) -> list[int]:
    """List the numbers of hosts, from two, whose replicas can divide the global batch."""
    rows, each = Space(raw, gpu(task.gpu), 1, 1, 0).rows, task.gpus_per_node
    divisors = [n for n in range(1, rows + 1) if rows % n == 0]
    given = value_at(raw, keys.PIPE)
    stages = (given,) if isinstance(given, int) and given > 0 else range(1, MOST_STAGES + 1)
    counts = {n * s for n in divisors for s in stages if n * s % each == 0}
    return sorted(count // each for count in counts if each < count <= MOST_NODES * each)


def _leanest(task: Task, raw: Mapping[str, Any]) -> Iterator[Choice]:
    """Yield the choices that need the least memory, by the formula, of those that it does not reject."""
    model, shapes = task.named()
    bounds = Bounds(raw, model, shapes, task.gpu, task.gpus, task.gpus_per_node, task.rates)
    most, needs = gpu(task.gpu).room(task.gpus).most, {}
    for choice in Space(raw, gpu(task.gpu), task.gpus, task.gpus_per_node, bounds.layers).choices():
        if choice.get(keys.POLICY, "full") != "full" or choice.get(keys.CHUNKS, 1) > 1:
            continue
        lean = choice | ({keys.UNROLL: False} if is_open(raw, keys.UNROLL) else {})
        key = tuple(value for name, value in lean.items() if name not in (MICRO, ACCUM))
        try:
            needs[key] = bounds.memory(choice), lean  # the last has the smallest micro-batch
        except ConfigError:  # the choice fits the model or itself not at all
            continue
    ranked = sorted(needs.values(), key=lambda item: item[0])
    yield from (lean for need, lean in ranked[:TRIED] if need <= most)
