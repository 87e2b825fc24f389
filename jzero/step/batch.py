"""Global batches: checking their size, and sharding them over the devices of one or several processes."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jzero.distributed.host_collectives import run_on_all
from jzero.errors import ConfigError
from jzero.layout.offload import to_devices
from jzero.tree import leading_dim, named, path_name


class Amount(NamedTuple):
    """The size of a batch: samples, and tokens where that means something."""

    samples: int = 0
    tokens: int | None = None

    def times(self, n: int) -> Amount:
        """Return what n such batches hold."""
        return Amount(n * self.samples, None if self.tokens is None else n * self.tokens)


def amount_of(batch: Any) -> Amount:
    """Count the rows of a global batch, and its tokens, padding included.

    Tokens are the integers of `inputs`, `input_ids` or `tokens` with the shape [rows, length], or of a batch that is
    such an array or begins with one. Bytes (uint8) count as pixels.

    >>> amount_of({"inputs": np.zeros((8, 128), np.int32), "labels": np.zeros((8, 128), np.int32)})
    Amount(samples=8, tokens=1024)
    """
    arrays = named(batch)
    if not arrays:
        return Amount()
    named_so = [arrays[name] for name in ("inputs", "input_ids", "tokens") if name in arrays]
    x = [*named_so, next(iter(arrays.values()))][0]
    integers = jax.numpy.issubdtype(x.dtype, np.integer) and x.dtype.itemsize > 1
    is_text = (named_so or not isinstance(batch, Mapping)) and x.ndim == 2 and integers
    return Amount(next(iter(arrays.values())).shape[0], int(np.prod(x.shape)) if is_text else None)


def host_arrays(batch: Any) -> Any:
    """Replace PyTorch's tensors by NumPy arrays that share their memory, and other libraries' mappings by dicts.

    PyTorch is not imported: a program that did not import it has no tensors.

    Args:
      batch: a pytree; a mapping that JAX does not know (`transformers.BatchEncoding`) counts as a dict.

    Raises:
      ConfigError: a tensor outside the host's memory.
    """
    tensor = getattr(sys.modules.get("torch"), "Tensor", ())

    def one(path: tuple, x: Any) -> Any:
        if isinstance(x, Mapping):
            return host_arrays(dict(x))
        return _of_tensor(path_name(path) or "batch", x) if isinstance(x, tensor) else x

    return jax.tree_util.tree_map_with_path(one, batch)


def _of_tensor(name: str, x: Any) -> np.ndarray:
    if x.device.type != "cpu":
        raise ConfigError(
            f"leaf {name!r} is a torch tensor on {x.device}: jzero puts batches on the devices itself, so leave out "
            ".to(...) and .cuda(), or write .to(engine.device), the host"
        )
    kind = str(x.dtype).removeprefix("torch.")
    if not kind.startswith(("bfloat16", "float8")):
        return x.numpy(force=True)  # detached
    torch = sys.modules["torch"]  # NumPy lacks these dtypes, and gets their bits
    bits = x.detach().contiguous().view(torch.int16 if kind == "bfloat16" else torch.int8)
    return bits.numpy().view(jax.numpy.dtype(kind))


SMALL = 2**20  # bytes; see `BatchPlacer.place`


class BatchPlacer:
    """Puts batches onto the devices, and checks them, once for each new shape: a steady step costs the host little."""

    def __init__(self, sharding: NamedSharding):
        self.sharding = sharding  # of every leaf
        self._known: set[Any] = set()  # shapes that were checked
        self._keeps = sharding.mesh.size == 1  # small arrays on the host; the program of a placed one is another

    def place(
        self, parts: Sequence[Any], rows: int, why: str, *, multiples: bool = False, keep_small: bool = False
    ) -> tuple[Any, ...]:
        """Return the parts of a batch on the devices, checked; the arguments are those of `check_batch`.

        Args:
          keep_small: leave small arrays to the call of a program whose arguments have this sharding.
        """
        parts = self._checked(parts, rows, why, multiples)
        if keep_small:
            # On one device the call of the program copies NumPy arrays in C++, which takes the host a tenth of the time
            # of `jax.device_put` (43 and 470 us for two small arrays). It copies them before it returns, so large ones
            # are placed, in the background; after such a batch all are.
            self._keeps = self._keeps and all(map(_is_small, jax.tree.leaves(parts)))
            if self._keeps:
                return parts
        return tuple(place_batch(x, self.sharding, leading_dim(x) if multiples else rows) for x in parts)

    def _checked(self, parts: Sequence[Any], rows: int, why: str, multiples: bool) -> tuple[Any, ...]:
        """Return the parts of a batch as arrays, checked."""
        parts = tuple(parts)
        leaves, tree = jax.tree.flatten(parts)
        facts = [(type(x), getattr(x, "shape", None), getattr(x, "dtype", None)) for x in leaves]
        key = rows, multiples, tree, *facts
        if key in self._known:
            return parts
        arrays = all(isinstance(x, np.ndarray | jax.Array) for x in leaves)
        parts = parts if arrays else tuple(map(host_arrays, parts))
        for part in parts:
            check_batch(part, rows, self.sharding, why, multiples)
        if arrays:  # others are converted each time, and another library's mapping shows no shapes
            self._known.add(key)
        return parts


def _is_small(x: Any) -> bool:
    return isinstance(x, np.ndarray) and x.dtype.itemsize < 8 and x.dtype.isnative and x.nbytes <= SMALL


def place_batch(batch: Any, sharding: NamedSharding, rows: int) -> Any:
    """Shard a global batch over the devices.

    Args:
      batch: leaves with `rows` rows. With several processes each passes all rows, or only the rows of its devices in
        order: with one process per GPU and no pipeline, the rank-th part.
      sharding: of every leaf.
      rows: of the global batch.

    Raises:
      ConfigError: a leaf of 64-bit numbers has a value that its 32-bit dtype on the devices does not hold.
    """

    def one(x: Any) -> jax.Array:
        if isinstance(x, jax.Array) and (x.sharding == sharding or not x.is_fully_addressable):
            return jax.device_put(x, sharding)
        x = np.asarray(x)
        # Either all rows of the global batch, of which each device takes its own, or those of this process.
        if len(x) == rows:
            return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])
        return jax.make_array_from_process_local_data(sharding, x, (rows, *x.shape[1:]))

    if all(isinstance(x, jax.Array) and x.sharding == sharding for x in jax.tree.leaves(batch)):
        return batch
    for name, x in named(batch).items():
        check_dtype(name, x)
        check_range(name, x)
    if jax.process_count() == 1:
        return jax.device_put(batch, sharding)  # all leaves in one call, which takes the host a third less time
    return jax.tree.map(one, batch)


def place_extra(extra: Any, mesh: Mesh) -> Any:
    """Put what goes with the batch onto the mesh: host arrays replicated; arrays on the mesh stay as they are.

    Raises:
      ConfigError: a leaf that is no array, or an array on other devices.
    """
    if extra is None:
        return None
    everywhere = NamedSharding(mesh, PartitionSpec())

    def one(path: tuple, x: Any) -> jax.Array:
        name = path_name(path) or "extra"
        if isinstance(x, jax.Array) and x.committed:
            if x.sharding.device_set != set(mesh.devices.flat):
                raise ConfigError(
                    f"extra: leaf {name!r} is on {len(x.sharding.device_set)} devices, but the step's mesh has "
                    f"{mesh.size}: pass it as a NumPy array, or put it onto the mesh with jax.device_put"
                )
            return to_devices(x)
        if not isinstance(x, jax.Array | np.ndarray | np.generic | float | int):
            raise ConfigError(
                f"extra: leaf {name!r} is {x!r}: pass arrays and numbers; bind others to the loss function"
            )
        check_dtype(name, x, "extra: leaf")
        check_range(name, x)
        return jax.device_put(x, everywhere)

    return jax.tree_util.tree_map_with_path(one, host_arrays(extra))


def check_dtype(name: str, x: Any, what: str = "batch leaf") -> None:
    """Raise a ConfigError for a leaf that contains no numbers, such as strings and objects: no device holds them."""
    kind = x.dtype if hasattr(x, "dtype") else np.dtype(type(x)) if isinstance(x, str | bytes) else None
    if kind is not None and kind.kind in "OSUMm":
        raise ConfigError(
            f"{what} {name or 'batch'!r} has dtype {kind.name}: leaves are arrays of numbers; leave it out, or turn "
            "text into tokens first"
        )


def check_range(name: str, x: Any) -> None:
    """Raise a ConfigError if JAX, which makes 64-bit numbers 32 bits wide, would change a value of a host array.

    2**40 + 7 would become 7, and 1e300 infinity.
    """
    # The check takes a tenth to a fifth of the time of JAX's conversion: 0.02 ms for 8 rows of 4,096 tokens. Float64
    # leaves that contain infinity take as long as the conversion.
    if not isinstance(x, np.ndarray) or x.dtype.kind not in "iuf" or not x.size:
        return
    if (dtype := jax.dtypes.canonicalize_dtype(x.dtype)) == x.dtype:
        return
    extremes = np.fmin.reduce(x, None), np.fmax.reduce(x, None)  # they skip NaN
    if x.dtype.kind == "f" and np.isinf(extremes).any():  # infinity stays infinity
        finite = x[np.isfinite(x)]
        extremes = finite.min(initial=0), finite.max(initial=0)
    for value in extremes:
        with np.errstate(over="ignore"):
            becomes = value.astype(dtype)
        if np.isinf(becomes) if x.dtype.kind == "f" else becomes != value:
            raise ConfigError(
                f"batch leaf {name or 'batch'!r} has dtype {x.dtype} and contains {value}, which becomes {becomes} as "
                f"{dtype}, JAX's dtype on the devices: use smaller numbers (of a hash, x & 0xFFFFFFFF), or set "
                "jax_enable_x64"
            )


def rows_of_this_process(sharding: NamedSharding, rows: int) -> np.ndarray:
    """List the rows of a global batch that are stored on this process's devices, in order."""
    places = sharding.addressable_devices_indices_map((rows,)).values()
    parts = {(part[0] if part else slice(None)).indices(rows) for part in places}
    return np.unique(np.concatenate([np.arange(*part) for part in sorted(parts)]))


