"""Activation checkpointing: what a layer keeps for its backward pass, and what it computes or gathers again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from jzero.config import ActivationCheckpointing

Fetch = Callable[[Any], Any]  # (active, passive) -> weights


Block = Callable[[Any, Any, Any], Any]  # (weights or pair, x, key) -> x


# Outputs worth keeping: products with weights (no batch dimension) and fused attention.
_MATMULS = ("ragged_dot", "conv_general_dilated", "dot_product_attention_fwd_wrapper", "dot_product_attention_fwd")


def _keep_matmuls(primitive: Any, *args: Any, **params: Any) -> bool:
    if primitive.name == "dot_general":
        return not params["dimension_numbers"][1][0]  # no batch dimensions: a product with a weight
    return primitive.name in _MATMULS


def checkpointed(
    fetch: Fetch, block: Block, checkpointing: ActivationCheckpointing | None, *, regather: bool, unrolled: bool
) -> Block:
    """`run(pair, x, key) = block(fetch(pair), x, key)`, with the activation checkpointing of the config.

    What is recomputed in the backward pass: with "none" nothing (`regather`: but the gathered parameters, which
    are gathered again), with "matmuls" all but products with weights and fused attention, with "full" all.
    With `cpu_checkpointing` what is kept is the layer's input ("full") or the products ("matmuls", fused attention is
    then recomputed), in host memory.
    """
    kind = checkpointing.kind if checkpointing else "none"
    offload = checkpointing is not None and checkpointing.cpu_checkpointing
    policies = jax.checkpoint_policies
    policy: Callable
    if kind == "none":
        return regathering(fetch, block) if regather else lambda pair, x, key: block(fetch(pair), x, key)
    if kind == "matmuls":
        policy = policies.offload_dot_with_no_batch_dims("device", "pinned_host") if offload else _keep_matmuls
    else:
        policy = policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[], names_which_can_be_offloaded=["layer_input"] if offload else [],
            offload_src="device", offload_dst="pinned_host",
        )  # fmt: skip

    def run(pair: Any, x: Any, key: jax.Array | None) -> Any:
        return block(fetch(pair), jax.tree.map(lambda v: checkpoint_name(v, "layer_input"), x), key)

    # In a scan the loop itself keeps forward and backward apart; unrolled, only the barrier does.
    return jax.checkpoint(run, policy=policy, prevent_cse=unrolled)  # type: ignore[attr-defined]


@partial(jax.tree_util.register_dataclass, data_fields=["pair", "kept"], meta_fields=["treedef", "holes"])
@dataclass(frozen=True)
class _Residuals:
    """A pullback's residuals without the weights: `holes[i]` says which weight residual i was, None if none."""

    pair: Any
    kept: list[Any]
    treedef: Any
    holes: tuple[int | None, ...]


def regathering(fetch: Fetch, block: Block) -> Block:
    """`block(fetch(pair), x, key)` whose backward pass fetches the weights again and recomputes nothing else.

    The residuals of `block` are kept but for those that are the fetched weights themselves (by identity: a weight
    that the block casts or transposes before its use is kept).
    """

    @jax.custom_vjp
    def run(pair: Any, x: Any, key: jax.Array | None) -> Any:
        return block(fetch(pair), x, key)

    def forward(pair: Any, x: Any, key: jax.Array | None) -> tuple[Any, _Residuals]:
        weights = fetch(pair)
        y, pullback = jax.vjp(lambda weights, x: block(weights, x, key), weights, x)
        residuals, treedef = jax.tree.flatten(pullback)
        index = {id(w): i for i, w in enumerate(jax.tree.leaves(weights))}
        holes = tuple(index.get(id(r)) for r in residuals)
        kept = [r for r, hole in zip(residuals, holes, strict=True) if hole is None]
        return y, _Residuals(pair, kept, treedef, holes)

    def backward(saved: _Residuals, gradient: Any) -> tuple[tuple[Any, None], Any, None]:
        # The barrier makes this fetch another one than the forward pass's, which would be kept alive till here.
        (active, passive), kept = jax.lax.optimization_barrier(saved.pair), iter(saved.kept)
        weights, reduce = jax.vjp(lambda active: fetch((active, passive)), active)
        leaves = jax.tree.leaves(weights)
        residuals = [next(kept) if hole is None else leaves[hole] for hole in saved.holes]
        weight_gradients, x_gradient = jax.tree.unflatten(saved.treedef, residuals)(gradient)
        return (*reduce(weight_gradients), None), x_gradient, None

    run.defvjp(forward, backward)
    return run
