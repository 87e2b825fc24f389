"""An engine's checkpoints: what is kept beside the state, what is taken of one, and going on from the newest."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from jzero import checkpoint
from jzero.checkpoint.async_save import settle
from jzero.checkpoint.checksums import checksums
from jzero.checkpoint.directory import LATEST, SAVING, latest, list_checkpoints, recover
from jzero.checkpoint.reader import Checkpoint, all_or_none, expected_shape, match_dtypes
from jzero.config.sizes import given, kept
from jzero.distributed.host_collectives import agree
from jzero.distributed.place import log_dist
from jzero.errors import CheckpointError, ConfigError, some_of
from jzero.loss_scale import Scaler
from jzero.model import weights_layout
from jzero.optimizers import at_step
from jzero.state import check_alive
from jzero.tree import named

if TYPE_CHECKING:
    from jzero.engine.engine import Engine

COUNTERS = ("global_steps", "global_samples", "micro_steps")


def save(
    engine: Engine, directory: str | os.PathLike | None, tag: str | float, *, latest: bool, without_frozen: bool
) -> checkpoint.Save:
    """Save the engine's state, and beside it what `load` takes up."""
    step, loader = engine.step_fn, engine.training_dataloader
    check_alive(engine.state)
    names = [f"params/{leaf.name}" for leaf in jax.tree.leaves(step.layouts) if not leaf.trainable]
    notes = {
        "engine": {name: getattr(engine, name) for name in COUNTERS},
        "batch": {
            "train": engine.train_batch_size(),
            "micro": engine.train_micro_batch_size_per_gpu(),
            "replicas": step.replicas,
            "given": given(engine.config),
        },
        "loss_scale": _scaling(step.precision.scaler),
        "data": getattr(loader, "position", None),
        "order": getattr(loader, "order", None),
        "client": engine.client_state,
        "weights": weights_layout(step.model),  # for jzero export
    }
    return checkpoint.save(
        engine.state, directory or "", tag, notes=notes, latest=latest, without=names if without_frozen else (),
        max_to_keep=engine.config.checkpoint.max_to_keep,
    )  # fmt: skip


def load(
    engine: Engine,
    source: Checkpoint,
    *,
    strict: bool = True,
    only_module: bool = False,
    optimizer: bool = True,
    schedule: bool = True,
) -> None:
    """Put a checkpoint into the engine's state.

    Args:
      strict: every leaf that is wanted must be there, in its shape, and no others; else what fits is taken.
      only_module: take the parameters alone, no counters and no position in the data.
      optimizer, schedule: take the optimizer's state; the place in the learning rate's schedule.

    Raises:
      ConfigError: a checkpoint of another model or optimizer.
      CheckpointError: it is damaged.
    """

    def wants(name: str) -> bool:
        if only_module:
            return name == "params" or name.startswith("params/")  # which may be one array
        return schedule if name in ("step", "loss_scale/skipped") else optimizer or not name.startswith("opt_state/")

    step = engine.step_fn
    shapes, shardings = named(step.state_shapes), named(step.state_shardings)
    wanted = {name: expected_shape(x) for name, x in shapes.items() if wants(name)}
    if strict:
        expected = {name: shape for name, shape in wanted.items() if name not in source.without}
        source.check_fit(expected, filter(wants, source.shapes))
    there = source.shapes
    taken = [name for name, shape in wanted.items() if name in there and shape in (None, there[name])]
    if not taken:
        raise ConfigError(f"checkpoint {source.path} has nothing for this model: its leaves are {some_of(there)}")
    if engine.state is None and len(taken) < len(shapes):
        check_alive(None)
    kept = {name: x for name, x in named(engine.state).items() if name not in taken}
    _check_kept(source, kept)
    if not only_module:
        _check_fits(engine, source.notes)
    engine.state = None  # what is replaced makes room
    read = match_dtypes(source.read({name: shardings[name] for name in taken}), shapes)
    state = jax.tree.unflatten(jax.tree.structure(step.state_shapes), [(kept | read)[name] for name in shapes])
    scale = read.get("loss_scale/scale")
    if scale is not None and not _of_scaler(step.precision.scaler, source.notes.get("loss_scale"), float(scale)):
        state = dataclasses.replace(state, loss_scale=step.new_loss_scale(state.loss_scale.skipped))
    if optimizer != schedule and not only_module:
        move = jax.jit(
            lambda s: dataclasses.replace(s, opt_state=at_step(s.opt_state, s.step - s.loss_scale.skipped)),
            out_shardings=step.state_shardings, donate_argnums=0,
        )  # fmt: skip
        state = move(state)
    engine.state = state
    if not strict:
        others = sorted(source.shapes.keys() - set(taken))
        log_dist(
            f"taken: {len(taken)} leaves; kept: {', '.join(kept) or 'none'}; not used: {', '.join(others) or 'none'}"
        )
    if not only_module:
        _go_on(engine, source.notes)


