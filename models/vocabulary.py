"""The check of a batch's tokens: JAX reads another row for a token outside of an embedding, without an error."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from jzero.errors import ConfigError


def check_tokens(batch: Any, vocab_size: int) -> None:
    """Check that integer inputs and labels are tokens of the vocabulary; the loss ignores negative labels.

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
