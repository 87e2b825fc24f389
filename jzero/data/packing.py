"""Packs whole documents into rows of one length, with segment ids that keep them apart.

The packing is computed once, from the documents' lengths alone. Rows can therefore be read in any order, and a position
in the data is still one number.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jzero.data.template import Encoded
from jzero.data.tokens import check_tokens, open_tokens, token_note
from jzero.display.slow_work import slow_work
from jzero.errors import ConfigError
from jzero.tree import PyTree

BLOCK = 2**24  # tokens


@dataclass(frozen=True)
class Pieces:
    """Pieces of documents, whose tokens lie in one array.

    Attributes:
      tokens: of all documents, one after another.
      starts, sizes: of each piece, in tokens.
      last: whether a piece is the last of its document.
      vocab_size: every token that is read is checked against it, if it is known.
      trained: for each token whether a label may be this token; None: all.
    """

    tokens: np.ndarray
    starts: np.ndarray
    sizes: np.ndarray
    last: np.ndarray
    vocab_size: int | None = None
    trained: np.ndarray | None = None

    def rows(self, groups: Sequence[np.ndarray], length: int) -> dict[str, np.ndarray]:
        """Read rows of `length` tokens: {"inputs", "labels", "segments"}.

        Args:
          groups: for each row, the pieces that it holds.
        """
        shape = len(groups), length
        inputs, labels, segments = np.zeros(shape, np.int32), np.full(shape, -1, np.int32), np.zeros(shape, np.int32)
        for row, pieces in enumerate(groups):
            sizes = self.sizes[pieces]
            stops = np.cumsum(sizes)
            total = int(stops[-1])
            # The token of every column: each piece's start in the file, less its column in the row, plus the column.
            at = np.repeat(self.starts[pieces] - (stops - sizes), sizes) + np.arange(total)
            following = np.minimum(at + 1, len(self.tokens) - 1)
            inputs[row, :total] = self._read(at)
            labels[row, :total] = self._read(following)
            if self.trained is not None:
                labels[row, :total][~self.trained[following]] = -1
            # The next token in the file belongs to another document where a document ends.
            labels[row, stops[self.last[pieces]] - 1] = -1
            segments[row, :total] = np.repeat(np.arange(1, len(pieces) + 1), sizes)
        return {"inputs": inputs, "labels": labels, "segments": segments}

    def _read(self, at: np.ndarray) -> np.ndarray:
        tokens = self.tokens[at]
        check_tokens(tokens, self.vocab_size)
        return tokens


def pieces_of(samples: Sequence[Encoded], vocab_size: int | None) -> tuple[Pieces, int]:
    """Copy encoded samples, each a piece of its own, into one array; also count the tokens to train on.

    Raises:
      ConfigError: a token outside the vocabulary.
    """
    tokens, sizes = np.concatenate([x.tokens for x in samples]), np.array([len(x.tokens) for x in samples])
    check_tokens(tokens, vocab_size)
    trained = np.concatenate([x.trained for x in samples])
    last = np.ones(len(sizes), bool)
    return Pieces(tokens, np.cumsum(sizes) - sizes, sizes, last, vocab_size, trained), int(trained.sum())


class PackedRows:
    """Pieces of documents in rows of `length` tokens: several in a row, or one, without segments."""

    def __init__(self, store: Pieces, length: int, packed: bool):
        self.store, self.length, self.packs = store, length, packed
        self.pieces, self.offsets = np.arange(len(store.sizes)), np.arange(len(store.sizes) + 1)  # a row each
        if packed:
            self.pieces, self.offsets = pack_pieces(store.sizes, length)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def _filled(self) -> float:
        return len(self.store.tokens) / (len(self) * self.length)

    def rows(self, indices: np.ndarray) -> PyTree:
        groups = [self.pieces[self.offsets[i] : self.offsets[i + 1]] for i in indices.tolist()]
        rows = self.store.rows(groups, self.length)
        return rows if self.packs else {name: rows[name] for name in ("inputs", "labels")}


class Packed(PackedRows):
    """Training data of packed documents: {"inputs", "labels", "segments"}, each [length] int32.

    A label is the next token of the same document, or -1 (ignored by the loss) at its last token and in padding.
    Segments number the documents of a row from 1; 0 is padding. A document longer than a row is cut into pieces.

    Args:
      documents: a file of tokens (see `jzero.data.tokens`) or a one-dimensional array, with `end` after every document;
        or a sequence of one-dimensional arrays, one per document, which are copied into one array.
      length: tokens per row.
      end: the token that ends a document. Default: from `write_tokens`' note.
      vocab_size: the model's; every token that is read is checked against it. Default: from `write_tokens`' note.

    >>> packed = Packed([np.array([5, 6, 7]), np.array([8, 9])], length=6)
    >>> {name: x.tolist() for name, x in packed.rows(np.array([0])).items()}  # doctest: +NORMALIZE_WHITESPACE
    {'inputs': [[5, 6, 7, 8, 9, 0]], 'labels': [[6, 7, -1, 9, -1, -1]], 'segments': [[1, 1, 1, 2, 2, 0]]}
    """

    @slow_work("packing documents")
    def __init__(self, documents: Any, length: int, *, end: int | None = None, vocab_size: int | None = None):
        if length < 2:
            raise ConfigError(f"length = {length}: must be at least 2 tokens per row")
        if isinstance(documents, str | os.PathLike) or getattr(documents, "ndim", 0) == 1:
            self.tokens, self.vocab_size = open_tokens(documents, vocab_size)
            noted = token_note(documents).get("end", end) if isinstance(documents, str | os.PathLike) else end
            end = noted if end is None else end
            if end is None:
                raise ConfigError("end = None: name the token that ends a document; no note is stored with the file")
            if end != noted:
                raise ConfigError(
                    f"end = {end}: the note stored with {documents} has end = {noted}; omit this argument"
                )
            ends = _ends(self.tokens, end)
            if len(ends) == 1 and len(self.tokens) and self.tokens[-1] != end:
                raise ConfigError(f"end = {end}: does not occur in the tokens; name the token that ends a document")
        else:
            if end is not None:
                raise ConfigError(
                    f"end = {end}: has no effect on documents given as separate arrays; omit this argument"
                )
            parts = [open_tokens(document)[0] for document in documents] or [np.zeros(0, np.int32)]
            self.tokens, self.vocab_size = np.concatenate(parts), vocab_size
            ends = np.cumsum([len(part) for part in parts])
        if not len(self.tokens):
            raise ConfigError("documents contain no tokens")
        sizes = np.diff(ends, prepend=0)
        self.documents = int((sizes > 0).sum())
        starts, sizes = _cut(ends - sizes, sizes, length)
        last = np.isin(starts + sizes, ends)
        super().__init__(Pieces(self.tokens, starts, sizes, last, self.vocab_size), length, packed=True)

    def __repr__(self) -> str:
        return f"Packed({self.documents} documents in {len(self)} rows of {self.length}, {self._filled:.1%} filled)"


def _ends(tokens: np.ndarray, end: int) -> np.ndarray:
    """Find the end of each document; tokens after the last end token are a document too."""
    blocks = range(0, len(tokens), BLOCK)
    found = [start + 1 + np.flatnonzero(tokens[start : start + BLOCK] == end) for start in blocks]
    ends = np.concatenate(found) if found else np.zeros(0, np.int64)
    return ends if len(ends) and ends[-1] == len(tokens) else np.append(ends, len(tokens))


def _cut(starts: np.ndarray, sizes: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Cut documents into pieces of at most `length` tokens: (starts, sizes), in order."""
    counts = -(-sizes // length)
    number = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)  # of the piece within its document
    rest = np.repeat(sizes, counts) - number * length
    return np.repeat(starts, counts) + number * length, np.minimum(rest, length)


