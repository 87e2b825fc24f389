"""Pretrain a Llama of any shape with any config and layout, on text or random tokens; or plan it for other GPUs.

    python -m experiments.pretrain --override mesh.pipe=2 --override zero_optimization.stage=2
    python -m experiments.pretrain --data runs/tokens/tokens.npy --pack --sequence 512
    python -m experiments.pretrain --preset 8b --sequence 4096 --plan 64 --gpu h200 --override mesh.pipe=4

The text is the source of Python's standard library, as bytes, or your text encoded by experiments.tokens.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from argparse import ArgumentParser, Namespace, RawTextHelpFormatter
from pathlib import Path
from typing import Any

import jax
import numpy as np

import jzero
from experiments.quickstart import HELD_OUT_BYTES, positive
from experiments.show import memory, steps_of
from experiments.text import BYTES, standard_library
from jzero import planner
from jzero.config.config import read_config
from jzero.data import Packed, TokenFile
from jzero.data.tokens import open_tokens, token_note
from models.llama import PRESETS, Llama, LlamaConfig, preset

CONFIG, CORPUS = Path(__file__).with_suffix(".json"), 16_000_000  # tokens


def main(argv: list[str] | None = None) -> None:
    p = ArgumentParser("pretrain", "%(prog)s [options]", __doc__, formatter_class=RawTextHelpFormatter)
    many: dict[str, Any] = {"type": assignment, "action": "append", "default": []}
    p.add_argument("--preset", choices=PRESETS, default="tiny", help="a shape of models/llama.py (default tiny)")
    p.add_argument("--set", **many, metavar="FIELD=VALUE", help="change the shape: num_layers=8")
    p.add_argument("--config", default=CONFIG, help="a config file (default experiments/pretrain.json)")
    p.add_argument("--override", **many, metavar="KEY.PATH=VALUE", help="change the config: mesh.pipe=2")
    p.add_argument("--random", action="store_true", help="train on random tokens instead of text")
    p.add_argument("--data", type=Path, metavar="FILE", help="train on a file of tokens; its last tenth is held out")
    p.add_argument("--pack", action="store_true", help="pack whole documents into rows; attention keeps them apart")
    p.add_argument("--sequence", type=positive, default=256, help="tokens per sequence (default 256)")
    p.add_argument("--steps", type=positive, help="the last step (default: the scheduler's total_num_steps, or 100)")
    p.add_argument(
        "--eval-every", type=positive, metavar="STEPS", help="steps between held-out losses (default: at the end)"
    )
    p.add_argument("--save", type=Path, metavar="DIR", help="save a checkpoint at the end")
    p.add_argument(
        "--save-every", type=positive, metavar="STEPS", help="steps between checkpoints (default: at the end)"
    )
    p.add_argument("--resume", type=Path, metavar="DIR", help="resume from the newest checkpoint there, of any layout")
    p.add_argument("--devices", type=positive, default=8, help="number of simulated devices without GPUs (default 8)")
    p.add_argument("--plan", type=positive, metavar="GPUS", help="only compile, for this number of GPUs")
    p.add_argument("--gpu", choices=planner.GPUS, default="h100", help="the GPU to plan for (default h100)")
    args = p.parse_args(argv)
    try:
        config = settings(args)
        (plan if args.plan else train)(args, config, changed_preset(args))
    except (jzero.ConfigError, FloatingPointError) as error:
        p.exit(2, f"pretrain: {error}\n")


def train(args: Namespace, config: jzero.Config, shape: LlamaConfig) -> None:
    if jzero.get_world_size() == 1:
        jax.config.update("jax_num_cpu_devices", args.devices)  # simulated devices, for a machine without GPUs
    steps = steps_of(args.steps, config)
    if args.save_every and not args.save:
        raise jzero.ConfigError("--save-every: requires --save DIR")
    training, held_out = data(args, shape)
    model = jzero.from_flax(lambda rngs: Llama(shape, rngs=rngs))
    engine, *_ = jzero.initialize(model=model, config=config, training_data=training, resume=args.resume)
    batch = engine.train_batch_size()
    rows = max(1, HELD_OUT_BYTES // args.sequence // batch) * batch
    evaluation = held_out.rows(np.linspace(0, len(held_out) - 1, rows).astype(int))
    reported = first = engine.global_steps + 1
    if first > steps:
        raise jzero.ConfigError(f"--steps {steps}: the checkpoint is at step {first - 1}; use a larger number")
    clock = time.perf_counter()
    for step in range(first, steps + 1):
        loss = engine.train_batch()
        evaluates = step % (args.eval_every or steps) == 0 or step == steps
        if evaluates or step == first or step % max(1, steps // 10) == 0:
            line, seconds = f"step {step:5}   loss {float(loss):.4f}", time.perf_counter() - clock
            speed = (step - reported) * batch * args.sequence / seconds
            tflops = speed * shape.flops_per_token(args.sequence) / engine.mesh.size / 1e12
            rate = f"{speed:,.0f} tokens/s   {tflops:.3g} model TFLOP/s per device   {memory() / 2**30:.2f} GiB"
            jzero.log_dist(f"{line}   {rate if step > first else f'{seconds:.1f} s, with compilation'}")
            if evaluates:
                jzero.log_dist(f"step {step:5}   held-out loss {float(engine.eval_batch(evaluation)):.4f}")
            reported, clock = step, time.perf_counter()
        if args.save and (step == steps or step % (args.save_every or steps) == 0):
            under_way = engine.save_checkpoint(args.save)
    if args.save:
        jzero.log_dist(f"saved in {args.save}: {under_way.wait().name}")


def plan(args: Namespace, config: jzero.Config, shape: LlamaConfig) -> None:
    jax.config.update("jax_platforms", "cpu")
    per_node = min(8, args.plan)
    if args.plan % per_node:
        raise jzero.ConfigError(f"--plan {args.plan}: {args.plan} GPUs do not fill nodes of {per_node}")

    def tokens(rows: int) -> dict[str, jax.ShapeDtypeStruct]:
        return {key: jax.ShapeDtypeStruct((rows, args.sequence), np.int32) for key in ("inputs", "labels")}

    model, nodes = jzero.from_flax(lambda rngs: Llama(shape, rngs=rngs)), args.plan // per_node
    made = jzero.plan(model, config, tokens, gpu=args.gpu, nodes=nodes, gpus_per_node=per_node)
    print(f"{jzero.report(made.step)}\n\n{made}")


def data(args: Namespace, shape: LlamaConfig) -> tuple[TokenFile | Packed, TokenFile]:
    """Make (training data, held-out data)."""
    if args.pack and not args.data:
        raise jzero.ConfigError("--pack: requires --data, a file of tokens with an end token after every document")
    if args.data:
        tokens, _ = open_tokens(args.data, shape.vocab_size)
        train, held_out = np.split(tokens, [len(tokens) - min(CORPUS, len(tokens)) // 10])
    elif args.random:
        rng = np.random.default_rng(0)
        train, held_out = (rng.integers(0, shape.vocab_size, size, np.int32) for size in (CORPUS, CORPUS // 10))
    else:
        train, held_out = standard_library(CORPUS)
    if args.sequence >= len(held_out):
        raise jzero.ConfigError(f"--sequence {args.sequence}: must be less than the {len(held_out)} held-out tokens")
    held_out = TokenFile(held_out, args.sequence, shape.vocab_size)
    if args.pack:
        end = token_note(args.data).get("end")
        return Packed(train, args.sequence, end=end, vocab_size=shape.vocab_size), held_out
    return TokenFile(train, args.sequence, shape.vocab_size), held_out


def settings(args: Namespace) -> jzero.Config:
    config = read_config(args.config)
    for key, value in args.override:
        inside, (*sections, name) = config, key.split(".")
        for section in sections:
            inside = inside.setdefault(section, {})
            if not isinstance(inside, dict):
                raise jzero.ConfigError(f"--override {key}: {section} is not a section but {inside!r}")
        inside[name] = value
    return jzero.Config.load(config)


def changed_preset(args: Namespace) -> LlamaConfig:
    """Return the preset with the vocabulary of the data and the changes of --set."""
    bytes_alone = not (args.random or args.plan or args.data)
    known = token_note(args.data).get("vocab_size") if args.data else BYTES if bytes_alone else None
    # A multiple of 64, because pipeline stages divide the vocabulary.
    shape = preset(args.preset, vocab_size=-(-known // 64) * 64) if known else preset(args.preset)
    for name, value in args.set:
        least = BYTES if bytes_alone and name == "vocab_size" else 1
        if type(value) is not type(vars(shape).get(name, ...)) or (type(value) is int and value < least):
            raise jzero.ConfigError(f"--set {name}={value}: not a field or value of {shape}")
    try:
        return dataclasses.replace(shape, **dict(args.set))
    except ValueError as error:
        raise jzero.ConfigError(f"--set: {error}") from None


def assignment(text: str) -> tuple[str, Any]:
    key, value = text.split("=", 1)
    with contextlib.suppress(ValueError):
        return key, json.loads(value)
    return key, value


if __name__ == "__main__":
    main()
