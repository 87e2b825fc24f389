"""Metrics beside the loss, in every way to train. Oracle: one pass over the global batch in NumPy-like plain JAX."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers.drawn import random_params
from helpers.engines import Net, config, printed, rows
from helpers.plain_flax import dense
from helpers.refusals import refuses
from helpers.sampling import keep
from helpers.steps import mesh, started_with_numpy

import jzero


class Measured(Net):
    """The loss is a Mean over the masked rows; metrics: of rows of uneven weight, of no rows, a plain scalar."""

    has_aux = True

    def block(self, layer, x, rng):
        return super().block(layer, x, None)  # without noise

    def suffix(self, ends, x, batch, rng):
        loss = super().suffix(ends, x, batch, rng)
        hit = jnp.abs(x @ ends["out"] - batch["y"]).mean(-1) < 1.2
        hits = jzero.Mean(jnp.sum(hit * batch["mask"]), batch["mask"].sum())
        return loss, {"hit": hits, "none": jzero.Mean(0.0, 0), "y": batch["y"].mean()}


def plain(params, batch):
    x = batch["x"]
    for layer in range(2):
        x = x + jnp.tanh(x @ params["stack"]["w"][layer])
    out, mask = x @ params["ends"]["out"], batch["mask"]
    hit = jnp.abs(out - batch["y"]).mean(-1) < 1.2
    loss = (((out - batch["y"]) ** 2).mean(-1) * mask).sum() / mask.sum()
    return loss, {"hit": (hit * mask).sum() / mask.sum(), "none": 0.0, "y": batch["y"].mean()}


@pytest.mark.parametrize(("stage", "pipe"), keep([(0, 1), (3, 1), (0, 2)], [(3, 1)]))
def test_metrics_are_means_over_the_global_batch(stage, pipe, capsys):
    params, batch = random_params(Measured()), rows(0)
    shown = config(stage, steps_per_print=1, optimizer=SGD["optimizer"])
    engine, *_ = jzero.initialize(model=Measured(), config=shown, mesh=mesh(pipe=pipe), params=params)
    (loss, metrics), gradient = jax.jit(jax.value_and_grad(plain, has_aux=True))(params, batch)
    expected = {name: float(x) for name, x in {"loss": loss, **metrics}.items()}
    assert 0.02 < expected["hit"] < 0.98
    loss = engine.eval_batch(batch)
    found = {name: float(x) for name, x in engine.eval_metrics.items()}
    assert found == pytest.approx(expected, rel=1e-5)
    also, metrics = engine.step_fn.evaluate(engine.state, batch)
    assert {name: float(x) for name, x in metrics.items()} | {"loss": float(also)} == found | {"loss": float(loss)}
    engine.train_batch(batch)
    expected["grad_norm"] = np.sqrt(sum((np.asarray(g) ** 2).sum() for g in jax.tree.leaves(gradient)))
    assert engine.metrics.keys() == expected.keys() | {"lr", "loss_scale", "skipped"}
    assert {name: float(engine.metrics[name]) for name in expected} == pytest.approx(expected, rel=1e-5)
    assert f", hit {float(engine.metrics['hit']):.4g}, " in printed(engine, capsys)


SGD = {"train_batch_size": 16, "optimizer": {"type": "SGD", "params": {"lr": 0.5}}}
X = np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32)
Y = (X.sum(-1) > 0).astype(np.int32)


def classify(logits, labels):
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return losses.mean(), {"accuracy": (logits.argmax(-1) == labels).mean()}


class Staged(nnx.Module):
    has_aux = True

    def __init__(self, rngs):
        self.stack = nnx.List([nnx.Linear(4, 4, rngs=rngs) for _ in range(2)])

    def prefix(self, batch):
        return batch["x"]

    def suffix(self, x, batch):
        return classify(x, batch["y"])


def test_has_aux_of_a_module_whose_layers_are_named():
    refuses(lambda: jzero.from_flax(Staged), 'layers in "stack": pass stack="stack"')
    step, state = started_with_numpy(jzero.from_flax(Staged, stack="stack"), SGD, mesh(2))
    params, x = random_params(step.model), X
    for i in range(2):
        x = dense(jax.tree.map(lambda w, i=i: w[i], params["stack"]), x)
    assert float(step.evaluate(state, {"x": X, "y": Y})[1]["accuracy"]) == pytest.approx((x.argmax(-1) == Y).mean())


NO_PAIR = r"has_aux=True: the loss must return \(loss, {name: metric}\), but returned an array of shape \(\)"
NAMES = "must be a string other than loss, grad_norm, lr, loss_scale, skipped"


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (lambda x: x, NO_PAIR),
        (lambda x: jzero.Mean(x, 1), r"returned Mean"),
        (lambda x: (x, {"lr": x}), f"metric 'lr': {NAMES}"),
        (lambda x: (x, {"rows": x[None]}), r"metric 'rows' has shape \(1,\): it must be a scalar or jzero.Mean"),
        (lambda x: (x, {"name": "high"}), r"metric 'name' is a str: it must be a scalar"),
        (lambda x: ((x, x), {}), r"loss is a tuple: it must be a scalar or jzero.Mean"),
    ],
)
def test_what_has_aux_refuses(output, message):
    model = jzero.from_flax(
        lambda rngs: nnx.Linear(4, 2, rngs=rngs), lambda m, b: output(m(b["x"]).mean()), has_aux=True
    )
    step = jzero.make_train_step(model, SGD, mesh=mesh(2))
    refuses(lambda: step.trace({"x": X}), message)
