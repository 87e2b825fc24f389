"""Fine-tuning data in rows of one length: conversations, and preferences (two replies to a prompt)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from jzero.data import packing
from jzero.data.conversations import LengthLimit, TooLong, check_choice, column_of, tools_of
from jzero.data.template import Encoded, Mask, Template, read_messages
from jzero.errors import ConfigError

SIDES = ("chosen", "rejected")


class Chat(packing.PackedRows):
    """Training data of conversations: {"inputs", "labels", "segments"}, each [length] int32, as of `jzero.data.Packed`.

    A conversation is a list of messages, {"role": ..., "content": ...}, which the tokenizer's chat template turns into
    text; its "tools" go to the template too. A label is the next token of the same conversation if this is a token to
    train on, and -1 (ignored by the loss) otherwise. All conversations are encoded here, on every process, about half a
    million tokens a second; the tokens stay in memory, 5 bytes each.

    Args:
      dataset: conversations, or mappings with the columns `column` and, if there are tools, "tools" (JSON schemas, or
        their JSON): a list, the path of a JSONL file, a Hugging Face dataset.
      tokenizer: of `transformers`, with a chat template.
      length: tokens per row.
      mask: what is trained. "assistant": the assistant's turns with their end tokens; "last": the last of these; "all":
        every token. The turns are the template's {% generation %} blocks; without such blocks, what its text gains by a
        turn.
      pack: fill rows with several conversations, which the attention keeps apart by their segments. False: a row per
        conversation, without "segments".
      too_long: "cut" keeps the first `length` tokens of a longer conversation; "drop" leaves it out. The run report
        and `report_notes` count them.
      column: the dataset's column with the messages.
      vocab_size: the model's; every token is checked against it.

    Raises:
      ConfigError: conversations that the template refuses, turns that cannot be found in its text, no conversation with
        a token to train on, a token outside the vocabulary.
    """

    def __init__(
        self, dataset: Any, tokenizer: Any, *, length: int, mask: Mask = "assistant", pack: bool = True,
        too_long: TooLong = "cut", column: str = "messages", vocab_size: int | None = None,
    ):  # fmt: skip
        check_choice("mask", mask, Mask)
        limit, template = LengthLimit(length, too_long), Template(tokenizer)

        def encode(sample: object) -> list[Encoded]:
            messages = sample if isinstance(sample, list) else column_of(sample, column, is_conversation=True)
            messages = read_messages(messages, column)
            limit.roles |= {message["role"]: None for message in messages if mask != "all"}
            return [template.conversation(messages, mask, tools_of(sample))]

        store, trained = packing.pieces_of(limit.encode(dataset, encode, "conversation"), vocab_size)
        super().__init__(store, length, pack)
        self.limit, self.trained = limit, trained

    def __repr__(self) -> str:
        tokens = len(self.store.tokens)
        rows = f"{len(self):,} rows of {self.length:,}, {self._filled:.1%} filled"
        trained = f"{self.trained / tokens:.1%} of the tokens trained"
        return f"Chat({len(self.store.sizes):,} conversations in {rows}, {trained})"

    def report_notes(self) -> list[str]:
        """Return the lines for the run report."""
        return [repr(self), *self.limit.notes()]


class Pairs(packing.PackedRows):
    """Training data of preferences: {"chosen": {"inputs", "labels"}, "rejected": {...}}, each [length] int32.

    "chosen" and "rejected" are batches of causal language models: prompt and reply. A label is the next token of the
    reply, end token included, and -1 elsewhere. The columns have the forms of the `trl` library:

    | prompt | chosen, rejected | how they are encoded |
    |---|---|---|
    | messages, or a string: the user's | messages from the assistant's turn on | by the tokenizer's chat template |
    | none | whole conversations, whose first messages are equal: the prompt | the same |
    | messages, or a string: the user's | whole conversations that begin with it | the same |
    | a string | strings | as they are, with the tokenizer's end token after the reply |

    A pair of equal sides tells nothing about a preference, so it is left out; the run report counts such pairs.

    Args:
      dataset: mappings with the columns "prompt", "chosen", "rejected" and, if there are tools, "tools": a list, the
        path of a JSONL file, a Hugging Face dataset.
      tokenizer: of `transformers`.
      length: tokens per row, prompt and reply together.
      too_long: "cut" keeps the first `length` tokens of each side; "drop" leaves a pair out if one side is longer. The
        run report and `report_notes` count them.
      vocab_size: the model's; every token is checked against it.

    Raises:
      ConfigError: columns that do not fit each other, messages that the template refuses, no pair with tokens to train
        on, a token outside the vocabulary.
    """

    def __init__(
        self, dataset: Any, tokenizer: Any, *, length: int, too_long: TooLong = "cut", vocab_size: int | None = None
    ):
        limit, template = LengthLimit(length, too_long), Template(tokenizer)

        def encode(sample: object) -> list[Encoded]:
            replies = _replies(sample)
            is_equal = replies[0] == replies[1]
            limit.equal += is_equal
            return [] if is_equal else _encode(template, sample, replies)

        found = limit.encode(dataset, encode, "pair")  # chosen, rejected, chosen, rejected, ...
        super().__init__(packing.pieces_of(found, vocab_size)[0], length, packed=False)
        self.limit = limit

    def __len__(self) -> int:
        return super().__len__() // 2

    def __repr__(self) -> str:
        return (
            f"Pairs({len(self):,} pairs of at most {self.length:,} tokens, {self.store.sizes.mean():,.0f} on average)"
        )

    def report_notes(self) -> list[str]:
        """Return the lines for the run report."""
        return [repr(self), *self.limit.notes()]

    def rows(self, indices: np.ndarray) -> dict[str, dict[str, np.ndarray]]:
        return {name: packing.PackedRows.rows(self, 2 * indices + side) for side, name in enumerate(SIDES)}


def _replies(sample: object) -> list[Any]:
    """Return the columns "chosen" and "rejected": both strings, or both lists of messages."""
    replies = [column_of(sample, name) for name in SIDES]
    if all(isinstance(reply, str) for reply in replies):
        return replies
    return [read_messages(reply, name) for name, reply in zip(SIDES, replies, strict=True)]


def _encode(template: Template, sample: Any, replies: Sequence[Any]) -> list[Encoded]:
    """Encode both sides of a sample."""
    prompt = sample.get("prompt")
    if isinstance(replies[0], str):
        if not isinstance(prompt, str):
            raise ConfigError(f"prompt is {type(prompt).__name__}, chosen and rejected are strings: it must be one too")
        return [template.text(prompt, reply) for reply in replies]
    before = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    before = read_messages(before, "prompt") if before else []
    if before and all(side[0]["role"] == "assistant" for side in replies):
        return [template.reply(before, side, tools_of(sample)) for side in replies]
    both = zip(*replies, strict=False)
    shared = next((i for i, (a, b) in enumerate(both) if a != b), min(map(len, replies)))  # equal first messages
    head = replies[0][:shared]
    if not shared or not all(side[shared:] for side in replies):
        raise ConfigError(
            "chosen and rejected must begin with the same messages and then differ, or begin with the assistant's turn "
            "and follow a column prompt"
        )
    if before and head[-len(before) :] != before:
        if head[: len(before)] != before:
            raise ConfigError(
                "the column prompt is not the beginning that chosen and rejected share: remove the column"
            )
        head, shared = before, len(before)  # the replies begin with equal turns
    return [template.reply(head, side[shared:], tools_of(sample)) for side in replies]
