"""DeepSpeed's `layer_specs` read for a model: which dimension of each of its weights they divide.

PyTorch's weight is [out, in], JAX's [in, out]: "column" divides the last dimension of a matrix, "row" the first one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from jzero.config import Config
from jzero.errors import ConfigError, some_of
from jzero.mesh import TENSOR
from jzero.spread.division import layer_shapes
from jzero.stored_names import StoredNames, matches
from jzero.tree import PyTree
from jzero.values.layer_spec_kinds import torch_name

_KEY = "tensor_parallel.partition_config"
_BY_HAND = "write tensor_parallel.dimensions instead, with the dimension of the model's own shape"


def with_layer_specs(config: Config, model: Any, params: PyTree, has_stack: bool) -> Config:
    """Write the table `tensor_parallel.dimensions` of the config's `layer_specs` into the config.

    With `use_default_specs` the model's own table decides about the parameters that no spec matches. A bias is divided
    with its column-parallel weight.

    Raises:
      ConfigError: a spec that matches no weight or only some layers, or means no dimension of a weight.
    """
    section = config.tensor_parallel
    if not (specs := section.partition_config.layer_specs):
        return config
    names, shapes = getattr(model, "names", None), layer_shapes(params, has_stack)
    weights = {name: shape for name, shape in shapes.items() if len(shape) > 1 and not name.endswith("/bias")}
    chosen: dict[str, int | None] = {}
    for i, spec in enumerate(specs):
        what = f"{_KEY}.layer_specs[{i}]"
        hits = [name for name in weights if _matches(what, spec["patterns"], name, names)]
        if not hits:
            written = {torch_name(part): None for name in weights for part in _aliases(name, names)}
            raise ConfigError(
                f"{what}.patterns = {list(spec['patterns'])}: match no weight; by PyTorch's rules their names are "
                f"{some_of(written)}"
            )
        for name in hits:
            if name not in chosen:
                chosen |= _of_weight(what, spec, name, shapes)
    if section.partition_config.use_default_specs:
        own = getattr(model, "divided", {}).get(TENSOR, {})
        for name in [name for name in shapes if name not in chosen]:
            fitting = (dim for p, dim in own.items() if matches(f"divided: {p!r}", p, name, names))
            if (found := next(fitting, None)) is not None:
                chosen[name] = found
    table = {f"^{re.escape(name)}$": dim for name, dim in chosen.items() if dim is not None}
    if not table:
        raise ConfigError(f"{_KEY}.layer_specs: every spec skips its weights, so nothing is divided; add a column")
    return config.model_copy(update={"tensor_parallel": section.model_copy(update={"dimensions": table})})


def _aliases(name: str, names: StoredNames | None) -> tuple[str, ...]:
    return (name, *(names.known[name] if names else ()))


def _matches(what: str, patterns: Sequence[str], name: str, names: StoredNames | None) -> bool:
    """Return whether a pattern matches the beginning of one of the names, as PyTorch or the model writes them."""
    own, *parts = _aliases(name, names)
    for written in (torch_name, lambda part: part.replace("/", ".")):
        known = StoredNames(((written(own), tuple(map(written, parts))),))
        if any(matches(f"{what}: {p!r}", _from_the_start(p), written(own), known) for p in patterns):
            return True
    return False


def _from_the_start(pattern: str) -> str:
    """Anchor an expression at the start, after flags for all of it: DeepSpeed uses re.match."""
    flags = found.group() if (found := re.match(r"\(\?[aimsux]+\)", pattern)) else ""
    return rf"{flags}\A(?:{pattern.removeprefix(flags)})"


def _of_weight(
    what: str, spec: Mapping[str, Any], name: str, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, int | None]:
    """Return the dimension of a weight, and of its bias if that is divided with it; None: whole."""
    if spec["partition_type"] == "skip":
        return {name: None}
    dim = _dimension(what, spec, name, shapes[name])
    bias = f"{name.rpartition('/')[0]}/bias".lstrip("/")
    with_bias = dim == len(shapes[name]) - 1 and len(shapes.get(bias, ())) > 0
    return {name: dim, **({bias: len(shapes[bias]) - 1} if with_bias else {})}


def _dimension(what: str, spec: Mapping[str, Any], name: str, shape: tuple[int, ...]) -> int:
    """Return the dimension of a weight [in, out], [in, parts, out] or [experts, in, out] that a spec divides."""
    kind, seen, asked = spec["partition_type"], spec["shape"], spec["partition_dim"]
    dim = asked if asked is not None else 0 if kind == "column" else 1  # of PyTorch's [out, in], or of `seen`
    text = f"{what} for {name} {list(shape)}: partition_type {kind!r}"
    text += f", shape {[list(n) if isinstance(n, tuple) else n for n in seen]}" if seen else ""
    text += f", partition_dim {asked}" if asked is not None else ""
    if dim >= len(seen or shape):
        count = len(seen or shape)
        raise ConfigError(f"{text}: there are {count} dimensions; choose one of 0 to {count - 1}")
    if len(shape) == 2 and (seen is None or (len(seen) == 2 and dim == 0 and seen[0] == -1)):
        return 1 - dim
    if seen and len(shape) == 3:
        if len(seen) == 3 and seen[0] == shape[0]:
            return (0, 2, 1)[dim]
        if len(seen) == 2 and dim == 0 and seen[0] == shape[1]:
            return 2
    if len(shape) > 2 and not any(isinstance(n, tuple) for n in seen or ()):
        raise ConfigError(f"{text}: unclear for a weight of {len(shape)} dimensions; {_with_shape(shape)}{_BY_HAND}")
    raise ConfigError(
        f"{text}: an equal cut of it would separate what belongs together; give what is side by side in the weight a "
        f"dimension of its own, as [in, {seen[0] if isinstance(seen[0], int) else 'parts'}, out], or {_BY_HAND}"
    )


def _with_shape(shape: tuple[int, ...]) -> str:
    """Word how a spec names each dimension of a weight, such as an attention's query kernel [in, heads, size]."""
    if len(shape) != 3:
        return '"shape" has 2 or 3 sizes; '
    first, middle, last = shape
    return (
        f'write "shape": {[first, last, middle]} (PyTorch\'s order) and "partition_dim": 0, 2 or 1 for dimension 0, 1 '
        f"or 2 of {list(shape)}; or "
    )
