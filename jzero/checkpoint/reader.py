"""Reading: a checkpoint straight into buffers of any layout, compared with the checksums of what was saved."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Iterable, Mapping
from math import prod
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from jzero.checkpoint import directory as files
from jzero.checkpoint import writer
from jzero.checkpoint.late import drop_late_answers
from jzero.checkpoint.leaves import checksums, is_key, nest
from jzero.distributed.host_collectives import agree, anyone, check_same, together
from jzero.errors import CheckpointError, ConfigError, in_a_line, some_of
from jzero.tree import differences, named


class Checkpoint:
    """A complete checkpoint on disk.

    Attributes:
      path, notes: as given to `save`. shapes, dtypes: of the leaves, by name, as stored.
      without: name -> checksum of the leaves that were left out.
    """

    def __init__(self, path: Path):
        said = files.read_notes(path)
        self.path, self.notes, self.keys = path, said["notes"], said["keys"]
        self._print = zlib.crc32(json.dumps(said).encode())
        self.shapes = {name: tuple(shape) for name, (_, shape, _) in said["leaves"].items()}
        self.dtypes = {name: dtype for name, (dtype, _, _) in said["leaves"].items()}
        self.without = {name: checksum for name, (_, _, checksum) in said["without"].items()}
        self._sums = {name: checksum for name, (_, _, checksum) in said["leaves"].items()}

    def __repr__(self) -> str:
        size = sum(prod(shape) * jnp.dtype(self.dtypes[name]).itemsize for name, shape in self.shapes.items())
        return f"Checkpoint({str(self.path)!r}, {len(self.shapes)} leaves, {size / 2**30:.2f} GiB)"

    @classmethod
    def find(cls, directory: str | os.PathLike | None, tag: str | float | None = None) -> Checkpoint:
        """The one of that tag, or the one that directory/latest names. The same on all processes.

        Raises:
          ConfigError: there is none, or another directory or tag on another process.
          CheckpointError: it is not complete, or damaged, or another one on another host.
        """
        writer.settle()
        check_same("reading a checkpoint", {"directory": str(directory), "tag": tag})
        path = together("reading a checkpoint", lambda: files.find(directory, tag))
        path = path.with_name(agree("the checkpoint to read", path.name)[0])  # where `latest` is not seen by all alike
        found = all_or_none("reading a checkpoint's notes", lambda: cls(path))
        if len(set(agree("a checkpoint's notes", str(found._print)))) > 1:
            raise CheckpointError(f"checkpoint {path} is another one on another host: all must see the same directory")
        return found

    def check_fit(self, shapes: Mapping[str, tuple[int, ...] | None], ours: Iterable[str] | None = None) -> None:
        """Raise a ConfigError that names the leaves in which it and a state (name -> shape, None: any) differ.

        `ours`: the names of those of its leaves that are compared; default: all.
        """
        there = {name: self.shapes[name] for name in (self.shapes if ours is None else ours)}
        if problems := differences(there, shapes):
            raise ConfigError(
                f"checkpoint {self.path} is of another model or optimizer: {some_of(problems)}. To take the parameters "
                "alone: engine.load_checkpoint(..., load_module_only=True); what fits: load_module_strict=False"
            )

    def read(self, shardings: Mapping[str, Any]) -> dict[str, jax.Array]:
        """Some of its leaves, by name, each laid out by its sharding and compared with its checksum.

        Raises:
          CheckpointError: files that are missing or damaged, with the leaves that are not what was saved.
        """
        read = all_or_none("reading", lambda: self._read(shardings), self.path)
        wrong = [n for n, s in zip(sorted(read), np.asarray(checksums(read)), strict=True) if int(s) != self._sums[n]]
        if wrong:
            raise CheckpointError(
                f"checkpoint {self.path} is damaged: {', '.join(wrong)} "
                f"{'are' if wrong[1:] else 'is'} not what was saved (checksums differ)"
            )
        keys = {name: jax.random.wrap_key_data(read[name], impl=self.keys[name]) for name in read if name in self.keys}
        return read | keys

    def _read(self, shardings: Mapping[str, Any]) -> dict[str, jax.Array]:
        drop_late_answers()
        handler = ocp.PyTreeCheckpointHandler()
        target = {name: shardings.get(name, ocp.PLACEHOLDER) for name in self.shapes}
        arguments = {
            name: ocp.ArrayRestoreArgs(sharding=sharding) if name in shardings else ocp.RestoreArgs()
            for name, sharding in target.items()
        }
        tree = handler.restore(
            epath.Path(self.path) / files.STATE,
            args=ocp.args.PyTreeRestore(item=nest(target), restore_args=nest(arguments)),
        )
        found = named(tree)
        return {name: found[name] for name in shardings}


def restore(directory: str | os.PathLike, shardings: Any, *, tag: str | float | None = None, shapes: Any = None) -> Any:
    """The state of a checkpoint, laid out by `shardings`, whatever layout it was saved from.

    Args:
      directory, tag: as given to `save`; without a tag the one that directory/latest names.
      shardings: a tree, as `TrainStep.state_shardings`.
      shapes: the same tree of arrays or ShapeDtypeStructs, as `TrainStep.state_shapes`: what must fit is compared
        first, and leaves are cast to its dtypes. Without it they have the shapes and dtypes that were saved.

    The loss scale is the one that was saved. A run of another precision than the saved one's begins with its own:
    `dataclasses.replace(state, loss_scale=step.new_loss_scale(state.loss_scale.skipped))`.

    Raises:
      ConfigError: there is none, or it is of another model or optimizer: which leaves are missing, extra or of another
        shape.
      CheckpointError: it is damaged, and how. Both on all processes.
    """
    checkpoint = Checkpoint.find(directory, tag)
    wanted = named(shapes) if shapes is not None else {}
    places = named(shardings)
    checkpoint.check_fit({name: expected_shape(wanted[name]) if wanted else None for name in places})
    read = checkpoint.read(places)
    return jax.tree.unflatten(jax.tree.structure(shardings), cast(read, wanted).values())


def expected_shape(x: Any) -> tuple[int, ...] | None:
    """What a leaf's stored shape must be; None: any, as a random key's numbers are as many as its kind has."""
    return None if is_key(x) else tuple(x.shape)


def cast(leaves: Mapping[str, jax.Array], wanted: Mapping[str, Any]) -> dict[str, jax.Array]:
    """The leaves in the dtypes of `wanted`, where the precision is another one; random keys stay of their kind."""
    return {
        n: x if n not in wanted or is_key(x) or x.dtype == wanted[n].dtype else _cast(x, wanted[n].dtype)
        for n, x in leaves.items()
    }


_cast = jax.jit(lambda x, dtype: x.astype(dtype), static_argnums=1)


def all_or_none(what: str, work: Callable[[], Any], of: object = "") -> Any:
    """What `work` gives, if it raises on no process; else a CheckpointError on all, so that nobody waits in vain.

    `what` is the same on all processes, `of` may differ.
    """
    result, problem = None, None
    try:
        result = work()
    except Exception as error:
        problem = str(error) if isinstance(error, CheckpointError) else f"{f'{what} {of}'.strip()}: {in_a_line(error)}"
        if jax.process_count() > 1:
            problem += f" (process {jax.process_index()})"
    if problem := anyone(what, problem):
        raise CheckpointError(problem)
    return result
