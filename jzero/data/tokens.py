"""Text to tokens, once, in a memory-mapped file; and that file as training data.

tokenizer = train_bpe(texts, vocab_size=8192)       # or Bytes()
write_tokens(texts, "tokens.npy", tokenizer)
engine, *_ = jzero.initialize(model=model, config=config, training_data=TokenFile("tokens.npy", sequence=4096))
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from jzero.errors import ConfigError

END = "<|end|>"


class Tokenizer(Protocol):
    """Text to tokens, which are numbers below `vocab_size`; `end` is the one after every document."""

    vocab_size: int
    end: int

    def encode(self, text: str) -> Sequence[int] | np.ndarray: ...
    def decode(self, tokens: Iterable[int]) -> str: ...


class Bytes:
    """The bytes of UTF-8 as tokens, 256 after every document.

    >>> Bytes().decode([*Bytes().encode("né"), 256])
    'né'
    """

    vocab_size, end = 257, 256

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode(), np.uint8)

    def decode(self, tokens: Iterable[int]) -> str:
        return bytes(int(t) for t in tokens if t != self.end).decode(errors="replace")


class BPE:
    """A tokenizer of the `tokenizers` library; `end`: the text of its token after a document. `save` and `BPE.load`.

    Text that reads like a special token is text.
    """

    def __init__(self, tokenizer: Any, end: str = END):
        number = tokenizer.token_to_id(end)
        if number is None:
            raise ConfigError(f"end = {end!r}: the tokenizer has no such token; name the one that ends its documents")
        tokenizer.encode_special_tokens = True
        self.tokenizer, self.end, self.vocab_size = tokenizer, number, tokenizer.get_vocab_size()

    @classmethod
    def load(cls, path: str | os.PathLike, end: str = END) -> BPE:
        """From the JSON file that `save`, or the library, wrote."""
        library = _library()
        try:
            return cls(library.Tokenizer.from_file(os.fspath(path)), end)
        except Exception as error:
            raise ConfigError(f"{path}: is no tokenizer of the tokenizers library: {error}") from error

    def save(self, path: str | os.PathLike) -> None:
        self.tokenizer.save(os.fspath(path))

    def encode(self, text: str) -> Sequence[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, tokens: Iterable[int]) -> str:
        return self.tokenizer.decode([int(t) for t in tokens])


def train_bpe(texts: Iterable[str], vocab_size: int) -> BPE:
    """A byte-level BPE of these texts: at most `vocab_size` tokens, the 256 bytes and the end among them."""
    library = _library()
    if vocab_size < 257:
        raise ConfigError(f"vocab_size = {vocab_size}: must be at least 257, the bytes and the end of a document")
    tokenizer = library.Tokenizer(library.models.BPE())
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END], show_progress=False,
        initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    tokenizer.train_from_iterator(texts, trainer)
    return BPE(tokenizer)


def _library() -> Any:
    try:
        import tokenizers
    except ImportError as error:
        raise ConfigError("BPE needs the tokenizers library: pip install 'jzero[data]'; Bytes() needs none") from error
    return tokenizers


def write_tokens(texts: Iterable[str], path: str | os.PathLike, tokenizer: Tokenizer) -> int:
    """Write the documents' tokens, each with the end token after it, to `path`, a one-dimensional .npy file.

    What is known of it (tokens, documents, vocab_size, end) goes to `path`.json beside it. Only a few documents are in
    memory at a time. Returns the number of tokens.
    """
    path = Path(path)
    if path.suffix != ".npy":
        raise ConfigError(f"path = {str(path)!r}: must end with .npy")
    if isinstance(texts, str):
        raise ConfigError("texts is one string: give the documents, [text, ...]")
    path.parent.mkdir(parents=True, exist_ok=True)
    dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32)
    count = documents = 0
    unfinished = path.with_suffix(".unfinished")
    with unfinished.open("wb") as file:
        begin = _write_header(file, dtype, 0)
        for text in texts:
            tokens = np.append(np.asarray(tokenizer.encode(text), dtype), dtype.type(tokenizer.end))
            file.write(tokens.tobytes())
            count, documents = count + len(tokens), documents + 1
        file.seek(0)
        assert _write_header(file, dtype, count) == begin  # NumPy leaves room for the shape to grow
    facts = {"tokens": count, "documents": documents, "vocab_size": tokenizer.vocab_size, "end": tokenizer.end}
    _facts_path(path).write_text(json.dumps(facts) + "\n")
    unfinished.replace(path)
    return count


def _write_header(file: Any, dtype: np.dtype, count: int) -> int:
    form = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": (count,)}
    np.lib.format.write_array_header_1_0(file, form)
    return file.tell()


def _facts_path(path: str | os.PathLike) -> Path:
    return Path(f"{os.fspath(path)}.json")


def token_facts(path: str | os.PathLike) -> dict[str, int]:
    """What `write_tokens` left beside the file: tokens, documents, vocab_size, end; {} beside another's."""
    path = _facts_path(path)
    return json.loads(path.read_text()) if path.exists() else {}


def open_tokens(tokens: Any, vocab_size: int | None = None) -> tuple[np.ndarray, int | None]:
    """(the tokens, memory-mapped if `tokens` is the path of a file; the size of their vocabulary if that is known).

    Raises:
      ConfigError: no such file, another format, no whole numbers in one dimension, more tokens than `vocab_size`.
    """
    name, known = "tokens", None
    if isinstance(tokens, str | os.PathLike):
        name = os.fspath(tokens)
        known = token_facts(name).get("vocab_size")
        try:
            tokens = np.load(name, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{name}: is no .npy file of tokens ({error}); jzero.data.write_tokens makes one"
            ) from error
    tokens = np.asanyarray(tokens)
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise ConfigError(
            f"{name}: holds {tokens.dtype} of shape {tokens.shape}; tokens are whole numbers in one dimension"
        )
    if known and vocab_size and known > vocab_size:
        raise ConfigError(
            f"{name}: has tokens up to {known - 1}, vocab_size = {vocab_size} has not; raise it to {known}"
        )
    return tokens, vocab_size or known


def check_tokens(tokens: np.ndarray, vocab_size: int | None) -> None:
    """Raise a ConfigError for tokens that are not in the vocabulary, which a lookup would silently replace."""
    if vocab_size and tokens.size and not 0 <= tokens.min() <= tokens.max() < vocab_size:
        bad = tokens.min() if tokens.min() < 0 else tokens.max()
        raise ConfigError(
            f"token {bad} is not in a vocabulary of {vocab_size}: vocab_size must be larger than all tokens"
        )


class TokenFile:
    """A file of tokens (or a one-dimensional array) as training data: windows of `sequence` tokens, end to end.

    A sample is {"inputs": [sequence] int32, "labels": [sequence] int32}; a label is the token after its input. With
    `vocab_size`, the model's, every token that is read is checked; the default is what `write_tokens` noted.

    >>> TokenFile(np.arange(10), sequence=3).rows(np.array([2]))["labels"].tolist()
    [[7, 8, 9]]
    """

    def __init__(self, tokens: Any, sequence: int, vocab_size: int | None = None):
        self.tokens, self.vocab_size = open_tokens(tokens, vocab_size)
        self.sequence = sequence
        if not 1 <= sequence < len(self.tokens):
            raise ConfigError(
                f"sequence = {sequence}: must be from 1 to {len(self.tokens) - 1}, the file's tokens but one"
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
