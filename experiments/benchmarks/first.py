"""Measure what people run first on one GPU, by jzero, plain Flax with optax, and PyTorch: a JSON line for each.

    python -m experiments.benchmarks.first --case gpt2 bert-large --runner jzero torch --out first.jsonl --minutes 9

bf16 products over float32 weights and AdamW's float32 moments, random data on the device, no remat; clipping where a
language model has it. Each line comes from a process of its own. Lines that the file has are not measured again, so the
same command goes on where another one ended; then it prints them as a table. `first_flax.py` has the models of plain
Flax, which jzero trains too where `models/` has none, and `first_torch.py` those of PyTorch.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jzero
from models.bert import Bert, BertConfig
from models.gpt2 import GPT2, GPT2Config
from models.llama import Llama, LlamaConfig
from models.lora import LoRAConfig
from models.vit import ViT, ViTConfig

from .first_flax import FAMILIES, Size
from .gpu import measure

DECAY = 0.1
CLIP = {"gradient_clipping": 1.0}
FROZEN = {**CLIP, "trainable_parameters": ["lora_"]}
LORA = LoRAConfig(r=16, lora_alpha=32, target_modules="all-linear")
RUNNERS = ("jzero", "flax", "torch", "torch-tuned")
LIMIT = 200  # seconds that a line may take


class Case(NamedTuple):
    """A model: its family, its shape, and what jzero's config has besides what is the same for all.

    Attributes:
      ours: whether jzero trains the model of `models/`; else the same Flax module as the plain loop.
      stack: its layers, as a user names them for jzero.
      rate: so small that each runner measures the weights of the start. At 3e-4 without a warm-up a BERT of PyTorch or
        Flax forgets its inputs, and rows that are alike draw less power.
    """

    family: str
    size: Size
    config: dict[str, Any] = {}  # noqa: RUF012  # nobody writes into it
    ours: bool = True
    stack: str | None = None
    rate: float = 1e-6

    def tiny(self) -> Case:
        """The same for a test on a CPU, which sees it learn."""
        small = {"rows": 2, "length": 32, "vocab": 128, "layers": 2, "d": 32, "heads": 2, "kv_heads": 2, "d_ff": 64}
        size = self.size._replace(**small, frames=32 if self.size.frames else 0)
        return self._replace(size=size, rate=3e-4)


CASES = {
    "gpt2": Case("gpt2", Size(32, 1024, 50257), CLIP),
    "gpt2-large": Case("gpt2", Size(8, 1024, 50257, 36, 1280, 20, d_ff=5120), CLIP),
    "gpt2-dropout": Case("gpt2", Size(32, 1024, 50257, dropout=0.1), CLIP, ours=False, stack="layers"),
    "bert-large": Case("bert", Size(32, 512, 30522, 24, 1024, 16, d_ff=4096), CLIP),
    "vit": Case("vit", Size(256, 224)),
    "llama-125m": Case("llama", Size(8, 4096, 32000, d_ff=2048), CLIP),
    "lora-8b": Case("lora", Size(2, 4096, 32000, 32, 4096, 32, 8, 14336), FROZEN),
    "resnet50": Case("resnet", Size(256, 224, layers=4, d=64), ours=False),
    "unet": Case("unet", Size(32, 256, 21, layers=5, d=64), ours=False),
    "whisper": Case("whisper", Size(16, 448, 51865, frames=3000), CLIP, ours=False),
}


def blocks(size: Size) -> tuple[int, int, int, int]:
    return size.layers, size.d, size.heads, size.d_ff


def gpt2(size: Size, rngs: nnx.Rngs) -> nnx.Module:
    shape = GPT2Config(*blocks(size), vocab_size=size.vocab, max_positions=size.length, pad_vocab_to=128)
    return GPT2(shape, rngs=rngs)


def bert(size: Size, rngs: nnx.Rngs) -> nnx.Module:
    shape = BertConfig(*blocks(size), vocab_size=size.vocab, max_positions=size.length, pad_vocab_to=128)
    return Bert(shape, rngs=rngs)


def vit(size: Size, rngs: nnx.Rngs) -> nnx.Module:
    return ViT(ViTConfig(*blocks(size), num_classes=size.vocab, image_size=size.length), rngs=rngs)


def llama(size: Size, rngs: nnx.Rngs, lora: LoRAConfig | None = None) -> nnx.Module:
    heads = size.heads, size.kv_heads
    shape = LlamaConfig(size.layers, size.d, *heads, size.d_ff, vocab_size=size.vocab, tied=lora is None, lora=lora)
    return Llama(shape, rngs=rngs)


OURS = {"gpt2": gpt2, "bert": bert, "vit": vit, "llama": llama, "lora": lambda size, rngs: llama(size, rngs, LORA)}


def loss_fn(model: Any, batch: dict[str, jax.Array]) -> jax.Array:
    """The mean cross-entropy of modules that return logits, in float32."""
    logits = model(*(batch[name] for name in sorted(batch.keys() - {"labels"}))).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()


def batch_of(case: Case) -> dict[str, np.ndarray]:
    rng, size = np.random.default_rng(0), case.size
    if case.family in ("vit", "resnet", "unet"):
        images = rng.standard_normal((size.rows, size.length, size.length, 3), dtype=np.float32)
        labels = images.shape[:3] if case.family == "unet" else size.rows
        return {"images": images, "labels": rng.integers(0, size.vocab, labels).astype(np.int32)}
    tokens = rng.integers(0, size.vocab, (size.rows, size.length + 1), dtype=np.int32)
    batch = {"inputs": tokens[:, :-1], "labels": tokens[:, 1:]}
    if size.frames:
        batch["audio"] = rng.standard_normal((size.rows, size.frames, 80), dtype=np.float32)
    return batch


def jzero_step(case: Case, mesh: jax.sharding.Mesh) -> jzero.TrainStep:
    config = {
        "train_batch_size": case.size.rows,
        "optimizer": {"type": "AdamW", "params": {"lr": case.rate, "weight_decay": DECAY}},
        "bf16": {"enabled": True},
        **case.config,
    }
    make = OURS[case.family] if case.ours else FAMILIES[case.family]
    model = jzero.from_flax(lambda rngs: make(case.size, rngs), None if case.ours else loss_fn, stack=case.stack)
    return jzero.make_train_step(model, config, mesh=mesh)


def run_jzero(case: Case) -> Callable[[], Any]:
    step = jzero_step(case, jzero.make_mesh(devices=jax.devices()[:1]))
    batch, state = step.place(batch_of(case)), step.init(jax.random.key(0))

    def run() -> Any:
        nonlocal state
        state, metrics = step(state, batch)
        return metrics["loss"]

    return run


def flax_step(case: Case) -> tuple[Callable[[], Any], Callable[..., Any]]:
    """Return start() -> (trained, rest, moments), and step(trained, rest, moments, batch) -> the same and the loss."""
    optimizer = optax.adamw(case.rate, weight_decay=DECAY)
    if "gradient_clipping" in case.config:
        optimizer = optax.chain(optax.clip_by_global_norm(case.config["gradient_clipping"]), optimizer)
    trained = nnx.LoRAParam if case.family == "lora" else nnx.Param

    def build() -> nnx.Module:
        return FAMILIES[case.family](case.size._replace(attention=jax.nn.dot_product_attention), nnx.Rngs(0))

    def start() -> Any:
        _, params, rest = nnx.split(build(), trained, ...)
        return params, rest, optimizer.init(params)

    graph = nnx.graphdef(nnx.eval_shape(build))

    def half(x: jax.Array) -> jax.Array:
        return x.astype(jnp.bfloat16) if jnp.issubdtype(x.dtype, jnp.floating) else x

    def step(params: Any, rest: Any, state: Any, batch: Any) -> Any:
        def loss(params: Any) -> Any:
            module = nnx.merge(graph, jax.tree.map(half, params), jax.tree.map(lambda x: x, rest))  # to change here
            return loss_fn(module, jax.tree.map(half, batch)), nnx.split(module, trained, ...)[2]

        (value, rest), gradients = jax.value_and_grad(loss, has_aux=True)(params)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), rest, state, value

    return start, step


def run_flax(case: Case) -> Callable[[], Any]:
    start, step = flax_step(case)
    held, batch, compiled = jax.jit(start)(), jax.device_put(batch_of(case)), jax.jit(step, donate_argnums=(0, 1, 2))

    def run() -> Any:
        nonlocal held
        *held, loss = compiled(*held, batch)
        return loss

    return run


def one(case: Case, runner: str) -> dict[str, Any]:
    """Run a case here; return its record."""
    begin = time.perf_counter()
    if runner.startswith("torch"):
        from . import first_torch

        return first_torch.measured(case, batch_of(case), tuned=runner == "torch-tuned")
    run = {"jzero": run_jzero, "flax": run_flax}[runner](case)
    first = float(run())
    start_s = time.perf_counter() - begin
    found = measure(run, steps=steps(run, float))
    device = jax.devices()[0]
    peak = (device.memory_stats() or {"peak_bytes_in_use": 0})["peak_bytes_in_use"] / 2**30  # CPUs have none
    losses = [round(first, 4), round(float(run()), 4)]
    versions = {"jax": jax.__version__, "device": device.device_kind}
    return {**versions, "start_s": round(start_s, 1), **found, "peak_gib": round(peak, 2), "losses": losses}


def steps(run: Callable[[], Any], wait: Callable[[Any], Any]) -> int:
    """Return how many steps take a second, at most 20."""
    wait(run())
    begin = time.perf_counter()
    wait(run())
    return max(2, min(20, int(1 / (time.perf_counter() - begin))))


def table(records: list[dict[str, Any]]) -> str:
    """Write the records as Markdown: milliseconds and GiB by runner, and the best of torch by jzero's."""
    found = {(r["case"], r["runner"]): r for r in records}
    lines = [f"| | {' | '.join(f'{runner}, ms (GiB)' for runner in RUNNERS)} | torch / jzero |", "|---" * 6 + "|"]
    for case in dict.fromkeys(r["case"] for r in records):
        row = [found.get((case, runner), {}) for runner in RUNNERS]
        cells = [f"{1000 * r['step_s']:.1f} ({r['peak_gib']})" if "step_s" in r else r.get("failed", "") for r in row]
        torch = min((r["step_s"] for r in row[2:] if "step_s" in r), default=0)
        ratio = f"{torch / row[0]['step_s']:.3f}" if torch and "step_s" in row[0] else ""
        lines.append(f"| {case} | {' | '.join(cells)} | {ratio} |")
    return "\n".join(lines)


