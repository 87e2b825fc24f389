"""Rotary positions (Su et al., arXiv:2104.09864), and frequencies stretched for long contexts.

Shape suffixes: B batch, S sequence, H heads, C width of a head, R rotated dimensions, the first ones of a head.
"""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jzero.errors import ConfigError


class Rope(NamedTuple):
    frequency: jax.Array  # the angles per position [R / 2], float32
    magnitude: float | jax.Array = 1.0  # the factor of the rotated vectors' length


@dataclass(frozen=True)
class RopeScaling:
    """The stretch of rotary frequencies for contexts longer than those of pretraining.

    "linear" divides all by `factor` (Chen et al., arXiv:2306.15595). "llama3" divides those with fewer than `low` turns
    in `original` positions, keeps those with more than `high`, and interpolates between (Llama 3.1). "yarn" does so by
    dimension (Peng et al., arXiv:2309.00071). "dynamic" enlarges the base for rows longer than `original`. "longrope"
    divides each by a number of its own, from `long` for such rows and from `short` otherwise (arXiv:2402.13753).
    """

    kind: Literal["linear", "dynamic", "llama3", "yarn", "longrope"]
    factor: float
    low: float = 1.0
    high: float = 4.0
    original: int = 8192  # positions in pretraining
    attention_factor: float | None = None  # multiplies the rotated queries and keys; default: that of the method
    mscale: float | None = None  # yarn's default is mscale's factor divided by mscale_all's, if both are given
    mscale_all: float | None = None
    truncate: bool = True  # yarn rounds the first and the last dimension of the interpolation outwards
    short: tuple[float, ...] = ()
    long: tuple[float, ...] = ()

    def stretch(self, theta: float, half: int, length: int) -> jax.Array:
        """Compute the frequencies [half] of a row of `length` tokens."""
        if self.kind == "dynamic":
            ratio = max(length, self.original) / self.original
            theta = theta * (self.factor * ratio - self.factor + 1) ** (half / (half - 1))
        frequency = _plain(theta, half)
        if self.kind == "linear":
            return frequency / self.factor
        if self.kind == "longrope":
            return frequency / jnp.asarray(self.long if length > self.original else self.short, jnp.float32)
        if self.kind == "llama3":
            turns = self.original * frequency / (2 * np.pi)
            kept = jnp.clip((turns - self.low) / (self.high - self.low), 0, 1)
        elif self.kind == "yarn":
            first, last = (self._dimension(turns, theta, half) for turns in (self.high, self.low))
            if self.truncate:
                first, last = math.floor(first), math.ceil(last)
            first, last = max(first, 0), min(last, 2 * half - 1)
            kept = 1 - jnp.clip((jnp.arange(half) - first) / max(last - first, 0.001), 0, 1)
        else:
            return frequency
        return frequency * (kept + (1 - kept) / self.factor)

    def _dimension(self, turns: float, theta: float, half: int) -> float:  # of these turns in `original` positions
        return half * math.log(self.original / (turns * 2 * math.pi)) / math.log(theta)

    @property
    def magnitude(self) -> float:
        if self.attention_factor is not None or self.kind not in ("yarn", "longrope") or self.factor <= 1:
            return 1.0 if self.attention_factor is None else self.attention_factor
        if self.kind == "longrope":
            return math.sqrt(1 + math.log(self.factor) / math.log(self.original))
        grown = 0.1 * math.log(self.factor)
        if self.mscale and self.mscale_all:
            return (grown * self.mscale + 1) / (grown * self.mscale_all + 1)
        return grown + 1

    @property
    def latent_scale(self) -> float:  # of the scores of latent attention, whose vectors are rotated in part
        return (1 + 0.1 * (self.mscale_all or 0) * math.log(max(self.factor, 1))) ** 2


def _plain(theta: float, half: int) -> jax.Array:
    return theta ** (-jnp.arange(half, dtype=jnp.float32) / half)


def frequencies(width: int, theta: float, scaling: RopeScaling | None = None, length: int = 0) -> Rope:
    """Compute the angles per position [width / 2], for rows of `length` tokens."""
    if scaling is None:
        return Rope(_plain(theta, width // 2))
    return Rope(scaling.stretch(theta, width // 2, length), scaling.magnitude)


def either(condition: jax.Array, a: Rope, b: Rope) -> Rope:
    same = isinstance(a.magnitude, float) and a.magnitude == b.magnitude
    magnitude = a.magnitude if same else jnp.where(condition, a.magnitude, b.magnitude)
    return Rope(jnp.where(condition, a.frequency, b.frequency), magnitude)


def rope(
    x_BSHC: jax.Array,
    angles: Rope,  # of C or fewer dimensions, in float32: those of distant positions would round to the same value
    positions_BS: jax.Array | None = None,  # default: 0 to S - 1
    interleaved: bool = False,  # a pair is two neighbours (Cohere, GLM), and not one of each half
) -> jax.Array:
    """Rotate queries or keys by their positions."""
    frequency, magnitude = angles
    positions = jnp.arange(x_BSHC.shape[1], dtype=jnp.float32) if positions_BS is None else positions_BS
    half, axis = frequency.shape[-1], -1 if interleaved else -2  # that of the two numbers of a pair
    angle_S1P = jnp.expand_dims(positions.astype(jnp.float32)[..., None, None] * frequency, axis)
    cos, sin = jnp.cos(angle_S1P), jnp.sin(angle_S1P) * jnp.array([-1, 1]).reshape((1, 2) if interleaved else (2, 1))
    if not (isinstance(magnitude, float) and magnitude == 1):
        cos, sin = cos * magnitude, sin * magnitude
    pairs = x_BSHC[..., : 2 * half].astype(jnp.float32)
    pairs = pairs.reshape(*x_BSHC.shape[:-1], *((half, 2) if interleaved else (2, half)))
    # A flip is an index for XLA; two halves that are put together are a branch for each number. The cast comes last:
    # what attention reads is kept.
    turned = (pairs * cos + jnp.flip(pairs, axis) * sin).reshape(*x_BSHC.shape[:-1], -1).astype(x_BSHC.dtype)
    return turned if x_BSHC.shape[-1] == 2 * half else jnp.concatenate([turned, x_BSHC[..., 2 * half :]], axis=-1)


def segment_positions(segments_BS: jax.Array) -> jax.Array:
    """Number the tokens of each segment from 0, for embeddings of absolute positions in packed rows.

    >>> segment_positions(jnp.array([[1, 1, 2, 2, 2, 0]])).tolist()
    [[0, 1, 0, 1, 2, 0]]
    """
    index = jnp.arange(segments_BS.shape[1])
    begins = jnp.pad(segments_BS[:, 1:] != segments_BS[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    return index - jax.lax.cummax(jnp.where(begins, index, 0), axis=1)


def learned_positions(length: int, most: int, segments_BS: jax.Array | None = None) -> jax.Array:
    """Return the rows of a table of positions for rows of tokens: [S], or [B, S] with segments."""
    if length > most:  # a lookup would repeat the last one's
        raise ConfigError(f"a row has {length} tokens, but the model has {most} positions: shorten the rows")
    return jnp.arange(length) if segments_BS is None else segment_positions(segments_BS)
