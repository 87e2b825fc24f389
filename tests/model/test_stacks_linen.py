"""Layer stacks from Linen modules as people write them. Oracle: the same module with plain Flax and optax."""

import functools

import jax
import numpy as np
import optax
import pytest
from flax import linen
from helpers.sampling import keep
from helpers.stack_models import BATCHES, HEADS, ROWS, VOCAB, WIDTH, causal_mask, cross_entropy, plain

import jzero
from jzero.tree import named

KEY = jax.random.key(0)


class Block(linen.Module):
    rate: float = 0.0
    norm: bool = False

    @linen.compact
    def __call__(self, x, mask, training):
        h = linen.MultiHeadDotProductAttention(HEADS)(x, mask=mask)
        h = linen.Dropout(self.rate)(linen.Dense(WIDTH)(h), deterministic=not training)
        if self.norm:
            h = linen.BatchNorm(use_running_average=not training, momentum=0.5)(h)
        return x + h


class Scanned(Block):
    @linen.compact
    def __call__(self, x, mask, training):
        h = linen.MultiHeadDotProductAttention(HEADS)(x, mask=mask)
        return x + linen.Dropout(self.rate)(linen.Dense(WIDTH)(h), deterministic=not training), None


class GPT(linen.Module):
    """Layers in a loop, or scanned; a tied head, so that the suffix runs the embedding too."""

    rate: float = 0.0
    norm: bool = False
    scan: bool = False

    @linen.compact
    def __call__(self, tokens, training=False):
        embed, mask = linen.Embed(VOCAB, WIDTH, name="embed"), causal_mask(tokens.shape[1])
        x = embed(tokens)
        if self.norm:
            x = linen.BatchNorm(use_running_average=not training, momentum=0.5)(x)
        if self.scan:
            split = {"params": True, "dropout": True}
            layers = linen.scan(
                Scanned, variable_axes={"params": 0}, split_rngs=split, in_axes=linen.broadcast, length=2
            )
            return embed.attend(layers(self.rate, name="layers")(x, mask, training)[0])
        for i in range(2):
            x = Block(self.rate, self.norm, name=f"layers_{i}")(x, mask, training)
        return embed.attend(x)


class SetUp(linen.Module):
    def setup(self):
        self.embed, self.out = linen.Embed(VOCAB, WIDTH), linen.Dense(VOCAB)
        self.layers = [Block() for _ in range(2)]

    def __call__(self, tokens, training=False):
        x, mask = self.embed(tokens), causal_mask(tokens.shape[1])
        for layer in self.layers:
            x = layer(x, mask, training=training)
        return self.out(x)


class Outer(linen.Module):
    @linen.compact
    def __call__(self, tokens, training=False):
        return SetUp(name="encoder")(tokens, training)


def loss_fn(module, batch, rng):
    return cross_entropy(module(batch["x"], training=rng is not None), batch["y"])


def make(module, path="layers"):
    return jzero.from_flax(module, loss_fn, stack=path, example_batch=BATCHES[0])


@functools.cache
def expected(module):
    start = jzero.from_flax(module, loss_fn, example_batch=BATCHES[0]).init(KEY)

    def loss(params, batch):
        return cross_entropy(module.apply({"params": params}, batch["x"]), batch["y"])

    return start, *plain(loss, start, optax.sgd(0.5))


