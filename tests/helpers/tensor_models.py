"""Unmodified models, and layouts of them beside the plain loop; SGD's parameters show an error in a gradient."""

import dataclasses
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen, nnx
from helpers.oracle import largest_error, mean_of, plain_loop, train
from helpers.reference import Decoder, mean_over_labels
from helpers.steps import mesh, settings

import jzero
from jzero.pipeline.module import LayerSpec, PipelineModule, TiedLayerSpec
from models.bert import Bert, BertConfig
from models.gpt2 import GPT2, GPT2Config
from models.llama import Llama, LlamaConfig
from models.lora import LoRAConfig
from models.moe import MixtureConfig
from models.vit import ViT, ViTConfig

VOCAB, WIDTH, BATCH, SEQUENCE, STEPS, LR = 64, 32, 16, 8, 3, 0.1


class Block(nnx.Module):
    def __init__(self, *, rngs):
        self.norm1 = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attn = nnx.MultiHeadAttention(4, WIDTH, decode=False, rngs=rngs)
        self.norm2 = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        x = x + self.attn(self.norm1(x), mask=nnx.make_causal_mask(x[..., 0]))
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


class GPT(nnx.Module):
    """A layer stack, a vocabulary-parallel embedding, head and loss, without a line about parallelism."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)

        @nnx.split_rngs(splits=2)
        @nnx.vmap
        def blocks(rngs):
            return Block(rngs=rngs)

        self.stack = blocks(rngs)
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.head = nnx.Linear(WIDTH, VOCAB, use_bias=False, rngs=rngs)

    def prefix(self, batch):
        tokens = batch["inputs"]
        return self.embed(tokens) + nnx.one_hot(jnp.arange(tokens.shape[1]), WIDTH)

    def suffix(self, x, batch):
        return mean_over_labels(self.head(self.norm(x)).astype(jnp.float32), batch["labels"])


class Dropping(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.up, self.down = nnx.Linear(WIDTH, 64, rngs=rngs), nnx.Linear(64, WIDTH, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        return x + self.drop(self.down(self.drop(nnx.gelu(self.up(x)))))


class LinenBlock(linen.Module):
    @linen.compact
    def __call__(self, x):
        y = linen.LayerNorm()(x)
        x = x + linen.MultiHeadDotProductAttention(4)(y, mask=linen.make_causal_mask(x[..., 0]))
        y = linen.Dense(4 * WIDTH)(linen.LayerNorm()(x))
        return x + linen.Dense(WIDTH)(linen.gelu(y))


class LinenGPT(linen.Module):
    @linen.compact
    def __call__(self, tokens):
        x = linen.Embed(VOCAB, WIDTH)(tokens)
        for _ in range(2):
            x = LinenBlock()(x)
        return linen.Dense(VOCAB, use_bias=False)(linen.LayerNorm()(x))


def list_of_layers():
    embed, head = (TiedLayerSpec("tokens", nnx.Embed, VOCAB, WIDTH, forward_fn=f) for f in (None, nnx.Embed.attend))
    layers = [embed, *[LayerSpec(Block)] * 4, LayerSpec(nnx.LayerNorm, WIDTH), head]
    return PipelineModule(layers, loss_fn=mean_over_labels)


def linen_loss(module, batch):
    logits = module(batch["inputs"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, jnp.maximum(batch["labels"], 0)).mean()


PACKED = LlamaConfig(2, WIDTH, 4, 2, 2 * WIDTH, vocab_size=VOCAB, attention="xla")  # reads the segments
ODD = dataclasses.replace(PACKED, vocab_size=VOCAB + 3)
MORE = {"qkv_bias": True, "qk_norm": "shared", "norms": "both", "lora": LoRAConfig(4, 8, "all-linear")}
BLOCKS = (2, WIDTH, 4, 2 * WIDTH)
TEXT = {"vocab_size": VOCAB, "max_positions": SEQUENCE, "attention": "xla"}
ZOO = {
    "llama": (Llama, PACKED),
    "four-layers": (Llama, dataclasses.replace(PACKED, num_layers=4, vocab_size=VOCAB + 1)),  # `pipe` cannot divide it
    "mixture": (Llama, dataclasses.replace(PACKED, mixture=MixtureConfig(4, 2, 16, balance=0.0))),
    "more": (Llama, dataclasses.replace(PACKED, **MORE)),
    "multi-query": (Llama, dataclasses.replace(PACKED, num_kv_heads=1)),
    "tiled": (Llama, dataclasses.replace(PACKED, loss_tiles=2, mlp_tiles=2)),
    "two-heads": (Llama, dataclasses.replace(PACKED, num_heads=2)),
    "four": (Llama, dataclasses.replace(PACKED, num_layers=4)),
    "ring": (Llama, dataclasses.replace(PACKED, num_heads=2, attention="cudnn")),
    "odd": (Llama, ODD),
    "odd heads": (Llama, dataclasses.replace(ODD, num_kv_heads=1)),  # 2 divides neither
    "odd, tiled": (Llama, dataclasses.replace(ODD, loss_tiles=2, mlp_tiles=2)),
    "gpt2": (GPT2, GPT2Config(*BLOCKS, **TEXT)),
    "bert": (Bert, BertConfig(*BLOCKS, **TEXT)),
    "vit": (ViT, ViTConfig(*BLOCKS, num_classes=8, image_size=16, patch_size=4, attention="xla")),
}

FEED_FORWARD = {"up/kernel": 1, "up/bias": 0, "down/kernel": 0}
LAYER = {"attn/(query|key|value)/kernel": 1, "attn/(query|key|value)/bias": 0, "attn/out/kernel": 0} | FEED_FORWARD
DIMENSIONS = {
    **{name: {} for name in ZOO},  # the models have tables
    "multi-query": {"gate_up/kernel": 2, "attention/out/kernel": 0, "mlp/down/kernel": 0, "embed": 0, "head/kernel": 1},
    "nnx": LAYER | {"embed/embedding": 0, "head/kernel": 1},
    "decoder": {"stack/w": 1, "stack/b": 0, "embed": 0, "head": 1},
    "dropping": FEED_FORWARD | {"embedding": 0},
    "layers": LAYER | {"embedding": 0},
    "linen": {
        "(query|key|value)/kernel": 1, "(query|key|value)/bias": 0, "Attention_0/out/kernel": 0,
        "LinenBlock.*/Dense_0/kernel": 1, "LinenBlock.*/Dense_0/bias": 0, "LinenBlock.*/Dense_1/kernel": 0,
        "embedding": 0, "^Dense_0/kernel": 1,
    },
}  # fmt: skip


@lru_cache
def model(name):
    if name == "nnx":
        return jzero.from_flax(GPT)
    if name == "layers":
        return list_of_layers()
    if name == "decoder":
        return Decoder()
    if name == "dropping":
        return jzero.from_flax(Dropping, lambda net, batch: (net(batch["inputs"]) ** 2).mean())
    if name in ZOO:
        cls, config = ZOO[name]
        return jzero.from_flax(lambda rngs: cls(config, rngs=rngs))
    return jzero.from_flax(LinenGPT(), linen_loss, example_batch=batches()[0])


@lru_cache
def batches(name=None):
    rng = np.random.default_rng(0)
    if name == "vit":
        images = rng.normal(size=(STEPS, BATCH, 16, 16, 3)).astype(np.float32)
        return [{"images": x, "labels": rng.integers(0, 8, BATCH).astype(np.int32)} for x in images]
    tokens = rng.integers(0, VOCAB, (STEPS, BATCH, SEQUENCE + 1)).astype(np.int32)
    lengths = rng.integers(1, SEQUENCE + 1, (STEPS, BATCH, 1))
    labels = np.where(np.arange(SEQUENCE) < lengths, tokens[..., 1:], -1)
    segments = 1 + (np.arange(SEQUENCE) >= lengths).astype(np.int32)
    rows = zip(tokens, labels, segments, strict=True)
    if name == "layers":
        return [(x[:, :-1], y) for x, y, _ in rows]
    if name in ("two-heads", "ring"):
        return [{"inputs": x[:, :-1], "labels": y} for x, y, _ in rows]
    return [{"inputs": x[:, :-1], "labels": y, "segments": s} for x, y, s in rows]


@lru_cache
def initial(name):
    return jax.device_get(jax.jit(model(name).init)(jax.random.key(0)))


OPTIMIZERS = {  # name: (changes of the config, the same in optax)
    "SGD": ({}, optax.sgd(LR)),
    "clipped": ({"gradient_clipping": 0.5}, optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(LR))),
    "frozen": ({"frozen_parameters": ["attn/query", "embed"]}, optax.sgd(LR)),
}


@lru_cache
def reference(name, optimizer="SGD"):
    config, tx = OPTIMIZERS[optimizer]
    frozen = config.get("frozen_parameters", ())

    def constant(path, x):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        return jax.lax.stop_gradient(x) if any(part in name for part in frozen) else x

    def loss(params, batch):
        return mean_of(model(name))(jax.tree.map_with_path(constant, params), batch)

    run = plain_loop(loss, initial(name), batches(name), tx)
    assert optimizer != "clipped" or run.norms[0] > 0.5
    return run


def make_step(
    subject, *, stage=0, accum=1, remat="none", unroll=True, dimensions=None, optimizer="SGD", precision=None,
    pipeline=None, zero_section=None, regather=False, more=None, **degrees
):  # fmt: skip
    """A train step of a model, or of the one with this name; `more` are changes of the config, section by section."""
    named = isinstance(subject, str)
    if dimensions is None:
        dimensions = DIMENSIONS[subject] if named and degrees.get("tensor", 1) > 1 else {}
    config = settings(BATCH, stage, accum, LR) | {
        "activation_checkpointing": {"policy": remat}, "stack": {"unroll": unroll},
        "tensor_parallel": {"dimensions": dimensions, "regather": regather}, "pipeline": pipeline or {},
        **OPTIMIZERS[optimizer][0], **(precision or {}),
    }  # fmt: skip
    config["zero_optimization"] |= zero_section or {}
    for key, section in (more or {}).items():
        config[key] = config[key] | section if key in config else section
    return jzero.make_train_step(model(subject) if named else subject, config, mesh=mesh(**{"zero": 1, **degrees}))


def errors(name, oracle=None, optimizer="SGD", **layout):
    """The largest relative error of losses and gradient norms; that of the parameters; the step.

    The oracle is another model, which computes the same.
    """
    step = make_step(name, optimizer=optimizer, **layout)
    seen, state = train(step, initial(name), batches(name))
    known = reference(oracle or name, optimizer)
    return np.abs(seen / known.seen - 1).max(), largest_error(state.params, known.params), step


def assert_one_device(name, **layout):
    losses, parameters, step = errors(name, **layout)
    assert losses < 1e-6
    assert parameters < 2e-6  # one unit in the last place of an element is 1e-7 of the leaf; three steps add up
    return step
