"""Reads a checkpoint directly into arrays of any sharding and compares their checksums."""

from __future__ import annotations

import json
import os
import shlex
import zlib
from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from jzero.checkpoint.async_save import wait_ignoring_errors
from jzero.checkpoint.checksums import checksums
from jzero.checkpoint.directory import STATE, find_checkpoint, read_notes
from jzero.checkpoint.orbax_trees import import_orbax, nest, read_arrays
from jzero.distributed.host_collectives import check_same, gather_texts, read_on_all, run_on_all
from jzero.errors import CheckpointError, ConfigError, in_a_line, some_of
from jzero.tree import differences


class Checkpoint:
    """A complete checkpoint on disk.

    Attributes:
      path: of its directory.
      notes: as given to `save`.
      shapes, dtypes, sums: of the leaves, by name, as stored; the last are checksums.
      keys: name -> implementation of the leaves that are random keys.
      without: name -> (dtype, checksum) of the leaves that were omitted.
    """

    def __init__(self, path: Path):
        notes = read_notes(path)
        self.path, self.notes, self.keys = path, notes["notes"], notes["keys"]
        self._fingerprint = zlib.crc32(json.dumps(notes).encode())
        self.shapes = {name: tuple(shape) for name, (_, shape, _) in notes["leaves"].items()}
        self.dtypes = {name: dtype for name, (dtype, _, _) in notes["leaves"].items()}
        self.without = {name: (np.dtype(dtype), checksum) for name, (dtype, _, checksum) in notes["without"].items()}
        self.sums = {name: checksum for name, (_, _, checksum) in notes["leaves"].items()}

    def __repr__(self) -> str:
        size = sum(prod(shape) * jnp.dtype(self.dtypes[name]).itemsize for name, shape in self.shapes.items())
        return f"Checkpoint({str(self.path)!r}, {len(self.shapes)} leaves, {size / 2**30:.2f} GiB)"

    @classmethod
    def find(cls, directory: str | os.PathLike | None, tag: str | float | None = None) -> Checkpoint:
        """Find the checkpoint of a tag; without a tag, the one that directory/latest names. All processes call it.

        Raises:
          ConfigError: it does not exist, or processes pass different arguments.
          CheckpointError: it is incomplete or damaged, or hosts see different checkpoints.
        """
        wait_ignoring_errors()
        check_same("reading a checkpoint", {"directory": str(directory), "tag": tag})
        path = run_on_all("reading a checkpoint", lambda: find_checkpoint(directory, tag))
        # A network file system may show hosts different contents of `latest`: process 0 decides.
        path = path.with_name(gather_texts("the checkpoint to read", path.name)[0])
        found = read_on_all("reading the notes of checkpoint", lambda: cls(path), path)
        if len(set(gather_texts("a checkpoint's notes", str(found._fingerprint)))) > 1:
            raise CheckpointError(f"checkpoint {path} differs between hosts: all hosts must share the directory")
        return found

    def check_fit(self, shapes: Mapping[str, tuple[int, ...] | None], ours: Iterable[str] | None = None) -> None:
        """Raise a ConfigError that names the leaves in which the checkpoint and a state differ.

        Args:
          shapes: of the state: name -> shape, or None for any shape.
          ours: names of the checkpoint's leaves to compare; default: all.
        """
        there = {name: self.shapes[name] for name in (self.shapes if ours is None else ours)}
        if problems := differences(there, shapes):
            raise ConfigError(
                f"checkpoint {self.path} belongs to another model or optimizer: {some_of(problems)}. "
                + self._way(there, shapes)
            )

    def _way(self, there: Mapping[str, tuple], shapes: Mapping[str, tuple | None]) -> str:
        """Say what can be loaded. Of parameters stored in another shape, the table in the notes says what they are."""
        sizes = [(there[n], shape) for n, shape in shapes.items() if shape and n in there and n.startswith("params/")]
        if self.notes.get("weights") and any(a != b and prod(a) == prod(b) for a, b in sizes):
            export = shlex.join(["jzero", "export", str(self.path.parent), "OUT"])
            return f"To load the parameters in their new shapes: {export}, then engine.load_weights(OUT)"
        return (
            "To load only the parameters: engine.load_checkpoint(..., load_module_only=True); only those that fit: "
            "load_module_strict=False"
        )

    def read(self, shardings: Mapping[str, Sharding]) -> dict[str, jax.Array]:
        """Read leaves by name, each with the given sharding, and compare their checksums.

        Every process reads only what its own devices need. The checksums are computed over the global arrays, so every
        process also learns of damage in parts that others read.

        Raises:
          CheckpointError: missing or damaged files; the message names the damaged leaves.
        """
        ocp = import_orbax()
        wanted = {name: ocp.ArrayRestoreArgs(sharding=sharding) for name, sharding in shardings.items()}
        read = read_on_all("reading", lambda: read_arrays(self.path / STATE, nest(self.dtypes), wanted), self.path)
        wrong = [n for n, s in zip(sorted(read), np.asarray(checksums(read)), strict=True) if int(s) != self.sums[n]]
        if wrong:
            raise CheckpointError(f"checkpoint {self.path} is damaged: wrong checksum of {', '.join(wrong)}")
        try:
            return read | {
                n: jax.random.wrap_key_data(read[n], impl=impl) for n, impl in self.keys.items() if n in read
            }
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"checkpoint {self.path} is damaged: random keys: {in_a_line(error)}") from None
