"""Find the faults of all hosts before any script starts, and show them in one table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

SAME = (  # versions (nccl: of the file that JAX loads) that must be the same on all hosts
    "python",
    "jzero",
    "jax",
    "jaxlib",
    "jax-cuda12-plugin",
    "jax-cuda13-plugin",
    "nvidia-nccl-cu12",
    "nvidia-nccl-cu13",
    "nccl",
    "driver",
)


def faults(hellos: Mapping[str, dict[str, Any]], wanted: Mapping[str, int]) -> dict[str, list[str]]:
    """Return host -> its faults, without the hosts that have none.

    Args:
      hellos: host -> its agent's hello, or {"error": why it does not answer}.
      wanted: host -> the number of GPUs it must have.
    """
    found: dict[str, list[str]] = {}
    heard = {host: hello for host, hello in hellos.items() if "error" not in hello}
    for host, hello in hellos.items():
        if "error" in hello:
            found.setdefault(host, []).append(hello["error"])
    for name in SAME:
        versions = {host: hello["versions"].get(name, "none") for host, hello in heard.items()}
        if len(set(versions.values())) > 1:
            usual = Counter(versions.values()).most_common(1)[0][0]  # in a tie, the first host's
            for host, version in versions.items():
                if version != usual:
                    found.setdefault(host, []).append(f"{name} {version}, elsewhere {usual}: install the same")
    for host, hello in heard.items():
        if "jax" not in hello["versions"]:
            python = hello["versions"]["python"]
            found.setdefault(host, []).append(f"no jax for Python {python}: install jzero there, at the same path")
        if hello["gpus"] < wanted[host]:
            wrong = f"{hello['gpus']} GPUs, {wanted[host]} are wanted"
            found.setdefault(host, []).append(f"{wrong}: correct --num_gpus, CUDA_VISIBLE_DEVICES or its slots")
    return found


def table(hellos: Mapping[str, dict[str, Any]], found: Mapping[str, list[str]]) -> str:
    """Draw one row per host: versions, devices and faults."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    used = [n for n in SAME if any(n in hello.get("versions", {}) for hello in hellos.values())]
    rows = Table(box=box.ASCII2, title="hosts", title_justify="left")
    for name in ("host", *used, "GPUs", "faults"):
        rows.add_column(name, overflow="fold")
    for host, hello in hellos.items():
        versions = hello.get("versions", {})
        cells = [versions.get(name, "") for name in used]
        rows.add_row(
            host,
            *cells,
            " ".join(map(str, [hello.get("gpus", ""), *hello.get("models", [])])),
            "; ".join(found.get(host, [])) or "-",
        )
    # Not the terminal's width: a table in a log file, or read over ssh, must be complete.
    console = Console(width=max(120, min(200, 60 + 12 * len(used))), color_system=None, markup=False, emoji=False)
    with console.capture() as capture:
        console.print(rows)
    return capture.get()
