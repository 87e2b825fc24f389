"""Rows of preferences against the chat templates of `transformers`."""

import numpy as np
import pytest
from helpers.chats import QWEN3, TEMPLATES, make_tokenizer, turns
from helpers.loaders import Sizes
from helpers.refusals import refuses

from jzero.data import DataLoader, Pairs

PROMPT = turns("one", "two", "three")
GOOD, BAD = ({"role": "assistant", "content": content} for content in ("four, hello", "5"))
FORMS = {
    "messages": {"prompt": PROMPT, "chosen": [GOOD], "rejected": [BAD]},
    "conversations": {"chosen": [*PROMPT, GOOD], "rejected": [*PROMPT, BAD]},
    "all of both": {"prompt": PROMPT, "chosen": [*PROMPT, GOOD], "rejected": [*PROMPT, BAD]},
    "its last question": {"prompt": "three", "chosen": [*PROMPT, GOOD], "rejected": [*PROMPT, BAD]},
}


def expected(tokens, begin, length):
    """(inputs, labels) with the labels of tokens[begin:]."""
    labels = [*(t if i >= begin else -1 for i, t in enumerate(tokens) if i), -1]
    return tokens + [0] * (length - len(tokens)), labels + [-1] * (length - len(labels))


def by_template(tokenizer, prompt, messages):
    """(inputs, labels) in rows of 300: what `transformers` adds to the prompt with a generation prompt is trained."""
    begins = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)
    tokens = tokenizer.apply_chat_template(messages)["input_ids"]
    begin = next(i for i in range(len(tokens)) if tokenizer.decode(tokens[:i]) == begins)
    inputs, labels = expected(tokens, begin, 300)
    end = max(i for i, t in enumerate(tokens) if t in tokenizer.all_special_ids)
    labels[end:] = [-1] * (300 - end)  # what follows the end token is not trained
    return inputs, labels


def check(pairs, wanted):
    """Compare the rows with [(chosen's inputs, its labels, rejected's, ...)]."""
    rows = pairs.rows(np.arange(len(pairs)))
    for number, (chosen, rejected) in enumerate(wanted):
        for side, (inputs, labels) in (("chosen", chosen), ("rejected", rejected)):
            assert rows[side].keys() == {"inputs", "labels"}
            assert rows[side]["inputs"].dtype == rows[side]["labels"].dtype == np.int32
            assert rows[side]["inputs"][number].tolist() == inputs
            assert rows[side]["labels"][number].tolist() == labels
    assert len(pairs) == len(wanted)


@pytest.mark.parametrize("name", TEMPLATES)
def test_replies_by_the_chat_template(name):
    """The labels are what `transformers` adds to the prompt with a generation prompt, up to the end token."""
    tokenizer = make_tokenizer(TEMPLATES[name])
    wanted = [by_template(tokenizer, PROMPT, [*PROMPT, answer]) for answer in (GOOD, BAD)]
    check(Pairs([*FORMS.values()], tokenizer, length=300), [wanted] * len(FORMS))
    # All that follows the prompt is trained, whether or not the conversations repeat it.
    wanted = [by_template(tokenizer, PROMPT[:1], [*PROMPT, answer]) for answer in (GOOD, BAD)]
    for before in (PROMPT[:1], []):
        sides = {side: [*before, *PROMPT[1:], answer] for side, answer in (("chosen", GOOD), ("rejected", BAD))}
        check(Pairs([{"prompt": PROMPT[:1], **sides}], tokenizer, length=300), [wanted])


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


def test_strings_are_text_without_a_template():
    tokenizer = make_tokenizer(None)
    encode = tokenizer.encode
    sample = {"prompt": "say hello: ", "chosen": "hello", "rejected": "llll"}
    wanted = [expected([*encode(sample["prompt"] + x), tokenizer.eos_token_id], 0, 20) for x in ("hello", "llll")]
    begin = len(encode(sample["prompt"]))
    for _, labels in wanted:
        labels[: begin - 1] = [-1] * (begin - 1)
    check(Pairs([sample], tokenizer, length=20), [wanted])


def test_long_pairs_are_cut_or_left_out_and_counted():
    tokenizer = make_tokenizer(None)
    long = {"prompt": "xx", "chosen": "a" * 30, "rejected": "b"}
    asks = {"prompt": "x" * 30, "chosen": "a", "rejected": "b"}
    short = {"prompt": "xx", "chosen": "a", "rejected": "b"}
    cut = Pairs([long, asks, short], tokenizer, length=16)
    a, b, x = (tokenizer.encode(letter)[0] for letter in "abx")
    end = tokenizer.eos_token_id
    rejected, chosen = expected([x, x, b, end], 2, 16), ([x, x] + [a] * 14, [-1] + [a] * 14 + [-1])
    check(cut, [(chosen, rejected), (expected([x, x, a, end], 2, 16), rejected)])
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


@pytest.mark.parametrize(
    ("sample", "words"),
    [
        ({"prompt": "x", "chosen": "y"}, r"dataset\[0\]: no column 'rejected': the sample has prompt, chosen$"),
        ({"chosen": "y", "rejected": "z"}, "prompt is NoneType, chosen and rejected are strings"),
        ({"prompt": "x", "chosen": "y", "rejected": [BAD]}, "chosen is 'y': must be a list of"),
        ({"chosen": [GOOD], "rejected": [BAD]}, "must begin with the same messages and then differ"),
        ({"chosen": PROMPT, "rejected": PROMPT[:2]}, "must begin with the same messages and then differ"),
        ({"chosen": PROMPT, "rejected": PROMPT}, "no pair to train on: 1 of 1 have equal sides$"),
        ({**FORMS["all of both"], "prompt": "another"}, "prompt is not the beginning that chosen and rejected share"),
        ({**FORMS["messages"], "prompt": turns("x", "y", system="z")}, "the chat template refuses the messages"),
    ],
)
def test_what_does_not_fit(sample, words):
    refuses(lambda: Pairs([sample], make_tokenizer(TEMPLATES["mistral"]), length=99), words)


def test_text_needs_an_end_token():
    tokenizer = make_tokenizer(None)
    tokenizer.eos_token = None
    refuses(lambda: Pairs([{"prompt": "x", "chosen": "y", "rejected": "z"}], tokenizer, length=9), "eos_token is None")
