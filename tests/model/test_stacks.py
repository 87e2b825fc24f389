"""Layer stacks from modules as people write them. Oracle: the same module with plain Flax and optax on one device."""

from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import stack_models
from helpers.drawn import random_params
from helpers.plain_flax import cross_entropy, mean_square, nnx_loss
from helpers.refusals import refuses
from helpers.sampling import keep
from helpers.stack_models import BATCHES, ROWS, VOCAB, WIDTH, Small, SmallGPT, causal_mask, loss_fn
from helpers.steps import assert_close, compare, mesh, settings

import jzero

KEY = jax.random.key(0)
PIPE = {"mesh": {"pipe": 2, "data": 2, "zero": 2}}


class Tied(SmallGPT):
    """A mask that depends on the batch, a skip connection around the stack, the embedding as head."""

    def __call__(self, tokens):
        first = self.tokens(tokens)
        mask = causal_mask(tokens.shape[1]) & (tokens != 0)[:, None, None]
        return self.tokens.attend(self.run(first, mask) + first)


TRAINED = [(Tied, 0, {}), (SmallGPT, 0, {}), (stack_models.GPT, 3, {}), (stack_models.ScannedGPT, 1, PIPE)]


@pytest.mark.parametrize(
    ("module", "stage", "more"),
    keep(TRAINED, TRAINED[:1]),  # by default Linen's layers train in a pipeline
)
def test_a_stack_trains_as_on_one_device(module, stage, more):
    start = random_params(jzero.from_flax(module, loss_fn))
    model = jzero.from_flax(module, loss_fn, stack="blocks")
    step = jzero.make_train_step(model, settings(ROWS, stage, 2, 0.5, **more))
    plain = nnx_loss(module, loss_fn)
    _, state = compare(step, BATCHES, plain, optax.sgd(0.5), start, join=model.places.join)
    assert step.predict(state, BATCHES[0]["x"]).shape == (*BATCHES[0]["x"].shape, VOCAB)


class Pairs(nnx.Module):
    """Layers from (x, total) to (x, total), and a keyword that every layer gets."""

    def __init__(self, rngs):
        self.blocks = nnx.Sequential(*[Pair(rngs) for _ in range(3)])
        self.out = nnx.Linear(WIDTH, VOCAB, rngs=rngs)

    def __call__(self, tokens):
        x, total = jax.nn.one_hot(tokens, WIDTH), jnp.float32(0)
        for layer in self.blocks.layers:
            x, total = layer(x, total=total)
        return self.out(x) + total


class Pair(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x, *, total):
        x = jnp.tanh(self.linear(x))
        return x, total + (x**2).mean()


class Methods(SmallGPT):
    """Hidden states of all layers go into the head: not a chain, but written as one with two methods."""

    def make_blocks(self, rngs, rate):
        return nnx.List([Collecting(rngs) for _ in range(stack_models.LAYERS)])

    def prefix(self, batch):
        return self.tokens(batch["x"]), jnp.zeros((*batch["x"].shape, WIDTH))

    def suffix(self, x, batch):
        return cross_entropy(self.outputs(x, batch), batch["y"])

    def outputs(self, x, batch):
        return self.out(x[1])

    def whole(self, batch):
        x = self.prefix(batch)
        for block in self.blocks:
            x = block(x)
        return self.suffix(x, batch)


class Collecting(Small):
    def __call__(self, x):
        y = super().__call__(x[0], causal_mask(x[0].shape[1]))
        return y, x[1] + y


CUT = [
    (Methods, Methods.whole, None, "blocks"),
    (Pairs, loss_fn, loss_fn, "blocks"),
]


@pytest.mark.parametrize(("module", "whole", "loss", "path"), keep(CUT, CUT[:1]))
def test_loss_and_gradients_are_those_of_the_module(module, whole, loss, path):
    plain, model = jzero.from_flax(module, whole), jzero.from_flax(module, loss, stack=path)
    params = random_params(plain)
    (value, gradients), (found, of_stack) = (
        jax.jit(jax.value_and_grad(lambda params, one=one: one.loss(params, BATCHES[0], None)))(params)
        for one, params in ((plain, params), (model, model.adopt(params)))
    )
    np.testing.assert_allclose(found, value, rtol=1e-6)
    assert_close(model.places.join(of_stack), gradients, rtol=1e-5)
    if module is Methods:
        logits = jax.eval_shape(model.predicting(None).loss, model.adopt(params), BATCHES[0], None)
        assert logits.shape == (*BATCHES[0]["x"].shape, VOCAB)


