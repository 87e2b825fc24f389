"""What a case is: a model of others, the lines that a user writes to train it with jzero, and a tiny batch."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
import optax

ROWS = 16
CASES: dict[str, Case] = {}


class Case(NamedTuple):
    """A model to train.

    Attributes:
      package: the distribution to install, or the repository to check out.
      write: the user's lines. Returns what `jzero.from_flax` takes, (module, loss function), or a model of another
        library, with `init(rng)` and `loss(params, batch, rng)`.
      batch: the global batch.
      config: sections of the config that the model needs.
      stack: the name of the layer stack, for `from_flax(..., stack=...)`.
      module: the module to import.
    """

    package: str
    write: Callable[[], Any]
    batch: dict[str, np.ndarray]
    config: dict[str, Any]
    stack: str | None
    module: str

    @property
    def lines(self) -> int:
        """The number of statements that the user wrote, without imports; the last one stands for `from_flax`."""
        (function,) = ast.parse(textwrap.dedent(inspect.getsource(self.write))).body
        inside = [node for node in ast.walk(function) if isinstance(node, ast.stmt) and node is not function]
        return sum(not isinstance(node, ast.Import | ast.ImportFrom) for node in inside)

    @property
    def installed(self) -> bool:
        """Whether the package, or a module of the repository, can be imported."""
        top, *below = self.module.split(".")
        return find_spec(top) is not None and (not below or find_spec(self.module) is not None)

    @property
    def version(self) -> str:
        """The installed version, or "checkout"."""
        return "checkout" if "/" in self.package else version(self.package)


def third_party(
    package: str, batch: dict[str, np.ndarray], *, stack: str | None = None, module: str | None = None, **config: Any
) -> Callable:
    """Register a function as a case under its name; `config` are sections of the config that the model needs."""

    def register(write: Callable) -> Callable:
        CASES[write.__name__] = Case(package, write, batch, config, stack, module or package.replace("-", "_"))
        return write

    return register


def images(size: int, channels: int = 3, classes: int = 10) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "images": rng.normal(size=(ROWS, size, size, channels)).astype(np.float32),
        "labels": rng.integers(0, classes, ROWS).astype(np.int32),
    }


def tokens(length: int, vocabulary: int) -> dict[str, np.ndarray]:
    text = np.random.default_rng(0).integers(1, vocabulary, (ROWS, length + 1)).astype(np.int32)
    return {"inputs": text[:, :-1], "labels": text[:, 1:]}


def cross_entropy(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
