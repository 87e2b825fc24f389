"""Decoders by the names under which they were published, with the shapes of their config.json."""

from __future__ import annotations

import dataclasses

from jzero.errors import ConfigError
from jzero.values.kinds import closest

from .decoder_config import DecoderConfig, check_fields
from .rope import RopeScaling


def _llama(layers: int, width: int, heads: int, wide: int, stretch: float | None = None, **more) -> DecoderConfig:
    scaling = None if stretch is None else RopeScaling("llama3", stretch, 1.0, 4.0, 8192)
    return DecoderConfig(
        layers, width, heads, 8, wide, vocab_size=128_256, rope_theta=5e5, norm_eps=1e-5, rope_scaling=scaling, **more
    )


def _qwen3(layers: int, width: int, heads: int, wide: int, **more) -> DecoderConfig:
    head = None if heads * 128 == width else 128
    return DecoderConfig(
        layers, width, heads, 8, wide, vocab_size=151_936, rope_theta=1e6, norm_eps=1e-6, family="qwen3",
        qk_norm="shared", head_width=head, **more,
    )  # fmt: skip


def _mistral(vocab_size: int, theta: float, window: int | None) -> DecoderConfig:
    return DecoderConfig(
        32, 4096, 32, 8, 14336, vocab_size=vocab_size, rope_theta=theta, norm_eps=1e-5, family="mistral", window=window
    )


MODELS = {
    "llama3-8b": _llama(32, 4096, 32, 14336),
    "llama3-70b": _llama(80, 8192, 64, 28672),
    "llama3.1-8b": _llama(32, 4096, 32, 14336, 8.0),
    "llama3.1-70b": _llama(80, 8192, 64, 28672, 8.0),
    "llama3.1-405b": _llama(126, 16384, 128, 53248, 8.0),
    "llama3.2-1b": _llama(16, 2048, 32, 8192, 32.0, tied=True),
    "llama3.2-3b": _llama(28, 3072, 24, 8192, 32.0, tied=True),
    "mistral-7b": _mistral(32_768, 1e6, None),  # version 0.3
    "mistral-7b-v0.1": _mistral(32_000, 1e4, 4096),
    "qwen3-0.6b": _qwen3(28, 1024, 16, 3072, tied=True),
    "qwen3-1.7b": _qwen3(28, 2048, 16, 6144, tied=True),
    "qwen3-4b": _qwen3(36, 2560, 32, 9728, tied=True),
    "qwen3-8b": _qwen3(36, 4096, 32, 12288),
    "qwen3-14b": _qwen3(40, 5120, 40, 17408),
    "qwen3-32b": _qwen3(64, 5120, 64, 25600),
}


def named(name: str, **changes) -> DecoderConfig:
    """Return the shape of a published model, with changes: `named("qwen3-8b", num_layers=2)`."""
    if name not in MODELS:
        close = closest(name, MODELS)
        fix = f"did you mean {close}?" if close else f"choose one of {', '.join(MODELS)}"
        raise ConfigError(f"model {name!r} is unknown; {fix}")
    check_fields(DecoderConfig, changes)
    return dataclasses.replace(MODELS[name], **changes)