def _check_kept(source: Checkpoint, kept: dict[str, Any]) -> None:
    """The leaves that the checkpoint was saved without must be those that the run had."""
    mine = {name: x for name, x in kept.items() if name in source.without}
    sums = zip(sorted(mine), checksums(mine), strict=True) if mine else ()
    if others := [name for name, checksum in sums if int(checksum) != source.without[name]]:
        raise ConfigError(
            f"checkpoint {source.path} was saved without {', '.join(others)}, and the engine's are not those of that "
            "run: load these first (engine.load_weights), then engine.load_checkpoint"
        )


def _check_fits(engine: Engine, notes: Mapping[str, Any]) -> None:
    """Change the global batch and the position in the data, or raise before anything is lost."""
    if "engine" not in notes:
        return
    then, loader, replicas = notes["batch"], engine.training_dataloader, engine.step_fn.replicas
    train, before = then["train"], engine.train_batch_size()
    if train != before and kept(engine.config, replicas, then):
        engine.set_train_batch_size(train)
    if train != engine.train_batch_size():
        log_dist(f"the checkpoint's train_batch_size was {train}; from here on it is {before}")
    elif train != before or then["replicas"] != replicas:
        log_dist(f"train_batch_size {train} as in the checkpoint: {engine.gradient_accumulation_steps()} micro-batches")
    if loader is not None and notes["data"] is not None:
        loader.seek(notes["data"])


def _go_on(engine: Engine, notes: Mapping[str, Any]) -> None:
    """The counters."""
    step = int(engine.state.step)  # all there is of a state that `checkpoint.save` saved
    samples, accum = step * engine.train_batch_size(), engine.gradient_accumulation_steps()
    counters = notes.get("engine", dict(zip(COUNTERS, (step, samples, step * accum), strict=True)))
    for name in COUNTERS:
        setattr(engine, name, counters[name])
    engine.client_state = client_state(notes)
    engine.restart_clock()
    if problem := _other_data(engine.training_dataloader, notes, step):
        _warn(problem)


def client_state(notes: Mapping[str, Any]) -> dict[str, Any]:
    """What the user gave `save_checkpoint`; {} of a checkpoint that no engine saved."""
    return notes["client"] if "engine" in notes else {}


def _other_data(loader: Any, notes: Mapping[str, Any], step: int) -> str:
    """In what the run's data go on otherwise than the straight run's would."""
    position, order, said = notes.get("data"), notes.get("order") or {}, ""
    if loader is None and any((position or {}).values()):
        said = "the checkpoint has a position in training_data, and this run no training_data"
    elif loader is not None and position is None and step:
        said = f"the checkpoint is of step {step} but has no position in training_data, which begins at its start"
    elif loader is not None:
        others = [f"{name} was {order[name]}, is {x}" for name, x in loader.order.items() if order.get(name, x) != x]
        head = "other data than the checkpoint's, or in another order from here on: "
        said = head * bool(others) + ", ".join(others)
    return said


