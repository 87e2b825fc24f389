"""`jzero finetune`: from a file to a tuned model that `transformers` loads."""

from __future__ import annotations

import contextlib
import hashlib
import json
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jzero.config.sizes import TRAIN
from jzero.data import DataLoader, RepeatingLoader
from jzero.distributed.place import log_dist
from jzero.errors import ConfigError
from jzero.models.preferences import SIDES, PreferenceDecoder
from jzero.models.quantized import Kind
from jzero.recipes.choices import PREFERENCES, Choices, Options, choose, with_reference
from jzero.recipes.examples import read_examples
from jzero.recipes.quantized_base import quantized_params, write_merged
from jzero.recipes.starting_point import StartingPoint, starting_point
from jzero.run.engine import Engine
from jzero.run.initialize import initialize
from jzero.step.evaluate import make_eval_step
from jzero.tree import PyTree
from jzero.values.parameters import did_you_mean

SAMPLES, ROWS = 3, 64  # samples of different prompts, and the rows among which these are sought
HEAD, PROMPT, NEW = 16, 256, 64  # tokens of a text's beginning, of a prompt at most, and new ones


class Tuned(NamedTuple):
    """Results of a fine-tuning.

    Attributes:
      directory: with `model/` (for transformers and vLLM), `adapters/` (for peft), `checkpoints/` and `curves/`.
      losses: of each step.
      held_out: {step: loss of the rows held out}; step 0 is before the training.
      best: the step whose parameters were written.
      samples: (prompt, continuation).
    """

    directory: Path
    losses: list[float]
    held_out: dict[int, float]
    best: int
    samples: list[tuple[str, str]]


class Part:
    """Chosen rows of training data, and the reference's log-probabilities of preferences."""

    def __init__(self, choices: Choices, indices: np.ndarray, reference: np.ndarray):
        self.data, self.indices, self.reference = choices.data, indices, reference

    def __len__(self) -> int:
        return len(self.indices)

    def rows(self, indices: np.ndarray) -> PyTree:
        chosen = self.indices[indices]
        return with_reference(self.data.rows(chosen), self.reference[chosen])

    def all(self) -> PyTree:
        return self.rows(np.arange(len(self)))


def finetune(model: str, data: str | Path, **options: Any) -> Tuned:
    """Fine-tune a model on a file, and write a directory that `transformers` loads.

    Args:
      model: a directory of `transformers`, a hub id in the local cache, or a preset, which starts at random.
      data: JSONL, a text file, Parquet, or a directory of `datasets`: texts, prompts with completions, conversations or
        preferences, told by their fields.
      options: the fields of `jzero.recipes.choices.Options`.

    Raises:
      ConfigError: anything that the user can mend, before any training.
    """
    if unknown := options.keys() - Options.__dataclass_fields__.keys():
        known = f"must be one of {', '.join(Options.__dataclass_fields__)}"
        fixes = [f"{x}: not an option; {known}{did_you_mean(x, Options.__dataclass_fields__)}" for x in sorted(unknown)]
        raise ConfigError(*fixes)
    o = Options(**options)
    out = Path(o.out)
    home, run_file = out / "checkpoints", out / "run.json"
    is_new = not out.exists() or (out.is_dir() and not any(out.iterdir()))
    if not is_new and not (o.resume and run_file.is_file()):
        fix = ", or add --resume to continue its run" if run_file.is_file() else ""
        raise ConfigError(f"--out {out}: exists and is not an empty directory: name a new one{fix}")
    if Path(model).is_file():
        raise ConfigError(f"MODEL {model} is a file, no directory or name: swapped? jzero finetune {data} {model}")
    log_dist(f"reading {data} and {model}")
    examples = read_examples(data)
    start = starting_point(model, o.tokenizer)
    choices = choose(start, examples, o)
    log_dist("\n".join([f"fine-tuning {model}:", *(f"  {line}" for line in choices.lines)]))
    about = about_run(model, choices, o)
    if not is_new:
        check_same_run(run_file, about)
    params = None
    if start.directory and (kind := quantization(choices)):
        params = quantized_params(start.directory, choices.model, choices.shape, kind)
    engine, *_ = initialize(model=choices.model, config=choices.config, params=params)
    if is_new and jax.process_index() == 0:
        out.mkdir(parents=True, exist_ok=True)
        run_file.write_text(json.dumps(about, indent=1) + "\n")
    if start.directory and params is None:
        engine.load_weights(start.directory)
    reference = np.zeros((len(choices.data), 2), np.float32)
    if examples.kind == PREFERENCES:
        reference = log_probabilities(engine, choices)
    run = TuningRun(engine, choices, reference, o)
    if (home / "latest").exists():
        run.resume()
    losses, held_out = run.train()
    finite = [step for step in held_out if np.isfinite(held_out[step])]
    best = min(finite, key=lambda step: held_out[step]) if finite else len(losses)
    if best != engine.global_steps:
        engine.load_checkpoint(home, "best", load_module_only=True)
    write_model(engine, choices, start, out)
    samples = sample_continuations(engine, choices, start.tokenizer)
    log_dist("\n".join(f"{prompt!r}\n  -> {text!r}" for prompt, text in samples))
    found = f"; held out {held_out[0]:.3f} -> {held_out[best]:.3f} at step {best}" if held_out else ""
    log_dist(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}{found}; the model is in {out / 'model'}")
    return Tuned(out, losses, held_out, best, samples)


