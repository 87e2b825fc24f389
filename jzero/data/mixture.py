"""A mixture: several sources as one, by weights that may change during the run."""

from __future__ import annotations

import math
import zlib
from collections.abc import Hashable, Mapping
from functools import lru_cache
from typing import Any

import jax
import numpy as np

from jzero.data.conversations import check_choice
from jzero.data.interleave import BLOCK, Exhaustion, Interleaving
from jzero.data.order import ENDLESS, permutation, shuffled
from jzero.data.sources import Iterated, Source, as_source
from jzero.errors import ConfigError, some_of
from jzero.tree import PyTree, named

Stage = Mapping[Hashable, float]  # the weight of each source
KEPT_SAMPLES = 2**16  # samples of a source whose permutation is kept; there may be many sources


class Mixture:
    """Training data of several sources. Sample number n of a run is a function of the seed and n.

    So a run resumes exactly, on any number of processes and at any batch size, and what it read of each source follows
    from its position. `jzero.data.interleave` describes the construction: a lookup takes constant time and memory for
    billions of samples, and any number of consecutive samples has the weights up to a sample or two of each source.

    The loader does not shuffle a mixture. Each source is shuffled here, in another order in each of its epochs; the
    seed and the source's name determine it.

    Args:
      sources: {name: (source, weight)} or {source: weight}, with any training data that has a length. All must have the
        same arrays, shapes and dtypes. Weights are shares of the samples (rows), in parts of their sum.
      stages: {sample number: {name: weight}}: from this sample on, these weights hold, and sources that are not named
        have the weight 0.
      exhaustion: when all samples of a source were read, "repeat" shuffles and reads it again, so that the mixture has
        no end; "drop" leaves it out, so that an epoch has every sample once; "stop" ends the epoch.
      seed: of the order; the config's seed has no effect on it.
      shuffle: False reads each source in its own order.

    Raises:
      ConfigError: unsuitable sources, weights or stages.

    >>> mixture = Mixture({"web": (np.arange(0, 50), 3), "code": (np.arange(100, 150), 1)}, shuffle=False)
    >>> mixture.rows(np.arange(8)).tolist()
    [0, 1, 100, 2, 3, 4, 101, 5]
    >>> mixture.seen(1000)["code"]
    {'samples': 250, 'epochs': 5.0}
    """

    in_order = True  # see `jzero.data.Source`

    def __init__(
        self, sources: Mapping[Any, Any], *, stages: Mapping[int, Mapping[Any, float]] | None = None,
        exhaustion: Exhaustion = "repeat", seed: int = 0, shuffle: bool = True,
    ):  # fmt: skip
        check_choice("exhaustion", exhaustion, Exhaustion)
        if type(seed) is not int or seed < 0:
            raise ConfigError(f"seed = {seed!r}: must be a whole number from 0")
        if not isinstance(sources, Mapping) or not sources:
            raise ConfigError("sources: must be {name: (source, weight)} or {source: weight}, with at least one source")
        pairs = [_pair(key, value) for key, value in sources.items()]
        self.names = [key if isinstance(key, str) else f"{type(key).__name__} {i}" for i, key in enumerate(sources)]
        self.sources = [_open(name, source) for name, (source, _) in zip(self.names, pairs, strict=True)]
        first = dict(zip(sources, (weight for _, weight in pairs), strict=True))
        self.stages = {0: first, **_check_stages(stages or {})}
        weights = {number: _weights(number, stage, list(sources)) for number, stage in self.stages.items()}
        self.exhaustion, self.seed, self.shuffle = exhaustion, seed, shuffle
        self.order = Interleaving([len(source) for source in self.sources], weights, exhaustion, seed)
        self.tokens = _check_alike(self.names, self.sources)
        self._shares = {number: np.array(stage) / math.fsum(stage) for number, stage in weights.items()}
        self._permutations = [lru_cache(2)(permutation) for _ in self.sources]

    def __len__(self) -> int:
        """Return the samples of an epoch; `jzero.data.order.ENDLESS` if the mixture has no end."""
        return self.order.length

    def __repr__(self) -> str:
        """Describe all that the order depends on: a resume compares it, so no number in it is rounded."""
        sizes = ", ".join(f"{name}: {len(source)}" for name, source in zip(self.names, self.sources, strict=True))
        segments = "; ".join(
            f"from {start} " + ", ".join(f"{n} {quota}" for n, quota in zip(self.names, quotas, strict=True) if quota)
            for start, quotas, _ in self.order.segments
        )
        how = f"{self.exhaustion}, seed {self.seed}{'' if self.shuffle else ', in order'}"
        return f"Mixture({sizes}; samples of {BLOCK}: {segments}; {how})"

    def locate(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Find sample numbers [n] of the run: (the source of each [n], its index in the source [n])."""
        which, samples = self.order.locate(numbers)
        indices = np.empty_like(samples)
        for k in np.unique(which).tolist():
            own, seed = which == k, zlib.crc32(self.names[k].encode()) + (self.seed << 32)
            epochs, at = np.divmod(samples[own], len(self.sources[k]))
            for epoch in np.unique(epochs).tolist() if self.shuffle else ():
                now = epochs == epoch
                at[now] = shuffled(at[now], len(self.sources[k]), seed, epoch, KEPT_SAMPLES, self._permutations[k])
            indices[own] = at
        return which, indices

    def rows(self, indices: np.ndarray) -> PyTree:
        which, at = self.locate(indices)
        places = {k: np.flatnonzero(which == k) for k in np.unique(which).tolist()}
        parts = [self.sources[k].rows(at[place]) for k, place in places.items()]

        def merge(*leaves: np.ndarray) -> np.ndarray:
            forms = {f"{x.dtype}{list(x.shape[1:])}" for x in leaves}
            if len(forms) > 1:
                raise ConfigError(f"samples of the sources {some_of(self.names)} differ: {' and '.join(sorted(forms))}")
            merged = np.empty((len(indices), *leaves[0].shape[1:]), leaves[0].dtype)
            for place, leaf in zip(places.values(), leaves, strict=True):
                merged[place] = leaf
            return merged

        return jax.tree.map(merge, *parts)

    def seen(self, position: Mapping[str, int] | int) -> dict[str, dict[str, float]]:
        """Count what a run has read of each source: {name: {"samples", "epochs", "tokens"}}.

        Args:
          position: of the loader (`engine.training_dataloader.position`), or a number of samples. Samples that fill up
            the last batch of earlier epochs do not count.

        Returns:
          For each source samples, passes over it, and, if its batches have "inputs", tokens (padding included).
        """
        if isinstance(position, Mapping):
            position = position["epoch"] * len(self) + position["samples"]
        found = {}
        for name, source, samples in zip(self.names, self.sources, self.order.taken(position).tolist(), strict=True):
            found[name] = {"samples": samples, "epochs": samples / len(source)}
            if self.tokens:
                found[name]["tokens"] = samples * self.tokens
        return found

    def report_notes(self) -> list[str]:
        """Return the lines for the run report."""
        sources = zip(self.names, self.sources, strict=True)
        lines = ["mixture of " + ", ".join(f"{name} ({len(source):,} samples)" for name, source in sources)]
        for number, shares in self._shares.items():
            pairs = zip(self.names, shares, strict=True)
            each = ", ".join(f"{name} {share:.4%}".replace(".0000%", "%") for name, share in pairs if share)
            lines.append(f"from sample {number:,}: {each}")
        end = "the epoch ends" if self.exhaustion == "stop" else "left out from there"
        lines += [f"{self.names[k]} is used up after sample {number:,}: {end}" for number, k in self.order.used_up]
        return [*lines, "no end: sources that are used up are read again"] if len(self) >= ENDLESS else lines


def _pair(key: object, value: object) -> tuple[Any, Any]:
    """Return (source, weight) of an item of `sources`."""
    if isinstance(value, tuple) and len(value) == 2:
        return value
    if isinstance(value, int | float):
        return key, value
    raise ConfigError(
        f"sources[{key!r}] is {type(value).__name__}: must be (source, weight), or the weight of a source"
    )


def _open(name: str, data: Any) -> Source:
    if isinstance(data, Mixture):
        raise ConfigError(f"source {name!r} is a Mixture: put its sources into this one")
    try:
        source = as_source(data)
    except ConfigError as error:
        raise ConfigError(f"source {name!r}: {error}") from error
    if isinstance(source, Iterated):
        raise ConfigError(f"source {name!r} has no length: a mixture reads by index; pass a list, a dataset, a file")
    return source


def _check_stages(stages: Mapping[int, Stage]) -> dict[int, Stage]:
    for number, stage in stages.items():
        if type(number) is not int or not 0 < number < ENDLESS or not isinstance(stage, Mapping):
            raise ConfigError(f"stages[{number!r}]: must be {{sample number from 1: {{name: weight}}}}")
    return dict(sorted(stages.items()))


def _weights(number: int, stage: Stage, keys: list[Hashable]) -> list[float]:
    """Return the weight of each source in a stage."""
    where = f"stages[{number}]" if number else "sources"
    if unknown := [key for key in stage if key not in keys]:
        raise ConfigError(f"{where}: unknown source {some_of(map(repr, unknown))}; the sources are {some_of(keys)}")
    for key, weight in stage.items():
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight < math.inf:
            raise ConfigError(f"{where}: the weight of {key!r} is {weight!r}; must be a number from 0")
    if not any(stage.values()):
        raise ConfigError(f"{where}: all weights are 0; at least one must be positive")
    return [float(stage.get(key, 0)) for key in keys]


def _check_alike(names: list[str], sources: list[Source]) -> int:
    """Check that all sources have the same arrays, and return the tokens of a sample (0 if there are none)."""
    forms = []
    for source in sources:
        batch = source.rows(np.array([0]))
        forms.append({name or "samples": f"{x.dtype}{list(x.shape[1:])}" for name, x in named(batch).items()})
    for name, form in zip(names, forms, strict=True):
        if form != forms[0]:
            own, first = (", ".join(f"{array} {kind}" for array, kind in x.items()) for x in (form, forms[0]))
            raise ConfigError(
                f"source {name!r} has {own}, and {names[0]!r} has {first}: all sources must have the "
                "same arrays, shapes and dtypes"
            )
    return sum(math.prod(x.shape[1:]) for name, x in named(batch).items() if name.split("/")[-1] == "inputs")
