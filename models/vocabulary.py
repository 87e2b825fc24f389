"""The tokens of a batch: its columns, and the check that they are of the vocabulary."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from jzero.errors import ConfigError, some_of


def column(batch: Any, name: str) -> Any:
    """Return "inputs" or "labels" of a causal language model's batch.

    Raises:
      ConfigError: it has no such column, as a batch for `transformers`.
    """
    if isinstance(batch, Mapping) and name in batch:
        return batch[name]
    there = f"has {some_of(batch)}" if isinstance(batch, Mapping) else f"is {type(batch).__name__}"
    raise ConfigError(
        f"the batch {there}; the decoder reads inputs and labels, where labels[i] is the token after inputs[i] "
        "(transformers shifts inside the model)"
    )


def check_tokens(batch: Any, vocab_size: int) -> None:
    """Check that integer inputs and labels are tokens of the vocabulary; the loss ignores negative labels.

    JAX reads another row for a token outside of an embedding, without an error.

    Raises:
      ConfigError: names the array, the token and the vocabulary.

    >>> check_tokens({"inputs": np.array([[0, 3]]), "labels": np.array([[3, -100]])}, vocab_size=4)
    """
    for name in ("inputs", "labels") if isinstance(batch, Mapping) else ():  # the model names what it reads
        tokens = np.asarray(batch.get(name, ()))
        if tokens.dtype.kind not in "iu":
            continue
        outside = tokens[(tokens >= vocab_size) | ((tokens < 0) & (name == "inputs"))]
        if outside.size:
            raise ConfigError(
                f"batch leaf {name!r} has token {outside[0]}, but the model's vocabulary is 0 to {vocab_size - 1}: use "
                f"the model's own tokenizer, or make the model with vocab_size = len(tokenizer) (now {vocab_size})"
            )
