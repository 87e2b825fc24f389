"""The part of a state that lies in host memory, as the config asks for it."""

from __future__ import annotations

import dataclasses
from math import prod

import jax
from jax.sharding import Mesh

from jzero.config.sections import ZeroConfig
from jzero.errors import ConfigError
from jzero.mesh import PIPE
from jzero.tree import PyTree
from jzero.zero import OnHost, ParamLayout


def choose(layouts: PyTree, config: ZeroConfig) -> PyTree:
    """Choose which parts of each parameter's state live in host memory: `ParamLayout.on_host`.

    Under `offload_optimizer.ratio` it is the largest parameters', until that share of all elements is reached.
    """
    trained = [layout for layout in jax.tree.leaves(layouts) if layout.trainable]
    wanted = config.offload_optimizer.ratio * sum(prod(layout.shape) for layout in trained)
    chosen, size = set(), 0
    for layout in sorted(trained, key=lambda layout: -prod(layout.shape)):
        if config.offload_optimizer.device == "cpu" and size < wanted:
            chosen.add(layout.name)
            size += prod(layout.shape)

    def on_host(layout: ParamLayout) -> OnHost:
        size = prod(layout.shape[layout.stacked :])
        large = not layout.state and size >= config.stage3_param_persistence_threshold
        in_use = config.offload_param.device == "cpu" and config.stage == 3 and large
        return OnHost(layout.name in chosen or in_use, layout.name in chosen, in_use)

    return jax.tree.map(lambda layout: dataclasses.replace(layout, on_host=on_host(layout)), layouts)


def check(config: ZeroConfig, mesh: Mesh) -> None:
    """Raise a ConfigError if the mesh does not support the configured offload."""
    if config.offload_param.device == "cpu" and config.stage == 3 and mesh.shape[PIPE] > 1:
        raise ConfigError(
            f'zero_optimization.offload_param.device = "cpu" with mesh.pipe = {mesh.shape[PIPE]}: a pipeline\'s stages '
            "keep their weights on the device; remove it (offload_optimizer works with pipelines), or use mesh.pipe 1"
        )
