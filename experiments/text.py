"""Real text that every machine has: the source of Python's standard library, as bytes; and a bigram to beat on it."""

from __future__ import annotations

import sysconfig
import zlib
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

BYTES = 256

# Installed packages are not the same everywhere; tests are repetitive, code tables are no language.
_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"}


def standard_library(size: int, held_out: float = 0.1) -> tuple[np.ndarray, np.ndarray]:
    """(training text, held-out text): about `size` bytes of whole files, no file in both.

    Files come in the order of a checksum of their names: mixed, and the same on every run and machine.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    names = [path.relative_to(root).as_posix() for path in root.rglob("*.py")]
    names = sorted((zlib.crc32(name.encode()), name) for name in names if not _SKIPPED & set(name.split("/")))
    splits: tuple[list[bytes], list[bytes]] = ([], [])
    total = 0
    for checksum, name in names:
        if total >= size:
            break
        text = (root / name).read_bytes()
        splits[checksum % 1000 < 1000 * held_out].append(text)
        total += len(text)
    if not all(splits):
        raise FileNotFoundError(f"{root} holds too little Python source; is this Python's standard library zipped?")
    train, test = (np.frombuffer(b"".join(files), np.uint8) for files in splits)
    return train, test


def windows(text: np.ndarray, length: int) -> dict[str, np.ndarray]:
    """The text cut into rows of `length` bytes, with the byte that follows each as its label: two [rows, length]."""
    rows = (len(text) - 1) // length
    cut = text[: rows * length + 1].astype(np.int32)
    return {"inputs": cut[:-1].reshape(rows, length), "labels": cut[1:].reshape(rows, length)}


def spread(batch: dict[str, np.ndarray], rows: int) -> dict[str, np.ndarray]:
    """`rows` of the batch's rows, evenly spread."""
    chosen = np.linspace(0, len(batch["inputs"]) - 1, rows).astype(int)
    return {name: x[chosen] for name, x in batch.items()}


def bigram_loss(train: np.ndarray, inputs: np.ndarray, labels: np.ndarray) -> float:
    """Mean loss in nats per byte of a bigram model of `train`, counts smoothed by adding one, on the given bytes."""
    pairs = train[:-1].astype(np.int64) * BYTES + train[1:]
    counts = np.bincount(pairs, minlength=BYTES * BYTES).reshape(BYTES, BYTES) + 1.0
    probability = counts / counts.sum(axis=1, keepdims=True)
    return float(-np.log(probability[inputs, labels]).mean())


@partial(jax.jit, static_argnames=("model", "length", "context"))
def _sample(model, params, prompt: jax.Array, rng: jax.Array, temperature: float, length: int, context: int):
    module, begin = model.module(params), len(prompt)
    text = jnp.zeros(begin + length + context, jnp.int32).at[:begin].set(prompt)

    def one(i, text):
        start = jnp.maximum(i - context, 0)
        window = jax.lax.dynamic_slice(text, (start,), (context,))  # what lies after byte i - 1 has no influence
        logits = module(window[None])[0, i - 1 - start]
        byte = jax.random.categorical(jax.random.fold_in(rng, i), logits / temperature)
        return text.at[i].set(byte)

    return jax.lax.fori_loop(begin, begin + length, one, text)[begin : begin + length]


def continuation(model, params, prompt: str, *, length: int, context: int, temperature: float, seed: int) -> str:
    """`length` bytes sampled after `prompt`, each from the `context` bytes before it, as text on one device."""
    params = jax.device_get(params)
    head = jnp.asarray(list(prompt.encode()[-context:]), jnp.int32)
    text = _sample(model, params, head, jax.random.key(seed), temperature, length, context)
    text = bytes(np.asarray(text, np.uint8)).decode(errors="replace")
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)