def pack_pieces(sizes: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Assign pieces to rows: row r holds pieces[offsets[r] : offsets[r + 1]], in that order.

    Longest-pack-first over a histogram of sizes (Krell et al., arXiv:2107.02027): a row takes the longest piece left,
    then the longest piece that still fits, until none fits. Equal rows are made at once, so the time depends on the
    number of distinct sizes and hardly on the number of pieces.

    Args:
      sizes: [pieces], each at most `length`.
      length: tokens per row.

    Returns:
      (indices into `sizes` [pieces], offsets [rows + 1])

    >>> pieces, offsets = pack_pieces(np.array([2, 5, 3, 4]), length=6)
    >>> pieces.tolist(), offsets.tolist()
    ([1, 3, 0, 2], [0, 1, 3, 4])
    """
    left = np.bincount(sizes, minlength=length + 1)  # how many pieces of each size are still to be packed
    by_size = np.argsort(sizes, kind="stable")
    taken = np.cumsum(left) - left  # index into by_size of the first piece left of each size
    blocks, widths = [], []
    while left.any():
        # One row's pattern of (size, count), then as many rows of this pattern as the pieces left allow.
        room, size, pattern = length, length + 1, []
        while len(fitting := np.flatnonzero(left[: min(room + 1, size)])):
            size = int(fitting[-1])
            number = min(int(left[size]), room // size)
            pattern.append((size, number))
            room -= size * number
        times = min(int(left[size]) // number for size, number in pattern)
        block = [by_size[taken[size] :][: number * times].reshape(times, number) for size, number in pattern]
        blocks.append(np.concatenate(block, axis=1))
        widths.append(np.full(times, blocks[-1].shape[1]))
        for size, number in pattern:
            left[size] -= number * times
            taken[size] += number * times
    return np.concatenate([block.ravel() for block in blocks]), np.append(0, np.cumsum(np.concatenate(widths)))