class Scaled(nnx.Module):
    def __init__(self, rngs):
        self.scale, self.dropout = nnx.Param(jnp.ones(())), nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x, rngs):
        return self.dropout(x) * self.scale[...] if rngs is None else nnx.Dropout(0.5)(x, rngs=rngs)


class Drawing(nnx.Module):
    def __init__(self, rngs):
        self.dropout, self.rngs = nnx.Dropout(0.5, rngs=rngs), rngs.fork()
        self.layers = nnx.List([Scaled(rngs) for _ in range(3)])

    def __call__(self, batch):
        x, rngs = self.dropout(jnp.ones((512, 8))), self.rngs if batch["pass"].ndim else None
        y = x
        for layer in self.layers:
            y = layer(y, rngs)
        return (y != 0).mean(), {"first": (x != 0).mean(), "lost": ((y != 0) & (x == 0)).mean()}


def test_every_layer_draws_its_own_mask_and_the_ends_draw_once():
    model = jzero.from_flax(Drawing, Drawing.__call__, stack="layers", has_aux=True)
    params = model.init(KEY)
    for own in (np.float32(1), np.ones(1, np.float32)):
        kept, ends = model.loss(params, {"pass": own}, KEY)
        assert float(kept) == pytest.approx(1 / 16, abs=0.02)  # one mask for all layers would leave a quarter
        assert float(ends["first"]) == pytest.approx(1 / 2, abs=0.05)
        assert ends["lost"] == 0  # the loss sees the x that the layers got


