"""Compare the programs of all processes, so that a difference is an error and not a hang in a collective."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import Mesh

from jzero.config import Config
from jzero.distributed.host_collectives import check_same
from jzero.tree import named


class Guard:
    """Compares config, mesh and parameters of a train step now, and every new program before its first run.

    Raises:
      ConfigError: on all processes, with the values that differ and their ranks.
    """

    def __init__(self, mesh: Mesh, config: Config, leaves: Any):
        self.shared = any(device.process_index != jax.process_index() for device in mesh.devices.flat)
        self.agreed: set[tuple] = set()
        if self.shared and jax.process_count() > 1:
            settings = config.model_dump(mode="json", warnings=False)
            parameters = {leaf.name: f"{list(leaf.shape)} {leaf.spec}" for leaf in jax.tree.leaves(leaves)}
            versions = {"jax": jax.__version__, "mesh": dict(mesh.shape)}
            check_same("train step", {"config": settings, "parameters": parameters} | versions)

    def check(self, call: str, batch: Any, times: int = 1) -> bool:
        """Compare the shapes of `batch` once per program; `call` runs on `times` batches of these shapes.

        Returns:
          Whether several processes run this program, and have run it before.
        """
        if not self.shared:
            return False
        shapes = {name: f"{x.dtype}{list(x.shape)}" for name, x in named(batch).items()}
        program = call, times, tuple(shapes.items())
        if program in self.agreed:
            return True
        check_same("train step", {"call": call, "batches": times, "batch": shapes})
        self.agreed.add(program)
        return False
