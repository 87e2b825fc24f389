"""The base of decoders and encoders: a stack of blocks, how a mesh cuts its parameters, and the checks of its batch.

Shape suffixes are those of models/attention.py.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jzero.attention_kernels import Attend, kernel_note
from jzero.errors import ConfigError, some_of
from jzero.tiling import tiled

from .attention import Attention, Cache, Carry, Decoding, LatentAttention, initial, linear_of
from .config_json import weights_table
from .decoder_config import DecoderConfig
from .lora import FusedLinear
from .moe import Mixture
from .norms import make_norm

gelu = partial(nnx.gelu, approximate=False)
ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {"silu": nnx.silu, "gelu": gelu, "gelu_tanh": nnx.gelu}


class MLP(nnx.Module):
    """down(activation(gate(x)) * up(x)), where one product makes gate and up, or down(activation(up(x)))."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        self.activation, self.gated, c = ACTIVATIONS[config.activation], config.gated, config
        if c.gated:  # with silu this is SwiGLU
            widths, more = {"gate_proj": 1, "up_proj": 1}, {"use_bias": c.mlp_bias, "kernel_init": initial(c)}
            self.gate_up = FusedLinear(c.d_model, (2, c.d_ff), 0, widths, c.lora, rngs=rngs, **more)
        else:
            self.up = linear_of(c, c.d_model, c.d_ff, "up_proj", rngs, bias=c.mlp_bias)
        self.down = linear_of(c, c.d_ff, c.d_model, "down_proj", rngs, last=True, bias=c.mlp_bias)

    def __call__(self, x_BSD: jax.Array) -> jax.Array:
        if not self.gated:
            return self.down(self.activation(self.up(x_BSD)))
        gate_BSF, up_BSF = (part_BS1F.squeeze(2) for part_BS1F in self.gate_up(x_BSD))
        return self.down(self.activation(gate_BSF) * up_BSF)


