"""Samples of a dataset of conversations: how they are read, cut to one length or left out, and counted."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from jzero.data.template import Encoded
from jzero.errors import ConfigError, some_of

TooLong = Literal["cut", "drop"]


@dataclass
class Fit:
    """Fits encoded samples into `length` tokens, and counts those that do not fit.

    Attributes:
      too_long: "cut" keeps the first `length` tokens, "drop" leaves the sample out.
      samples, long, untrained: how many there were, were too long, and had nothing left to train on.
    """

    length: int
    too_long: TooLong
    samples: int = 0
    long: int = 0
    untrained: int = 0

    def __post_init__(self):
        if self.length < 2:
            raise ConfigError(f"length = {self.length}: must be at least 2 tokens per row")
        check_choice("too_long", self.too_long, TooLong)

    def __call__(self, *parts: Encoded) -> tuple[Encoded, ...] | None:
        """Return the parts of a sample in at most `length` tokens each, or None if the sample is left out."""
        is_long = any(len(part.tokens) > self.length for part in parts)
        self.samples += 1
        self.long += is_long
        if is_long and self.too_long == "drop":
            return None
        parts = tuple(Encoded(tokens[: self.length], trained[: self.length]) for tokens, trained in parts)
        if not all(part.trained[1:].any() for part in parts):  # no label is a row's first token
            self.untrained += 1
            return None
        return parts

    def notes(self) -> list[str]:
        """Return what was cut or left out, for the run report."""
        what = {"cut": "cut to their first tokens", "drop": "left out"}[self.too_long]
        lines = []
        if self.long:
            lines.append(f"{self.long:,} of {self.samples:,} are longer than {self.length:,} tokens: {what}")
        if self.untrained:
            lines.append(f"{self.untrained:,} of {self.samples:,} have no token to train on in a row: left out")
        return lines


def check_choice(name: str, value: Any, choices: Any) -> None:
    """Raise a ConfigError for a value that is not one of a Literal's."""
    if value not in get_args(choices):
        raise ConfigError(f"{name} = {value!r}: must be one of {', '.join(map(repr, get_args(choices)))}")


def samples_of(dataset: Any) -> Iterator[Any]:
    """Iterate over a list, a Hugging Face dataset or another iterable of samples.

    Raises:
      ConfigError: a dict of splits, a path, or something else that has no samples.
    """
    if isinstance(dataset, Mapping):
        raise ConfigError(f"dataset is a mapping with {some_of(dataset)}: pass one split, such as dataset['train']")
    if isinstance(dataset, str | bytes) or not (isinstance(dataset, Iterable) or hasattr(dataset, "__getitem__")):
        raise ConfigError(
            f"dataset is {type(dataset).__name__}: must be a list of samples or a Hugging Face dataset, such as "
            "datasets.load_dataset(...)['train'], for a JSONL file load_dataset('json', data_files=PATH)['train']"
        )
    return iter(dataset.with_format(None) if hasattr(dataset, "with_format") else dataset)


def column_of(sample: Any, column: str) -> Any:
    """Return a sample's column.

    Raises:
      ConfigError: it has no such column.
    """
    if not isinstance(sample, Mapping) or sample.get(column) is None:
        there = f"has {some_of(sample)}" if isinstance(sample, Mapping) else f"is {type(sample).__name__}"
        raise ConfigError(f"no column {column!r}: the sample {there}; rename its column")
    return sample[column]


def tools_of(sample: Any) -> Any:
    """Return the sample's column "tools": a list of JSON schemas, or its JSON; None without tools.

    Raises:
      ConfigError: a text that is no JSON.
    """
    tools = sample.get("tools") if isinstance(sample, Mapping) else None
    try:
        return (json.loads(tools) if isinstance(tools, str) else tools) or None
    except ValueError as error:
        raise ConfigError(f"column 'tools' is a text that is no JSON: {error}") from error
