"""The oracle of training in layouts: plain JAX and optax on one device; and how far a step is from it."""

from typing import Any, NamedTuple

import jax
import numpy as np
import optax


class Run(NamedTuple):
    seen: np.ndarray  # [steps, (loss, norm of the gradient)]
    params: Any
    opt_state: Any

    @property
    def losses(self):
        return self.seen[:, 0]

    @property
    def norms(self):
        return self.seen[:, 1]


def mean_of(model):
    """The loss of a model as one number; a model may give (sum, count)."""

    def mean(params, batch):
        loss = model.loss(params, batch, None)
        return loss[0] / loss[1] if isinstance(loss, tuple) else loss

    return mean


def stacked_loss(model, params, batch, rng):
    """The loss of a model with a stack, layer after layer."""
    x = model.prefix(params["ends"], batch, rng)
    for i in range(len(jax.tree.leaves(params["stack"])[0])):
        x = model.block(jax.tree.map(lambda w, i=i: w[i], params["stack"]), x, rng)
    return model.suffix(params["ends"], x, batch, rng)


def plain_loop(loss, params, batches, tx):
    """One step of optax for each batch; `loss(params, batch)` is a number."""

    @jax.jit
    def update(params, opt_state, batch):
        value, gradient = jax.value_and_grad(loss)(params, batch)
        updates, opt_state = tx.update(gradient, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, (value, optax.tree.norm(gradient))

    opt_state, seen = tx.init(params), []
    for batch in batches:
        params, opt_state, numbers = update(params, opt_state, batch)
        seen.append([float(x) for x in numbers])
    return Run(np.array(seen), *jax.device_get((params, opt_state)))


def train(step, params, batches):
    state, seen = step.init(jax.random.key(0), params), []
    for batch in batches:
        state, metrics = step(state, batch)
        assert not metrics["skipped"]
        seen.append((float(metrics["loss"]), float(metrics["grad_norm"])))
    return np.array(seen), state


def largest_error(params, known):
    """The largest difference of an element, relative to the largest one of its leaf.

    That counts as at least 0.01: a key's bias has no gradient, so all of it is rounding.
    """

    def error(a, b):
        return np.abs(a - b).max() / max(np.abs(b).max(), 1e-2)

    return max(jax.tree.leaves(jax.tree.map(error, jax.device_get(params), known)))


def greedy(model, params, tokens, padding, new):
    """Generate by recomputing everything for every token; rows begin at column 0."""
    logits = jax.jit(lambda params, tokens: model.module(params)(tokens).astype(np.float32))
    rows, length = tokens.shape
    full = np.zeros((rows, length + new), np.int32)
    for row, start in enumerate(padding):
        full[row, : length - start] = tokens[row, start:]
    everyone, last = np.arange(rows), length - padding - 1
    for _ in range(new):
        chosen = np.asarray(logits(params, full))[everyone, last].argmax(-1)
        last = last + 1
        full[everyone, last] = chosen
    moved = [np.r_[tokens[row, :start], full[row, : length + new - start]] for row, start in enumerate(padding)]
    return np.stack(moved)
