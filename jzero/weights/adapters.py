"""Low-rank adapters in files: alone, in peft's format, or merged into their matrices."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jzero.errors import ConfigError, some_of
from jzero.layout.sharding import ParamLayout
from jzero.tree import PyTree
from jzero.weights.name_map import Box, Range, ShapeDtype, Table, adapter_leaves, cut, dotted, intersect

ADAPTER_FILE, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"  # peft's names


def declared(table: Table | None) -> list[str]:
    """Return the names of the leaves of the adapters that a `weights_layout` describes.

    Raises:
      ConfigError: there are none.
    """
    if found := adapter_leaves(table):
        return found
    raise ConfigError(
        "the model has no adapters in peft's format (its weights_layout has no key adapters): give a decoder "
        "of models/ lora=LoRAConfig(...), and a shape that transformers has (if it has none, the run report says why)"
    )


def trained_beside(table: Table | None, layouts: PyTree) -> list[str]:
    """List the names of the parameters that are trained besides the adapters; [] if the table declares no adapters.

    Args:
      table: the model's `weights_layout()`.
      layouts: a `ParamLayout` for each parameter.
    """
    adapters, leaves = set(adapter_leaves(table)), list[ParamLayout](jax.tree.leaves(layouts))
    return [leaf.name for leaf in leaves if adapters and leaf.trainable and dotted(leaf.name) not in adapters]


def check_alone(others: Sequence[str], instead: str) -> None:
    """Refuse to write the adapters alone if other parameters are trained: on the old ones they give another model.

    Args:
      others: from `trained_beside`.
      instead: how to write all of the model.
    """
    if others:
        raise ConfigError(
            f"adapters alone: {some_of(others, 4)} {'is' if len(others) == 1 else 'are'} trained too, and not in "
            f'peft\'s files; train with "trainable_parameters": ["lora_"], or write the merged weights with {instead}'
        )


def trained(table: Table | None, values: Mapping[str, jax.Array]) -> set[str]:
    """Return the names of the leaves, of those that end an adapter (B), that are not zero as in a new adapter.

    Args:
      table: the model's `weights_layout()`.
      values: the leaves by dotted name; None: not known yet.
    """
    ends = {dotted(matrix["b"]) for matrix in (table or {}).get("adapters", {}).get("matrices", ())}
    return {name for name in ends if values[name] is not None and bool(jnp.any(values[name]))}


class Merge:
    """Adds adapters to their matrices: W + scale * A B, in float32, box by box and one layer at a time.

    Call it with the parts of all leaves, those of the adapters first. Host memory: the adapters, and one layer.

    Args:
      leaves: by dotted name.
      table: the model's `weights_layout()`; without adapters nothing changes.
    """

    def __init__(self, leaves: Mapping[str, ShapeDtype], table: Table | None):
        adapters = (table or {}).get("adapters", {"matrices": [], "scale": 1.0})
        self.scale = adapters["scale"]
        self.of_leaf: dict[str, list[tuple[tuple[Range, ...], str, str]]] = {}
        self.arrays: dict[str, np.ndarray] = {}
        for matrix in adapters["matrices"]:
            leaf, a, b = (dotted(matrix[key]) for key in ("leaf", "a", "b"))
            shape = leaves[leaf].shape[len(leaves[a].shape) - 2 :]  # of one layer
            ranges = cut(matrix, shape, f"weights_layout: the adapter {a}", f"{leaf} {shape}")
            self.of_leaf.setdefault(leaf, []).append((ranges, a, b))
            self.arrays |= {name: np.zeros(leaves[name].shape, np.float32) for name in (a, b)}

    def ordered(self, names: Iterable[str]) -> list[str]:
        """Sort the names of leaves, those of the adapters first."""
        return sorted(names, key=lambda name: name not in self.arrays)

    def __call__(self, leaf: str, box: Box, values: np.ndarray) -> Iterator[tuple[Box, np.ndarray]]:
        """Take in a part of an adapter, or yield a part of another leaf, merged."""
        if leaf in self.arrays:
            self.arrays[leaf][box] = values
        elif leaf not in self.of_leaf:
            yield box, values
        elif self.arrays[self.of_leaf[leaf][0][1]].ndim == 2:
            yield box, self._merged(leaf, (), box, values)
        else:
            for i, layer in enumerate(range(box[0].start, box[0].stop)):
                own = (slice(layer, layer + 1), *box[1:])
                yield own, self._merged(leaf, (layer,), own[1:], values[i])[None]

    def _merged(self, leaf: str, layer: tuple[int, ...], box: Box, values: np.ndarray) -> np.ndarray:
        sums = values.astype(np.float32)
        for part, a, b in self.of_leaf[leaf]:
            if (both := intersect(box, part)) is None:
                continue
            here, (rows, *columns) = both
            right = self.arrays[b][layer].reshape(-1, *(stop - start for start, stop in part[1:]))[:, *columns]
            product = self.arrays[a][layer][rows] @ right.reshape(len(right), -1)
            sums[here] += np.float32(self.scale) * product.reshape(-1, *right.shape[1:])
        return sums
