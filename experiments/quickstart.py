"""Train a byte-level Llama on the source of Python's standard library, with ZeRO-3, on GPUs or simulated devices.

    python -m experiments.quickstart

Without GPUs it runs on eight simulated CPU devices. It prints the run report and a live progress bar, then the held-out
loss beside a bigram model's and a sampled continuation. It writes a checkpoint, the config, the metrics and the loss
curve to a new directory.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import sys
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import jax

import jzero
from experiments.show import TrainingBar, loss_curve
from experiments.text import BYTES, bigram_loss, continuation, sample_rows, standard_library, windows
from models.llama import PRESETS, Llama, LlamaConfig, preset

HELD_OUT_BYTES = 2**16
PROMPT = "import os\nimport sys\n\n\ndef "
TEMPERATURE = 0.7


class Size(NamedTuple):
    """Model, text and number of steps that suit a machine."""

    model: LlamaConfig
    sequence: int
    micro_batch: int
    steps: int
    corpus: int
    precision: dict[str, Any]


CPU = Size(preset("tiny", num_layers=2, d_model=192, num_heads=3, num_kv_heads=1, d_ff=512), 128, 2, 400, 4_000_000, {})
GPU = Size(preset("125m", vocab_size=BYTES), 1024, 16, 600, 16_000_000, {"bf16": {"enabled": True}})


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    jax.config.update("jax_num_cpu_devices", 8)  # simulated devices, for a machine without GPUs
    try:
        run(args, GPU if jax.default_backend() == "gpu" else CPU)
    except (jzero.ConfigError, FloatingPointError, OSError) as error:
        fail(str(error))
    except KeyboardInterrupt:
        sys.exit(130)


def run(args: argparse.Namespace, size: Size) -> None:
    steps, sequence = args.steps or size.steps, args.sequence or size.sequence
    shape = preset(args.preset, vocab_size=BYTES) if args.preset else size.model
    shape = dataclasses.replace(shape, num_layers=args.layers) if args.layers else shape
    config = {
        "train_micro_batch_size_per_gpu": size.micro_batch,
        "optimizer": {"type": "Muon", "params": {"lr": 0.02}},
        "scheduler": {
            "type": "WarmupCosineLR",
            "params": {"warmup_num_steps": max(2, steps // 20), "total_num_steps": max(2, steps)},
        },
        "zero_optimization": {"stage": args.stage, "stage3_param_persistence_threshold": 0},
        "seed": args.seed,
        **size.precision,
        **args.config,
    }
    text, held_out_text = standard_library(size.corpus)
    if sequence >= len(held_out_text):
        raise jzero.ConfigError(f"--sequence {sequence}: the held-out text has {len(held_out_text)} bytes")

    model = jzero.from_flax(lambda rngs: Llama(shape, rngs=rngs))
    engine, _, _, _ = jzero.initialize(model=model, config=config, training_data=windows(text, sequence))
    args.out.mkdir(parents=True, exist_ok=True)

    with TrainingBar(steps, tokens_per_step=engine.train_batch_size() * sequence) as bar:
        for _ in range(steps):
            loss = engine.train_batch()
            bar.advance(loss=float(loss), grad_norm=engine.get_global_grad_norm())

    batch = engine.train_batch_size()
    held_out = sample_rows(windows(held_out_text, sequence), max(1, HELD_OUT_BYTES // sequence // batch) * batch)
    loss, bigram = float(engine.eval_batch(held_out)), bigram_loss(text, **held_out)
    print(f"\nheld-out loss {loss:.3f} nats/byte; a bigram model of the same training text: {bigram:.3f}")
    sample = continuation(
        model, engine.state.params, PROMPT, length=400, context=sequence, temperature=TEMPERATURE, seed=args.seed
    )
    print(f"\na continuation of {PROMPT!r}, sampled at temperature {TEMPERATURE}:\n\n{PROMPT}{sample}\n")

    engine.save_checkpoint(args.out / "checkpoint").wait()
    (args.out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    bar.write_csv(args.out / "metrics.csv")
    title = (
        f"Llama of {shape.num_parameters / 1e6:.1f} M parameters on Python's standard library, "
        f"ZeRO-{engine.zero_optimization_stage()}, {engine.mesh.size} devices"
    )
    loss_curve(args.out / "loss.png", [row["loss"] for row in bar.rows], loss, bigram, title)
    print(f"saved in {args.out}: checkpoint, config.json, metrics.csv, loss.png")


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(prog="experiments.quickstart", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=positive, help="optimizer steps")
    parser.add_argument("--preset", choices=PRESETS, help="a model shape of models/llama.py")
    parser.add_argument("--layers", type=positive, help="number of layers")
    parser.add_argument("--sequence", type=positive, help="bytes per sequence")
    parser.add_argument("--stage", type=int, choices=range(4), default=3, help="ZeRO stage (default 3)")
    parser.add_argument(
        "--config", type=sections, default={}, help="JSON or a JSON file: config sections that replace the defaults"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=new_directory, default=f"runs/quickstart-{datetime.datetime.now():%Y%m%d-%H%M%S}")
    return parser.parse_args(argv)


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        fail(message)


def fail(message: str) -> NoReturn:
    """Print an error in the user's input without a traceback, and exit."""
    print("quickstart:", message, sep="\n" if "\n" in message else " ", file=sys.stderr)
    sys.exit(2)


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def sections(text: str) -> dict[str, Any]:
    try:
        return dict(json.loads(text if text.lstrip().startswith("{") else Path(text).read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a JSON object nor a file of one: {error}") from None


def new_directory(text: str) -> Path:
    path = Path(text)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise argparse.ArgumentTypeError(f"{text} exists and is not an empty directory: name a new one")
    return path


if __name__ == "__main__":
    main()
