"""`jzero plan --search`, the fastest configurations that fit a cluster; and `--fit`, the smallest cluster that fits.

The search is by branch and bound.

A choice is dropped without compiling it if its model state alone does not fit; if its products at the full rate take
longer than the fastest step found; or if compiled choices of its kind (pipeline or not, what it recomputes) predict
that it does not fit or is slower: activations grow with the micro-batches that a device keeps, and the share of the
time that is not products grows with the number of micro-batches. The rest is compiled, the most promising first.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from functools import cache

from jzero.config.sizes import ACCUM, MICRO
from jzero.display.slow_work import slow_work
from jzero.display.text_table import size_text
from jzero.errors import ConfigError
from jzero.planner import candidates as keys
from jzero.planner.candidates import Bounds, Candidate, SearchSpace, Task, is_open, lines, value_at
from jzero.planner.estimates import Estimate, Pool, outcome
from jzero.planner.gpus import Cluster

EQUAL = 0.03  # two estimates that differ by less are called equal
MOST_NODES, MOST_STAGES = 2048, 64
TRIED = 3  # of the leanest choices for one number of GPUs
PREDICTION_ERROR = 0.05  # of the memory: how far a prediction from other choices may be off
INVALID, STATE, SLOW, PREDICTED, SMALLER, LATE = (
    "not for this model", "model state too large", "slower even at the full rate of matmuls",
    "predicted too large or too slow, from the compiled configs", "a larger micro-batch fits", "no time left",
)  # fmt: skip


@dataclass(frozen=True)
class Search:
    """The result of a search.

    Attributes:
      outcomes: all that was compiled: those that fit first, the fastest first.
      dropped: {reason: number of choices} that were not compiled.
      seconds: of the search.
      problem: of the first choice that the model or the config refused.
    """

    task: Task
    outcomes: tuple[Estimate, ...]
    dropped: Mapping[str, int]
    seconds: float
    problem: str = ""

    @property
    def best(self) -> Estimate:
        """The fastest that fits.

        Raises:
          ConfigError: nothing fits.
        """
        for found in self.outcomes:
            if found.fits and found.step_s:
                return found
        raise ConfigError(nothing_fits(self))

    @property
    def frontier(self) -> tuple[Estimate, ...]:
        """The outcomes that no other beats in both memory and speed, the fastest first."""
        found: list[Estimate] = []
        for one in sorted((o for o in self.outcomes if o.step_s), key=lambda o: (o.step_s, o.peak_bytes)):
            found += [one] * (not found or one.peak_bytes < found[-1].peak_bytes)
        return tuple(found)


def search_configs(
    task: Task, *, minutes: float = 10.0, every: bool = False, seen: Callable[[Estimate], None] = lambda found: None
) -> Search:
    """Find the fastest configurations that fit.

    Args:
      minutes: at most, for the compilations.
      every: drop no choice that needs less memory than all faster ones, for a frontier.
      seen: called with every outcome as it comes.

    Raises:
      ConfigError: no global batch, or no choice that fits the config, the model and the GPUs.
    """
    began = time.monotonic()
    bounds = Bounds(task)
    choices = _OpenChoices(bounds, list(bounds.space.choices()), task.cluster.usable.most, every)
    if not choices.open:
        raise ConfigError(
            f"train_batch_size = {bounds.space.rows}: no mesh and micro-batch of {task.cluster.gpus} GPUs divides it"
        )
    with Pool() as pool, slow_work("searching"):
        running: dict[Future[Estimate], Candidate] = {}
        alive = True
        while True:
            in_time = alive and time.monotonic() < began + 60 * minutes
            while in_time and len(running) < pool.size and (choice := choices.next(list(running.values()))):
                running[pool.submit(outcome, task, choice)] = choice
            if not running:
                break
            done, _ = wait(running, max(0.0, began + 60 * minutes - time.monotonic()), FIRST_COMPLETED)
            if not done:
                break
            for future in done:
                choice = running.pop(future)
                try:
                    found = future.result()
                except BrokenProcessPool:  # the system ran out of memory, for example
                    found, alive = Estimate(choice, problem="the process that compiled it was killed"), False
                choices.learn(found)
                seen(found)
    choices.dropped[LATE] += len(choices.open) + len(running)
    outcomes = sorted(choices.found, key=lambda o: (not o.fits, o.step_s or 1e9, o.peak_bytes))
    dropped = {reason: count for reason, count in choices.dropped.items() if count}
    return Search(task, tuple(outcomes), dropped, time.monotonic() - began, choices.problem)


class _OpenChoices:
    """The open choices, and what the compiled ones tell about them.

    Attributes:
      open: not compiled and not dropped.
      found: what was compiled.
      dropped: {reason: count}.
      activations: {kind: bytes per row of a micro-batch that the device keeps}.
    """

    def __init__(self, bounds: Bounds, choices: list[Candidate], most: int, every: bool):
        self.bounds, self.open, self.most, self.every = bounds, choices, most, every
        self.found: list[Estimate] = []
        self.dropped: Counter[str] = Counter()
        self.activations: dict[tuple[object, ...], float] = {}
        self.problem = ""  # of the first choice that is invalid
        self.wider = self._wider(list(choices))

    def next(self, running: list[Candidate]) -> Candidate | None:
        """Take the most promising open choice; None if there is none before one that runs tells more."""
        while True:
            self._drop()
            probing = {self._kind(choice) for choice in running} - self.activations.keys()
            ready = [
                c
                for c in self.open
                if self._kind(c) not in probing and self._peak(c) <= (1 + PREDICTION_ERROR) * self.most
            ]
            if ready:
                chosen = min(ready, key=self._promise)
                self.open.remove(chosen)
                return chosen
            if running:
                return None
            self._close(PREDICTED, lambda _: True)
            more = next(self.wider, None)
            if more is None:
                return None
            self.open = more

    def learn(self, found: Estimate) -> None:
        self.found.append(found)
        choice = found.choice
        if not found.peak_bytes:
            return
        kind, rows = self._kind(choice), self._micro(choice) * self.bounds.pipeline(choice)[0]
        beyond = max(0, found.peak_bytes - self.bounds.memory(choice)) / rows
        self.activations[kind] = min(beyond, self.activations.get(kind, beyond))
        if found.fits and not self.every and self.bounds.stages(choice) == 1:
            self._close(SMALLER, lambda c: _same(c, choice) and self._micro(c) < self._micro(choice))
        if not found.fits:
            self._close(PREDICTED, lambda c: _same(c, choice) and self._micro(c) > self._micro(choice))

    def _wider(self, first: list[Candidate]) -> Iterator[list[Candidate]]:
        """Yield choices that give up speed for memory: a scanned stack, then state in host memory.

        The scan comes where nothing fits, or what fits recomputes more; the others where nothing fits.
        """
        raw = self.bounds.raw
        if is_open(raw, keys.UNROLL):
            fastest = min(self.fitting(), key=lambda o: o.step_s or 0, default=None)
            policy = None if self.every or fastest is None else fastest.choice.get(keys.POLICY)
            less = keys.POLICIES[: keys.POLICIES.index(policy)] if policy else keys.POLICIES
            yield [c | {keys.UNROLL: False} for c in first if c.get(keys.POLICY, "none") in less]
        for key, least in ((keys.OFFLOAD_OPTIMIZER, 1), (keys.OFFLOAD_PARAM, 3)):
            if is_open(raw, key) and (self.every or not self.fitting()):
                first = [wide | {key: "cpu"} for choice in first if (wide := self._at_stage(choice, least))]
                yield first

    def _at_stage(self, choice: Candidate, least: int) -> Candidate | None:
        """Return the choice if its stage is high enough; on one replica every stage partitions the same: raise it."""
        stage = choice.get(keys.STAGE, value_at(self.bounds.raw, keys.STAGE) or 0)
        if stage >= least:
            return choice
        return choice | {keys.STAGE: least} if keys.STAGE in choice and choice.get(keys.ZERO) == 1 else None

    def fitting(self) -> list[Estimate]:
        return [found for found in self.found if found.fits]

    # ---------------------------------------------------------------- parts of it

    def _promise(self, choice: Candidate) -> tuple[float, ...]:
        """Sort first what should be fast, then large micro-batches and low stages.

        Of a kind that nothing is known of, small micro-batches and high stages come first, which should fit.
        """
        micro, stage = self._micro(choice), choice.get(keys.STAGE, 0)
        known = self._kind(choice) in self.activations
        return round(self._seconds(choice), 3), *((-micro, stage) if known else (micro, -stage))

    def _drop(self) -> None:
        """Close the choices that are known to be too large or too slow."""
        self._close(INVALID, self._is_invalid)
        self._close(STATE, lambda c: self.bounds.memory(c) > self.most)
        if self.every:
            self._close(PREDICTED, self._is_beaten)
        elif fastest := min((o.step_s for o in self.fitting() if o.step_s), default=None):
            self._close(SLOW, lambda c: self.bounds.seconds(c) > fastest)
            self._close(PREDICTED, lambda c: self._seconds(c) > fastest)

    def _is_beaten(self, choice: Candidate) -> bool:
        seconds, peak = self._seconds(choice), self._peak(choice)
        return any(o.step_s and o.step_s < seconds and o.peak_bytes < peak for o in self.found)

    def _close(self, reason: str, drop: Callable[[Candidate], bool]) -> None:
        kept = [choice for choice in self.open if not drop(choice)]
        self.dropped[reason] += len(self.open) - len(kept)
        self.open = kept

    def _is_invalid(self, choice: Candidate) -> bool:
        """Return whether a choice contradicts itself or the model."""
        try:
            self.bounds.memory(choice)
        except ConfigError as error:
            self.problem = self.problem or str(error)
            return True
        return False

    def _peak(self, choice: Candidate) -> float:
        beyond = self.activations.get(self._kind(choice), 0.0)
        return self.bounds.memory(choice) + beyond * self._micro(choice) * self.bounds.pipeline(choice)[0]

    def _seconds(self, choice: Candidate) -> float:
        """Predict the time, from the fastest of its kind with micro-batches as large, which waste the least."""
        bound, micro = self.bounds.seconds(choice), self._micro(choice)
        shares = [
            self.bounds.seconds(o.choice) / o.step_s
            for o in self.found
            if o.step_s and self._alike(o.choice, choice) and self._micro(o.choice) >= micro
        ]
        return bound / max(shares, default=1.0)

    def _kind(self, choice: Candidate) -> tuple[object, ...]:
        """Return what choices have in common that are alike in activations and efficiency."""
        names = (keys.POLICY, keys.UNROLL, keys.OFFLOAD_OPTIMIZER, keys.OFFLOAD_PARAM)
        return self.bounds.stages(choice) > 1, *(choice.get(key) for key in names)

    def _alike(self, one: Candidate, other: Candidate) -> bool:
        """Return whether products take the same share of the time; what communicates depends on the stage."""
        stages = self.bounds.stages(one) == 1 and one.get(keys.STAGE) != other.get(keys.STAGE)
        return self._kind(one) == self._kind(other) and not stages

    def _micro(self, choice: Candidate) -> int:
        return choice.get(MICRO) or value_at(self.bounds.raw, MICRO)


def _same(one: Candidate, other: Candidate) -> bool:
    """Return whether two choices differ in the batch sizes alone."""
    return all(one.get(key) == value for key, value in other.items() if key not in (MICRO, ACCUM))


def nothing_fits(found: Search) -> str:
    """Return one line: what was tried, and what needs the least memory."""
    tried = [one for one in found.outcomes if one.peak_bytes]
    none = f"no configuration of {found.task.model} fits {found.task.cluster}"
    if not tried:
        problem = next((one.problem for one in found.outcomes if one.problem), found.problem)
        why = f": {problem}" if problem else f" ({', '.join(found.dropped)})"
        return f"{none}{why}; `--fit` finds the smallest cluster"
    least = min(tried, key=lambda one: one.peak_bytes)
    if least.fits:
        return f"no configuration has an estimate of its time: {least.problem}"
    return (
        f"{none}: the smallest needs {size_text(least.peak_bytes)} of "
        f"{size_text(least.usable_bytes)} per GPU ({lines(least.choice)}); `--fit` finds the smallest cluster"
    )


def smallest(task: Task, seen: Callable[[Estimate], None] = lambda found: None) -> tuple[Task, Estimate]:
    """Find the smallest number of GPUs that fits, and a configuration that does.

    A host is filled before a second one is taken: 1, 2, 4, ... GPUs of one host, then any number of whole hosts. The
    formula rejects, the rest is compiled; state in host memory counts only if the config asks for it.

    Args:
      task: its cluster's `gpus_per_node` fill a host; `nodes` does not matter.
      seen: called with every outcome.

    Raises:
      ConfigError: no global batch, or not even `MOST_NODES` hosts are enough.
    """
    kind, whole = task.cluster.gpu, task.cluster.gpus_per_node
    with Pool() as pool, slow_work("looking for the smallest cluster"):

        @cache
        def leanest(cluster: Cluster) -> Estimate:
            """Compile the leanest choices until one fits; the estimate of no program fits nothing."""
            there = replace(task, cluster=cluster)
            for future in [pool.submit(outcome, there, choice) for choice in _leanest(there)]:
                try:
                    found = future.result()
                except BrokenProcessPool:
                    raise ConfigError(
                        f"--fit: a process that compiled for {cluster.gpus} GPUs was killed; "
                        "free memory on this machine"
                    ) from None
                seen(found)
                if found.fits:
                    return found
            return Estimate({})

        powers = (2**i for i in range(whole.bit_length()))
        for each in dict.fromkeys([*(n for n in powers if n < whole), whole]):
            if leanest(there := Cluster(kind, 1, each)).fits:
                return replace(task, cluster=there), leanest(there)
        hosts = [Cluster(kind, nodes, whole) for nodes in _hosts(task)]
        doubled = dict.fromkeys(min(2**i, len(hosts)) - 1 for i in range(len(hosts).bit_length() + 1) if hosts)
        high = next((i for i in doubled if leanest(hosts[i]).fits), None)
        if high is None:
            most = f"{hosts[-1].gpus if hosts else whole:,} x {task.cluster.card.description}"
            raise ConfigError(
                f"{task.model}: does not fit {most} either, the most whose replicas divide train_batch_size; a larger "
                "one, a shorter sequence or state in host memory may help"
            )
        low = max((i + 1 for i in doubled if i < high), default=0)
        there = hosts[bisect_left(hosts, True, low, high, key=lambda cluster: leanest(cluster).fits)]
        return replace(task, cluster=there), leanest(there)


def _hosts(task: Task) -> list[int]:
    """List the numbers of hosts, from two, whose replicas can divide the global batch."""
    rows, each = SearchSpace(task.raw, task.cluster, 0).rows, task.cluster.gpus_per_node
    divisors = [n for n in range(1, rows + 1) if rows % n == 0]
    given = value_at(task.raw, keys.PIPE)
    stages = (given,) if isinstance(given, int) and given > 0 else range(1, MOST_STAGES + 1)
    counts = {n * s for n in divisors for s in stages if n * s % each == 0}
    return sorted(count // each for count in counts if each < count <= MOST_NODES * each)


def _leanest(task: Task) -> Iterator[Candidate]:
    """Yield the choices that need the least memory, by the formula, of those that it does not reject."""
    bounds, most, needs = Bounds(task), task.cluster.usable.most, {}
    for choice in bounds.space.choices():
        if choice.get(keys.POLICY, "full") != "full" or choice.get(keys.CHUNKS, 1) > 1:
            continue
        lean = choice | ({keys.UNROLL: False} if is_open(task.raw, keys.UNROLL) else {})
        key = tuple(value for name, value in lean.items() if name not in (MICRO, ACCUM))
        try:
            needs[key] = bounds.memory(choice), lean  # the last has the smallest micro-batch
        except ConfigError:  # the choice fits the model or itself not at all
            continue
    ranked = sorted(needs.values(), key=lambda item: item[0])
    yield from (lean for need, lean in ranked[:TRIED] if need <= most)
