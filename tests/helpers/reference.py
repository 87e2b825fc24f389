"""Models, the plain single-device optax loop, and the layouts compared with it on the same global batches."""

from functools import lru_cache
from itertools import product
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.oracle import mean_of, plain_loop, stacked_loss
from helpers.steps import settings

import jzero
from models.llama import Llama, LlamaConfig
from models.mlp import MLP, cross_entropy

BATCH, SEQUENCE, VOCAB, WIDTH, STEPS = 32, 8, 64, 16, 10
LR, DECAY = 1e-3, 0.1
CLIP = {"untied": 0.71, "tied": 0.71, "decoder": 0.53, "mlp": 0.85}  # among the gradient norms of the ten steps
ADAMW = {"type": "AdamW", "params": {"lr": LR, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": DECAY}}


class Decoder:
    """A layer stack without attention, in plain JAX; JAX's attention on CPUs has no float16."""

    def __init__(self, layers=2, tied=False, vocab=VOCAB):
        self.layers, self.tied, self.vocab = layers, tied, vocab

    def init(self, rng):
        keys = jax.random.split(rng, 4)
        normal = lambda key, *shape: 0.3 * jax.random.normal(key, shape)  # noqa: E731
        head = {} if self.tied else {"head": normal(keys[1], WIDTH, self.vocab)}
        stack = {"w": normal(keys[2], self.layers, WIDTH, WIDTH), "b": normal(keys[3], self.layers, WIDTH)}
        return {"ends": {"embed": normal(keys[0], self.vocab, WIDTH), **head}, "stack": stack}

    def prefix(self, ends, batch, rng):
        return ends["embed"][batch["inputs"]]

    def block(self, layer, x, rng):
        return x + jnp.tanh(x @ layer["w"] + layer["b"])

    def suffix(self, ends, x, batch, rng):
        head = ends["embed"].T if self.tied else ends["head"]
        return mean_over_labels((x @ head).astype(jnp.float32), batch["labels"])

    loss = stacked_loss


def mean_over_labels(logits, labels):
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.maximum(labels, 0))
    return jzero.Mean(jnp.sum(losses, where=labels >= 0), (labels >= 0).sum())


@lru_cache
def model(name):
    if name == "decoder":
        return Decoder()
    if name == "mlp":
        return jzero.from_flax(lambda rngs: MLP(20, 16, 10, rngs=rngs), cross_entropy)
    config = LlamaConfig(2, 32, 4, 2, 48, vocab_size=VOCAB, tied=name == "tied")
    return jzero.from_flax(lambda rngs: Llama(config, rngs=rngs))


@lru_cache
def batches(name):
    """Ten global batches. Rows have 1 to SEQUENCE labels that count: a mean of means would be another number."""
    rng = np.random.default_rng(0)
    if name == "mlp":
        images, labels = rng.normal(size=(STEPS, BATCH, 20)), rng.integers(0, 10, (STEPS, BATCH))
        return list(zip(images.astype(np.float32), labels.astype(np.int32), strict=True))
    tokens = rng.integers(0, VOCAB, (STEPS, BATCH, SEQUENCE + 1)).astype(np.int32)
    lengths = rng.integers(1, SEQUENCE + 1, (STEPS, BATCH, 1))
    labels = np.where(np.arange(SEQUENCE) < lengths, tokens[..., 1:], -1)
    return [{"inputs": x[:, :-1], "labels": y} for x, y in zip(tokens, labels, strict=True)]


@lru_cache
def initial(name):
    return jax.device_get(jax.jit(model(name).init)(jax.random.key(0)))


@lru_cache
def reference(name):
    tx = optax.chain(optax.clip_by_global_norm(CLIP[name]), optax.adamw(LR, weight_decay=DECAY))
    run = plain_loop(mean_of(model(name)), initial(name), batches(name), tx)
    assert min(run.norms) < CLIP[name] < max(run.norms), (name, run.norms)
    return run


class Layout(NamedTuple):
    stage: int
    zero: int
    accum: int
    remat: str = "none"
    unroll: bool = True
    precision: str = "fp32"
    data: int = 1

    @property
    def mesh(self):
        return jzero.make_mesh(data=self.data, zero=self.zero, devices=jax.devices()[: self.data * self.zero])

    def config(self, **more):
        precision = {} if self.precision == "fp32" else {self.precision: {"enabled": True}}
        layers = {"activation_checkpointing": {"policy": self.remat}, "stack": {"unroll": self.unroll}}
        return settings(BATCH, self.stage, self.accum, optimizer=ADAMW, **precision) | layers | more


REMATS = ("none", "full", "matmuls")
COUNTS = (1, 2, 4, 8)
LLAMA_LAYOUTS = [
    Layout(s, n, (1, 4)[(s + k + p) % 2], REMATS[(s + 2 * k + p) % 3], (s // 2 + k + p) % 2 == 0, precision)
    for p, precision in enumerate(("fp32", "bf16"))
    for s, (k, n) in product(range(4), enumerate(COUNTS))
]
HSDP_LAYOUTS = [
    Layout(s, zero, (1, 2, 4)[(s + k) % 3], REMATS[(s + k) % 3], (s + k) % 2 == 0, precision, data=8 // zero)
    for s, (k, zero) in product(range(4), enumerate((4, 2)))
    for precision in (("fp32", "bf16") if s == 2 + k else ("fp32",))
]
DECODER_LAYOUTS = [
    Layout(s, COUNTS[3 - (s + shift) % 4], (4, 1)[(s + shift) % 2], REMATS[(s + shift) % 3], s % 2 == shift, "fp16")
    for s, shift in product(range(4), (0, 1))
]
MLP_LAYOUTS = [
    Layout(1, 8, 1, "full"),
    Layout(3, 2, 1, "matmuls"),
    Layout(2, 4, 1, "none", precision="bf16"),
    Layout(3, 8, 4, "none", precision="fp16"),
    Layout(3, 4, 2, "none", data=2),
]


def cases(layouts):
    return pytest.mark.parametrize("layout", layouts, ids=str)


@lru_cache
def new_state(name, precision):
    """A new state for all layouts, born on one device; `init` on the others is a test of its own."""
    layout = Layout(0, 1, 1, precision=precision)
    return jzero.make_train_step(model(name), layout.config(), mesh=layout.mesh).init(jax.random.key(0))


def prepare(name, layout, **more):
    config = layout.config(**{"gradient_clipping": CLIP[name], **more})
    step = jzero.make_train_step(model(name), config, mesh=layout.mesh)
    return step, place(step, new_state(name, layout.precision))


def place(step, state):
    return jax.device_put(jax.tree.map(jnp.copy, state), step.state_shardings)


def train(step, state, data):
    metrics = []
    for batch in data:
        state, m = step(state, batch)
        metrics.append(m)
    assert not any(m["skipped"] for m in metrics)
    return np.array([m["loss"] for m in metrics]), np.array([m["grad_norm"] for m in metrics]), state


def leaf_errors(ours, theirs, start):
    """Per leaf, how far the two are apart, in units of how far `theirs` has come from `start`."""

    def error(a, b, c):
        return np.linalg.norm(np.float64(a) - np.float64(b)) / np.linalg.norm(np.float64(b) - np.float64(c))

    return max(jax.tree.leaves(jax.tree.map(error, jax.device_get(ours), theirs, start)))


def check_against_reference(name, layout, **more):
    step, state = prepare(name, layout, **more)
    losses, norms, state = train(step, state, batches(name))
    run = reference(name)
    if layout.precision != "fp32":
        np.testing.assert_allclose(losses, run.losses, rtol=1e-2)
        return
    np.testing.assert_allclose(losses, run.losses, rtol=1e-6)
    np.testing.assert_allclose(norms, run.norms, rtol=1e-6)
    # Adam's first moment is linear in the gradients: what differs is the order of their sums, 1e-7 of the largest
    # terms, more where they cancel (measured: 6e-6 of a leaf's norm).
    mu, known = (optax.tree.get(one.opt_state, "mu") for one in (state, run))
    assert leaf_errors(mu, known, jax.tree.map(np.zeros_like, known)) < 2e-5
    # Its update divides by the root of the second, so an element whose gradient is rounding noise moves by a full
    # learning rate in a direction that is noise too. Hence norms of whole leaves (measured: 2e-5), not elements.
    assert leaf_errors(state.params, run.params, initial(name)) < 1e-4


def leaves(tree):
    is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)  # noqa: E731
    return [np.asarray(jax.random.key_data(x) if is_key(x) else x) for x in jax.tree.leaves(tree)]


def assert_bitwise(a, b):
    for x, y in zip(leaves(a), leaves(b), strict=True):
        assert x.dtype == y.dtype
        assert x.tobytes() == y.tobytes()
