"""Conversations in the columns of other projects: the `dataset.map` that makes messages of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

REPLIES = {"output": "instruction", "response": "instruction", "answer": "question", "completion": "prompt"}


def how_to_read(sample: Mapping[str, Any], column: str) -> str:
    """Return the call that gives the dataset of this sample the column of messages; "" if no column looks like one."""
    for name, value in sample.items():
        if {"role", "content"} <= _keys(value):
            return f"dataset.rename_column({name!r}, {column!r})"
        if {"from", "value"} <= _keys(value):
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


def _keys(value: Any) -> set[str]:
    """Return the keys of the first turn, if the value is a list of turns."""
    turns = isinstance(value, Sequence) and not isinstance(value, str) and value
    return set(value[0]) if turns and isinstance(value[0], Mapping) else set()
