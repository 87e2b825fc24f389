"""Cutting a list of layers into consecutive parts, one for each pipeline stage or chunk of a stage."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import accumulate

from jzero.errors import ConfigError


def partition_layers(method: str, names: Sequence[str], sizes: Sequence[int], parts: int) -> list[int]:
    """Cut layers into parts; return the boundaries [parts + 1]: part p is the layers [b[p], b[p + 1]), never empty.

    The methods are DeepSpeed's (`PipelineModule._partition_layers`).

    Args:
      method: "uniform": equal numbers of layers, with the remainder in the first parts. "parameters", or "best":
        minimize the parameters of the largest part. "type:regex": minimize the layers whose class name matches
        (case-insensitive) in the largest part.
      names: the layers' class names.
      sizes: the layers' numbers of parameters.
      parts: the number of parts.

    Raises:
      ConfigError: an unknown method, a regex that matches no layer, more parts than layers.

    >>> partition_layers("uniform", ["Linear"] * 7, [1] * 7, 3)
    [0, 3, 5, 7]
    >>> partition_layers("parameters", ["Embed", "Block", "Block", "Block", "Norm"], [7, 4, 4, 4, 1], 2)
    [0, 2, 5]
    >>> partition_layers("type:block", ["Embed", "Block", "Block", "Block", "Block", "Norm"], [7, 4, 4, 4, 4, 1], 2)
    [0, 3, 6]
    """
    layers, kind = len(names), str(method).lower()
    if not 1 <= parts <= layers:
        wrong = "exceed the layers" if parts > layers else "are too few"
        raise ConfigError(
            f"pipeline: {parts} parts (num_stages x chunks) {wrong}: there are {layers} layers, ask for 1 to {layers}"
        )
    if kind == "uniform":
        return [part * (layers // parts) + min(part, layers % parts) for part in range(parts + 1)]
    if kind in ("parameters", "best"):
        return _balanced(sizes, parts)
    if kind.startswith("type:"):
        return _balanced(_matches(method, names), parts)
    raise ConfigError(
        f"partition_method {method!r} is unknown: allowed are 'parameters' (or 'best'), 'uniform' and 'type:regex', "
        "which counts the layers whose class name matches"
    )


def _matches(method: str, names: Sequence[str]) -> list[int]:
    """Return 1 for each layer whose class name matches "type:regex", else 0."""
    try:
        regex = re.compile(method.partition(":")[2], re.IGNORECASE)
    except re.error as error:
        raise ConfigError(f"partition_method {method!r}: the text after 'type:' is not a regex: {error}") from None
    matches = [int(bool(regex.search(name))) for name in names]
    if not any(matches):
        raise ConfigError(
            f"partition_method {method!r} matches no layer: the class names are {', '.join(dict.fromkeys(names))}"
        )
    return matches


def _balanced(weights: Sequence[int], parts: int) -> list[int]:
    """Return the boundaries that make the heaviest part as light as possible, by dynamic programming over the parts.

    Ties go to the most even cut (the least sum of squares), then to the one that cuts latest.
    """
    total = [0, *accumulate(weights)]
    best = {0: (0, 0, [0])}  # layers -> (heaviest part, sum of squares, boundaries) of their best cut into parts
    for _ in range(parts):
        previous, best = best, {}
        least, most = min(previous), max(previous)
        for stop in range(least + 1, len(weights) + 1):
            for start in range(min(most, stop - 1), least - 1, -1):
                weight = total[stop] - total[start]
                if stop in best and weight > best[stop][0]:
                    break  # an earlier start makes this part only heavier
                heaviest, squares, boundaries = previous[start]
                cost = max(heaviest, weight), squares + weight**2
                if stop not in best or cost < best[stop][:2]:
                    best[stop] = (*cost, [*boundaries, stop])
    return best[len(weights)][2]
