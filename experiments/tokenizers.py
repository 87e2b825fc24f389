"""Two tokenizers for `jzero.data.write_tokens`: the bytes of UTF-8, and a BPE trained on your text.

from experiments.tokenizers import Bytes, train_bpe
tokenizer = train_bpe(texts, vocab_size=8192)  # or Bytes()
jzero.data.write_tokens(texts, "tokens.npy", tokenizer)
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from jzero.errors import ConfigError

END = "<|end|>"


class Bytes:
    """Tokens 0 to 255 are the bytes of UTF-8; token 256 ends a document.

    >>> Bytes().decode([*Bytes().encode("né"), 256])
    'né'
    """

    vocab_size, end = 257, 256

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode(), np.uint8)

    def decode(self, tokens: Iterable[int]) -> str:
        return bytes(int(t) for t in tokens if t != self.end).decode(errors="replace")


class BPE:
    """A tokenizer of the `tokenizers` library. Text that reads like a special token is encoded as text.

    Args:
      tokenizer: a `tokenizers.Tokenizer`.
      end: the text of the token that ends a document.
    """

    def __init__(self, tokenizer: Any, end: str = END):
        number = tokenizer.token_to_id(end)
        if number is None:
            raise ConfigError(f"end = {end!r}: the tokenizer has no such token; name the token that ends a document")
        tokenizer.encode_special_tokens = True
        self.tokenizer, self.end, self.vocab_size = tokenizer, number, tokenizer.get_vocab_size()

    @classmethod
    def load(cls, path: str | os.PathLike, end: str = END) -> BPE:
        """Read the JSON file that `save`, or the library, wrote."""
        library = _library()
        try:
            return cls(library.Tokenizer.from_file(os.fspath(path)), end)
        except Exception as error:
            raise ConfigError(f"{path}: not a tokenizer of the tokenizers library: {error}") from error

    def save(self, path: str | os.PathLike) -> None:
        self.tokenizer.save(os.fspath(path))

    def encode(self, text: str) -> Sequence[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, tokens: Iterable[int]) -> str:
        return self.tokenizer.decode([int(t) for t in tokens])


def train_bpe(texts: Iterable[str], vocab_size: int) -> BPE:
    """Train a byte-level BPE on the texts: at most `vocab_size` tokens, including the 256 bytes and the end token."""
    library = _library()
    if vocab_size < 257:
        raise ConfigError(f"vocab_size = {vocab_size}: must be at least 257, for the 256 bytes and the end token")
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
        raise ConfigError("BPE needs the tokenizers library: pip install tokenizers; Bytes() needs none") from error
    return tokenizers
