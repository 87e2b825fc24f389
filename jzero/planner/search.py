"""`jzero plan --search`, the fastest configurations that fit a cluster; and `--fit`, the smallest cluster that fits.

The search is by branch and bound.

A candidate is dropped without compiling it if its model state alone does not fit; if its products at the full rate take
longer than the fastest step found; or if compiled candidates of its kind (pipeline or not, what it recomputes) predict
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
from jzero.planner.candidates import (
    CHUNKS,
    MESH_PIPE,
    MESH_ZERO,
    OFFLOAD_OPTIMIZER,
    OFFLOAD_PARAM,
    POLICIES,
    POLICY,
    STAGE,
    UNROLL,
    Bounds,
    Candidate,
    SearchSpace,
    Task,
    is_open,
    value_at,
)
from jzero.planner.estimates import Estimate, Pool, estimate
from jzero.planner.gpus import Cluster

EQUAL = 0.03  # two estimates that differ by less are called equal
MOST_NODES, MOST_STAGES = 2048, 64
TRIED = 3  # of the leanest candidates for one number of GPUs
PREDICTION_ERROR = 0.05  # of the memory: how far a prediction from other candidates may be off
INVALID, STATE, SLOW, PREDICTED, SMALLER, LATE = (
    "not for this model", "model state too large", "slower even at the full rate of matmuls",
    "predicted too large or too slow, from the compiled configs", "a larger micro-batch fits", "no time left",
)  # fmt: skip


@dataclass(frozen=True)
class Search:
    """The result of a search.

    Attributes:
      estimates: all that was compiled: those that fit first, the fastest first.
      dropped: {reason: number of candidates} that were not compiled.
      seconds: of the search.
      problem: of the first candidate that the model or the config refused.
    """

    task: Task
    estimates: tuple[Estimate, ...]
    dropped: Mapping[str, int]
    seconds: float
    problem: str = ""

    @property
    def best(self) -> Estimate:
        """The fastest that fits.

        Raises:
          ConfigError: nothing fits.
        """
        for found in self.estimates:
            if found.fits and found.step_s:
                return found
        raise ConfigError(nothing_fits(self))

    @property
    def frontier(self) -> tuple[Estimate, ...]:
        """The estimates that no other beats in both memory and speed, the fastest first."""
        found: list[Estimate] = []
        for one in sorted((o for o in self.estimates if o.step_s), key=lambda o: (o.step_s, o.peak_bytes)):
            found += [one] * (not found or one.peak_bytes < found[-1].peak_bytes)
        return tuple(found)


def search_configs(
    task: Task, *, minutes: float = 10.0, every: bool = False, seen: Callable[[Estimate], None] = lambda found: None
) -> Search:
    """Find the fastest configurations that fit.

    Args:
      minutes: at most, for the compilations.
      every: drop no candidate that needs less memory than all faster ones, for a frontier.
      seen: called with every estimate as it comes.

    Raises:
      ConfigError: no global batch, or no candidate that fits the config, the model and the GPUs.
    """
    began = time.monotonic()
    bounds = Bounds(task)
    candidates = _OpenCandidates(bounds, list(bounds.space.candidates()), task.cluster.usable.most, every)
    if not candidates.open:
        raise ConfigError(
            f"train_batch_size = {bounds.space.rows}: no mesh and micro-batch of {task.cluster.gpus} GPUs divides it"
        )
    with Pool() as pool, slow_work("searching"):
        running: dict[Future[Estimate], Candidate] = {}
        alive = True
        while True:
            in_time = alive and time.monotonic() < began + 60 * minutes
            while in_time and len(running) < pool.size and (candidate := candidates.next(list(running.values()))):
                running[pool.submit(estimate, task, candidate)] = candidate
            if not running:
                break
            done, _ = wait(running, max(0.0, began + 60 * minutes - time.monotonic()), FIRST_COMPLETED)
            if not done:
                break
            for future in done:
                candidate = running.pop(future)
                try:
                    found = future.result()
                except BrokenProcessPool:  # the system ran out of memory, for example
                    found, alive = Estimate(candidate, problem="the process that compiled it was killed"), False
                candidates.learn(found)
                seen(found)
    candidates.dropped[LATE] += len(candidates.open) + len(running)
    estimates = sorted(candidates.found, key=lambda o: (not o.fits, o.step_s or 1e9, o.peak_bytes))
    dropped = {reason: count for reason, count in candidates.dropped.items() if count}
    return Search(task, tuple(estimates), dropped, time.monotonic() - began, candidates.problem)


class _OpenCandidates:
    """The open candidates, and what the compiled ones tell about them.

    Attributes:
      open: not compiled and not dropped.
      found: what was compiled.
      dropped: {reason: count}.
      activations: {kind: bytes per row of a micro-batch that the device keeps}.
    """

    def __init__(self, bounds: Bounds, candidates: list[Candidate], most: int, every: bool):
        self.bounds, self.open, self.most, self.every = bounds, candidates, most, every
        self.found: list[Estimate] = []
        self.dropped = Counter(dict.fromkeys((INVALID, STATE, SLOW, PREDICTED, SMALLER, LATE), 0))
        self.activations: dict[tuple[object, ...], float] = {}
        self.problem = ""  # of the first candidate that is invalid
        self.wider = self._wider(list(candidates))

    def next(self, running: list[Candidate]) -> Candidate | None:
        """Take the most promising open candidate; None if there is none before one that runs tells more."""
        while True:
            self._close(self._reason)
            probing = {self._kind(candidate) for candidate in running} - self.activations.keys()
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
            self._close(lambda _: PREDICTED)
            more = next(self.wider, None)
            if more is None:
                return None
            self.open = more

    def learn(self, found: Estimate) -> None:
        self.found.append(found)
        candidate = found.candidate
        if not found.peak_bytes:
            return
        kind, rows = self._kind(candidate), self._micro(candidate) * self.bounds.pipeline(candidate)[0]
        beyond = max(0, found.peak_bytes - self.bounds.memory(candidate)) / rows
        self.activations[kind] = min(beyond, self.activations.get(kind, beyond))
        if found.fits and not self.every and self.bounds.stages(candidate) == 1:
            self._close(lambda c: SMALLER if _same(c, candidate) and self._micro(c) < self._micro(candidate) else "")
        if not found.fits:
            self._close(lambda c: PREDICTED if _same(c, candidate) and self._micro(c) > self._micro(candidate) else "")

    def _wider(self, first: list[Candidate]) -> Iterator[list[Candidate]]:
        """Yield candidates that give up speed for memory: a scanned stack, then state in host memory.

        The scan comes where nothing fits, or what fits recomputes more; the others where nothing fits.
        """
        raw = self.bounds.raw
        if is_open(raw, UNROLL):
            fastest = min(self.fitting(), key=lambda o: o.step_s or 0, default=None)
            policy = None if self.every or fastest is None else fastest.candidate.get(POLICY)
            less = POLICIES[: POLICIES.index(policy)] if policy else POLICIES
            yield [c | {UNROLL: False} for c in first if c.get(POLICY, "none") in less]
        for key, least in ((OFFLOAD_OPTIMIZER, 1), (OFFLOAD_PARAM, 3)):
            if is_open(raw, key) and (self.every or not self.fitting()):
                first = [wide | {key: "cpu"} for candidate in first if (wide := self._at_stage(candidate, least))]
                yield first

    def _at_stage(self, candidate: Candidate, least: int) -> Candidate | None:
        """Return the candidate if its stage is high enough; on one replica all stages partition the same: raise it."""
        stage = candidate.get(STAGE, value_at(self.bounds.raw, STAGE) or 0)
        if stage >= least:
            return candidate
        return candidate | {STAGE: least} if STAGE in candidate and candidate.get(MESH_ZERO) == 1 else None

    def fitting(self) -> list[Estimate]:
        return [found for found in self.found if found.fits]

    # ---------------------------------------------------------------- parts of it

    def _promise(self, candidate: Candidate) -> tuple[float, ...]:
        """Sort first what should be fast, then large micro-batches and low stages.

        Of a kind that nothing is known of, small micro-batches and high stages come first, which should fit.
        """
        micro, stage = self._micro(candidate), candidate.get(STAGE, 0)
        known = self._kind(candidate) in self.activations
        return round(self._seconds(candidate), 3), *((-micro, stage) if known else (micro, -stage))

    def _reason(self, candidate: Candidate) -> str:
        """Return why a candidate is known to contradict itself, or to be too large or too slow; "" if it is not."""
        try:
            state = self.bounds.memory(candidate)
        except ConfigError as error:
            self.problem = self.problem or str(error)
            return INVALID
        fastest = min((o.step_s for o in self.fitting() if o.step_s), default=None)
        if state > self.most:
            return STATE
        if self.every:
            seconds, peak = self._seconds(candidate), self._peak(candidate)
            return PREDICTED if any(o.step_s and o.step_s < seconds and o.peak_bytes < peak for o in self.found) else ""
        if fastest and self.bounds.seconds(candidate) > fastest:
            return SLOW
        return PREDICTED if fastest and self._seconds(candidate) > fastest else ""

    def _close(self, why: Callable[[Candidate], str]) -> None:
        """Drop the open candidates that have a reason."""
        reasons = [(candidate, why(candidate)) for candidate in self.open]
        self.dropped.update(reason for _, reason in reasons if reason)
        self.open = [candidate for candidate, reason in reasons if not reason]

    def _peak(self, candidate: Candidate) -> float:
        beyond = self.activations.get(self._kind(candidate), 0.0)
        return self.bounds.memory(candidate) + beyond * self._micro(candidate) * self.bounds.pipeline(candidate)[0]

    def _seconds(self, candidate: Candidate) -> float:
        """Predict the time, from the fastest of its kind with micro-batches as large, which waste the least."""
        bound, micro = self.bounds.seconds(candidate), self._micro(candidate)
        shares = [
            self.bounds.seconds(o.candidate) / o.step_s
            for o in self.found
            if o.step_s and self._alike(o.candidate, candidate) and self._micro(o.candidate) >= micro
        ]
        return bound / max(shares, default=1.0)

    def _kind(self, candidate: Candidate) -> tuple[object, ...]:
        """Return what candidates have in common that are alike in activations and efficiency."""
        names = (POLICY, UNROLL, OFFLOAD_OPTIMIZER, OFFLOAD_PARAM)
        return self.bounds.stages(candidate) > 1, *(candidate.get(key) for key in names)

    def _alike(self, one: Candidate, other: Candidate) -> bool:
        """Return whether products take the same share of the time; what communicates depends on the stage."""
        stages = self.bounds.stages(one) == 1 and one.get(STAGE) != other.get(STAGE)
        return self._kind(one) == self._kind(other) and not stages

    def _micro(self, candidate: Candidate) -> int:
        return candidate.get(MICRO) or value_at(self.bounds.raw, MICRO)


def _same(one: Candidate, other: Candidate) -> bool:
    """Return whether two candidates differ in the batch sizes alone."""
    return all(one.get(key) == value for key, value in other.items() if key not in (MICRO, ACCUM))


def nothing_fits(found: Search) -> str:
    """Return one line: what was tried, and what needs the least memory."""
    tried = [one for one in found.estimates if one.peak_bytes]
    none = f"no configuration of {found.task.model} fits {found.task.cluster}"
    if not tried:
        problem = next((one.problem for one in found.estimates if one.problem), found.problem)
        why = f": {problem}" if problem else f" ({', '.join(found.dropped)})"
        return f"{none}{why}; `--fit` finds the smallest cluster"
    least = min(tried, key=lambda one: one.peak_bytes)
    if least.fits:
        return f"no configuration has an estimate of its time: {least.problem}"
    keys = ", ".join(f"{key} = {value}" for key, value in least.candidate.items())
    return (
        f"{none}: the smallest needs {size_text(least.peak_bytes)} of "
        f"{size_text(least.usable_bytes)} per GPU ({keys}); `--fit` finds the smallest cluster"
    )


def smallest(task: Task, seen: Callable[[Estimate], None] = lambda found: None) -> tuple[Task, Estimate]:
    """Find the smallest number of GPUs that fits, and a configuration that does.

    A host is filled before a second one is taken: 1, 2, 4, ... GPUs of one host, then any number of whole hosts. The
    formula rejects, the rest is compiled; state in host memory counts only if the config asks for it.

    Args:
      task: its cluster's `gpus_per_node` fill a host; `nodes` does not matter.
      seen: called with every estimate.

    Raises:
      ConfigError: no global batch, or not even `MOST_NODES` hosts are enough.
    """
    kind, whole = task.cluster.gpu, task.cluster.gpus_per_node
    with Pool() as pool, slow_work("looking for the smallest cluster"):

        @cache
        def leanest(cluster: Cluster) -> Estimate:
            """Compile the leanest candidates until one fits; the estimate of no program fits nothing."""
            there = replace(task, cluster=cluster)
            for future in [pool.submit(estimate, there, candidate) for candidate in _leanest(there)]:
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
    given = value_at(task.raw, MESH_PIPE)
    stages = (given,) if isinstance(given, int) and given > 0 else range(1, MOST_STAGES + 1)
    counts = {n * s for n in divisors for s in stages if n * s % each == 0}
    return sorted(count // each for count in counts if each < count <= MOST_NODES * each)


def _leanest(task: Task) -> Iterator[Candidate]:
    """Yield the candidates that need the least memory, by the formula, of those that it does not reject."""
    bounds, most, needs = Bounds(task), task.cluster.usable.most, {}
    for candidate in bounds.space.candidates():
        if candidate.get(POLICY, "full") != "full" or candidate.get(CHUNKS, 1) > 1:
            continue
        lean = candidate | ({UNROLL: False} if is_open(task.raw, UNROLL) else {})
        key = tuple(value for name, value in lean.items() if name not in (MICRO, ACCUM))
        try:
            needs[key] = bounds.memory(candidate), lean  # the last has the smallest micro-batch
        except ConfigError:  # the candidate fits the model or itself not at all
            continue
    ranked = sorted(needs.values(), key=lambda item: item[0])
    yield from (lean for need, lean in ranked[:TRIED] if need <= most)
