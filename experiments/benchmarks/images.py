"""Measure image training in bf16 on one GPU as one JSON line: ViT-B/16 or ResNet-50, jzero, plain Flax or PyTorch.

    python -m experiments.benchmarks.images --model vit --runner jzero

Random images on the device, AdamW over float32 weights and moments, no clipping, no remat. The plain loop is Flax and
optax under one jax.jit with the same modules; PyTorch's is torchvision's model, compiled, under autocast.
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jzero
from experiments.resnet import MACS, ResNet
from jzero.planner import gpu_devices, matmuls, memory
from jzero.step.update import NEVER
from models.vit import ViT, ViTConfig

from .gpu import PEAK, measure

RATE, DECAY = 1e-3, 0.1
VIT = ViTConfig(12, 768, 12, 3072)  # vit-base-patch16-224
MODELS = {"vit": lambda rngs: ViT(VIT, rngs=rngs), "resnet": ResNet}


def loss_fn(model: nnx.Module, batch: dict[str, jax.Array]) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(model(batch["images"]), batch["labels"]).mean()


def forward_flops(name: str) -> float:
    """Count the multiplications and additions of the products of a forward pass over one image."""
    if name == "resnet":
        return 2 * MACS
    S, D, F = VIT.num_patches + 1, VIT.d_model, VIT.d_ff
    layer = 2 * S * (4 * D**2 + 2 * D * F) + 4 * S**2 * D
    return VIT.num_layers * layer + 2 * VIT.num_patches * 3 * VIT.patch_size**2 * D + 2 * D * VIT.num_classes


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--model", choices=MODELS, required=True)
    p.add_argument("--runner", choices=("jzero", "plain", "torch"), default="jzero")
    p.add_argument("--batch", type=int, default=256, help="images")
    p.add_argument("--stage", type=int, default=0)
    p.add_argument("--plan", action="store_true", help="only compile, for an H200 that need not be there")
    return p.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    record = {**vars(args), "jax": jax.__version__}
    if args.plan:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_enable_compilation_cache", False)  # it cannot read back programs for absent GPUs
    record |= {"jzero": run_jzero, "plain": run_plain, "torch": run_torch}[args.runner](args)
    if "step_s" in record:
        rates = [args.batch / record[key] for key in ("step_s", "step_s_max", "step_s_min")]
        record |= dict(zip(("images_s", "images_s_min", "images_s_max"), map(round, rates), strict=True))
        record["mfu"] = round(rates[0] * 3 * forward_flops(args.model) / PEAK[record["device"]], 3)
    print(json.dumps(record), flush=True)


def batch_of(rows: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    images = rng.standard_normal((rows, 224, 224, 3), dtype=np.float32)
    return {"images": images, "labels": rng.integers(0, 1000, rows).astype(np.int32)}


def run_jzero(args: argparse.Namespace) -> dict[str, Any]:
    config = {
        "train_batch_size": args.batch,
        "optimizer": {"type": "AdamW", "params": {"lr": RATE, "betas": [0.9, 0.999], "weight_decay": DECAY}},
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": args.stage},
    }
    # The ViT is prefix, stack and suffix, and has its loss.
    model = jzero.from_flax(MODELS[args.model], None if args.model == "vit" else loss_fn)
    devices = gpu_devices("h200", 1, per_host=1) if args.plan else jax.devices()[:1]
    step = jzero.make_train_step(model, config, mesh=jzero.make_mesh(config, devices=devices))
    images = batch_of(args.batch if not args.plan else 1)
    shapes = {name: jax.ShapeDtypeStruct((args.batch, *x.shape[1:]), x.dtype) for name, x in images.items()}
    traced = step.trace(shapes)
    compiled = traced.lower().compile()
    planned = program(traced, compiled)
    if args.plan:
        return planned
    batch, state, losses = step.place(images), step.init(jax.random.key(0)), []

    def run() -> Any:
        nonlocal state
        state, metrics, _ = compiled(state, (batch,), None, None, NEVER, None)  # no extra, no rate from outside
        losses.append(metrics["loss"])
        return state

    return {**planned, **measure(run), **after(losses)}


def run_plain(args: argparse.Namespace) -> dict[str, Any]:
    build, optimizer = MODELS[args.model], optax.adamw(RATE, weight_decay=DECAY)
    if args.model == "resnet":  # or the float32 statistics of BatchNorm would widen all that follows
        build = partial(ResNet, dtype=jnp.bfloat16)

    def start() -> Any:
        _, params, rest = nnx.split(build(nnx.Rngs(0)), nnx.Param, ...)
        return params, rest, optimizer.init(params)

    graph = nnx.graphdef(nnx.eval_shape(lambda: build(nnx.Rngs(0))))

    def step(params: Any, rest: Any, state: Any, batch: Any) -> Any:
        def loss(params: Any) -> Any:
            half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
            module = nnx.merge(graph, half, jax.tree.map(lambda x: x, rest))  # variables of this trace, to change
            value = loss_fn(module, batch | {"images": batch["images"].astype(jnp.bfloat16)})
            return value, nnx.split(module, nnx.Param, ...)[2]

        (value, rest), gradients = jax.value_and_grad(loss, has_aux=True)(params)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), rest, state, value

    params, rest, state = jax.jit(start)()
    batch, losses = jax.device_put(batch_of(args.batch)), []
    traced = jax.jit(step, donate_argnums=(0, 1, 2)).trace(params, rest, state, batch)
    compiled = traced.lower().compile()

    def run() -> Any:
        nonlocal params, rest, state
        params, rest, state, loss = compiled(params, rest, state, batch)
        losses.append(loss)
        return params

    return {**program(traced, compiled), **measure(run), **after(losses)}


def run_torch(args: argparse.Namespace) -> dict[str, Any]:
    import torch
    import torchvision

    name = {"vit": "vit_b_16", "resnet": "resnet50"}[args.model]
    model = torch.compile(getattr(torchvision.models, name)().cuda().to(memory_format=torch.channels_last))
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=DECAY, fused=True)
    data = batch_of(args.batch)
    images = torch.from_numpy(data["images"]).cuda().permute(0, 3, 1, 2)  # the channels stay last in memory
    labels, losses = torch.from_numpy(data["labels"]).long().cuda(), []

    def run() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            loss = torch.nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())

    found = measure(run, lambda _: torch.cuda.synchronize())
    return {
        **found,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(),
        "peak_gib": gib(torch.cuda.max_memory_allocated()),
        "losses": [round(float(losses[0]), 4), round(float(losses[-1]), 4)],
    }


def program(traced: jax.stages.Traced, compiled: jax.stages.Compiled) -> dict[str, Any]:
    found = matmuls(traced)
    return {
        "planned_gib": gib(memory(compiled).peak),
        "products": found.count,
        "float32_products": found.float32,
        "float32_share_of_flops": round(found.float32_share, 4),
    }


def after(losses: list[jax.Array]) -> dict[str, Any]:
    device = jax.devices()[0]
    return {
        "device": device.device_kind,
        "peak_gib": gib(device.memory_stats()["peak_bytes_in_use"]),
        "losses": [round(float(losses[0]), 4), round(float(losses[-1]), 4)],
    }


def gib(size: float) -> float:
    return round(size / 2**30, 2)


if __name__ == "__main__":
    main()
