"""Sizes in bytes as text."""

from __future__ import annotations


def size_text(n_bytes: float) -> str:
    """Format bytes in the unit that leaves one to three digits before the point: `1.54 GiB`."""
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    while n_bytes >= 1000 and len(units) > 1:
        n_bytes /= 1024
        units.pop(0)
    digits = 0 if units[0] == "B" or n_bytes >= 100 else 1 if n_bytes >= 10 else 2
    return f"{n_bytes:.{digits}f} {units[0]}"
