"""Train a case with jzero and without, and compare the losses."""

from __future__ import annotations

import contextlib
import io
from typing import Any, NamedTuple

import jax
import optax
from flax import linen

import jzero

from . import plain
from .cases import ROWS, Case

RATE, MOMENTUM = 0.01, 0.9


class Layout(NamedTuple):
    stage: int
    pipe: int = 1


def expected(case: Case) -> tuple[Any, list[float]]:
    """Train on one device; return the starting values and the losses."""
    return plain.train(case.write(), case.batch, optax.sgd(RATE, momentum=MOMENTUM))


def rounding(case: Case, losses: list[float]) -> float:
    """Return how far rounding alone moves the losses: those of one device with the rows in reverse order."""
    return largest_difference(
        expected(case._replace(batch={k: x[::-1].copy() for k, x in case.batch.items()}))[1], losses
    )


def found(case: Case, layout: Layout, start: Any) -> list[float]:
    """Train on eight devices; return the losses."""
    written = case.write()
    if isinstance(written, tuple):
        module, loss_fn = written
        example = {"example_batch": case.batch} if isinstance(module, linen.Module) else {}
        stack = {"stack": case.stack} if case.stack and layout.pipe > 1 else {}
        model = jzero.from_flax(module, loss_fn, **example, **stack)
    else:
        model = written
    config = {
        "train_batch_size": ROWS,
        "optimizer": {"type": "SGD", "params": {"lr": RATE, "momentum": MOMENTUM}},
        "zero_optimization": {"stage": layout.stage, "stage3_param_persistence_threshold": 0},
        "mesh": {"pipe": layout.pipe},
        "gradient_clipping": 0,
        **case.config,
    }
    with contextlib.redirect_stdout(io.StringIO()):
        engine, *_ = jzero.initialize(model=model, config=config, params=start)
    return [float(engine.train_batch(case.batch)) for _ in range(plain.STEPS)]


def largest_difference(a: list[float], b: list[float]) -> float:
    """Return the largest relative difference of two lists of losses."""
    return max(abs(x - y) / abs(y) for x, y in zip(a, b, strict=True))


def devices() -> None:
    """Simulate eight devices; before JAX starts."""
    jax.config.update("jax_num_cpu_devices", 8)
    jax.config.update("jax_platforms", "cpu")
