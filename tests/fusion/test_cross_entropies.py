"""Cross-entropies of users' own losses by kernels: against float64, against the library's function, and in a step."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from helpers.cuda import on_gpu
from helpers.programs import h100s
from helpers.sampling import keep
from helpers.steps import mesh, settings
from test_fused import passes_over
from test_softmax import exact, losses_and_gradient

import jzero
from jzero.kernels.fusion.cross_entropies import _Match, cross_entropies
from jzero.tracing.equations import operations
from jzero.tracing.fused import fused

V, KERNEL = 1024, "softmax_rows"


def of_optax(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels)


def of_log_softmax(logits, labels):
    return -jnp.take_along_axis(jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1), labels[..., None], -1)[..., 0]


def squeezed(logits, labels):
    found = jnp.take_along_axis(jax.nn.log_softmax(logits.astype(jnp.float32)), jnp.expand_dims(labels, -1), axis=-1)
    return -found.squeeze(-1)


def numbers(*shape, dtype=jnp.float32, labels=jnp.int32):
    rng = np.random.default_rng(0)
    logits, labels = (4 * rng.normal(size=(*shape, V))).astype(dtype), rng.integers(0, V, shape).astype(labels)
    return logits, labels, rng.normal(size=shape).astype(np.float32)


def kernels(f, *args):
    return sum(operation.name == KERNEL for operation in operations(jax.make_jaxpr(f)(*args).jaxpr))


def by_kernels(f):
    return fused(f, losses=True)


# each form, shape and dtype
@pytest.mark.parametrize(
    ("form", "shape", "dtype", "of_labels"),
    [
        (of_optax, (5,), jnp.bfloat16, jnp.int32),
        (of_log_softmax, (2, 3), jnp.float32, jnp.uint16),
        (squeezed, (2, 1, 3), jnp.float16, jnp.int32),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_values_and_gradients(form, shape, dtype, of_labels):
    logits, labels, g = numbers(*shape, dtype=dtype, labels=of_labels)
    assert kernels(by_kernels(form), logits, labels) == 1
    found = losses_and_gradient(by_kernels(form), logits, labels, g)
    assert [x.dtype for x in found] == [jnp.float32, dtype]
    highest, log_total, picked, dx = exact(logits, labels, V, g)
    rtol = {jnp.float32: 1e-6, jnp.bfloat16: 2.0**-8, jnp.float16: 2.0**-11}[dtype]
    np.testing.assert_allclose(found[0], log_total - (picked - highest), rtol=1e-6)
    np.testing.assert_allclose(np.asarray(found[1], np.float64), dx, rtol=4 * rtol, atol=1e-6)


def test_labels_that_are_no_columns():
    """Negative ones count from the end, as in NumPy; others give NaN and a finite gradient."""
    logits, _, g = numbers(8)
    labels = jnp.array([-1, -V, -V - 1, V, V - 1, 2**31 - 1, -(2**31), 0])
    found, plain = (losses_and_gradient(f, logits, labels, g) for f in (by_kernels(of_optax), of_optax))
    assert np.isnan(found[0]).tolist() == [False, False, True, True, False, True, True, False]
    for a, b in zip(found, plain, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)


def with_accuracy(logits, labels):
    logits = logits.astype(jnp.float32)
    return of_optax(logits, labels).mean(), (logits.argmax(-1) == labels).mean()


def with_z_loss(logits, labels):
    logits = logits.astype(jnp.float32)
    z = jax.nn.logsumexp(logits, axis=-1) ** 2
    return (of_optax(logits, labels) * (logits.argmax(-1) == labels) + 1e-2 * z).mean()


def in_float64(logits, labels):
    z = jax.nn.logsumexp(logits, axis=-1)
    picked = jnp.take_along_axis(logits, labels[:, None], -1)[:, 0]
    return ((z - picked) * (logits.argmax(-1) == labels) + 1e-2 * z**2).mean()


def test_shares_of_a_gradient_are_summed_before_they_are_rounded():
    """A z-loss and the loss read the same logits; rounded apart, their sum would be rounded a second time."""
    logits, labels, _ = numbers(16, dtype=jnp.bfloat16)
    for f, dtype in ((with_z_loss, "float32"), (with_accuracy, "bfloat16")):  # the second has no share
        traced = operations(jax.make_jaxpr(by_kernels(f))(logits, labels).jaxpr)
        assert [str(one.eqn.invars[0].aval.dtype) for one in traced if one.name == KERNEL] == [dtype]
    found = np.asarray(jax.jit(jax.grad(by_kernels(with_z_loss)))(logits, labels), np.float64)
    with jax.enable_x64(True):
        exact = jax.jit(jax.grad(in_float64))(logits.astype(np.float64), labels)
    np.testing.assert_allclose(found, exact, rtol=1.001 * 2.0**-8, atol=1e-12)


def test_a_search_compares_few_equations(monkeypatch):
    """Of 5,000 equations with 40 wide shapes those alone that could end a loss, and for the shapes of exponentials."""
    compared, same = [], _Match.same
    monkeypatch.setattr(_Match, "same", lambda *args: compared.append(args) or same(*args))

    def wide(x):
        total = 0.0
        for i in range(40):
            h = jnp.ones((4, 8 + i, V)) * x
            for _ in range(40):
                h = jnp.sin(h) + h * h
            total += (jnp.exp(h) if i < 4 else h).sum()
        return total

    jaxpr = jax.make_jaxpr(wide)(1.0).jaxpr
    assert len(jaxpr.eqns) >= 5000
    assert cross_entropies(jaxpr) == {}
    assert len(compared) <= 40


def logs_of(logits):
    return jax.nn.log_softmax(logits.astype(jnp.float32))


def take(x, labels, **more):
    return jnp.take_along_axis(x, labels[..., None], -1, **more)[..., 0]


def with_entropy(logits, labels):
    logs = logs_of(logits)
    return take(logs, labels) - (jnp.exp(logs) * logs).sum(-1)


def of_other_logits(logits, labels):
    logits = logits.astype(jnp.float32)
    return jax.nn.logsumexp(logits, axis=-1) - take(2 * logits, labels)


def through_the_maximum(logits, labels):
    logits = logits.astype(jnp.float32)
    logs = logits - logits.max(-1, keepdims=True)
    return take(logs - jnp.log(jnp.exp(logs).sum(-1, keepdims=True)), labels)


with_integers = optax.softmax_cross_entropy_with_integer_labels
ALONE = {
    "without a cast": with_integers,  # its result is rounded to 16 bits
    "clipped": lambda logits, labels: take(logs_of(logits), labels, mode="clip"),
    "with entropy": with_entropy,
    "of several columns": lambda logits, labels: jnp.take_along_axis(logs_of(logits), jnp.stack([labels] * 2, -1), -1),
    "of rows": lambda logits, labels: with_integers(logits.astype(jnp.float32).T, labels, axis=0),
    "of some": lambda logits, labels: with_integers(
        logits.astype(jnp.float32), labels, where=jnp.broadcast_to(jnp.arange(V) < V - 3, logits.shape)
    ),
    "of other logits": of_other_logits,
    "through the maximum": through_the_maximum,
    "of few columns": lambda logits, labels: of_optax(logits[..., : V // 2], labels),
    "of odd columns": lambda logits, labels: of_optax(logits[..., :-1], labels),
    "of small labels": lambda logits, labels: of_optax(logits, labels.astype(jnp.int16)),
    **{f"in {f.__name__}": f(of_optax) for f in (jax.checkpoint, jax.vmap)},
}


@pytest.mark.parametrize("name", ALONE)
def test_what_is_not_exactly_that_loss_is_left_alone(name):
    f, (logits, labels, _) = ALONE[name], numbers(3, dtype=jnp.bfloat16)
    logits, labels = (logits[None], labels[None]) if name == "in vmap" else (logits, labels)
    assert kernels(by_kernels(f), logits, labels) == 0
    run = jax.jit(lambda f: f(logits, labels), static_argnums=0)  # one name: what is the same compiles once
    np.testing.assert_array_equal(run(by_kernels(f)), run(f))


# ---------------------------------------------------------------- in a step

ROWS, LENGTH, WIDTH = 4, 8, 128


class Words(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(V, WIDTH, rngs=rngs)
        self.layers = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(2)])

    def __call__(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.embed.attend(x)


def loss_fn(model, batch):
    counts = batch["labels"] > V // 4
    return jnp.where(counts, of_optax(model(batch["inputs"]), jnp.where(counts, batch["labels"], 0)), 0).mean()


TOKENS = np.random.default_rng(0).integers(0, V, (2, ROWS, LENGTH)).astype(np.int32)
BATCH = {"inputs": TOKENS[0], "labels": TOKENS[1]}
LINEN = linen.Sequential([linen.Embed(V, WIDTH), linen.Dense(4 * WIDTH), linen.gelu, linen.Dense(V)])
MODELS = {
    "stack": lambda: jzero.from_flax(lambda rngs: Words(rngs), loss_fn, stack="layers"),
    "linen": lambda: jzero.from_flax(LINEN, loss_fn, example_batch=BATCH),
}


def step_of(model, config, **degrees):
    return jzero.make_train_step(MODELS[model](), settings(ROWS) | config, mesh=mesh(**degrees))


STEPS = [
    ("linen", {"gradient_accumulation_steps": 2}),
    ("stack", {"stack": {"unroll": False}, "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}),
]


@pytest.mark.parametrize(("model", "config"), keep(STEPS, STEPS[1:]), ids=str)
def test_a_step_by_kernels_is_the_same_step(model, config, monkeypatch):
    results = []
    for triton in (False, True):
        monkeypatch.setattr("jzero.passes.sequential.has_triton", lambda device, triton=triton: triton)
        step = step_of(model, config, zero=2)
        assert (KERNEL in step.lower(BATCH).as_text(debug_info=True)) == triton
        state, metrics = step(step.init(jax.random.key(0)), BATCH)
        results.append(jax.tree.leaves((metrics["loss"], metrics["grad_norm"], state.params)))
    for a, b in zip(*results, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)


def test_a_group_of_devices_keeps_the_loss(monkeypatch):
    monkeypatch.setattr("jzero.passes.sequential.has_triton", lambda device: True)
    divided = {"tensor_parallel": {"dimensions": {"kernel": 1}}}
    assert KERNEL not in step_of("stack", divided, tensor=2, zero=1).lower(BATCH).as_text(debug_info=True)


@on_gpu
def test_the_loss_of_a_step_on_a_gpu_is_two_kernels():
    """No other pass reads or writes logits. GELU and its bias are kernels, although nobody named a stack."""
    config = settings(ROWS, bf16={"enabled": True})
    step = jzero.make_train_step(MODELS["linen"](), config, mesh=h100s())
    text = step.lower(BATCH).compile().as_text()
    found = re.findall(r'custom_call_target="__gpu\$xla\.gpu\.triton".*op_name="[^"]*/(softmax_\w+|map_parts)', text)
    assert sorted(found) == ["map_parts"] * 2 + ["softmax_gradient", "softmax_sums"]
    assert not passes_over(text, f"(?:{ROWS},{LENGTH}|{ROWS * LENGTH}),{V}", dtype="")
