"""A download of `transformers`: its config.json, and the part of it that an export writes besides the shape."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jzero.errors import ConfigError, no_such_directory
from jzero.weights.load import from_cache

TEXT = {"gemma3": "gemma3_text", "llama4": "llama4_text"}  # models with text_config -> their text decoder
ADVICE = "build the model from these files: jzero.models.from_hf(DIR)"
IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
# The classes that are written, the dtype and the files of an export may differ; layer_types are those of the layers.
OWN = {"architectures", "model_type", "dtype", "torch_dtype", "auto_map", "quantization_config", "layer_types"}


@dataclass(frozen=True)
class Download:
    """The config.json, and its directory, that a model's shape was read from."""

    config: Mapping[str, Any]  # its content; of models with other inputs too, that of their text decoder
    directory: str | None = None  # with its tokenizer; None if only the content was given

    @classmethod
    def read(cls, source: str | os.PathLike | Mapping[str, Any]) -> Download:
        """Read a config.json: the file, its directory, the name of a model in the Hub's local cache, or the content."""
        there, directory = source, None
        if not isinstance(there, Mapping):
            path = from_cache(there)
            path = path / "config.json" if os.path.isdir(path) else path
            there, directory = _read(path), os.path.abspath(path.parent)
        name, text = TEXT.get(there.get("model_type", "")), there.get("text_config")
        if name and isinstance(text, Mapping):
            ids = {key: there[key] for key in IDS if there.get(key) is not None}
            there = {**text, **ids, "model_type": name}
        return cls(dict(there), directory)

    def table(self, vocab_size: int) -> dict[str, Any]:
        """Return the entry `download` of a `weights_layout`, see `jzero.weights.name_map`.

        Special tokens outside of a model's `vocab_size` are left out, since `transformers` refuses them.
        """
        kept = {key: value for key, value in self.config.items() if key not in OWN}
        for key in kept.keys() & set(IDS) if vocab_size else ():
            ids = kept[key] if isinstance(kept[key], list) else [kept[key]]
            inside = [x for x in ids if x is None or x < vocab_size]
            kept[key] = kept[key] if inside == ids else inside or None
        return {"config": json.loads(json.dumps(kept, default=str)), "directory": self.directory}


def _read(path: Path) -> dict[str, Any]:
    try:
        there = json.loads(path.read_text())
        if not isinstance(there, dict):
            raise ValueError("it is not an object")
        return there
    except FileNotFoundError:
        written = path.parent / "model"  # by `jzero finetune`
        hint = f"; {written} has one" if path.name == "config.json" and (written / "config.json").exists() else ""
        raise ConfigError(no_such_directory(path, "file or directory") + hint) from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{path} is not a config.json: {error}") from None
