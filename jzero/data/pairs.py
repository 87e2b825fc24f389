"""Preference data: a chosen and a rejected reply to a prompt, in rows of one length."""

from __future__ import annotations

from typing import Any

import numpy as np

from jzero.data.conversations import Fit, TooLong, column_of, samples_of, tools_of
from jzero.data.packing import Pieces
from jzero.data.template import Encoded, Template, read_messages
from jzero.errors import ConfigError

SIDES = ("chosen", "rejected")


class Pairs:
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
      dataset: mappings with the columns "prompt", "chosen", "rejected" and, if there are tools, "tools": a list, a
        Hugging Face dataset.
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
        self.length, self.fit = length, Fit(length, too_long)
        template = Template(tokenizer)
        found: list[Encoded] = []  # chosen, rejected, chosen, rejected, ...
        self.equal = 0
        for number, sample in enumerate(samples_of(dataset)):
            try:
                if (replies := _replies(sample))[0] == replies[1]:
                    self.equal += 1
                else:
                    found += self.fit(*_encode(template, sample, replies)) or ()
            except ConfigError as error:
                raise ConfigError(f"dataset[{number}]: {error}") from error
        if not found:
            raise ConfigError(self.fit.nothing_left("pair", *self._equal()))
        self.store = Pieces.of_documents([x.tokens for x in found], (x.trained for x in found), vocab_size)

    def __len__(self) -> int:
        return len(self.store.sizes) // 2

    def __repr__(self) -> str:
        return (
            f"Pairs({len(self):,} pairs of at most {self.length:,} tokens, {self.store.sizes.mean():,.0f} on average)"
        )

    def report_notes(self) -> list[str]:
        """Return the lines for the run report."""
        return [repr(self), *self.fit.notes(), *(f"{count}: left out" for count in self._equal())]

    def _equal(self) -> list[str]:
        return [f"{self.equal:,} of {self.equal + self.fit.samples:,} have equal sides"] if self.equal else []

    def rows(self, indices: np.ndarray) -> dict[str, dict[str, np.ndarray]]:
        batch = {}
        for side, name in enumerate(SIDES):
            rows = self.store.rows([np.array([2 * i + side]) for i in indices.tolist()], self.length)
            batch[name] = {key: rows[key] for key in ("inputs", "labels")}
        return batch


def _replies(sample: Any) -> list[Any]:
    """Return the columns "chosen" and "rejected": both strings, or both lists of messages."""
    replies = [column_of(sample, name) for name in SIDES]
    if all(isinstance(reply, str) for reply in replies):
        return replies
    return [read_messages(reply, name) for name, reply in zip(SIDES, replies, strict=True)]


def _encode(template: Template, sample: Any, replies: list[Any]) -> list[Encoded]:
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
    shared = _shared(*replies)
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


def _shared(chosen: list[dict], rejected: list[dict]) -> int:
    """Count the equal first messages."""
    return next(
        (i for i, (a, b) in enumerate(zip(chosen, rejected, strict=False)) if a != b),
        min(len(chosen), len(rejected)),
    )