class FusedLayer(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(8, 16, rngs=rngs)

    def __call__(self, x):
        gate, value = jnp.split(self.up(x), 2, axis=-1)
        return x + jax.nn.silu(gate) * value


class Fused(nnx.Module):
    fused_matrices: ClassVar = {
        **dict.fromkeys(("layers/0/up/kernel", "layers/1/up/kernel"), (1, (8, 8))),
        "head/kernel": (1, (2, 2)),
    }

    def __init__(self, rngs):
        self.layers = nnx.List([FusedLayer(rngs) for _ in range(2)])
        self.head = nnx.Linear(8, 4, rngs=rngs)

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return (self.head(x) ** 2).mean()


def muon_step(stack, **fused):
    module = type("Other", (Fused,), {"fused_matrices": fused}) if fused else Fused
    config = settings(ROWS, optimizer={"type": "Muon", "params": {"lr": 0.1}})
    return jzero.make_train_step(jzero.from_flax(module, module.__call__, stack=stack), config, mesh=mesh(1))


def test_fused_matrices_are_those_of_the_module():
    """Muon cuts a stacked weight like the layers' own."""
    known = muon_step("layers").model.fused_matrices
    assert known == {"stack/up/kernel": (1, (8, 8)), "ends/head/kernel": (1, (2, 2))}
    words = r"has None for layers/1/up/kernel and \(1, \(8, 8\)\) for layers/0/up"
    refuses(lambda: muon_step("layers", **{"layers/0/up/kernel": (1, (8, 8))}), words)
    refuses(lambda: muon_step("layers", **{"layers/0/down": (1, (8, 8))}), "no such parameter")


class Paired(Small):
    def __call__(self, x, mask, training=True):
        x = super().__call__(x, mask)
        return x, (x**2).mean()


def changed(make):
    class Changed(SmallGPT):
        def __init__(self, rngs):
            super().__init__(rngs)
            make(self.blocks, rngs)

    return Changed


def with_more(make):
    return changed(lambda blocks, rngs: blocks.append(make(rngs)))


def running(run, module=SmallGPT):
    return type("Changed", (module,), {"run": lambda self, x, mask: run(*self.blocks, x, mask)})


def paired(blocks, rngs):
    blocks[:] = [Paired(rngs) for _ in blocks]


def with_sums(a, b, x, mask):
    x, one = a(x, mask)
    x, other = b(x, mask)
    return x + one + other


GO = ("leave out stack=", "def suffix(self, x, batch)")  # the ways out
PATHS = {"unknown": "layers", "no layer": "tokens"}  # of the others "blocks"
ERRORS = {
    "unknown": (SmallGPT, r"GPT has no layers there; the lists of modules are 'blocks' \(2 x Small\)"),
    "no layer": (SmallGPT, "cannot be cut out of the loss of SmallGPT: without the layers it fails"),
    "empty": (changed(lambda blocks, rngs: blocks.__delitem__(slice(None))), "has 0 layers, must have"),
    "classes": (with_more(lambda rngs: nnx.Linear(3, 3, rngs=rngs)), "blocks/2 is a Linear, blocks/0 a Small"),
    "shapes": (
        with_more(lambda rngs: Small(rngs, hidden=8)), r"2/down/kernel is \(8, 16\), not \(48, 16\) as in blocks/0"
    ),
    "numbers": (
        changed(lambda blocks, rngs: [setattr(block, "_number", i) for i, block in enumerate(blocks)]),
        "blocks/0/_number is 0, blocks/1/_number is 1",
    ),
    "shared": (
        changed(lambda blocks, rngs: setattr(blocks[1], "norm", blocks[0].norm)),
        "blocks/1/norm/bias is also a variable of another part",
    ),
    "order": (
        running(lambda a, b, x, mask: a(b(x, mask), mask)), r"blocks\[1\] is called first: call every layer once"
    ),
    "between": (
        running(lambda a, b, x, mask: b(a(x, mask) * 2, mask)),
        r"argument 0 of blocks\[1\] is neither an output of blocks\[0\] nor",
    ),
    "collected": (
        running(lambda a, b, x, mask: (first := a(x, mask)) + b(first, mask)),
        r"uses the output of blocks\[0\], which must go into blocks\[1\]",
    ),
    "sums": (running(with_sums, changed(paired)), r"sum it up inside the layers, as in x, total = layer\(x, total\)"),
    "flags": (
        running(lambda a, b, x, mask: b(a(x, mask, training=True), mask, training=False)),
        r"argument training is True for blocks\[0\], but False for blocks\[1\]",
    ),
    "half": (running(lambda a, b, x, mask: a(x, mask)), r"blocks\[1\] is not called"),
    "before": (
        running(lambda a, b, x, mask: b(a(a.norm(x), mask), mask)),
        "uses norm/bias of the layers outside of their calls",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ERRORS)
def test_what_is_no_stack(name):
    module, message = ERRORS[name]
    path = PATHS.get(name, "blocks")

    def trace():
        model = jzero.from_flax(module, loss_fn, stack=path)
        return model.loss(model.init(KEY), BATCHES[0], None)

    text = refuses(lambda: jax.eval_shape(trace), message)
    assert any(way in text for way in GO) or path == "layers"


class Numbered(nnx.Module):
    def __init__(self, rngs):
        for name in ("block_0", "block_1", "block_3", "block1"):
            setattr(self, name, nnx.Linear(2, 2, rngs=rngs))


class Outer(nnx.Module):
    def __init__(self, rngs):
        self.inner = Numbered(rngs)


def test_numbered_attributes_end_at_the_first_gap_and_are_named_alike():
    model = jzero.from_flax(Outer, mean_square, stack="inner.block")
    assert model.places.keys == (("inner", "block_0"), ("inner", "block_1"))


def make_step(stack, **more):
    model = jzero.from_flax(SmallGPT, loss_fn, stack=stack)
    return jzero.make_train_step(model, settings(ROWS, 3, **more))


def sgd(pattern):
    return {"type": "SGD", "params": {"lr": 0.5}, "groups": [{"match": pattern, "lr_scale": 0.1}]}


@pytest.mark.parametrize("key", ["frozen_parameters", "trainable_parameters", "optimizer"])
def test_patterns_for_some_layers_are_refused(key):
    more = {key: sgd("^blocks/0/") if key == "optimizer" else ["^blocks/0/"]}
    words = r"blocks/0/.* but not blocks/1/.*: match all layers, or leave out stack"
    refuses(lambda: make_step("blocks", **more), words)
