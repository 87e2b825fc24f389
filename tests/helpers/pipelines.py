"""Models, layouts and the comparison for the tests of pipelines: a step with stages against the step without.

SGD's learning rate is so high (1e4) that the parameters before a step less those after it, divided by the rate, are the
gradient to float32's rounding. The unpipelined step has the same ZeRO stage, replicas and micro-batches; `test_oracle`
compares it with a plain loop.
"""

from functools import lru_cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from helpers import reference
from helpers.drawn import drawn
from helpers.reference import SEQUENCE, VOCAB, WIDTH, place
from helpers.steps import settings

import jzero
from jzero.model import stack_loss
from jzero.pipeline import vocab_parallel
from jzero.tree import named as names
from models.llama import Llama, LlamaConfig

LR, BOUND = 1e4, 1e-6
ROWS = 2  # of a micro-batch


class Decoder(reference.Decoder):
    """Ends that are vocabulary-parallel, and layers with nothing to them; the loss is (sum, count)."""

    def __init__(self, layers, tied=False, vocab=VOCAB):
        super().__init__(layers, tied, vocab)
        self.vocabulary = {"embed": 0} if tied else {"embed": 0, "head": 1}

    def __repr__(self):
        return f"{type(self).__name__}({self.layers} layers)"

    def init(self, rng):
        return drawn(jax.eval_shape(super().init, rng))

    def prefix(self, ends, batch, rng):
        return vocab_parallel.embed(ends["embed"], batch["inputs"])

    def suffix(self, ends, x, batch, rng):
        return vocab_parallel.cross_entropy(x, ends["embed"].T if self.tied else ends["head"], batch["labels"])

    loss = stack_loss


def drop(x, rng):
    """Dropout, whose mask is as good as a name of its key; a hash compiles faster than JAX's random bits."""
    if rng is None:
        return x
    first, second = jax.random.key_data(rng)
    bits = (jnp.arange(x.size, dtype=jnp.uint32) ^ first) * np.uint32(2654435761)
    bits = ((bits >> 15) ^ bits ^ second) * np.uint32(2246822519)
    return jnp.where((bits >> 13) % 10 < 7, x.ravel() / 0.7, 0).reshape(x.shape)


class Dropout(Decoder):
    def prefix(self, ends, batch, rng):
        return drop(super().prefix(ends, batch, rng), rng)

    def block(self, layer, x, rng):
        return x + drop(jnp.tanh(x @ layer["w"] + layer["b"]), rng)

    def suffix(self, ends, x, batch, rng):
        return super().suffix(ends, drop(x, rng), batch, rng)


@jax.custom_vjp
def normed_gradient(x):
    return x


normed_gradient.defvjp(lambda x: (x, None), lambda _, g: (g / jnp.linalg.norm(g),))


class Fragile(Decoder):
    def block(self, layer, x, rng):
        h = normed_gradient(x) / jnp.linalg.norm(x, axis=-1, keepdims=True)
        return normed_gradient(x + jnp.tanh(h @ layer["w"] + layer["b"]))


class Everything(Dropout):
    """Dropout, parameters that are integers, activations with an integer and a mask; a mean loss.

    The integer is Python's, at first, and layers count it up; they turn the mask.
    """

    def init(self, rng):
        ends, stack = super().init(rng).values()
        sign = 1 - 2 * (jnp.arange(self.layers) % 2)
        return {"ends": {**ends, "shift": jnp.int32(1)}, "stack": {**stack, "sign": sign}}

    def prefix(self, ends, batch, rng):
        h = super().prefix(ends, {**batch, "inputs": (batch["inputs"] + ends["shift"]) % VOCAB}, rng)
        return {"h": h, "depth": 0, "mask": batch["labels"] >= 0}

    def block(self, layer, x, rng):
        h = jnp.tanh(x["h"] @ layer["w"] + layer["b"]) * x["mask"][..., None] / (1 + x["depth"])
        mask = jnp.roll(x["mask"], 1, axis=1)
        return {"h": x["h"] + layer["sign"] * drop(h, rng), "depth": x["depth"] + 1, "mask": mask}

    def suffix(self, ends, x, batch, rng):
        total, _ = super().suffix(ends, x["h"] * x["mask"][..., None], batch, rng)
        return total / (ROWS * SEQUENCE) * x["depth"]


