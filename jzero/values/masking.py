"""Masks secrets in what jzero prints: plans, reports and errors are pasted into chats and kept in logs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SECRET = ("KEY", "TOKEN", "SECRET", "PASSWORD", "CREDENTIAL")
MASK = "***"


def is_secret(name: str) -> bool:
    """Return whether a name suggests a secret.

    >>> is_secret("WANDB_API_KEY"), is_secret("comet.api_key"), is_secret("NCCL_DEBUG")
    (True, True, False)
    """
    return any(word in name.upper() for word in SECRET)


def mask(name: str, value: Any) -> Any:
    """Return the value as it may be printed: texts under a secret's name are masked, at any depth.

    >>> mask("wandb", [{"api_key": "hf_1", "mode": "offline"}])
    [{'api_key': '***', 'mode': 'offline'}]
    """
    if isinstance(value, Mapping):
        return {key: mask(str(key), child) for key, child in value.items()}
    if isinstance(value, list | tuple):
        return [mask(name, child) for child in value]
    return MASK if value and isinstance(value, str) and is_secret(name) else value


def masked(env: Mapping[str, str]) -> dict[str, str]:
    """Mask the secrets among variables.

    >>> masked({"HF_TOKEN": "hf_1", "NCCL_DEBUG": "INFO"})
    {'HF_TOKEN': '***', 'NCCL_DEBUG': 'INFO'}
    """
    return {name: mask(name, value) for name, value in env.items()}
