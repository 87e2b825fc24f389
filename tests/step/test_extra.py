"""What a loss takes beside the batch, and losses over the global batch. Oracle: plain JAX and optax on one device."""

from functools import partial
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from helpers.oracle import plain_loop
from helpers.refusals import refuses
from helpers.sampling import keep, some
from helpers.steps import assert_close, mesh, run, settings, started

import jzero

ROWS, LR, STEPS = 16, 0.1, 3
RNG = np.random.default_rng(0)
X = RNG.normal(size=(STEPS, ROWS, 4)).astype(np.float32)
Y = RNG.normal(size=(STEPS, ROWS, 4)).astype(np.float32)


config = partial(settings, ROWS)


def compare(step, batches, loss, extras=None):
    """Train, and compare with optax on one device; `loss(params, batch, extra)` is plain JAX; return (start, state)."""
    start, losses, state = run(step, batches, extras=extras)
    with_extra = list(zip(batches, extras or [None] * STEPS, strict=True))
    plain = plain_loop(lambda params, both: loss(params, *both), start, with_extra, optax.sgd(LR))
    np.testing.assert_allclose(losses, plain.losses, rtol=1e-5)
    assert_close(state.params, plain.params)
    return start, state


def distance(model, batch, extra):
    TRACED.append(1)
    return jnp.mean((model(batch["x"]) - batch["x"] @ extra["teacher"]) ** 2) * extra["weight"]


def linear(params, batch, extra):
    out = batch["x"] @ params["kernel"] + params["bias"]
    return jnp.mean((out - batch["x"] @ extra["teacher"]) ** 2) * extra["weight"]


def nnx_student():
    return jzero.from_flax(lambda rngs: nnx.Linear(4, 4, rngs=rngs), distance)


def linen_student():
    def loss(module, batch, extra):
        return distance(module, batch, extra or TEACHERS[0])

    return jzero.from_flax(linen.Dense(4), loss, example_batch=BATCH)


TRACED = []
BATCHES = [{"x": x, "y": y} for x, y in zip(X, Y, strict=True)]
BATCH = BATCHES[0]
TEACHERS = [{"teacher": RNG.normal(size=(4, 4)).astype(np.float32), "weight": 1.0 + i} for i in range(STEPS)]


@pytest.mark.parametrize(
    ("make", "stage"), keep(list(product([nnx_student, linen_student], [0, 3])), [(nnx_student, 3)])
)
def test_a_teacher_that_moves(make, stage):
    step = jzero.make_train_step(make(), config(stage, accum=2), mesh=mesh())
    TRACED.clear()
    run(step, BATCHES[:1], extras=TEACHERS)
    traced = len(TRACED)
    _, state = compare(step, BATCHES, linear, TEACHERS)
    assert len(TRACED) == traced  # the teacher is an argument of one program
    found = step.evaluate(state, BATCH, TEACHERS[1])
    assert float(found) == pytest.approx(float(linear(jax.device_get(state.params), BATCH, TEACHERS[1])), rel=1e-5)


@pytest.mark.parametrize("outside", keep([False, True], [True]))
def test_the_three_call_loop_takes_it(outside):
    def criterion(outputs, target, extra):
        return jnp.mean((outputs - target @ extra["teacher"]) ** 2) * extra["weight"]

    def engine():
        module = lambda rngs: nnx.Linear(4, 4, rngs=rngs)  # noqa: E731
        model = jzero.from_flax(module, criterion=criterion) if outside else nnx_student()
        return jzero.initialize(model=model, config=config(accum=2), mesh=mesh())[0]

    def batch(x, y):
        return (x, x) if outside else {"x": x, "y": y}

    def forward(e, x, y, extra):
        return e.loss(e(x), x, extra) if outside else e(batch(x, y), extra=extra)

    one, other = engine(), engine()
    for x, y, teacher in zip(X, Y, TEACHERS, strict=True):
        expected = float(one.train_batch(iter([batch(x[:8], y[:8]), batch(x[8:], y[8:])]), extra=teacher))
        losses = []
        for part in (slice(0, 8), slice(8, 16)):
            losses.append(other.backward(forward(other, x[part], y[part], dict(teacher))))
            other.step()
        assert np.mean([float(loss) for loss in losses]) == pytest.approx(expected, rel=1e-6)
    jax.tree.map(np.testing.assert_array_equal, one.state.params, other.state.params)
    before = float(forward(other, X[0, :8], Y[0, :8], TEACHERS[1]))  # read before the step
    assert before == pytest.approx(float(forward(other.eval(), X[0, :8], Y[0, :8], TEACHERS[1])), rel=1e-6)
    other.train().backward(forward(other, X[0, :8], Y[0, :8], TEACHERS[0]))
    with pytest.raises(jzero.ConfigError, match="differ in teacher, weight: pass the same extra"):
        other.backward(forward(other, X[0, 8:], Y[0, 8:], TEACHERS[1]))
    if outside:
        refuses(lambda: other(X[0, :8], extra=TEACHERS[0]), r"engine.loss\(outputs, labels, extra\)")


