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
from jax.tree_util import Partial

from jzero.config import ActivationCheckpointing, Config
from jzero.errors import ConfigError
from jzero.kernels.trace import Equation
from jzero.layout.offload import HOST
from jzero.mesh import TENSOR
from jzero.tracing.chunk import Chunk, split_floats
from jzero.tracing.residuals import is_cheap, is_matmul
from jzero.tree import PyTree

Fetch = Callable[[Any], Any]  # (diff, nondiff) -> weights
Block = Callable[[Any, Any, Any], Any]  # (weights or (diff, nondiff), x, key) -> x

_INPUT = "layer_input"


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
        """True if kept activations are stored in host memory."""
        return self.section is not None and self.section.cpu_checkpointing


def checkpointed(fetch: Fetch, block: Block, remat: Remat, *, unrolled: bool, layer: bool = False) -> Block:
    """Make `run(pair, x, key) = block(fetch(pair), x, key)` with activation checkpointing.

    The backward pass recomputes: under "none" cheap operations of a layer, see `leanly`; under "matmuls" everything but
    matmuls with weights and fused attention; under "full" everything. `cpu_checkpointing` keeps the layer's input, and
    under "matmuls" the matmuls (fused attention is then recomputed), in host memory.

    Args:
      unrolled: whether XLA sees the forward and the backward pass in one program, without a loop around each.
      layer: whether `block` is one of several layers, or the whole model.
    """
    if remat.kind == "none" and not (remat.regather or remat.again or layer):
        return lambda pair, x, key: block(fetch(pair), x, key)
    if remat.kind == "none" or (remat.kind == "matmuls" and not remat.offload):
        return leanly(fetch, block, remat, unrolled=unrolled, layer=layer)
    inputs = only_inputs(remat.offload)
    products = jax.checkpoint_policies.offload_dot_with_no_batch_dims("device", HOST)

    def policy(primitive: Any, *args: Any, **params: Any) -> Any:
        named = primitive.name == "name" or remat.kind == "full"
        return (inputs if named else products)(primitive, *args, **params)

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


def leanly(fetch: Fetch, block: Block, remat: Remat, *, unrolled: bool, layer: bool) -> Block:
    """Make `run(pair, x, key) = block(fetch(pair), x, key)` that keeps few bytes for its backward pass.

    The backward pass of a layer computes cheap operations again; under "matmuls" everything but matmuls, of which it
    keeps sums. With `remat.regather` it gathers the weights again, with `remat.again` the inputs of matmuls over
    `tensor`, as in Megatron's sequence parallelism (arXiv:2205.05198).
    """
    # The fewest bytes, by a minimum cut of the layer's trace: with `stack.ordered_backward` 78.2 GiB instead of 96.2
    # (7.2B, ZeRO-2, two H200s, experiments/benchmarks/2026-11-26-backward-h200.md).
    # `jax.checkpoint` cannot express this: a policy that drops gathered weights also drops the results computed from
    # them.
    arrays = partial(jax.tree.map, jnp.asarray)  # of numbers, too
    name = "rematted_computation" if remat.kind == "matmuls" else ""  # jax.checkpoint's, by which FLOPs are counted

    def function(pair: Any, _: Any, inputs: Any, __: Any) -> tuple[Any, Any]:
        return arrays(block(fetch(pair), *inputs)), ()

    def gathers(eqn: Equation) -> bool:
        return eqn.primitive.name == "all_gather" and TENSOR in eqn.params["axis_name"]

    def again(eqn: Equation, constant: bool) -> bool:
        if remat.kind == "matmuls":
            return not is_matmul(eqn)
        return (layer and is_cheap(eqn)) or (remat.regather and constant) or (remat.again and gathers(eqn))

    @jax.custom_vjp
    def run(pair: Any, x: Any, key: jax.Array | None) -> Any:
        return arrays(block(fetch(pair), x, key))

    def forward(pair: Any, x: Any, key: jax.Array | None) -> tuple[Any, Callable]:
        lean = remat.kind == "matmuls"
        chunk = Chunk(function, (pair, (), (x, key), ()), again=again, keep=layer and not lean, inline=lean)
        (y, _), kept = chunk.forward(pair, (), (x, key), ())
        return y, Partial(partial(backward, chunk), pair, kept)

    def backward(chunk: Chunk, pair: Any, kept: list, gradient: Any) -> tuple[tuple[Any, None], Any, None]:
        gradient = split_floats(gradient)[0]
        if remat.regather:
            # Without the barrier XLA merges this gather with the forward pass's, and keeps the weights in between.
            pair = jax.lax.optimization_barrier(pair)
        if unrolled:
            # After the gradient has come: XLA would compute early, or not again, and keep the results.
            kept, gradient = chunk.after(kept, gradient)
        weight_gradients, (x_gradient, _) = chunk.backward(pair, (), kept, gradient, name)
        return (weight_gradients, None), x_gradient, None

    run.defvjp(forward, lambda saved, gradient: saved(gradient))
    return lambda pair, x, key: run(pair, arrays(x), key)
