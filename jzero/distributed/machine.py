"""Find out what this machine has for a job, and what is wrong with it: its GPUs, its NCCL, its memory.

The wheels of NCCL for CUDA 12 and 13 install the same file: the one installed last replaces the other, and `pip list`
shows both. The launcher sends this module to its agents, so JAX is imported where it is needed.
"""

from __future__ import annotations

import contextlib
import ctypes
import glob
import importlib.metadata
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import jax

NCCL = "libnccl.so.2"
PLUGINS = {"nvidia-nccl-cu12": "jax-cuda12-plugin", "nvidia-nccl-cu13": "jax-cuda13-plugin"}  # wheel -> JAX's plugin


def count_gpus() -> int:
    """Count this machine's GPUs without starting CUDA, which would take memory on each of them."""
    return sum(bool(re.fullmatch(r"/dev/nvidia\d+", path)) for path in glob.glob("/dev/nvidia*"))


def installed_wheels(*others: str) -> dict[str, str]:
    """Return the versions of JAX's CUDA plugins, of the NCCL wheels and of these others."""
    found = {}
    for name in (*others, *PLUGINS.values(), *PLUGINS):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def nccl_to_load() -> tuple[str, str]:
    """Return the path of the NCCL that JAX would load, and its version with its wheel; "" if there is none.

    JAX prefers a wheel's file to LD_LIBRARY_PATH.
    """
    folders = os.environ.get("LD_LIBRARY_PATH", "").split(":")
    others = (f"{folder}/{NCCL}" for folder in folders if folder and os.path.exists(f"{folder}/{NCCL}"))
    path = next((path for _, path, _ in _nccl_files()), "") or next(others, "")
    wheel = wheel_of(path)
    return path, f"{importlib.metadata.version(wheel)} ({wheel})" if wheel else "? (no wheel's)"


def loaded_nccl(maps: str = "/proc/self/maps") -> tuple[str, str] | None:
    """Return the path and the version of the NCCL in this process; None: it has loaded none.

    Args:
      maps: the file in which the kernel lists the libraries of this process.
    """
    with contextlib.suppress(OSError), open(maps) as file:
        if path := next(iter(re.findall(r"(/\S*/libnccl\.so\S*)$", file.read(), re.M)), None):
            number = ctypes.c_int()
            ctypes.CDLL(path).ncclGetVersion(ctypes.byref(number))  # the loaded one: dlopen counts references
            code = number.value  # 22703 is 2.27.3, since 2.9
            return path, f"{code // 10000}.{code // 100 % 100}.{code % 100}"
    return None


def wheel_of(path: str) -> str:
    """Return the wheel that installed the file at this path last; "" if none did."""
    there, size = os.path.realpath(path), os.path.getsize(path) if os.path.exists(path) else -1
    return next((name for name, at, own in _nccl_files() if os.path.realpath(at) == there and own == size), "")


def _nccl_files() -> Iterator[tuple[str, str, int | None]]:
    """Yield each installed NCCL wheel with the path of its library and the size that the wheel's has."""
    for name in PLUGINS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError, OSError):
            for file in importlib.metadata.files(name) or ():
                if file.name == NCCL:
                    yield name, str(file.locate()), file.size


def nccl_fault(path: str, version: str, packages: Mapping[str, str]) -> str:
    """Return why this NCCL is not the one of JAX's CUDA plugin; "" if it is, or if nothing tells.

    Args:
      version: "2.28.9", with the wheel if that is known: "2.28.9 (nvidia-nccl-cu13)"; "?": unknown.
      packages: as from `installed_wheels`.

    >>> both = {"jax-cuda12-plugin": "0.11.2", "nvidia-nccl-cu12": "2.27.3", "nvidia-nccl-cu13": "2.28.9"}
    >>> nccl_fault("/lib/libnccl.so.2", "2.28.9", both)[:70]
    'NCCL 2.28.9 is loaded from /lib/libnccl.so.2, but nvidia-nccl-cu12 2.2'
    """
    number, _, wheel = version.partition(" ")
    for name, plugin in PLUGINS.items():
        right, other = packages.get(name, ""), wheel.strip("()")
        if plugin not in packages:
            continue
        if (other in PLUGINS and other != name) or (right and number not in ("?", ".".join(right.split(".")[:3]))):
            return (
                f"NCCL {version} is loaded from {path}, but {name} {right}".rstrip() + f" belongs to {plugin}: another "
                "wheel or LD_LIBRARY_PATH replaced it; uninstall the other, then pip install --force-reinstall "
                f"--no-deps {name}"
            )
    return ""


def device_fault(env: Mapping[str, str], local_size: int, devices: Sequence[jax.Device]) -> str:
    """Return why this process does not use the GPUs that it sees; "" if it does.

    Args:
      local_size: processes on this host; several use one GPU each.
      devices: `jax.local_devices()`.
    """
    import jax

    visible = env.get("CUDA_VISIBLE_DEVICES", "")
    asked = getattr(jax.config, "jax_platforms", None) or ""  # as JAX_PLATFORMS
    if not visible or visible == "-1" or (asked and not {"cuda", "gpu"} & set(asked.split(","))):
        return ""
    wanted = len(visible.split(",")) if local_size == 1 else 1
    if sum(device.platform in ("gpu", "cuda") for device in devices) == wanted:
        return ""
    return (
        f"CUDA_VISIBLE_DEVICES = {visible!r} and {local_size} processes on this host: expected {wanted} GPUs in this "
        f"process, JAX has {len(devices)} x {devices[0].platform}; see `jzero report` for its plugin and driver"
    )


def process_faults(env: Mapping[str, str], local_size: int) -> list[str]:
    """List the faults of this process."""
    import jax

    found = [device_fault(env, local_size, jax.local_devices())]
    if nccl := loaded_nccl():
        path, version = nccl
        wheel = wheel_of(path)
        found.append(nccl_fault(path, f"{version} ({wheel})" if wheel else version, installed_wheels()))
    return [fault for fault in found if fault]


def fullest_first() -> list[tuple[jax.Device, dict[str, int]]]:
    """List (device, its `memory_stats()`) by the peak of bytes in use; CPU devices count nothing and are not listed."""
    import jax

    stats = [(device, device.memory_stats()) for device in jax.local_devices()]
    return sorted([pair for pair in stats if pair[1]], key=lambda pair: -pair[1]["peak_bytes_in_use"])


def memory_gb(root: Path = Path("/")) -> int:
    """Return the memory in GiB that processes of this job may use: the host's, or the limit of a cgroup.

    Slurm (`--mem`), Kubernetes and Docker limit a job by a cgroup, and kill its processes when they pass the limit.

    Args:
      root: the file system's root, for tests.
    """
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([host, *_cgroup_limits(root)]) // 2**30


def _cgroup_limits(root: Path) -> Iterator[int]:
    """Yield the limits in bytes of this process's cgroups and of their parents, in versions 1 and 2."""
    groups = root / "proc/self/cgroup"
    for line in groups.read_text().splitlines() if groups.is_file() else ():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        top = root / ("sys/fs/cgroup/memory" if controllers else "sys/fs/cgroup")
        name = "memory.limit_in_bytes" if controllers else "memory.max"
        folder = top / path.lstrip("/")  # in a container the path may be the host's; then only the top exists
        for group in (folder, *folder.parents):
            if group.is_relative_to(top) and (group / name).is_file():
                limit = (group / name).read_text().strip()
                if limit.isdigit():  # "max": no limit
                    yield int(limit)
