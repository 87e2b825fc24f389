"""Conversations as tokens by the tokenizer's own chat template, and the tokens that a loss trains."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from jzero.errors import ConfigError, one_line, shorten, some_of

Message = Mapping[str, Any]
Tools = Sequence[Message] | None  # JSON schemas
REPLIES = {"output": "instruction", "response": "instruction", "answer": "question", "completion": "prompt"}
Mask = Literal["assistant", "all", "last"]
GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")  # as transformers finds it
UNSTABLE = (
    "the chat template writes the first {} messages differently when others follow, so the tokens of an assistant turn "
    "cannot be found by comparing prefixes ({!r} became {!r}): put {{% generation %}} ... {{% endgeneration %}} around "
    'the assistant\'s text in tokenizer.chat_template, or use mask="last" or "all"'
)


class Encoded(NamedTuple):
    """Tokens [n] int32, and which of them a loss trains [n] bool."""

    tokens: np.ndarray
    trained: np.ndarray


class Template:
    """Encodes messages by a tokenizer's chat template.

    The template's text is tokenized as a whole, so the tokens are those of `tokenizer.apply_chat_template`. The trained
    ones are those of the template's {% generation %} blocks. Without such blocks, an assistant turn is what the text
    gains by it: the text up to this turn, less the text before it with the generation prompt. Whitespace after the
    turn's end token is not part of it.

    Args:
      tokenizer: a fast tokenizer of `transformers`.

    Raises:
      ConfigError: the tokenizer has no chat template where one is needed, or cannot map tokens to text.
    """

    def __init__(self, tokenizer: Any):
        if not getattr(tokenizer, "is_fast", False):
            raise ConfigError(
                f"tokenizer is {type(tokenizer).__name__}: must be a fast tokenizer of transformers, which maps tokens "
                "to text, such as AutoTokenizer.from_pretrained(DIR)"
            )
        self.tokenizer = tokenizer
        marks = {*tokenizer.get_added_vocab(), *tokenizer.all_special_tokens}
        self.ends = tuple(mark for mark in marks if mark.strip())  # some tokenizers add tokens of spaces

    def conversation(self, messages: Sequence[Message], mask: Mask, tools: Tools = None) -> Encoded:
        """Encode a whole conversation.

        Raises:
          ConfigError: the template refuses the messages, or its turns cannot be found.
          ImportError: jinja2, which renders templates, is not installed.
        """
        if mask != "all" and self._has_blocks(tools):
            return self._by_blocks(messages, mask, tools)
        text = self._render(messages, tools)
        if mask == "all":
            return self._encode(text, [(0, len(text))])
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        chosen = turns[-1:] if mask == "last" else turns
        return self._encode(text, [self._turn(messages, tools, text, i, i + 1) for i in chosen])

    def reply(self, prompt: Sequence[Message], reply: Sequence[Message], tools: Tools = None) -> Encoded:
        """Encode prompt and reply; all messages of the reply are trained."""
        messages = [*prompt, *reply]
        text = self._render(messages, tools)
        return self._encode(text, [self._turn(messages, tools, text, len(prompt), len(messages))])

    def text(self, prompt: str, reply: str) -> Encoded:
        """Encode plain text without the template, with the tokenizer's end token; the reply is trained."""
        end = self.tokenizer.eos_token_id
        if end is None:
            raise ConfigError("tokenizer.eos_token is None: set it, so that a reply of plain text ends")
        tokens, trained = self._encode(prompt + reply, [(len(prompt), len(prompt + reply))], add_special_tokens=True)
        if len(tokens) and tokens[-1] == end:  # some tokenizers add it themselves
            tokens, trained = tokens[:-1], trained[:-1]
        return Encoded(np.append(tokens, np.int32(end)), np.append(trained, True))

    def _has_blocks(self, tools: Tools) -> bool:
        try:
            return bool(GENERATION.search(self.tokenizer.get_chat_template(None, tools)))
        except ValueError as error:  # it has none, or none of several is the default
            none = "there is none: use an instruct model, or samples of prompt and completion"
            why = one_line(str(error)) if self.tokenizer.chat_template else none
            raise ConfigError(f"the tokenizer's chat_template: {why}") from error

    def _by_blocks(self, messages: Sequence[Message], mask: Mask, tools: Tools) -> Encoded:
        found = self._apply(messages, tools, return_dict=True, return_assistant_tokens_mask=True)
        tokens, trained = np.asarray(found["input_ids"], np.int32), np.asarray(found["assistant_masks"], bool)
        if mask == "last" and trained.any():
            rest = np.flatnonzero(~trained[: np.flatnonzero(trained)[-1]])  # tokens between the turns
            trained[: rest[-1] + 1 if len(rest) else 0] = False
        return Encoded(tokens, trained)

    def _turn(self, messages: Sequence[Message], tools: Tools, text: str, first: int, end: int) -> tuple[int, int]:
        """Find the characters of messages `first` to `end` in the text of all messages."""
        before = self._render(messages[:first], tools, add_generation_prompt=True)
        whole = text if end == len(messages) else self._render(messages[:end], tools)
        for part, count in ((before, first), (whole, end)):
            if not text.startswith(part):
                at = next((i for i, (a, b) in enumerate(zip(part, text, strict=False)) if a != b), len(text))
                raise ConfigError(UNSTABLE.format(count, part[at : at + 40], text[at : at + 40]))
        kept = whole.rstrip()
        return len(before), len(kept) if kept.endswith(self.ends) and len(kept) > len(before) else len(whole)

    def _render(self, messages: Sequence[Message], tools: Tools, add_generation_prompt: bool = False) -> str:
        return self._apply(messages, tools, tokenize=False, add_generation_prompt=add_generation_prompt)

    def _apply(self, messages: Sequence[Message], tools: Tools, **options: bool) -> Any:
        try:
            return self.tokenizer.apply_chat_template(list(messages), tools=tools, **options)
        except ImportError:  # transformers names the package, jinja2, and its pip line
            raise
        except Exception as error:  # of jinja2, or whatever a template makes of these messages
            reason = shorten(one_line(str(error)), 300)
            nulls = [f"message {n} ({x['role']})" for n, x in enumerate(messages, 1) if x.get("content") is None]
            if nulls:  # transformers leaves null out, so that Jinja tells of an attribute
                reason = f'content of {some_of(nulls)} is null: must be a text, "" for none ({reason})'
            raise ConfigError(f"the chat template refuses the messages: {reason}") from error

    def _encode(self, text: str, spans: list[tuple[int, int]], add_special_tokens: bool = False) -> Encoded:
        """Tokenize a text; tokens that overlap a span of characters are trained.

        Raises:
          ConfigError: the text has no UTF-8.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:  # a tokenizer's own error does not name it
            half = f"{text[error.start]!a} at character {error.start}"
            raise ConfigError(f"the text has {half}, half of a UTF-16 pair: remove it") from None
        found = self.tokenizer(text, add_special_tokens=add_special_tokens, return_offsets_mapping=True)
        offsets = np.asarray(found["offset_mapping"], np.int64).reshape(-1, 2)
        trained = np.zeros(len(offsets), bool)
        for begin, end in spans:
            trained |= (offsets[:, 1] > begin) & (offsets[:, 0] < end)
        return Encoded(np.asarray(found["input_ids"], np.int32), trained)


def read_messages(value: object, name: str) -> list[Message]:
    """Read a list of messages, without fields that are None: Arrow adds the fields that other messages have.

    Raises:
      ConfigError: not a list of {"role": ..., ...}; a message with nothing but its role.
    """
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise ConfigError(f'{name} is {shorten(repr(value), 80)}: must be a list of {{"role": ..., "content": ...}}')
    for number, message in enumerate(value, 1):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            is_sharegpt = isinstance(message, Mapping) and {"from", "value"} <= message.keys()
            fix = f"; {how_to_rename(name, name)}" if is_sharegpt else ""
            raise ConfigError(
                f'{name} contains {shorten(repr(message), 80)}: must be {{"role": ..., "content": ...}}{fix}'
            )
        if message.get("content") is None and not any(x for key, x in message.items() if key != "role"):
            of = f"message {number} ({message['role']})"
            raise ConfigError(f'{name}: content of {of} is null: must be a text, "" for none')
    return [{key: _present(x) for key, x in message.items() if x is not None or key == "content"} for message in value]


def _present(x: object) -> object:
    if isinstance(x, Mapping):
        return {key: _present(part) for key, part in x.items() if part is not None}
    return [_present(part) for part in x] if isinstance(x, list | tuple) else x


def how_to_read(sample: Message, column: str) -> str:
    """Return the call that gives the dataset of this sample the column of messages; "" if no column looks like one."""
    for name, value in sample.items():
        turns = isinstance(value, Sequence) and not isinstance(value, str) and value
        keys = set(value[0]) if turns and isinstance(value[0], Mapping) else set()  # of the first turn
        if {"role", "content"} <= keys:
            return f"dataset.rename_column({name!r}, {column!r})"
        if {"from", "value"} <= keys:
            return how_to_rename(name, column)
    for reply, asked in REPLIES.items():
        if asked in sample and reply in sample:
            question = f'x["{asked}"]'
            if "input" in sample:  # Alpaca's, which may be empty
                question = rf'({question} + "\n\n" + x["input"]).strip()'
            turns = f'{{"role": "user", "content": {question}}}, {{"role": "assistant", "content": x["{reply}"]}}'
            return f'dataset.map(lambda x: {{"{column}": [{turns}]}})'
    return ""


def how_to_rename(name: str, column: str) -> str:
    """Return the call that makes messages of ShareGPT's {"from": "human", "value": ...} in the column `name`."""
    role = '{"human": "user", "gpt": "assistant"}.get(turn["from"], turn["from"])'
    turn = f'{{"role": {role}, "content": turn["value"]}}'
    return f'dataset.map(lambda x: {{"{column}": [{turn} for turn in x["{name}"]]}})'
