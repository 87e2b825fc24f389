"""What a loss takes beside the batch, and losses over the global batch. Oracle: plain JAX and optax on one device."""

import importlib.util
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from helpers.drawn import random_params
from helpers.plain_flax import dense
from helpers.refusals import refuses
from helpers.sampling import keep
from helpers.steps import compare, mesh, run, settings, started_with_numpy

import jzero

ROWS, STEPS = 16, 3
RNG = np.random.default_rng(0)
X = RNG.normal(size=(STEPS, ROWS, 4)).astype(np.float32)
Y = RNG.normal(size=(STEPS, ROWS, 4)).astype(np.float32)
BATCHES = [{"x": x, "y": y} for x, y in zip(X, Y, strict=True)]
BATCH = BATCHES[0]
TEACHERS = [{"teacher": RNG.normal(size=(4, 4)).astype(np.float32), "weight": 1.0 + i} for i in range(STEPS)]
TRACED = []

SGD, config = optax.sgd(0.1), partial(settings, ROWS)


def distance(model, batch, extra):
    TRACED.append(1)
    return jnp.mean((model(batch["x"]) - batch["x"] @ extra["teacher"]) ** 2) * extra["weight"]


def linear(params, batch, extra):
    return jnp.mean((dense(params, batch["x"]) - batch["x"] @ extra["teacher"]) ** 2) * extra["weight"]


def nnx_student(loss=distance, **more):
    return jzero.from_flax(lambda rngs: nnx.Linear(4, 4, rngs=rngs), loss, **more)


def linen_student(**more):
    return jzero.from_flax(linen.Dense(4), distance, example_batch=BATCH, **more)


def test_a_teacher_that_moves():
    step = jzero.make_train_step(linen_student(example_extra=TEACHERS[0]), config(3, accum=2), mesh=mesh())
    step.trace(BATCH, TEACHERS[1])  # with a number among the arrays
    TRACED.clear()
    params = random_params(step.model)
    run(step, BATCHES[:1], params, TEACHERS)
    traced = len(TRACED)
    _, state = compare(step, BATCHES, linear, SGD, params, TEACHERS)
    assert len(TRACED) == traced  # the teacher is an argument of one program
    found = step.evaluate(state, BATCH, TEACHERS[1])
    assert float(found) == pytest.approx(float(linear(jax.device_get(state.params), BATCH, TEACHERS[1])), rel=1e-5)


def on_devices(x):
    return jax.device_put(x, jax.NamedSharding(mesh(), jax.P("zero")))


def tensor(x):
    return importlib.import_module("torch").tensor(x) if importlib.util.find_spec("torch") else np.array(x)


@pytest.mark.parametrize("outside", keep([False, True], [True]))
def test_the_three_call_loop_takes_it(outside):
    """Each micro-batch of a step with an array of its own, of any kind, with the same values."""

    def criterion(outputs, target, extra):
        return jnp.mean((outputs - target @ extra["teacher"]) ** 2) * extra["weight"]

    model = nnx_student(None, criterion=criterion) if outside else nnx_student()
    step, params = jzero.make_train_step(model, config(accum=2), mesh=mesh()), random_params(model)
    one, other = (jzero.Engine(step, jax.random.key(0), params=params) for _ in range(2))

    def forward(x, extra):
        return other.loss(other(x), x, extra) if outside else other({"x": x}, extra=extra)

    for x, teacher, kind in zip(X, TEACHERS, (np.array, on_devices, tensor), strict=True):
        halves, losses = (x[:8], x[8:]), []
        expected = float(one.train_batch(((half, half) if outside else {"x": half} for half in halves), extra=teacher))
        for half in halves:
            losses.append(other.backward(forward(half, {**teacher, "teacher": kind(teacher["teacher"])})))
            other.step()
        assert np.mean([float(loss) for loss in losses]) == pytest.approx(expected, rel=1e-6)
    jax.tree.map(np.testing.assert_array_equal, one.state.params, other.state.params)
    before = float(forward(halves[0], teacher))  # read before the step
    other.eval()
    assert before == pytest.approx(float(forward(halves[0], teacher)), rel=1e-6)
    other.train().backward(forward(halves[0], teacher))
    changed = {"teacher": np.where(np.arange(16).reshape(4, 4) == 15, 0, teacher["teacher"]), "weight": 2.0}
    with pytest.raises(jzero.ConfigError, match="differ in teacher, weight: pass the same extra"):
        other.backward(forward(halves[1], changed))
    if outside:
        refuses(lambda: other(X[0, :8], extra=teacher), r"engine.loss\(outputs, labels, extra\)")


