"""Predictions under the training layout. Oracle: the plain Flax module, or the layers by hand, on one device."""

from functools import partial
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from helpers import tensor_models
from helpers.drawn import random_params
from helpers.engines import LINE
from helpers.named_models import model_of
from helpers.plain_flax import dense, mean_square
from helpers.refusals import refuses
from helpers.sampling import keep, some
from helpers.steps import mesh, settings, started_with_numpy

import jzero
from models.llama import LlamaConfig

ROWS = 16
X = np.random.default_rng(0).normal(size=(ROWS, 4)).astype(np.float32)

config = partial(settings, ROWS, accum=2)


def assert_close(found, expected):
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


class Net(nnx.Module):
    def __init__(self, rngs):
        self.first, self.norm = nnx.Linear(4, 8, rngs=rngs), nnx.BatchNorm(8, rngs=rngs)
        self.drop, self.last = nnx.Dropout(0.5, rngs=rngs), nnx.Linear(8, 3, rngs=rngs)

    def __call__(self, x, *, deterministic: bool = False):
        return self.last(self.drop(self.norm(self.first(x)), deterministic=deterministic))


NET = jzero.from_flax(Net, mean_square)


def plain(model, params, x, **told):
    return jax.jit(lambda params: model.module(params)(x, **told))(params)


@pytest.mark.parametrize(("rows", "stage"), keep([(16, 3), (33, 3), (1, 0)], [(33, 3)]))
def test_any_number_of_rows(stage, rows):
    params = random_params(NET)  # also the running statistics
    engine = jzero.initialize(model=NET, config=config(stage), mesh=mesh(), params=params)[0]
    x = np.random.default_rng(1).normal(size=(rows, 4)).astype(np.float32)
    found = engine.predict(x)
    assert found.shape == (rows, 3)
    assert_close(found, plain(NET, params, x, deterministic=True))
    numpy = engine.predict(x, numpy=True)
    assert isinstance(numpy, np.ndarray)
    np.testing.assert_array_equal(numpy, found)


class Told(linen.Module):
    """Trains unless its caller says otherwise; its BatchNorm names the axis of jax.pmap, for which it was written."""

    @linen.compact
    def __call__(self, x, train: bool = True):
        norm = linen.BatchNorm(use_running_average=not train, momentum=0.5, axis_name="batch")
        x = norm(linen.Dense(4)(x))
        return linen.Dropout(0.5, deterministic=not train)(x)


def test_a_call_is_told_whether_it_trains():
    model = jzero.from_flax(Told(), criterion=lambda y, labels: jnp.mean((y - labels) ** 2), example_batch=(X, X))
    before = random_params(model)
    engine = jzero.initialize(model=model, config=config(3, accum=1), mesh=mesh(), params=before)[0]
    engine.train_batch((X, X))
    params = dict(jax.device_get(engine.state.params))
    stats = params.pop("batch_stats")
    means = [old["mean"] for old in before["batch_stats"].values()] + [dense(before["Dense_0"], X).mean(0)]
    np.testing.assert_allclose(stats["BatchNorm_0"]["mean"], np.mean(means, 0), rtol=1e-5, atol=1e-7)
    out = jax.jit(partial(Told().apply, train=False))({"params": params, "batch_stats": stats}, X)
    assert_close(engine.predict(X[:5]), out[:5])
    np.testing.assert_allclose(engine.eval_batch((X, X)), np.mean((np.asarray(out) - X) ** 2), rtol=1e-5)


LLAMA = LlamaConfig(4, 32, 4, 2, 48, vocab_size=64)
TOKENS = np.random.default_rng(0).integers(0, 64, (6, 8)).astype(np.int32)
SCANNED, INTERLEAVED = {"stack": {"unroll": False}}, {"pipeline": {"schedule": "interleaved", "chunks": 2}}
DECODERS = [(3, 1, SCANNED), (1, 2, INTERLEAVED)]


