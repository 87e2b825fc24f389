"""`jzero plan --search`: the fastest configurations of a model that fit a cluster, by branch and bound.

A choice is dropped without compiling it if its model state alone does not fit; if its products at the full rate take
longer than the fastest step found; or if compiled choices of its kind (pipeline or not, what it recomputes) predict
that it does not fit or is slower: activations grow with the micro-batches that a device keeps, and the share of the
time that is not products grows with the number of micro-batches. The rest is compiled, the most promising first.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any

from jzero.config.sizes import ACCUM, MICRO
from jzero.display.slow_work import slow_work
from jzero.errors import ConfigError
from jzero.planner import choices as keys
from jzero.planner.bounds import Bounds
from jzero.planner.choices import Choice, Space, is_open, lines, merged, value_at
from jzero.planner.gpus import gpu
from jzero.planner.outcomes import Outcome, Pool, Task
from jzero.values.sizes import size_text

EQUAL = 0.03  # two estimates that differ by less are called equal
SLACK = 0.05  # of the memory: how far a prediction from other choices may be off
INVALID, STATE, SLOW, PREDICTED, SMALLER, LATE = (
    "not for this model", "model state too large", "slower even at the full rate of products",
    "too large or slow, as those compiled tell", "a larger micro-batch fits", "no time left",
)  # fmt: skip


@dataclass(frozen=True)
class Search:
    """What a search found.

    Attributes:
      task, raw: the model, the cluster, the config's dict.
      outcomes: all that was compiled: those that fit first, the fastest first.
      dropped: {reason: number of choices} that were not compiled.
      seconds: of the search.
      problem: of the first choice that the model or the config refused.
    """

    task: Task
    raw: Mapping[str, Any]
    outcomes: tuple[Outcome, ...]
    dropped: Mapping[str, int]
    seconds: float
    problem: str = ""

    @property
    def fitting(self) -> tuple[Outcome, ...]:
        return tuple(found for found in self.outcomes if found.fits and found.step_s)

    @property
    def best(self) -> Outcome:
        """The fastest that fits.

        Raises:
          ConfigError: nothing fits.
        """
        if not self.fitting:
            raise ConfigError(nothing_fits(self))
        return self.fitting[0]

    @property
    def config(self) -> dict[str, Any]:
        """The whole config of the fastest."""
        return merged(self.raw, self.best.choice)

    @property
    def frontier(self) -> tuple[Outcome, ...]:
        """The outcomes that no other beats in both memory and speed, the fastest first."""
        best: int | None = None
        found: list[Outcome] = []
        for one in sorted((o for o in self.outcomes if o.step_s), key=lambda o: (o.step_s, o.peak_bytes)):
            if best is None or one.peak_bytes < best:
                best, found = one.peak_bytes, [*found, one]
        return tuple(found)


def search(
    task: Task, raw: Mapping[str, Any], *, minutes: float = 10.0, every: bool = False, processes: int | None = None,
    seen: Callable[[Outcome], None] = lambda found: None,
) -> Search:  # fmt: skip
    """Find the fastest configurations that fit.

    Args:
      raw: the config's dict; what it has is kept, the keys of `choices` that it leaves open are chosen.
      minutes: at most, for the compilations.
      every: drop no choice that needs less memory than all faster ones, for a frontier.
      processes: that compile at a time; default: as many as the cores and the memory of this machine allow.
      seen: called with every outcome as it comes.

    Raises:
      ConfigError: no global batch, or no choice that fits the config, the model and the GPUs.
    """
    began = time.monotonic()
    model, shapes = task.named()
    bounds = Bounds(raw, model, shapes, task.gpu, task.gpus, task.gpus_per_node, task.rates)
    space = Space(raw, gpu(task.gpu), task.gpus, task.gpus_per_node, bounds.layers)
    walk = _Walk(bounds, list(space.choices()), gpu(task.gpu).room(task.gpus).most, every)
    if not walk.open:
        raise ConfigError(f"train_batch_size = {space.rows}: no mesh and micro-batch of {task.gpus} GPUs divides it")
    with Pool(processes) as pool, slow_work("searching"):
        running: dict[Future[Outcome], Choice] = {}
        alive = True
        while True:
            in_time = alive and time.monotonic() < began + 60 * minutes
            while in_time and len(running) < pool.size and (choice := walk.next(list(running.values()))):
                running[pool.submit(task, merged(raw, choice), choice)] = choice
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
                    found, alive = Outcome(choice, problem="the process that compiled it was killed"), False
                walk.learn(found)
                seen(found)
    walk.dropped[LATE] += len(walk.open) + len(running)
    outcomes = sorted(walk.found, key=lambda o: (not o.fits, o.step_s or 1e9, o.peak_bytes))
    dropped = {reason: count for reason, count in walk.dropped.items() if count}
    return Search(task, raw, tuple(outcomes), dropped, time.monotonic() - began, walk.problem)


class _Walk:
    """The open choices, and what the compiled ones tell about them.

    Attributes:
      open: not compiled and not dropped.
      found: what was compiled.
      dropped: {reason: count}.
      activations: {kind: bytes per row of a micro-batch that the device keeps}.
    """

    def __init__(self, bounds: Bounds, choices: list[Choice], most: int, every: bool):
        self.bounds, self.open, self.most, self.every = bounds, choices, most, every
        self.found: list[Outcome] = []
        self.dropped: Counter[str] = Counter()
        self.activations: dict[Any, float] = {}
        self.problem = ""  # of the first choice that is invalid
        self.wider = self._wider(list(choices))

    def next(self, running: list[Choice]) -> Choice | None:
        """Take the most promising open choice; None if there is none before one that runs tells more."""
        while True:
            self._drop()
            probing = {self._kind(choice) for choice in running} - self.activations.keys()
            ready = [c for c in self.open if self._kind(c) not in probing and self._peak(c) <= (1 + SLACK) * self.most]
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

    def learn(self, found: Outcome) -> None:
        """Note what a compiled choice tells."""
        self.found.append(found)
        choice = found.choice
        if not found.peak_bytes:
            return
        kind, rows = self._kind(choice), self._micro(choice) * self.bounds.held(choice)
        beyond = max(0, found.peak_bytes - self.bounds.memory(choice)) / rows
        self.activations[kind] = min(beyond, self.activations.get(kind, beyond))
        if found.fits and not self.every and self._pipe(choice) == 1:
            self._close(SMALLER, lambda c: _same(c, choice) and self._micro(c) < self._micro(choice))
        if not found.fits:
            self._close(PREDICTED, lambda c: _same(c, choice) and self._micro(c) > self._micro(choice))

    def _wider(self, first: list[Choice]) -> Iterator[list[Choice]]:
        """Yield choices that give up speed for memory: a scanned stack, then state in host memory.

        The scan comes where nothing fits, or what fits recomputes more; the others where nothing fits.
        """
        raw = self.bounds.raw
        policies = [o.choice.get(keys.POLICY) for o in sorted(self.fitting(), key=lambda o: o.step_s or 0)[:1]]
        if is_open(raw, keys.UNROLL):
            less = (
                keys.POLICIES[: keys.POLICIES.index(policies[0])]
                if policies and policies[0] and not self.every
                else keys.POLICIES
            )
            yield [c | {keys.UNROLL: False} for c in first if c.get(keys.POLICY, "none") in less]
        for key, least in ((keys.OFFLOAD_OPTIMIZER, 1), (keys.OFFLOAD_PARAM, 3)):
            if is_open(raw, key) and (self.every or not self.fitting()):
                first = [wide | {key: "cpu"} for choice in first if (wide := self._at_stage(choice, least))]
                yield first

    def _at_stage(self, choice: Choice, least: int) -> Choice | None:
        """Return the choice if its stage is high enough; on one replica every stage partitions the same: raise it."""
        stage = choice.get(keys.STAGE, value_at(self.bounds.raw, keys.STAGE) or 0)
        if stage >= least:
            return choice
        return choice | {keys.STAGE: least} if keys.STAGE in choice and choice.get(keys.ZERO) == 1 else None

    def fitting(self) -> list[Outcome]:
        return [found for found in self.found if found.fits]

    # ---------------------------------------------------------------- parts of it

    def _promise(self, choice: Choice) -> Any:
        """Sort first what should be fast, then large micro-batches and low stages.

        Of a kind that nothing is known of, small micro-batches and high stages come first, which should fit.
        """
        micro, stage = self._micro(choice), choice.get(keys.STAGE, 0)
        known = self._kind(choice) in self.activations
        return round(self._seconds(choice), 3), *((-micro, stage) if known else (micro, -stage))

    def _drop(self) -> None:
        """Close the choices that are known to be too large or too slow."""
        fastest = min((o.step_s for o in self.fitting() if o.step_s), default=None)
        self._close(INVALID, self._is_invalid)
        self._close(STATE, lambda c: self.bounds.memory(c) > self.most)
        if self.every:
            known = [(o.step_s, o.peak_bytes) for o in self.found if o.step_s]
            self._close(PREDICTED, lambda c: _beaten(self._seconds(c), self._peak(c), known))
        elif fastest:
            self._close(SLOW, lambda c: self.bounds.seconds(c) > fastest)
            self._close(PREDICTED, lambda c: self._seconds(c) > fastest)

    def _close(self, reason: str, drop: Any) -> None:
        kept = [choice for choice in self.open if not drop(choice)]
        self.dropped[reason] += len(self.open) - len(kept)
        self.open = kept

    def _is_invalid(self, choice: Choice) -> bool:
        """Return whether a choice contradicts itself or the model."""
        try:
            self.bounds.memory(choice)
        except ConfigError as error:
            self.problem = self.problem or str(error)
            return True
        return False

    def _peak(self, choice: Choice) -> float:
        beyond = self.activations.get(self._kind(choice), 0.0)
        return self.bounds.memory(choice) + beyond * self._micro(choice) * self.bounds.held(choice)

    def _seconds(self, choice: Choice) -> float:
        """Predict the time, from the fastest of its kind with micro-batches as large, which waste the least."""
        bound, micro = self.bounds.seconds(choice), self._micro(choice)
        shares = [
            self.bounds.seconds(o.choice) / o.step_s
            for o in self.found
            if o.step_s and self._alike(o.choice, choice) and self._micro(o.choice) >= micro
        ]
        return bound / max(shares, default=1.0)

    def _kind(self, choice: Choice) -> tuple[Any, ...]:
        """Return what choices have in common that are alike in activations and efficiency."""
        names = (keys.POLICY, keys.UNROLL, keys.OFFLOAD_OPTIMIZER, keys.OFFLOAD_PARAM)
        return self._pipe(choice) > 1, *(choice.get(key) for key in names)

    def _alike(self, one: Choice, other: Choice) -> bool:
        """Return whether products take the same share of the time; what communicates depends on the stage."""
        stages = self._pipe(one) == 1 and one.get(keys.STAGE) != other.get(keys.STAGE)
        return self._kind(one) == self._kind(other) and not stages

    def _micro(self, choice: Choice) -> int:
        return choice.get(MICRO) or value_at(self.bounds.raw, MICRO)

    def _pipe(self, choice: Choice) -> int:
        return self.bounds.stages(choice)


def _beaten(seconds: float, peak: float, known: list[tuple[float, int]]) -> bool:
    return any(s < seconds and p < peak for s, p in known)


def _same(one: Choice, other: Choice) -> bool:
    """Return whether two choices differ in the batch sizes alone."""
    return all(one.get(key) == value for key, value in other.items() if key not in (MICRO, ACCUM))


def nothing_fits(found: Search) -> str:
    """Return one line: what was tried, and what needs the least memory."""
    tried = [one for one in found.outcomes if one.peak_bytes]
    where = f"{found.task.gpus} x {gpu(found.task.gpu).description}"
    if not tried:
        problem = next((one.problem for one in found.outcomes if one.problem), found.problem)
        why = f": {problem}" if problem else f" ({', '.join(found.dropped)})"
        return f"no configuration of {found.task.model} fits {where}{why}; `--fit` finds the smallest cluster"
    least = min(tried, key=lambda one: one.peak_bytes)
    if least.fits:
        return f"no configuration has an estimate of its time: {least.problem}"
    return (
        f"no configuration of {found.task.model} fits {where}: the smallest needs {size_text(least.peak_bytes)} of "
        f"{size_text(least.usable_bytes)} per GPU ({lines(least.choice)}); `--fit` finds the smallest cluster"
    )
