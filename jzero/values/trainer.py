"""What the Hugging Face Trainer writes where a config says "auto", with its default TrainingArguments.

Without the Trainer nobody fills in these values, and DeepSpeed stops at the word. jzero takes the Trainer's defaults.
Source: integrations/deepspeed.py and training_args.py of transformers 5.0.
"""

from collections.abc import Container, Mapping
from typing import Any, NamedTuple

MICRO_BATCH = 8  # per_device_train_batch_size
EPOCHS = 3  # num_train_epochs
PARAMS: dict[str, Any] = {
    "lr": 5e-5,
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "weight_decay": 0.0,
    "warmup_min_lr": 0.0,
    "warmup_num_steps": 0,
}


class Total(NamedTuple):
    """The optimizer steps of a run, for the `total_num_steps` of a schedule, and who says so."""

    steps: int
    why: str


def is_auto(value: object) -> bool:
    """Return whether a value is the word "auto"."""
    return isinstance(value, str) and value == "auto"


def fill(params: Mapping[str, Any], known: Container[str]) -> dict[str, Any]:
    """Replace "auto" by the Trainer's default; leave a parameter out for which it has none, or that is not `known`.

    >>> fill({"lr": "auto", "betas": "auto", "momentum": "auto", "nesterov": True}, ["lr", "momentum", "nesterov"])
    {'lr': 5e-05, 'nesterov': True}
    """
    return {
        name: PARAMS[name] if is_auto(value) else value
        for name, value in params.items()
        if not is_auto(value) or (name in PARAMS and name in known)
    }
