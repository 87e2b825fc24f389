"""Reads a checkpoint into a state of any layout, with or without a layer stack, with moments in fp8 or not."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from jzero.checkpoint.checksums import is_key
from jzero.checkpoint.orbax_trees import stack_layers
from jzero.checkpoint.reader import Checkpoint
from jzero.checkpoint.snapshot import Names, layer_sharding
from jzero.display.slow_work import slow_work
from jzero.distributed.place import log_dist
from jzero.errors import ConfigError, some_of
from jzero.kernels.fp8.delayed_scaling import LEAVES
from jzero.layout.offload import to_devices
from jzero.optimizers import moments
from jzero.stored_names import stored_names
from jzero.tree import PyTree, named

Shapes = Mapping[str, tuple[int, ...] | None]  # of leaves by their names in a checkpoint; None: any
OPTIMIZER = "opt_state/"
_PART = re.compile(f"^({OPTIMIZER}(?:inner/)?)(codes|scales)/")  # of an `optimizers.moments.Fp8State`


@dataclass(frozen=True)
class Selection:
    """The part of a checkpoint to read.

    Attributes:
      strict: the checkpoint must contain every selected leaf, in its shape, and no others. False: read what fits.
      only_module: the parameters alone, without counters or the position in the data.
      optimizer: the optimizer's state.
      schedule: the position in the learning-rate schedule.
    """

    strict: bool = True
    only_module: bool = False
    optimizer: bool = True
    schedule: bool = True

    def __contains__(self, name: str) -> bool:
        """Return whether the leaf of this name is selected."""
        if self.only_module:
            return name == "params" or name.startswith("params/")  # the parameters may be one array
        if name in ("step", "loss_scale/skipped"):
            return self.schedule
        return self.optimizer or not name.startswith(OPTIMIZER)


def restore(
    directory: str | os.PathLike, shardings: PyTree, *, tag: str | float | None = None, shapes: PyTree = None
) -> PyTree:
    """Read a state with the given shardings, from a checkpoint of any layout. All processes call it.

    The loss scale is the saved one. To restore into another precision, start with a new loss scale:
    `dataclasses.replace(state, loss_scale=step.new_loss_scale(state.loss_scale.skipped))`. fp8 histories that the
    checkpoint lacks start as zeros.

    Args:
      directory, tag: as given to `save`; without a tag, the checkpoint that directory/latest names.
      shardings: a tree, such as `TrainStep.state_shardings`.
      shapes: the same tree of arrays or ShapeDtypeStructs, such as `TrainStep.state_shapes`. Shapes are compared before
        reading, and leaves are cast to these dtypes. Default: the shapes and dtypes that were saved.

    Raises:
      ConfigError: no checkpoint, or one of another model or optimizer; the message names the leaves that are missing,
        extra or of another shape. Raised on all processes.
      CheckpointError: the checkpoint is damaged. Raised on all processes.
    """
    checkpoint = Checkpoint.find(directory, tag)
    wanted, places = named(shapes) if shapes is not None else {}, named(shardings)
    if not wanted and getattr(shardings, "names", None) is not None:
        raise ConfigError("restore: a model with stack= needs shapes=step.state_shapes beside step.state_shardings")
    is_state = bool(wanted) and hasattr(shardings, "fp8")
    names = stored_names(shardings, wanted or places)
    read = check_read(checkpoint, wanted, places, names, histories=is_state).read()
    return jax.tree.unflatten(jax.tree.structure(shardings), [read[name] for name in places])


@dataclass(frozen=True)
class CheckedRead:
    """A checked read of a state's leaves, made by `check_read`.

    Attributes:
      source: the checkpoint.
      wanted: arrays or ShapeDtypeStructs by name; a leaf that it lacks has no layers and keeps its dtype.
      shardings: by name.
      names: of every leaf, those in the checkpoint.
      taken: the leaves to read.
      zeros: fp8 histories that start at zero instead: one fits its `amax_history_len` and its own run's weights only.
    """

    source: Checkpoint
    wanted: Mapping[str, Any]
    shardings: Mapping[str, Sharding]
    names: Names
    taken: list[str]
    zeros: list[str]

    @slow_work("reading the checkpoint")
    def read(self) -> dict[str, jax.Array]:
        """Read the leaves by their names in the state: stacked ones layer by layer, in the dtypes of `wanted`."""
        parts: dict[str, Sharding] = {}
        for name in self.taken:
            stored, to = self.names[name], self.shardings[name]
            parts |= dict.fromkeys(stored, layer_sharding(to, self.wanted[name].shape) if len(stored) > 1 else to)
        read, made = self.source.read(parts), {}
        for name in self.taken:
            x, *layers = (read.pop(part) for part in self.names[name])
            x = stack_layers([x, *layers], self.shardings[name]) if layers else x
            cast = name in self.wanted and not is_key(x) and x.dtype != self.wanted[name].dtype
            made[name] = _astype(x, self.wanted[name].dtype) if cast else x
        self._report_zeros()
        zeros = {
            n: jnp.zeros(x.shape, x.dtype, device=self.shardings[n]) for n, x in self.wanted.items() if n in self.zeros
        }
        return made | zeros

    def _report_zeros(self) -> None:
        """Print which fp8 histories start as zeros, and why."""
        found: dict[str, list[str]] = {}
        for name in self.zeros:
            steps = {self.source.shapes[part][-1] for part in self.names[name] if part in self.source.shapes}
            other = steps - {self.wanted[name].shape[-1]}
            why = "another fp8.amax_history_len" if other else "only the weights are read"
            found.setdefault(why if steps else "not in the checkpoint", []).append(name.removeprefix(LEAVES))
        for why, weights in found.items():
            log_dist(f"fp8 histories start at zero ({why}): {some_of(weights)}", ranks=[0])


def check_read(
    source: Checkpoint, wanted: Mapping[str, Any], shardings: Mapping[str, Sharding], names: Names, *,
    selection: Selection = Selection(), histories: bool = True, kept: Collection[str] = (),
) -> CheckedRead:  # fmt: skip
    """Choose the leaves that a state reads from a checkpoint, and compare their shapes before anything is read.

    Args:
      wanted, shardings, names: see `CheckedRead`.
      histories: fp8 histories may be missing; they then start at zero.
      kept: names in the checkpoint of leaves that it lacks and the caller has.

    Raises:
      ConfigError: the selection is strict, and the checkpoint belongs to another model or optimizer.
    """
    shapes: dict[str, tuple[int, ...] | None] = {}
    for name in (name for name in shardings if name in selection):
        x, stored = wanted.get(name), names[name]  # the data of random keys differs in shape
        shapes |= dict.fromkeys(stored, None if x is None or is_key(x) else x.shape[len(stored) > 1 :])
    source = with_moments_of(source, shapes) if wanted else source

    def may_lack(name: str) -> bool:
        return name in kept or (histories and name.startswith(LEAVES))

    if selection.strict:
        theirs = [name for name in source.shapes if name in selection and not may_lack(name)]
        source.check_fit({name: shape for name, shape in shapes.items() if not may_lack(name)}, theirs)
    fit = {name for name, shape in shapes.items() if name in source.shapes and shape in (None, source.shapes[name])}
    taken = [name for name in shardings if fit.issuperset(names[name])]
    zeros = [name for name in wanted if name.startswith(LEAVES) and name not in taken]
    return CheckedRead(source, wanted, shardings, names, taken, zeros)


_astype = jax.jit(lambda x, dtype: x.astype(dtype), static_argnums=1)


def with_moments_of(source: Checkpoint, wanted: Shapes) -> Checkpoint:
    """Return the checkpoint as one of a state like `wanted`, if the two differ by moments in fp8 alone; else itself."""
    ours, theirs = _moments(wanted), _moments(source.shapes)
    to_fp8, from_fp8 = (any(_PART.match(n) for group in some.values() for n in group) for some in (ours, theirs))
    if not ours or to_fp8 == from_fp8 or ours.keys() != theirs.keys():
        return source
    log_dist(f"the moments of checkpoint {source.path} are {'rounded to' if to_fp8 else 'read from'} fp8", ranks=[0])
    return _OtherMoments(source, [(group, theirs[name]) for name, group in ours.items()], wanted)


def _moments(names: Iterable[str]) -> dict[str, list[str]]:
    """Map the names of an optimizer's leaves without fp8 to their names: [the same], or [codes, scale]."""
    found: dict[str, list[str]] = {}
    for name in sorted(name for name in names if name.startswith(OPTIMIZER)):
        found.setdefault(_PART.sub(r"\1", name), []).append(name)
    return found


