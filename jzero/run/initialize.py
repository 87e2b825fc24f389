"""`jzero.initialize`: an engine from a model and a config, with DeepSpeed's options of a script."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import jax
import optax
from jax.sharding import Mesh

from jzero.adapters.from_flax import with_criterion
from jzero.checkpoint.directory import check_home
from jzero.config import Config
from jzero.config.config import outputs
from jzero.data import DataLoader, steps_per_epoch
from jzero.distributed import last_words, machine, watchdog
from jzero.distributed.host_collectives import check_same, run_on_all
from jzero.distributed.joining import init_distributed
from jzero.distributed.place import find_place
from jzero.errors import ConfigError, refuse_keywords
from jzero.files import check_writable
from jzero.layout import offload
from jzero.profiling.profiles import OUTPUT, check_output_file
from jzero.run.deepspeed_names import KEYWORDS
from jzero.run.engine import Engine
from jzero.run.find_checkpoint import hold_directory
from jzero.run.run_report import report
from jzero.step.setup import resolve
from jzero.step.train_step import TrainStep
from jzero.values.parameters import EPOCHS, Total, is_auto


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add DeepSpeed's options to a script's parser; `jzero.initialize(args=args)` reads them.

    --deepspeed is for scripts that look at it; jzero does not. The launcher's --local_rank=K is taken too, unless the
    script has such an option of its own, added before or after.

    >>> parser = add_config_arguments(argparse.ArgumentParser())
    >>> args = parser.parse_args(["--local_rank=1", "--deepspeed_config", "ds.json"])
    >>> args.deepspeed, args.deepspeed_config, args.local_rank
    (False, 'ds.json', 1)
    """
    group = parser.add_argument_group("jzero", "DeepSpeed's names")
    group.add_argument("--deepspeed", action="store_true", help="for the script's own use; jzero needs no switch")
    group.add_argument("--deepspeed_config", metavar="FILE", help="the config, a JSON file")
    if parser.get_default("local_rank") is None:
        parser.set_defaults(local_rank=None)
    # argparse takes --local_rank as an abbreviation of a longer name. An option of exactly this name would be an error
    # in scripts that add their own; theirs comes first, with its own default.
    group.add_argument(
        "--local_rank_of_process", dest="local_rank", type=int, default=argparse.SUPPRESS, metavar="K",
        help="given by the launcher, as --local_rank",
    )  # fmt: skip
    return parser


def choose_config(args: Any, config: Any) -> Any:
    """Return the config that was given: as `config`, or as the option in `args`.

    Raises:
      ConfigError: neither or both are given.
    """
    option = getattr(args, "deepspeed_config", None)
    if option is None and config is None:
        raise ConfigError("config: none given; pass config=..., or args=args of a script with --deepspeed_config FILE")
    if option is not None and config is not None:
        raise ConfigError(f"config: --deepspeed_config = {option!r} and config = {config!r} are both given: drop one")
    return config if option is None else option


