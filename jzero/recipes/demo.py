"""`jzero demo`: trains a small model on text that every Python has, and shows its samples and its curve."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

from jzero.adapters.from_flax import from_flax
from jzero.distributed.place import log_dist
from jzero.errors import ConfigError
from jzero.models.llama import Llama, preset
from jzero.run.engine import Engine
from jzero.run.initialize import initialize

LENGTH, ROWS = 128, 16
PROMPTS = ("The statement ", "If the method ", "An expression ")  # as long as each other: one program


class Demo(NamedTuple):
    """Results of a demo: the loss of each step in nats per byte, that of text it has not seen, and samples."""

    losses: list[float]
    held_out: float
    samples: list[str]


def train_demo(steps: int) -> Demo:
    """Train a byte-level Llama of 0.5 M parameters on Python's documentation, and print what it learns.

    Raises:
      ConfigError: no step, or a Python without its documentation.
    """
    if steps < 1:
        raise ConfigError(f"--steps {steps}: must be at least 1")
    text = documentation()
    rows = np.frombuffer(text[: len(text) // LENGTH * LENGTH], np.uint8).astype(np.int32).reshape(-1, LENGTH)
    data = {"inputs": rows[:, :-1], "labels": rows[:, 1:]}
    held = {name: x[-2 * ROWS :] for name, x in data.items()}
    config = {
        "train_batch_size": ROWS,
        "optimizer": {"type": "Muon", "params": {"lr": 0.02}},
        "scheduler": {"type": "WarmupCosineLR", "params": {"warmup_num_steps": 10, "total_num_steps": max(steps, 11)}},
        "steps_per_print": max(1, steps // 5),
    }
    shape = preset("tiny", num_layers=2)
    engine, *_ = initialize(
        model=from_flax(lambda rngs: Llama(shape, rngs=rngs)),
        config=config,
        training_data={name: x[: -2 * ROWS] for name, x in data.items()},
    )
    losses = [float(loss) for loss in [engine.train_batch() for _ in range(steps)]]
    held_out = float(engine.eval_batch(held))
    samples = continue_prompts(engine)
    log_dist(f"\n{curve(losses)}\nloss on text that it has not seen: {held_out:.2f} nats per byte\n")
    log_dist("\n\n".join(samples), ranks=[0])
    return Demo(losses, held_out, samples)


def documentation() -> bytes:
    """Read the pages of `help()` about the language, in an order that mixes them.

    Raises:
      ConfigError: this Python has none.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise ConfigError("jzero demo: this Python has no pydoc_data, its own documentation, to train on") from None
    names = np.random.default_rng(0).permutation(sorted(topics))
    return "\n".join(topics[name] for name in names).encode("ascii", "ignore")


def continue_prompts(engine: Engine, length: int = 160) -> list[str]:
    """Continue each prompt by `length` bytes."""
    tokens = np.array([list(prompt.encode()) for prompt in PROMPTS], np.int32)
    found = engine.generate(tokens, length, rng=jax.random.key(0), temperature=0.6, numpy=True)
    return [bytes(row.astype(np.uint8)).decode("ascii", "replace") for row in found]


def curve(values: Sequence[float], width: int = 60, height: int = 10) -> str:
    """Draw a curve as text: each column is the mean of some steps.

    >>> print(curve([3, 2, 1], height=3))
    3.00 |•
    2.00 | •
    1.00 |  •
         +---
          1 .. 3 steps
    """
    columns = [float(np.mean(part)) for part in np.array_split(values, min(width, len(values)))]
    high, low = max(columns), min(columns)
    levels = [round((high - x) / ((high - low) or 1) * (height - 1)) for x in columns]
    lines = []
    for row in range(height):
        value = high - (high - low) * row / (height - 1)
        lines.append(f"{value:4.2f} |" + "".join("•" if level == row else " " for level in levels).rstrip())
    return "\n".join([*lines, "     +" + "-" * len(columns), f"      1 .. {len(values)} steps"])
