"""Mixtures of experts by name: Mixtral (Jiang et al., arXiv:2401.04088), Qwen3-MoE (Yang et al., arXiv:2505.09388)."""

from __future__ import annotations

import dataclasses

from jzero.errors import ConfigError

from .decoder_config import DecoderConfig, check_fields
from .moe import MixtureConfig

PRESETS = {
    "mixtral-8x7b": DecoderConfig(
        32, 4096, 32, 8, 14336, rope_theta=1e6, family="mixtral", mixture=MixtureConfig(8, 2, 14336)
    ),
    "qwen3-30b-a3b": DecoderConfig(
        48, 2048, 32, 4, 6144, vocab_size=151_936, rope_theta=1e6, norm_eps=1e-6, family="qwen3_moe", head_width=128,
        qk_norm="shared", mixture=MixtureConfig(128, 8, 768),
    ),
}  # fmt: skip


def preset(name: str, **changes) -> DecoderConfig:
    """Return a preset by name, with changes: `preset("mixtral-8x7b", num_layers=2)`."""
    if name not in PRESETS:
        raise ConfigError(f"mixture preset {name!r} is unknown; choose one of {', '.join(PRESETS)}")
    check_fields(type(PRESETS[name]), changes)
    return dataclasses.replace(PRESETS[name], **changes)
