"""Check what this process runs on: the NCCL library that is loaded, and its GPUs against CUDA_VISIBLE_DEVICES."""

from __future__ import annotations

import contextlib
import ctypes
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from jzero.distributed import nccl_wheels


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
    found = [device_fault(env, local_size, jax.local_devices())]
    if nccl := loaded_nccl():
        path, version = nccl
        wheel = nccl_wheels.wheel_of(path)
        found.append(nccl_wheels.fault(path, f"{version} ({wheel})" if wheel else version, nccl_wheels.installed()))
    return [fault for fault in found if fault]
