"""Plans jzero/recipes/recipes.json again, and writes the table of docs/recipes.md from it: `python docs/recipes.py`.

With `--plan NAME ...` these recipes are compiled first, for GPUs that need not be there. With `--search NAME ...` a
search over their micro-batch and recomputation takes what is more than 5 % faster, one to six minutes each.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path

import generated_part

from jzero.config.sizes import MICRO
from jzero.planner.candidates import POLICY, UNROLL, Task, merged
from jzero.planner.gpus import Cluster
from jzero.planner.named_models import tokens
from jzero.planner.plan import plan
from jzero.planner.rates import Rates
from jzero.planner.search import search_configs
from jzero.recipes.recipe_table import COLUMNS, FILE, PRICE, Recipe, cells, load_recipes

PATH = Path(__file__).parent.parent / "jzero/recipes" / FILE
FASTER = 1.05  # what a search finds replaces a recipe from here on


def generated() -> Iterator[str]:
    columns = [*COLUMNS, "searched"]
    yield f"| {' | '.join(columns)} |"
    yield "|---|" + "---:|" * (len(columns) - 1)
    for recipe in load_recipes():
        yield f"| {' | '.join([*cells(recipe, PRICE), recipe.searched or '-'])} |"


def planned(recipe: Recipe) -> Recipe | None:
    """Compile the step of a recipe, and put its figures in; None: it does not fit."""
    cluster = {"gpu": recipe.gpu, "nodes": recipe.nodes, "gpus_per_node": recipe.gpus_per_node}
    made = plan(recipe.make_model(), recipe.config, tokens(recipe.sequence), **cluster)
    if not made.memory.fits:
        print(recipe.name, made.memory.verdict, flush=True)
        return None
    speed = recipe.config["train_batch_size"] * recipe.sequence / made.time.step_s / recipe.gpus
    found = {"tokens_per_s_gpu": round(speed), "peak_gib": round(made.memory.peak_bytes / 2**30, 1)}
    print(recipe.name, found, flush=True)
    return recipe._replace(plan=found, searched="")


def searched(recipe: Recipe) -> Recipe:
    """Search for a faster micro-batch and recomputation; return the recipe with what it found, and the day.

    The ZeRO stage, the mesh and the global batch stay. The candidates are compiled with a scanned stack, a minute each
    instead of up to five; that it ranks them as the unrolled one does is assumed. The winner is compiled as the recipe
    has it.
    """
    kept = {key: value for key, value in recipe.config.items() if key not in (MICRO, "activation_checkpointing")}
    cluster = Cluster(recipe.gpu, recipe.nodes, recipe.gpus_per_node)
    raw = merged(kept, {UNROLL: False, "mesh.pipe": 1})
    task = Task(raw, recipe.model, recipe.sequence, (), cluster, Rates.of(recipe.gpu), recipe.adapters)
    best = search_configs(task, minutes=30).best.candidate
    changed = recipe._replace(config=merged(recipe.config, {key: best[key] for key in (MICRO, POLICY)}))
    other = None if changed == recipe else planned(changed)
    if other and other.plan["tokens_per_s_gpu"] > FASTER * recipe.plan["tokens_per_s_gpu"]:
        recipe = other
    return recipe._replace(searched=date.today().isoformat())


def main(words: list[str]) -> None:
    recipes = load_recipes()
    names, change = parse(words, [recipe.name for recipe in recipes])
    for i, recipe in enumerate(recipes):
        if recipe.name in names:
            made = change(recipe)
            if made is None:
                raise SystemExit(f"{recipe.name} does not fit")
            recipes[i] = made
        PATH.write_text("[\n" + ",\n".join(json.dumps(one._asdict()) for one in recipes) + "\n]\n")
    generated_part.write(__file__, generated())


def parse(words: list[str], known: list[str]) -> tuple[list[str], Callable[[Recipe], Recipe | None]]:
    """Return the names of recipes in a command's words, and what changes these recipes."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    ways = parser.add_mutually_exclusive_group()
    for option in ("--plan", "--search"):
        ways.add_argument(option, nargs="+", choices=known, default=[], metavar="NAME")
    args = parser.parse_args(words)
    return args.plan or args.search, searched if args.search else planned


if __name__ == "__main__":
    main(sys.argv[1:])
