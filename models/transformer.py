"""The base of decoders and encoders: a stack of blocks, and how a mesh and an optimizer cut its parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from flax import nnx

from .attention import Carry, Hidden
from .decoder_block import Block, LayerGroup
from .decoder_config import DecoderConfig


class Transformer(nnx.Module):
    """A module with a stack of blocks.

    Attributes:
      block: the config of the blocks.
      vocabulary: {parameter: its vocabulary dimension}: a pipeline divides these among its stages.
    """

    block: Any  # a property
    vocabulary: Any  # a property
    stack: nnx.Module

    def through(self, x: Hidden) -> jax.Array:
        """Run all layers, without remat or parallelism; return x_BSD."""
        graph, layers = nnx.split(self.stack)
        x, _ = jax.lax.scan(lambda x, layer: (nnx.merge(graph, layer)(x), None), x, layers)
        return plain(x)

    @property
    def divided(self) -> dict[str, dict[str, int]]:
        """{mesh axis: {regular expression: the dimension that it divides}}: heads, feed-forward width, vocabulary.

        Key-value heads are divided together with their queries, gate together with up.
        """
        c = self.block
        heads = 1 if c.by_part else 0  # among the dimensions of the outputs
        table = {"qkv/kernel": heads + 1, "qkv/bias": heads, "attention/out/kernel": 0}
        if c.latent:
            table = {"attention/(q|kv)_up/kernel": 1, "attention/out/kernel": 0}
        if c.mixture:
            table |= {"mlp/gate_up$": 3, "mlp/down$": 1}
            table |= {"mlp/gate_up_bias": 2} if c.mixture.biases else {}
            table |= {"mlp/shared_gate_up": 2, "mlp/shared_down": 0} if c.mixture.shared else {}
        if c.gated and (c.dense_layers or not c.mixture):
            table |= {"gate_up/kernel": 2, "gate_up/bias": 1, "mlp/down/kernel": 0}
        elif not c.gated:
            table |= {"mlp/up/kernel": 1, "mlp/up/bias": 0, "mlp/down/kernel": 0}
        table |= {"attention/sinks": 0} if c.sinks else {}
        table |= {"attention/[qk]_norm/scale": 0} if c.qk_norm in ("each", "all") else {}
        without = [name for name, has in (("qkv/bias", c.qkv_bias), ("mlp/up/bias", c.mlp_bias)) if not has]
        without += [] if c.mlp_bias else ["gate_up/bias"]
        table = {name: dim for name, dim in table.items() if name not in without}
        for name in c.lora.target_modules if c.lora else ():
            table |= {f"{name}/lora_a": 0} if name in ("o_proj", "down_proj") else {f"{name}/lora_b": 1}
        experts = {"expert": {"mlp/(gate_up|gate_up_bias|down)$": 0}} if c.mixture else {}
        return {"tensor": table | self.vocabulary} | experts

    @property
    def fused_matrices(self) -> dict[str, tuple]:
        """The cuts of the parameters that contain several matrices, see `jzero.model`."""
        if self.block.lora and self.block.lora.quantized:
            return {}  # frozen, so no optimizer sees them
        cuts = dict[str, tuple]()
        for path, numbers in self.block.layer_paths.items():
            c = self.block.of_layer(numbers[0])
            if m := c.latent:
                cuts[f"{path}/attention/kv_down/kernel"] = 1, (m.rank, m.rotated)
                cuts[f"{path}/attention/kv_up/kernel"] = 2, (m.plain, m.value)
            else:
                cuts[f"{path}/attention/qkv/kernel"] = (1, (1, 1, 1)) if c.by_part else (2, (c.num_groups, 1, 1))
            if c.mixture:
                cuts[f"{path}/mlp/gate_up"] = 2, (1, 1), 1
            elif c.gated:
                cuts[f"{path}/mlp/gate_up/kernel"] = 1, (1, 1)
            if c.mixture and c.mixture.shared:
                cuts[f"{path}/mlp/shared_gate_up"] = 1, (1, 1)
        return cuts


def stacked(group: Sequence[DecoderConfig], length: int, rngs: nnx.Rngs) -> Block | LayerGroup:
    """Make the layer stack of blocks, or of groups of several; each parameter has a leading layer axis."""

    @nnx.split_rngs(splits=length)
    @nnx.vmap
    def blocks(rngs: nnx.Rngs) -> Block | LayerGroup:
        return LayerGroup(group, rngs=rngs) if len(group) > 1 else Block(*group, rngs=rngs)

    return blocks(rngs)


def plain(x: Hidden) -> jax.Array:
    """Return x_BSD."""
    return x.x_BSD if isinstance(x, Carry) else x
