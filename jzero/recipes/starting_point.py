"""The model that a fine-tuning starts from: a directory, a download in the local cache, or a shape by name."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any, NamedTuple

from jzero.errors import ConfigError, install_command
from jzero.models.byte_tokenizer import byte_tokenizer
from jzero.models.decoder_config import DecoderConfig
from jzero.models.named import find_model


class StartingPoint(NamedTuple):
    """A model's name, shape and tokenizer, and the directory of its weights; None: they start at random."""

    name: str
    shape: DecoderConfig
    tokenizer: Any
    directory: Path | None


def starting_point(model: str, tokenizer: str | None) -> StartingPoint:
    """Find a model by its name, and its tokenizer.

    Raises:
      ConfigError: there is none, or it has no tokenizer.
    """
    # Without PyTorch, transformers advises to install it; tokenizers do not need it.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise ConfigError(f"jzero finetune needs transformers: {install_command('chat')}") from None
    found = find_model(model)
    if not found.shape.causal:
        raise ConfigError(f"{model} is a {found.kind}: jzero finetune tunes decoders; see docs/models.md")
    source = tokenizer or (str(found.directory) if found.directory else None)
    try:
        read = byte_tokenizer() if source is None else AutoTokenizer.from_pretrained(source, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{source} has no tokenizer that can be read ({str(error).splitlines()[0]}): name one with --tokenizer"
        ) from None
    shape = found.shape if found.directory else dataclasses.replace(found.shape, vocab_size=len(read))
    return StartingPoint(model, shape, read, found.directory)
