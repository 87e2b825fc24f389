"""The choices of a fine-tuning: what its options leave open, each a line that names its option."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import jax
import numpy as np

from jzero.adapters.from_flax import from_flax
from jzero.config.config import read_config
from jzero.config.sizes import MICRO, TRAIN
from jzero.display.text_table import size_text
from jzero.errors import ConfigError
from jzero.model import Model
from jzero.models.decoder import Decoder
from jzero.models.decoder_config import DecoderConfig
from jzero.models.lora import MODULES
from jzero.models.named import add_adapters
from jzero.models.preferences import PreferenceDecoder
from jzero.models.quantized import Kind
from jzero.planner.candidates import POLICIES, POLICY, Raw, merged, value_at
from jzero.planner.memory import usable_memory_here
from jzero.recipes.examples import Examples, Rows, many
from jzero.recipes.fitting import Fit, choose_fit
from jzero.recipes.recipe_table import RATE, Recipe, find_recipe
from jzero.recipes.starting_point import StartingPoint
from jzero.step.train_step import TrainStep, make_train_step
from jzero.tree import PyTree
from jzero.weights.export import parse_size

Method = Literal["full", "lora", "qlora"]
RATES = {"full": 2e-5, "lora": 2e-4, "qlora": 2e-4, "random": 1e-3}  # of a preset's random weights
LONGEST, SHORTEST = 2048, 32  # tokens of a row, without --length
ROWS, MICRO_ON_CPU = 16, 4
FEW = 64  # rows of text, below which shorter ones are made
PREFERENCES, POSITIONS = "preferences", "max_position_embeddings"
HALF = ("bf16", "fp16")  # the device decides: a T4 or V100 is fast in fp16 alone
DECIDED = {  # keys that options decide, since the choices count with them
    TRAIN: "--batch",
    MICRO: "--micro_batch",
    "gradient_accumulation_steps": "--batch and --micro_batch",
    RATE: "--lr",
    "scheduler": "--lr and --steps",
    "activation_checkpointing": "--recompute",
    "trainable_parameters": "--method; a whole recipe as --recipe NAME",
}


@dataclass(frozen=True)
class Options:
    """The options of a fine-tuning; those that are None are chosen, and `jzero finetune --help` describes them."""

    out: str | Path = "finetuned"
    recipe: str | None = None
    method: Method | None = None
    tokenizer: str | None = None
    length: int | None = None
    batch: int | None = None
    micro_batch: int | None = None
    recompute: str | None = None
    epochs: float = 3.0
    steps: int | None = None
    lr: float | None = None
    rank: int = 16
    quantize: Kind = "nf4"
    beta: float = 0.1
    pack: bool | None = None
    held_out: float = 0.05
    evaluations: int = 10
    patience: int | None = None
    memory: str | None = None
    config: Raw | str | None = None
    seed: int = 0
    resume: bool = False

    def __post_init__(self):
        problems = []
        for name in ("length", "batch", "micro_batch", "steps", "rank", "evaluations", "patience", "seed"):
            value, least = getattr(self, name), {"length": 2, "seed": 0}.get(name, 1)
            if value is not None and value < least:
                problems.append(f"--{name} {value}: must be at least {least}")
        for name, kinds in (("method", (None, *get_args(Method))), ("quantize", get_args(Kind))):
            if (value := getattr(self, name)) not in kinds:
                problems.append(f"--{name} {value}: must be one of {', '.join(filter(None, kinds))}")
        if not 0 <= self.held_out < 1:
            problems.append(f"--held_out {self.held_out}: must be a share from 0 to below 1")
        for name in ("epochs", "lr", "beta"):
            if (value := getattr(self, name)) is not None and not 0 < value < inf:
                problems.append(f"--{name} {value}: must be positive")
        if problems:
            raise ConfigError(*problems)
        if self.memory is not None:
            parse_size(str(self.memory), "--memory")  # a number would be bytes
        merged_sections(base_config(1, 1.0, self, "lora", 1), self.config)  # raises before a model is read

    def adapter_recipe(self) -> Recipe | None:
        """Return the recipe, or raise a ConfigError if it is none of adapters."""
        found = find_recipe(self.recipe) if self.recipe else None
        if found and not found.adapters:
            raise ConfigError(f"--recipe {self.recipe}: pretrains; name one of lora or qlora, or leave it out")
        return found

    def of_recipe(self, kind: str) -> Raw:
        """Return what the recipe decides of a tuning on such samples: the options that are left open."""
        found = self.adapter_recipe()
        given = found.options if found else {}
        kept = {"lr"} if kind == PREFERENCES else ()  # a recipe's rate is one of next tokens
        return {name: given[name] for name in given if name not in kept and getattr(self, name) is None}


class Choices(NamedTuple):
    """The choices that were made.

    Attributes:
      config: of the run. model: to train, of `shape`.
      data: all rows. held, train: the indices of those held out and of the rest.
      steps: of the run. lines: the choices in words.
    """

    config: dict[str, Any]
    model: Model
    shape: DecoderConfig
    data: Rows
    held: np.ndarray
    train: np.ndarray
    steps: int
    lines: list[str]


def choose(start: StartingPoint, examples: Examples, options: Options) -> Choices:
    """Make every choice that the options leave open.

    Raises:
      ConfigError: options that do not go together, data that cannot be encoded, a model that does not fit.
    """
    of_recipe, devices = options.of_recipe(examples.kind), jax.device_count()
    o = dataclasses.replace(options, **of_recipe)
    method = o.method or ("lora" if start.directory else "full")
    if method == "qlora" and start.directory is None:
        raise ConfigError(f"--method qlora: {start.name} has no weights to quantise, which a directory has")
    check_use(o, method, examples.kind)
    data, why_length, why_packed = encode_rows(start, examples, o)
    batch = batch_of(examples, data, o)
    rate = o.lr or RATES[method if start.directory else "random"] * (0.1 if examples.kind == PREFERENCES else 1)
    config = base_config(batch, rate, o, method, devices)
    fit, why_fit = fitting(start, examples, data, config, o, method)
    config = merged(config, {MICRO: fit.micro, POLICY: fit.policy})
    held, train = hold_out(len(data), fit.micro * devices, o)
    if len(train) < batch:
        raise ConfigError(
            f"--held_out {o.held_out}: leaves {len(train)} of {many(len(data), 'row')}, less than --batch {batch}"
        )
    steps = o.steps or max(1, round(o.epochs * len(train) / batch))
    config["scheduler"] = warmup_cosine(rate, steps)
    config["steps_per_print"] = max(1, steps // 10)
    config = merged_sections(config, o.config)
    shape, model = model_of(start, examples, method, o)
    of_epochs = f": --epochs {o.epochs:g} of {many(len(train), 'row')}"
    lines = [
        f"data: {examples.words()}" + (f", --beta {o.beta:g}" if examples.kind == PREFERENCES else ""),
        f"--method {method}: {words_of_training(method, shape, o)}",
        f"--length {data.length}: {why_length}",
        "; ".join([f"{why_packed}{data!r}", *data.limit.notes()]),
        f"--batch {batch} rows a step; --micro_batch {fit.micro}, --recompute {fit.policy}: {why_fit}",
        f"--lr {rate:g}; --steps {steps}" + (of_epochs if o.steps is None else ""),
        f"--held_out {o.held_out:g}: {many(len(held), 'row')}" + f", --evaluations {o.evaluations}" * bool(len(held)),
        f"ZeRO stage {config['zero_optimization']['stage']} on {many(devices, 'device')}"
        f"{', with the sections of --recipe' if o.recipe else ''} (--config)",
    ]
    lines = [re.sub(rf"--({'|'.join(of_recipe)}) [^\s,:;]+", r"\g<0> (recipe)", line) for line in lines]
    return Choices(config, model, shape, data, held, train, steps, lines)


def batch_of(examples: Examples, data: Rows, o: Options) -> int:
    """Choose the rows of a step.

    Raises:
      ConfigError: there are too few for one, or the devices do not divide those of --batch.
    """
    devices = jax.device_count()
    batch = o.batch or max(1, min(ROWS // devices, len(data) // (2 * devices))) * devices
    if o.batch is None and len(data) < batch + (o.held_out > 0):
        fixes = {"more samples": True, "--no_pack": data.packs, "shorter rows (--length)": examples.kind == "text",
                 "--held_out 0": o.held_out and len(data) >= batch}  # fmt: skip
        raise ConfigError(
            f"{examples.name}: {many(len(data), 'row')} of {data.length:,} tokens, too few for a step on "
            f"{many(devices, 'device')}{' and a row held out' if o.held_out else ''}: give "
            f"{' or '.join(fix for fix, helps in fixes.items() if helps)}"
        )
    if batch % devices or len(data) < batch + (o.held_out > 0):
        raise ConfigError(
            f"--batch {batch}: must be a multiple of the {many(devices, 'device')}, and smaller than the "
            f"{many(len(data), 'row')} of {examples.name} (now of {data.length} tokens: shorter rows are more)"
        )
    return batch


def words_of_training(method: Method, shape: DecoderConfig, o: Options) -> str:
    """Say which parameters a method trains."""
    if shape.lora is None:
        return "all parameters"
    modules = shape.lora.target_modules
    at = "all matrices" if len(modules) == len(MODULES) else ", ".join(modules)
    kept = f", which are kept in --quantize {o.quantize}" if method == "qlora" else ""
    return f"adapters of --rank {o.rank} at {at}{kept}"


def check_use(o: Options, method: Method, kind: str) -> None:
    """Raise a ConfigError for options that this run has no use for."""
    of_others = {
        "rank": method == "full" and "--method lora and qlora",
        "quantize": method != "qlora" and "--method qlora",
        "beta": kind != PREFERENCES and "preferences (chosen, rejected)",
        "pack": kind == PREFERENCES and "texts, completions and conversations",
    }
    given = {name: value for name, value in vars(o).items() if value != getattr(Options, name)}
    if useless := [name for name, others in of_others.items() if others and name in given]:
        raise ConfigError(*(f"--{x} {given[x]}: is for {of_others[x]}, and not used here" for x in useless))


def encode_rows(start: StartingPoint, examples: Examples, o: Options) -> tuple[Rows, str, str]:
    """Encode the samples in rows as short as the longest allows, packed unless rows get few; return why both."""
    there = start.shape.download.config if start.shape.download else {}
    limit = there.get(POSITIONS) or LONGEST  # some have null
    length = o.length or min(LONGEST, limit)

    def rows(length: int, pack: bool = o.pack is not False) -> Rows:
        try:
            return examples.rows(start.tokenizer, length, start.shape.vocab_size, pack)
        except ConfigError as error:
            raise ConfigError(f"{examples.name}: {error}") from None

    data = rows(length)
    if o.length:
        why = f"as asked, beyond the model's {POSITIONS} {limit:,}" if there and o.length > limit else "as asked"
    else:
        longest = data.limit.longest
        shorter = max(SHORTEST, 1 << (longest - 1).bit_length())
        most = f"the model's {POSITIONS}" if limit < LONGEST else "the most by default"
        why = f"the longest sample has {longest:,} tokens" if longest < length else most
        if shorter < length:
            data = rows(shorter)
        while examples.kind == "text" and len(data) < FEW and data.length >= 2 * SHORTEST:
            data = rows(data.length // 2)
            why = f"short, so that there are at least {FEW} rows" if len(data) >= FEW else "short, for more rows"
    few = len(data) < (o.batch or max(ROWS, jax.device_count())) + (o.held_out > 0)
    if o.pack is None and data.packs and few and len(single := rows(data.length, pack=False)) > len(data):
        return single, why, f"--no_pack: one sample a row; packed, they fill only {many(len(data), 'row')}; "
    packing = f"--{'' if data.packs else 'no_'}pack: {'several samples' if data.packs else 'one sample'} a row; "
    return data, why, "" if examples.kind == PREFERENCES else packing


def hold_out(count: int, multiple: int, o: Options) -> tuple[np.ndarray, np.ndarray]:
    """Return the indices of the rows that are held out, a multiple of a micro-batch of all devices, and of the rest."""
    order = np.random.default_rng(o.seed).permutation(count)
    held = max(1, round(o.held_out * count / multiple)) * multiple if o.held_out else 0
    return np.sort(order[:held]), np.sort(order[held:])


def base_config(batch: int, rate: float, o: Options, method: Method, devices: int) -> dict[str, Any]:
    own = {
        TRAIN: batch,
        "optimizer": {"type": "AdamW", "params": {"lr": rate}},
        "scheduler": warmup_cosine(rate, 2),
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 3 if devices > 1 else 0},
        "jsonl_monitor": {"enabled": True, "output_path": str(o.out), "job_name": "curves"},
        "seed": o.seed,
        **({} if method == "full" else {"trainable_parameters": ["lora_"]}),
    }
    kept = recipe.config if (recipe := o.adapter_recipe()) else {}
    return merged(own | {key: kept[key] for key in kept if key not in DECIDED}, {RATE: rate})


def warmup_cosine(rate: float, steps: int) -> dict[str, object]:
    """Return the section of a linear warm-up and a cosine, whose every step has a rate above 0.

    DeepSpeed's `WarmupCosineLR` takes its first two steps at rate 0, which a short run notices.
    """
    warmup = max(1, steps // 30)
    params = {"init_value": rate / (warmup + 1), "peak_value": rate, "warmup_steps": warmup}
    return {"type": "warmup_cosine_decay_schedule", "params": {**params, "decay_steps": max(steps, warmup + 1)}}


def merged_sections(config: Raw, given: Raw | str | None) -> dict[str, Any]:
    """Return a config with the sections of another, a dict or a file, in place of its own; the rate stays.

    Raises:
      ConfigError: the other has keys that options decide.
    """
    there = read_config(given) if given else {}
    if decided := [key for key in DECIDED if value_at(there, key) is not None]:
        raise ConfigError(*(f"--config has {key}: give it as {DECIDED[key]}" for key in decided))
    on = any(value_at(there, f"{half}.enabled") is True for half in HALF)  # then the other half is off
    halves = {half: section for half in HALF if isinstance(section := there.get(half, {}), dict)}
    made = {**config, **there, **{half: {"enabled": False if on else "auto", **halves[half]} for half in halves}}
    return merged(made, {RATE: config["optimizer"]["params"]["lr"]}) if "optimizer" in there else made


def model_of(start: StartingPoint, examples: Examples, method: Method, o: Options) -> tuple[DecoderConfig, Model]:
    quantized = o.quantize if method == "qlora" else None
    shape = start.shape if method == "full" else add_adapters(start.name, start.shape, o.rank, quantized)
    if examples.kind == PREFERENCES:
        return shape, from_flax(lambda rngs: PreferenceDecoder(shape, beta=o.beta, rngs=rngs), has_aux=True)
    return shape, from_flax(lambda rngs: Decoder(shape, rngs=rngs))


def fitting(
    start: StartingPoint, examples: Examples, data: Rows, config: Raw, o: Options, method: Method
) -> tuple[Fit, str]:
    """Choose micro-batch and recomputation; return why.

    Raises:
      ConfigError: nothing fits; it names the method that does.
    """
    rows = config[TRAIN] // jax.device_count()
    given = {MICRO: o.micro_batch, POLICY: o.recompute}
    if o.micro_batch and rows % o.micro_batch:
        raise ConfigError(f"--micro_batch {o.micro_batch}: must divide the {rows} rows of a device in a step")
    there = usable_memory_here()
    if o.memory is None and there is None:
        few = max(n for n in range(1, min(rows, MICRO_ON_CPU) + 1) if rows % n == 0)
        fit = Fit(o.micro_batch or few, o.recompute or POLICIES[0], None)
        return fit, "the defaults on CPUs (--memory plans for a limit)"
    most = parse_size(o.memory, "--memory") if o.memory else there.most if there else 0

    def needs(method: Method, given: Raw) -> Fit | int:
        model = model_of(start, examples, method, o)[1]

        def make(config: Raw) -> tuple[TrainStep, PyTree]:
            part = with_reference(data.rows(np.arange(1)), np.zeros((1, 2), np.float32))
            shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct((config[TRAIN], *x.shape[1:]), x.dtype), part)
            return make_train_step(model, merged_sections(config, o.config)), shapes

        own = base_config(config[TRAIN], 1.0, o, method, jax.device_count())
        kept = merged(own, {key: value for key, value in given.items() if value})
        return choose_fit(make, kept, rows, data.length, most)

    found = needs(method, given)
    if isinstance(found, Fit):
        return found, f"{'' if all(given.values()) else 'the fastest that '}fits {size_text(most)}{found}"
    others = {
        name: needs(name, {MICRO: 1, POLICY: "full"})
        for name in get_args(Method)
        if name != method and (start.directory or name != "qlora")
    }
    fits = [f"--method {name} fits{other}" for name, other in others.items() if isinstance(other, Fit)]
    fix = "; ".join(fits) or "shorter rows (--length), a smaller model or more devices may"
    raise ConfigError(f"--method {method} does not fit: {size_text(found)} of {size_text(most)} per device; {fix}")


def with_reference(batch: PyTree, reference: np.ndarray) -> PyTree:
    """Return a batch with the reference's log-probabilities, if it has preferences."""
    return {**batch, "reference": reference} if "chosen" in batch else batch
