"""Models of `transformers` from their directories.

model = jzero.models.from_hf("Qwen3-8B")
engine, *_ = jzero.initialize(model=model, config=config)
engine.load_weights("Qwen3-8B")
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import jzero
from jzero.errors import ConfigError

from . import bert, vit
from .config_json import decoder_config
from .decoder import Decoder
from .downloads import TEXT, Download
from .families import FAMILIES

# model_type -> (the module, its config's reader)
MODELS: dict[str, tuple[Any, Any]] = {
    "bert": (bert.Bert, bert.BertConfig.read),
    "vit": (vit.ViT, vit.ViTConfig.read),
    **dict.fromkeys(FAMILIES, (Decoder, decoder_config)),
}
LACKING = {
    "qwen2_vl": "an encoder of images, and rotary positions in three dimensions",
    "qwen2_5_vl": "an encoder of images, and rotary positions in three dimensions",
    "whisper": "an encoder of audio, and attention to its output",
    "t5": "an encoder beside the decoder, and relative positions",
}


def from_hf(source: str | os.PathLike | Mapping[str, Any], **changes: Any) -> Any:
    """Make the model of a directory of `transformers`, for `jzero.initialize`; `engine.load_weights` reads its weights.

    Args:
      source: the directory, its config.json, the content of it, or the name of a model in the Hub's local cache.
      changes: to fields of its config, such as attention="xla", pad_vocab_to=128 or lora=LoRAConfig().

    Raises:
      ConfigError: the file cannot be read, or describes what jzero's models lack; all problems at once.
    """
    config = config_from_hf(source, **changes)
    kind = MODELS[config.download.config["model_type"]][0]
    return jzero.from_flax(lambda rngs: kind(config, rngs=rngs))


def config_from_hf(source: str | os.PathLike | Mapping[str, Any], **changes: Any) -> Any:
    """Read the config of a model, for modules of your own; arguments and errors are those of `from_hf`."""
    download = Download.read(source)
    name = download.config.get("model_type")
    if name in LACKING:
        raise ConfigError(f"config.json has model_type = {name!r}: jzero's models lack {LACKING[name]}")
    if name not in MODELS:
        raise ConfigError(f"config.json has model_type = {name!r}: must be one of {', '.join([*MODELS, *TEXT])}")
    return MODELS[name][1](download, **changes)
