"""Linen modules: boxes, collections, sown values, streams, stacks of layers; beside plain Flax and optax."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen
from helpers.drawn import drawn, random_params
from helpers.plain_flax import KEY, WIDTH, X, mean_square
from helpers.refusals import refuses
from helpers.sampling import keep
from helpers.stack_models import BATCHES, ROWS, VOCAB, causal_mask, cross_entropy
from helpers.steps import compare, settings

import jzero
from jzero.tree import named

ZEROS = np.zeros((1000, WIDTH), np.float32)


class Several(linen.Module):
    """A boxed kernel, a constraint on an activation as in MaxText, a constant, and sown values, one with a sum."""

    @linen.compact
    def __call__(self, x):
        init = linen.with_partitioning(linen.initializers.lecun_normal(), ("model", None))
        x = linen.with_logical_constraint(linen.Dense(WIDTH, kernel_init=init)(x), ("rows", "heads"))
        self.sow("intermediates", "features", x)
        self.sow("losses", "norm", (x**2).sum(), init_fn=lambda: 0.0, reduce_fn=lambda a, b: a + b)
        table = self.variable("tables", "shift", lambda: jnp.arange(WIDTH, dtype=jnp.float32) / WIDTH)
        return x + table.value


class Boxed(linen.Module):
    """Also boxes, which attention and `DenseGeneral` unbox in the initializer that Flax traces in every call."""

    @linen.compact
    def __call__(self, x):
        normal, logical = linen.initializers.lecun_normal(), linen.with_logical_partitioning
        init = linen.with_partitioning(normal, ("embed", "model", "data"))
        x = linen.MultiHeadDotProductAttention(2, kernel_init=init, out_kernel_init=init)(x[:, None])
        init, zeros = logical(normal, ("embed", "heads")), logical(linen.initializers.zeros, ("heads",))
        x = linen.DenseGeneral((2, WIDTH // 2), kernel_init=init, bias_init=zeros)(x)
        return Several()(linen.DenseGeneral(WIDTH, axis=(-2, -1), kernel_init=init)(x)[:, 0])


def test_linen():
    def loss(module, batch):
        with linen.logical_axis_rules((("rows", "data"), ("embed", "zero"), ("heads", "tensor"))):
            return mean_square(module, batch)

    module = Boxed()
    model = jzero.from_flax(module, loss, example_batch=jax.eval_shape(lambda: X))
    tables = {"Several_0": {"shift": np.arange(WIDTH, dtype=np.float32) / WIDTH}}

    def plain(params, x, _):
        return (module.apply({"params": params, "tables": tables}, x) ** 2).mean()

    step, start = jzero.make_train_step(model, settings(len(X), 3)), random_params(model)
    assert all(
        type(x) is np.ndarray for x in jax.tree.leaves(start, is_leaf=lambda x: isinstance(x, linen.Partitioned))
    )
    compare(step, [X] * 3, plain, optax.sgd(0.1), start, rtol=1e-6)


class Noisy(linen.Module):
    @linen.compact
    def __call__(self, x, train=False):
        x = linen.Dense(WIDTH)(x)
        return x + jax.random.normal(self.make_rng("noise"), x.shape) if train else x


def test_linen_streams_of_any_name_follow_the_key():
    noise = []

    def loss(module, batch, rng):
        noise.append(module(batch, train=rng is not None) - module(batch))
        return jnp.float32(0)

    model = jzero.from_flax(Noisy(), loss, example_batch=ZEROS)
    params = model.init(KEY)
    noise.clear()
    for key in (KEY, KEY, jax.random.key(4), None):
        model.loss(params, ZEROS, key)
    first, again, other, off = map(np.asarray, noise)
    np.testing.assert_array_equal(first, again)
    assert abs(np.corrcoef(first.ravel(), other.ravel())[0, 1]) < 0.05
    assert (off == 0).all()


class Counter(linen.Module):
    collection: str = "counts"

    @linen.compact
    def __call__(self, x):
        count = self.variable(self.collection, "calls", lambda: jnp.zeros(()))
        if not self.is_initializing() and self.is_mutable_collection(self.collection):
            count.value += 1
        return linen.Dense(WIDTH)(x) + count.value


def test_linen_collections_that_training_changes_are_state():
    for module, state in (
        (linen.BatchNorm(use_running_average=False), {"batch_stats/mean", "batch_stats/var"}),
        (Counter(), {"counts/calls"}),
        (Several(), set()),
    ):
        assert jzero.from_flax(module, mean_square, example_batch=X).state == state
    words = r"\['Dense_0'\] names both a submodule and a variable collection"
    refuses(lambda: jzero.from_flax(Counter("Dense_0"), mean_square, example_batch=X), words)


def test_constants_of_other_variables_are_refused():
    """Training does not change the collection, so the step computes it from the module, and would ignore these."""
    model = jzero.from_flax(Several(), mean_square, example_batch=X)
    params, tables = (Several().init(KEY, X)[name] for name in ("params", "tables"))
    sown = {"losses": {"l2": (jnp.ones(()),)}}  # `init` of a module that sows has these too
    assert named(model.adopt({"params": params, "tables": tables, **sown})).keys() == named(model.init(KEY)).keys()
    other = {"params": params, "tables": {"shift": tables["shift"] + 1}}
    refuses(lambda: model.adopt(other), r"params: tables/shift is not what the module computes: .*frozen_par")


class Block(linen.Module):
    rate: float = 0.0
    norm: bool = False
    scan: bool = False

    @linen.compact
    def __call__(self, x, mask, training):
        h = linen.Dense(WIDTH)(mask[:, 0] / mask[:, 0].sum(-1, keepdims=True) @ x)  # the mean of what is visible
        h = linen.Dropout(self.rate)(jnp.tanh(h), deterministic=not training)
        if self.norm:
            h = linen.BatchNorm(use_running_average=not training, momentum=0.5)(h)
        return (x + h, None) if self.scan else x + h


class GPT(linen.Module):
    """Layers in a loop, or scanned; a tied head, so that the suffix runs the embedding too."""

    rate: float = 0.0
    norm: bool = False
    scan: bool = False
    doubled: bool = False
    more: float = 0.0  # dropout in each layer than in the one before

    @linen.compact
    def __call__(self, tokens, training=False):
        embed, mask = linen.Embed(VOCAB, WIDTH, name="embed"), causal_mask(tokens.shape[1])
        x = embed(tokens)
        if self.norm:
            x = linen.BatchNorm(use_running_average=not training, momentum=0.5)(x)
        if self.scan:
            split = {"params": True, "dropout": True}
            layers = linen.scan(Block, variable_axes={"params": 0}, split_rngs=split, in_axes=linen.broadcast, length=2)
            return embed.attend(layers(self.rate, scan=True, name="layers")(x, mask, training)[0])
        for i in range(2):
            x = Block(self.rate + i * self.more, self.norm, name=f"layers_{i}")(x, mask, training)
            x = 2 * x if self.doubled else x
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


TRAINED = [(Outer(), "encoder.layers", {"pipe": 2}, 1), (GPT(scan=True), "layers", {}, 3)]


@pytest.mark.parametrize(("module", "path", "mesh", "stage"), keep(TRAINED, TRAINED[:1]))
def test_a_stack_trains_as_on_one_device(module, path, mesh, stage):
    start = random_params(jzero.from_flax(module, loss_fn, example_batch=BATCHES[0]))

    def loss(params, batch, _):
        return cross_entropy(module.apply({"params": params}, batch["x"]), batch["y"])

    step = jzero.make_train_step(make(module, path), settings(ROWS, stage, 2, 0.5, mesh=mesh))
    first, _ = compare(step, BATCHES, loss, optax.sgd(0.5), {"params": start}, join=step.model.places.join)
    assert set(step.model.names.known) == set(named(first))


def test_batch_norm_in_layers_and_ends_moves_as_in_the_module():
    module = GPT(norm=True)
    model, variables = make(module), drawn(jax.eval_shape(module.init, KEY, BATCHES[0]["x"]))
    loss, found = jax.jit(model.loss)(model.adopt(variables), BATCHES[0], KEY)
    apply = jax.jit(lambda x: module.apply(variables, x, training=True, mutable=["batch_stats"]))
    logits, new = apply(BATCHES[0]["x"])
    np.testing.assert_allclose(loss, cross_entropy(logits, BATCHES[0]["y"]), rtol=1e-5)
    found, new = named(found), named(new)
    for name in model.state:
        parts = [new[part] for part in model.names.known[name]]
        want = np.stack(parts) if name.startswith("stack") else parts[0]
        np.testing.assert_allclose(found[name], want, rtol=1e-4, atol=1e-6, err_msg=name)
    assert len(model.state) == 4


def test_dropout_follows_the_key():
    model = make(GPT(rate=0.5, scan=True))
    params, run = random_params(model), jax.jit(model.loss)
    first, again, other = (float(run(params, BATCHES[0], jax.random.key(seed))) for seed in (1, 1, 2))
    assert first == again != other


@pytest.mark.parametrize(
    ("module", "path", "message"),
    [
        (GPT(), "blocks", r"GPT has 0 submodules blocks_0, .* numbered are layers"),
        (GPT(), "embed", "cannot be cut out of the loss of GPT"),
        (
            GPT(doubled=True),
            "layers",
            r"(?s)argument 0 of layers_1 is neither an output of layers_0 .*Block\(\.\.\.\)\.apply",
        ),
        (GPT(more=0.5), "layers", "the layers differ: layers_1: rate is 0.5, not 0.0, as in layers_0"),
    ],
)
def test_what_is_no_stack(module, path, message):
    def trace():
        model = make(module, path)
        return model.loss(model.init(KEY), BATCHES[0], None)

    refuses(lambda: jax.eval_shape(trace), message)
