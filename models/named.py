"""Models by name, or from their directory in the format of `transformers`. One table has all names of shapes.

model = jzero.models.from_hf("Qwen3-8B")
engine, *_ = jzero.initialize(model=model, config=config)
engine.load_weights("Qwen3-8B")
"""

import dataclasses
import os
import re
from collections.abc import Mapping
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import jzero
from jzero.errors import ConfigError
from jzero.values.parameters import did_you_mean
from jzero.weights.load import from_cache

from .bert import Bert
from .config_json import read_config
from .decoder import Decoder
from .decoder_config import BertConfig, DecoderConfig, GPT2Config, ViTConfig, check_fields
from .downloads import TEXT, Download
from .families import FAMILIES
from .llama import PRESETS
from .lora import LoRAConfig
from .moe import MixtureConfig
from .quantized import Kind
from .rope import RopeScaling
from .tensor_names import linear_modules, tensor_rows
from .vit import ViT

LACKING = {
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl"), "an encoder of images, and rotary positions in three dimensions"),
    "whisper": "an encoder of audio, and attention to its output",
    "t5": "an encoder beside the decoder, and relative positions",
}

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
    **{f"llama:{name}": shape for name, shape in PRESETS.items()},
}  # fmt: skip


def from_hf(source: str | os.PathLike | Mapping[str, Any], **changes: Any) -> Any:
    """Make the model of a directory of `transformers`, for `jzero.initialize`; `engine.load_weights` reads its weights.

    Args:
      source: the directory, its config.json, the content of it, or the name of a model in the Hub's local cache.
      changes: to fields of its config, such as attention="xla", pad_vocab_to=128 or lora=LoRAConfig().

    Raises:
      ConfigError: the file cannot be read, or describes what jzero's models lack; all problems at once.
    """
    config = config_from_hf(source, **changes)
    return jzero.from_flax(lambda rngs: module_of(config)(config, rngs=rngs))


def config_from_hf(source: str | os.PathLike | Mapping[str, Any], **changes: Any) -> Any:
    """Read the config of a model, for modules of your own; arguments and errors are those of `from_hf`."""
    download = Download.read(source)
    name = download.config.get("model_type")
    if name in LACKING:
        raise ConfigError(f"config.json has model_type = {name!r}: jzero's models lack {LACKING[name]}")
    if name not in FAMILIES:
        raise ConfigError(f"config.json has model_type = {name!r}: must be one of {', '.join([*FAMILIES, *TEXT])}")
    return read_config(download, **changes)


def module_of(config: Any) -> type:
    """Return the class of Flax modules of a config: `module_of(config)(config, rngs=rngs)`."""
    return Bert if isinstance(config, BertConfig) else ViT if isinstance(config, ViTConfig) else Decoder


class FoundModel(NamedTuple):
    """A model that was found by its name."""

    name: str
    shape: Any
    directory: Path | None = None  # of its files; None: a shape alone

    @property
    def module(self) -> type:
        return module_of(self.shape)

    @property
    def kind(self) -> str:
        """The model's type in the words of `transformers`."""
        return self.shape.download.config["model_type"] if self.directory else self.name.partition(":")[0]

    @property
    def note(self) -> str:
        """A line about a shape that has the layers of a published model and another vocabulary; "" for others."""
        shape, layers = self.shape, attrgetter("num_layers", "d_model", "num_heads", "d_ff")
        if self.directory or self.kind != "llama":
            return ""
        published = [(name, one) for name, one in SHAPES.items() if name.startswith("llama3")]
        name, one = next(((name, one) for name, one in published if layers(one) == layers(shape)), ("", shape))
        words = f"{self.name} has the layers of {name}, and a vocabulary of {shape.vocab_size:,} instead of"
        return f"{words} {one.vocab_size:,}" if shape.vocab_size != one.vocab_size else ""


def find_model(name: str, **changes: Any) -> FoundModel:
    """Find a model by name, with changes of fields: `find_model("qwen3-8b", num_layers=2).shape`.

    Args:
      name: a directory with config.json, a hub id that is in the local cache, or one of SHAPES.

    Raises:
      ConfigError: there is none, it has no such field, or jzero's models lack what it has.
    """
    directory = from_cache(name)
    if directory.is_dir():
        return FoundModel(name, config_from_hf(directory, **changes), directory)
    if re.fullmatch(r"\w[\w.-]*/[\w.-]+", name):  # a hub id
        where = "no such directory, and not in the cache of downloads"
        raise ConfigError(f"{name}: {where}; fetch it with: hf download {name}")
    if name not in SHAPES:
        longer = [known for known in SHAPES if known.endswith(f":{name}")]
        hint = f"; did you mean {longer[0]!r}?" if longer else did_you_mean(name, SHAPES)
        kinds = f"a directory with config.json, a hub id such as Qwen/Qwen3-8B, or one of {', '.join(SHAPES)}"
        kinds += "; for jzero plan and import also package.module:function"
        raise ConfigError(f"model {name!r} is unknown: must be {kinds}{hint}")
    check_fields(type(SHAPES[name]), changes)
    return FoundModel(name, dataclasses.replace(SHAPES[name], **changes))


def add_adapters(name: str, shape: Any, rank: int, quantized: Kind | None) -> DecoderConfig:
    """Return a decoder's shape with the adapters of a fine-tuning, at each matrix that its family's files name."""
    modules = linear_modules(tensor_rows(shape, FAMILIES[shape.family].names))
    if not modules:
        files = f"files of {shape.family} have no matrices that adapters can name"
        raise ConfigError(f"{name}: {files}; train all weights (jzero finetune: --method full)")
    lora = LoRAConfig(r=rank, lora_alpha=2 * rank, target_modules=[*modules], quantized=quantized)
    return dataclasses.replace(shape, lora=lora)
