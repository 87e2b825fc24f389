"""Text that every machine has, the source of Python's standard library as bytes, and a bigram model as a baseline."""

from __future__ import annotations

import sysconfig
import zlib
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

BYTES = 256

# Installed packages differ between machines; tests are repetitive; code tables are not text.
_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"}


def standard_library(size: int, held_out: float = 0.1) -> tuple[np.ndarray, np.ndarray]:
    """Read about `size` bytes of whole files: (training text, held-out text), with no file in both.

    The files are ordered by a checksum of their names, which mixes them in the same way on every machine.
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
        raise FileNotFoundError(
            f"{root} contains too little Python source; is the standard library of this Python zipped?"
        )
    train, test = (np.frombuffer(b"".join(files), np.uint8) for files in splits)
    return train, test


def windows(text: np.ndarray, length: int) -> dict[str, np.ndarray]:
    """Cut the text into rows of `length` bytes; labels are the following bytes: two arrays [rows, length]."""
    rows = (len(text) - 1) // length
    cut = text[: rows * length + 1].astype(np.int32)
    return {"inputs": cut[:-1].reshape(rows, length), "labels": cut[1:].reshape(rows, length)}


def sample_rows(batch: dict[str, np.ndarray], rows: int) -> dict[str, np.ndarray]:
    """Take `rows` evenly spaced rows of the batch."""
    chosen = np.linspace(0, len(batch["inputs"]) - 1, rows).astype(int)
    return {name: x[chosen] for name, x in batch.items()}


def bigram_loss(train: np.ndarray, inputs: np.ndarray, labels: np.ndarray) -> float:
    """Compute the loss in nats per byte of a bigram model of `train`, with add-one smoothing, on the given bytes."""
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
        window = jax.lax.dynamic_slice(
            text, (start,), (context,)
        )  # attention is causal, so bytes after i - 1 do not matter
        logits = module(window[None])[0, i - 1 - start]
        byte = jax.random.categorical(jax.random.fold_in(rng, i), logits / temperature)
        return text.at[i].set(byte)

    return jax.lax.fori_loop(begin, begin + length, one, text)[begin : begin + length]


def continuation(model, params, prompt: str, *, length: int, context: int, temperature: float, seed: int) -> str:
    """Sample `length` bytes after `prompt` on one device, each from the `context` bytes before it, and return text."""
    params = jax.device_get(params)
    head = jnp.asarray(list(prompt.encode()[-context:]), jnp.int32)
    text = _sample(model, params, head, jax.random.key(seed), temperature, length, context)
    text = bytes(np.asarray(text, np.uint8)).decode(errors="replace")
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)