def on_devices(x):
    return jax.device_put(x, jax.NamedSharding(mesh(), jax.P("zero")))


@pytest.mark.parametrize("kind", ["NumPy", "JAX", "PyTorch"])
def test_the_micro_batches_of_a_step_take_equal_arrays_of_any_kind(kind):
    make = {"NumPy": np.array, "JAX": on_devices}.get(kind) or pytest.importorskip("torch").tensor
    engine = jzero.initialize(model=nnx_student(), config=config(accum=2), mesh=mesh())[0]

    def call(part, extra):
        engine.backward(engine({"x": X[0, part], "y": Y[0, part]}, extra=extra))
        engine.step()

    first = TEACHERS[0]["teacher"]
    for part in (slice(0, 8), slice(8, 16)):
        call(part, {"teacher": make(first), "weight": 1.0})
    assert engine.global_steps == 1
    call(slice(0, 8), {"teacher": make(first), "weight": 1.0})
    other = np.array(first)
    other[3, 3] += 1
    refuses(lambda: call(slice(8, 16), {"teacher": make(other), "weight": 1.0}), "differ in teacher: pass the same")


def test_parameters_of_another_engine_stay_sharded_until_they_are_used():
    """A GAN's two players take alternating steps, each with the other's parameters."""

    def score(kernel, x):
        return jnp.tanh(x @ kernel).mean(-1)

    def generator_loss(model, batch, extra):
        return -score(extra["kernel"], model(batch["x"])).mean()

    def critic_loss(model, batch, extra):
        fake = batch["x"] @ extra["kernel"] + extra["bias"]
        return score(model.kernel[...], fake).mean() - score(model.kernel[...], batch["y"]).mean()

    def player(loss, i):
        model = jzero.from_flax(lambda rngs: nnx.Linear(4, 4, rngs=rngs), loss)
        return jzero.initialize(model=model, config=config(3), mesh=mesh(), rng=jax.random.key(i))[0]

    generator, critic = player(generator_loss, 0), player(critic_loss, 1)
    g, c = (jax.device_get(one.state.params) for one in (generator, critic))

    @jax.jit
    @jax.value_and_grad
    def plain_generator(g, c, x):
        return -score(c["kernel"], x @ g["kernel"] + g["bias"]).mean()

    @jax.jit
    @jax.value_and_grad
    def plain_critic(c, g, x, y):
        return score(c["kernel"], x @ g["kernel"] + g["bias"]).mean() - score(c["kernel"], y).mean()

    for batch in BATCHES:
        mine = float(critic.train_batch(batch, extra=generator.state.params))
        value, gradient = plain_critic(c, g, batch["x"], batch["y"])
        c = jax.tree.map(lambda p, d: p - LR * d, c, gradient)
        assert mine == pytest.approx(float(value), rel=1e-5, abs=1e-7)
        mine = float(generator.train_batch(batch, extra=critic.state.params))
        value, gradient = plain_generator(g, c, batch["x"])
        g = jax.tree.map(lambda p, d: p - LR * d, g, gradient)
        assert mine == pytest.approx(float(value), rel=1e-5, abs=1e-7)
    assert_close(generator.state.params, g)
    assert_close(critic.state.params, c)


