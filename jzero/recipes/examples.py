"""Training data of a file: its kind is told by its fields, and its rows are those of `jzero.data`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jzero.data.chat import Chat, Pairs
from jzero.data.conversations import FileSamples, LengthLimit, json_lines
from jzero.data.packing import PackedRows, pieces_of
from jzero.data.template import Encoded, Template, how_to_read, read_messages
from jzero.errors import ConfigError, install_command, shorten, some_of

KINDS = {  # kind -> its fields; the first that fits
    "preferences": ("chosen", "rejected"),
    "chat": ("messages",),
    "completions": ("prompt", "completion"),
    "text": ("text",),
}
SPLITS = "dataset_dict.json"  # of a `DatasetDict`: the names of its splits
WORDS = {  # kind -> its samples, and what the loss is of
    "preferences": "pair{s} of replies; the loss is DPO's",
    "chat": "conversation{s}; the loss is that of the assistant's turns",
    "completions": "prompt{s} with completion{s}; the loss is that of the completions",
    "text": "text{s}; the loss is that of every token",
}
COLUMNS = {".csv": "", ".tsv": r', sep="\t"'}  # the options with which `datasets` reads them
TAKEN = {"text": (str, "a string"), "messages": (list, "a list of messages")}  # by field; others take both
FORMS = (
    '{"text"}, {"prompt", "completion"}, {"messages": [{"role", "content"}, ...]} or {"prompt", "chosen", "rejected"}'
)


class Texts(PackedRows):
    """Training data of {"text"}, all of it trained, and {"prompt", "completion"}, whose completion is trained.

    A text ends with the tokenizer's end token, and what is longer than a row continues in another. Prompt and
    completion are strings, or messages for the chat template; what is too long is cut.

    Args:
      samples, tokenizer, length, pack, vocab_size: as for `jzero.data.Chat`.

    Raises:
      ConfigError: as `jzero.data.Chat`; an empty completion; a tokenizer without an end token.
    """

    def __init__(self, samples: FileSamples | list[Any], tokenizer: Any, *, length: int, pack: bool, vocab_size: int):
        template, self.limit = Template(tokenizer), LengthLimit(length, "cut")

        def encode(sample: Any) -> list[Encoded]:
            if kind_of_sample(sample, "the sample") == "text":
                return in_parts(template.text("", str(sample["text"])), length)
            prompt, reply = sample["prompt"], sample["completion"]
            if isinstance(reply, str) and not reply.strip():
                raise ConfigError(f"completion is {reply!r}: must have a text to train on; leave the sample out")
            if isinstance(prompt, str) and isinstance(reply, str):
                return [template.text(prompt, reply)]
            return [template.reply(read_messages(prompt, "prompt"), read_messages(reply, "completion"))]

        store, _ = pieces_of(self.limit.encode(samples, encode, "text"), vocab_size)
        super().__init__(store, length, pack)

    def __repr__(self) -> str:
        rows = f"{many(len(self), 'row')} of {self.length:,}, {self._filled:.1%} filled"
        return f"Texts({many(self.limit.samples, 'sample')} in {many(len(self.store.sizes), 'piece')}, {rows})"


Rows = Chat | Pairs | Texts


class Examples(NamedTuple):
    """Samples of one kind of KINDS, the name of their file, and its splits that are not read."""

    kind: str
    samples: FileSamples | list[Any]
    name: str
    unread: Sequence[str] = ()

    def words(self) -> str:
        """Return how many samples there are, what the loss is of, and what is not read."""
        text = WORDS[self.kind].format(s="s" * (len(self.samples) != 1))
        splits = f"; not read: {some_of(self.unread)}" if self.unread else ""
        return f"{self.name}, {len(self.samples):,} {text}{splits}"

    def rows(self, tokenizer: Any, length: int, vocab_size: int, pack: bool) -> Rows:
        """Encode all samples in rows of `length` tokens.

        Raises:
          ConfigError: a sample that cannot be encoded, no token to train on, a token outside the vocabulary.
        """
        if self.kind == "preferences":
            return Pairs(self.samples, tokenizer, length=length, vocab_size=vocab_size)
        rows = Chat if self.kind == "chat" else Texts
        return rows(self.samples, tokenizer, length=length, pack=pack, vocab_size=vocab_size)


def read_examples(path: str | Path) -> Examples:
    """Read JSONL, a text file, Parquet, or a directory that `datasets` has saved.

    Raises:
      ConfigError: no such file, an unreadable or empty one, unknown or mixed fields; it names the line.
    """
    path = Path(path)
    samples, kind, first = FileSamples(), "", ""
    for where, sample in _samples(path):
        found = kind_of_sample(sample, where)
        if kind and found != kind:
            raise ConfigError(f"{where} is {found}, but {first} is {kind}: give one kind of sample per file")
        kind, first = kind or found, first or where
        samples[where.removeprefix(f"{path} ")] = sample
    if not samples:
        raise ConfigError(f"{path} is empty: expected a sample in each line, with the fields {FORMS}")
    splits = json.loads((path / SPLITS).read_text())["splits"] if (path / SPLITS).is_file() else []
    return Examples(kind, samples, path.name, [split for split in splits if split != "train"])


def kind_of_sample(sample: object, where: str) -> str:
    """Return the kind of a sample by its fields.

    Raises:
      ConfigError: other fields; it says how to make known ones of them.
    """
    if not isinstance(sample, Mapping):
        raise ConfigError(f"{where} is {type(sample).__name__}: must be an object with the fields {FORMS}")
    for kind, fields in KINDS.items():
        if all(sample.get(field) is not None for field in fields):
            for field in fields:
                taken, words = TAKEN.get(field, (Sequence, "a string or a list of messages"))
                if not isinstance(sample[field], taken):
                    raise ConfigError(f"{where}: {field} is {shorten(repr(sample[field]), 80)}: must be {words}")
            turns = sample["messages"] if kind == "chat" else ()
            roles = [turn.get("role") for turn in turns if isinstance(turn, Mapping)]
            if any(roles) and "assistant" not in roles:
                raise ConfigError(f"{where}: no turn of the role assistant to train on; the roles are {some_of(roles)}")
            return kind
    fix = how_to_read(sample, "messages")
    how = f"; `datasets` makes them: {fix}" if fix else ""
    there = some_of(f"{name} (null)" if value is None else name for name, value in sample.items())
    raise ConfigError(f"{where} has the fields {there}: must be {FORMS}{how}")


def _samples(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield (where a sample is, the sample)."""
    if not path.exists():
        raise ConfigError(f"{path}: no such file or directory")
    suffix = path.suffix.lower()
    if path.is_dir() or suffix == ".parquet":
        yield from ((f"{path} row {number}", row) for number, row in enumerate(_table(path), 1))
        return
    if suffix in COLUMNS:
        read = f'datasets.load_dataset("csv", data_files={str(path)!r}{COLUMNS[suffix]})'
        made = f'{read}["train"].to_json({str(path.with_suffix(".jsonl"))!r})'
        raise ConfigError(f"{path} is a table: expected JSONL, which this line of Python makes of it: {made}")
    if suffix not in (".json", ".jsonl"):
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            place = f"line {error.object.count(10, 0, error.start) + 1}, byte {error.start}"
            raise ConfigError(f"{path} is no text in UTF-8 ({error.reason}, {place}): save it as UTF-8") from None
        yield from [(str(path), {"text": text})] * bool(text.strip())
        return
    if _is_array(path):
        fix = f"`jq -c '.[]' {path.name}` writes these lines"
        raise ConfigError(f"{path} is one JSON array: expected a sample in each line; {fix}")
    yield from json_lines(path)


