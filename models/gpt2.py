"""GPT-2: the decoder with learned positions, LayerNorm and biases (Radford et al., 2019)."""

from .decoder import Decoder
from .decoder_config import GPT2Config

__all__ = ["GPT2", "GPT2Config"]


class GPT2(Decoder):
    """`Decoder` has the batch's keys and the methods."""
