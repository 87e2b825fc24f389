"""Device descriptions from which XLA compiles real GPU programs on a machine without a GPU."""

import contextlib
import functools
import importlib.util
import os
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import jax
from jax.experimental import topologies

from jzero.errors import ConfigError, install_command
from jzero.planner.memory import CUDA_ROOM, FRACTION, NCCL_ROOM, PREALLOCATED, UsableMemory


@dataclass(frozen=True)
class GPU:
    """The properties of a GPU that XLA's compiler uses. Sizes in bytes, bandwidth in bytes/s, clock in GHz.

    The numbers are the device properties CUDA reports and agree with the target files in XLA's own sources
    (openxla/xla, ``xla/backends/gpu/target_config/specs``). An older XLA rejects unknown fields, so only fields that
    change the program are given; the rates per data type in those files do not change it.
    """

    description: str
    compute_capability: tuple[int, int]
    memory: int
    memory_bandwidth: int
    l2_cache: int
    cores: int  # streaming multiprocessors
    fpus_per_core: int
    clock: float
    shared_memory_per_core: int
    shared_memory_per_block: int  # the opt-in maximum
    nvlinks: int
    tflops: tuple[float, float]  # of dense products in 16 bits, and of float32 (in TF32); from the data sheets
    watts: int  # the power limit that the card is sold with; from the data sheets
    source: str  # of the device properties
    threads_per_core: int = 2048

    def usable(self, gpus: int) -> UsableMemory:
        """Return what one of ``gpus`` such GPUs has for XLA.

        The environment's share is XLA's limit; without one, a plan lets XLA have the most that there is, since a run
        that needs it sets the share. XLA then compiles the program of that run: short of memory, it schedules another.
        """
        given, nccl = os.environ.get(FRACTION), NCCL_ROOM if gpus > 1 else 0
        preallocated, most = int(float(given or PREALLOCATED) * self.memory), self.memory - nccl - CUDA_ROOM
        return UsableMemory(self.memory, preallocated, most, preallocated if given else most, nccl)

    def text_proto(self, limit: int) -> str:
        """Render the text form of XLA's ``GpuTargetConfigProto``; ``limit``: bytes that XLA may have."""
        major, minor = self.compute_capability
        feature = "ACCELERATED_FEATURES" if major >= 9 else "NONE"  # sm_90a, sm_100a
        device = {
            "name": f'"{self.description}"',
            "device_vendor": '"NVIDIA Corporation"',
            "cuda_compute_capability": f"{{ major: {major} minor: {minor} feature_extension: {feature} }}",
            # XLA takes four fifths of this for its limit, where no allocator tells one.
            "device_memory_size": limit * 5 // 4,
            "memory_bandwidth": self.memory_bandwidth,
            "l2_cache_size": self.l2_cache,
            "clock_rate_ghz": self.clock,
            "core_count": self.cores,
            "fpus_per_core": self.fpus_per_core,
            "shared_memory_per_core": self.shared_memory_per_core,
            "shared_memory_per_block": 48 * 1024,
            "shared_memory_per_block_optin": self.shared_memory_per_block,
            "threads_per_core_limit": self.threads_per_core,
            # The same for every NVIDIA GPU since Volta.
            "threads_per_warp": 32,
            "threads_per_block_limit": 1024,
            "registers_per_core_limit": 65536,
            "registers_per_block_limit": 65536,
            "thread_dim_limit_x": 1024,
            "thread_dim_limit_y": 1024,
            "thread_dim_limit_z": 64,
            "block_dim_limit_x": 2**31 - 1,
            "block_dim_limit_y": 65535,
            "block_dim_limit_z": 65535,
            "device_interconnect_info": f"{{ active_links: {self.nvlinks} }}",
            # The software versions that XLA may assume.
            "driver_version": '"13.0.0"',
            "runtime_version": '"12.8.0"',
            "compile_time_toolkit_version": '"12.8.0"',
            "dnn_version": '"9.10.0"',
        }
        fields = "\n".join(f"  {key}: {value}" for key, value in device.items())
        return (
            f"gpu_device_info {{\n{fields}\n}}\n"
            'platform_name: "CUDA"\n'
            "dnn_version_info { major: 9 minor: 10 }\n"
            f'device_description_str: "{self.description}"\n'
        )


