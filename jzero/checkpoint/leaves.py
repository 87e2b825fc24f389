"""Named leaves in the form in which a checkpoint stores them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import unflatten_dict


def nest(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Nest named leaves ("a/b") as dicts, the form in which Orbax stores them."""
    return unflatten_dict(dict(leaves), sep="/")


def is_key(x: Any) -> bool:
    """Return whether `x` is an array of random keys."""
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def key_names(leaves: Mapping[str, Any]) -> dict[str, str]:
    """Map the names of random keys to their implementations; the keys are stored as uint32 data."""
    return {name: str(jax.random.key_impl(x)) for name, x in leaves.items() if is_key(x)}


def key_data(x: Any) -> jax.Array:
    """Return the uint32 data of random keys; return other arrays unchanged."""
    return jax.random.key_data(x) if is_key(x) else x
