"""Llama: the decoder with its default fields, and shapes by name (Touvron et al., arXiv:2302.13971)."""

from dataclasses import dataclass, replace

from jzero.errors import ConfigError

from .decoder import Decoder
from .decoder_config import DecoderConfig, check_fields


@dataclass(frozen=True, repr=False)
class LlamaConfig(DecoderConfig):
    """The shape of a Llama: `DecoderConfig` has the fields."""


class Llama(Decoder):
    """`Decoder` has the batch's keys and the methods."""


PRESETS = {
    "tiny": LlamaConfig(4, 128, 4, 2, 384, vocab_size=256),
    "125m": LlamaConfig(12, 768, 12, 12, 2048, tied=True),
    "1b": LlamaConfig(16, 2048, 32, 8, 8192),
    "8b": LlamaConfig(32, 4096, 32, 8, 14336),
    "70b": LlamaConfig(80, 8192, 64, 8, 28672),
    "405b": LlamaConfig(126, 16384, 128, 8, 53248),
}


def preset(name: str, **changes) -> LlamaConfig:
    """Return a preset by name, with changes: `preset("8b", vocab_size=128_256)`."""
    if name not in PRESETS:
        raise ConfigError(f"Llama preset {name!r} is unknown; choose one of {', '.join(PRESETS)}")
    check_fields(type(PRESETS[name]), changes)
    return replace(PRESETS[name], **changes)
