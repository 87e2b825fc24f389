"""Plans jzero/recipes/recipes.json again, and writes the table of docs/recipes.md from it: `python docs/recipes.py`.

With `--plan NAME ...` these recipes are compiled first, for GPUs that need not be there.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import generated_part

from jzero.planner.named_models import tokens
from jzero.planner.plan import plan
from jzero.recipes.recipe_table import COLUMNS, FILE, PRICE, Recipe, cells, load_recipes

PATH = Path(__file__).parent.parent / "jzero/recipes" / FILE


def generated() -> Iterator[str]:
    yield f"| {' | '.join(COLUMNS)} |"
    yield "|---|" + "---:|" * (len(COLUMNS) - 1)
    for recipe in load_recipes():
        yield f"| {' | '.join(cells(recipe, PRICE))} |"


def planned(recipe: Recipe) -> Recipe:
    """Compile the step of a recipe, and put its figures in."""
    cluster = {"gpu": recipe.gpu, "nodes": recipe.nodes, "gpus_per_node": recipe.gpus_per_node}
    made = plan(recipe.make_model(), recipe.config, tokens(recipe.sequence), **cluster)
    if not made.memory.fits:
        raise SystemExit(f"{recipe.name} {made.memory.verdict}")
    speed = recipe.config["train_batch_size"] * recipe.sequence / made.time.step_s / recipe.gpus
    found = {"tokens_per_s_gpu": round(speed), "peak_gib": round(made.memory.peak_bytes / 2**30, 1)}
    print(recipe.name, found, flush=True)
    return recipe._replace(plan=found)


def main(names: list[str]) -> None:
    recipes = load_recipes()
    for i, recipe in enumerate(recipes):
        recipes[i] = planned(recipe) if recipe.name in names else recipe
        PATH.write_text("[\n" + ",\n".join(json.dumps(one._asdict()) for one in recipes) + "\n]\n")
    generated_part.write(__file__, generated())


if __name__ == "__main__":
    main(sys.argv[2:] if sys.argv[1:2] == ["--plan"] else [])
