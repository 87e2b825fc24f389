"""Rows of conversations and of preferences against the chat templates of `transformers`."""

import json
from pathlib import Path

import numpy as np
import pytest
from helpers.loaders import Sizes
from helpers.refusals import refuses
from helpers.stored_cases import check_cases

from jzero.data import Chat, DataLoader, Pairs

PLACE = Path(__file__).parent / "templates"
# The marked ones have {% generation %} around what the assistant says and its end token.
TEMPLATES, MARKED = (
    {name: (PLACE / f"{name}{end}.jinja").read_text() for name in ("chatml", "llama3", "mistral", "qwen2.5")}
    for end in ("", "-marked")
)
# Qwen 3 gives an answer a thought only after the last question: what it writes of a turn depends on later turns.
QWEN3 = (PLACE / "qwen3.jinja").read_text()


def make_tokenizer(template):
    """A byte-level tokenizer of `transformers` with the end tokens of the templates, made without a download."""
    library, transformers = pytest.importorskip("tokenizers"), pytest.importorskip("transformers")
    alphabet = sorted(library.pre_tokenizers.ByteLevel.alphabet())
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("Ċ", "Ċ")]  # Ċ is a line end
    vocabulary = [*alphabet, *(a + b for a, b in merges)]
    made = library.Tokenizer(library.models.BPE({token: i for i, token in enumerate(vocabulary)}, merges))
    made.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = library.decoders.ByteLevel()
    others = ["<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<s>", eos_token="</s>", additional_special_tokens=others
    )
    tokenizer.chat_template = template
    return tokenizer


def turns(*contents):
    """A conversation of user and assistant in turn."""
    return [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]


CHATS = [
    turns("hello", "hi"),
    turns("one", "two\n", "three", "four"),
    turns("  spaces ", "\n\nand lines\n\n", "hé", "ñ 你好"),
    turns("a question", ""),
    turns("<|h\n", "<|\nlé", " ", "l<| "),
]
PARAMETERS = {"type": "object", "properties": {"a": {"type": "number"}}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": PARAMETERS}}


def expected(name, messages):
    """(tokens, trained) by the template with {% generation %} blocks, as `transformers` reads it."""
    masks = {"return_dict": True, "return_assistant_tokens_mask": True}
    found = make_tokenizer(MARKED[name]).apply_chat_template(messages, **masks)
    return found["input_ids"], [bool(x) for x in found["assistant_masks"]]


def row(tokens, trained):
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


def test_long_conversations_are_cut_or_left_out_and_counted():
    tokenizer = make_tokenizer(TEMPLATES["chatml"])
    long, late = turns("hello", "a" * 90), turns("b" * 90, "hi")
    dataset = [CHATS[0], long, late, turns("nobody answers")]
    tokens, trained = expected("chatml", long)
    short = row(*expected("chatml", CHATS[0]))
    cut = Chat(dataset, tokenizer, length=64)
    found = pieces(cut)
    assert row(tokens[:64], trained[:64]) in found
    assert [inputs[: len(short[0])] for inputs, _ in found if inputs != tokens[:64]] == [short[0]]
    assert cut.report_notes()[1:] == [
        "2 of 4 are longer than 64 tokens: cut to their first tokens",
        "2 of 4 have no token to train on in a row: left out",
    ]
    assert repr(cut).startswith("Chat(2 conversations in 2 rows of 64, ")
    dropped = Chat(dataset, tokenizer, length=64, too_long="drop")
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


def test_tokenizers_that_do_not_fit(monkeypatch):
    """Without jinja2 the error is that of `transformers`."""
    refuses(lambda: Chat(CHATS, "Qwen3-8B", length=99), "tokenizer is str: must be a fast tokenizer of transformers")
    tokenizer = make_tokenizer(None)
    refuses(lambda: Chat(CHATS, tokenizer, length=99), r"chat_template")
    tokenizer.eos_token = None
    refuses(lambda: Pairs([{"prompt": "x", "chosen": "y", "rejected": "z"}], tokenizer, length=9), "eos_token is None")
    monkeypatch.setattr("transformers.utils.chat_template_utils.is_jinja_available", lambda: False)
    with pytest.raises(ImportError, match="pip install jinja2"):
        Chat(CHATS, make_tokenizer(TEMPLATES["chatml"] + "{# not in the cache of transformers #}"), length=99)


PROMPT = turns("one", "two", "three")
GOOD, BAD = ({"role": "assistant", "content": content} for content in ("four, hello", "5"))
FORMS = {
    "messages": {"prompt": PROMPT, "chosen": [GOOD], "rejected": [BAD]},
    "conversations": {"chosen": [*PROMPT, GOOD], "rejected": [*PROMPT, BAD]},
    "all of both": {"prompt": PROMPT, "chosen": [*PROMPT, GOOD], "rejected": [*PROMPT, BAD]},
    "its last question": {"prompt": "three", "chosen": [*PROMPT, GOOD], "rejected": [*PROMPT, BAD]},
}


def labelled(tokens, begin, length):
    """(inputs, labels) with the labels of tokens[begin:]."""
    labels = [*(t if i >= begin else -1 for i, t in enumerate(tokens) if i), -1]
    return tokens + [0] * (length - len(tokens)), labels + [-1] * (length - len(labels))


def by_template(tokenizer, prompt, messages):
    """(inputs, labels) in rows of 300: what `transformers` adds to the prompt with a generation prompt is trained."""
    begins = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)
    tokens = tokenizer.apply_chat_template(messages)["input_ids"]
    begin = next(i for i in range(len(tokens)) if tokenizer.decode(tokens[:i]) == begins)
    inputs, labels = labelled(tokens, begin, 300)
    end = max(i for i, t in enumerate(tokens) if t in tokenizer.all_special_ids)
    labels[end:] = [-1] * (300 - end)  # what follows the end token is not trained
    return inputs, labels


