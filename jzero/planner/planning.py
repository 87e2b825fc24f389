"""What `jzero plan` does with its options."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import jax

from jzero.batch import amount_of
from jzero.config import Config
from jzero.errors import ConfigError
from jzero.planner import searching
from jzero.planner.fitting import formula, too_large
from jzero.planner.gpus import gpu, gpu_devices
from jzero.planner.named_models import Shapes, named_model, of_the_model
from jzero.planner.nearest import nearest, nearest_text
from jzero.planner.plan import Plan, no_compilation_cache, plan
from jzero.planner.plan_text import plan_text
from jzero.planner.rates import Rates


def start(args: Namespace) -> None:
    """Start JAX without GPUs, and load its CUDA compiler if something will be compiled.

    Raises:
      ConfigError: an unknown GPU, GPUs that do not fill hosts, or no CUDA compiler.
    """
    gpu(args.gpu)
    if args.nodes < 1 or args.gpus_per_node < 1:
        raise ConfigError(f"--nodes {args.nodes} --gpus_per_node {args.gpus_per_node}: must be positive")
    jax.config.update("jax_platforms", "cpu")
    if not args.formula:
        gpu_devices(args.gpu, args.nodes * args.gpus_per_node, per_host=args.gpus_per_node)


def main(args: Namespace) -> int:
    """Plan, print and write; return the exit code.

    Raises:
      ConfigError: anything that the user can mend, and a step that cannot fit.
    """
    if args.price is not None and args.tokens is None:
        raise ConfigError("--price: requires --tokens")
    if args.search or args.fit or args.frontier:
        return searching.main(args)
    if args.minutes is not None or args.out is not None:
        raise ConfigError("--minutes, --out: of a search; add --search, --frontier or --fit")
    config = Config.load(args.config)
    model, shapes = named_model(args.model, args.seq, args.set)
    if args.formula:
        print(formula(model, config, args.gpu, args.nodes, args.gpus_per_node))
        return 0
    made = _planned(args, model, config, shapes)
    _write(made, args)
    if not made.memory.fits:
        if args.json != "-":
            print(_nearest(made, shapes))
        raise ConfigError(too_large(made))
    return 0


def _planned(args: Namespace, model: Any, config: Config, shapes: Shapes) -> Plan:
    rates = Rates.load(args.rates) if args.rates else None
    if args.tokens is not None and amount_of(shapes(1)).tokens is None:
        raise ConfigError(
            f"--tokens: the batch of {args.model} has no tokens, which are integers `inputs` of [rows, length]"
        )
    there: dict[str, Any] = {"gpu": args.gpu, "nodes": args.nodes, "gpus_per_node": args.gpus_per_node}
    with of_the_model(args.model, args.seq):
        return plan(model, config, shapes, rates=rates, **there)


def _nearest(made: Plan, shapes: Shapes) -> str:
    """Return the lines about the nearest configurations that fit, compiled."""
    memory, batch = made.memory, shapes(made.step.batch_sizes.train)
    with no_compilation_cache():
        found = nearest(made.step, batch, memory.peak_bytes, memory.room.most)
    return f"\n{nearest_text(found, made.step, memory.live)}"


def _write(made: Plan, args: Namespace) -> None:
    if args.json:
        text = json.dumps(made.record(args.tokens, args.price), indent=1)
        print(text) if args.json == "-" else Path(args.json).write_text(text + "\n", encoding="utf-8")
    if args.html:
        made.html(args.html, args.tokens, args.price)
    if args.json != "-":
        print(plan_text(made, args.tokens, args.price))
