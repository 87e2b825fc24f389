"""Encode text once into a memory-mapped file of tokens, and use that file as training data.

write_tokens("train.jsonl", "tokens.npy", tokenizer)
engine, *_ = jzero.initialize(model=model, config=config, training_data=TokenFile("tokens.npy", sequence=4096))
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any, Protocol

import numpy as np

from jzero.data.conversations import column_of, samples_of
from jzero.display.slow_work import slow_work
from jzero.errors import ConfigError, some_of
from jzero.files import create

NOTED = ("tokens", "documents", "vocab_size", "end")
ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")  # of GPT-2, of Llama 3, of Llama 2, of Gemma


class Tokenizer(Protocol):
    """Anything that encodes text; `experiments/tokenizers.py` has an example.

    Attributes:
      vocab_size: all tokens are below it.
      end: the token that ends a document. `encode` must not return it.
    """

    vocab_size: int
    end: int

    def encode(self, text: str) -> Sequence[int] | np.ndarray: ...


@slow_work("encoding texts")
def write_tokens(
    texts: Any, path: str | os.PathLike, tokenizer: Any, *, column: str = "text", end: str | None = None
) -> int:
    """Encode documents into `path`, a one-dimensional .npy file, with the end token after each document.

    A note beside it, `path`.json, records tokens, documents, vocab_size and end. One document is in memory at a time.
    Text that reads like a special token is encoded as text, so the end token is nowhere else.

    Args:
      texts: strings; the path of a JSONL file; a Hugging Face dataset, or other samples with the column `column`.
      path: of the file to write.
      tokenizer: a `Tokenizer`, a tokenizer of `transformers`, or a `tokenizers.Tokenizer`.
      column: the text's, in samples that are no strings.
      end: the token that ends a document, as text. Default: the `eos_token` of `transformers`; of a
        `tokenizers.Tokenizer`, which has none, the one of ENDS that it has. A `Tokenizer` has its own.

    Returns:
      The number of tokens.

    Raises:
      ConfigError: `path` does not end with .npy, a sample without text, no end token or several, a token outside the
        vocabulary, another kind of texts or tokenizer.
    """
    path = Path(path)
    if path.suffix != ".npy":
        raise ConfigError(f"path = {str(path)!r}: must end with .npy")
    found, tokenizer = documents(texts, column), _as_tokenizer(tokenizer, end)
    path.parent.mkdir(parents=True, exist_ok=True)
    dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32)
    count = written = 0
    unfinished = path.with_suffix(".unfinished")
    with create(unfinished, "wb") as file:
        begin = _write_header(file, dtype, 0)
        for text in found:
            tokens = np.append(np.asarray(tokenizer.encode(text), np.int64), tokenizer.end)
            check_tokens(tokens, tokenizer.vocab_size)
            tokens = tokens.astype(dtype)
            file.write(tokens.tobytes())
            count, written = count + len(tokens), written + 1
        # The header holds the token count, which is known only now. NumPy pads headers so that the shape can grow.
        file.seek(0)
        if _write_header(file, dtype, count) != begin:  # no assert: python -O would leave the header of an empty file
            raise RuntimeError(f"NumPy wrote a longer header for {count} tokens than for none")
    note = dict(zip(NOTED, (count, written, int(tokenizer.vocab_size), int(tokenizer.end)), strict=True))
    _note_path(path).write_text(json.dumps(note) + "\n")
    unfinished.replace(path)  # last, so that a killed job leaves no .npy file that looks complete
    return count


def documents(texts: Any, column: str = "text") -> Iterator[str]:
    """Iterate over the texts that `write_tokens` takes."""
    return (_text(place, sample, column) for place, sample in samples_of(texts, "texts"))


def _text(name: str, sample: object, column: str) -> str:
    try:
        text = sample if isinstance(sample, str) else column_of(sample, column)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from None
    if not isinstance(text, str):
        raise ConfigError(f"{name}: column {column!r} is {type(text).__name__}: must be a string")
    return text


def _as_tokenizer(tokenizer: Any, end: str | None) -> Tokenizer:
    if all(hasattr(tokenizer, name) for name in ("encode", "vocab_size", "end")):
        if end is not None:
            raise ConfigError(f"end = {end!r}: has no effect, the tokenizer has its own, {tokenizer.end}; omit it")
        return tokenizer
    of_transformers = hasattr(tokenizer, "eos_token")
    if not of_transformers and not hasattr(tokenizer, "from_str"):
        raise ConfigError(
            f"tokenizer is {type(tokenizer).__name__}: must be a tokenizer of transformers, a tokenizers.Tokenizer, or "
            "an object with encode, vocab_size and end"
        )
    vocabulary = tokenizer.get_vocab()
    encode: Callable[[str], Sequence[int]]
    if of_transformers:
        ends = [tokenizer.eos_token] if tokenizer.eos_token else []
        encode = partial(tokenizer.encode, add_special_tokens=False, split_special_tokens=True, verbose=False)
    else:
        ends = [mark for mark in ENDS if mark in vocabulary]
        copy = type(tokenizer).from_str(tokenizer.to_str())  # files of tokenizers may cut and pad
        copy.no_truncation()
        copy.no_padding()
        copy.encode_special_tokens = True
        encode = lambda text: copy.encode(text, add_special_tokens=False).ids  # noqa: E731
    if end is None and len(ends) != 1:
        has = some_of(ends) or "none"
        raise ConfigError(f"end = None: name the token that ends a document; the tokenizer has {has}")
    end = ends[0] if end is None else end
    if end not in vocabulary:
        raise ConfigError(f"end = {end!r}: the tokenizer has no such token; name the token that ends a document")
    return SimpleNamespace(encode=encode, vocab_size=max(vocabulary.values()) + 1, end=vocabulary[end])


def _write_header(file: IO[bytes], dtype: np.dtype, count: int) -> int:
    header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": (count,)}
    np.lib.format.write_array_header_1_0(file, header)
    return file.tell()


def _note_path(path: str | os.PathLike) -> Path:
    return Path(f"{os.fspath(path)}.json")


def token_note(path: str | os.PathLike) -> dict[str, int]:
    """Read the note that `write_tokens` left beside a file: {name of NOTED: number}; {} without a note.

    Raises:
      ConfigError: the note is damaged.
    """
    if not (path := _note_path(path)).exists():
        return {}
    try:
        note = json.loads(path.read_text())
        if not isinstance(note, dict) or not all(type(note.get(name, 0)) is int for name in NOTED):
            raise ValueError(f"it must contain the numbers {', '.join(NOTED)}")
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"{path} is damaged ({error}): write the tokens again, or remove it and pass vocab_size and end yourself"
        ) from None
    return note


def open_tokens(tokens: Any, vocab_size: int | None = None) -> tuple[np.ndarray, int | None]:
    """Open a file of tokens (memory-mapped) or take an array.

    Returns:
      (tokens [n], the size of their vocabulary or None if unknown)

    Raises:
      ConfigError: no such file, not an .npy file, not integers in one dimension, a note that is damaged or of another
        file, or a larger vocabulary than `vocab_size`.
    """
    name, note = "tokens", dict[str, int]()
    if isinstance(tokens, str | os.PathLike):
        name = os.fspath(tokens)
        note = token_note(name)
        try:
            tokens = np.load(name, mmap_mode="r", allow_pickle=False)
        except Exception as error:  # NumPy raises many kinds for a damaged header, such as EOFError and SyntaxError
            line = str(error).partition("\n")[0]
            raise ConfigError(
                f"{name}: not a .npy file of tokens ({line}); jzero.data.write_tokens writes one"
            ) from error
        if not np.size(tokens):
            raise ConfigError(f"{name}: is empty; jzero.data.write_tokens writes tokens into it")
    tokens = np.asanyarray(tokens)
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise ConfigError(
            f"{name} has dtype {tokens.dtype} and shape {tokens.shape}; expected integers in one dimension"
        )
    if (noted := note.get("tokens")) not in (None, len(tokens)):
        raise ConfigError(
            f"{name} has {len(tokens)} tokens, and its note {_note_path(name)} describes {noted}: write the tokens "
            "again, or remove the note and pass vocab_size and end yourself"
        )
    noted_size = note.get("vocab_size")
    if noted_size and vocab_size and noted_size > vocab_size:
        raise ConfigError(
            f"vocab_size = {vocab_size}: {name} has tokens up to {noted_size - 1}; use at least {noted_size}"
        )
    return tokens, vocab_size or noted_size


def check_tokens(tokens: np.ndarray, vocab_size: int | None) -> None:
    """Raise a ConfigError for tokens outside the vocabulary, or int32, which an embedding lookup would not report."""
    if not tokens.size:
        return
    low, high = int(tokens.min()), int(tokens.max())
    if vocab_size and not 0 <= low <= high < vocab_size:
        raise ConfigError(
            f"token {low if low < 0 else high} is outside a vocabulary of {vocab_size}: vocab_size must be larger than "
            "every token"
        )
    if not -(2**31) <= low <= high < 2**31:
        raise ConfigError(f"token {low if low < -(2**31) else high} does not fit int32, the dtype of a batch's tokens")


class TokenFile:
    """Training data: consecutive windows of `sequence` tokens from a file of tokens or a one-dimensional array.

    A sample is {"inputs": [sequence] int32, "labels": [sequence] int32}; a label is the token after its input.

    Args:
      tokens: the path of a .npy file, or a one-dimensional array of integers.
      sequence: tokens per sample.
      vocab_size: the model's; every token that is read is checked against it. Default: from `write_tokens`' note.

    >>> TokenFile(np.arange(10), sequence=3).rows(np.array([2]))["labels"].tolist()
    [[7, 8, 9]]
    """

    def __init__(self, tokens: Any, sequence: int, vocab_size: int | None = None):
        self.tokens, self.vocab_size = open_tokens(tokens, vocab_size)
        self.sequence = sequence
        if not 1 <= sequence < len(self.tokens):
            raise ConfigError(
                f"sequence = {sequence}: must be from 1 to {len(self.tokens) - 1}, one less than the file's tokens"
            )

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.sequence

    def __repr__(self) -> str:
        return f"TokenFile({len(self)} windows of {self.sequence}, {self.tokens.dtype})"

    def rows(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        starts = (indices * self.sequence).tolist()
        windows = np.stack([self.tokens[start : start + self.sequence + 1] for start in starts])
        check_tokens(windows, self.vocab_size)
        windows = windows.astype(np.int32)
        return {"inputs": windows[:, :-1], "labels": windows[:, 1:]}
