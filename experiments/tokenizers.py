"""Two tokenizers for `jzero.data.write_tokens`: the bytes of UTF-8, and a BPE trained on your text.

from experiments.tokenizers import Bytes, train_bpe
tokenizer = train_bpe(texts, vocab_size=8192)  # or Bytes()
jzero.data.write_tokens(texts, "tokens.npy", tokenizer)
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from jzero.errors import ConfigError

END = "<|endoftext|>"


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


def train_bpe(texts: Iterable[str], vocab_size: int) -> Any:
    """Train a byte-level BPE, a `tokenizers.Tokenizer`: at most `vocab_size` tokens, with the 256 bytes and the end."""
    try:
        import tokenizers as library
    except ImportError as error:
        raise ConfigError("BPE needs the tokenizers library: pip install tokenizers; Bytes() needs none") from error
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
    return tokenizer
