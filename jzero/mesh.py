"""The device mesh: named axes, the same names everywhere.

| axis      | placed along it                                                       |
|-----------|-----------------------------------------------------------------------|
| `pipe`    | pipeline stages: consecutive slices of the layer stack                |
| `data`    | replicas of a ZeRO group (DDP, MiCS, HSDP: the outer axis)            |
| `zero`    | the ZeRO group: shards of states, gradients and parameters            |
| `expert`  | a group of devices that acts as one: rows, and experts                |
| `context` | a group of devices that acts as one: parts of the sequence            |
| `tensor`  | a group of devices that acts as one: parts of weights and activations |

The batch is sharded over (`data`, `zero`). The devices that act as one get the same rows; `expert` divides these, so
it counts in the batch sizes as `data` and `zero` do. ZeRO shards over `expert` and `context` too. An axis of size 1
appears in no spec.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jzero.config.sizes import group_degrees
from jzero.distributed.joining import host_of, hosts, init_distributed
from jzero.errors import ConfigError

if TYPE_CHECKING:
    from jzero.config import Config

PIPE, DATA, ZERO, EXPERT, CONTEXT, TENSOR = AXES = ("pipe", "data", "zero", "expert", "context", "tensor")
BATCH_AXES = (DATA, ZERO)
ZERO_AXES = (ZERO, EXPERT, CONTEXT)  # ZeRO partitions over these
GROUP_AXES = (EXPERT, CONTEXT, TENSOR)  # of the devices that act as one, see `jzero.spread`


def make_mesh(
    config: Config | dict | str | None = None,
    *,
    pipe: int = 1,
    data: int = 1,
    zero: int = -1,
    expert: int = 1,
    context: int = 1,
    tensor: int = 1,
    devices: Sequence[Any] | None = None,
) -> Mesh:
    """Arrange the devices as a mesh (`pipe`, `data`, `zero`, `expert`, `context`, `tensor`).

    Args:
      config: takes the degrees from its `mesh` section (and from DeepSpeed's `mics_shard_size`) instead of
        from the keywords.
      pipe, data, zero, expert, context, tensor: the degrees; at most one may be -1, which means the rest.
      devices: default `jax.devices()`. They are sorted by host, so that the inner axes, `tensor` first, stay on
        a host's fast links, and `pipe` and `data` cross hosts.

    Raises:
      ConfigError: degrees that do not multiply to the number of devices.

    >>> make_mesh(data=2).shape["zero"] == len(jax.devices()) // 2
    True
    """
    from jzero.config import Config

    init_distributed()
    devices = jax.devices() if devices is None else devices
    # Neither ranks nor device ids need be consecutive on a host.
    devices = sorted(devices, key=lambda device: (host_of(device), device.process_index, device.id))
    keywords = {PIPE: pipe, DATA: data, ZERO: zero, EXPERT: expert, CONTEXT: context, TENSOR: tensor}
    if data == zero == -1:
        raise ConfigError(
            "mesh.data = -1 and mesh.zero = -1, its default: -1 (the rest) is allowed on one axis only; pass zero=1"
        )
    if config is None:
        config = Config.load({"mesh": keywords})
    elif keywords != {**dict.fromkeys(AXES, 1), ZERO: -1}:
        raise ConfigError(f"make_mesh: give a config or degrees {keywords}, not both; put the degrees in `mesh`")
    degrees = Config.load(config).mesh_degrees(len(devices))
    shape = [degrees[axis] for axis in AXES]
    return Mesh(np.asarray(devices).reshape(shape), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def resolve_mesh(
    config: Config, model: object, mesh: Mesh | None = None, devices: Sequence[jax.Device] | None = None
) -> tuple[Config, Mesh]:
    """Return the mesh of a run: the one passed in, else the config's; and the config with a model's own stages.

    Raises:
      ConfigError: a mesh without jzero's axes, or one that differs from the config or the model.
    """
    if mesh is not None:
        _check_axes(mesh)
    # A PipelineModule is cut already: it decides `pipe` before there is a mesh.
    config = _with_stages(config, model, mesh)
    mesh = make_mesh(config, devices=devices) if mesh is None else mesh
    _check_against(config, mesh)
    hosts()  # all processes call this function, so that one alone may ask for hosts later
    return config, mesh


def _check_axes(mesh: Mesh) -> None:
    """Raise a ConfigError unless `mesh` has jzero's axes: a foreign mesh would fail deep inside XLA."""
    if not isinstance(mesh, Mesh):
        raise ConfigError(f"mesh is {mesh!r}, not a jax.sharding.Mesh: build it with jzero.make_mesh(...)")
    if mesh.axis_names != AXES:
        raise ConfigError(f"mesh axes are {mesh.axis_names}, jzero needs {AXES}: build it with jzero.make_mesh(...)")


def _with_stages(config: Config, model: object, mesh: Mesh | None) -> Config:
    """Set the config's number of stages to the one that a `PipelineModule` was made for."""
    stages = getattr(model, "num_stages", None)
    if stages is None:
        return config
    key = "pipeline.stages" if config.pipeline.stages else "mesh.pipe"
    asked = config.pipeline.stages or (config.mesh.pipe if "pipe" in config.mesh.model_fields_set else -1)
    if mesh is not None:
        key, asked = "the mesh passed in: pipe", mesh.shape[PIPE]
    if asked not in (stages, -1):
        raise ConfigError(f"{key} = {asked}, but {model!r} has num_stages = {stages}: leave one of them out")
    return config.model_copy(update={"pipeline": config.pipeline.model_copy(update={"stages": stages})})


def _check_against(config: Config, mesh: Mesh) -> None:
    """Raise a ConfigError if the config asks for another mesh than the one passed in."""
    if config.data_parallel_size not in (None, replicas(mesh)):
        raise ConfigError(
            f"data_parallel_size = {config.data_parallel_size} in the config, but the mesh passed in has "
            f"data x zero x expert = {replicas(mesh)}: pass one of them, or jzero.make_mesh(config)"
        )
    grouped = config.zero_optimization.mics_shard_size > 0
    for axis, (key, size) in group_degrees(config).items():
        if size not in (0, mesh.shape[axis]):
            raise ConfigError(
                f"{key} = {size} in the config, but the mesh passed in has {axis} {mesh.shape[axis]}: pass one of "
                "them, or jzero.make_mesh(config)"
            )
    if not grouped and "mesh" not in config.model_fields_set:
        return
    for axis, degree in config.mesh_degrees(mesh.size).items():
        if mesh.shape[axis] != degree:
            raise ConfigError(
                f"mesh.{axis} = {degree} in the config, but the mesh passed in has {axis} {mesh.shape[axis]}: "
                "pass one of them, or jzero.make_mesh(config)"
            )


def present(mesh: Mesh, *axes: str) -> tuple[str, ...]:
    """Select the axes whose size is more than one."""
    return tuple(axis for axis in axes if mesh.shape[axis] > 1)


def replicas(mesh: Mesh) -> int:
    """Compute the data-parallel degree |data| x |zero| x |expert|: the devices whose rows add up to the batch."""
    return mesh.shape[EXPERT] * batch_parts(mesh)


def batch_parts(mesh: Mesh) -> int:
    """Compute |data| x |zero|, the parts of the batch; the devices of a group have the same one."""
    return prod(mesh.shape[axis] for axis in BATCH_AXES)


def group_size(mesh: Mesh) -> int:
    """Compute the number of devices that act as one."""
    return prod(mesh.shape[axis] for axis in GROUP_AXES)


def degrees_text(mesh: Mesh, axes: Iterable[str]) -> str:
    """Write degrees as keys of a config: "mesh.context = 2 and mesh.tensor = 4"."""
    return " and ".join(f"mesh.{axis} = {mesh.shape[axis]}" for axis in axes)


def spans_hosts(mesh: Mesh, axis: str) -> bool:
    """Return whether devices of several hosts lie along an axis."""
    hosts_of = np.asarray([host_of(device) for device in mesh.devices.flat]).reshape(mesh.devices.shape)
    return bool((hosts_of != hosts_of.take([0], axis=mesh.axis_names.index(axis))).any())


def batch_spec(mesh: Mesh) -> PartitionSpec:
    """Return the PartitionSpec of every leaf of a batch: the first dimension over (`data`, `zero`)."""
    axes = present(mesh, *BATCH_AXES)
    return PartitionSpec(axes) if axes else PartitionSpec()


def shardings(mesh: Mesh, specs: Any) -> Any:
    """Convert a tree of PartitionSpecs to NamedShardings on `mesh`."""
    return jax.tree.map(lambda s: NamedSharding(mesh, s), specs, is_leaf=lambda s: isinstance(s, PartitionSpec))


def is_gpu(mesh: Mesh) -> bool:
    """Return whether the devices of the mesh, real or only described, are GPUs."""
    return mesh.devices.flat[0].platform in ("gpu", "cuda", "rocm")
