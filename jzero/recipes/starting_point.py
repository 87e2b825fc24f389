"""The model that a fine-tuning starts from: a directory, a download in the local cache, or a shape by name."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, NamedTuple

from jzero.errors import ConfigError, install_command
from jzero.models import config_from_hf
from jzero.models.byte_tokenizer import byte_tokenizer
from jzero.models.decoder_config import DecoderConfig
from jzero.models.llama import PRESETS, preset
from jzero.models.named import MODELS, named
from jzero.weights.load import from_cache

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


class StartingPoint(NamedTuple):
    """A model's name, shape and tokenizer, and the directory of its weights; None: they start at random."""

    name: str
    shape: DecoderConfig
    tokenizer: Any
    directory: Path | None


def starting_point(model: str, tokenizer: str | None) -> StartingPoint:
    """Find a model by a directory, a hub id or a preset.

    Raises:
      ConfigError: there is none, or it has no tokenizer.
    """
    # Without PyTorch, transformers advises to install it; tokenizers do not need it.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise ConfigError(f"jzero finetune needs transformers: {install_command('chat')}") from None
    directory = find_directory(model)
    source = tokenizer or (str(directory) if directory else None)
    try:
        read = byte_tokenizer() if source is None else AutoTokenizer.from_pretrained(source, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{source} has no tokenizer that can be read ({str(error).splitlines()[0]}): name one with --tokenizer"
        ) from None
    if directory:
        shape = config_from_hf(directory)
        if not isinstance(shape, DecoderConfig):
            kind = shape.download.config["model_type"]
            raise ConfigError(f"{model} is a {kind}: jzero finetune tunes decoders; see docs/models.md")
        return StartingPoint(model, shape, read, directory)
    name = model.removeprefix("llama:")
    known = preset if name in PRESETS else named
    return StartingPoint(model, known(name, vocab_size=len(read)), read, None)


def find_directory(model: str) -> Path | None:
    """Return the directory of a model's weights; None for a preset.

    Raises:
      ConfigError: neither a directory, nor a download in the cache, nor a preset.
    """
    if (directory := from_cache(model)).is_dir():
        return directory
    if model in MODELS or model.removeprefix("llama:") in PRESETS:
        return None
    if HUB_ID.fullmatch(model) and not model.startswith("."):
        raise ConfigError(
            f"{model}: no such directory, and not in the cache of downloads; fetch it with: hf download {model}"
        )
    presets = ", ".join([*MODELS, *(f"llama:{name}" for name in PRESETS)])
    raise ConfigError(f"{model}: no such directory; must be one, a hub id such as Qwen/Qwen3-8B, or one of {presets}")