def line(name: str, runner: str, options: list[str], seconds: float) -> dict[str, Any]:
    """Run a case in a process of its own; return its record."""
    command = [sys.executable, "-m", __spec__.name, "--here", "--case", name, "--runner", runner, *options]
    why = f"took more than {seconds:.0f} s"
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=seconds, check=False)
        if done.returncode == 0:
            return json.loads(done.stdout.splitlines()[-1])
        why = f"exit status {done.returncode}"
    except subprocess.TimeoutExpired:
        pass
    return {"case": name, "runner": runner, "failed": why}


def main(argv: list[str] | None = None) -> None:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--case", nargs="+", choices=CASES, default=list(CASES))
    p.add_argument("--runner", nargs="+", choices=RUNNERS, default=RUNNERS)
    p.add_argument("--out", type=Path, default=Path("first.jsonl"), help="the lines, measured now and before")
    p.add_argument("--minutes", type=float, default=600, help="after them no line begins")
    p.add_argument("--tiny", action="store_true", help="small shapes, for a look at a CPU")
    p.add_argument("--here", action="store_true", help="in this process: one case, one runner")
    args = p.parse_args(argv)
    if args.here:
        name, runner = args.case[0], args.runner[0]
        case = CASES[name].tiny() if args.tiny else CASES[name]
        print(json.dumps({"case": name, "runner": runner, **one(case, runner)}), flush=True)
        return
    records = [json.loads(text) for text in args.out.read_text().splitlines()] if args.out.exists() else []
    known, end = {(r["case"], r["runner"]) for r in records}, time.monotonic() + 60 * args.minutes
    for name, runner in ((name, runner) for runner in args.runner for name in args.case):
        if (name, runner) in known or time.monotonic() > end:
            continue
        records.append(line(name, runner, ["--tiny"] * args.tiny, min(LIMIT, max(1, end - time.monotonic()))))
        with args.out.open("a") as file:
            file.write(json.dumps(records[-1]) + "\n")
        print(json.dumps(records[-1]), flush=True)
    print(table(records))


if __name__ == "__main__":
    main()