def test_what_is_refused():
    step, state = started_with_numpy(nnx_student(), config(), mesh())
    for extra, words in (
        ({"teacher": "t5"}, r"extra: leaf 'teacher' is 't5': pass arrays and numbers"),
        (jax.device_put(np.ones(3), jax.devices()[7]), r"extra: leaf 'extra' is on 1 devices.*has 4"),
        (2**40, "2\\*\\*40|1099511627776"),
    ):
        with pytest.raises((jzero.ConfigError, OverflowError), match=words):
            step(state, BATCH, extra)
    takes_none, state = started_with_numpy(nnx_student(lambda m, b: m(b["x"]).mean()), config(), mesh())
    refuses(lambda: takes_none(state, BATCH, 1.0), r"write def loss_fn\(module, batch, extra\)")
    refuses(linen_student, r"loss_fn failed without its extra .*pass example_extra")
    refuses(lambda: nnx_student(example_extra=TEACHERS[0]), "example_extra is for a Linen module")


@pytest.mark.parametrize(
    "function",
    [lambda y, labels, **more: more.get("extra", 3.0) * y.mean(), lambda y, labels, extra=3.0: extra * y.mean()],
    ids=["keywords", "default"],
)
def test_a_function_with_keywords_or_a_default(function):
    """It gets what the step gets, and without that nothing, so that its own default holds."""
    criterion = nnx_student(None, criterion=function)
    loss = nnx_student(lambda m, b, **extra: function(m(b), b, **extra))
    params, x = random_params(criterion), X[0]
    expected = float(dense(params, x).mean())
    for model, batch in ((criterion, (x, x)), (loss, x)):
        assert float(model.loss(params, batch, None)) == pytest.approx(3 * expected, rel=1e-5)
        assert float(model.loss(params, batch, None, extra=5.0)) == pytest.approx(5 * expected, rel=1e-5)


def test_a_large_array_that_the_loss_closes_over_is_named():
    table = jnp.ones((2**20, 5))  # 20 MiB
    model = nnx_student(lambda m, batch: (m(batch["x"]) + table[:, :4].mean()).mean())
    with pytest.warns(UserWarning, match=r"closes over float32\[1048576, 5\] \(20 MiB\).*extra="):
        jzero.make_train_step(model, config(), mesh=mesh()).lower(BATCH)


def contrastive(a, b, index=0, everything=lambda x: x):
    """InfoNCE: row i of `a` belongs to row i of `b`, all other rows are negatives."""
    logits = a @ everything(b).T
    labels = jnp.arange(len(a)) + index * len(a)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def normed(x):
    return x / jnp.linalg.norm(x, axis=-1, keepdims=True)


def plain_clip(params, batch, extra):
    a, b = (normed(dense(params, batch[name])) for name in ("x", "y"))
    return contrastive(a, b) + jnp.sum(a.mean(0) ** 2)


def test_a_contrastive_loss_sees_the_global_batch():
    def clip_loss(model, batch):
        a, b = normed(model(batch["x"])), normed(model(batch["y"]))
        centre = jzero.mean(a.mean(0))
        return contrastive(a, b, jzero.axis_index(), jzero.all_gather) + jnp.sum(centre**2)

    model = nnx_student(clip_loss)
    step = jzero.make_train_step(model, config(3), mesh=mesh(2, data=2))
    start, _ = compare(step, BATCHES, plain_clip, SGD, random_params(model))
    ours, plain = jax.jit(lambda p: (model.loss(p, BATCH, None), plain_clip(p, BATCH, None)))(start)
    assert float(ours) == pytest.approx(float(plain), rel=1e-6)  # outside the step: the identity


def test_a_contrastive_loss_with_a_factor_after_a_pipeline():
    def loss(out, labels, extra):
        found = contrastive(normed(out), normed(labels), jzero.axis_index(), jzero.all_gather)
        return extra * found, {"cosine": (normed(out) * normed(labels)).sum(-1).mean()}

    odd = [jzero.LayerSpec(nnx.Linear, 4, 6), jnp.tanh, jzero.LayerSpec(nnx.Linear, 6, 4)]
    model = jzero.PipelineModule(odd, loss_fn=loss, has_aux=True, example_batch=(X[0], Y[0]))
    step, state = started_with_numpy(model, config(), mesh(2, pipe=2))
    _, metrics = step(state, (X[0], Y[0]), np.float32(0.5))
    layers = random_params(model)["layers"]
    out = dense(layers["2"], np.tanh(dense(layers["0"], X[0])))
    expected = jax.jit(lambda: contrastive(normed(out), normed(Y[0])))()
    assert float(metrics["loss"]) == pytest.approx(0.5 * float(expected), rel=1e-5)
    cosine = (normed(out) * normed(Y[0])).sum(-1).mean()
    assert float(metrics["cosine"]) == pytest.approx(float(cosine), rel=1e-5)