def initialize(
    *unnamed: Any,
    model: Any = None,
    config: Config | dict | str | None = None,
    args: Any = None,
    criterion: Callable | None = None,
    mesh: Mesh | None = None,
    optimizer: optax.GradientTransformation | Callable[[optax.Schedule], optax.GradientTransformation] | None = None,
    lr_scheduler: optax.Schedule | None = None,
    training_data: Any = None,
    params: Any = None,
    rng: jax.Array | None = None,
    resume: str | os.PathLike | Literal[False] | None = None,
    total_num_steps: int | None = None,
    **deepspeed: Any,
) -> tuple[Engine, optax.GradientTransformation, DataLoader | None, Callable | None]:
    """Build the engine, initialise its sharded state, and print the run report on process 0.

    Args:
      model: `init(rng)` and `loss(params, batch, rng)`, see `jzero.model`; Flax modules by `jzero.from_flax`.
      config: DeepSpeed's JSON: a dict, the path of a file, or a `Config`.
      args: the script's options with `deepspeed_config`, see `add_config_arguments`; instead of config.
      criterion: `criterion(outputs, labels)` -> loss, for a `model` that is a Flax module (a function
        `rngs -> nnx.Module`) without a loss: batches are (inputs, labels), and `engine(inputs)` returns the outputs,
        which `engine.loss(outputs, labels)` takes.
      mesh: default `make_mesh(config)`.
      optimizer: instead of the config's: an optax transformation, or a function of the config's learning-rate
        schedule that makes one.
      lr_scheduler: a function of the number of steps applied, instead of the config's `scheduler`.
      training_data: arrays, a sequence of samples, a Hugging Face dataset, an iterable, ...: see `jzero.data`.
      params: parameters to start from, or the path of an Orbax checkpoint with them, as for `TrainStep.init`, unless
        the run is resumed.
      rng: default `jax.random.key(config.seed)`.
      resume: a directory: resume from its newest readable checkpoint, and save there. "auto": the config's
        `checkpoint.dir`. On SIGTERM all processes save there after the same step and exit with code 75. Default: "auto"
        if `jzero --resume` started the job; False: do not resume even then.
      total_num_steps: the optimizer steps of the run, where the config's schedule has "auto"; another number than the
        config's is an error, and so is one that no schedule takes. Default: 3 epochs of training_data, the
        Hugging Face Trainer's default.
      deepspeed: DeepSpeed's other arguments; each raises an error that names the replacement.

    Returns:
      (engine, optimizer, loader, lr_scheduler): the optax transformation in use (`engine.optimizer`, or the caller's
      own), a loader of micro-batches (None without training_data), the learning rate as a function of the steps applied
      (`engine.lr_scheduler`; None if only the optimizer has it).

    Raises:
      ConfigError: the arguments do not fit each other, the devices or the model, or another job writes into the
        directory of `resume`; raised before any compilation.
      OutOfMemoryError: a step on `training_data` needs more memory than its device has.
    """
    if unnamed:
        raise ConfigError(
            f"initialize: {len(unnamed)} arguments without a name: write initialize(model=..., config=...), or "
            "initialize(args=..., model=...)"
        )
    refuse_keywords("initialize", deepspeed, KEYWORDS["initialize"])
    if model is None:
        raise ConfigError("initialize: model is missing: pass model=jzero.from_flax(...) or another model")
    began, model = time.time(), model if criterion is None else with_criterion(model, criterion)
    init_distributed()
    last_words.record_step(0)  # an earlier engine's step is not this run's
    config = Config.load(choose_config(args, config))
    offload.allow_pinned(config)  # the next line starts JAX's devices
    watchdog.watch_for_hangs(config.watchdog.floor, config.watchdog.ceiling)
    resume = os.environ.get("JZERO_RESUME") if resume is None else None if resume is False else resume
    run_on_all("initialize", lambda: _check_outputs(config))
    root, former = hold_directory(resume, config.checkpoint.dir)
    setup = resolve(
        model, config, mesh=mesh, optimizer=optimizer, lr_scheduler=lr_scheduler, former=former,
        total_num_steps=partial(_steps_of, training_data, config) if total_num_steps is None else total_num_steps,
    )  # fmt: skip
    step = TrainStep(setup)
    loader = None
    if training_data is not None:
        loader = DataLoader(training_data, step, seed=config.seed, drop_last=config.dataloader_drop_last)
        check_same("training_data", {"data": repr(loader)})
    engine = Engine(step, jax.random.key(config.seed) if rng is None else rng, loader, root, params, began)
    if jax.process_index() == 0:
        print(report(step, () if loader is None else loader.report_notes()))
    for fault in machine.process_faults(os.environ, find_place(os.environ).local_size):
        print(f"jzero: rank {jax.process_index()}: {fault}", file=sys.stderr, flush=True)
    own = isinstance(optimizer, optax.GradientTransformation)
    return engine, step.setup.optimizer.tx if own else engine.optimizer, loader, engine.lr_scheduler


def _check_outputs(config: Config) -> None:
    """Raise a ConfigError if the run cannot write where it will: now, rather than after hours."""
    if config.checkpoint.dir:
        check_home(config.checkpoint.dir, "checkpoint.dir")
    for key, path in outputs(config).items() if jax.process_index() == 0 else ():
        check_writable(path.absolute().parent if key == OUTPUT else path.absolute(), key)
        if key == OUTPUT:
            check_output_file(path)


def _steps_of(training_data: Any, config: Config, train_batch_size: int) -> Total | None:
    """Return the optimizer steps of the Trainer's default number of epochs; None for data without a length."""
    if config.scheduler is None or not is_auto(config.scheduler.params.get("total_num_steps")) or training_data is None:
        return None
    epoch = steps_per_epoch(training_data, train_batch_size, config.dataloader_drop_last)
    if not epoch:
        return None
    why = f"{EPOCHS} epochs, the Trainer's default, of {epoch} steps; for others pass total_num_steps="
    return Total(EPOCHS * epoch, why)
