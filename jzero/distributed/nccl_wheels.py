"""Which NCCL JAX loads, from which wheel, and whether it is the one that JAX's CUDA plugin was built for.

The wheels for CUDA 12 and 13 install the same file: the one installed last replaces the other, and `pip list` shows
both. The launcher sends this module to its agents, so it uses only the standard library.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
from collections.abc import Iterator, Mapping

FILE = "libnccl.so.2"
PLUGINS = {"nvidia-nccl-cu12": "jax-cuda12-plugin", "nvidia-nccl-cu13": "jax-cuda13-plugin"}  # wheel -> JAX's plugin


def installed() -> dict[str, str]:
    """Return the versions of JAX's CUDA plugins and of the NCCL wheels."""
    found = {}
    for name in (*PLUGINS.values(), *PLUGINS):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def to_load() -> tuple[str, str]:
    """Return the path of the NCCL that JAX would load, and its version with its wheel; "" if there is none.

    JAX prefers a wheel's file to LD_LIBRARY_PATH.
    """
    path = next((path for _, path, _ in _files()), "")
    for folder in os.environ.get("LD_LIBRARY_PATH", "").split(":") if not path else ():
        if folder and os.path.exists(f"{folder}/{FILE}"):
            path = f"{folder}/{FILE}"
            break
    wheel = wheel_of(path)
    return path, f"{importlib.metadata.version(wheel)} ({wheel})" if wheel else "? (no wheel's)"


def wheel_of(path: str) -> str:
    """Return the wheel that installed the file at this path last; "" if none did."""
    there = os.path.realpath(path)
    return next((name for name, at, size in _files() if os.path.realpath(at) == there and _size(at) == size), "")


def fault(path: str, version: str, packages: Mapping[str, str]) -> str:
    """Return why this NCCL is not the one of JAX's CUDA plugin; "" if it is, or if nothing tells.

    Args:
      version: "2.28.9", with the wheel if that is known: "2.28.9 (nvidia-nccl-cu13)"; "?": unknown.
      packages: as from `installed`.

    >>> both = {"jax-cuda12-plugin": "0.11.2", "nvidia-nccl-cu12": "2.27.3", "nvidia-nccl-cu13": "2.28.9"}
    >>> fault("/lib/libnccl.so.2", "2.28.9", both)[:70]
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


def _files() -> Iterator[tuple[str, str, int | None]]:
    """Yield each installed NCCL wheel with the path of its library and the size that the wheel's has."""
    for name in PLUGINS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError, OSError):
            for file in importlib.metadata.files(name) or ():
                if file.name == FILE:
                    yield name, str(file.locate()), file.size


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return -1
