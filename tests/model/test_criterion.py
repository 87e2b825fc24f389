"""A criterion outside of the model: `loss = engine.loss(engine(inputs), labels)`, beside plain Flax and optax."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers.drawn import random_params
from helpers.engines import assert_same
from helpers.plain_flax import Normed, dense, train_module
from helpers.plain_flax import cross_entropy as criterion
from helpers.refusals import refuses
from helpers.steps import settings

import jzero

MICRO, ACCUM, WIDTH, CLASSES = 2, 2, 6, 3
KEY = jax.random.key(0)
loss_of = jax.jit(criterion)


class Net(nnx.Module):
    def __init__(self, rngs, rate=0.0):
        self.first = nnx.Linear(WIDTH, 16, rngs=rngs)
        self.drop = nnx.Dropout(rate, rngs=rngs)
        self.last = nnx.Linear(16, CLASSES, rngs=rngs)

    def __call__(self, x):
        return self.last(self.drop(nnx.relu(self.first(x))))


class Stacked(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.stack = nnx.vmap(lambda rngs: nnx.Linear(WIDTH, WIDTH, rngs=rngs))(rngs.split(4))
        self.last = nnx.Linear(WIDTH, CLASSES, rngs=rngs)

    prefix = lambda self, inputs: self.first(inputs)  # noqa: E731
    suffix = lambda self, x, inputs: self.last(x)  # noqa: E731

    def whole(self, x):
        x = self.first(x)
        for i in range(4):
            x = x @ self.stack.kernel[i] + self.stack.bias[i]
        return self.last(x)


def with_accuracy(outputs, labels):
    return criterion(outputs, labels), {"accuracy": (outputs.argmax(-1) == labels).mean()}


def config(stage=0, accum=ACCUM):
    return settings(None, stage, accum, train_micro_batch_size_per_gpu=MICRO)


def build(model=Net, stage=0, pipe=1, criterion=criterion):
    mesh = jzero.make_mesh(pipe=pipe)
    return jzero.initialize(model=model, criterion=criterion, config=config(stage), mesh=mesh)[0]


def data(engine, steps=3):
    """[step][micro-batch] -> (inputs, labels), for all replicas."""
    rng, n = np.random.default_rng(0), engine.step_fn.micro_size
    some = lambda: (rng.normal(size=(n, WIDTH)).astype("f4"), rng.integers(0, CLASSES, n))  # noqa: E731
    return [[some() for _ in range(ACCUM)] for _ in range(steps)]


def run(engine, micro_batches, read=lambda outputs, labels: None):
    losses, seen = [], []
    for inputs, labels in micro_batches:
        outputs = engine(inputs)
        seen.append(read(outputs, labels))
        loss = engine.loss(outputs, labels)
        engine.backward(loss)
        engine.step()
        losses.append(loss)
    return [float(loss) for loss in losses], seen


def plain(model, steps, call):
    """The losses of plain Flax on global batches, and its module."""
    module, batches = model(nnx.Rngs(KEY)), [[*map(np.concatenate, zip(*parts, strict=True))] for parts in steps]
    return train_module(module, lambda module, batch: criterion(call(module, batch[0]), batch[1]), batches), module


@pytest.mark.slow
def test_the_tutorials_loop_is_plain_training():
    engine, whole = build(Stacked, 3, 2), build(Stacked, 3, 2)
    steps = data(engine)
    losses = [np.mean(run(engine, micro_batches)[0]) for micro_batches in steps]
    expected, module = plain(Stacked, steps, Stacked.whole)
    np.testing.assert_allclose(losses, expected, rtol=2e-6)
    np.testing.assert_allclose(losses, [float(whole.train_batch(iter(parts))) for parts in steps], rtol=1e-6)
    assert_same(engine.state.params, whole.state.params)  # the loop is train_batch, bit for bit
    kernel = engine.state.params["ends"]["last"]["kernel"]
    np.testing.assert_allclose(kernel, module.last.kernel[...], rtol=1e-4, atol=2e-6)
    x, labels = steps[0][0]
    np.testing.assert_allclose(engine.eval_batch((x, labels)), criterion(module.whole(x), labels), rtol=1e-5)


@pytest.fixture(scope="module")
def step():
    """A step of a built module, which keeps its values."""
    return build(Net(nnx.Rngs(KEY))).step_fn


def test_outputs_are_those_of_the_module(step):
    engine = jzero.Engine(step, KEY)
    (x, labels), (other, _) = data(engine)[0]
    both, twice = np.concatenate([x, other]), np.concatenate([labels, labels])
    of_both = np.asarray(nnx.jit(Net.__call__)(Net(nnx.Rngs(KEY)), both))
    outputs, expected = engine(x), of_both[: len(x)]
    assert repr(outputs) == "Outputs(not computed yet)"
    np.testing.assert_allclose(outputs, expected, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(engine.loss(outputs, labels).item(), loss_of(expected, labels), rtol=1e-6)
    np.testing.assert_array_equal(jnp.argmax(outputs, axis=-1), outputs.argmax(-1))  # functions, methods, operators
    np.testing.assert_array_equal(outputs[0] @ np.eye(CLASSES), next(iter(outputs)))
    assert (len(outputs), outputs.shape) == (len(x), (len(x), CLASSES))
    outputs = engine.eval()(both)  # any number of micro-batches, in their order
    np.testing.assert_allclose(outputs, of_both, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(engine.loss(outputs, twice), loss_of(outputs.value, twice), rtol=1e-6)
    np.testing.assert_allclose(engine.predict(x[:3]), expected[:3], rtol=1e-6, atol=1e-6)


@pytest.mark.slow
def test_the_outputs_have_the_dropout_of_the_step():
    """What a loop reads is what the step trains on: the criterion of the outputs is the loss, in each micro-batch."""
    engine = build(lambda rngs: Net(rngs, rate=0.5), 3)
    for micro_batches in data(engine):
        losses, read = run(engine, micro_batches, lambda outputs, labels: (criterion(outputs.value, labels), outputs))
        np.testing.assert_allclose(losses, [float(loss) for loss, _ in read], rtol=2e-6)
    x, _ = micro_batches[-1]
    assert engine.eval()(x)[0, 0] == engine(x)[0, 0] != read[-1][1].value[0, 0]


def test_state_and_metrics():
    """BatchNorm's statistics are one device's of each whole micro-batch; metrics of the criterion are means."""
    model = jzero.from_flax(Normed, criterion=with_accuracy, has_aux=True)
    engine = jzero.initialize(model=model, config=config(3, 1), params=Normed(nnx.Rngs(KEY)))[0]
    steps = [micro_batches[:1] for micro_batches in data(engine)]
    expected, module = plain(Normed, steps, Normed.__call__)
    for loss, micro_batches in zip(expected, steps, strict=True):
        found, accuracy = run(engine, micro_batches, lambda outputs, labels: np.mean(outputs.argmax(-1) == labels))
        np.testing.assert_allclose(found, [loss], rtol=2e-6)
        np.testing.assert_allclose(engine.metrics["accuracy"], accuracy[0], rtol=1e-6)
    np.testing.assert_allclose(engine.state.params["norm"]["mean"], module.norm.mean[...], rtol=1e-5, atol=1e-6)
    module.eval()
    x = steps[-1][0][0]
    np.testing.assert_allclose(engine.eval()(x), nnx.jit(Normed.__call__)(module, x), rtol=1e-4, atol=1e-5)


class Two(nn.Module):
    @nn.compact
    def __call__(self, inputs):
        x = nn.Dense(CLASSES)(inputs["x"])
        return {"logits": x, "norm": (x**2).sum()}


def test_linen_and_outputs_of_any_form():
    x, labels = np.ones((16, WIDTH), "f4"), np.zeros(16, int)
    model = jzero.from_flax(
        Two(), criterion=lambda outputs, labels: criterion(outputs["logits"], labels), example_batch=({"x": x}, labels)
    )
    engine = jzero.initialize(model=model, config=config(3), params=random_params(model))[0]
    outputs = engine({"x": x})
    loss = engine.loss(outputs, labels)
    engine.backward(loss)
    refuses(lambda: outputs["logits"], r"predictions: norm has shape \(\) for 2 rows")
    logits = dense(jax.device_get(engine.state.params["Dense_0"]), x)
    np.testing.assert_allclose(loss.item(), loss_of(logits, labels), rtol=1e-6)


def test_calls_that_do_not_fit(step):
    engine = jzero.Engine(step, KEY)
    (x, labels), (other, _) = data(engine)[0]
    first, outputs = engine(x), engine(other)
    old = r"engine.loss.*not those that the last engine\(inputs\) returned"
    calls = [
        *((lambda y=y: engine.loss(y, labels), old) for y in (first, outputs * 1)),
        # the caller's function: an array, with no way to the parameters
        (lambda: engine.backward(criterion(outputs, labels)),
         r"engine.loss\(outputs, labels\)\).*into the loss function"),
        (lambda: engine(x).detach().cpu().numpy(), r"Outputs.detach\(\): write np.asarray\(outputs\)"),
        (lambda: engine.eval_batch((x, labels, labels)), r"with a criterion .* a batch is \(inputs, labels\)"),
        (lambda: engine.eval_batch({"x": x, "labels": labels}), "with a criterion"),
        (lambda: engine.eval_batch((x, labels), extra=1.0),
         r"extra: the criterion does not take it; write def criterion\(outputs"),
        (lambda: engine.loss(engine(x[:3]), labels), r"leaf 'batch' has shape \(3, 6\)"),
    ]  # fmt: skip
    for call, words in calls:
        refuses(call, words)
    unread = engine(x)
    engine.backward(engine.loss(unread, labels))
    engine.set_gradient_accumulation_boundary(True)
    engine.step()
    refuses(lambda: unread.shape, r"these outputs were not read before .*before engine.step\(\)")


def test_models_that_do_not_fit():
    for make, words in (
        (lambda: build(jzero.from_flax(Net, lambda m, b: 0.0)), r"from_flax\(Net\) has a loss already"),
        (lambda: jzero.from_flax(Net, criterion, criterion=criterion), "loss_fn and criterion are both given"),
        (lambda: build(nn.Dense(3)), "a Linen module needs an example too"),
        (lambda: jzero.from_flax(nn.Dense(2), criterion=criterion), "and example_batch"),
        (lambda: build(criterion="mse"), "criterion = 'mse': must be a function"),
        (lambda: build(jzero.from_flax(Net(nnx.Rngs(KEY)), lambda module, batch: 0.0), criterion=None).loss(None, None),
            r"this model has its loss inside, so write loss = engine\(batch\)"),
    ):  # fmt: skip
        refuses(make, words)


def test_modules_of_torch():
    nn = pytest.importorskip("torch").nn
    for function, words in (
        (nn.CrossEntropyLoss(), r"criterion = CrossEntropyLoss is a torch.nn.Module.*optax.softmax_"),
        (nn.functional.cross_entropy, r"criterion = cross_entropy is a function of PyTorch.*optax.softmax_"),
    ):
        refuses(lambda function=function: build(criterion=function), words)
    for model in (nn.Linear(3, 3), nn.Linear):
        refuses(lambda model=model: build(model), r"model = Linear is a torch.nn.Module.*write it in Flax")
