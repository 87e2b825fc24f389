"""Train a GPT from scratch on text, byte by byte, and let it write.

    python -m experiments.gpt
    python -m experiments.gpt --text books.txt --prompt "It was " --layers 12 --width 768 --sequence 1024

Without --text it reads the source of Python's standard library. The last tenth of a text is held out. The loss on it is
printed beside that of a bigram model; the checkpoint, the sample and the curve are written to --out.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import jax
import numpy as np

import jzero
from experiments.show import loss_curve, options, read_config
from experiments.text import BYTES, bigram_loss, sample_rows, standard_library, windows
from models.gpt2 import GPT2, GPT2Config


def main(argv: list[str] | None = None) -> tuple[list[float], float, float]:
    """Train, and return the loss of each step, the held-out loss, and a bigram model's held-out loss."""
    args = parse(argv)
    jax.config.update("jax_num_cpu_devices", 8)  # simulated devices, for a machine without GPUs
    config, steps = read_config(args)

    # 1. The data: rows of bytes; the labels are the next bytes.
    if args.text:
        text = np.fromfile(args.text, np.uint8)
        text, held_out = np.split(text, [len(text) * 9 // 10])
    else:
        text, held_out = standard_library(4_000_000)

    # 2. The model, with heads of 64.
    shape = GPT2Config(
        num_layers=args.layers, d_model=args.width, num_heads=args.width // 64, d_ff=4 * args.width,
        vocab_size=BYTES, max_positions=args.sequence,
    )  # fmt: skip
    model = jzero.from_flax(lambda rngs: GPT2(shape, rngs=rngs))
    engine, *_ = jzero.initialize(model=model, config=config, training_data=windows(text, args.sequence))

    # 3. The training.
    losses = [engine.train_batch() for _ in range(steps)]
    losses = [float(loss) for loss in losses]
    engine.save_checkpoint(args.out / "checkpoint").wait()

    # 4. The loss on text that it has not seen.
    rows = sample_rows(windows(held_out, args.sequence), 4 * engine.train_batch_size())
    loss, bigram = float(engine.eval_batch(rows)), bigram_loss(text, **rows)
    jzero.log_dist(f"held-out loss {loss:.3f} nats per byte; a bigram model of the same text: {bigram:.3f}")

    # 5. A sample. The model has a position for each byte of a row, so it can write that much.
    prompt = np.frombuffer(args.prompt.encode(), np.uint8)[None].astype(np.int32)
    new = args.sequence - prompt.shape[1]
    found = engine.generate(prompt, new, temperature=0.7, rng=jax.random.key(0), numpy=True)
    sample = bytes(found[0].astype(np.uint8)).decode(errors="replace")
    jzero.log_dist(f"a sample:\n\n{sample}\n")

    if jax.process_index() == 0:
        (args.out / "sample.txt").write_text(sample)
        title = f"GPT of {args.layers} layers, width {args.width}"
        loss_curve(args.out / "curves.png", losses, loss, bigram, title)
    jzero.log_dist(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}; files are in {args.out}")
    return losses, loss, bigram


def parse(argv: list[str] | None) -> argparse.Namespace:
    p = options("gpt", __doc__, "runs/gpt")
    p.add_argument("--text", type=Path, metavar="FILE", help="a text file (default: Python's standard library)")
    p.add_argument("--prompt", default="import os\n\n\ndef ", help="the beginning of the sample")
    p.add_argument("--layers", type=int, default=4, help="default 4")
    p.add_argument("--width", type=int, default=128, help="a multiple of 64 (default 128)")
    p.add_argument("--sequence", type=int, default=128, help="bytes per row (default 128)")
    return p.parse_args(argv)


if __name__ == "__main__":
    main()
