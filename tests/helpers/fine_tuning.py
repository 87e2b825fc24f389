"""Data, shapes and a recipe for the tests of `jzero finetune`."""

from jzero.recipes.examples import Examples
from jzero.recipes.recipe_table import find_recipe

COLORS = {"snow": "white", "grass": "green", "coal": "black", "the sky": "blue", "a lemon": "yellow", "blood": "red"}
ASKED = [(f"Color of {thing}? ({i})", f"{thing} is {color}.") for thing, color in COLORS.items() for i in range(8)]
SAMPLES = {
    "text": lambda question, answer: {"text": f"{question} {answer}"},
    "completions": lambda question, answer: {"prompt": question, "completion": answer},
    "chat": lambda question, answer: {
        "messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    },
    "preferences": lambda question, answer: {"prompt": question, "chosen": f"{answer} Friend!", "rejected": answer},
}
RECIPE = find_recipe("llama3-8b-lora-8xh100")
TEXTS = Examples("text", [{"text": "hello, world. " * 400}], "x")
SHAPE = {"vocab_size": 258, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
         "num_attention_heads": 4, "max_position_embeddings": None}  # fmt: skip
