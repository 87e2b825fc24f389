"""Modules whose layers are no stack: one error, with the way out."""

import re

import jax
import pytest
from flax import nnx
from helpers.stack_models import BATCHES, ROWS, Small, SmallGPT, loss_fn

import jzero

KEY = jax.random.key(0)
CONFIG = {
    "train_batch_size": ROWS,
    "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
    "zero_optimization": {"stage": 3},
}


class Paired(Small):
    """A layer that also returns a number, as routers do."""

    def __call__(self, x, mask, training=True):
        x = super().__call__(x, mask)
        return x, (x**2).mean()


def changed(make):
    """A GPT whose blocks `make` changed."""

    class Changed(SmallGPT):
        def __init__(self, rngs):
            super().__init__(rngs)
            make(self, rngs)

    return Changed


def running(run):
    """A GPT that runs its blocks by `run(self, x, mask)`."""
    return type("Changed", (SmallGPT,), {"run": run})


def number(self, rngs):
    for i, block in enumerate(self.blocks):
        block._number = i


def in_other_order(self, x, mask):
    for block in reversed(list(self.blocks)):
        x = block(x, mask)
    return x


def between(self, x, mask):
    for block in self.blocks:
        x = block(x, mask) * 2
    return x


def with_collected(self, x, mask):
    first = x = self.blocks[0](x, mask)
    return first + self.blocks[1](x, mask)


def with_sums(self, x, mask):
    total = 0.0
    for block in self.blocks:
        x, one = block(x, mask)
        total += one
    return x + total


def paired(self, rngs):
    self.blocks = nnx.List([Paired(rngs) for _ in self.blocks])


def with_flags(self, x, mask):
    return self.blocks[1](self.blocks[0](x, mask, training=True), mask, training=False)


def half(self, x, mask):
    return self.blocks[0](x, mask)


def with_decay(self, x, mask):
    decay = sum((w**2).sum() for w in jax.tree.leaves(nnx.state(self, nnx.Param)))
    return SmallGPT.run(self, x, mask) + decay


def before(self, x, mask):
    return SmallGPT.run(self, self.blocks[0].norm(x), mask)


def share(self, rngs):
    self.blocks[1].norm = self.blocks[0].norm


ERRORS = {
    "unknown": (SmallGPT, "layers", r"GPT has no layers there; the lists of modules are 'blocks' \(2 x Small\)"),
    "no layer": (SmallGPT, "tokens", "cannot be cut out of the loss of SmallGPT: without the layers it fails"),
    "empty": (changed(lambda self, rngs: setattr(self, "blocks", nnx.List([]))), "blocks", "has 0 layers, must have"),
    "classes": (
        changed(lambda self, rngs: self.blocks.append(nnx.Linear(3, 3, rngs=rngs))), "blocks",
        "blocks/2 is a Linear, blocks/0 a Small",
    ),
    "shapes": (
        changed(lambda self, rngs: self.blocks.append(Small(rngs, hidden=8))), "blocks",
        r"blocks/2/down/kernel is \(8, 16\), not \(48, 16\) as in blocks/0",
    ),
    "numbers": (changed(number), "blocks", "blocks/0/_number is 0, blocks/1/_number is 1"),
    "shared": (changed(share), "blocks", "blocks/1/norm/bias is also a variable of another part"),
    "order": (running(in_other_order), "blocks", r"blocks\[1\] is called first: call every layer once"),
    "between": (running(between), "blocks", r"argument 0 of blocks\[1\] is neither an output of blocks\[0\] nor"),
    "collected": (running(with_collected), "blocks", r"uses the output of blocks\[0\], which must go into blocks\[1\]"),
    "sums": (
        type("Changed", (changed(paired),), {"run": with_sums}), "blocks",
        r"sum it up inside the layers, as in x, total = layer\(x, total\)",
    ),
    "flags": (running(with_flags), "blocks", r"argument training is True for blocks\[0\], but False for blocks\[1\]"),
    "half": (running(half), "blocks", r"blocks\[1\] is not called"),
    "before": (running(before), "blocks", "uses norm/bias of the layers outside of their calls"),
    "decay": (running(with_decay), "blocks", "uses down/bias of the layers outside of their calls"),
}  # fmt: skip


def test_numbered_attributes_end_at_the_first_gap_and_are_named_alike():
    class Numbered(nnx.Module):
        def __init__(self, rngs):
            for name in ("block_0", "block_1", "block_3", "block1"):
                setattr(self, name, nnx.Linear(2, 2, rngs=rngs))

        def __call__(self, x):
            return self.block1(self.block_3(self.block_1(self.block_0(x))))

    model = jzero.from_flax(Numbered, lambda module, x: module(x).mean(), stack="block")
    assert model.places.keys == (("block_0",), ("block_1",))


@pytest.mark.parametrize(("module", "path", "message"), ERRORS.values(), ids=ERRORS)
def test_what_is_no_stack(module, path, message):
    def trace():
        model = jzero.from_flax(module, loss_fn, stack=path)
        return model.loss(model.init(KEY), BATCHES[0], None)

    with pytest.raises(jzero.ConfigError, match=message) as error:
        jax.eval_shape(trace)
    assert (
        "leave out stack=" in str(error.value) or "def suffix(self, x, batch)" in str(error.value) or path == "layers"
    )


def trained(step):
    return {layout.name: layout.trainable for layout in jax.tree.leaves(step.layouts)}


def test_patterns_match_the_names_of_the_module():
    """As without stack=, so one config serves both."""
    more = {
        "frozen_parameters": ["^tokens", "^blocks/[0-9]+/norm/"],
        "optimizer": {"type": "SGD", "params": {"lr": 0.5}, "groups": [{"match": "^blocks/./up/", "lr_scale": 0.1}]},
    }
    plain, stacked = (
        jzero.make_train_step(jzero.from_flax(SmallGPT, loss_fn, stack=stack), {**CONFIG, **more})
        for stack in (None, "blocks")
    )
    for name, parts in stacked.model.names.parameters:
        frozen = bool(re.search("^tokens|^blocks/./norm", parts[0]))
        assert [trained(plain)[part] for part in parts] == [not frozen] * len(parts)
        assert trained(stacked)[name] is not frozen
    assert [*stacked.setup.optimizer.groups[0].leaves] == ["stack/up/bias", "stack/up/kernel"]
    assert [*plain.setup.optimizer.groups[0].leaves] == [
        f"blocks/{i}/up/{x}" for i in range(2) for x in ("bias", "kernel")
    ]


@pytest.mark.parametrize("key", ["frozen_parameters", "trainable_parameters", "groups"])
def test_patterns_for_some_layers_are_refused(key):
    sgd, some = {"type": "SGD", "params": {"lr": 0.5}}, "^blocks/0/"
    more = {"optimizer": {**sgd, "groups": [{"match": some, "lr_scale": 0.1}]}} if key == "groups" else {key: [some]}
    with pytest.raises(
        jzero.ConfigError, match=r"blocks/0/.* but not blocks/1/.*: match all layers, or leave out stack"
    ):
        jzero.make_train_step(jzero.from_flax(SmallGPT, loss_fn, stack="blocks"), {**CONFIG, **more})


def test_a_step_names_the_reason_too():
    step = jzero.make_train_step(jzero.from_flax(running(between), loss_fn, stack="blocks"), CONFIG)
    with pytest.raises(jzero.ConfigError, match="def prefix"):
        step.lower(BATCHES[0])
