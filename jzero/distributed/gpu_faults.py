"""Check what this process runs on: the NCCL library that is loaded, and its GPUs against CUDA_VISIBLE_DEVICES.

The wheels nvidia-nccl-cu12 and nvidia-nccl-cu13 install the same file: the one installed last replaces the other, and
`pip list` shows both.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax


def loaded_nccl(maps: str = "/proc/self/maps") -> tuple[str, str] | None:
    """Return the path and the version of the NCCL in this process; None: it has loaded none.

    Args:
      maps: the file in which the kernel lists the libraries of this process.
    """
    with contextlib.suppress(OSError), open(maps) as file:
        if path := next(iter(re.findall(r"(/\S*/libnccl\.so\S*)$", file.read(), re.M)), None):
            number = ctypes.c_int()
            ctypes.CDLL(path).ncclGetVersion(ctypes.byref(number))  # the loaded one: dlopen counts references
            return path, version_text(number.value)
    return None


def version_text(number: int) -> str:
    """Write an NCCL version code, of 2.9 and later, as text.

    >>> version_text(22703)
    '2.27.3'
    """
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


def installed() -> dict[str, str]:
    """Return the versions of JAX's CUDA plugins and of the NCCL wheels."""
    found = {}
    for cuda in ("cu12", "cu13"):
        for name in (f"jax-{cuda.replace('cu', 'cuda')}-plugin", f"nvidia-nccl-{cuda}"):
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                found[name] = importlib.metadata.version(name)
    return found


def nccl_fault(path: str, version: str, packages: Mapping[str, str]) -> str:
    """Return why the loaded NCCL is not that of JAX's CUDA plugin; "" if it is, or if nothing tells.

    >>> both = {"jax-cuda12-plugin": "0.11.2", "nvidia-nccl-cu12": "2.27.3", "nvidia-nccl-cu13": "2.28.9"}
    >>> nccl_fault("/lib/libnccl.so.2", "2.28.9", both)[:70]
    'NCCL 2.28.9 is loaded from /lib/libnccl.so.2, but nvidia-nccl-cu12 2.2'
    """
    for cuda in ("cu12", "cu13"):
        name, plugin = f"nvidia-nccl-{cuda}", f"jax-{cuda.replace('cu', 'cuda')}-plugin"
        right = packages.get(name)
        if plugin in packages and right and version != ".".join(right.split(".")[:3]):
            return (
                f"NCCL {version} is loaded from {path}, but {name} {right} belongs to {plugin}: another wheel or "
                f"LD_LIBRARY_PATH replaced it; uninstall the other, then pip install --force-reinstall --no-deps {name}"
            )
    return ""


def device_fault(env: Mapping[str, str], local_size: int, devices: Sequence[Any]) -> str:
    """Return why this process does not use the GPUs that it sees; "" if it does.

    Args:
      local_size: processes on this host; several use one GPU each.
      devices: `jax.local_devices()`.
    """
    visible = env.get("CUDA_VISIBLE_DEVICES", "")
    asked = getattr(jax.config, "jax_platforms", None) or ""  # as JAX_PLATFORMS
    if not visible or visible == "-1" or (asked and not {"cuda", "gpu"} & set(asked.split(","))):
        return ""
    wanted = len(visible.split(",")) if local_size == 1 else 1
    gpus = sum(device.platform in ("gpu", "cuda") for device in devices)
    if gpus == wanted:
        return ""
    return (
        f"CUDA_VISIBLE_DEVICES = {visible!r} and {local_size} processes on this host: expected {wanted} GPUs in this "
        f"process, JAX has {len(devices)} x {devices[0].platform}; see `jzero report` for its plugin and driver"
    )


def faults(env: Mapping[str, str], local_size: int) -> list[str]:
    """List the faults of this process."""
    nccl = loaded_nccl()
    found = [device_fault(env, local_size, jax.local_devices()), nccl_fault(*nccl, installed()) if nccl else ""]
    return [fault for fault in found if fault]
