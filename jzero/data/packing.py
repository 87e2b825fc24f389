"""Whole documents in rows of one length, with segment ids that keep them apart.

The plan, which document lies where, is made once from the documents' lengths alone, so a row is read at random and a
position in the data stays one number. Longest first: a row begins with the longest document that is left, and takes the
longest that still fits until none does; of a histogram of lengths, so that it takes as long for a million documents
as for a thousand (Krell et al., arXiv:2107.02027).
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from jzero.data.tokens import check_tokens, open_tokens, token_facts
from jzero.errors import ConfigError

BLOCK = 2**24  # tokens


class Packed:
    """Documents as training data: {"inputs", "labels", "segments"}, each [length] int32.

    Labels are the next token of the same document, -1 (which counts for nothing) at its last token and in the padding.
    Segments count the documents of a row from 1; 0 is padding. A document longer than a row is cut.

    Args:
      documents: a file of tokens (see `jzero.data.tokens`) or a one-dimensional array in which `end` ends every
        document, or a sequence of one-dimensional arrays, each a document, which are copied into one.
      length: tokens of a row.
      end: the token at the end of a document; default what `write_tokens` noted.
      vocab_size: the model's: every token that is read is checked; default what `write_tokens` noted.

    >>> packed = Packed([np.array([5, 6, 7]), np.array([8, 9])], length=6)
    >>> {name: x.tolist() for name, x in packed.rows(np.array([0])).items()}  # doctest: +NORMALIZE_WHITESPACE
    {'inputs': [[5, 6, 7, 8, 9, 0]], 'labels': [[6, 7, -1, 9, -1, -1]], 'segments': [[1, 1, 1, 2, 2, 0]]}
    """

    def __init__(self, documents: Any, length: int, *, end: int | None = None, vocab_size: int | None = None):
        if length < 2:
            raise ConfigError(f"length = {length}: a row has at least 2 tokens")
        self.length = length
        if isinstance(documents, str | os.PathLike) or getattr(documents, "ndim", 0) == 1:
            self.tokens, self.vocab_size = open_tokens(documents, vocab_size)
            noted = token_facts(documents).get("end", end) if isinstance(documents, str | os.PathLike) else end
            end = noted if end is None else end
            if end is None:
                raise ConfigError("end: must say which token ends a document; there is no note of it beside the file")
            if end != noted:
                raise ConfigError(f"end = {end}: the note beside {documents} says {noted}; leave it out")
            ends = _ends(self.tokens, end)
            if len(ends) == 1 and len(self.tokens) and self.tokens[-1] != end:
                raise ConfigError(f"end = {end}: no token is that; say which one ends a document")
        else:
            if end is not None:
                raise ConfigError(f"end = {end}: does nothing for documents that are arrays of their own; leave it out")
            parts = [open_tokens(document)[0] for document in documents] or [np.zeros(0, np.int32)]
            self.tokens, self.vocab_size = np.concatenate(parts), vocab_size
            ends = np.cumsum([len(part) for part in parts])
        if not len(self.tokens):
            raise ConfigError("documents: there are no tokens in them")
        sizes = np.diff(ends, prepend=0)
        self.documents = int((sizes > 0).sum())
        self.starts, self.sizes = _cut(ends - sizes, sizes, length)
        self.ends = np.isin(self.starts + self.sizes, ends)  # whether a piece is its document's last
        self.pieces, self.offsets = plan(self.sizes, length)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __repr__(self) -> str:
        filled = len(self.tokens) / (len(self) * self.length)
        return f"Packed({self.documents} documents in {len(self)} rows of {self.length}, {filled:.1%} filled)"

    def rows(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        shape = len(indices), self.length
        inputs, labels, segments = np.zeros(shape, np.int32), np.full(shape, -1, np.int32), np.zeros(shape, np.int32)
        for row, index in enumerate(indices.tolist()):
            pieces = self.pieces[self.offsets[index] : self.offsets[index + 1]]
            sizes = self.sizes[pieces]
            stops = np.cumsum(sizes)
            total = int(stops[-1])
            at = np.repeat(self.starts[pieces] - (stops - sizes), sizes) + np.arange(total)
            inputs[row, :total] = self._read(at)
            labels[row, :total] = self._read(np.minimum(at + 1, len(self.tokens) - 1))
            labels[row, stops[self.ends[pieces]] - 1] = -1
            segments[row, :total] = np.repeat(np.arange(1, len(pieces) + 1), sizes)
        return {"inputs": inputs, "labels": labels, "segments": segments}

    def _read(self, at: np.ndarray) -> np.ndarray:
        tokens = self.tokens[at]
        check_tokens(tokens, self.vocab_size)
        return tokens


def _ends(tokens: np.ndarray, end: int) -> np.ndarray:
    """Where each document ends; what comes after the last end token is a document too."""
    blocks = range(0, len(tokens), BLOCK)
    found = [start + 1 + np.flatnonzero(tokens[start : start + BLOCK] == end) for start in blocks]
    ends = np.concatenate(found) if found else np.zeros(0, np.int64)
    return ends if len(ends) and ends[-1] == len(tokens) else np.append(ends, len(tokens))


def _cut(starts: np.ndarray, sizes: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """(starts, sizes) of pieces no longer than `length`, in the documents' order."""
    counts = -(-sizes // length)
    number = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)  # of a piece in its document
    rest = np.repeat(sizes, counts) - number * length
    return np.repeat(starts, counts) + number * length, np.minimum(rest, length)


def plan(sizes: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Which pieces lie in which row: row r holds pieces[offsets[r] : offsets[r + 1]], in that order.

    >>> pieces, offsets = plan(np.array([2, 5, 3, 4]), length=6)
    >>> pieces.tolist(), offsets.tolist()
    ([1, 3, 0, 2], [0, 1, 3, 4])
    """
    left = np.bincount(sizes, minlength=length + 1)
    by_size = np.argsort(sizes, kind="stable")
    taken = np.cumsum(left) - left  # in by_size, where the pieces of each size that are left begin
    blocks, widths = [], []
    while left.any():
        room, size, pattern = length, length + 1, []  # [(size, how many)]: what such a row holds
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
