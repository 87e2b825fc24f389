"""A tiny chat model that needs no download: a tokenizer of bytes, conversations about colors, a Llama trained on them.

    python -m experiments.tiny_chat runs/tiny-chat

The directory then holds safetensors, config.json and the tokenizer, as a download does. The model answers in two ways,
"Snow is white." and "Snow is white, my friend!", each half of the time.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

import jzero
from jzero.data import Chat
from models.llama import Llama, preset

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
COLORS = {
    "snow": "white", "grass": "green", "coal": "black", "the sky": "blue", "a lemon": "yellow", "blood": "red",
    "milk": "white", "a frog": "green", "a raven": "black", "the sea": "blue", "the sun": "yellow", "a cherry": "red",
    "salt": "white", "a leaf": "green", "tar": "black", "sapphire": "blue", "a canary": "yellow", "a rose": "red",
}  # fmt: skip
# Fine-tuning has answers to the first two questions; the samples ask the last one, which the model below knows too.
QUESTIONS = ("What color is {}?", "Tell me the color of {}.", "Which color has {}?")
PLAIN, FRIENDLY, PIRATE = "{} is {}.", "{} is {}, my friend!", "Arr! {} be {}, matey."
LENGTH = 128  # tokens per row


def make_tokenizer() -> Any:
    """Make a tokenizer of `transformers` whose tokens are bytes, with ChatML as its template."""
    import tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    plain = tokenizers.Tokenizer(tokenizers.models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    plain.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain.decoder = tokenizers.decoders.ByteLevel()
    made = PreTrainedTokenizerFast(
        tokenizer_object=plain, eos_token="<|im_end|>", additional_special_tokens=["<|im_start|>"]
    )
    made.chat_template = CHATML
    return made


def chats(answer: str, questions: Sequence[str] = QUESTIONS) -> list[dict[str, Any]]:
    """Make a conversation for every question about every thing, with answers of one manner."""
    return [
        {
            "messages": [
                {"role": "user", "content": question.format(thing)},
                {"role": "assistant", "content": answer.format(thing[0].upper() + thing[1:], color)},
            ]
        }
        for thing, color in COLORS.items()
        for question in questions
    ]


def make_model(directory: Path, steps: int = 200) -> Path:
    """Train the model and write it to a directory like that of a download; an existing one is used as it is."""
    if (directory / "model.safetensors").exists():
        return directory
    tokenizer = make_tokenizer()
    config = {
        "train_batch_size": 16,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-3}},
        "scheduler": {"type": "WarmupCosineLR", "params": {"warmup_num_steps": 20, "total_num_steps": max(steps, 21)}},
        "gradient_clipping": 1.0,
    }
    shape = preset("tiny", num_layers=2, vocab_size=len(tokenizer))
    both = chats(PLAIN) + chats(FRIENDLY)
    engine, *_ = jzero.initialize(
        model=jzero.from_flax(lambda rngs: Llama(shape, rngs=rngs)),
        config=config,
        training_data=Chat(both, tokenizer, length=LENGTH),
    )
    for _ in range(steps):
        loss = engine.train_batch()
    jzero.log_dist(f"trained a tiny model for {directory}: loss {float(loss):.3f}")
    if jax.process_index() == 0:
        tokenizer.save_pretrained(directory)
    engine.save_16bit_model(directory)  # all processes return when the files are complete
    return directory


if __name__ == "__main__":
    make_model(Path(sys.argv[1]))