class Block(nnx.Module):
    """One decoder layer."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        self.config, before, after = config, config.norms != "after", config.norms in ("after", "both")
        if before:
            self.attention_norm = make_norm(config, rngs)
        self.attention = (LatentAttention if config.latent else Attention)(config, rngs=rngs)
        if before and config.parallel != "one_norm":
            self.mlp_norm = make_norm(config, rngs)
        if config.mixture:
            starts = {"init": initial(config), "last": initial(config, last=True)}
            activation = ACTIVATIONS[config.activation]
            self.mlp: Any = Mixture(config.mixture, config.d_model, activation, rngs=rngs, **starts)
        else:
            self.mlp = MLP(config, rngs=rngs)
        if after:
            self.attention_post_norm, self.mlp_post_norm = make_norm(config, rngs), make_norm(config, rngs)

    def __call__(self, x: Carry) -> Carry:
        h_BSD = self.normed("attention_norm", x.x_BSD)
        y_BSD = self.attention(x._replace(x_BSD=h_BSD))
        x_BSD, metrics = self.feed_forward(x.x_BSD, h_BSD, y_BSD, self.config.mlp_tiles)
        metrics = x.metrics if metrics is None else jax.tree.map(jnp.add, x.metrics, metrics)
        return Carry(x_BSD, x.segments_BS, None if x.layer is None else x.layer + 1, metrics)

    def decode(self, x: Decoding, cache: Cache) -> tuple[Decoding, Cache]:
        h_BSD = self.normed("attention_norm", x.x_BSD)
        y_BSD, cache = self.attention.decode(x._replace(x_BSD=h_BSD), cache)
        layer = None if x.layer is None else x.layer + 1
        return x._replace(x_BSD=self.feed_forward(x.x_BSD, h_BSD, y_BSD)[0], layer=layer), cache

    def feed_forward(
        self, x_BSD: jax.Array, h_BSD: jax.Array, y_BSD: jax.Array, tiles: int = 1
    ) -> tuple[jax.Array, dict[str, jax.Array] | None]:
        """Add attention's output y_BSD of h_BSD to x_BSD, and then the feed-forward layer's; return its metrics too."""
        parallel = {"one_norm": h_BSD, "two_norms": x_BSD}
        # One line for each sum: a plan shows collectives by their lines.
        x_BSD = self.normed("attention_norm", x_BSD + self.scaled("attention", y_BSD), of_sum=True)
        source_BSD = parallel.get(self.config.parallel or "", x_BSD)
        y_BSD = tiled(lambda x_BSD: self.mlp(self.normed("mlp_norm", x_BSD)), source_BSD, tiles)
        y_BSD, metrics = y_BSD if isinstance(y_BSD, tuple) else (y_BSD, None)
        return self.normed("mlp_norm", x_BSD + self.scaled("mlp", y_BSD), of_sum=True), metrics

    def scaled(self, part: str, y_BSD: jax.Array) -> jax.Array:
        return times(self.normed(f"{part}_post_norm", y_BSD), self.config.residual_scale)

    def normed(self, name: str, x_BSD: jax.Array, *, of_sum: bool = False) -> jax.Array:
        """Apply a norm, if this family has it here: before a layer, or with norms = "sum" after the residual sum."""
        is_there = hasattr(self, name) and of_sum == (self.config.norms == "sum")
        return getattr(self, name)(x_BSD) if is_there else x_BSD


class LayerGroup(nnx.Module):
    """Layers that follow each other and differ: before the stack, or as one layer of it."""

    def __init__(self, configs: Iterable[DecoderConfig], *, rngs: nnx.Rngs):
        self.layers = nnx.List([Block(config, rngs=rngs) for config in configs])

    def __call__(self, x: Carry) -> Carry:
        for layer in self.layers:
            x = layer(x)
        return x

    def decode(self, x: Decoding, caches: Sequence[Cache]) -> tuple[Decoding, Sequence[Cache]]:
        new = []
        for layer, cache in zip(self.layers, caches, strict=True):
            x, cache = layer.decode(x, cache)
            new.append(cache)
        return x, new


def times(x: jax.Array, scale: float) -> jax.Array:
    return x if scale == 1 else x * jnp.asarray(scale, x.dtype)


class Transformer(nnx.Module):
    """A module with a stack of blocks."""

    config: Any  # a DecoderConfig
    vocabulary: Any = MappingProxyType[str, int]({})  # parameter -> the dimension that a pipeline divides
    stack: nnx.Module

    def through(self, x: Carry) -> jax.Array:
        """Run all layers, without remat or parallelism; return x_BSD."""
        graph, layers = nnx.split(self.stack)
        return jax.lax.scan(lambda x, layer: (nnx.merge(graph, layer)(x), None), x, layers)[0].x_BSD

    def check_batch(self, batch: Any) -> None:
        if self.vocabulary:
            check_tokens(batch, self.config.vocab_size)

    def report_notes(self, dtype: jnp.dtype) -> list[str]:
        c, (_, names) = self.config, weights_table(self.config)
        choice: Attend = "xla" if c.sinks else c.attention
        causal = c.causal and c.window is None and not c.latent
        note = kernel_note(choice, dtype, c.head_dim, c.attention_softcap, causal=causal)
        return [f"{note}: cuDNN has no sinks" if c.sinks else note, *names]

    def weights_layout(self) -> dict[str, Any] | None:
        """Describe the parameters in `transformers`, see `jzero.weights.name_map`; None if no class there has them."""
        return weights_table(self.config)[0]

    @property
    def divided(self) -> dict[str, dict[str, int]]:
        """{mesh axis: {regular expression: the dimension that it divides}}: heads, feed-forward width, vocabulary.

        Key-value heads are divided together with their queries, gate together with up.
        """
        c, heads = self.config, int(self.config.by_part)  # heads: their dimension among those of the outputs
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
        c, m = self.config, self.config.latent
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


def column(batch: Any, name: str) -> Any:
    """Return "inputs" or "labels" of a causal language model's batch, which one for `transformers` may lack."""
    if isinstance(batch, Mapping) and name in batch:
        return batch[name]
    there = f"has {some_of(batch)}" if isinstance(batch, Mapping) else f"is {type(batch).__name__}"
    raise ConfigError(
        f"the batch {there}; the decoder reads inputs and labels, where labels[i] is the token after inputs[i] "
        "(transformers shifts inside the model)"
    )


def check_tokens(batch: Any, vocab_size: int) -> None:
    """Refuse integer inputs and labels outside the vocabulary, of which JAX reads another row of an embedding.

    The loss ignores negative labels.
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
