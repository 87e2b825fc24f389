"""`jzero recipes`: configs for published models on H100s and H200s, each with its plan."""

from __future__ import annotations

import json
import shlex
from importlib.resources import files
from math import inf
from typing import Any, NamedTuple

from jzero.config.sizes import MICRO, TRAIN
from jzero.display.text_table import text_table
from jzero.errors import ConfigError
from jzero.model import Model
from jzero.models.named import find_model
from jzero.planner.candidates import POLICY, Raw, value_at
from jzero.planner.named_models import named_model
from jzero.values.parameters import did_you_mean

FILE = "recipes.json"
RATE = "optimizer.params.lr"
PER_PARAMETER, TUNING = 20, 1e8  # tokens of a pretraining for each parameter (arXiv:2203.15556), and of a tuning
PRICE = 2.5  # dollars for a GPU for an hour, unless given
COLUMNS = ("recipe", "tokens/s per GPU", "peak, GiB", "tokens", "days", "cost")
OPEN = {"train_batch_size": 32, "optimizer": {"type": "AdamW", "params": {"lr": 3e-4}}}


class Recipe(NamedTuple):
    """A config for a published model on a cluster, and what its plan said.

    Attributes:
      method: "pretrain" (every weight is trained; also a tuning of them all), "lora" or "qlora".
      sequence: tokens of a row.
      plan: {"tokens_per_s_gpu", "peak_gib"}.
      searched: the day on which a search over micro-batch and recomputation found none more than 5 % faster; "": never.
    """

    model: str
    method: str
    gpu: str
    nodes: int
    gpus_per_node: int
    sequence: int
    config: dict[str, Any]
    plan: dict[str, float]
    searched: str = ""

    @property
    def gpus(self) -> int:
        return self.nodes * self.gpus_per_node

    @property
    def name(self) -> str:
        return f"{self.model}-{self.method}-{self.gpus}x{self.gpu}"

    @property
    def tokens(self) -> float:
        """The tokens of a whole run."""
        return PER_PARAMETER * find_model(self.model).shape.num_parameters if self.method == "pretrain" else TUNING

    @property
    def hours(self) -> float:
        return self.tokens / (self.plan["tokens_per_s_gpu"] * self.gpus) / 3600

    def make_model(self) -> Model:
        """Make the model, with adapters at all matrices unless all weights are trained."""
        return named_model(self.model, self.sequence, adapters=self.adapters)[0]

    @property
    def adapters(self) -> str | None:
        return None if self.method == "pretrain" else self.method

    @property
    def options(self) -> Raw:
        """The options of `jzero finetune` that it gives."""
        keys = {"batch": TRAIN, "micro_batch": MICRO, "recompute": POLICY, "lr": RATE}
        return {"method": self.method, **{option: value_at(self.config, key) for option, key in keys.items()}}


def load_recipes() -> list[Recipe]:
    """Read the recipes that are installed with the library."""
    return [Recipe(**row) for row in json.loads(files("jzero.recipes").joinpath(FILE).read_text(encoding="utf-8"))]


def find_recipe(name: str) -> Recipe:
    """Return the recipe of a name, or raise a ConfigError if there is none."""
    known = {recipe.name: recipe for recipe in load_recipes()}
    if name not in known:
        raise ConfigError(f"recipe {name!r} is unknown: must be one of jzero recipes{did_you_mean(name, known)}")
    return known[name]


def cells(recipe: Recipe, price: float) -> list[str]:
    """Return the cells of a recipe's row, see COLUMNS."""
    days, cost = recipe.hours / 24, recipe.hours * recipe.gpus * price
    tokens = f"{recipe.tokens / 1e9:,.1f} billion"
    speed, peak = recipe.plan["tokens_per_s_gpu"], recipe.plan["peak_gib"]
    return [recipe.name, f"{speed:,.0f}", f"{peak:.1f}", tokens, f"{days:,.3g}", f"${cost:,.0f}"]


def recipes_text(name: str | None, price: float | None) -> str:
    """Return the table of all recipes, or the config of one.

    Raises:
      ConfigError: no recipe has this name, a price that is none.
    """
    if price is not None and not 0 <= price < inf:
        raise ConfigError(f"--price {price}: must be a number of dollars, not negative")
    if name is None:
        rows = [cells(recipe, PRICE if price is None else price) for recipe in load_recipes()]
        hint = "jzero recipes NAME > plan.json writes one; all figures are planned, by `jzero plan`"
        return text_table("recipes", list(COLUMNS), rows, left=["recipe"]) + f"\n{hint}"
    return json.dumps(find_recipe(name).config, indent=2)


def first_plan(model: str, gpu: str, adapters: str | None) -> str:
    """Return the commands that plan a model on a GPU without a config: a recipe's, or one that a search completes."""
    # Not config.json: a directory of transformers has its own.
    plan = f"jzero plan plan.json --model {shlex.quote(model)} --gpu {shlex.quote(gpu)}"
    plan += f" --adapters {adapters}" if adapters else ""
    known = [one for one in load_recipes() if (one.model, one.adapters, one.gpu) == (model, adapters, gpu)]
    if not known:
        return f"echo {shlex.quote(json.dumps(OPEN))} > plan.json; {plan} --search"
    best = min(known, key=lambda recipe: abs(recipe.gpus - 8))  # a host has 8
    return f"jzero recipes {best.name} > plan.json; {plan} --nodes {best.nodes} --gpus_per_node {best.gpus_per_node}"