def _scaling(scaler: Scaler) -> dict[str, Any]:
    """What must be the same for a loss scale to be taken over."""
    return {"dynamic": scaler.dynamic, "static": None if scaler.dynamic else scaler.initial}


def _of_scaler(scaler: Scaler, said: Any, scale: float) -> bool:
    """Whether a stored loss scale is one of this scaler's: as the notes say, or, if they say nothing, by its value."""
    if said is not None:
        return said == _scaling(scaler)
    return scale != 1 if scaler.dynamic else scale == scaler.initial


def start(engine: Engine, directory: str | os.PathLike, rng: jax.Array) -> None:
    """The engine's first state: of the newest checkpoint in the directory that can be read, else a new one.

    Raises:
      ConfigError: the newest is of another model or optimizer.
      CheckpointError: there are checkpoints, and none can be read. A run never starts from scratch in silence.
    """
    root, problems = Path(directory).absolute(), []
    for name, problem in _candidates(root):
        if not problem:
            try:
                source = Checkpoint.find(root, name)
                if source.without:
                    engine.state = engine.step_fn.init(rng)
                load(engine, source)
                named = latest(root)
                other = f" ({LATEST} names {named.name})" if named and named.name != name else ""
                log_dist(f"resumed from {source.path}: step {engine.global_steps}{other}")
                return
            except CheckpointError as error:
                problem = str(error)
        problems.append(problem)
        _warn(f"skipped: {problem}")
    if problems:
        raise CheckpointError(
            f"resume: none of the {len(problems)} checkpoints in {root} can be read: {problems[0]}; name another "
            "directory, or remove them, to start from step 0"
        )
    log_dist(f"no checkpoint in {root} yet: starting at step 0")
    engine.state = engine.step_fn.init(rng)


def begin(engine: Engine, rng: jax.Array) -> None:
    """The first state of a run that does not resume."""
    engine.state = engine.step_fn.init(rng)
    home = engine.config.checkpoint.dir
    if home is None:
        return
    if others := _process_0(
        "looking for checkpoints", lambda: [p.name for p, _ in list_checkpoints(Path(home).absolute())]
    ):
        _warn(
            f"starting at step 0, though {home} holds {some_of(others)}: jzero --resume, or resume="
            '"auto", goes on from the newest'
        )


def former_batch(directory: str | os.PathLike) -> dict[str, Any] | None:
    """What `save` noted of the batch in the newest checkpoint there; None if there is none, or it does not say."""

    def newest() -> dict[str, Any] | None:
        recover(root := Path(directory).absolute())
        said = [about["notes"] for _, about in list_checkpoints(root) if not isinstance(about, CheckpointError)]
        return said[0].get("batch") if said and "engine" in said[0] else None

    return _process_0("looking for the run that goes on", newest)


def _process_0(what: str, work: Callable[[], Any]) -> Any:
    """What work gives on process 0, which JSON can hold; an error there is a CheckpointError on all."""
    settle()
    found = all_or_none(what, lambda: work() if jax.process_index() == 0 else None)
    return json.loads(agree(what, json.dumps(found))[0])


def _candidates(root: Path) -> list[tuple[str, str]]:
    """(tag, what is known to be wrong with it), the newest first, as process 0 sees them."""
    return _process_0("looking for checkpoints to resume from", lambda: _found(root))


def _found(root: Path) -> list[tuple[str, str]]:
    recover(root)
    found = [(p.name, str(about) if isinstance(about, CheckpointError) else "") for p, about in list_checkpoints(root)]
    for left in sorted(root.glob(f"*{SAVING}")):
        _warn(f"skipped: {left} was not finished")
    if (named := latest(root)) and named.name not in [name for name, _ in found]:
        what = "is not a jzero checkpoint" if named.exists() else "does not exist"
        found.insert(0, (named.name, f"checkpoint {named} {what}, and {LATEST} names it"))
    return found


def _warn(text: str) -> None:
    if jax.process_index() == 0:
        print(f"jzero: {text}", file=sys.stderr, flush=True)
