"""`find_model`: models by name, as a published one, a directory or a download. One table has all names of shapes."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any, NamedTuple

from jzero.errors import ConfigError
from jzero.values.parameters import did_you_mean
from jzero.weights.load import from_cache

from . import hub, llama
from .decoder import Decoder
from .decoder_config import DecoderConfig, check_fields
from .gpt2 import GPT2, GPT2Config
from .moe import MixtureConfig
from .rope import RopeScaling

_HUB_ID = re.compile(r"\w[\w.-]*/[\w.-]+")


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


def _gpt2(layers: int, width: int, heads: int) -> GPT2Config:
    return GPT2Config(layers, width, heads, 4 * width, pad_vocab_to=128)


SHAPES: dict[str, Any] = {
    # Published decoders, with the shapes of their config.json.
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
    # Mixtral (Jiang et al., arXiv:2401.04088) and Qwen3-MoE (Yang et al., arXiv:2505.09388).
    "moe:mixtral-8x7b": DecoderConfig(
        32, 4096, 32, 8, 14336, rope_theta=1e6, family="mixtral", mixture=MixtureConfig(8, 2, 14336)
    ),
    "moe:qwen3-30b-a3b": DecoderConfig(
        48, 2048, 32, 4, 6144, vocab_size=151_936, rope_theta=1e6, norm_eps=1e-6, family="qwen3_moe", head_width=128,
        qk_norm="shared", mixture=MixtureConfig(128, 8, 768),
    ),
    # GPT-2 (Radford et al., 2019), with a vocabulary that matmuls like.
    "gpt2:small": _gpt2(12, 768, 12),
    "gpt2:medium": _gpt2(24, 1024, 16),
    "gpt2:large": _gpt2(36, 1280, 20),
    "gpt2:xl": _gpt2(48, 1600, 25),
    # Sizes of Llama with a small vocabulary, for benchmarks and tests.
    **{f"llama:{name}": shape for name, shape in llama.PRESETS.items()},
}  # fmt: skip


class FoundModel(NamedTuple):
    """A model that was found by its name.

    Attributes:
      module: the class of Flax modules that the shape makes: `module(shape, rngs=rngs)`.
      directory: of its config.json, weights and tokenizer; None: a shape alone.
    """

    name: str
    shape: Any
    module: type
    directory: Path | None = None

    @property
    def kind(self) -> str:
        """The model's type in the words of `transformers`."""
        return self.shape.download.config["model_type"] if self.directory else self.name.partition(":")[0]

    @property
    def note(self) -> str:
        """A line about a shape that has the layers of a published model and another vocabulary; "" for others."""
        for name, one in SHAPES.items() if isinstance(self.shape, llama.LlamaConfig) else ():
            if name.startswith("llama3") and _layers(one) == _layers(self.shape):
                words = "{} has the layers of {}, and a vocabulary of {:,} instead of {:,}"
                sizes = self.shape.vocab_size, one.vocab_size
                return words.format(self.name, name, *sizes) if sizes[0] != sizes[1] else ""
        return ""


def find_model(name: str, **changes: Any) -> FoundModel:
    """Find a model by name: `find_model("qwen3-8b", num_layers=2).shape`.

    Args:
      name: a directory with config.json, a hub id that is in the local cache, or one of SHAPES.
      changes: of fields of its shape.

    Raises:
      ConfigError: there is none, it has no such field, or jzero's models lack what it has.
    """
    directory = from_cache(name)
    if directory.is_dir():
        shape = hub.config_from_hf(directory, **changes)
        return FoundModel(name, shape, hub.MODELS[shape.download.config["model_type"]][0], directory)
    if name not in SHAPES:
        raise ConfigError(_unknown(name))
    shape = SHAPES[name]
    check_fields(type(shape), changes)
    module = {llama.LlamaConfig: llama.Llama, GPT2Config: GPT2}.get(type(shape), Decoder)
    return FoundModel(name, dataclasses.replace(shape, **changes), module)


def _unknown(name: str) -> str:
    """Say what a name must be; a short name, as 8b, stands behind the colon of a longer one."""
    if _HUB_ID.fullmatch(name):
        return f"{name}: no such directory, and not in the cache of downloads; fetch it with: hf download {name}"
    longer = [known for known in SHAPES if known.endswith(f":{name}")]
    hint = f"; did you mean {longer[0]!r}?" if longer else did_you_mean(name, SHAPES)
    kinds = f"a directory with config.json, a hub id such as Qwen/Qwen3-8B, or one of {', '.join(SHAPES)}"
    return f"model {name!r} is unknown: must be {kinds}; for jzero plan and import also package.module:function{hint}"


def _layers(shape: Any) -> tuple[int, ...]:
    return shape.num_layers, shape.d_model, shape.num_heads, shape.d_ff
