"""Samples of a dataset of texts or conversations: how they are read, cut to one length or left out, and counted."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from jzero.data.template import Encoded, Tools, how_to_read
from jzero.errors import ConfigError, shorten, some_of

TooLong = Literal["cut", "drop"]


class FileSamples(dict[str, object]):
    """Samples of a file by their places in it, which errors name."""


@dataclass
class LengthLimit:
    """Fits encoded samples into `length` tokens, and counts those that do not fit.

    Attributes:
      too_long: "cut" keeps the first `length` tokens, "drop" leaves the sample out.
      samples, long, untrained: how many there were, were too long, and had nothing left to train on.
      equal: how many more were left out because their two sides are equal.
      longest: the tokens of the longest sample.
      roles: of the messages, where only an assistant's are trained.
    """

    length: int
    too_long: TooLong
    samples: int = 0
    long: int = 0
    untrained: int = 0
    equal: int = 0
    longest: int = 0
    roles: dict[str, None] = field(default_factory=dict)

    def __post_init__(self):
        if self.length < 2:
            raise ConfigError(f"length = {self.length}: must be at least 2 tokens per row")
        check_choice("too_long", self.too_long, TooLong)

    def encode(self, dataset: Any, encode: Callable[[object], Sequence[Encoded]], kind: str) -> list[Encoded]:
        """Encode each sample as its parts, and return the parts of those that fit, one after another.

        Raises:
          ConfigError: names the sample that `encode` refuses, or says why no sample of this kind is left.
        """
        found: list[Encoded] = []
        for place, sample in samples_of(dataset, "dataset"):
            try:
                found += self._cut(encode(sample))
            except ConfigError as error:
                raise ConfigError(f"{place}: {error}") from error
        if not found:
            reasons = ", ".join(text for text, _ in self._counts()) or "the dataset is empty"
            fix = f"; raise length (now {self.length:,}; the longest has {self.longest:,} tokens)" if self.long else ""
            if self.roles and "assistant" not in self.roles:
                trained = "; only turns of the role assistant are trained"
                fix = f"{trained}, but the roles are {some_of(self.roles)}: must be system, user, assistant or tool"
            raise ConfigError(f"no {kind} to train on: {reasons}{fix}")
        return found

    def _cut(self, parts: Sequence[Encoded]) -> list[Encoded]:
        """Return the parts of a sample in at most `length` tokens each, or none if the sample is left out."""
        if not parts:
            return []
        tokens = max(len(part.tokens) for part in parts)
        is_long = tokens > self.length
        self.longest = max(self.longest, tokens)
        self.samples += 1
        self.long += is_long
        if is_long and self.too_long == "drop":
            return []
        parts = [Encoded(tokens[: self.length], trained[: self.length]) for tokens, trained in parts]
        if not all(part.trained[1:].any() for part in parts):  # no label is a row's first token
            self.untrained += 1
            return []
        return parts

    def notes(self) -> list[str]:
        """Return what was cut or left out, for the run report."""
        return [f"{text}: {done}" for text, done in self._counts()]

    def _counts(self) -> list[tuple[str, str]]:
        """List what did not fit: (how many, what was done with them)."""
        cut = {"cut": "cut to their first tokens", "drop": "left out"}[self.too_long]
        rows = [
            (self.long, self.samples, f"are longer than {self.length:,} tokens", cut),
            (self.untrained, self.samples, "have no token to train on in a row", "left out"),
            (self.equal, self.samples + self.equal, "have equal sides", "left out"),
        ]
        return [(f"{count:,} of {of:,} {why}", done) for count, of, why, done in rows if count]


def check_choice(name: str, value: object, choices: object) -> None:
    """Raise a ConfigError for a value that is not one of a Literal's."""
    if value not in get_args(choices):
        raise ConfigError(f"{name} = {value!r}: must be one of {', '.join(map(repr, get_args(choices)))}")


def samples_of(dataset: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield (place, sample) of a list called `name`, a JSONL file, a Hugging Face dataset or another iterable.

    Raises:
      ConfigError: a dict of splits, or something else that has no samples.
    """
    if isinstance(dataset, str | os.PathLike):
        if not os.path.isfile(dataset):
            path = shorten(repr(os.fspath(dataset)), 80)
            raise ConfigError(
                f"{path} is no file: give the path of a JSONL file, a list of samples or a Hugging Face dataset"
            )
        return json_lines(dataset)
    if isinstance(dataset, FileSamples):
        return iter(dataset.items())
    if isinstance(dataset, Mapping):
        raise ConfigError(f"dataset is a mapping with {some_of(dataset)}: pass one split, such as dataset['train']")
    if isinstance(dataset, bytes) or not (isinstance(dataset, Iterable) or hasattr(dataset, "__getitem__")):
        raise ConfigError(
            f"dataset is {type(dataset).__name__}: must be a list of samples, the path of a JSONL file or a Hugging "
            "Face dataset, such as datasets.load_dataset(...)['train']"
        )
    samples = dataset.with_format(None) if hasattr(dataset, "with_format") else dataset
    return ((f"{name}[{number}]", sample) for number, sample in enumerate(samples))


def json_lines(path: str | os.PathLike) -> Iterator[tuple[str, Any]]:
    """Yield (place, sample) of each line of a JSONL file that is not empty.

    Raises:
      ConfigError: a line that is no JSON in UTF-8.
    """
    with open(path, "rb") as file:  # lines end with \n alone, and json decodes them
        for number, line in enumerate(file, 1):
            place = f"{os.fspath(path)} line {number}"
            try:
                if line.strip():
                    yield place, json.loads(line)
            except UnicodeDecodeError as error:  # a ValueError too
                wrong = f"{error.reason} at byte {error.start}"
                raise ConfigError(f"{place} is no text in UTF-8 ({wrong}): save the file as UTF-8") from None
            except (ValueError, RecursionError) as error:
                raise ConfigError(
                    f"{place} is no JSON ({error}): expected a sample in each line; datasets.load_dataset reads other "
                    "formats"
                ) from None


def column_of(sample: object, column: str, is_conversation: bool = False) -> Any:
    """Return a sample's column; the error for a whole conversation has the call that makes it of other columns.

    Raises:
      ConfigError: it has no such column.
    """
    if not isinstance(sample, Mapping) or sample.get(column) is None:
        there = f"has {some_of(sample)}" if isinstance(sample, Mapping) else f"is {type(sample).__name__}"
        fix = how_to_read(sample, column) if is_conversation and isinstance(sample, Mapping) else ""
        raise ConfigError(f"no column {column!r}: the sample {there}" + (f"; {fix}" if fix else ""))
    return sample[column]


def tools_of(sample: object) -> Tools:
    """Return the sample's column "tools": a list of JSON schemas, or its JSON; None without tools.

    Raises:
      ConfigError: a text that is no JSON.
    """
    tools = sample.get("tools") if isinstance(sample, Mapping) else None
    try:
        return (json.loads(tools) if isinstance(tools, str) else tools) or None
    except ValueError as error:
        raise ConfigError(f"column 'tools' is a text that is no JSON: {error}") from error
