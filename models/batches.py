"""The columns of a batch of tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jzero.errors import ConfigError, some_of


def column(batch: Any, name: str, model: str) -> Any:
    """Return "inputs" or "labels" of a causal language model's batch.

    Raises:
      ConfigError: it has no such column, as a batch for `transformers`.
    """
    if isinstance(batch, Mapping) and name in batch:
        return batch[name]
    there = f"has {some_of(batch)}" if isinstance(batch, Mapping) else f"is {type(batch).__name__}"
    raise ConfigError(
        f"the batch {there}; {model} reads inputs and labels, where labels[i] is the token after inputs[i] "
        "(transformers shifts inside the model)"
    )