def _is_array(path: Path) -> bool:
    """Return whether a file is one JSON array: its first line begins one, and ends it only if no other line follows."""
    with path.open("rb") as file:
        first = file.readline()
        try:  # reads on, since a list in a line of its own is no sample
            return isinstance(json.loads(first), list) and not any(map(bytes.strip, file))
        except (ValueError, RecursionError):
            return first.lstrip().startswith(b"[")


def _table(path: Path) -> Iterator[Any]:
    try:
        if path.is_dir():
            import datasets

            if not any((path / file).exists() for file in ("state.json", SPLITS)):
                fix = f"give one file (`cat {path}/*.jsonl > all.jsonl` joins several), or a directory of save_to_disk"
                raise ConfigError(f"{path}: `datasets` has not saved this directory; {fix}")
            found = datasets.load_from_disk(str(path))
            if isinstance(found, Mapping) and "train" not in found:
                raise ConfigError(f"{path} has the splits {some_of(found)}: must have train, or be one split alone")
            found = found["train"] if isinstance(found, Mapping) else found
            return iter(found.with_format(None))
        from pyarrow import parquet

        return iter(parquet.read_table(path).to_pylist())
    except ImportError:
        raise ConfigError(f"{path}: data sets and Parquet need more packages: {install_command('chat')}") from None
    except (ValueError, OSError) as error:
        raise ConfigError(f"{path} cannot be read: {str(error).splitlines()[0]}") from None


def many(count: int, noun: str) -> str:
    """Return a count and its noun: "1 row", "1,200 rows"."""
    return f"{count:,} {noun}{'s' * (count != 1)}"


def in_parts(text: Encoded, length: int) -> list[Encoded]:
    """Cut a text into rows; each begins with the token that the one before ends with, so that every token is a label.

    >>> import numpy as np
    >>> [part.tokens.tolist() for part in in_parts(Encoded(np.arange(6), np.ones(6, bool)), 3)]
    [[0, 1, 2], [2, 3, 4], [4, 5]]
    """
    starts = range(0, max(1, len(text.tokens) - 1), length - 1)
    return [Encoded(text.tokens[i : i + length], text.trained[i : i + length]) for i in starts]