@pytest.mark.parametrize(("stage", "pipe", "more"), some(DECODERS, DECODERS[:1]))
def test_logits_of_a_decoder(stage, pipe, more):
    model = model_of(LLAMA)
    step, state = started_with_numpy(model, config(stage, **more), mesh(2, pipe=pipe))
    last = jzero.make_eval_step(
        model, lambda module, x, batch: x.x_BSD[:, -1], config(stage, **more), mesh=mesh(2, pipe=pipe)
    )
    plain, batch = model.module(jax.device_get(state.params)), {"inputs": TOKENS}
    np.testing.assert_allclose(step.predict(state, batch), plain(TOKENS), rtol=1e-4, atol=1e-5)
    found = plain.head(plain.norm(last(state, batch)))
    np.testing.assert_allclose(found, plain(TOKENS)[:, -1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("pipe", "equal"), keep(product([1, 2], [True, False]), [(2, True)]))
def test_outputs_of_a_pipeline_module(equal, pipe):
    layer = jzero.LayerSpec(nnx.Linear, 4, 4)
    odd = [jzero.LayerSpec(nnx.Linear, 4, 6), jnp.tanh, jzero.LayerSpec(nnx.Linear, 6, 3)]
    model = jzero.PipelineModule(
        [layer, layer] if equal else odd,
        loss_fn=lambda out, labels: jnp.mean((out - labels) ** 2),
        example_batch=(X, X[:, : 4 if equal else 3]),
    )
    step, state = started_with_numpy(model, config(), mesh(2, pipe=pipe))
    assert_close(step.predict(state, X[:9]), plain(model, random_params(model), X[:9]))


def hits(module, batch):
    logits = module(batch["x"], deterministic=True)
    right = logits.argmax(-1) == batch["y"]
    return {"accuracy": right, "of ones": jzero.Mean(right & (batch["y"] == 1), batch["y"] == 1)}


def test_metrics_of_a_data_set_whose_last_batch_is_small():
    evaluate = jzero.make_eval_step(NET, hits, config(3), mesh=mesh())
    _, state = started_with_numpy(NET, config(3), mesh())
    rng = np.random.default_rng(2)
    x, y = rng.normal(size=(45, 4)).astype(np.float32), rng.integers(0, 3, 45).astype(np.int32)
    right = np.asarray(plain(NET, random_params(NET), x, deterministic=True)).argmax(-1) == y
    batches = [{"x": x[i : i + 16], "y": y[i : i + 16]} for i in range(0, 45, 16)]
    found = evaluate.metrics(state, batches)
    assert found == pytest.approx({"accuracy": right.mean(), "of ones": right[y == 1].mean()})


CELL = jzero.from_flax(lambda rngs: nnx.GRUCell(4, 4, rngs=rngs), lambda module, x: module(x, x)[0].mean())


def test_what_is_refused():
    for model, batch, words in (
        (LINE, X, "has no predictions"),
        (tensor_models.model("nnx"), tensor_models.batches("nnx")[0], r"outputs\(x, batch\)"),
        (CELL, X, r"missing a required argument: 'inputs'.*jzero.make_eval_step\(model, fn"),
    ):
        step, state = started_with_numpy(model, config(), mesh())
        refuses(lambda step=step, state=state, batch=batch: step.predict(state, batch), words)
    _, state = started_with_numpy(NET, config(3), mesh())
    total = jzero.make_eval_step(NET, lambda m, b: m(b).sum(), config(3), mesh=mesh())
    wide = jzero.make_eval_step(NET, lambda m, b: {"logits": m(b)}, config(3), mesh=mesh())
    refuses(lambda: total(state, X), r"has shape \(\) for 2 rows")
    refuses(lambda: total(state, {"a": X, "b": X[:3]}), "same number of rows")
    refuses(lambda: wide.metrics(state, [X]), r"metric 'logits' has shape \(16, 3\)")
