"""Text to tokens to windows and back; errors for other files."""

import json
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from helpers.refusals import refuses

from experiments.tokenizers import Bytes, train_bpe
from jzero.data import Packed, TokenFile, tokens, write_tokens

END = "<|endoftext|>"
TEXTS = ["To be, or not to be: that is the question.\n" * 3, "", f"Größe {END} \N{SNOWMAN} tab\tand\nline" * 5, "a"]


def tokenizer(kind):
    """Make a tokenizer of a kind, of 300 tokens and an end, or of bytes, that would add and cut tokens by default."""
    if kind == "bytes":
        return Bytes()
    library = pytest.importorskip("tokenizers")
    made = train_bpe(TEXTS, 300)
    number = made.token_to_id(END)
    made.post_processor = library.processors.TemplateProcessing(f"{END} $A {END}", special_tokens=[(END, number)])
    made.enable_truncation(8)
    made.enable_padding(length=50, pad_token=END)
    if kind == "tokenizers":
        return made
    return pytest.importorskip("transformers").PreTrainedTokenizerFast(tokenizer_object=made, eos_token=END)


def decode(made, tokens):
    return made.decode(tokens.tolist()) if isinstance(made, Bytes) else made.decode(tokens, skip_special_tokens=False)


@pytest.mark.parametrize("kind", ["bytes", "tokenizers", "transformers"])
def test_round_trip(kind, tmp_path):
    """Every document decodes to its text and ends with the end token, which no text encodes to."""
    made = tokenizer(kind)
    size, end = (257, 256) if kind == "bytes" else (300, 0)
    count = write_tokens(iter(TEXTS), tmp_path / "tokens.npy", made)
    tokens = np.load(tmp_path / "tokens.npy")
    assert tokens.dtype == np.uint16
    assert len(tokens) == count
    documents = np.split(tokens, np.flatnonzero(tokens == end) + 1)
    assert len(documents.pop()) == 0
    assert [decode(made, document[:-1]) for document in documents] == TEXTS
    facts = json.loads((tmp_path / "tokens.npy.json").read_text())
    assert facts == {"tokens": count, "documents": 4, "vocab_size": size, "end": end}
    assert (count < sum(len(text.encode()) for text in TEXTS)) == (kind != "bytes")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tokens.npy", "tokens.npy.json"]
    if kind == "tokenizers":  # the caller's is as it was
        assert (made.truncation["max_length"], made.padding["length"]) == (8, 50)
        assert made.encode(END).ids[:3] == [end, end, end]


def test_a_file_is_whole_without_asserts(tmp_path):
    """As under `python -O`, which left the header of an empty file."""
    optimized, source = ModuleType("optimized"), Path(tokens.__file__)
    exec(compile(source.read_text(), source, "exec", optimize=1), vars(optimized))
    optimized.write_tokens(["a", "bc"], tmp_path / "tokens.npy", Bytes())
    assert np.load(tmp_path / "tokens.npy").tolist() == [*b"a", 256, *b"bc", 256]


@pytest.mark.parametrize("kind", ["jsonl", "dataset", "stream", "column"])
def test_documents_of_every_form(kind, tmp_path):
    samples = [{"text": text, "url": str(i)} for i, text in enumerate(TEXTS)]
    column = {"column": "url"} if kind == "column" else {}
    given = tmp_path / "train.jsonl"
    given.write_text("\ufeff" + "\n\n".join(json.dumps(sample, ensure_ascii=False) for sample in samples), "utf-8")
    if kind in ("dataset", "stream"):
        given = pytest.importorskip("datasets").Dataset.from_list(samples)
        given = given.to_iterable_dataset() if kind == "stream" else given.with_format("numpy")
    write_tokens(str(given) if kind == "jsonl" else given, tmp_path / "t.npy", Bytes(), **column)
    expected = "0123" if column else TEXTS
    assert np.load(tmp_path / "t.npy").tolist() == [x for text in expected for x in (*text.encode(), 256)]


def test_what_contains_no_documents(tmp_path):
    for texts, words in (
        ("one text", "'one text' is no file: give the path of a JSONL file, a list of samples or a Hugging Face"),
        (b'{"text": "a"}\n{"text": "b"', r"bad.jsonl line 2 is no JSON \(.*\): .*datasets.load_dataset"),
        (b'{"text": "a"}\n"\xff"', r"bad.jsonl line 2 is no text in UTF-8 \(.* byte 1\): save the file as UTF-8$"),
        (b'{"body": "a"}', r"bad.jsonl line 1: no column 'text': the sample has body$"),
        (["a", {"text": 3}], r"texts\[1\]: column 'text' is int: must be a string"),
        (["a", b"b"], r"texts\[1\]: no column 'text': the sample is bytes"),
        ({"train": ["a"]}, "is a mapping with train: pass one split"),
        (3, "is int: must be a list of samples"),
    ):
        given = texts
        if isinstance(texts, bytes):
            given = tmp_path / "bad.jsonl"
            given.write_bytes(texts)
        refuses(lambda given=given: write_tokens(given, tmp_path / "t.npy", Bytes()), words)
        assert not (tmp_path / "t.npy").exists()


def test_the_end_of_a_document(tmp_path):
    """A tokenizer's own end, or the one that is named."""
    made = tokenizer("tokenizers")
    made.add_special_tokens(["</s>"])
    refuses(lambda: write_tokens(["a"], tmp_path / "t.npy", made), r"end = None: .* has <\|endoftext\|>, </s>")
    write_tokens(["a"], tmp_path / "t.npy", made, end="</s>")
    assert np.load(tmp_path / "t.npy")[-1] == made.token_to_id("</s>") == 300
    without = pytest.importorskip("transformers").PreTrainedTokenizerFast(tokenizer_object=made)
    for given, end, words in (
        (without, "<x>", "end = '<x>': the tokenizer has no such token"),
        (without, None, r"end = None: .* has none"),
        (Bytes(), "<x>", r"end = '<x>': has no effect, .* its own, 256"),
        ("gpt2", None, "tokenizer is str: must be a tokenizer of transformers, a tokenizers.Tokenizer, or an object"),
    ):
        refuses(lambda given=given, end=end: write_tokens(["a"], tmp_path / "t.npy", given, end=end), words)


