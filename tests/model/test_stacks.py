"""Layer stacks from modules as people write them. Oracle: the same module with plain Flax and optax on one device."""

import functools
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers.sampling import keep
from helpers.stack_models import (
    BATCHES,
    GPT,
    LAYERS,
    ROWS,
    VOCAB,
    WIDTH,
    ScannedGPT,
    Small,
    SmallGPT,
    SmallScannedGPT,
    causal_mask,
    cross_entropy,
    loss_fn,
    plain_nnx,
)  # fmt: skip

import jzero
from jzero.tree import named

KEY = jax.random.key(0)
LAYOUTS = {
    "zero0": {"zero_optimization": {"stage": 0}},
    "zero3": {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}},
    "pipe2": {"mesh": {"pipe": 2, "data": 2, "zero": 2}, "zero_optimization": {"stage": 1}},
}


def config(layout, **more):
    return {
        "train_batch_size": ROWS,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0,
        "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
        **LAYOUTS[layout],
        **more,
    }


def train(step, state, batches=BATCHES):
    losses = []
    for batch in batches:
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    return state, losses


def compare(found, expected, **tolerance):
    found, expected = named(found), named(expected)
    assert found.keys() == expected.keys()
    for name, x in found.items():
        np.testing.assert_allclose(x, expected[name], **tolerance, err_msg=name)


@functools.cache
def expected(module):
    start = jzero.from_flax(module, loss_fn).init(KEY)
    return start, *plain_nnx(module, start, optax.sgd(0.5))


@pytest.mark.parametrize(
    ("module", "layout"),
    keep(
        [
            *((m, layout) for m in (GPT, ScannedGPT) for layout in ("zero3", "pipe2")),
            (SmallGPT, "zero0"),
            (SmallGPT, "pipe2"),
        ],
        [(SmallGPT, "zero0")],  # by default Linen's layers train in a pipeline
    ),
)
def test_a_stack_trains_as_on_one_device(module, layout):
    start, losses, params = expected(module)
    step = jzero.make_train_step(jzero.from_flax(module, loss_fn, stack="blocks"), config(layout))
    state, found = train(step, step.init(KEY, start))
    np.testing.assert_allclose(found, losses, rtol=1e-5)
    compare(step.model.places.join(jax.device_get(state.params)), params, rtol=1e-4, atol=1e-6)
    assert step.predict(state, BATCHES[0]["x"]).shape == (ROWS, *BATCHES[0]["x"].shape[1:], VOCAB)


def test_zero_3_gathers_the_layers_of_a_list_one_by_one():
    step = jzero.make_train_step(jzero.from_flax(SmallGPT, loss_fn, stack="blocks"), config("zero3"))
    ends = f"x{3 * WIDTH}xf32>"  # the gathers of `up` (G), and the products with it (D)
    lines = [line for line in step.lower(BATCHES[0]).as_text().splitlines() if line.endswith(ends)]
    found = "".join("G" * ("all_gather" in line) + "D" * ("dot_general" in line) for line in lines)
    assert found.startswith("GD" * LAYERS)
    assert found.count("G") == 2 * LAYERS  # again for the backward pass


# ---------------------------------------------------------------- what crosses the cut


def loss_and_gradients(model, params, batch, key=None):
    def loss(params):
        result = model.loss(params, batch, key)
        return result[0] if isinstance(result, tuple) else result

    return jax.jit(jax.value_and_grad(loss))(params)


class Tied(SmallGPT):
    """A mask that depends on the batch, a skip connection around the stack, the embedding as head."""

    def __call__(self, tokens):
        first = self.tokens(tokens)
        mask = causal_mask(tokens.shape[1]) & (tokens != 0)[:, None, None]
        return self.tokens.attend(self.run(first, mask) + first)


class Pairs(nnx.Module):
    """Layers from (x, total) to (x, total), and a keyword that every layer gets."""

    def __init__(self, rngs):
        self.layers = nnx.Sequential(*[Pair(rngs) for _ in range(3)])
        self.out = nnx.Linear(WIDTH, VOCAB, rngs=rngs)

    def __call__(self, tokens):
        x, total = jax.nn.one_hot(tokens, WIDTH), jnp.float32(0)
        for layer in self.layers.layers:
            x, total = layer(x, total=total)
        return self.out(x) + total


class Pair(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x, *, total):
        x = jnp.tanh(self.linear(x))
        return x, total + (x**2).mean()


