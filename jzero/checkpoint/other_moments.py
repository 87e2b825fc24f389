"""Converts moments to fp8 or from it, while a checkpoint of another `optimizer.state_dtype` is read."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from jzero.checkpoint.reader import Checkpoint
from jzero.distributed.place import log_dist
from jzero.offload.transfers import to_devices
from jzero.optimizers import fp8_moments

_PART = re.compile("^(opt_state/(?:inner/)?)(codes|scales)/")  # of an `optimizers.moments.Fp8State`
Shapes = Mapping[str, tuple[int, ...] | None]


def with_moments_of(source: Checkpoint, wanted: Shapes) -> Checkpoint:
    """Return the checkpoint as one of a state like `wanted`, if the two differ by moments in fp8 alone; else itself.

    Args:
      wanted: the names and shapes in a checkpoint of the state that is to be read.
    """
    ours, theirs = ({n for n in some if n.startswith("opt_state/")} for some in (wanted, source.shapes))
    to_fp8, from_fp8 = (any(map(_PART.match, names)) for names in (ours, theirs))
    if not ours or to_fp8 == from_fp8 or _without_fp8(ours) != _without_fp8(theirs):
        return source
    log_dist(f"the moments of checkpoint {source.path} are {'rounded to' if to_fp8 else 'read from'} fp8", ranks=[0])
    return _ToFp8(source, wanted) if to_fp8 else _FromFp8(source)


def _without_fp8(names: set[str]) -> set[str]:
    return {_PART.sub(r"\1", name) for name in names if not _is(name, "scales")}


def _is(name: str, part: str) -> bool:
    return (found := _PART.match(name)) is not None and found[2] == part


class _Converted(Checkpoint):
    """A checkpoint with other names of leaves: `_sources` maps them to those on disk."""

    def __init__(self, source: Checkpoint, sources: Mapping[str, str]):
        self.__dict__ |= source.__dict__
        self._source, self._sources = source, sources
        self.shapes = {name: source.shapes[there] for name, there in sources.items()}
        self.dtypes = {name: source.dtypes[there] for name, there in sources.items()}

    def _as_they_are(self, shardings: Mapping[str, Sharding]) -> dict[str, jax.Array]:
        read = self._source.read({self._sources[name]: sharding for name, sharding in shardings.items()})
        return {name: read[self._sources[name]] for name in shardings}


class _ToFp8(_Converted):
    """Moments are rounded to the nearest number, one array at a time."""

    def __init__(self, source: Checkpoint, wanted: Shapes):
        super().__init__(source, {_name_of(name, wanted): name for name in source.shapes})
        scales = {name: shape or () for name, shape in wanted.items() if _is(name, "scales")}
        self.shapes |= scales
        self.dtypes |= dict.fromkeys(scales, "float32")

    def read(self, shardings: Mapping[str, Sharding]) -> dict[str, jax.Array]:
        scales = {_PART.sub(r"\1codes/", name): name for name in shardings if _is(name, "scales")}
        found = self._as_they_are(
            {name: to for name, to in shardings.items() if name not in scales and not _is(name, "scales")}
        )
        for codes, scale in scales.items():
            x = to_devices(self._as_they_are({codes: shardings[codes]}))[codes]
            made = _encode(x, bool(self.shapes[scale]))
            found |= {name: jax.device_put(y, shardings[name]) for name, y in zip((codes, scale), made, strict=True)}
        return found


class _FromFp8(_Converted):
    """Moments become float32, one array at a time."""

    def __init__(self, source: Checkpoint):
        super().__init__(source, {_PART.sub(r"\1", n): n for n in source.shapes if not _is(n, "scales")})

    def read(self, shardings: Mapping[str, Sharding]) -> dict[str, jax.Array]:
        scales = {name: _PART.sub(r"\1scales/", self._sources[name]) for name in shardings}
        scales = {name: scale for name, scale in scales.items() if scale in self._source.shapes and scale != name}
        found = self._as_they_are({name: to for name, to in shardings.items() if name not in scales})
        for name, scale in scales.items():
            to, codes = shardings[name], self._sources[name]
            read = to_devices(self._source.read({codes: to, scale: _everywhere(to)}))
            found[name] = jax.device_put(_decode(read[codes], read[scale]), to)
        return found


def _name_of(name: str, wanted: Shapes) -> str:
    """Return the name in an fp8 state of a leaf on disk."""
    codes = re.sub("^opt_state/(?:inner/)?", r"\g<0>codes/", name)
    return codes if codes in wanted else name


_encode = partial(jax.jit, static_argnums=1)(fp8_moments.encode)
_decode = jax.jit(fp8_moments.decode)


def _everywhere(sharding: Any) -> Any:
    return NamedSharding(sharding.mesh, PartitionSpec()) if isinstance(sharding, NamedSharding) else sharding
