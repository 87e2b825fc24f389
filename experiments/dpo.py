"""Train a Llama, Qwen, Mistral or Gemma on preferences: direct preference optimization (arXiv:2305.18290).

    python -m experiments.dpo
    python -m experiments.dpo --model Qwen3-8B --data pairs.jsonl --length 4096 --beta 0.1

The reference model is the model before the training. Its log-probabilities do not change, so they are computed once,
before the first step, and become a part of the data: no second model is in memory. Without --model, a tiny model that
answers in two manners is made first, and then learns to prefer the friendly one.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jzero
from experiments.finetune_lora import answers, read_dataset
from experiments.show import before_and_after, dataset_name, downloaded_model, finish, options, read_config
from experiments.tiny_chat import COLORS, FRIENDLY, LENGTH, PLAIN, QUESTIONS, chats, make_model
from jzero.data import DataLoader, Pairs, RepeatingLoader
from models import config_from_hf
from models.decoder import Decoder

SIDES = ("chosen", "rejected")


class Preferring(Decoder):
    """A decoder whose loss is DPO's. A batch is that of `jzero.data.Pairs` with "reference" [B, 2] beside it."""

    beta = 0.1

    def prefix(self, batch: dict[str, Any]) -> Any:
        both = jnp.concatenate([batch[side]["inputs"] for side in SIDES])  # one pass over 2 B rows
        return super().prefix({"inputs": both})

    def check_batch(self, batch: dict[str, Any]) -> None:
        for side in SIDES:
            super().check_batch(batch[side])

    def log_probabilities(self, x: Any, batch: dict[str, Any]) -> jax.Array:
        """Sum the log-probabilities of each reply's tokens: [B, 2], chosen and rejected."""
        labels = jnp.concatenate([batch[side]["labels"] for side in SIDES])

        def row(x: jax.Array, labels: jax.Array) -> jax.Array:
            return -super(Preferring, self).suffix(x[None], {"labels": labels[None]}).sum  # of the cross-entropies

        return jax.vmap(row)(getattr(x, "x_BSD", x), labels).reshape(2, -1).T

    def suffix(self, x: Any, batch: dict[str, Any]) -> tuple[jax.Array, dict[str, jax.Array]]:
        rewards = self.beta * (self.log_probabilities(x, batch) - batch["reference"])
        margins = rewards[:, 0] - rewards[:, 1]
        return -jax.nn.log_sigmoid(margins).mean(), {"margin": margins.mean(), "accuracy": (margins > 0).mean()}


def main(argv: list[str] | None = None) -> list[float]:
    """Train, and return the loss of each step."""
    args = parse(argv)
    config, steps = read_config(args)
    directory = args.model or make_model(Path("runs/tiny-chat"))
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory)
    pairs = Pairs(read_dataset(args.data) if args.data else tiny_pairs(), tokenizer, length=args.length)

    Preferring.beta = args.beta
    shape = config_from_hf(directory)
    model = jzero.from_flax(lambda rngs: Preferring(shape, rngs=rngs), has_aux=True)
    engine, *_ = jzero.initialize(model=model, config=config)
    engine.load_weights(directory)

    # The reference's log-probabilities, under the training layout: [pairs, 2].
    evaluate = jzero.make_eval_step(model, Preferring.log_probabilities, config, mesh=engine.mesh)
    parts = np.split(np.arange(len(pairs)), range(0, len(pairs), engine.train_batch_size())[1:])
    reference = [evaluate(engine.state, pairs.rows(part), numpy=True) for part in parts]
    data = {**pairs.rows(np.arange(len(pairs))), "reference": np.concatenate(reference)}

    batches = iter(RepeatingLoader(DataLoader(data, engine.step_fn, seed=config.seed)))
    questions = args.ask or [QUESTIONS[2].format(thing) for thing in list(COLORS)[:6]]
    sampled = partial(answers, engine, tokenizer, questions, temperature=0.7)
    before = sampled(rng=jax.random.key(0))
    losses = [engine.train_batch(batches) for _ in range(steps)]
    before_and_after(questions, before, sampled(rng=jax.random.key(0)))

    engine.save_16bit_model(args.out / "model")
    if jax.process_index() == 0:
        tokenizer.save_pretrained(args.out / "model")
    lines = {"reward margin": "margin", "accuracy": "accuracy"}
    return finish(args.out, losses, lines, f"DPO, beta {args.beta}")


def parse(argv: list[str] | None) -> argparse.Namespace:
    p = options("dpo", __doc__, "runs/dpo")
    p.add_argument(
        "--model", type=downloaded_model, metavar="DIR", help="safetensors and tokenizer (default: a tiny model)"
    )
    p.add_argument(
        "--data", type=dataset_name, metavar="FILE",
        help="JSONL, or a data set of Hugging Face: prompt, chosen, rejected",
    )  # fmt: skip
    p.add_argument("--length", type=int, default=LENGTH, help=f"tokens per row (default {LENGTH})")
    p.add_argument("--beta", type=float, default=0.1, help="how far to go from the reference (default 0.1)")
    p.add_argument("--ask", action="append", metavar="QUESTION", help="a question for the samples before and after")
    return p.parse_args(argv)


def tiny_pairs() -> list[dict[str, Any]]:
    """Make preferences of friendly answers about colors over plain ones."""
    both = zip(chats(FRIENDLY, QUESTIONS[:2]), chats(PLAIN, QUESTIONS[:2]), strict=True)
    return [{"chosen": good["messages"], "rejected": plain["messages"]} for good, plain in both]


if __name__ == "__main__":
    main()