class _OtherMoments(Checkpoint):
    """A checkpoint whose moments are rounded to fp8 (to the nearest number) or become float32, one array at a time.

    Args:
      pairs: the names of each of the optimizer's leaves, here and on the disk.
      wanted: the shapes of scales that the disk lacks.
    """

    def __init__(self, source: Checkpoint, pairs: list[tuple[list[str], list[str]]], wanted: Shapes):
        self.__dict__ |= source.__dict__
        self._source, self._converted = source, [pair for pair in pairs if len(pair[0]) != len(pair[1])]
        self._names = {name: name for name in source.shapes if not name.startswith(OPTIMIZER)}
        self._names |= {ours[0]: theirs[0] for ours, theirs in pairs}
        scales = {name: wanted[name] or () for ours, _ in pairs for name in ours[1:]}
        self.shapes = {name: source.shapes[there] for name, there in self._names.items()} | scales
        self.dtypes = {name: source.dtypes[there] for name, there in self._names.items()}
        self.dtypes |= dict.fromkeys(scales, "float32")

    def read(self, shardings: Mapping[str, Sharding]) -> dict[str, jax.Array]:
        pairs = [pair for pair in self._converted if pair[0][-1] in shardings]
        converted = {name for ours, _ in pairs for name in ours}
        same = [name for name in shardings if name not in converted]  # in the same order on all processes
        read = self._source.read({self._names[name]: shardings[name] for name in same})
        found = {name: read[self._names[name]] for name in same}
        for ours, theirs in pairs:
            to: Any = shardings[ours[0]]
            whole = NamedSharding(to.mesh, PartitionSpec()) if isinstance(to, NamedSharding) else to
            read = to_devices(self._source.read(dict(zip(theirs, (to, whole), strict=False))))
            moment, *scale = (read[name] for name in theirs)
            made = (_decode(moment, *scale),) if scale else _encode(moment, bool(self.shapes[ours[1]]))
            found |= {name: jax.device_put(x, shardings[name]) for name, x in zip(ours, made, strict=True)}
        return found


_encode = partial(jax.jit, static_argnums=1)(moments.encode_fp8)
_decode = jax.jit(moments.decode_fp8)
