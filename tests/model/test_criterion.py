"""A criterion outside of the model: `outputs = engine(inputs)`, `loss = engine.loss(outputs, labels)`, and so on.

The oracle is plain Flax and optax on one device.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers.engines import assert_same
from helpers.sampling import keep, some

import jzero

MICRO, ACCUM, WIDTH, CLASSES = 2, 2, 8, 4


class Net(nnx.Module):
    def __init__(self, rngs, rate=0.0):
        self.first = nnx.Linear(WIDTH, 16, rngs=rngs)
        self.drop = nnx.Dropout(rate, rngs=rngs)
        self.last = nnx.Linear(16, CLASSES, rngs=rngs)

    def __call__(self, x):
        return self.last(self.drop(nnx.relu(self.first(x))))


class Stacked(nnx.Module):
    """A layer stack, so that a pipeline can cut it."""

    def __init__(self, rngs):
        @nnx.split_rngs(splits=4)
        @nnx.vmap
        def block(rngs):
            return nnx.Linear(WIDTH, WIDTH, rngs=rngs)

        self.first, self.stack = nnx.Linear(WIDTH, WIDTH, rngs=rngs), block(rngs)
        self.last = nnx.Linear(WIDTH, CLASSES, rngs=rngs)

    def prefix(self, inputs):
        return self.first(inputs)

    def suffix(self, x, inputs):
        return self.last(x)


class Normed(nnx.Module):
    def __init__(self, rngs):
        # Without a bias: BatchNorm takes it away, and Adam turns the rounding of its zero gradient into steps.
        self.first, self.norm = nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=rngs), nnx.BatchNorm(WIDTH, rngs=rngs)
        self.last = nnx.Linear(WIDTH, CLASSES, rngs=rngs)

    def __call__(self, x):
        return self.last(self.norm(self.first(x)))


def criterion(outputs, labels):
    return optax.softmax_cross_entropy_with_integer_labels(outputs, labels).mean()


def with_accuracy(outputs, labels):
    return criterion(outputs, labels), {"accuracy": (outputs.argmax(-1) == labels).mean()}


def config(stage=0, **more):
    return {
        "train_micro_batch_size_per_gpu": MICRO,
        "gradient_accumulation_steps": ACCUM,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.02, "weight_decay": 0}},
        "gradient_clipping": 0,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        **more,
    }


def data(engine, steps=3):
    """[step][micro-batch] -> (inputs, labels), for all replicas."""
    rng, n = np.random.default_rng(0), engine.step_fn.micro_size
    return [
        [(rng.normal(size=(n, WIDTH)).astype("f4"), rng.integers(0, CLASSES, n)) for _ in range(ACCUM)]
        for _ in range(steps)
    ]


def run(engine, steps):
    """The tutorial's five lines, with the mean loss of each step."""
    means = []
    for micro_batches in steps:
        losses = []
        for inputs, labels in micro_batches:
            outputs = engine(inputs)
            loss = engine.loss(outputs, labels)
            engine.backward(loss)
            engine.step()
            losses.append(loss)
        means.append(np.mean([float(loss) for loss in losses]))
    return means


def plain(model, steps, call=lambda module, x: module(x)):
    """The same training with Flax and optax alone, on global batches: the losses and the parameters."""
    graph, params, rest = nnx.split(model(nnx.Rngs(jax.random.key(0))), nnx.Param, ...)
    tx = optax.adam(0.02)
    state, losses = tx.init(params), []

    @jax.jit
    def update(params, rest, state, x, labels):
        def loss(params):
            module = nnx.merge(graph, params, rest, copy=True)
            value = criterion(call(module, x), labels)
            return value, nnx.split(module, nnx.Param, ...)[2]

        (value, rest), gradient = jax.value_and_grad(loss, has_aux=True)(params)
        updates, state = tx.update(gradient, state, params)
        return optax.apply_updates(params, updates), rest, state, value

    for micro_batches in steps:
        x, labels = (np.concatenate(parts) for parts in zip(*micro_batches, strict=True))
        params, rest, state, value = update(params, rest, state, x, labels)
        losses.append(float(value))
    return losses, nnx.merge(graph, params, rest)


def through_stack(module, x):
    x = module.first(x)
    for i in range(4):
        x = x @ module.stack.kernel[i] + module.stack.bias[i]
    return module.last(x)


def build(model, stage=0, pipe=1, **more):
    return jzero.initialize(
        model=model, criterion=criterion, config=config(stage, **more), mesh=jzero.make_mesh(pipe=pipe)
    )[0]


TRAINED = [
    (Net, Net.__call__, 0, 1),
    (Stacked, through_stack, 3, 2),
    (Net, Net.__call__, 3, 1),
    (Stacked, through_stack, 3, 1),
    (Stacked, through_stack, 0, 2),
]


