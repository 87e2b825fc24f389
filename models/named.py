"""`find_model`: models by name, as a published one, a directory or a download. One table has all names of shapes."""

from __future__ import annotations

import dataclasses
import re
from functools import partial
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


LLAMA3 = partial(DecoderConfig, vocab_size=128_256)
LONG, LONGEST = RopeScaling("llama3", 8.0), RopeScaling("llama3", 32.0)
QWEN3 = partial(
    DecoderConfig, vocab_size=151_936, rope_theta=1e6, norm_eps=1e-6, family="qwen3", qk_norm="shared", head_width=128
)
MISTRAL = partial(DecoderConfig, 32, 4096, 32, 8, 14336, family="mistral")
GPT_2 = partial(GPT2Config, pad_vocab_to=128)
SHAPES: dict[str, Any] = {
    # Published decoders, with the shapes of their config.json.
    "llama3-8b": LLAMA3(32, 4096, 32, 8, 14336),
    "llama3-70b": LLAMA3(80, 8192, 64, 8, 28672),
    "llama3.1-8b": LLAMA3(32, 4096, 32, 8, 14336, rope_scaling=LONG),
    "llama3.1-70b": LLAMA3(80, 8192, 64, 8, 28672, rope_scaling=LONG),
    "llama3.1-405b": LLAMA3(126, 16384, 128, 8, 53248, rope_scaling=LONG),
    "llama3.2-1b": LLAMA3(16, 2048, 32, 8, 8192, rope_scaling=LONGEST, tied=True),
    "llama3.2-3b": LLAMA3(28, 3072, 24, 8, 8192, rope_scaling=LONGEST, tied=True),
    "mistral-7b": MISTRAL(vocab_size=32_768, rope_theta=1e6),  # version 0.3
    "mistral-7b-v0.1": MISTRAL(rope_theta=1e4, window=4096),
    "qwen3-0.6b": QWEN3(28, 1024, 16, 8, 3072, tied=True),
    "qwen3-1.7b": QWEN3(28, 2048, 16, 8, 6144, tied=True, head_width=None),
    "qwen3-4b": QWEN3(36, 2560, 32, 8, 9728, tied=True),
    "qwen3-8b": QWEN3(36, 4096, 32, 8, 12288, head_width=None),
    "qwen3-14b": QWEN3(40, 5120, 40, 8, 17408, head_width=None),
    "qwen3-32b": QWEN3(64, 5120, 64, 8, 25600),
    # Mixtral (Jiang et al., arXiv:2401.04088) and Qwen3-MoE (Yang et al., arXiv:2505.09388).
    "moe:mixtral-8x7b": DecoderConfig(
        32, 4096, 32, 8, 14336, rope_theta=1e6, family="mixtral", mixture=MixtureConfig(8, 2, 14336)
    ),
    "moe:qwen3-30b-a3b": DecoderConfig(
        48, 2048, 32, 4, 6144, vocab_size=151_936, rope_theta=1e6, norm_eps=1e-6, family="qwen3_moe", head_width=128,
        qk_norm="shared", mixture=MixtureConfig(128, 8, 768),
    ),
    # GPT-2 (Radford et al., 2019), with a vocabulary that matmuls like.
    "gpt2:small": GPT_2(12, 768, 12, 3072),
    "gpt2:medium": GPT_2(24, 1024, 16, 4096),
    "gpt2:large": GPT_2(36, 1280, 20, 5120),
    "gpt2:xl": GPT_2(48, 1600, 25, 6400),
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
