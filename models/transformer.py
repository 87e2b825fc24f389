"""The base of decoders and encoders: a stack of blocks, how a mesh cuts its parameters, and the checks of its batch."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
from flax import nnx

from jzero.errors import ConfigError, some_of

from .attention import Carry, Hidden
from .decoder_block import Block, LayerGroup
from .decoder_config import DecoderConfig


class Transformer(nnx.Module):
    """A module with a stack of blocks.

    Attributes:
      config: of the model; an encoder's has that of its blocks as `block`.
      vocabulary: {parameter: its vocabulary dimension}: a pipeline divides these among its stages.
    """

    config: Any
    vocabulary: Any = MappingProxyType[str, int]({})
    stack: nnx.Module

    @property
    def block(self) -> DecoderConfig:
        return getattr(self.config, "block", self.config)

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
        return {"tensor": {**table, **self.vocabulary}} | experts

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


def column(batch: Any, name: str) -> Any:
    """Return "inputs" or "labels" of a causal language model's batch.

    Raises:
      ConfigError: it has no such column, as a batch for `transformers`.
    """
    if isinstance(batch, Mapping) and name in batch:
        return batch[name]
    there = f"has {some_of(batch)}" if isinstance(batch, Mapping) else f"is {type(batch).__name__}"
    raise ConfigError(
        f"the batch {there}; the decoder reads inputs and labels, where labels[i] is the token after inputs[i] "
        "(transformers shifts inside the model)"
    )


def check_tokens(batch: Any, vocab_size: int) -> None:
    """Check that integer inputs and labels are tokens of the vocabulary; the loss ignores negative labels.

    JAX reads another row for a token outside of an embedding, without an error.

    Raises:
      ConfigError: names the array, the token and the vocabulary.

    >>> check_tokens({"inputs": np.array([[0, 3]]), "labels": np.array([[3, -100]])}, vocab_size=4)
    """
    for name in ("inputs", "labels") if isinstance(batch, Mapping) else ():  # the model names what it reads
        tokens = np.asarray(batch.get(name, ()))
        if tokens.dtype.kind not in "iu":
            continue
        outside = tokens[(tokens >= vocab_size) | ((tokens < 0) & (name == "inputs"))]
        if outside.size:
            raise ConfigError(
                f"batch leaf {name!r} has token {outside[0]}, but the model's vocabulary is 0 to {vocab_size - 1}: use "
                f"the model's own tokenizer, or make the model with vocab_size = len(tokenizer) (now {vocab_size})"
            )
