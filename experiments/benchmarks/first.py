"""Measure what people run first on one GPU, by jzero, plain Flax with optax, and PyTorch: a JSON line for each.

    python -m experiments.benchmarks.first --case gpt2 bert-large --runner jzero torch

bf16 products over float32 weights and AdamW's float32 moments, random data on the device, no remat; clipping where a
language model has it. Each line comes from a process of its own. `first_torch.py` has the models in PyTorch.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jzero
from experiments.resnet import ResNet
from models.bert import Bert, BertConfig
from models.gpt2 import GPT2, GPT2Config
from models.llama import Llama, preset
from models.lora import LoRAConfig
from models.vit import ViT, ViTConfig

from .gpu import measure

RATE, DECAY = 3e-4, 0.1
Build = Callable[[nnx.Rngs], nnx.Module]


class Case(NamedTuple):
    """A model, its batch, and what differs from other cases.

    Attributes:
      build: rngs -> module, as jzero gets it.
      rows, length: of a batch; images have no length.
      vocab: words, or classes of images.
      plain: rngs -> module with layers of Flax alone; None: there is no such runner.
      config: jzero's, what is not the same for all.
    """

    build: Build
    rows: int
    length: int = 0
    vocab: int = 1000
    plain: Build | None = None
    config: dict[str, Any] = {}  # noqa: RUF012  # nobody writes into it


class Layer(nnx.Module):
    """A block as in GPT-2, or with norms after the sums as in BERT, of Flax's layers alone."""

    def __init__(self, d: int, heads: int, causal: bool, dropout: float, rngs: nnx.Rngs):
        self.heads, self.causal = heads, causal
        self.norms = nnx.List([nnx.LayerNorm(d, rngs=rngs) for _ in range(2)])
        self.qkv, self.out = nnx.Linear(d, 3 * d, rngs=rngs), nnx.Linear(d, d, rngs=rngs)
        self.up, self.down = nnx.Linear(d, 4 * d, rngs=rngs), nnx.Linear(4 * d, d, rngs=rngs)
        self.dropout = nnx.Dropout(dropout, rngs=rngs)

    def attention(self, x: jax.Array) -> jax.Array:
        q, k, v = (y.reshape(*y.shape[:2], self.heads, -1) for y in jnp.split(self.qkv(x), 3, axis=-1))
        y = jzero.attention(q, k, v, is_causal=self.causal)
        return self.dropout(self.out(y.reshape(x.shape)))

    def mlp(self, x: jax.Array) -> jax.Array:
        return self.dropout(self.down(nnx.gelu(self.up(x), approximate=self.causal)))

    def __call__(self, x: jax.Array) -> jax.Array:
        first, second = self.norms
        if self.causal:
            x = x + self.attention(first(x))
            return x + self.mlp(second(x))
        x = first(x + self.attention(x))
        return second(x + self.mlp(x))


