"""Fine-tuning data: conversations in rows of one length."""

from __future__ import annotations

from typing import Any

import numpy as np

from jzero.data.conversations import Fit, TooLong, check_choice, column_of, samples_of, tools_of
from jzero.data.packing import Pieces, pack
from jzero.data.template import Encoded, Mask, Template, read_messages
from jzero.errors import ConfigError


class Chat:
    """Training data of conversations: {"inputs", "labels", "segments"}, each [length] int32, as of `jzero.data.Packed`.

    A conversation is a list of messages, {"role": ..., "content": ...}, which the tokenizer's chat template turns into
    text; its "tools" go to the template too. A label is the next token of the same conversation if this is a token to
    train on, and -1 (ignored by the loss) otherwise. All conversations are encoded here, on every process, about half a
    million tokens a second; the tokens stay in memory, 5 bytes each.

    Args:
      dataset: conversations, or mappings with the columns `column` and, if there are tools, "tools" (JSON schemas, or
        their JSON): a list, a Hugging Face dataset.
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
        self.length, self.packs, self.fit = length, pack, Fit(length, too_long)
        template = Template(tokenizer)
        found: list[Encoded] = []
        for number, sample in enumerate(samples_of(dataset)):
            try:
                fitted = self.fit(_encode(template, sample, column, mask))
            except ConfigError as error:
                raise ConfigError(f"dataset[{number}]: {error}") from error
            found += fitted or ()
        if not found:
            raise ConfigError(self.fit.nothing_left("conversation"))
        self.store = Pieces.of_documents([x.tokens for x in found], (x.trained for x in found), vocab_size)
        self.trained = sum(int(x.trained.sum()) for x in found)
        self.pieces, self.offsets = _pack(self.store.sizes, length) if pack else _one_a_row(len(found))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __repr__(self) -> str:
        tokens, space = len(self.store.tokens), len(self) * self.length
        filled, trained = f"{tokens / space:.1%} filled", f"{self.trained / tokens:.1%} of the tokens trained"
        rows = f"{len(self):,} rows of {self.length:,}, {filled}, {trained}"
        return f"Chat({len(self.store.sizes):,} conversations in {rows})"

    def report_notes(self) -> list[str]:
        """Return the lines for the run report."""
        return [repr(self), *self.fit.notes()]

    def rows(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        groups = [self.pieces[self.offsets[i] : self.offsets[i + 1]] for i in indices.tolist()]
        rows = self.store.rows(groups, self.length)
        return rows if self.packs else {name: rows[name] for name in ("inputs", "labels")}


def _encode(template: Template, sample: Any, column: str, mask: Mask) -> Encoded:
    messages = sample if isinstance(sample, list) else column_of(sample, column, is_conversation=True)
    return template.conversation(read_messages(messages, column), mask, tools_of(sample))


_pack = pack  # the argument of `Chat` has this name too


def _one_a_row(count: int) -> tuple[np.ndarray, np.ndarray]:
    return np.arange(count), np.arange(count + 1)
