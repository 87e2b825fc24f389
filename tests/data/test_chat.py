"""Rows of conversations against the chat templates of `transformers`."""

import json

import jax
import numpy as np
import pytest
from helpers.chats import MARKED, QWEN3, TEMPLATES, make_tokenizer, turns
from helpers.loaders import Sizes
from helpers.refusals import refuses
from hypothesis import given, settings
from hypothesis import strategies as st

from jzero.data import Chat, DataLoader

CHATS = [
    turns("hello", "hi"),
    turns("one", "two\n", "three", "four"),
    turns("  spaces ", "\n\nand lines\n\n", "hé", "ñ 你好"),
    turns("a question", ""),
]
PARAMETERS = {"type": "object", "properties": {"a": {"type": "number"}}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": PARAMETERS}}


def expected(name, messages):
    """(tokens, trained) by the template with {% generation %} blocks, as `transformers` reads it."""
    masks = {"return_dict": True, "return_assistant_tokens_mask": True}
    found = make_tokenizer(MARKED[name]).apply_chat_template(messages, **masks)
    return found["input_ids"], [bool(x) for x in found["assistant_masks"]]


def row(tokens, trained):
    """(inputs, labels) of a conversation."""
    return tokens, [t if on else -1 for t, on in zip(tokens[1:], trained[1:], strict=True)] + [-1]


def pieces(chat):
    """The conversations in the rows, each (inputs, labels)."""
    rows = chat.rows(np.arange(len(chat)))
    assert {x.shape for x in rows.values()} == {(len(chat), chat.length)}
    assert {x.dtype for x in rows.values()} == {np.dtype(np.int32)}
    segments = rows.get("segments", np.ones((len(chat), chat.length), int))
    assert (rows["labels"][segments == 0] == -1).all()
    return [
        (inputs[own == number].tolist(), labels[own == number].tolist())
        for inputs, labels, own in zip(rows["inputs"], rows["labels"], segments, strict=True)
        for number in range(1, own.max() + 1)
    ]


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("source", [TEMPLATES, MARKED], ids=["prefixes", "blocks"])
def test_the_trained_tokens_are_those_of_transformers(name, source):
    """ "all" trains every token, "last" the last answer."""
    tokenizer = make_tokenizer(source[name])
    chat = Chat(CHATS, tokenizer, length=400)
    assert sorted(pieces(chat)) == sorted(row(*expected(name, messages)) for messages in CHATS)
    assert len(chat) < len(CHATS)  # packed
    for messages in CHATS:
        tokens, trained = expected(name, messages)
        ((_, labels),) = pieces(Chat([messages], tokenizer, length=200, mask="all"))
        assert labels == [*tokens[1:], -1]
        ((_, labels),) = pieces(Chat([messages], tokenizer, length=200, mask="last"))
        turn = "".join("x" if on else " " for on in trained).rstrip().rpartition(" ")[2]
        end = len(trained) - trained[::-1].index(True)
        last = [end - len(turn) <= i < end for i in range(len(tokens))]
        assert labels == row(tokens, last)[1]


@settings(max_examples=20)
@given(contents=st.lists(st.text(st.sampled_from("ah e\nllé<|"), max_size=8), min_size=2, max_size=6))
def test_any_content(contents):
    messages = turns(*contents[: len(contents) // 2 * 2])
    for name in ("chatml", "llama3", "mistral"):
        chat = Chat([messages], make_tokenizer(TEMPLATES[name]), length=300)
        assert pieces(chat) == [row(*expected(name, messages))]


def test_a_jsonl_file_is_a_dataset(tmp_path):
    file, tokenizer = tmp_path / "chats.jsonl", make_tokenizer(TEMPLATES["chatml"])
    file.write_text("".join(json.dumps({"messages": x}) + "\n" for x in CHATS[:2]))
    rows = [Chat(x, tokenizer, length=200).rows(np.array([0])) for x in (str(file), CHATS[:2])]
    jax.tree.map(np.testing.assert_array_equal, *rows)
    file.write_text(f"{json.dumps(CHATS[0])}\n\n{json.dumps([{'role': 'user', 'content': None}])}")
    refuses(lambda: Chat(file, tokenizer, length=99), r"chats\.jsonl line 3: .*message 1 .* null")


def test_tools_and_system_messages_reach_the_template():
    """Fields that Arrow adds with None, as from a dataset, count as absent."""
    datasets = pytest.importorskip("datasets")
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "two"},
    ]
    tokenizer = make_tokenizer(TEMPLATES["qwen2.5"])
    wanted = tokenizer.apply_chat_template(messages, tools=[TOOL], tokenize=False)
    assert '"name": "add"' in wanted
    samples = [{"chat": messages, "tools": [TOOL]}, {"chat": turns("x", "y"), "tools": None}]
    texts = [{**x, "tools": x["tools"] and json.dumps(x["tools"])} for x in samples]
    for dataset in (samples, texts, datasets.Dataset.from_list(samples)):
        (inputs, labels), _ = pieces(Chat(dataset, tokenizer, length=600, column="chat", pack=False))
        assert tokenizer.decode(inputs).startswith(wanted)
        trained = tokenizer.decode([t for t in labels if t >= 0])
        assert trained == '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>two<|im_end|>'


def test_a_row_for_each_conversation():
    tokenizer = make_tokenizer(TEMPLATES["llama3"])
    chat = Chat(CHATS, tokenizer, length=150, pack=False)
    rows = chat.rows(np.array([2, 0]))
    assert rows.keys() == {"inputs", "labels"}
    for i, messages in enumerate([CHATS[2], CHATS[0]]):
        tokens, labels = row(*expected("llama3", messages))
        padding = 150 - len(tokens)
        assert rows["inputs"][i].tolist() == tokens + [0] * padding
        assert rows["labels"][i].tolist() == labels + [-1] * padding


@pytest.mark.parametrize("pack", [True, False])
def test_long_conversations_are_cut_or_left_out_and_counted(pack):
    tokenizer = make_tokenizer(TEMPLATES["chatml"])
    long, late = turns("hello", "a" * 90), turns("b" * 90, "hi")
    dataset = [CHATS[0], long, late, turns("nobody answers")]
    tokens, trained = expected("chatml", long)
    short = row(*expected("chatml", CHATS[0]))
    cut = Chat(dataset, tokenizer, length=64, pack=pack)
    found = pieces(cut)
    assert row(tokens[:64], trained[:64]) in found
    assert [inputs[: len(short[0])] for inputs, _ in found if inputs != tokens[:64]] == [short[0]]
    assert cut.report_notes()[1:] == [
        "2 of 4 are longer than 64 tokens: cut to their first tokens",
        "2 of 4 have no token to train on in a row: left out",
    ]
    assert repr(cut).startswith("Chat(2 conversations in 2 rows of 64, ")
    dropped = Chat(dataset, tokenizer, length=64, pack=pack, too_long="drop")
    assert len(dropped) == 1
    assert dropped.report_notes()[1:] == [
        "2 of 4 are longer than 64 tokens: left out",
        "1 of 4 have no token to train on in a row: left out",
    ]
    assert DataLoader(dropped, Sizes(1, 1, 1)).report_notes() == dropped.report_notes()


def test_a_template_that_rewrites_earlier_turns():
    """Qwen 3: the last turn can be found; earlier ones cannot, unless the template marks them."""
    tokenizer = make_tokenizer(QWEN3)
    messages = turns("one", "two", "three", "four")
    ((_, labels),) = pieces(Chat([messages], tokenizer, length=200, mask="last"))
    assert tokenizer.decode([t for t in labels if t >= 0]) == "<think>\n\n</think>\n\nfour<|im_end|>"
    text = refuses(
        lambda: Chat([turns("x", "y"), messages], tokenizer, length=200),
        r"^dataset\[1\]: the chat template writes the first 2 messages differently when others follow",
    )
    assert r"'<think>\n\n</think>\n\ntwo<|im_end|>\n' became 'two<|im_end|>\n" in text
    assert 'use mask="last" or "all"' in text


@pytest.mark.parametrize(
    ("dataset", "options", "words"),
    [
        ([], {}, "no conversation to train on: the dataset is empty$"),
        ([turns("only a question")], {}, "to train on: 1 of 1 have no token .* the roles are user: must"),
        ({"train": CHATS}, {}, r"dataset is a mapping with train: pass one split"),
        ("chats.jsonl", {}, "'chats.jsonl' is no file: give the path of a JSONL file"),
        ([{"conversations": CHATS[0]}], {}, r"dataset\[0\]: no column 'messages': the sample has conversations; dat"),
        ([{"text": "hello"}], {}, r"no column 'messages': the sample has text$"),
        ([{"messages": "hello"}], {}, r"messages is 'hello': must be a list of \{\"role\""),
        ([[{"from": "human"}]], {}, r"messages contains \{'from': 'human'\}: must be"),
        ([{"messages": CHATS[0], "tools": "no json"}], {}, "column 'tools' is a text that is no JSON"),
        ([turns("a", "b", system="c")], {}, r"dataset\[0\]: the chat template refuses the messages: .*must alternate"),
        (CHATS, {"mask": "user"}, "mask = 'user': must be one of 'assistant', 'all', 'last'"),
        (CHATS, {"too_long": "keep"}, "too_long = 'keep': must be one of 'cut', 'drop'"),
        (CHATS, {"length": 1}, "length = 1: must be at least 2"),
        (CHATS, {"vocab_size": 99}, "is outside a vocabulary of 99"),
    ],
)
def test_what_does_not_fit(dataset, options, words):
    refuses(lambda: Chat(dataset, make_tokenizer(TEMPLATES["mistral"]), **{"length": 99, **options}), words)


@pytest.mark.parametrize(("too_long", "rest"), [("drop", ""), ("cut", ", 2 of 2 have no token to train on in a row")])
def test_a_length_that_is_too_short_for_all(too_long, rest):
    longest = max(len(expected("chatml", messages)[0]) for messages in CHATS[:2])
    text = refuses(lambda: Chat(CHATS[:2], make_tokenizer(TEMPLATES["chatml"]), length=8, too_long=too_long), "raise")
    assert text == (
        f"no conversation to train on: 2 of 2 are longer than 8 tokens{rest}; "
        f"raise length (now 8; the longest has {longest} tokens)"
    )


SHAREGPT = [{"from": "human", "value": "hello"}, {"from": "gpt", "value": "hi"}]
ALPACA = {"instruction": "say", "input": "hello", "output": "hi"}


@pytest.mark.parametrize(
    ("sample", "asked"),
    [
        ({"conversations": SHAREGPT}, "hello"),
        (ALPACA, "say\n\nhello"),
        ({**ALPACA, "input": ""}, "say"),
        ({"question": "say", "answer": "hi"}, "say"),
        ({"chat": turns("hello", "hi")}, "hello"),
    ],
)
def test_an_error_has_the_call_that_makes_messages(sample, asked):
    datasets, tokenizer = pytest.importorskip("datasets"), make_tokenizer(TEMPLATES["chatml"])
    dataset = datasets.Dataset.from_list([sample])
    text = refuses(lambda: Chat(dataset, tokenizer, length=99), "; ")
    mapped = eval(text.rpartition("; ")[2])
    assert pieces(Chat(mapped, tokenizer, length=99)) == pieces(Chat([turns(asked, "hi")], tokenizer, length=99))


def test_without_jinja2(monkeypatch):
    """The error is that of `transformers`, and no refused message."""
    pytest.importorskip("transformers")
    monkeypatch.setattr("transformers.utils.chat_template_utils.is_jinja_available", lambda: False)
    for source in (TEMPLATES, MARKED):
        tokenizer = make_tokenizer(source["chatml"] + "{# not in the cache of transformers #}")
        with pytest.raises(ImportError, match="pip install jinja2"):
            Chat(CHATS, tokenizer, length=99)


def test_tokenizers_that_do_not_fit():
    refuses(lambda: Chat(CHATS, "Qwen3-8B", length=99), "tokenizer is str: must be a fast tokenizer of transformers")
    refuses(lambda: Chat(CHATS, make_tokenizer(None), length=99), r"chat_template")
