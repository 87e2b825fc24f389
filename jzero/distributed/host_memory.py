"""How much memory this host, or the job's share of it, has."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path


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
