"""A decoder whose layers are mixtures of experts, its batches, the plain loop, and train steps and engines of it."""

import dataclasses
from functools import lru_cache
from typing import ClassVar

import jax
import numpy as np
import optax
from flax import nnx
from helpers import tensor_models
from helpers.mixtures import plain_mixtures
from helpers.named_models import model_of
from helpers.oracle import plain_loop
from helpers.steps import mesh, settings
from helpers.tensor_models import BATCH, LR, SEQUENCE, STEPS, VOCAB

import jzero
from models.decoder_config import DecoderConfig
from models.moe import MixtureConfig

CONFIG = DecoderConfig(2, 32, 4, 2, 64, vocab_size=VOCAB, attention="xla", mixture=MixtureConfig(4, 2, 16))
QUIET = dataclasses.replace(CONFIG, num_layers=4, mixture=dataclasses.replace(CONFIG.mixture, balance=0.0))
SGD = optax.sgd(LR)
CLIPPED = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2, eps=1e-3, weight_decay=0.1))  # of make_engine
CHUNKED = {"schedule": "interleaved", "chunks": 2}
OFFLOADED = {"offload_optimizer": {"device": "cpu"}}
LAYOUTS = {
    "pipe x tensor": ({"pipe": 2, "tensor": 2}, 0, {"schedule": "zero_bubble"}, {}),
    "pipe x expert x context": ({"pipe": 2, "expert": 2, "context": 2}, 2, CHUNKED, {}),
    "expert x context x tensor": ({"expert": 2, "context": 2, "tensor": 2}, 3, {}, {}),
    "data x zero x tensor, offloaded": ({"data": 2, "zero": 2, "tensor": 2}, 3, {}, OFFLOADED),
    "zero x context, scanned": ({"zero": 2, "context": 2}, 3, {}, {}),
    "zero": ({"zero": 4}, 2, {}, {}),
    "expert": ({"expert": 4}, 3, {}, {}),
    "one": ({}, 0, {}, {}),
}
model = lru_cache(model_of)


@lru_cache
def initial(config):
    return jax.device_get(jax.jit(model(config).init)(jax.random.key(0)))


@lru_cache
def batches():
    tokens = np.random.default_rng(0).integers(0, VOCAB, (STEPS, BATCH, SEQUENCE + 1)).astype(np.int32)
    return [{"inputs": x[:, :-1], "labels": x[:, 1:]} for x in tokens]


def config_of(layout, factor):
    """The balance loss of a replica is not linear in its rows, so it counts only where one replica has the batch."""
    balance = 0.01 if layout.get("accum", 1) == layout.get("zero", 1) == layout.get("data", 1) == 1 else 0.0
    mixture = dataclasses.replace(CONFIG.mixture, capacity_factor=factor, balance=balance)
    return dataclasses.replace(CONFIG, mixture=mixture)


@lru_cache
def reference(config, tx=SGD):
    def mean(params, batch):
        if config == QUIET:  # no loss but the logits': by Flax and optax alone
            logits = model(config).module(params)(batch["inputs"])
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()
        loss, _ = model(config).loss(params, batch, None)
        return loss.sum / loss.count

    with plain_mixtures():
        return plain_loop(mean, initial(config), batches(), tx)


def make_step(config, *, schedule="1f1b", more=None, **layout):
    pipeline = {"pipeline": {"schedule": schedule}} if "pipe" in layout else {}
    return tensor_models.make_step(model(config), more=pipeline | (more or {}), **layout)


def make_engine(name):
    """Make an engine of QUIET in a layout of LAYOUTS."""
    degrees, stage, pipeline, offload = LAYOUTS[name]
    adamw = {"type": "AdamW", "params": {"lr": 1e-2, "eps": 1e-3, "weight_decay": 0.1}}
    degrees, unroll = {"zero": 1, **degrees}, not ("scanned" in name or offload)
    config = settings(BATCH, stage, 2, gradient_clipping=0.5, optimizer=adamw, mesh=degrees, pipeline=pipeline,
                      stack={"unroll": unroll}, steps_per_print=None)  # fmt: skip
    config["zero_optimization"] |= offload
    return jzero.initialize(model=model(QUIET), config=config, mesh=mesh(**degrees), params=initial(QUIET))[0]


class Own(nnx.Module):
    def __init__(self, rngs):
        self.router = nnx.Linear(16, 4, use_bias=False, rngs=rngs)
        self.up = nnx.Param(jax.random.normal(rngs.params(), (4, 16, 2, 8)) / 4)
        self.down = nnx.Param(jax.random.normal(rngs.params(), (4, 8, 16)) / 4)

    def __call__(self, x):
        return x + jzero.experts(x, jzero.route(self.router(x), 2), self.up[...], self.down[...])


class OwnModel(nnx.Module):
    divided: ClassVar = {"expert": {"blocks/.*/(up|down)$": 0}}

    def __init__(self, rngs):
        self.embed = nnx.Embed(VOCAB, 16, rngs=rngs)
        self.blocks = nnx.List([Own(rngs) for _ in range(2)])

    def __call__(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.embed.attend(x)


class BothTables(OwnModel):
    divided: ClassVar = OwnModel.divided | {"tensor": {"(up|down)$": 0, "embed": 1}}


def divided_by_both(model, **more):
    config = {"train_batch_size": 8, "optimizer": {"type": "Adam"}, "mesh": {"expert": 4, "tensor": 2, "zero": 1}}
    mesh = jzero.make_mesh(expert=4, tensor=2, zero=1, devices=jax.devices())
    return jzero.make_train_step(jzero.from_flax(model, own_loss), config | more, mesh=mesh)


def own_loss(module, batch):
    return optax.softmax_cross_entropy_with_integer_labels(module(batch["inputs"]), batch["labels"]).mean()