class Transformer(nnx.Module):
    """Tokens -> logits, with a tied head."""

    def __init__(self, vocab: int, shape: tuple[int, int, int], length: int, causal: bool, dropout: float, rngs: Any):
        layers, d, heads = shape
        self.embed, self.positions = (nnx.Embed(n, d, rngs=rngs) for n in (vocab, length))
        self.layers = nnx.List([Layer(d, heads, causal, dropout, rngs) for _ in range(layers)])
        self.norm, self.dropout = nnx.LayerNorm(d, rngs=rngs), nnx.Dropout(dropout, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.dropout(self.embed(tokens) + self.positions(jnp.arange(tokens.shape[1])))
        for layer in self.layers:
            x = layer(x)
        return self.embed.attend(self.norm(x))


def transformer(vocab: int, shape: tuple[int, int, int], length: int, causal: bool = True, dropout: float = 0) -> Build:
    return lambda rngs: Transformer(vocab, shape, length, causal, dropout, rngs)


GPT2_124M = GPT2Config(12, 768, 12, 3072, pad_vocab_to=128)
GPT2_774M = GPT2Config(36, 1280, 20, 5120, pad_vocab_to=128)
BERT = BertConfig(24, 1024, 16, 4096, pad_vocab_to=128)
LORA = LoRAConfig(r=16, lora_alpha=32, target_modules="all-linear")
DROPOUT = transformer(50304, (12, 768, 12), 1024, dropout=0.1)
CLIP = {"gradient_clipping": 1.0}
FROZEN = {**CLIP, "trainable_parameters": ["lora_"]}

CASES = {
    "gpt2": Case(
        lambda rngs: GPT2(GPT2_124M, rngs=rngs), 32, 1024, 50257, transformer(50304, (12, 768, 12), 1024), CLIP
    ),
    "gpt2-large": Case(
        lambda rngs: GPT2(GPT2_774M, rngs=rngs), 8, 1024, 50257, transformer(50304, (36, 1280, 20), 1024), CLIP
    ),
    "bert-large": Case(
        lambda rngs: Bert(BERT, rngs=rngs), 32, 512, 30522, transformer(30592, (24, 1024, 16), 512, False), CLIP
    ),
    "vit": Case(lambda rngs: ViT(ViTConfig(12, 768, 12, 3072), rngs=rngs), 256),
    "lora-8b": Case(lambda rngs: Llama(preset("8b", lora=LORA), rngs=rngs), 2, 4096, 32000, None, FROZEN),
    "llama-125m": Case(lambda rngs: Llama(preset("125m"), rngs=rngs), 8, 4096, 32000, None, CLIP),
    "gpt2-dropout": Case(DROPOUT, 32, 1024, 50257, DROPOUT, CLIP),
    "resnet50": Case(ResNet, 256, plain=lambda rngs: ResNet(rngs, dtype=jnp.bfloat16)),
}


def loss_fn(model: Any, batch: dict[str, jax.Array]) -> jax.Array:
    """The mean cross-entropy of modules that return logits, in float32."""
    logits = model(batch["images" if "images" in batch else "inputs"]).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()


def batch_of(case: Case) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    if not case.length:
        images = rng.standard_normal((case.rows, 224, 224, 3), dtype=np.float32)
        return {"images": images, "labels": rng.integers(0, case.vocab, case.rows).astype(np.int32)}
    tokens = rng.integers(0, case.vocab, (case.rows, case.length + 1), dtype=np.int32)
    return {"inputs": tokens[:, :-1], "labels": tokens[:, 1:]}


def run_jzero(case: Case) -> Callable[[], Any]:
    config = {
        "train_batch_size": case.rows,
        "optimizer": {"type": "AdamW", "params": {"lr": RATE, "weight_decay": DECAY}},
        "bf16": {"enabled": True},
        **case.config,
    }
    own_loss = hasattr(nnx.eval_shape(lambda: case.build(nnx.Rngs(0))), "suffix")
    model = jzero.from_flax(case.build, None if own_loss else loss_fn)
    step = jzero.make_train_step(model, config, mesh=jzero.make_mesh(devices=jax.devices()[:1]))
    batch, state = step.place(batch_of(case)), step.init(jax.random.key(0))

    def run() -> Any:
        nonlocal state
        state, metrics = step(state, batch)
        return metrics["loss"]

    return run


def run_flax(case: Case) -> Callable[[], Any]:
    optimizer = optax.adamw(RATE, weight_decay=DECAY)
    if "gradient_clipping" in case.config:
        optimizer = optax.chain(optax.clip_by_global_norm(case.config["gradient_clipping"]), optimizer)

    def start() -> Any:
        _, params, rest = nnx.split(case.plain(nnx.Rngs(0)), nnx.Param, ...)
        return params, rest, optimizer.init(params)

    graph = nnx.graphdef(nnx.eval_shape(lambda: case.plain(nnx.Rngs(0))))

    def step(params: Any, rest: Any, state: Any, batch: Any) -> Any:
        def loss(params: Any) -> Any:
            half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
            module = nnx.merge(graph, half, jax.tree.map(lambda x: x, rest))  # variables of this trace, to change
            halves = {name: x.astype(jnp.bfloat16) if name == "images" else x for name, x in batch.items()}
            return loss_fn(module, halves), nnx.split(module, nnx.Param, ...)[2]

        (value, rest), gradients = jax.value_and_grad(loss, has_aux=True)(params)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), rest, state, value

    params, rest, state = jax.jit(start)()
    batch, compiled = jax.device_put(batch_of(case)), jax.jit(step, donate_argnums=(0, 1, 2))

    def run() -> Any:
        nonlocal params, rest, state
        params, rest, state, loss = compiled(params, rest, state, batch)
        return loss

    return run


def one(name: str, runner: str) -> dict[str, Any]:
    """Run a case here; return its record."""
    begin, case = time.perf_counter(), CASES[name]
    if runner == "torch":
        from . import first_torch

        return first_torch.measured(name, case, batch_of(case))
    run = {"jzero": run_jzero, "flax": run_flax}[runner](case)
    first = float(run())
    start_s = time.perf_counter() - begin
    found = measure(run, steps=steps(run, float))
    device = jax.devices()[0]
    peak = device.memory_stats()["peak_bytes_in_use"] / 2**30
    losses = [round(first, 4), round(float(run()), 4)]
    versions = {"jax": jax.__version__, "device": device.device_kind}
    return {**versions, "start_s": round(start_s, 1), **found, "peak_gib": round(peak, 2), "losses": losses}


def steps(run: Callable[[], Any], wait: Callable[[Any], Any]) -> int:
    """Return how many steps take a second, at most 20."""
    wait(run())
    begin = time.perf_counter()
    wait(run())
    return max(2, min(20, int(1 / (time.perf_counter() - begin))))


def main(argv: list[str] | None = None) -> None:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--case", nargs="+", choices=CASES, default=list(CASES))
    p.add_argument("--runner", nargs="+", choices=("jzero", "flax", "torch"), default=["jzero", "flax", "torch"])
    p.add_argument("--here", action="store_true", help="in this process: one case, one runner")
    args = p.parse_args(argv)
    if args.here:
        name, runner = args.case[0], args.runner[0]
        print(json.dumps({"case": name, "runner": runner, **one(name, runner)}), flush=True)
        return
    for name in args.case:
        for runner in args.runner:
            if runner == "flax" and CASES[name].plain is None:
                continue
            command = [sys.executable, "-m", __spec__.name, "--here", "--case", name, "--runner", runner]
            if subprocess.run(command, check=False).returncode:
                print(json.dumps({"case": name, "runner": runner, "failed": True}), flush=True)


if __name__ == "__main__":
    main()