@pytest.mark.parametrize(
    ("model", "call", "stage", "pipe"),
    some(TRAINED, TRAINED[1:2]),
)
def test_the_tutorials_loop_is_plain_training(model, call, stage, pipe):
    engine, whole = build(model, stage, pipe), build(model, stage, pipe)
    steps = data(engine)
    losses = run(engine, steps)
    expected, module = plain(model, steps, call)
    np.testing.assert_allclose(losses, expected, rtol=2e-6)
    np.testing.assert_allclose(losses, [float(whole.train_batch(iter(parts))) for parts in steps], rtol=1e-6)
    assert_same(engine.state.params, whole.state.params)  # the loop is train_batch, bit for bit
    ours = engine.state.params["ends"] if model is Stacked else engine.state.params
    np.testing.assert_allclose(ours["last"]["kernel"], module.last.kernel[...], rtol=1e-4, atol=2e-6)
    x, labels = steps[0][0]
    np.testing.assert_allclose(engine.eval_batch((x, labels)), criterion(call(module, x), labels), rtol=1e-5)


@pytest.mark.parametrize(
    ("model", "call", "stage", "pipe"),
    keep(
        [(Net, Net.__call__, 0, 1), (Stacked, through_stack, 3, 1), (Stacked, through_stack, 3, 2)],
        [(Net, Net.__call__, 0, 1)],
    ),
)
def test_outputs_are_those_of_the_module(model, call, stage, pipe):
    engine = build(model, stage, pipe)
    module = model(nnx.Rngs(jax.random.key(0)))
    (x, labels), (other, _) = data(engine)[0]
    outputs = engine(x)
    assert repr(outputs) == "Outputs(not computed yet)"
    expected = call(module, x)
    np.testing.assert_allclose(outputs, expected, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(engine.loss(outputs, labels).item(), criterion(expected, labels), rtol=1e-6)
    np.testing.assert_array_equal(jnp.argmax(outputs, axis=-1), outputs.argmax(-1))  # functions, methods, operators
    np.testing.assert_array_equal(outputs[0] @ np.eye(CLASSES), next(iter(outputs)))
    assert (len(outputs), outputs.shape) == (len(x), (len(x), CLASSES))
    outputs = engine.eval()(np.concatenate([x, other]))  # any number of micro-batches, in their order
    np.testing.assert_allclose(outputs, call(module, np.concatenate([x, other])), rtol=1e-6, atol=1e-6)
    loss = engine.loss(outputs, np.concatenate([labels, labels]))
    np.testing.assert_allclose(loss, criterion(outputs.value, np.concatenate([labels, labels])), rtol=1e-6)
    np.testing.assert_allclose(engine.predict(x[:3]), call(module, x[:3]), rtol=1e-6, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("stage", keep([0, 3], [3]))
def test_the_outputs_have_the_dropout_of_the_step(stage):
    """What a loop reads is what the step trains on: the criterion of the outputs is the loss, in each micro-batch."""
    engine = build(lambda rngs: Net(rngs, rate=0.5), stage)
    for micro_batches in data(engine):
        read, losses = [], []
        for x, labels in micro_batches:
            outputs = engine(x)
            read.append(float(criterion(outputs.value, labels)))
            losses.append(engine.loss(outputs, labels))
            engine.backward(losses[-1])
            engine.step()
        np.testing.assert_allclose([loss.item() for loss in losses], read, rtol=2e-6)
    assert engine.eval()(x)[0, 0] == engine(x)[0, 0] != outputs.value[0, 0]


def test_state_and_metrics():
    """BatchNorm's statistics are one device's of each whole micro-batch; metrics of the criterion are means."""
    model = jzero.from_flax(Normed, criterion=with_accuracy, has_aux=True)
    engine = jzero.initialize(model=model, config=config(3, gradient_accumulation_steps=1))[0]
    steps = [micro_batches[:1] for micro_batches in data(engine)]
    expected, module = plain(Normed, steps)
    for i, ((x, labels),) in enumerate(steps):
        outputs = engine(x)
        accuracy = np.mean(outputs.argmax(-1) == labels)
        loss = engine.loss(outputs, labels)
        engine.backward(loss)
        engine.step()
        np.testing.assert_allclose(loss.item(), expected[i], rtol=2e-6)
        np.testing.assert_allclose(engine.metrics["accuracy"], accuracy, rtol=1e-6)
    np.testing.assert_allclose(engine.state.params["norm"]["mean"], module.norm.mean[...], rtol=1e-5, atol=1e-6)
    module.eval()
    np.testing.assert_allclose(engine.eval()(x), module(x), rtol=1e-4, atol=1e-5)


def test_a_built_module_keeps_its_values():
    """DeepSpeed's way: `model=Net(...)`."""
    module = Net(nnx.Rngs(7))
    engine = build(module, 3)
    x, _ = data(engine)[0][0]
    np.testing.assert_allclose(engine(x), module(x), rtol=1e-6, atol=1e-6)


def test_linen_and_outputs_of_any_form():
    class Two(nn.Module):
        @nn.compact
        def __call__(self, inputs):
            x = nn.Dense(CLASSES)(inputs["x"])
            return {"logits": x, "norm": (x**2).sum()}

    def of_logits(outputs, labels):
        return criterion(outputs["logits"], labels)

    x, labels = np.ones((16, WIDTH), "f4"), np.zeros(16, int)
    example = {"x": x}, labels
    model = jzero.from_flax(Two(), criterion=of_logits, example_batch=example)
    engine = jzero.initialize(model=model, config=config(3))[0]
    outputs = engine({"x": x})
    loss = engine.loss(outputs, labels)
    engine.backward(loss)
    with pytest.raises(jzero.ConfigError, match=r"predictions: norm has shape \(\) for 2 rows"):
        outputs["logits"]
    kernel = engine.state.params["Dense_0"]["kernel"]
    np.testing.assert_allclose(loss.item(), criterion(x @ jnp.asarray(kernel), labels), rtol=1e-6)


# ------------------------------------------------------------------------------------------- mistakes


def test_calls_that_do_not_fit():
    engine = build(Net)
    (x, labels), (other, _) = data(engine)[0]
    first, outputs = engine(x), engine(other)
    for wrong in (first, outputs * 1, np.asarray(outputs)):
        with pytest.raises(jzero.ConfigError, match=r"engine.loss.*not those that the last engine\(inputs\) returned"):
            engine.loss(wrong, labels)
    with pytest.raises(jzero.ConfigError, match=r"engine.loss\(outputs, labels\)\).*into the loss function"):
        engine.backward(criterion(outputs, labels))  # the caller's function: an array, with no way to the parameters
    with pytest.raises(jzero.ConfigError, match=r"Outputs.detach\(\): write np.asarray\(outputs\)"):
        engine(x).detach().cpu().numpy()
    unread = engine(x)
    engine.backward(engine.loss(unread, labels))
    engine.set_gradient_accumulation_boundary(True)
    engine.step()
    with pytest.raises(jzero.ConfigError, match=r"these outputs were not read before .*before engine.step\(\)"):
        unread.shape  # noqa: B018
    for batch in ({"x": x, "labels": labels}, (x, labels, labels), x):
        with pytest.raises(jzero.ConfigError, match=r"with a criterion .* a batch is \(inputs, labels\)"):
            engine.eval_batch(batch)
    with pytest.raises(jzero.ConfigError, match=r"extra: the criterion does not take it; write def criterion\(outputs"):
        engine.eval_batch((x, labels), extra=1.0)
    with pytest.raises(jzero.ConfigError, match=r"leaf 'batch' has shape \(3, 8\)"):
        engine.loss(engine(x[:3]), labels)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: build(jzero.from_flax(Net, lambda m, b: 0.0)), "from_flax(Net) has a loss already"),
        (lambda: jzero.from_flax(Net, criterion, criterion=criterion), "loss_fn and criterion are both given"),
        (lambda: build(nn.Dense(3)), "a Linen module needs an example too"),
        (
            lambda: jzero.initialize(model=Net, criterion="mse", config=config()),
            "criterion = 'mse': must be a function",
        ),
        (lambda: jzero.initialize(model=Net, config=config()), "model is Net, which has no init(rng)"),
        (lambda: jzero.from_flax(Net), "loss_fn(module, batch) is missing, or criterion"),
    ],
)
def test_models_that_do_not_fit(make, words):
    with pytest.raises(jzero.ConfigError) as error:
        make()
    assert words in str(error.value)


def test_a_model_with_its_loss_inside_has_no_engine_loss():
    model = jzero.from_flax(Net, lambda module, batch: criterion(module(batch[0]), batch[1]))
    engine = jzero.initialize(model=model, config=config())[0]
    with pytest.raises(jzero.ConfigError, match=r"this model has its loss inside, so write loss = engine\(batch\)"):
        engine.loss(None, None)


def test_modules_of_torch():
    torch = pytest.importorskip("torch")
    with pytest.raises(jzero.ConfigError, match=r"criterion = CrossEntropyLoss is a torch.nn.Module.*optax.softmax_"):
        jzero.initialize(model=Net, criterion=torch.nn.CrossEntropyLoss(), config=config())
    with pytest.raises(jzero.ConfigError, match=r"criterion = cross_entropy is a function of PyTorch.*optax.softmax_"):
        jzero.initialize(model=Net, criterion=torch.nn.functional.cross_entropy, config=config())
    for model in (torch.nn.Linear(3, 3), torch.nn.Linear):
        with pytest.raises(jzero.ConfigError, match=r"model = Linear is a torch.nn.Module.*write it in Flax"):
            jzero.initialize(model=model, criterion=criterion, config=config())