def check_pairs(pairs, wanted):
    rows = pairs.rows(np.arange(len(pairs)))
    for i, side in enumerate(("chosen", "rejected")):
        assert {name: x.dtype for name, x in rows[side].items()} == {"inputs": np.int32, "labels": np.int32}
        found = zip(rows[side]["inputs"].tolist(), rows[side]["labels"].tolist(), strict=True)
        assert [*found] == [pair[i] for pair in wanted]


@pytest.mark.parametrize("name", TEMPLATES)
def test_replies_by_the_chat_template(name):
    """The labels are what `transformers` adds to the prompt with a generation prompt, up to the end token."""
    tokenizer = make_tokenizer(TEMPLATES[name])
    wanted = [by_template(tokenizer, PROMPT, [*PROMPT, answer]) for answer in (GOOD, BAD)]
    check_pairs(Pairs([*FORMS.values()], tokenizer, length=300), [wanted] * len(FORMS))
    # All that follows the prompt is trained, whether or not the conversations repeat it.
    wanted = [by_template(tokenizer, PROMPT[:1], [*PROMPT, answer]) for answer in (GOOD, BAD)]
    for before in (PROMPT[:1], []):
        sides = {side: [*before, *PROMPT[1:], answer] for side, answer in (("chosen", GOOD), ("rejected", BAD))}
        check_pairs(Pairs([{"prompt": PROMPT[:1], **sides}], tokenizer, length=300), [wanted])


def test_a_prompt_of_the_user():
    """A string before messages is the user's question. Earlier turns of Qwen 3 may change, since none is trained."""
    datasets = pytest.importorskip("datasets")
    tokenizer = make_tokenizer(QWEN3)
    dataset = datasets.Dataset.from_list([{"prompt": "three", "chosen": [GOOD], "rejected": [BAD]}])
    rows = Pairs(dataset, tokenizer, length=100).rows(np.array([0]))
    text = tokenizer.decode(rows["chosen"]["inputs"][0])
    assert text.startswith("<|im_start|>user\nthree<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\nfour")
    labels = rows["rejected"]["labels"][0]
    assert tokenizer.decode(labels[labels >= 0]) == "<think>\n\n</think>\n\n5<|im_end|>"
    many = Pairs([FORMS["messages"]], tokenizer, length=200).rows(np.array([0]))["chosen"]["labels"][0]
    assert tokenizer.decode(many[many >= 0]) == "<think>\n\n</think>\n\nfour, hello<|im_end|>"


def test_long_pairs_are_cut_or_left_out_and_counted():
    tokenizer = make_tokenizer(None)
    long = {"prompt": "xx", "chosen": "a" * 30, "rejected": "b"}
    asks = {"prompt": "x" * 30, "chosen": "a", "rejected": "b"}
    short = {"prompt": "xx", "chosen": "a", "rejected": "b"}
    cut = Pairs([long, asks, short], tokenizer, length=16)
    a, b, x = (tokenizer.encode(letter)[0] for letter in "abx")
    end = tokenizer.eos_token_id
    rejected, chosen = labelled([x, x, b, end], 2, 16), ([x, x] + [a] * 14, [-1] + [a] * 14 + [-1])
    check_pairs(cut, [(chosen, rejected), (labelled([x, x, a, end], 2, 16), rejected)])
    assert cut.report_notes() == [
        "Pairs(2 pairs of at most 16 tokens, 7 on average)",
        "2 of 3 are longer than 16 tokens: cut to their first tokens",
        "1 of 3 have no token to train on in a row: left out",
    ]
    dropped = Pairs([long, asks, short], tokenizer, length=16, too_long="drop")
    assert dropped.report_notes()[1:] == ["2 of 3 are longer than 16 tokens: left out"]
    batch = next(iter(DataLoader(dropped, Sizes(1, 1, 1))))
    assert batch["chosen"]["inputs"].shape == (1, 16)


def test_pairs_of_equal_sides_are_left_out_and_counted():
    tokenizer = make_tokenizer(TEMPLATES["mistral"])
    same = [{**FORMS[form], "rejected": FORMS[form]["chosen"]} for form in FORMS]
    text = {"prompt": "x", "chosen": "y", "rejected": "y"}
    pairs = Pairs([*same, FORMS["messages"], text], tokenizer, length=300)
    alone = Pairs([FORMS["messages"]], tokenizer, length=300)
    np.testing.assert_equal(pairs.rows(np.array([0])), alone.rows(np.array([0])))
    assert pairs.report_notes()[1:] == ["5 of 6 have equal sides: left out"]


def test_what_does_not_fit(pytestconfig):
    def outcome(case):
        if "pair" in case:
            return refuses(lambda: Pairs([case["pair"]], tokenizer, length=99), "")
        return refuses(lambda: Chat(case["chats"], tokenizer, **{"length": 99, **case["options"]}), "")

    tokenizer = make_tokenizer(TEMPLATES["mistral"])
    check_cases(Path(__file__).with_name("chat_mistakes.jsonl"), outcome, pytestconfig)