def check_first_batch(model: Any, parts: Any) -> None:
    """Call the model's `check_batch`, if it has one, with this process's rows of each part of a batch on the devices.

    All processes call it, and a ConfigError on one is raised on all.
    """

    def check() -> None:
        for part in parts:
            model.check_batch(jax.tree.map(_rows_here, part))

    if getattr(model, "check_batch", None) is not None:
        run_on_all("the first batch", check)


def _rows_here(x: jax.Array | np.ndarray) -> np.ndarray:
    """Copy this process's rows to the host, each once, though several devices may hold it."""
    if isinstance(x, np.ndarray) or x.is_fully_addressable:
        return np.asarray(x)
    parts = {str(shard.index): shard.data for shard in x.addressable_shards}
    return np.concatenate([np.asarray(part) for part in parts.values()])


def check_batch(batch: Any, rows: int, sharding: NamedSharding, why: str, multiples: bool = False) -> None:
    """Check the leading dimension of every leaf: the expected number of rows, or those of this process's devices.

    Args:
      rows: the expected number.
      sharding: of every leaf on the devices.
      why: the arithmetic behind `rows`, for the message.
      multiples: whether multiples of `rows` are valid.

    Raises:
      ConfigError: a leaf with another number of rows.
    """
    leaves = named(batch)
    if not leaves:
        raise ConfigError("batch: it contains no arrays; pass a pytree of arrays")
    also = rows if jax.process_count() == 1 else len(rows_of_this_process(sharding, rows))
    for name, x in leaves.items():
        check_dtype(name, x)
        shape = tuple(getattr(x, "shape", ()))
        if not shape or not shape[0] or (shape[0] % rows if multiples else shape[0] not in (rows, also)):
            here = f", or {also} on this process" if also != rows and not multiples else ""
            raise ConfigError(
                f"batch leaf {name or 'batch'!r} has shape {shape}: its leading dimension must be "
                f"{'a multiple of ' * multiples}{rows}{here} ({why})"
            )