@lru_cache
def model(kind, layers, **options):
    if kind is Llama:
        config = LlamaConfig(layers, WIDTH, 2, 1, 24, vocab_size=VOCAB, **options)
        return jzero.from_flax(lambda rngs: Llama(config, rngs=rngs))
    return kind(layers, **options)


class Case(NamedTuple):
    """A layout. `micro`: the micro-batches of a step. Without a schedule it is the step to compare with."""

    schedule: str | None
    stages: int
    micro: int
    stage: int = 0
    zero: int = 1
    data: int = 1
    chunks: int = 1
    gather: str | None = None
    tied: bool = False

    @property
    def layers(self):
        """Two per chunk where that makes no more than four."""
        return max(4, self.stages * self.chunks)

    @property
    def unpipelined(self):
        return self._replace(schedule=None, stages=1, chunks=1, gather=None)

    @property
    def devices(self):
        return jax.devices()[: self.stages * self.data * self.zero]

    def config(self, **more):
        pipeline = {"schedule": self.schedule, "chunks": self.chunks, "gather": self.gather}
        own = {"train_micro_batch_size_per_gpu": ROWS, **({"pipeline": pipeline} if self.schedule else {})}
        mesh = {"pipe": self.stages, "data": self.data, "zero": self.zero}
        return settings(None, self.stage, self.micro, LR, mesh=mesh) | own | more

    def step(self, model, **more):
        config = self.config(**more)
        return jzero.make_train_step(model, config, mesh=jzero.make_mesh(config, devices=self.devices))


def batch_of(case, seed=0, vocab=VOCAB):
    """A global batch. Rows have 1 to SEQUENCE labels that count, and those of one micro-batch have none."""
    rng = np.random.default_rng(seed)
    rows = ROWS * case.micro * case.data * case.zero
    tokens = rng.integers(0, vocab, (rows, SEQUENCE + 1)).astype(np.int32)
    labels = np.where(np.arange(SEQUENCE) < rng.integers(1, SEQUENCE + 1, (rows, 1)), tokens[:, 1:], -1)
    if case.micro > 1:
        labels[ROWS : 2 * ROWS] = -1
    return {"inputs": tokens[:, :-1], "labels": labels}


@lru_cache
def initial(model, frozen=()):
    """A new state under SGD, born on one device: compiling `init` for every layout is another file's test."""
    return Case(None, 1, 1).step(model, frozen_parameters=list(frozen)).init(jax.random.key(0))


class Done(NamedTuple):
    """What a step did: its loss, every micro-batch's, the gradient's norm, and the gradient by leaf."""

    loss: float
    micro_losses: np.ndarray
    norm: float
    gradients: dict[str, np.ndarray]


def run(model, case, batch=None, **more):
    step = case.step(model, **more)
    state = place(step, initial(model, tuple(more.get("frozen_parameters", ()))))
    before = names(jax.device_get(state.params))
    state, metrics, details = step.run(state, step.prepare([batch_of(case) if batch is None else batch]))
    assert not metrics["skipped"]
    for x in jax.tree.leaves(state.params):
        parts = {}
        for shard in x.addressable_shards:  # what lies on several devices is the same on all of them
            np.testing.assert_array_equal(shard.data, parts.setdefault(str(shard.index), shard.data))
    after = names(jax.device_get(state.params))
    gradients = {name: (np.float64(x) - np.float64(after[name])) / LR for name, x in before.items()}
    return Done(float(metrics["loss"]), np.asarray(details.micro_losses), float(metrics["grad_norm"]), gradients)


def assert_close(ours, theirs):
    np.testing.assert_allclose(ours.micro_losses, theirs.micro_losses, rtol=BOUND)
    np.testing.assert_allclose(ours.loss, theirs.loss, rtol=BOUND)
    np.testing.assert_allclose(ours.norm, theirs.norm, rtol=BOUND)
    norm = np.linalg.norm
    for name, b in theirs.gradients.items():
        assert norm(ours.gradients[name] - b) <= BOUND * (norm(b) or 1), name


def check(model, case, **more):
    ours = run(model, case, **more)
    assert_close(ours, run(model, case.unpipelined, **more))
    return ours
