"""Packing loses no token; tests/weights has the logits of packed rows, tests/parallel trains on them in each layout."""

import numpy as np
from helpers.refusals import refuses
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.tokenizers import Bytes
from jzero.data import Packed, write_tokens
from jzero.data.sources import Source


def unpacked(rows):
    found = []
    for inputs, labels, segments in zip(*(rows[name] for name in ("inputs", "labels", "segments")), strict=True):
        last = segments.max()
        assert np.unique(segments).tolist() in (list(range(last + 1)), list(range(1, last + 1)))
        assert (np.diff(segments) >= 0).all() or segments.argmin() > segments.argmax()  # padding comes last
        assert (labels[segments == 0] == -1).all()
        found += [(inputs[segments == s].tolist(), labels[segments == s].tolist()) for s in range(1, last + 1)]
    return found


@settings(max_examples=50, deadline=None)
@given(sizes=st.lists(st.integers(0, 60), min_size=1, max_size=80), length=st.integers(2, 30))
def test_every_token_once(sizes, length):
    """Every document occurs, cut if it is long; labels are its next tokens, -1 at its end."""
    if not sum(sizes):
        return
    start = np.cumsum(sizes) - sizes
    docs = [np.arange(a, a + n) for a, n in zip(start, sizes, strict=True)]
    packed = Packed(docs, length)
    assert isinstance(packed, Source)
    rows = packed.rows(np.arange(len(packed)))
    assert all(x.shape == (len(packed), length) and x.dtype == np.int32 for x in rows.values())
    pieces = sorted(unpacked(rows))
    expected = []
    for doc in docs:
        labels = [*doc[1:].tolist(), -1]
        cuts = range(0, len(doc), length)
        expected += [(doc[i : i + length].tolist(), labels[i : i + length]) for i in cuts]
    assert pieces == sorted(expected)
    one = rows["inputs"][[len(packed) - 1]]
    np.testing.assert_array_equal(packed.rows(np.array([len(packed) - 1]))["inputs"], one)
    # Greedy, longest first: never more rows than documents, and no two rows that one could hold.
    filled = (rows["segments"] > 0).sum(axis=1)
    assert len(packed) == 1 or np.sort(filled)[:2].sum() > length


def test_a_token_file_is_packed(tmp_path):
    texts = ["a document", "", "another one, which is longer than a row is", "x"]
    write_tokens(texts, tmp_path / "t.npy", Bytes())
    packed = Packed(tmp_path / "t.npy", 16)
    pieces = unpacked(packed.rows(np.arange(len(packed))))
    assert sum(len(inputs) for inputs, _ in pieces) == len(np.load(tmp_path / "t.npy"))
    assert ([*b"a document", 256], [*b" document", 256, -1]) in pieces
    assert ([256], [-1]) in pieces
    assert ([*b"another one, whi"], [*b"nother one, whic"]) in pieces
    words = r"end = 0: the note stored with .*t\.npy has end = 256; omit"
    refuses(lambda: Packed(tmp_path / "t.npy", 16, end=0), words)
    open_ended = Packed(np.array([1, 2, 0, 3, 4]), 4, end=0)  # the last has no end token
    assert repr(open_ended) == "Packed(2 documents in 2 rows of 4, 62.5% filled)"
    assert sorted(unpacked(open_ended.rows(np.arange(len(open_ended))))) == [([1, 2, 0], [2, 0, -1]), ([3, 4], [4, -1])]


def test_bad_documents():
    for make, words in (
        (lambda: Packed([], 8), "documents contain no tokens"),
        (lambda: Packed([np.arange(3)], 1), "length = 1: must be at least 2 tokens per row"),
        (lambda: Packed(np.arange(8), 8), "end = None: name the token that ends a document"),
        (lambda: Packed(np.arange(1, 8), 8, end=0), "end = 0: does not occur in the tokens"),
        (lambda: Packed([np.arange(3)], 8, end=2), "end = 2: has no effect on documents given as separate arrays"),
        (lambda: Packed([np.arange(9)], 8, vocab_size=8).rows(np.array([0])), "token 8 is outside a vocabulary of 8"),
    ):
        refuses(make, words)