class TuningRun:
    """The steps of a fine-tuning, with its evaluations and checkpoints.

    Attributes:
      losses: of each step. held_out: {step: loss of the rows held out}.
    """

    def __init__(self, engine: Engine, choices: Choices, reference: np.ndarray, o: Options):
        self.engine, self.choices, self.o, self.home = engine, choices, o, Path(o.out) / "checkpoints"
        self.loader = DataLoader(Part(choices, choices.train, reference), engine.step_fn, seed=o.seed)
        self.held = Part(choices, choices.held, reference).all() if len(choices.held) else None
        self.losses, self.held_out = list[float | jax.Array](), dict[int, float]()

    def resume(self) -> None:
        """Continue with the newest checkpoint of the directory."""
        _, notes = self.engine.load_checkpoint(self.home)
        self.losses = notes["losses"]
        self.held_out = {int(step): loss for step, loss in notes["held_out"].items()}
        self.loader.seek(notes["position"])
        log_dist(f"continuing after step {len(self.losses)} of {self.choices.steps}")

    def train(self) -> tuple[list[float], dict[int, float]]:
        """Take the steps; evaluate, and keep the best and the last checkpoint. Return `losses` and `held_out`."""
        steps, batches = self.choices.steps, iter(RepeatingLoader(self.loader))
        every = max(1, steps // self.o.evaluations)
        with first_interrupt() as interrupted:
            if not self.losses:
                self.evaluate()
            for step in range(len(self.losses) + 1, steps + 1):
                if self.o.patience and self.waited() >= self.o.patience:
                    log_dist(f"stopped: no better held-out loss in --patience {self.o.patience} evaluations")
                    break
                self.losses.append(self.engine.train_batch(batches))
                if step % every == 0 or step == steps:
                    self.evaluate()
                if interrupted() and step < steps:
                    self.save("last", wait=True)
                    raise KeyboardInterrupt(f"--resume continues after step {step}")
        self.save("last", wait=True)
        return self.floats(), self.held_out

    def waited(self) -> int:
        """Count the evaluations since the best one."""
        losses = [loss if np.isfinite(loss) else np.inf for loss in self.held_out.values()]
        return len(losses) - 1 - int(np.argmin(losses)) if losses else 0

    def evaluate(self) -> None:
        """Evaluate the rows held out, and save."""
        step, is_best = self.engine.global_steps, False
        if self.held is not None:
            loss = float(self.engine.eval_batch(self.held))
            if not step and not np.isfinite(loss):
                raise ConfigError(f"the held-out loss is {loss} before the first step: check the weights and the data")
            is_best = -np.inf < loss < min(filter(np.isfinite, self.held_out.values()), default=np.inf)
            self.held_out[step] = loss
            log_dist(f"step {step}: held-out loss {loss:.4f}{', the best' if is_best and step else ''}")
        if step < self.choices.steps or is_best:
            self.save("best" if is_best else "last")

    def save(self, tag: str, wait: bool = False) -> None:
        notes: dict[str, object] = {"losses": self.floats(), "position": self.loader.position}
        notes["held_out"] = {str(step): loss for step, loss in self.held_out.items()}
        has_frozen = bool(self.choices.shape.lora)
        begun = self.engine.save_checkpoint(self.home, tag, notes, exclude_frozen_parameters=has_frozen)
        if wait:
            begun.wait()

    def floats(self) -> list[float]:
        self.losses[:] = found = [float(loss) for loss in self.losses]
        return found


def about_run(model: str, choices: Choices, o: Options) -> dict[str, Any]:
    """Return what a run keeps when it is continued: model, rows, and the options but for those of its length."""
    kept = "recipe", "method", "tokenizer", "length", "lr", "rank", "quantize", "beta", "pack", "held_out", "seed"
    options = {f"--{key}": value for key in kept if (value := getattr(o, key)) is not None}
    rows = hashlib.sha256()
    for first in range(0, len(choices.data), 1024):
        part = choices.data.rows(np.arange(first, min(first + 1024, len(choices.data))))
        for leaf in jax.tree.leaves(part):
            rows.update(np.asarray(leaf).tobytes())
    found = {"MODEL": model, "rows of DATA": rows.hexdigest()[:16], "--batch": choices.config[TRAIN], **options}
    return json.loads(json.dumps(found, default=str))


def check_same_run(file: Path, about: Mapping[str, Any]) -> None:
    """Raise a ConfigError if the run of this file has another model, other rows or options."""
    there = json.loads(file.read_text())
    other = [key for key in {**there, **about} if there.get(key) != about.get(key)]
    if other:
        words = (f"{key} {there[key]}" if key in there else f"no {key}" for key in other)
        raise ConfigError(f"--resume: the run in {file.parent} has {', '.join(words)}: give the same")


@contextlib.contextmanager
def first_interrupt() -> Iterator[Callable[[], bool]]:
    """Note the first Ctrl-C, for the end of the step; the second one interrupts at once, and so do those of a job."""
    asked = list[int]()

    def note(number: int, _: object) -> None:
        asked.append(number)
        log_dist("interrupted: saving after this step; Ctrl-C again ends at once")
        signal.signal(signal.SIGINT, signal.default_int_handler)

    # A process in the background ignores SIGINT; only the main thread may set a handler.
    alone = signal.getsignal(signal.SIGINT) is signal.default_int_handler and jax.process_count() == 1
    alone = alone and threading.current_thread() is threading.main_thread()
    if alone:
        signal.signal(signal.SIGINT, note)
    try:
        yield lambda: bool(asked)
    finally:
        if alone:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def log_probabilities(engine: Engine, choices: Choices) -> np.ndarray:
    """Compute the log-probabilities of all replies under the model before the training: [pairs, 2].

    They do not change, so they become a part of the data: no second model is in memory.
    """
    evaluate = make_eval_step(choices.model, PreferenceDecoder.log_probabilities, engine.config, mesh=engine.mesh)
    count, size = len(choices.data), engine.train_batch_size()
    parts = [np.arange(first, min(first + size, count)) for first in range(0, count, size)]
    zeros = np.zeros((size, 2), np.float32)
    found = [
        evaluate(engine.state, with_reference(choices.data.rows(part), zeros[: len(part)]), numpy=True)
        for part in parts
    ]
    return np.concatenate(found)


def write_model(engine: Engine, choices: Choices, start: StartingPoint, out: Path) -> None:
    """Write the model, adapters merged, with its tokenizer, and the adapters alone."""
    if start.directory and quantization(choices):
        write_merged(engine.state.params, choices.shape, start.directory, out)
    else:
        engine.save_16bit_model(out / "model")
        if choices.shape.lora:
            engine.save_adapters(out / "adapters")
    if jax.process_index() == 0:
        start.tokenizer.save_pretrained(out / "model")
        path = out / "model" / "generation_config.json"
        if not path.exists():
            path.write_text(json.dumps({"eos_token_id": start.tokenizer.eos_token_id}) + "\n")


def quantization(choices: Choices) -> Kind | None:
    """Return how the frozen matrices are kept; None: as they are."""
    return choices.shape.lora.quantized if choices.shape.lora else None


def sample_continuations(engine: Engine, choices: Choices, tokenizer: Any) -> list[tuple[str, str]]:
    """Continue some rows' prompts, or the beginnings of texts, with the most probable tokens."""
    from_rows = choices.held if len(choices.held) else choices.train
    few = from_rows[np.unique(np.linspace(0, len(from_rows) - 1, ROWS).astype(int))]
    rows: Mapping[str, PyTree] = choices.data.rows(few)
    rows = rows.get(SIDES[0], rows)
    positions = choices.shape.max_positions or PROMPT + NEW
    new = min(NEW, positions // 2)
    prompts = [prompt[new - positions :] for prompt in different_prompts(rows)]
    width = max(map(len, prompts))
    end = tokenizer.eos_token_id
    pad = end if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    padded = np.array([[pad or 0] * (width - len(prompt)) + prompt for prompt in prompts], np.int32)
    mask = np.array([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    ends = {} if end is None else {"eos_token_id": end, "pad_token_id": pad}
    found = engine.generate(padded, new, attention_mask=mask, numpy=True, **ends)
    texts = tokenizer.batch_decode(found[:, width:], skip_special_tokens=True)
    return list(zip(map(tokenizer.decode, prompts), texts, strict=True))


def different_prompts(rows: Mapping[str, np.ndarray]) -> list[list[int]]:
    """Return the prompts of at most `SAMPLES` rows, none twice.

    >>> tokens = np.array([[5, 6, 7], [5, 6, 8], [9, 6, 7]])
    >>> different_prompts({"inputs": tokens, "labels": np.array([[-1, 7, 8]] * 3)})
    [[5, 6], [9, 6]]
    """
    found = dict.fromkeys(
        tuple(prompt_of(dict(zip(rows, row, strict=True)))) for row in zip(*rows.values(), strict=True)
    )
    return [list(prompt) for prompt in found][:: max(1, len(found) // SAMPLES)][:SAMPLES]


def prompt_of(row: Mapping[str, np.ndarray]) -> list[int]:
    """Return the tokens before the first trained one; of a text, whose tokens are all trained, its beginning.

    >>> prompt_of({"inputs": np.array([5, 6, 7, 8]), "labels": np.array([-1, 7, 8, -1])})
    [5, 6]
    """
    first = int(np.argmax(row["labels"] >= 0)) or min(HEAD, len(row["inputs"]) // 2)
    return row["inputs"][: first + 1][-PROMPT:].tolist()