_XLA = "openxla/xla, xla/backends/gpu/target_config/specs/"
_SHEET, _QUERY = "data sheet; the memory ", "CUDA's deviceQuery; the "
_KIB, _MIB = 2**10, 2**20
GPUS: dict[str, GPU] = {
    # The columns are the fields of `GPU`, in their order.
    "t4": GPU(
        "Tesla T4", (7, 5), 15_843_721_216, 320_064_000_000, 4 * _MIB, 40, 64, 1.59, 64 * _KIB, 64 * _KIB, 0,
        (65, 8.1), 70, _QUERY + "bandwidth as TensorFlow logs it (298.08 GiB/s)", 1024,
    ),
    "rtx4090": GPU(
        "NVIDIA GeForce RTX 4090", (8, 9), 25_393_692_672, 1_008_096_000_000, 72 * _MIB, 128, 128, 2.52, 100 * _KIB,
        99 * _KIB, 0, (165.2, 82.6), 450, _QUERY + "products are those that add in float32 (Ada white paper)", 1536,
    ),
    "l40s": GPU(
        "NVIDIA L40S", (8, 9), 47_670_000_000, 864_000_000_000, 96 * _MIB, 142, 128, 2.52, 100 * _KIB, 99 * _KIB, 0,
        (362, 183), 350, _SHEET + "as PyTorch's messages round it (44.4 GiB)", 1536,
    ),
    "a100-40": GPU(
        "NVIDIA A100-SXM4-40GB", (8, 0), 42_331_013_120, 1_555_200_000_000, 40 * _MIB, 108, 64, 1.41, 164 * _KIB,
        163 * _KIB, 12, (312, 156), 400, _XLA + "a100_sxm_40.txtpb",
    ),
    "a100": GPU(
        "NVIDIA A100-SXM4-80GB", (8, 0), 85_100_068_864, 2_039_040_000_000, 40 * _MIB, 108, 64, 1.41, 164 * _KIB,
        163 * _KIB, 12, (312, 156), 400, _XLA + "a100_sxm_80.txtpb",
    ),
    "h100-pcie": GPU(
        "NVIDIA H100 PCIe", (9, 0), 84_942_979_072, 2_039_040_000_000, 50 * _MIB, 114, 128, 1.755, 228 * _KIB,
        227 * _KIB, 0, (756, 378), 350, _XLA + "h100_pcie.txtpb",
    ),
    "h100-nvl": GPU(  # a bridge joins two cards only: no NVLinks
        "NVIDIA H100 NVL", (9, 0), 99_900_000_000, 3_938_000_000_000, 50 * _MIB, 132, 128, 1.785, 228 * _KIB,
        227 * _KIB, 0, (835, 417), 400, _SHEET + "is nvidia-smi's 95,830 MiB less what CUDA takes on an H100 SXM",
    ),
    "h100": GPU(
        "NVIDIA H100 80GB HBM3", (9, 0), 84_942_979_072, 3_352_320_000_000, 50 * _MIB, 132, 128, 1.98, 228 * _KIB,
        227 * _KIB, 18, (989.4, 494.7), 700, _XLA + "h100_sxm.txtpb",
    ),
    "h200": GPU(
        "NVIDIA H200", (9, 0), 151_397_597_184, 4_800_000_000_000, 50 * _MIB, 132, 128, 1.98, 228 * _KIB, 227 * _KIB,
        18, (989.4, 494.7), 700, _XLA + "h200.txtpb",
    ),
    "b200": GPU(
        "NVIDIA B200", (10, 0), 191_514_411_008, 7_672_320_000_000, 132_644_864, 148, 128, 1.965, 228 * _KIB,
        227 * _KIB, 18, (2250, 1125), 1000, _XLA + "b200.txtpb",
    ),
    "gb200": GPU(
        "NVIDIA GB200", (10, 0), 197_897_748_480, 7_928_064_000_000, 135_528_448, 152, 128, 2.062, 228 * _KIB,
        227 * _KIB, 18, (2500, 1250), 1200, _XLA + "gb200.txtpb",
    ),
}  # fmt: skip
"""The GPUs that a plan can name. Without a suffix: the SXM models, and the A100 with 80 GB."""


def gpu(name: str) -> GPU:
    """Look up a GPU by name. ``gpu("h100").memory`` is its device memory in bytes.

    Raises:
        ConfigError: the name is not in the table.
    """
    if name not in GPUS:
        raise ConfigError(f"gpu = {name!r}: unknown GPU; allowed: {', '.join(GPUS)}")
    return GPUS[name]