class Encoder(nnx.Module):
    """A stack inside another module, beside a scan of something else."""

    def __init__(self, rngs):
        self.encoder = SmallGPT(rngs)

    def __call__(self, tokens):
        logits = self.encoder(tokens)
        return logits + jax.lax.scan(lambda total, x: (total + x, None), logits[0], logits)[0]


class ScannedEncoder(Encoder):
    def __init__(self, rngs):
        self.encoder = SmallScannedGPT(rngs)


@pytest.mark.parametrize(
    ("module", "path"),
    keep(
        [(Tied, "blocks"), (Pairs, "layers"), (Encoder, "encoder.blocks"), (ScannedEncoder, "encoder.blocks")],
        [(Tied, "blocks")],
    ),
)
def test_loss_and_gradients_are_those_of_the_module(module, path):
    plain, model = jzero.from_flax(module, loss_fn), jzero.from_flax(module, loss_fn, stack=path)
    params = plain.init(KEY)
    loss, gradients = loss_and_gradients(plain, params, BATCHES[0])
    found, of_stack = loss_and_gradients(model, model.adopt(params), BATCHES[0])
    np.testing.assert_allclose(found, loss, rtol=1e-6)
    compare(model.places.join(of_stack), gradients, rtol=1e-5, atol=1e-6)


def test_every_layer_draws_its_own_mask_and_the_ends_draw_once():
    class Layer(nnx.Module):
        def __init__(self, rngs):
            self.scale, self.dropout = nnx.Param(jnp.ones(())), nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x, rngs):
            return self.dropout(x) * self.scale[...] if rngs is None else nnx.Dropout(0.5)(x, rngs=rngs)

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.dropout, self.rngs = nnx.Dropout(0.5, rngs=rngs), rngs.fork()
            self.layers = nnx.List([Layer(rngs) for _ in range(3)])

        def __call__(self, batch):
            x, rngs = self.dropout(jnp.ones((512, 8))), self.rngs if batch["pass"].ndim else None
            y = x
            for layer in self.layers:
                y = layer(y, rngs)
            return x, y

    def loss(module, batch):
        x, y = module(batch)
        return (y != 0).mean(), {"first": (x != 0).mean(), "lost": ((y != 0) & (x == 0)).mean()}

    model = jzero.from_flax(Net, loss, stack="layers", has_aux=True)
    for own in (np.float32(1), np.ones(1, np.float32)):
        kept, ends = model.loss(model.init(KEY), {"pass": own}, KEY)
        assert float(kept) == pytest.approx(1 / 16, abs=0.02)  # one mask for all layers would leave a quarter
        assert float(ends["first"]) == pytest.approx(1 / 2, abs=0.05)
        assert ends["lost"] == 0  # the loss sees the x that the layers got


def test_batch_norm_in_layers_and_ends_moves_as_in_the_module():
    class Layer(nnx.Module):
        def __init__(self, rngs):
            self.linear, self.norm = nnx.Linear(8, 8, rngs=rngs), nnx.BatchNorm(8, momentum=0.5, rngs=rngs)

        def __call__(self, x):
            return x + self.norm(self.linear(x))

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.norm, self.calls = nnx.BatchNorm(8, momentum=0.5, rngs=rngs), nnx.Variable(jnp.zeros(()))
            self.layers = nnx.List([Layer(rngs) for _ in range(2)])

        def __call__(self, x):
            self.calls[...] += 1
            x = self.norm(x)
            for layer in self.layers:
                x = layer(x)
            return x

    def loss(module, x):
        return (module(x) ** 3).mean()

    x = np.random.default_rng(1).normal(size=(ROWS, 8)).astype(np.float32)
    plain, model = jzero.from_flax(Net, loss), jzero.from_flax(Net, loss, stack="layers")
    params = plain.init(KEY)
    _, expected = plain.loss(params, x, KEY)
    _, found = model.loss(model.adopt(params), x, KEY)
    found = {name: v for name, v in named(found).items() if name in model.state}
    assert {name for parts in map(model.names.known.get, found) for name in parts} == plain.state
    for name, value in found.items():
        parts = [expected[part] for part in model.names.known[name]]
        np.testing.assert_allclose(value, np.stack(parts) if len(parts) > 1 else parts[0], rtol=1e-5, err_msg=name)


