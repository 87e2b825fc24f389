"""The names of leaves without a layer stack: under them checkpoints store a state, and a config finds parameters."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from jzero.errors import ConfigError
from jzero.tree import PyTree


@dataclass(frozen=True)
class StoredNames:
    """The names of a model's parameters in the module that it was made of.

    Attributes:
      parameters: pairs of a parameter's name and its names in the module: one, or one for each layer.

    >>> names = StoredNames((("ends/out", ("out",)), ("stack/w", ("layers/0/w", "layers/1/w"))))
    >>> names.of("opt_state/0/mu/stack/w", (2, 3)), names.of("step", ())
    (('opt_state/0/mu/layers/0/w', 'opt_state/0/mu/layers/1/w'), ('step',))
    """

    parameters: tuple[tuple[str, tuple[str, ...]], ...]

    @cached_property
    def known(self) -> dict[str, tuple[str, ...]]:
        return dict(self.parameters)

    def template(self, name: str) -> str:
        """Return a parameter's name in files, with {layer} for the number of the layer.

        >>> StoredNames((("stack/w", ("layers_0/w", "layers_1/w")),)).template("stack/w")
        'layers_{layer}/w'
        """
        first, *others = (part.split("/") for part in self.known[name])
        for other in others[:1]:
            place = next(i for i, (a, b) in enumerate(zip(first, other, strict=True)) if a != b)
            first[place] = first[place].removesuffix("0") + "{layer}"
        return "/".join(first)

    def in_order(self, parameters: Sequence[str]) -> list[tuple[str, int]]:
        """List the names of some parameters in the module, in its order, each with the parameter's index.

        >>> names = StoredNames((("ends/out", ("out",)), ("stack/w", ("layers/0/w", "layers/1/w"))))
        >>> names.in_order(["ends/out", "stack/w"])
        [('layers/0/w', 1), ('layers/1/w', 1), ('out', 0)]
        """
        pairs = [(part, index) for index, name in enumerate(parameters) for part in self.known[name]]
        return sorted(
            pairs, key=lambda pair: [(0, int(k), "") if k.isdecimal() else (1, 0, k) for k in pair[0].split("/")]
        )

    def of(self, name: str, shape: tuple[int, ...]) -> tuple[str, ...]:
        """Return the names that a leaf of the state is stored under; one of several for each layer.

        A leaf belongs to a parameter if its name ends with the parameter's, as in `sharding.optimizer_layouts`.
        """
        keys = name.split("/")
        for i in range(len(keys)):
            parts = self.known.get("/".join(keys[i:]), ())
            if len(parts) == 1 or (parts and tuple(shape[:1]) == (len(parts),)):
                return tuple("/".join([*keys[:i], part]) for part in parts)
        return (name,)


def matches(what: str, pattern: str | re.Pattern[str], name: str, names: StoredNames | None = None) -> bool:
    """Return whether a regular expression matches a parameter's name, or its names in the module (`re.search`).

    Args:
      what: of the config, for the message.

    Raises:
      ConfigError: it matches the names of some layers, whose parameters are one.

    >>> names = StoredNames((("stack/w", ("layers/0/w", "layers/1/w")),))
    >>> matches("frozen_parameters", "^layers/[01]", "stack/w", names), matches("frozen_parameters", "^out", "stack/w")
    (True, False)
    """
    if re.search(pattern, name):
        return True
    parts = names.known[name] if names else ()
    found = [part for part in parts if re.search(pattern, part)]
    if found and len(found) < len(parts):
        other = next(part for part in parts if part not in found)
        raise ConfigError(
            f"{what}: matches {found[0]} but not {other}: in a layer stack both are {name}: match all layers, or leave "
            "out stack="
        )
    return bool(found)


def stored_names(state: PyTree, shapes: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """Map the names of a state's leaves to those in a checkpoint.

    Args:
      state: a TrainState, or any tree.
      shapes: its leaves by name.
    """
    names = getattr(state, "names", None)
    return {name: (name,) if names is None else names.of(name, x.shape) for name, x in shapes.items()}


def numberless(name: str) -> str:
    """Replace numbers by stars, but not the number in a name such as `fc1`.

    >>> numberless("layers_3/fc1/kernel")
    'layers_*/fc1/kernel'
    """
    return re.sub(r"(?<=[/_])\d+(?=[/_]|$)|^\d+(?=/|$)", "*", name)