def gpu_devices(name: str, count: int, *, per_host: int = 8) -> list[jax.Device]:
    """Make ``count`` GPUs to compile for: they go into a ``jax.sharding.Mesh``, but nothing runs on them.

    Lower with ``jax.ShapeDtypeStruct`` arguments and compile; ``collectives`` and ``memory`` read the result. The
    devices come in host order, ``per_host`` consecutive ones on each host. A second call returns the same devices,
    so meshes built from them compare equal.

    On a machine without a GPU, JAX must know before it starts that the CPU is its platform: set the environment
    variable ``JAX_PLATFORMS=cpu`` or, as below, the option ``jax_platforms``.

    Args:
        name: a key of ``GPUS``.
        count: number of GPUs: at most ``per_host``, or a multiple of it.
        per_host: GPUs on one host.

    Raises:
        ConfigError: unknown name, a count that does not fill its hosts, or no CUDA compiler.

    Example:
        >>> jax.config.update("jax_platforms", "cpu")
        >>> devices = gpu_devices("h100", 16)
        >>> len(devices), devices[0].device_kind, devices[8].process_index
        (16, 'NVIDIA H100 80GB HBM3', 1)
    """
    target = gpu(name)
    _check_hosts(count, per_host)
    return list(_topology(target, max(1, count // per_host), min(count, per_host), target.usable(count).limit))


@functools.cache
def _topology(target: GPU, hosts: int, per_host: int, limit: int) -> tuple[jax.Device, ...]:
    try:
        topology = topologies.get_topology_desc(
            platform="cuda", target_config=target.text_proto(limit), topology=f"1x{hosts}x{per_host}"
        )
    except NotImplementedError as error:
        for plugin in ("jax-cuda12-plugin", "jax-cuda13-plugin"):
            with contextlib.suppress(PackageNotFoundError):
                if (found := version(plugin)) != (needed := version("jaxlib")):
                    raise ConfigError(
                        f"gpu: {plugin} {found} is not for jaxlib {needed}, so JAX does not load it; "
                        f"fix: pip install '{plugin}=={needed}'"
                    ) from error
        if any(importlib.util.find_spec(f"jax_cuda{number}_plugin") for number in (12, 13)):
            raise ConfigError(
                "gpu: JAX's CUDA compiler is installed, but JAX did not load it because it found no GPU; "
                "fix: set JAX_PLATFORMS=cpu, or jax.config.update('jax_platforms', 'cpu') before JAX starts"
            ) from error
        raise ConfigError(
            "gpu: compiling for GPUs needs JAX's CUDA compiler, which is not installed; "
            f"fix: {install_command('plan')} (no GPU or driver is needed); "
            "or jzero plan --formula, which needs none"
        ) from error
    return tuple(topology.devices)


@dataclass(frozen=True)
class DescribedGPU:
    """A GPU that a mesh can hold and nothing can compile for: enough for layouts, and so for bytes."""

    id: int
    process_index: int
    device_kind: str
    platform: str = "gpu"

    @property
    def client(self) -> object:
        return jax.devices()[0].client

    def default_memory(self) -> object:
        return jax.devices()[0].default_memory()

    def addressable_memories(self) -> tuple[str, ...]:
        return "device", "pinned_host"  # jaxlib takes what a device that is not its own returns as the kinds themselves


def gpu_key(device: jax.Device) -> str:
    """Return the key in ``GPUS`` of a device that is there.

    Raises:
        ConfigError: a kind of device that is not in `GPUS`.
    """
    for name, described in GPUS.items():
        if described.description == device.device_kind:
            return name
    raise ConfigError(f"{device.device_kind}: not a GPU that jzero.planner describes ({', '.join(GPUS)})")


def described_gpus(name: str, count: int, *, per_host: int = 8) -> list[Any]:
    """Describe ``count`` GPUs in a mesh's terms, without JAX's CUDA compiler: `state_bytes` needs no more.

    Args:
        name, count, per_host: as for `gpu_devices`.

    Raises:
        ConfigError: unknown name, or a count that does not fill its hosts.
    """
    target = gpu(name)
    _check_hosts(count, per_host)
    return [DescribedGPU(i, i // per_host, target.description) for i in range(count)]


def _check_hosts(count: int, per_host: int) -> None:
    if count < 1 or per_host < 1 or (count > per_host and count % per_host):
        raise ConfigError(
            f"count = {count}: {count} GPUs do not fill hosts of {per_host}; "
            f"use 1 to {per_host}, a multiple of {per_host}, or another per_host"
        )


@dataclass(frozen=True)
class Cluster:
    """GPUs of one kind, a key of `GPUS`: `gpus_per_node` of them on each of the `nodes`."""

    gpu: str
    nodes: int = 1
    gpus_per_node: int = 8

    @property
    def gpus(self) -> int:
        return self.nodes * self.gpus_per_node

    @property
    def card(self) -> GPU:
        return gpu(self.gpu)

    @property
    def usable(self) -> UsableMemory:
        return self.card.usable(self.gpus)

    def __str__(self) -> str:
        return f"{self.gpus} x {self.card.description}"

    def devices(self) -> list[jax.Device]:
        return gpu_devices(self.gpu, self.gpus, per_host=self.gpus_per_node)

    def described(self) -> list[Any]:
        return described_gpus(self.gpu, self.gpus, per_host=self.gpus_per_node)