def stacked(pipe):
    """A model with a stack, whose suffix takes the extra, and a PipelineModule, whose loss function takes it."""

    class Deep(nnx.Module):
        def __init__(self, rngs):
            self.stack = nnx.vmap(lambda rngs: nnx.Linear(4, 4, rngs=rngs))(rngs.fork(split=2))

        def prefix(self, batch):
            return batch["x"]

        def suffix(self, x, batch, extra):
            return jnp.mean((x - extra) ** 2)

    layer = jzero.LayerSpec(nnx.Linear, 4, 4)
    even = jzero.PipelineModule([layer, layer], loss_fn=lambda out, labels, extra: jnp.mean((out - extra) ** 2))
    odd = jzero.PipelineModule(
        [layer, jnp.tanh, jzero.LayerSpec(nnx.Linear, 4, 6), jzero.LayerSpec(nnx.Linear, 6, 4)],
        loss_fn=lambda out, labels, extra: jnp.mean((out - extra) ** 2), example_batch=(X[0], Y[0]),
    )  # fmt: skip
    return {"nnx": jzero.from_flax(Deep), "even": even, "odd": odd}


@pytest.mark.parametrize(("pipe", "kind"), keep(product([1, 2], ["nnx", "even", "odd"]), [(2, "odd")]))
def test_models_with_stages_take_it_too(kind, pipe):
    model = stacked(pipe)[kind]
    step, state = started(model, config(), mesh=mesh(2, pipe=pipe))
    params = jax.device_get(state.params)
    target = np.float32(0.5)
    if kind == "odd":
        layers = [params["layers"][k] for k in ("0", "2", "3")]
    else:
        layers = [jax.tree.map(lambda w, i=i: w[i], params["stack"]) for i in range(2)]
    x = X[0]
    for i, p in enumerate(layers):
        x = x @ p["kernel"] + p["bias"]
        x = np.tanh(x) if kind == "odd" and i == 0 else x
    batch = BATCH if kind == "nnx" else (X[0], Y[0])
    _, metrics = step(state, batch, target)
    assert float(metrics["loss"]) == pytest.approx(float(np.mean((x - target) ** 2)), rel=1e-5)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (lambda: {"teacher": "t5"}, r"extra: leaf 'teacher' is 't5': pass arrays and numbers"),
        (lambda: jax.device_put(np.ones(3), jax.devices()[7]), r"extra: leaf 'extra' is on 1 devices.*has 4"),
        (lambda: 2**40, "2\\*\\*40|1099511627776"),
    ],
)
def test_an_extra_that_is_refused(extra, message):
    step = jzero.make_train_step(nnx_student(), config(), mesh=mesh())
    with pytest.raises((jzero.ConfigError, OverflowError), match=message):
        step(step.init(jax.random.key(0)), BATCH, extra())


def test_a_linen_loss_that_reads_it_at_init_needs_an_example():
    def loss(module, batch, extra):
        return distance(module, batch, extra)

    with pytest.raises(jzero.ConfigError, match=r"loss_fn failed without its extra .*pass example_extra"):
        jzero.from_flax(linen.Dense(4), loss, example_batch=BATCH)
    with pytest.raises(jzero.ConfigError, match="example_extra is for a Linen module"):
        jzero.from_flax(lambda rngs: nnx.Linear(4, 4, rngs=rngs), loss, example_extra=TEACHERS[0])
    model = jzero.from_flax(linen.Dense(4), loss, example_batch=BATCH, example_extra=TEACHERS[0])
    step, state = started(model, config(), mesh=mesh())
    expected = linear(jax.device_get(state.params), BATCH, TEACHERS[1])
    step.lower(BATCH, TEACHERS[1])  # with a number among the arrays
    assert float(step(state, BATCH, TEACHERS[1])[1]["loss"]) == pytest.approx(float(expected), rel=1e-5)


def test_a_loss_that_does_not_take_an_extra():
    model = jzero.from_flax(lambda rngs: nnx.Linear(4, 4, rngs=rngs), lambda m, b: m(b["x"]).mean())
    step = jzero.make_train_step(model, config(), mesh=mesh())
    refuses(lambda: step(step.init(jax.random.key(0)), BATCH, 1.0), r"write def loss_fn\(module, batch, extra\)")


def by_keywords(outputs, labels, **keywords):
    return keywords.get("extra", 3.0) * outputs.mean()


def by_default(outputs, labels, extra=3.0):
    return extra * outputs.mean()


