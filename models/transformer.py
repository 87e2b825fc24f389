"""The base of decoders and encoders: a stack of blocks, and how a mesh and an optimizer cut its parameters."""

from __future__ import annotations

import re
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
        c, heads = self.block, int(self.block.by_part)  # heads: their dimension among those of the outputs
        table = {
            "qkv/kernel": heads + 1, "qkv/bias": heads, "attention/(q|kv)_up/kernel": 1, "attention/out/kernel": 0,
            "attention/sinks": 0, "mlp/gate_up$": 3, "mlp/gate_up_bias": 2, "mlp/down$": 1, "mlp/shared_gate_up": 2,
            "mlp/shared_down": 0, "gate_up/kernel": 2, "gate_up/bias": 1, "mlp/up/kernel": 1, "mlp/up/bias": 0,
            "mlp/down/kernel": 0, "(o|down)_proj/lora_a": 0, "(q|k|v|gate|up)_proj/lora_b": 1,
            "qkv/(codes|scales)": heads + 1, "gate_up/(codes|scales)": 2, "mlp/up/(codes|scales)": 1,
            "attention/(q|kv)_up/(codes|scales)": 1,
        }  # fmt: skip
        table |= {"attention/[qk]_norm/scale": 0} if c.qk_norm in ("each", "all") else {}
        names = "\n".join(self.shapes)
        table = {name: dim for name, dim in table.items() if re.search(name, names, re.MULTILINE)}
        experts = {"expert": {"mlp/(gate_up|gate_up_bias|down)$": 0}} if c.mixture else {}
        return {"tensor": table | self.vocabulary} | experts

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the parameters by the names of their leaves; those of the stack have a layer axis."""
        flat = nnx.to_flat_state(nnx.state(self, nnx.Param))
        names = {"/".join(map(str, path)): x.shape for path, x in flat}
        return {name if name.startswith("stack/") else f"ends/{name}": shape for name, shape in names.items()}

    @property
    def fused_matrices(self) -> dict[str, tuple]:
        """The cuts of the parameters that contain several matrices, see `jzero.model`."""
        c, m = self.block, self.block.latent
        cuts: dict[str, tuple] = {
            "attention/qkv/kernel": (1, (1, 1, 1)) if c.by_part else (2, (c.num_groups, 1, 1)),
            "mlp/gate_up": (2, (1, 1), 1),
            "mlp/gate_up/kernel": (1, (1, 1)),
            "mlp/shared_gate_up": (1, (1, 1)),
        }
        if m:
            cuts |= {"kv_down/kernel": (1, (m.rank, m.rotated)), "kv_up/kernel": (2, (m.plain, m.value))}
        return {name: cut for name in self.shapes for end, cut in cuts.items() if name.endswith(f"/{end}")}


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
