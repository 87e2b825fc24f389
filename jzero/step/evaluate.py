"""Predictions under the training layout: any function of the model and a batch, row by row.

The layers are gathered, cut into stages and run forward as in training. `EvalStep` runs on batches of any size: it pads
a batch with copies of its last row, and drops the padding's results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jzero.config import Config
from jzero.distributed.host_collectives import Guard
from jzero.errors import ConfigError
from jzero.loss import Mean
from jzero.mesh import batch_spec, replicas
from jzero.model import Model
from jzero.step.batch import check_dtype, host_arrays, place_batch, place_extra
from jzero.step.call import Call
from jzero.step.setup import Setup, make_passes, resolve
from jzero.step.state import TrainState, check_alive
from jzero.tree import PyTree, named
from jzero.values.parameters import Total


def make_eval_step(
    model: Model, fn: Callable | None, config: Config | dict | str, *, mesh: Mesh | None = None
) -> EvalStep:
    """Make a step that evaluates `fn` for every row of a batch.

    Args:
      model: from `jzero.from_flax`, a `PipelineModule`, or any model with `predicting`, see `jzero.model`.
      fn: `fn(module, batch)` -> a pytree of arrays [rows, ...]. For a module with a layer stack `fn(module, x, batch)`,
        with `x` the stack's output; for a `PipelineModule` `fn(outputs, labels)`. None: the predictions, as for
        `TrainStep.predict`.
      config, mesh: as for `make_train_step`.

    Raises:
      ConfigError: a config that does not fit the devices or the model, a model without predictions.
    """
    any_total = Total(2**31 - 1, "an evaluation has no schedule")
    return EvalStep(resolve(model, Config.load(config), mesh=mesh, total_num_steps=lambda rows: any_total), fn)


class EvalStep:
    """A function of model and batch, compiled for the layout of a train step; see `make_eval_step`."""

    def __init__(self, setup: Setup, fn: Callable | None = None, guard: Guard | None = None):
        predicting = getattr(setup.model, "predicting", None)
        if predicting is None:
            raise ConfigError(
                f"{setup.model!r} has no predictions: make it with jzero.from_flax or jzero.PipelineModule, or give it "
                "a method predicting(fn), see jzero/model.py"
            )
        self.setup, self.mesh, self.fn = setup, setup.mesh, fn
        other = replace(setup, model=predicting(fn))
        other = replace(other, passes=make_passes(other, read=lambda value: value))
        rows, replicated = batch_spec(setup.mesh), PartitionSpec()
        program = setup.jit(setup.manual(other.region.predict, replicated, replicated, replicated, out_specs=rows))
        self._run = Call("predictions", program, guard or Guard(setup.mesh, setup.config, setup.layouts))
        self._sharding, self._multiple = NamedSharding(setup.mesh, rows), setup.batch_sizes.micro * replicas(setup.mesh)

    def __repr__(self) -> str:
        return f"EvalStep({self.setup.model!r}, {getattr(self.fn, '__name__', 'predictions')})"

    def __call__(
        self, state: TrainState, batch: PyTree, extra: PyTree = None, *, numpy: bool = False, dropout: int | None = None
    ) -> PyTree:
        """Evaluate the function for every row, without dropout.

        Args:
          state: a TrainState, whose parameters are used.
          batch: any number of rows; with several processes, each passes all of them.
          extra: what the function takes besides the batch, as for a train step.
          numpy: return NumPy arrays with all rows, on every process.
          dropout: with the dropout of this micro-batch of the next train step; the batch has its rows.

        Returns:
          A pytree of arrays [rows, ...], sharded over the replicas if no row was padded.

        Raises:
          ConfigError: leaves of the batch with different numbers of rows, results without one row for each, processes
            with different batches.
        """
        check_alive(state)
        batch = host_arrays(batch)
        rows = _rows(batch)
        # Copies of a row are valid inputs, which zeros may not be.
        padded = jax.tree.map(partial(pad_rows, rows=-rows % self._multiple), batch)
        padded = place_batch(padded, self._sharding, rows + -rows % self._multiple)
        extra = place_extra(extra, self.mesh)
        key = None if dropout is None else jax.random.fold_in(state.rng, state.step)
        of = f" of {rows} rows{'' if dropout is None else ' with dropout'}"
        results = self._run(state.params, (padded,), extra, key, np.int32(dropout or 0), of=of)
        if numpy:
            results = to_numpy(results, self._run.guard.shared)
        return jax.tree.map(lambda x: x[:rows], results) if rows % self._multiple else results

    def metrics(self, state: TrainState, batches: Iterable[PyTree], extra: PyTree = None) -> dict[str, float]:
        """Average the function's results over a data set, whose last batch may be smaller.

        Args:
          batches: an iterable of batches. The function must return {name: [rows]}, or {name: Mean([rows], [rows])}
            for weighted means.

        Returns:
          {name: mean over all rows}.
        """
        sums: dict[str, np.ndarray] = {}
        for batch in batches:
            for name, x in self(state, batch, extra, numpy=True).items():
                pair = x if isinstance(x, Mean) else Mean(x, np.ones(len(x)))
                if any(np.ndim(part) != 1 for part in pair):
                    raise ConfigError(f"metric {name!r} has shape {np.shape(pair.sum)}: must have one number a row")
                sums[name] = sums.get(name, np.zeros(2)) + [np.sum(part, dtype=np.float64) for part in pair]
        if not sums:
            raise ConfigError("metrics: there are no batches, or the function returns no metrics")
        return {name: float(total / count) if count else float("nan") for name, (total, count) in sums.items()}


def to_numpy(results: PyTree, shared: bool) -> PyTree:
    """Convert arrays to NumPy arrays with all rows; `shared`: the rows lie on several processes, which all get them."""
    return multihost_utils.process_allgather(results, tiled=True) if shared else jax.device_get(results)


def _rows(batch: PyTree) -> int:
    leaves = named(batch)
    for name, x in leaves.items():
        check_dtype(name, x)
    shapes = {name: jnp.shape(x)[:1] for name, x in leaves.items()}
    if len(set(shapes.values())) != 1 or () in shapes.values() or (0,) in shapes.values():
        raise ConfigError(f"batch: all leaves need the same number of rows, at least one; found {shapes}")
    return next(iter(shapes.values()))[0]


def pad_rows(x: Any, rows: int) -> Any:
    """Append copies of the last row."""
    if not rows:
        return x
    xp: Any = jnp if isinstance(x, jax.Array) else np
    return xp.concatenate([x, xp.repeat(x[-1:], rows, axis=0)])
