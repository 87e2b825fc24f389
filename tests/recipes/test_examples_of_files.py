"""Samples of files are told by their fields, and each mistake in them is one line."""

import json
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from helpers import fine_tuning
from helpers.refusals import refuses, says
from helpers.stored_cases import check_cases

from jzero.recipes.examples import Examples, read_examples
from models.byte_tokenizer import byte_tokenizer

pytest.importorskip("transformers")

SAMPLES = {kind: make("1?", " 2.") for kind, make in fine_tuning.SAMPLES.items()}
SAMPLES["completions"]["text"] = "whole text"  # which its kind does not train
CHAT = SAMPLES["chat"]
TALK = CHAT["messages"]
TRAINED = {"text": "?  2.", "completions": " 2.", "chat": " 2.", "preferences": " 2. Friend!"}  # and an end


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer()


def write(path, *lines):
    texts = (line if isinstance(line, str) else json.dumps(line) for line in lines)
    path.write_bytes(b"".join(text.encode("latin-1") + b"\n" for text in texts))
    return path


FORMS = [*product(SAMPLES, ["jsonl"]), ("chat", "parquet"), ("text", "datasets"), ("preferences", "train")]


@pytest.mark.parametrize(("kind", "form"), FORMS)
def test_every_form_of_every_kind(kind, form, tmp_path, tokenizer):
    """The labels are the tokens that the kind trains; text begins with a token that nothing predicts."""
    path = tmp_path / f"a.{form}"
    if form == "jsonl":
        write(path, SAMPLES[kind], "", SAMPLES[kind])
    else:
        datasets = pytest.importorskip("datasets")
        data = datasets.Dataset.from_list([SAMPLES[kind]] * 2)
        data = datasets.DatasetDict({"train": data, "test": data}) if form == "train" else data
        data.to_parquet(path) if form == "parquet" else data.save_to_disk(path)
    found = read_examples(path)
    assert (found.kind, len(found.samples), found.name) == (kind, 2, path.name)
    noun = {"text": "texts", "completions": "prompts", "chat": "conversations", "preferences": "pairs"}[kind]
    assert found.words().startswith(f"{path.name}, 2 {noun}")
    assert found.words().endswith("; not read: test") == (form == "train")
    rows = found.rows(tokenizer, 64, len(tokenizer), pack=False).rows(np.arange(2))
    labels = rows.get("chosen", rows)["labels"][1]
    assert tokenizer.decode(labels[labels >= 0]) == f"{TRAINED[kind]}<|im_end|>"


def test_a_text_file_is_one_text_in_rows(tmp_path, tokenizer):
    path = tmp_path / "a.md"
    path.write_text("0123456789" * 5)
    rows = read_examples(path).rows(tokenizer, 16, len(tokenizer), pack=True)
    assert len(rows) == 4
    labels = rows.rows(np.arange(4))["labels"]
    labels = labels[labels >= 0]
    assert sorted(labels) == sorted(tokenizer("123456789" + "0123456789" * 4 + "<|im_end|>")["input_ids"])


def test_a_mistake_in_a_file_is_one_line(tmp_path, pytestconfig):
    def outcome(lines):
        path = write(tmp_path / "a.jsonl", *lines)
        said = refuses(lambda: read_examples(path))
        assert "\n" not in said
        return said.replace(str(tmp_path), "HERE")

    check_cases(Path(__file__).with_name("files.jsonl"), outcome, pytestconfig)


def test_files_that_cannot_be_read(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_bytes(b"a\nb\xff")
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "a.parquet").write_text("text")
    datasets.DatasetDict({"test": datasets.Dataset.from_list([SAMPLES["text"]])}).save_to_disk(tmp_path / "splits")
    for path, words in (
        ("none.jsonl", r"none.jsonl: no such file or directory$"),
        ("none.parquet", r"none.parquet: no such file or directory$"),
        ("a.txt", r"is no text in UTF-8 \(.*, line 2, byte 3\): save it as UTF-8$"),
        ("empty.txt", "is empty"),
        ("splits", "has the splits test: must have train"),
        ("a.parquet", r"a\.parquet cannot be read"),
        (tmp_path, r"`datasets` has not saved this directory; give one file \(`cat .*/\*\.jsonl > all\.jsonl` joins"),
    ):
        refuses(lambda path=path: read_examples(path), words)


@pytest.mark.parametrize(("name", "between"), [("a.csv", ","), ("a.TSV", "\t")])
def test_a_table_is_refused_with_the_line_that_makes_jsonl_of_it(name, between, tmp_path):
    datasets = pytest.importorskip("datasets")
    path = write(tmp_path / name, f"prompt{between}completion", f"1?{between} two")
    text = says(lambda: read_examples(path), "is a table: expected JSONL")
    eval(text.rpartition(": ")[2], {"datasets": datasets})
    found = read_examples(tmp_path / "a.jsonl")
    assert (found.kind, [*found.samples.values()]) == ("completions", [{"prompt": "1?", "completion": " two"}])


def test_a_conversation_that_cannot_be_trained(tmp_path, tokenizer):
    for messages, words in (
        (TALK[:1], "a.jsonl line 3: no turn of the role assistant to train on; the roles are user$"),
        ([TALK[0], {**TALK[1], "role": "gpt"}], "line 3: no turn of .* the roles are user, gpt$"),
        ([TALK[0], {**TALK[1], "content": None}], r"^line 3: .*of message 2 \(assistant\) is null: must be a t"),
        ([TALK[0], {"role": "assistant", "tool_calls": []}], "^line 3: .* message 2 .assistant. is null"),
        ([TALK[0], {"role": "assistant", "tool_calls": [1]}], "^line 3: the chat template .* of message 2 "),
    ):
        path = write(tmp_path / "a.jsonl", "", "", {"messages": messages})
        refuses(lambda path=path: read_examples(path).rows(tokenizer, 64, 258, pack=True), words)


def test_samples_that_cannot_be_encoded(tokenizer):
    plain, half = byte_tokenizer(), json.loads(r'"a \ud800"')
    plain.chat_template = plain.eos_token = None
    answered = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": half}]}
    of_half = r"dataset\[0\]: the text has '\\ud800' at character .* half of a UTF-16"
    for kind, sample, options, words in (
        ("chat", CHAT, {"vocab_size": 100}, "is outside a vocabulary of 100"),
        ("chat", CHAT, {"made": plain}, "the tokenizer's chat_template: there is none: use an instruct model, or"),
        ("completions", {"prompt": "1?", "completion": " "}, {}, r"dataset\[0\]: completion is ' ': must have a text"),
        ("text", SAMPLES["text"], {"made": plain}, "eos_token is None"),
        ("text", {"text": half}, {}, of_half),
        ("chat", answered, {}, of_half),
        ("chat", CHAT, {"length": 8}, "to train on: 1 of 1 are longer than 8 tokens.*raise length"),
    ):

        def rows(made=tokenizer, length=64, vocab_size=258, kind=kind, sample=sample):
            Examples(kind, [sample], "a.jsonl").rows(made, length, vocab_size, pack=True)

        refuses(lambda rows=rows, options=options: rows(**options), words)
