"""Reads what the devices of this process count of their memory."""

from __future__ import annotations

import jax


def fullest_first() -> list[tuple[jax.Device, dict[str, int]]]:
    """List (device, its `memory_stats()`) by the peak of bytes in use; CPU devices count nothing and are not listed."""
    stats = [(device, device.memory_stats()) for device in jax.local_devices()]
    return sorted([pair for pair in stats if pair[1]], key=lambda pair: -pair[1]["peak_bytes_in_use"])