@pytest.mark.parametrize("function", [by_keywords, by_default])
def test_a_function_with_keywords_or_a_default(function):
    """It gets what the step gets, and without that nothing, so that its own default holds."""
    module = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    criterion = jzero.from_flax(lambda rngs: nnx.Linear(4, 4, rngs=rngs), criterion=function)
    loss = jzero.from_flax(lambda rngs: nnx.Linear(4, 4, rngs=rngs), lambda m, b, **extra: function(m(b), b, **extra))
    params, x = nnx.to_pure_dict(nnx.state(module)), X[0]
    expected = float(module(x).mean())
    for model, batch in ((criterion, (x, x)), (loss, x)):
        assert float(model.loss(params, batch, None)) == pytest.approx(3 * expected, rel=1e-5)
        assert float(model.loss(params, batch, None, extra=5.0)) == pytest.approx(5 * expected, rel=1e-5)


def test_a_large_array_that_the_loss_closes_over_is_named():
    table = jnp.ones((2**20, 5))  # 20 MiB

    def loss(model, batch):
        return (model(batch["x"]) + table[:, :4].mean()).mean()

    step, state = started(jzero.from_flax(lambda rngs: nnx.Linear(4, 4, rngs=rngs), loss), config(), mesh=mesh())
    with pytest.warns(UserWarning, match=r"closes over float32\[1048576, 5\] \(20 MiB\).*extra="):
        step(state, BATCH)


def contrastive(a, b, index=0, everything=lambda x: x):
    """InfoNCE: row i of `a` belongs to row i of `b`, all other rows are negatives."""
    logits = a @ everything(b).T
    labels = jnp.arange(len(a)) + index * len(a)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def normed(x):
    return x / jnp.linalg.norm(x, axis=-1, keepdims=True)


def clip_loss(model, batch):
    a, b = normed(model(batch["x"])), normed(model(batch["y"]))
    centre = jzero.mean(a.mean(0))
    both = [contrastive(*pair, jzero.axis_index(), jzero.all_gather) for pair in ((a, b), (b, a))]
    return sum(both) + jnp.sum(centre**2)


def plain_clip(params, batch, extra):
    a, b = (normed(batch[name] @ params["kernel"] + params["bias"]) for name in ("x", "y"))
    return contrastive(a, b) + contrastive(b, a) + jnp.sum(a.mean(0) ** 2)


@pytest.mark.parametrize(("stage", "data"), keep([(0, 4), (3, 2), (2, 1)], [(3, 2)]))
def test_a_contrastive_loss_sees_the_global_batch(stage, data):
    model = jzero.from_flax(lambda rngs: nnx.Linear(4, 4, rngs=rngs), clip_loss)
    step = jzero.make_train_step(model, config(stage), mesh=mesh(4 // data, data=data))
    start, state = compare(step, BATCHES, plain_clip)
    plainly = float(model.loss(start, BATCH, None))  # outside the step: the identity
    assert plainly == pytest.approx(float(plain_clip(start, BATCH, None)), rel=1e-6)
    expected = float(plain_clip(jax.device_get(state.params), BATCH, None))
    assert float(step.evaluate(state, BATCH)) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("equal", some([True, False], [False]))
def test_a_contrastive_loss_after_a_pipeline(equal):
    def loss(out, labels):
        return contrastive(normed(out), normed(labels), jzero.axis_index(), jzero.all_gather)

    odd = [jzero.LayerSpec(nnx.Linear, 4, 6), jnp.tanh, jzero.LayerSpec(nnx.Linear, 6, 4)]
    layers = [jzero.LayerSpec(nnx.Linear, 4, 4)] * 2 if equal else odd
    model = jzero.PipelineModule(layers, loss_fn=loss, example_batch=(X[0], Y[0]))

    def plainly(params, batch, extra):
        if equal:
            parts = [jax.tree.map(lambda w, i=i: w[i], params["stack"]) for i in range(2)]
        else:
            parts = [params["layers"]["0"], params["layers"]["2"]]
        x = batch[0] @ parts[0]["kernel"] + parts[0]["bias"]
        x = (x if equal else jnp.tanh(x)) @ parts[1]["kernel"] + parts[1]["bias"]
        return contrastive(normed(x), normed(batch[1]))

    compare(jzero.make_train_step(model, config(), mesh=mesh(2, pipe=2)), list(zip(X, Y, strict=True)), plainly)
