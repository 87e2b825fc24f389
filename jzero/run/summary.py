"""The summary at the end of a run on process 0: its time, its files, and what bound it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import jax

from jzero.config import Config
from jzero.errors import escaped
from jzero.ledger.goodput import duration
from jzero.loss import LOSS
from jzero.profiling.device_times import COLLECTIVES, DeviceTimes
from jzero.run.clock import CHECKPOINT, COMPILE, DATA, DEVICE, EVALUATION, HOST, PEERS, PROFILE, SCRIPT, START
from jzero.run.speed import CompletedSteps

# ------------------------------------------------------------------ what a run waited for most: a table of rules

IDLE = 0.1  # of the time of the steps: a wait of the devices that is worth a change
COMMUNICATION = 0.25  # of a step on the device: collectives that no computation hides
LEAST = 60.0  # seconds of steps: shorter runs tell little
MOST = 3  # settings

Applies = Callable[[Config, str], bool]  # of the config, on this platform


class Bound(NamedTuple):
    """A verdict: its name, what it is about, and the settings to try, each where it applies."""

    name: str
    about: str
    settings: tuple[tuple[Applies, str], ...]


def _always(config: Config, platform: str) -> bool:
    return True


def _stage(*stages: int) -> Applies:
    return lambda config, _: config.zero_optimization.stage in stages


MICRO = (_always, "a larger train_micro_batch_size_per_gpu, while the memory lasts")
# CPUs compute more slowly in bf16.
BF16 = (lambda config, platform: config.precision == "fp32" and platform != "cpu", "bf16.enabled: true")

# Parts of the clock in which the devices wait -> the rule.
WAITED = {
    "data": Bound("data-bound", "the devices waited for data", (
        (_always, "training_data in jzero.initialize, which a thread reads ahead, instead of an iterator of your own"),
        (_always, "arrays on a disk that rows are read from, such as memory-mapped tokens, instead of work per sample"),
        (_always, "jzero.data.Packed for short documents: more tokens in a row"),
    )),
    "script": Bound("script-bound", "the devices waited for the script between the steps", (
        (_always, "float(loss) and other reads of results only every few steps: each waits for its step"),
        (_always, "engine.train_batch(), if it calls forward, backward and step"),
        MICRO,
    )),
    "host": Bound("host-bound", "the devices waited for the host to start a step", (
        MICRO,
        (_always, "more gradient_accumulation_steps: fewer, longer steps"),
        (_always, "batches in the dtypes of the devices (int32, float32) and in few arrays"),
    )),
}  # fmt: skip
COMMUNICATES = Bound("communication-bound", "collectives that no computation hides took", (
    (_stage(3), "zero_optimization.stage: 2, if the weights fit: a third less traffic"),
    (_stage(0, 1), "more gradient_accumulation_steps: one reduction for more rows"),
    (_stage(3), "zero_optimization.zero_quantized_weights: true"),
    MICRO,
    BF16,
))  # fmt: skip
COMPUTES = Bound("compute-bound", "the devices computed", (
    BF16,
    (lambda c, _: c.activation_checkpointing is not None and c.activation_checkpointing.kind == "full",
     'activation_checkpointing.policy: "matmuls", which recomputes less'),
    (lambda c, _: c.mesh.pipe > 1, "more gradient_accumulation_steps: a smaller bubble of the pipeline"),
    (lambda _, platform: platform != "cpu", MICRO[1]),  # CPUs multiply small matrices as fast
))  # fmt: skip


def name_bottleneck(
    seconds: Mapping[str, float], config: Config, devices: Sequence[jax.Device], profiled: DeviceTimes | None = None
) -> list[str]:
    """Name what bound a run, in a line, and the settings to try, in another.

    Args:
      seconds: of the parts of the engine's clock.
      devices: of the mesh; one has no collectives.
      profiled: the time of a step's parts on a device, if one was profiled.

    Returns:
      The lines; none for less than a minute of steps, and no settings where none helps.

    >>> config = Config.load({"train_batch_size": 8})
    >>> for line in name_bottleneck({"data": 40.0, "device": 55.0, "host": 5.0}, config, jax.devices()):
    ...     print(line[:75])
    data-bound: the devices waited for data, 40% of the time of the steps
    try training_data in jzero.initialize, which a thread reads ahead, instead
    """
    spent = {part: seconds.get(part, 0.0) for part in (*WAITED, "device")}
    total = sum(spent.values())
    if total < LEAST:
        return []
    part = max(WAITED, key=lambda part: spent[part])
    rule, share, of = WAITED[part], spent[part] / total, "the time of the steps"
    if share < IDLE:
        rule, share = COMPUTES, spent["device"] / total
        if profiled is not None and (step := sum(profiled.parts.values())):
            communicates = profiled.parts.get(COLLECTIVES, 0.0) / step
            if communicates >= COMMUNICATION:
                rule, share, of = COMMUNICATES, communicates, "a profiled step"
        elif len(devices) > 1:
            return [f"device-bound: the devices worked, {share:.0%} of {of}; wall_clock_breakdown separates "
                    "computation from communication"]  # fmt: skip
    settings = [text for applies, text in rule.settings if applies(config, devices[0].platform)][:MOST]
    return [f"{rule.name}: {rule.about}, {share:.0%} of {of}", *([f"try {'; or '.join(settings)}"] if settings else [])]


# The parts of the clock in the words of a summary. The devices' time is that of steps only, so the host's part of a
# step is the time in which they wait for it.
IN_WORDS = {
    START: "start", COMPILE: "compile", DATA: "data", PEERS: "other processes", HOST: "steps", DEVICE: "steps",
    PROFILE: "steps", EVALUATION: "evaluation", CHECKPOINT: "saves", SCRIPT: "script",
}  # fmt: skip


def summary_text(
    seconds: Mapping[str, float], cached: int, completed: CompletedSteps, verdict: Iterable[str],
    files: Mapping[str, str],
) -> str:  # fmt: skip
    """Sum up a whole run.

    Args:
      seconds: {part of the clock: seconds}.
      cached: the programs that were read from the compilation cache instead of compiled.
      completed: the steps that the devices have finished.
      verdict: lines about its goodput, what it waited for, and what to try; without a text: none.
      files: {what: where}.
    """
    found: dict[str, float] = {}
    for part, spent in seconds.items():
        found[IN_WORDS[part]] = found.get(IN_WORDS[part], 0.0) + spent
    parts, totals = sorted(found.items(), key=lambda item: -item[1]), completed.totals
    after = {IN_WORDS[COMPILE]: f" ({cached} program{'s' if cached > 1 else ''} from the cache)" if cached else ""}
    listed = " + ".join(f"{name} {duration(s)}{after.get(name, '')}" for name, s in parts if s >= 0.05)
    count = f"{totals.steps:,} step{'s' if totals.steps > 1 else ''}"
    tokens = f", {totals.tokens:,} tokens" if totals.tokens else ""
    speed = completed.training_speed(seconds)
    rate = f"; {speed}" if speed else ""
    loss = f"; last loss {completed.metrics[LOSS]:.4f}" if LOSS in completed.metrics else ""
    lines = [
        f"jzero: {count} in {duration(sum(seconds.values()))}" + (f" = {listed}" if listed else ""),
        f"{totals.samples:,} samples{tokens}{rate}{loss}; {totals.skipped} skipped",
        *verdict,
        "; ".join(f"{what} in {where}" for what, where in files.items()),
    ]
    return escaped("\n  ".join(filter(None, lines)))