@pytest.mark.parametrize(
    ("module", "mesh", "stage"),
    keep(
        [(module, mesh, stage) for module in (GPT(), GPT(scan=True)) for mesh, stage in (({}, 3), ({"pipe": 2}, 1))],
        [(GPT(), {"pipe": 2}, 1)],
    ),
)
def test_a_stack_trains_as_on_one_device(module, mesh, stage):
    start, losses, params = expected(module)
    config = {
        "train_batch_size": ROWS,
        "gradient_clipping": 0,
        "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
        "gradient_accumulation_steps": 2,
        "mesh": mesh,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    step = jzero.make_train_step(make(module), config)
    state, found = step.init(KEY, {"params": start}), []
    for batch in BATCHES:
        state, metrics = step(state, batch)
        found.append(float(metrics["loss"]))
    np.testing.assert_allclose(found, losses, rtol=1e-5)
    after = named(step.model.places.join(jax.device_get(state.params)))
    for name, x in named(params).items():
        np.testing.assert_allclose(after[name], x, rtol=1e-4, atol=1e-6, err_msg=name)


@pytest.mark.parametrize(
    ("module", "path"),
    keep([(GPT(), "layers"), (Outer(), "encoder.layers")], [(Outer(), "encoder.layers")]),
)
def test_the_loss_is_that_of_the_module(module, path):
    model = make(module, path)
    variables = module.init(KEY, BATCHES[0]["x"])
    loss = jax.jit(model.loss, static_argnums=2)(model.adopt(variables), BATCHES[0], None)
    np.testing.assert_allclose(
        loss, cross_entropy(module.apply(variables, BATCHES[0]["x"]), BATCHES[0]["y"]), rtol=1e-5
    )
    assert set(model.names.known) == set(named(model.init(KEY)))


def test_batch_norm_in_layers_and_ends_moves_as_in_the_module():
    module = GPT(norm=True)
    model, variables = make(module), module.init(KEY, BATCHES[0]["x"])
    loss, found = jax.jit(model.loss)(model.adopt(variables), BATCHES[0], KEY)
    logits, new = module.apply(variables, BATCHES[0]["x"], training=True, mutable=["batch_stats"])
    np.testing.assert_allclose(loss, cross_entropy(logits, BATCHES[0]["y"]), rtol=1e-5)
    found, new = named(found), named(new)
    for name in model.state:
        parts = [new[part] for part in model.names.known[name]]
        want = np.stack(parts) if name.startswith("stack") else parts[0]
        np.testing.assert_allclose(found[name], want, rtol=1e-4, atol=1e-6, err_msg=name)
    assert len(model.state) == 4


@pytest.mark.parametrize("scan", keep([False, True], [True]))
def test_dropout_follows_the_key(scan):
    model = make(GPT(rate=0.5, scan=scan))
    params, run = model.init(KEY), jax.jit(model.loss)
    first, again, other = (float(run(params, BATCHES[0], jax.random.key(seed))) for seed in (1, 1, 2))
    assert first == again != other


class Doubled(GPT):
    @linen.compact
    def __call__(self, tokens, training=False):
        x, mask = linen.Embed(VOCAB, WIDTH)(tokens), causal_mask(tokens.shape[1])
        for i in range(2):
            x = 2 * Block(name=f"layers_{i}")(x, mask, training)
        return linen.Dense(VOCAB)(x)


class Rates(GPT):
    @linen.compact
    def __call__(self, tokens, training=False):
        x, mask = linen.Embed(VOCAB, WIDTH)(tokens), causal_mask(tokens.shape[1])
        for i in range(2):
            x = Block(rate=i / 2, name=f"layers_{i}")(x, mask, training)
        return linen.Dense(VOCAB)(x)


@pytest.mark.parametrize(
    ("module", "path", "message"),
    [
        (GPT(), "blocks", r"GPT has 0 submodules blocks_0, .* numbered are layers"),
        (GPT(), "embed", "cannot be cut out of the loss of GPT"),
        (Doubled(), "layers", r"(?s)argument 0 of layers_1 is neither an output of layers_0 .*Block\(\.\.\.\)\.apply"),
        (Rates(), "layers", "the layers differ: layers_1: rate is 0.5, not 0.0, as in layers_0"),
    ],
)
def test_what_is_no_stack(module, path, message):
    def trace():
        model = make(module, path)
        return model.loss(model.init(KEY), BATCHES[0], None)

    with pytest.raises(jzero.ConfigError, match=message):
        jax.eval_shape(trace)
