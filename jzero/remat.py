"""Activation checkpointing: what a layer keeps for its backward pass, and what it recomputes or gathers again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh

from jzero.config import ActivationCheckpointing, Config
from jzero.errors import ConfigError
from jzero.fp8.product import NAME as FP8_PRODUCT
from jzero.mesh import TENSOR
from jzero.offload.transfers import HOST
from jzero.spread.value import noted_gathers
from jzero.tree import PyTree

Fetch = Callable[[Any], Any]  # (diff, nondiff) -> weights
Block = Callable[[Any, Any, Any], Any]  # (weights or (diff, nondiff), x, key) -> x

_INPUT = "layer_input"
# Outputs worth keeping beside `dot_general`, which `_keep_matmuls` tests.
_MATMULS = (
    FP8_PRODUCT,
    "ragged_dot_general",
    "conv_general_dilated",
    "dot_product_attention_fwd_wrapper",
    "dot_product_attention_fwd",
)


@dataclass(frozen=True)
class Remat:
    """The activation checkpointing in effect.

    Attributes:
      section: the config's, or `full` where an interval alone asks for checkpoints; None: none.
      interval: layers in one checkpoint, as asked by the config or a `PipelineModule`; 0: not asked.
      regather: whether the backward pass gathers the weights again instead of keeping them (ZeRO-3).
      again: whether it gathers activations over `tensor` again, too.
    """

    section: ActivationCheckpointing | None
    interval: int
    regather: bool
    again: bool = False

    @classmethod
    def resolve(cls, config: Config, model: Any, regather: bool, mesh: Mesh) -> Remat:
        """Combine the config's section with the interval of the config or the model.

        Raises:
          ConfigError: an interval with the policy "none".
        """
        section = config.activation_checkpointing
        interval = config.pipeline.activation_checkpoint_interval
        interval = interval or getattr(model, "activation_checkpoint_interval", 0)
        if interval and section and section.policy == "none":
            raise ConfigError(
                f"activation_checkpoint_interval = {interval} of {model!r}: does nothing with "
                'activation_checkpointing.policy "none"; use policy "full" or "matmuls", or remove one'
            )
        if interval and (section is None or section.kind == "none"):
            section = ActivationCheckpointing(policy="full")
        return cls(section, interval, regather, config.tensor_parallel.regather and mesh.shape[TENSOR] > 1)

    @property
    def kind(self) -> str:
        """The policy in effect: "none", "matmuls" or "full"."""
        return self.section.kind if self.section else "none"

    @property
    def offload(self) -> bool:
        """Whether kept activations are stored in host memory."""
        return self.section is not None and self.section.cpu_checkpointing


def checkpointed(fetch: Fetch, block: Block, remat: Remat, *, unrolled: bool) -> Block:
    """Make `run(pair, x, key) = block(fetch(pair), x, key)` with activation checkpointing.

    The backward pass recomputes: under "none" nothing (with `regather` it gathers the weights again, with `again` the
    inputs of products over `tensor`, as in Megatron's sequence parallelism, arXiv:2205.05198), under "matmuls"
    everything but products with weights and fused attention, under "full" everything. `cpu_checkpointing` keeps the
    layer's input, and under "matmuls" the products (fused attention is then recomputed), in host memory.
    """
    inputs, products = only_inputs(remat.offload), _keep_matmuls
    if remat.offload:
        products = jax.checkpoint_policies.offload_dot_with_no_batch_dims("device", HOST)

    def policy(primitive: Any, *args: Any, **params: Any) -> Any:
        named = primitive.name == "name" or remat.kind == "full"
        return (inputs if named else products)(primitive, *args, **params)

    if remat.kind == "none":
        if remat.regather or remat.again:
            return regathering(fetch, block, weights=remat.regather, inputs=remat.again)
        return lambda pair, x, key: block(fetch(pair), x, key)

    def run(pair: Any, x: Any, key: jax.Array | None) -> Any:
        return block(fetch(pair), as_input(x), key)

    # XLA would merge the recomputation with the forward pass. A scan keeps the two apart by itself; unrolled layers
    # need the barrier that prevent_cse inserts.
    return jax.checkpoint(run, policy=policy, prevent_cse=unrolled)  # type: ignore[attr-defined]


def only_inputs(offload: bool) -> Callable:
    """Make the policy that keeps nothing but arguments; with `offload`, those marked by `as_input` in host memory."""
    return jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[], names_which_can_be_offloaded=[_INPUT] if offload else [],
        offload_src="device", offload_dst=HOST,
    )  # fmt: skip


def as_input(x: PyTree) -> PyTree:
    """Mark the floats in the input of a checkpointed function, see `only_inputs`; integers and masks are small."""
    return jax.tree.map(lambda v: checkpoint_name(v, _INPUT) if jnp.issubdtype(v.dtype, jnp.floating) else v, x)


def _keep_matmuls(primitive: Any, *args: Any, **params: Any) -> bool:
    """Keep products with weights and fused attention; recompute batched products, which are attention's."""
    if primitive.name == "dot_general":
        return not params["dimension_numbers"][1][0]  # no batch dimensions
    return primitive.name in _MATMULS


@partial(
    jax.tree_util.register_dataclass, data_fields=["pair", "kept", "parts"], meta_fields=["treedef", "holes", "gathers"]
)
@dataclass(frozen=True)
class _Residuals:
    """The residuals of a pullback.

    `holes[i]` is the index of residual i among the weights, and the gathered activations after them; None for a kept
    one. `parts` are what these activations are gathered from, by `gathers`.
    """

    pair: Any
    kept: list[Any]
    parts: list[Any]
    treedef: Any
    holes: tuple[int | None, ...]
    gathers: tuple[Callable[[Any], Any], ...]


def regathering(fetch: Fetch, block: Block, *, weights: bool = True, inputs: bool = False) -> Block:
    """Make `run(pair, x, key) = block(fetch(pair), x, key)` whose backward pass gathers again.

    `jax.checkpoint` cannot express this: a policy that drops the gathered weights also drops the results computed from
    them, and recomputes the block. Here all residuals of `block` are kept except what is gathered again, compared by
    identity: a weight that the block casts or transposes before its use is kept.

    Args:
      weights: fetch the weights again.
      inputs: gather the inputs of products over `tensor` again. A policy that keeps all but these is no alternative:
        its barrier makes XLA keep in float32 what it otherwise computes again (a Llama of 1B on `tensor` 4 took 21 %
        more memory, unrolled).
    """

    @jax.custom_vjp
    def run(pair: Any, x: Any, key: jax.Array | None) -> Any:
        return block(fetch(pair), x, key)

    def forward(pair: Any, x: Any, key: jax.Array | None) -> tuple[Any, _Residuals]:
        whole = fetch(pair)
        with noted_gathers(inputs) as gathers:
            y, pullback = jax.vjp(lambda whole, x: block(whole, x, key), whole, x)
        residuals, treedef = jax.tree.flatten(pullback)
        leaves = jax.tree.leaves(whole)
        index = {id(w): i for i, w in enumerate(leaves)} if weights else {}
        used = {id(r) for r in residuals}
        gathers = [gather for gather in gathers if id(gather.whole) in used]
        index |= {id(gather.whole): len(leaves) + i for i, gather in enumerate(gathers)}
        holes = tuple(index.get(id(r)) for r in residuals)
        kept = [r for r, hole in zip(residuals, holes, strict=True) if hole is None]
        parts, runs = [gather.part for gather in gathers], tuple(gather.run for gather in gathers)
        return y, _Residuals(pair, kept, parts, treedef, holes, runs)

    def backward(saved: _Residuals, gradient: Any) -> tuple[tuple[Any, None], Any, None]:
        # Without the barrier XLA merges this gather with the forward pass's, and keeps the weights alive in between.
        (diff, nondiff), kept = jax.lax.optimization_barrier(saved.pair), iter(saved.kept)
        # After the gradient has come: XLA would gather early, and keep what it gathered.
        parts, gradient = jax.lax.optimization_barrier((saved.parts, gradient))
        again = [run(x) for run, x in zip(saved.gathers, parts, strict=True)]
        whole, reduce = jax.vjp(lambda diff: fetch((diff, nondiff)), diff)
        leaves = [*jax.tree.leaves(whole), *again]
        residuals = [next(kept) if hole is None else leaves[hole] for hole in saved.holes]
        weight_gradients, x_gradient = jax.tree.unflatten(saved.treedef, residuals)(gradient)
        return (*reduce(weight_gradients), None), x_gradient, None

    run.defvjp(forward, backward)
    return run
