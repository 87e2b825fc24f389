"""Fine-tune a Llama, Qwen, Mistral or Gemma on conversations with low-rank adapters (LoRA).

    python -m experiments.finetune_lora
    python -m experiments.finetune_lora --model Qwen3-8B --data chats.jsonl --length 4096 --ask "Who are you?"

A model is a directory with safetensors and a tokenizer, as from a download. Without one, a tiny model that knows the
colors of things is made first, and then learns to answer like a pirate. The answers before and after are printed; the
adapters (for peft), the tokenizer and the curves are written to --out.
"""

from __future__ import annotations

import argparse
import copy
from pathlib import Path
from typing import Any

import jax

import jzero
from experiments.show import before_and_after, dataset_name, downloaded_model, finish, options, read_config
from experiments.tiny_chat import LENGTH, PIRATE, QUESTIONS, chats, make_model
from jzero.data import Chat
from jzero.errors import one_line
from models import from_hf
from models.lora import LoRAConfig


def main(argv: list[str] | None = None) -> list[float]:
    """Fine-tune, and return the loss of each step."""
    args = parse(argv)
    config, steps = read_config(args)
    directory = args.model or make_model(Path("runs/tiny-chat"))

    # 1. The data: conversations in rows of one length. The loss takes the assistant's turns only.
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory)
    dataset = read_dataset(args.data) if args.data else chats(PIRATE, QUESTIONS[:2])
    data = Chat(dataset, tokenizer, length=args.length)

    # 2. The model: the download's shape with adapters beside all of its matrices, and its weights.
    lora = LoRAConfig(r=args.rank, lora_alpha=2 * args.rank, target_modules="all-linear")
    model = from_hf(directory, lora=lora)
    engine, *_ = jzero.initialize(model=model, config=config, training_data=data)
    engine.load_weights(directory)  # the adapters are not in there: they start as they are, without effect

    # 3. The training, between two samples.
    questions = args.ask or [QUESTIONS[2].format(thing) for thing in ("snow", "a frog", "the sea")]
    before = answers(engine, tokenizer, questions)
    losses = [engine.train_batch() for _ in range(steps)]
    before_and_after(questions, before, answers(engine, tokenizer, questions))

    # 4. The adapters, as peft's files: PeftModel.from_pretrained(model, OUT / "adapters") in transformers.
    engine.save_adapters(args.out / "adapters")
    if jax.process_index() == 0:
        tokenizer.save_pretrained(args.out / "adapters")
    return finish(args.out, losses, {"learning rate": "lr"}, f"LoRA, rank {args.rank}")


def parse(argv: list[str] | None) -> argparse.Namespace:
    p = options("finetune_lora", __doc__, "runs/finetune-lora")
    p.add_argument(
        "--model", type=downloaded_model, metavar="DIR", help="safetensors and tokenizer (default: a tiny model)"
    )
    p.add_argument(
        "--data", type=dataset_name, metavar="FILE",
        help="a JSONL file, or a data set of Hugging Face, with a column messages",
    )  # fmt: skip
    p.add_argument("--length", type=int, default=LENGTH, help=f"tokens per row (default {LENGTH})")
    p.add_argument("--rank", type=int, default=8, help="of the adapters (default 8)")
    p.add_argument("--ask", action="append", metavar="QUESTION", help="a question for the samples before and after")
    return p.parse_args(argv)


def read_dataset(data: str) -> Any:
    """Read a JSONL file, or the split "train" of a data set of Hugging Face."""
    import datasets

    name, files = ("json", data) if Path(data).is_file() else (data, None)
    try:
        return datasets.load_dataset(name, data_files=files, split="train")
    except OSError as error:  # no such data set, or no way to the hub
        raise SystemExit(f"--data {data}: cannot be loaded: {one_line(str(error))}") from None


def answers(engine: jzero.Engine, tokenizer: Any, questions: list[str], **sampling: Any) -> list[str]:
    """Generate an answer to each question; without `rng` in `sampling` the most probable one."""
    tokenizer = copy.deepcopy(tokenizer)  # the caller saves its own, which pads as it did in the download
    tokenizer.padding_side, tokenizer.pad_token = "left", tokenizer.pad_token or tokenizer.eos_token
    asked = [[{"role": "user", "content": question}] for question in questions]
    prompts = tokenizer.apply_chat_template(
        asked, add_generation_prompt=True, padding=True, return_dict=True, return_tensors="np"
    )
    tokens, ends = prompts["input_ids"], {name: getattr(tokenizer, name) for name in ("eos_token_id", "pad_token_id")}
    found = engine.generate(tokens, 64, attention_mask=prompts["attention_mask"], numpy=True, **ends, **sampling)
    return tokenizer.batch_decode(found[:, tokens.shape[1] :], skip_special_tokens=True)


if __name__ == "__main__":
    main()