@pytest.mark.slow
def test_a_criterion_extra_and_half_precision():
    def criterion(outputs, labels, extra):
        return cross_entropy(outputs.astype(jnp.float32), labels) * extra

    model = jzero.from_flax(SmallGPT, criterion=criterion, stack="blocks")
    step = jzero.make_train_step(model, config("zero3", bf16={"enabled": True}))
    plain = jzero.from_flax(SmallGPT, loss_fn)
    start = plain.init(KEY)
    loss = step.evaluate(step.init(KEY, start), (BATCHES[0]["x"], BATCHES[0]["y"]), extra=2.0)
    assert float(loss) == pytest.approx(2 * float(plain.loss(start, BATCHES[0], None)), rel=0.02)


# ---------------------------------------------------------------- prefix and suffix as methods


class Methods(SmallGPT):
    """Hidden states of all layers go into the head: not a chain, but written as one with two methods."""

    def make_blocks(self, rngs, rate):
        return nnx.List([Collecting(rngs) for _ in range(LAYERS)])

    def prefix(self, batch):
        return self.tokens(batch["x"]), jnp.zeros((*batch["x"].shape, WIDTH))

    def suffix(self, x, batch):
        return cross_entropy(self.outputs(x, batch), batch["y"])

    def outputs(self, x, batch):
        return self.out(x[1])

    def __call__(self, batch):
        x = self.prefix(batch)
        for block in self.blocks:
            x = block(x)
        return self.suffix(x, batch)


class Collecting(Small):
    def __call__(self, x):
        y = super().__call__(x[0], causal_mask(x[0].shape[1]))
        return y, x[1] + y


def test_prefix_and_suffix_as_methods():
    plain, model = jzero.from_flax(Methods, lambda m, b: m(b)), jzero.from_flax(Methods, stack="blocks")
    params = plain.init(KEY)
    loss, gradients = loss_and_gradients(plain, params, BATCHES[0])
    found, of_stack = loss_and_gradients(model, model.adopt(params), BATCHES[0])
    np.testing.assert_allclose(found, loss, rtol=1e-6)
    compare(model.places.join(of_stack), gradients, rtol=1e-5, atol=1e-6)
    logits = model.predicting(None).loss(model.adopt(params), BATCHES[0], None)
    assert logits.shape == (*BATCHES[0]["x"].shape, VOCAB)


# ------------------------------------------------------------------ fused matrices


class Fused(nnx.Module):
    """Gates and values side by side in each layer, and in the head."""

    fused_matrices: ClassVar = {
        "layers/0/up/kernel": (1, (6, 6)),
        "layers/1/up/kernel": (1, (6, 6)),
        "head/kernel": (1, (2, 2)),
    }

    def __init__(self, rngs):
        self.layers = nnx.List([FusedLayer(rngs) for _ in range(2)])
        self.head = nnx.Linear(6, 4, rngs=rngs)

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class FusedLayer(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(6, 12, rngs=rngs)

    def __call__(self, x):
        gate, value = jnp.split(self.up(x), 2, axis=-1)
        return x + jax.nn.silu(gate) * value


class Uneven(Fused):
    fused_matrices: ClassVar = {"layers/0/up/kernel": (1, (6, 6))}


def muon_step(module, stack):
    model = jzero.from_flax(module, lambda net, batch: (net(batch) ** 2).mean(), stack=stack)
    config = {"train_batch_size": 8, "optimizer": {"type": "Muon", "params": {"lr": 0.1}}}
    return jzero.make_train_step(model, config, mesh=jzero.make_mesh(data=1, devices=jax.devices()[:1]))


def test_fused_matrices_are_those_of_the_module():
    """Muon cuts a stacked weight like the layers' own."""
    found = []
    for stack in (None, "layers"):
        step = muon_step(Fused, stack)
        state, _ = step(step.init(jax.random.key(0)), np.random.default_rng(0).normal(size=(8, 6)).astype(np.float32))
        params = named(jax.device_get(state.params))
        up = [v for name, v in sorted(params.items()) if name.endswith("up/kernel")]
        found.append(np.concatenate([v.reshape(-1, 6, 12) for v in up]))
    np.testing.assert_allclose(found[0], found[1], atol=1e-5)  # weights of size 1, and uncut 0.1 off
    assert step.model.fused_matrices["stack/up/kernel"] == (1, (6, 6))


def test_layers_that_are_cut_differently():
    with pytest.raises(jzero.ConfigError, match=r"has None for layers/1/up/kernel and \(1, \(6, 6\)\) for layers/0/up"):
        muon_step(Uneven, "layers")


def test_an_unknown_fused_matrix():
    class Misspelt(Fused):
        fused_matrices: ClassVar = {"layers/0/down": (1, (6, 6))}

    with pytest.raises(jzero.ConfigError, match="no such parameter"):
        muon_step(Misspelt, "layers")
