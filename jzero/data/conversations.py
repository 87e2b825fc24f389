"""Samples of a dataset of conversations: how they are read, cut to one length or left out, and counted."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from jzero.data.other_forms import how_to_read
from jzero.data.template import Encoded
from jzero.errors import ConfigError, some_of

TooLong = Literal["cut", "drop"]


@dataclass
class Fit:
    """Fits encoded samples into `length` tokens, and counts those that do not fit.

    Attributes:
      too_long: "cut" keeps the first `length` tokens, "drop" leaves the sample out.
      samples, long, untrained: how many there were, were too long, and had nothing left to train on.
      longest: the tokens of the longest sample.
    """

    length: int
    too_long: TooLong
    samples: int = 0
    long: int = 0
    untrained: int = 0
    longest: int = 0

    def __post_init__(self):
        if self.length < 2:
            raise ConfigError(f"length = {self.length}: must be at least 2 tokens per row")
        check_choice("too_long", self.too_long, TooLong)

    def __call__(self, *parts: Encoded) -> tuple[Encoded, ...] | None:
        """Return the parts of a sample in at most `length` tokens each, or None if the sample is left out."""
        tokens = max(len(part.tokens) for part in parts)
        is_long = tokens > self.length
        self.longest = max(self.longest, tokens)
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
        return [*(f"{x}: {what}" for x in self._long()), *(f"{x}: left out" for x in self._untrained())]

    def nothing_left(self, kind: str, *others: str) -> str:
        """Say why no sample is left, for an error; `others` are the caller's reasons."""
        reasons = [*self._long(), *self._untrained(), *others] or ["the dataset is empty"]
        fix = f"; raise length (now {self.length:,}; the longest has {self.longest:,} tokens)" if self.long else ""
        return f"no {kind} to train on: {', '.join(reasons)}{fix}"

    def _long(self) -> list[str]:
        return [f"{self.long:,} of {self.samples:,} are longer than {self.length:,} tokens"] if self.long else []

    def _untrained(self) -> list[str]:
        return [f"{self.untrained:,} of {self.samples:,} have no token to train on in a row"] if self.untrained else []


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


def column_of(sample: Any, column: str, is_conversation: bool = False) -> Any:
    """Return a sample's column; the error for a whole conversation has the call that makes it of other columns.

    Raises:
      ConfigError: it has no such column.
    """
    if not isinstance(sample, Mapping) or sample.get(column) is None:
        there = f"has {some_of(sample)}" if isinstance(sample, Mapping) else f"is {type(sample).__name__}"
        fix = how_to_read(sample, column) if is_conversation and isinstance(sample, Mapping) else ""
        raise ConfigError(f"no column {column!r}: the sample {there}" + (f"; {fix}" if fix else ""))
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
