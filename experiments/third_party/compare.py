"""Train a case with jzero and without, and compare the losses and the parameters."""

from __future__ import annotations

import contextlib
import io
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from flax import linen

import jzero
from jzero.planner.traced_operations import moves

from . import plain
from .cases import ROWS, Case

RATE, MOMENTUM = 0.01, 0.9


class Layout(NamedTuple):
    stage: int
    pipe: int = 1
    tensor: int = 1
    context: int = 1


class Trained(NamedTuple):
    """What training on one device gives: the values that it starts from, the loss of each step, the last values."""

    start: Any
    losses: list[float]
    last: Any


class Found(NamedTuple):
    """What training on eight devices gives.

    Attributes:
      losses: of each step.
      parameters: the largest difference from the parameters of one device, relative to a leaf's largest element, which
        counts as at least 0.01: a leaf whose gradient is zero has rounding alone.
      whole: the primitives that ran on whole arrays although `tensor` or `context` divided them, with their lines.
    """

    losses: list[float]
    parameters: float
    whole: tuple[str, ...]


def expected(case: Case) -> Trained:
    """Train on one device."""
    return Trained(*plain.train(case.write(), case.batch, optax.sgd(RATE, momentum=MOMENTUM)))


def rounding(case: Case, known: Trained) -> tuple[float, float]:
    """Return how far rounding alone moves losses and parameters: those of one device with the rows in reverse order."""
    backwards = expected(case._replace(batch={k: x[::-1].copy() for k, x in case.batch.items()}))
    return largest_difference(backwards.losses, known.losses), _of_parameters(backwards.last, known.last)


def found(case: Case, layout: Layout, known: Trained) -> Found:
    """Train on eight devices, from the same values."""
    written, table = case.write(), {}
    if isinstance(written, tuple):
        module, loss_fn = written
        tried = layout.tensor > 1 or isinstance(module, linen.Module)
        stack = {"stack": case.stack} if case.stack and layout.pipe > 1 else {}
        model = jzero.from_flax(module, loss_fn, **({"example_batch": case.batch} if tried else {}), **stack)
    else:
        model = written
        if layout.tensor > 1:
            table = {"tensor_parallel": {"dimensions": jzero.find_dimensions(model, case.batch, layout.tensor)}}
    config = {
        "train_batch_size": ROWS,
        "optimizer": {"type": "SGD", "params": {"lr": RATE, "momentum": MOMENTUM}},
        "zero_optimization": {"stage": layout.stage, "stage3_param_persistence_threshold": 0},
        "mesh": {"pipe": layout.pipe, "tensor": layout.tensor, "context": layout.context},
        "gradient_clipping": 0,
        **table,
        **case.config,
    }
    with contextlib.redirect_stdout(io.StringIO()):
        engine, *_ = jzero.initialize(model=model, config=config, params=known.start)
        losses = [float(engine.train_batch(case.batch)) for _ in range(plain.STEPS)]
    step, adopt = engine.step_fn, getattr(model, "adopt", lambda values: values)
    whole = moves(step.traced, step.mesh).whole if layout.tensor * layout.context > 1 else ()
    return Found(losses, _of_parameters(engine.state.params, adopt(known.last)), whole)


def _of_parameters(ours: Any, theirs: Any) -> float:
    leaves = zip(*(jax.tree.leaves(jax.device_get(tree)) for tree in (ours, theirs)), strict=True)
    pairs = [(np.asarray(a, np.float64), np.asarray(b, np.float64)) for a, b in leaves]
    return max(np.abs(a - b).max() / max(np.abs(b).max(), 1e-2) for a, b in pairs)


def largest_difference(a: list[float], b: list[float]) -> float:
    """Return the largest relative difference of two lists of losses."""
    return max(abs(x - y) / abs(y) for x, y in zip(a, b, strict=True))


def devices() -> None:
    """Simulate eight devices; before JAX starts."""
    jax.config.update("jax_num_cpu_devices", 8)
    jax.config.update("jax_platforms", "cpu")