def test_documents_are_written_one_by_one(tmp_path):
    """An interrupted write leaves no file that looks complete."""

    def texts():
        for i in range(3):
            yield "x" * 100_000
            assert (tmp_path / "tokens.unfinished").stat().st_size > 200_000 * i
        raise OSError("no more")

    with pytest.raises(OSError, match="no more"):
        write_tokens(texts(), tmp_path / "tokens.npy", Bytes())
    assert not (tmp_path / "tokens.npy").exists()
    assert write_tokens(["ab"], tmp_path / "new" / "tokens.npy", Bytes()) == 3
    refuses(lambda: write_tokens([], tmp_path / "tokens.bin", Bytes()), r"tokens.bin': must end with .npy")


def test_any_object_with_encode_is_a_tokenizer(tmp_path):
    """The protocol has encode, vocab_size and end; tokens take two bytes if the vocabulary fits, else four."""
    for size, dtype in ((2**16, np.uint16), (2**16 + 1, np.uint32)):
        encode = lambda text: [len(word) for word in text.split()]  # noqa: E731
        lengths = SimpleNamespace(vocab_size=size, end=size - 1, encode=encode)
        assert write_tokens(["to be or", "not"], tmp_path / "t.npy", lengths) == 6
        tokens = np.load(tmp_path / "t.npy")
        assert tokens.dtype == dtype
        assert tokens.tolist() == [2, 2, 2, size - 1, 3, size - 1]


def test_windows(tmp_path):
    np.save(tmp_path / "t.npy", np.arange(70_000, dtype=np.uint32))
    source = TokenFile(tmp_path / "t.npy", 1000)
    assert isinstance(source.tokens, np.memmap)
    rows = source.rows(np.array([68, 0, 68]))
    assert {(x.shape, x.dtype) for x in rows.values()} == {((3, 1000), np.dtype(np.int32))}
    assert rows["inputs"][:, 0].tolist() == [68_000, 0, 68_000]
    np.testing.assert_array_equal(rows["labels"], rows["inputs"] + 1)
    assert len(TokenFile(np.arange(11), 5)) == 2  # the eleventh token is the last label
    assert len(TokenFile(np.arange(10), 5)) == 1


def test_invalid_tokens(tmp_path):
    for array, sequence, vocabulary, words in (
        (np.zeros(9, np.float32), 4, None, r"has dtype float32 and shape \(9,\); expected integers in one"),
        (np.zeros((3, 3), int), 4, None, r"has dtype int64 and shape \(3, 3\)"),
        (np.arange(9), 9, None, "sequence = 9: must be from 1 to 8"),
        (np.arange(9), 4, 8, "token 8 is outside a vocabulary of 8: vocab_size must be larger"),
        (np.arange(-1, 8), 4, 8, "token -1 is outside a vocabulary of 8"),
        (np.arange(9) + 2**40, 4, None, f"token {2**40 + 8} does not fit int32"),
    ):
        np.save(tmp_path / "t.npy", array)
        for given in (array, tmp_path / "t.npy"):
            make = partial(TokenFile, given, sequence, vocabulary)
            refuses(lambda make=make: make().rows(np.array([0, 1])), words)


def test_invalid_files(tmp_path):
    file = tmp_path / "t.npy"
    np.save(file, np.arange(9))
    whole = file.read_bytes()
    damaged = whole.replace(b"(9,)", b"(9;)"), whole.replace(b"<i8", b"O88")
    refuses(lambda: TokenFile(tmp_path / "none.npy", 4), r"none.npy: not a .npy file of tokens")
    for text in (b"tokens", b"", whole[:4], whole[:40], whole[:-1], *damaged):
        file.write_bytes(text)
        assert "\n" not in refuses(lambda: TokenFile(file, 4), r"t\.npy: not a \.npy file of tokens \(.*\)")
    np.save(file, np.arange(0))
    for build in (TokenFile, Packed):
        refuses(lambda build=build: build(file, 4), r"t\.npy: .*empty")
    wide = SimpleNamespace(vocab_size=9, end=8, encode=lambda text: np.array([2**16 + 3]))
    refuses(lambda: write_tokens(["text"], tmp_path / "w.npy", wide), "token 65539 is outside a vocabulary of 9")
    file, note = tmp_path / "b.npy", tmp_path / "b.npy.json"
    write_tokens(["some text"], file, Bytes())
    assert TokenFile(file, 4, vocab_size=257).vocab_size == TokenFile(file, 4).vocab_size
    words = r"vocab_size = 256: .*b.npy has tokens up to 256; use at least 257"
    refuses(lambda: TokenFile(file, 4, vocab_size=256), words)
    words = r"b\.npy\.json is damaged \(.*\): write the tokens again"
    for text in (b"", b'{"tokens": 1', b"3", b'{"end": "x"}', b'{"vocab_size": 1e3}', b"[" * 10**5, b"\xff"):
        note.write_bytes(text)
        for build in (TokenFile, Packed):
            refuses(lambda build=build: build(file, 4), words)
    note.write_text('{"tokens": 11, "vocab_size": 257}')
    refuses(lambda: TokenFile(file, 4), r"b\.npy has 10 tokens, and its note .*b\.npy\.json describes 11")
