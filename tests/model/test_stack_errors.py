"""Modules whose layers are no stack: one error, with the way out."""

import re

import jax
import pytest
from flax import nnx
from helpers.refusals import refuses
from helpers.stack_models import BATCHES, ROWS, Small, SmallGPT, loss_fn
from helpers.steps import settings

import jzero


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
            make(self.blocks, rngs)

    return Changed


def running(run, module=SmallGPT):
    """A GPT that runs its blocks by `run(self, x, mask)`."""
    return type("Changed", (module,), {"run": run})


def number(blocks, rngs):
    for i, block in enumerate(blocks):
        block._number = i


def share(blocks, rngs):
    blocks[1].norm = blocks[0].norm


def pair(blocks, rngs):
    blocks[:] = [Paired(rngs) for _ in blocks]


def in_other_order(self, x, mask):
    return self.blocks[0](self.blocks[1](x, mask), mask)


def between(self, x, mask):
    return self.blocks[1](self.blocks[0](x, mask) * 2, mask)


def with_collected(self, x, mask):
    first = x = self.blocks[0](x, mask)
    return first + self.blocks[1](x, mask)


def with_sums(self, x, mask):
    x, one = self.blocks[0](x, mask)
    x, other = self.blocks[1](x, mask)
    return x + one + other


def with_flags(self, x, mask):
    return self.blocks[1](self.blocks[0](x, mask, training=True), mask, training=False)


def half(self, x, mask):
    return self.blocks[0](x, mask)


def with_decay(self, x, mask):
    decay = sum((w**2).sum() for w in jax.tree.leaves(nnx.state(self, nnx.Param)))
    return SmallGPT.run(self, x, mask) + decay


def before(self, x, mask):
    return SmallGPT.run(self, self.blocks[0].norm(x), mask)


GO = ("leave out stack=", "def suffix(self, x, batch)")  # the ways out
ERRORS = {
    "unknown": (SmallGPT, "layers", r"GPT has no layers there; the lists of modules are 'blocks' \(2 x Small\)"),
    "no layer": (SmallGPT, "tokens", "cannot be cut out of the loss of SmallGPT: without the layers it fails"),
    "empty": (changed(lambda blocks, rngs: blocks.__delitem__(slice(None))), "blocks", "has 0 layers, must have"),
    "classes": (
        changed(lambda blocks, rngs: blocks.append(nnx.Linear(3, 3, rngs=rngs))), "blocks",
        "blocks/2 is a Linear, blocks/0 a Small",
    ),
    "shapes": (
        changed(lambda blocks, rngs: blocks.append(Small(rngs, hidden=8))), "blocks",
        r"blocks/2/down/kernel is \(8, 16\), not \(48, 16\) as in blocks/0",
    ),
    "numbers": (changed(number), "blocks", "blocks/0/_number is 0, blocks/1/_number is 1"),
    "shared": (changed(share), "blocks", "blocks/1/norm/bias is also a variable of another part"),
    "order": (running(in_other_order), "blocks", r"blocks\[1\] is called first: call every layer once"),
    "between": (running(between), "blocks", r"argument 0 of blocks\[1\] is neither an output of blocks\[0\] nor"),
    "collected": (running(with_collected), "blocks", r"uses the output of blocks\[0\], which must go into blocks\[1\]"),
    "sums": (
        running(with_sums, changed(pair)), "blocks", r"sum it up inside the layers, as in x, total = layer\(x, total\)",
    ),
    "flags": (running(with_flags), "blocks", r"argument training is True for blocks\[0\], but False for blocks\[1\]"),
    "half": (running(half), "blocks", r"blocks\[1\] is not called"),
    "before": (running(before), "blocks", "uses norm/bias of the layers outside of their calls"),
    "decay": (running(with_decay), "blocks", "uses down/bias of the layers outside of their calls"),
}  # fmt: skip


@pytest.mark.parametrize(("module", "path", "message"), ERRORS.values(), ids=ERRORS)
def test_what_is_no_stack(module, path, message):
    def trace():
        model = jzero.from_flax(module, loss_fn, stack=path)
        return model.loss(model.init(jax.random.key(0)), BATCHES[0], None)

    text = refuses(lambda: jax.eval_shape(trace), message)
    assert any(way in text for way in GO) or path == "layers"


class Numbered(nnx.Module):
    def __init__(self, rngs):
        for name in ("block_0", "block_1", "block_3", "block1"):
            setattr(self, name, nnx.Linear(2, 2, rngs=rngs))

    def __call__(self, x):
        return self.block1(self.block_3(self.block_1(self.block_0(x))))


def test_numbered_attributes_end_at_the_first_gap_and_are_named_alike():
    model = jzero.from_flax(Numbered, Numbered.__call__, stack="block")
    assert model.places.keys == (("block_0",), ("block_1",))


def make_step(stack, **more):
    return jzero.make_train_step(jzero.from_flax(SmallGPT, loss_fn, stack=stack), settings(ROWS, 3, **more))


def sgd(pattern):
    return {"type": "SGD", "params": {"lr": 0.5}, "groups": [{"match": pattern, "lr_scale": 0.1}]}


def test_patterns_match_the_names_of_the_module():
    """As without stack=, so one config serves both."""
    more = {"frozen_parameters": ["^tokens", "^blocks/[0-9]+/norm/"], "optimizer": sgd("^blocks/./up/")}
    plain, stacked = (make_step(stack, **more) for stack in (None, "blocks"))
    trained, of_stack = (
        {layout.name: layout.trainable for layout in jax.tree.leaves(step.layouts)} for step in (plain, stacked)
    )
    for name, parts in stacked.model.names.parameters:
        frozen = bool(re.search("^tokens|^blocks/./norm", parts[0]))
        assert [trained[part] for part in parts] == [not frozen] * len(parts)
        assert of_stack[name] is not frozen
    groups = [[*step.setup.optimizer.groups[0].leaves] for step in (plain, stacked)]
    assert groups[0] == [f"blocks/{i}/up/{x}" for i in range(2) for x in ("bias", "kernel")]
    assert groups[1] == ["stack/up/bias", "stack/up/kernel"]


@pytest.mark.parametrize("key", ["frozen_parameters", "trainable_parameters", "optimizer"])
def test_patterns_for_some_layers_are_refused(key):
    more = {key: sgd("^blocks/0/") if key == "optimizer" else ["^blocks/0/"]}
    words = r"blocks/0/.* but not blocks/1/.*: match all layers, or leave out stack"
    refuses(lambda: make_step("blocks", **more), words)
