"""The shapes of models: of decoders, with all in what families differ, and of encoders, which have some of it."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from math import prod
from typing import Any, ClassVar, Literal

import jax.numpy as jnp
from flax import nnx

from jzero.attention_kernels import FLASH, FLASH_WIDTH, Attend, cudnn_obstacle
from jzero.errors import ConfigError
from jzero.values.kinds import closest

from .downloads import Download
from .lora import LoRAConfig
from .moe import MixtureConfig
from .rope import RopeScaling

OF_EXPERTS = re.compile("mlp/(gate_up|down)(_bias)?$")  # a token uses some of the experts
NOT_LATENT = "window", "rope_layers", "qk_norm", "qkv_bias", "out_bias", "attention_softcap", "sinks", "head_width"
OF_ENCODERS = "norm_eps", "attention", "pad_vocab_to", "max_positions", "download"  # what they can choose


def field_choices(config: Any) -> list[str]:
    """List the fields of a config, or of a part of one, that a user can choose."""
    fixed = getattr(config, "fixed", ())  # parts, such as a mixture, fix none
    return [x.name for x in dataclasses.fields(config) if x.init and x.compare and x.name not in fixed]


def check_fields(config: type, changes: Mapping[str, Any]) -> None:
    """Refuse changes to fields that a config does not have."""
    fields, problems = field_choices(config), []
    for name in sorted(changes.keys() - {*fields}):
        fix = f"did you mean {close}?" if (close := closest(name, fields)) else f"it has {', '.join(fields)}"
        problems.append(f"{name} = {changes[name]!r}: {config.__name__} has no such field; {fix}")
    if problems:
        raise ConfigError(*problems)


@dataclass(frozen=True)
class LatentConfig:
    """The shape of latent attention (DeepSeek-AI, arXiv:2405.04434, section 2.1).

    All heads' keys and values come from one short vector of a token, its latent.
    """

    rank: int  # the width of the latent
    plain: int  # dimensions of a head's queries and keys without RoPE
    rotated: int  # dimensions with RoPE; all heads share those of the keys
    value: int  # the width of a head's values
    query_rank: int | None = None  # the width of another latent, for queries; None: they come from the layer's input


@dataclass(frozen=True, repr=False)
class DecoderConfig:
    """The shape of a decoder; the defaults are Llama's."""

    num_layers: int
    d_model: int
    num_heads: int
    num_kv_heads: int
    d_ff: int  # with a mixture, that of the `dense_layers`
    vocab_size: int = 32_000
    _: KW_ONLY
    tied: bool = False
    rope_theta: float = 500_000.0
    norm_eps: float = 1e-5
    # The kernel: "auto" is FlashAttention-3 or cuDNN's fused one where they can be used, and XLA's otherwise;
    # "flash_attention_3" needs a Hopper GPU, heads of 128 and the extra `flash`.
    attention: Attend = "auto"
    family: str = "llama"  # a key of `FAMILIES` in models/families.py: whose names the weights have in files
    head_width: int | None = None  # default: d_model / num_heads
    pad_vocab_to: int = 1  # embedding and head have a multiple of this many rows; loss and files ignore the added ones
    rope_scaling: RopeScaling | None = None  # stretches the frequencies of rope_theta
    partial_rotary: float = 1.0  # the part of a head that is rotated, its first dimensions (GLM, GPT-NeoX, Phi)
    interleaved_rope: bool = False  # rotates neighbours together, and not one dimension of each half (Cohere, GLM)
    rope_layers: tuple[bool, ...] | None = None  # which layers have RoPE, repeated (SmolLM3); default: all
    max_positions: int | None = None  # learned positions: how many vectors there are (GPT-2)
    by_part: bool = False  # the matrix of queries, keys and values has them in turn, not head by head (GPT-2, BERT)
    qkv_bias: bool = False  # which matrices have biases; Qwen2: those of queries, keys and values
    out_bias: bool = False
    mlp_bias: bool = False
    # Queries and keys are normalised per head, with a scale that all heads share (Qwen3, Gemma 3) or one for each
    # (Cohere, StableLM), over all heads together (OLMo 2), or without a scale where there is RoPE (Llama 4).
    qk_norm: Literal["shared", "each", "all", "unscaled"] | None = None
    window: int | None = None  # tokens see only the last `window` tokens (Mistral)
    global_layers: tuple[bool, ...] | None = None  # which layers have no window, repeated (Gemma 2); default: none
    chunked: bool = False  # a window is the `window` tokens of a chunk; chunks begin with the document (Llama 4)
    # (strength, floor): in layers without RoPE, the query at position i of a document is multiplied by
    # 1 + strength * log(1 + floor((i + 1) / floor)) (Llama 4; Nakanishi, arXiv:2501.19399).
    temperature: tuple[float, int] | None = None
    local_theta: float | None = None  # RoPE's base in layers with a window, without scaling; default: as the others
    # "offset_rms" has the scale minus one as its parameter (Gemma); "layer_unbiased" has no bias (Cohere).
    norm: Literal["rms", "offset_rms", "layer", "layer_unbiased"] = "rms"
    # Before attention and feed-forward layers, after them (OLMo 2), both (Gemma 2), or of the sum after them (BERT).
    norms: Literal["before", "after", "both", "sum"] = "before"
    # Attention and feed-forward layer see the same input, with one norm (Cohere) or one each (GPT-NeoX).
    parallel: Literal["one_norm", "two_norms"] | None = None
    gated: bool = True  # down(activation(gate(x)) * up(x)), and otherwise down(activation(up(x)))
    activation: Literal["silu", "gelu", "gelu_tanh"] = "silu"
    embed_scale: float = 1.0  # multiplies the embeddings (Gemma, Granite)
    residual_scale: float = 1.0  # multiplies the outputs of attention and feed-forward layers (Granite)
    logit_scale: float = 1.0  # multiplies the logits (Cohere, Granite)
    attention_scale: float | None = None  # multiplies attention's scores; default: head_dim ** -0.5
    attention_softcap: float | None = None  # bounds scores x by softcap * tanh(x / softcap) (Gemma 2)
    logit_softcap: float | None = None  # bounds the logits in the same way (Gemma 2)
    sinks: bool = False  # each head has one more score, a parameter, that weighs no value (GPT-OSS)
    loss_tiles: int = 1  # the logits of one tile of the sequence exist at a time, for very long ones; see `jzero.tiled`
    mlp_tiles: int = 1  # likewise for the feed-forward layer
    lora: LoRAConfig | None = None  # low-rank adapters of the layers' matrices
    latent: LatentConfig | None = None  # with it, queries, keys and values have other shapes (DeepSeek-V2 and V3)
    mixture: MixtureConfig | None = None  # experts instead of the feed-forward layers (Mixtral, Qwen3-MoE)
    dense_layers: tuple[int, ...] = ()  # the numbers of layers without the mixture (DeepSeek: the first ones)
    future_layers: int = 0  # layers that predict further tokens, for the loss alone (MTP of DeepSeek-V3)
    future_weight: float = 0.3  # what the mean of their losses counts in the loss
    # From which `from_hf` read the shape; the rest of its config.json goes back with the weights.
    download: Download | None = dataclasses.field(default=None, compare=False, repr=False)

    causal: ClassVar[bool] = True  # tokens see only those before them; encoders differ
    fixed: ClassVar[frozenset[str]] = frozenset()  # the fields that have their defaults alone; encoders have many
    row_length: ClassVar[int | None] = None  # rows are padded after as many positions; None: they are not

    def __post_init__(self):
        dense = tuple(sorted({number for number in self.dense_layers if number < self.num_layers}))
        object.__setattr__(self, "dense_layers", dense)  # num_layers may have become smaller
        for is_wrong, problem in self._checks():
            if is_wrong:
                raise ConfigError(f"{type(self).__name__}: {problem}")

    def _checks(self) -> Iterator[tuple[Any, str]]:
        """Yield what does not go together, each as (whether the fields have it, the problem and its fix)."""
        c, dense, kernel = self, self.dense_layers, f"attention = {self.attention!r}"
        for words, whole, part in (
            ("num_heads must divide d_model", 0 if c.head_width or c.latent else c.d_model, c.num_heads),
            ("num_kv_heads must divide num_heads", c.num_heads, c.num_kv_heads),
            ("2 must divide the rotated width of a head, for RoPE", c.rotary_width, 2),
        ):
            yield whole % part, f"{words}, but {part} does not divide {whole}"
        yield c.pad_vocab_to < 1, f"pad_vocab_to = {c.pad_vocab_to}: must be at least 1, which does not pad"
        wide, all_dense = not c.window, c.mixture is None or len(dense) == c.num_layers
        yield wide and c.global_layers, f"global_layers = {c.global_layers} needs a window, for the other layers"
        lacking = [key for key in NOT_LATENT if getattr(c, key)] + ["partial_rotary"] * (c.partial_rotary != 1)
        yield c.latent and lacking, f"latent attention has no {', '.join(lacking)}; leave them out"
        own = c.num_groups == 1 and not c.latent and c.qk_norm not in ("each", "all")
        yield c.by_part and not own, "by_part = True needs num_kv_heads = num_heads, without norms of each head"
        yield c.chunked and wide, "chunked = True needs a window, the tokens of a chunk"
        alike = not c.rope_layers
        yield alike and c.temperature, f"temperature = {c.temperature} needs rope_layers: it is for those without"
        yield c.parallel and c.norms != "before", f"parallel = {c.parallel!r} needs norms = 'before', not {c.norms!r}"
        yield dense and all_dense, f"dense_layers = {dense} of {c.num_layers} needs a mixture in other layers"
        if c.mixture:
            yield not c.gated, "gated = False: experts are gated; leave it out"
            alone = [name for name in ("down_proj", "gate_proj", "up_proj") if c.lora and name in c.lora.target_modules]
            yield alone, f"lora.target_modules has {', '.join(alone)}: experts have no adapters; leave them out"
            yield c.mlp_tiles > 1, f"mlp_tiles = {c.mlp_tiles}: experts balance over whole sequences; set it to 1"
        if c.attention == "cudnn":
            why = cudnn_obstacle(jnp.dtype("bfloat16"), c.head_dim, 256, c.attention_softcap)
            why = "cuDNN has no sinks" if c.sinks else why
            yield why, f"{kernel}, but {why}: use 'auto' or 'xla'"
        if c.attention == FLASH:
            for key in ("attention_softcap", "window", "sinks"):
                value = getattr(c, key)
                yield value not in (None, False), f"{kernel} has no {key} = {value}: use 'auto'"
            yield c.head_dim != FLASH_WIDTH, f"{kernel} has heads of {FLASH_WIDTH}, not {c.head_dim}: use 'auto'"

    def __repr__(self) -> str:
        fields = [field for field in dataclasses.fields(self) if field.repr and field.name not in self.fixed]
        plain = "tied", "norm_eps", "attention", *["rope_theta"] * self.has_rope  # shown with their defaults, too
        shown = [f for f in fields if not f.kw_only or f.name in plain or getattr(self, f.name) != f.default]
        return f"{type(self).__name__}({', '.join(f'{f.name}={getattr(self, f.name)!r}' for f in shown)})"

    @property
    def num_groups(self) -> int:  # query heads that share a key-value head
        return self.num_heads // self.num_kv_heads

    @property
    def head_dim(self) -> int:
        if self.latent:
            return self.latent.plain + self.latent.rotated
        return self.d_model // self.num_heads if self.head_width is None else self.head_width

    @property
    def rotary_width(self) -> int:
        return self.latent.rotated if self.latent else int(self.head_dim * self.partial_rotary) * self.has_rope

    @property
    def has_rope(self) -> bool:
        return not self.rope_layers or any(self.rope_layers)

    def of_layer(self, number: int) -> DecoderConfig:
        return dataclasses.replace(self, mixture=None, dense_layers=()) if number in self.dense_layers else self

    @property
    def layer_ranges(self) -> tuple[range, list[range]]:
        """(The numbers of the layers before the stack, those of the layers that are one layer of the stack).

        One program runs all layers of the stack. If they differ, it has as few layers of several as the pattern allows.
        """
        layers = range(self.num_layers)
        dense = [number in self.dense_layers for number in layers]
        splits = [(first, step) for first in layers for step in range(1, self.num_layers + 1 - first)]
        whole = [x for x in splits if (self.num_layers - x[0]) % x[1] == 0]
        first, step = min((x for x in whole if dense[sum(x) :] == dense[x[0] : -x[1]]), key=sum)
        return layers[:first], [layers[first + i :: step] for i in range(step)]

    @property
    def layer_paths(self) -> dict[str, range]:
        """{path of parameters: the numbers of the layers that lie there}."""
        first, group = self.layer_ranges
        paths = {f"ends/first/layers/{i}": first[i : i + 1] for i in first}
        paths |= {f"stack/layers/{i}": x for i, x in enumerate(group)} if len(group) > 1 else {"stack": group[0]}
        future = range(self.num_layers, self.num_layers + self.future_layers)
        return paths | {f"ends/future/{i}/block": future[i : i + 1] for i in range(self.future_layers)}

    @property
    def vocab_rows(self) -> int:
        return -(-self.vocab_size // self.pad_vocab_to) * self.pad_vocab_to

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the parameters without adapters, by the names of their leaves."""
        from .named import module_of  # which imports this module

        plain = dataclasses.replace(self, lora=None)
        return nnx.eval_shape(lambda: module_of(plain)(plain, rngs=nnx.Rngs(0))).shapes

    @property
    def num_parameters(self) -> int:  # without adapters
        return sum(map(prod, self.shapes.values()))

    def flops_per_token(self, sequence: int) -> float:
        """Count the model FLOPs of one training token, forward and backward, without recomputation.

        That is 6 per parameter that a token uses, outside the input embedding (a lookup), and 12 * width of the heads *
        keys that a token sees, on average, for attention's two products.
        """
        share = self.mixture.top_k / self.mixture.num_experts if self.mixture else 1
        lookups = {"ends/positions", "ends/types", *(() if self.tied else ("ends/embed",))}
        sizes = {name: prod(shape) for name, shape in self.shapes.items() if name not in lookups}
        used = sum(size * (share if OF_EXPERTS.search(name) else 1) for name, size in sizes.items())
        used += self.future_layers * self.d_model * self.vocab_rows
        window = min(self.window or sequence, sequence)
        pattern = self.global_layers or (not self.window,)
        wide = sum(pattern[i % len(pattern)] for i in range(self.num_layers))
        chunks, rest = divmod(sequence, window)
        near = (chunks * window**2 + rest**2) / 2 if self.chunked else window * sequence - window**2 / 2
        keys = wide * sequence / (1 + self.causal) + (self.num_layers - wide) * near / sequence
        widths = self.head_dim + (self.latent.value if self.latent else self.head_dim)
        return 6.0 * used + 6.0 * self.num_heads * widths * keys


@dataclass(frozen=True, repr=False)
class GPT2Config(DecoderConfig):
    """The shape of a GPT-2: `DecoderConfig` has the fields; a head has its own keys and values.

    >>> GPT2Config(12, 768, 12, 3072, pad_vocab_to=128).vocab_rows
    50304
    """

    num_kv_heads: int = dataclasses.field(init=False)
    vocab_size: int = 50257
    _: KW_ONLY
    tied: bool = True
    family: str = "gpt2"
    max_positions: int | None = 1024
    rope_layers: tuple[bool, ...] | None = (False,)
    qkv_bias: bool = True
    out_bias: bool = True
    mlp_bias: bool = True
    by_part: bool = True
    norm: Literal["rms", "offset_rms", "layer", "layer_unbiased"] = "layer"
    gated: bool = False
    activation: Literal["silu", "gelu", "gelu_tanh"] = "gelu_tanh"

    def __post_init__(self):
        object.__setattr__(self, "num_kv_heads", self.num_heads)
        super().__post_init__()


@dataclass(frozen=True, repr=False)
class EncoderConfig(GPT2Config):
    """The shape of an encoder: GPT-2's blocks, whose tokens see all others."""

    _: KW_ONLY
    norm_eps: float = 1e-12
    activation: Literal["silu", "gelu", "gelu_tanh"] = "gelu"

    causal = False
    fixed = frozenset(field.name for field in dataclasses.fields(DecoderConfig) if field.kw_only) - {*OF_ENCODERS}

    def _checks(self) -> Iterator[tuple[Any, str]]:
        yield from super()._checks()
        yield type(self) is EncoderConfig, "this is the base of encoders; take BertConfig or ViTConfig"
        fixed = [field for field in dataclasses.fields(self) if field.name in self.fixed]
        other = [field.name for field in fixed if getattr(self, field.name) != field.default]
        yield other, f"encoders have no choice of {', '.join(other)}; leave them out"


@dataclass(frozen=True, repr=False)
class BertConfig(EncoderConfig):
    """The shape of a BERT."""

    vocab_size: int = 30522
    _: KW_ONLY
    family: str = "bert"
    max_positions: int | None = 512
    norms: Literal["before", "after", "both", "sum"] = "sum"
    num_types: int = 2


@dataclass(frozen=True, repr=False)
class ViTConfig(EncoderConfig):
    """The shape of a ViT for square images.

    >>> ViTConfig(12, 768, 12, 3072).num_patches
    196
    """

    vocab_size: int = dataclasses.field(default=0, init=False, repr=False)
    _: KW_ONLY
    family: str = "vit"
    max_positions: int | None = None
    num_classes: int = 1000
    image_size: int = 224
    patch_size: int = 16
    num_channels: int = 3

    fixed = EncoderConfig.fixed | {"pad_vocab_to", "max_positions"}  # it has patches, and no tokens

    def __post_init__(self):
        super().__post_init__()
        if self.image_size % self.patch_size:
            raise ConfigError(f"ViTConfig: patch_size = {self.patch_size} must divide image_size = {self.image_size}")

    @property
    def num_patches(self) -> int:
        return (self.image_size // self.patch_size) ** 2

    @property
    def row_length(self) -> int | None:  # type: ignore[override]
        """Count the positions, if their number is odd: cuDNN refuses it, and each layer would pad and cut."""
        return None if self.num_patches % 2 else self.num_patches + 1
