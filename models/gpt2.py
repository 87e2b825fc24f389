"""GPT-2: the decoder with learned positions, LayerNorm and biases, as its defaults (Radford et al., 2019)."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field
from typing import Literal

from .decoder import Decoder
from .decoder_config import DecoderConfig


@dataclass(frozen=True, repr=False)
class GPT2Config(DecoderConfig):
    """The shape of a GPT-2: `DecoderConfig` has the fields; a head has its own keys and values.

    >>> GPT2Config(12, 768, 12, 3072, pad_vocab_to=128).vocab_rows
    50304
    """

    num_kv_heads: int = field(init=False)
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


class GPT2(Decoder):
    """`Decoder` has the batch's keys and the methods."""
