"""The sections about watching a run: what it shows, measures and checks."""

from typing import Annotated, Literal

from jzero.config.fields import Flag, NonNegative, PositiveInt32, PositiveOrNone, Section, Text, TextOrNone
from jzero.values import kinds
from jzero.values.kinds import INT32, Kind, either, number, one_of

# DeepSpeed's name of an operation -> its kind in a compiled program.
_COLLECTIVES = {
    "all_reduce": "all-reduce",
    "all_gather": "all-gather",
    "all_gather_into_tensor": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "reduce_scatter_tensor": "reduce-scatter",
    "all_to_all": "all-to-all",
    "all_to_all_single": "all-to-all",
    "send": "collective-permute",
    "recv": "collective-permute",
    "broadcast": "collective-broadcast",
}


def _collectives(value: object) -> tuple[str, ...]:
    if not isinstance(value, list | tuple):
        raise ValueError("")
    for name in value:
        if name not in _COLLECTIVES:
            raise ValueError(f"{name!r} is unknown")
    return tuple(dict.fromkeys(_COLLECTIVES[name] for name in value))


def _steps(value: object) -> tuple[int, int] | None:
    if value is None:
        return None
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise ValueError("")
    first, last = (INT32.parse(number) for number in value)
    if last < first:
        raise ValueError("the last is before the first")
    return first, last


COLLECTIVES = Kind(f"a list of {either(_COLLECTIVES)}", _collectives)
STEPS = Kind("a list of the first and the last step, as [10, 12], or null", _steps)


class WatchdogConfig(Section):
    """Limit the time of a step, in seconds, after which the job counts as hung; ceiling 0: no limit.

    The limit is 20 times the slowest of the last 20 train steps, between `floor` and `ceiling`. The ceiling holds for a
    train step whose program runs for the first time (it compiles), and for evaluations, saves, exports and the wait for
    another process's data. `jzero --hang_timeout` replaces both.
    """

    floor: NonNegative = 600.0
    ceiling: NonNegative = 1800.0


class NonFiniteConfig(Section):
    """Choose what follows a step whose loss or gradient is not finite; such a step changes no parameter.

    "skip": the run prints a warning and continues; 20 such steps in a row end it. "stop": it ends at the first, returns
    to the state before that step, finds the parameters, the layer, the micro-batch and the rows where it begins, and
    saves what `jzero replay` needs in `output_path`. An overflow under fp16 counts only if no lower loss scale helps.
    """

    action: Annotated[Literal["skip", "stop"], one_of(("skip", "stop"))] = "skip"
    output_path: Text = "non_finite"


class DesyncConfig(Section):
    """A comparison of replicas every `every` steps; null: never.

    Devices that hold the same part of a parameter, of the optimizer's state, of the step or of the key must hold the
    same bits. A line names the leaves that differ, and the devices whose bits are not those of the majority.
    """

    every: PositiveOrNone = None


class StragglerConfig(Section):
    """A comparison of processes and GPUs every `every` steps; null: never.

    A line names each process for which the others wait, because it gives its devices their steps late, and each GPU
    that computes slowly.
    """

    every: PositiveOrNone = None


class SpikesConfig(Section):
    """Choose what follows a step whose loss or gradient norm is far above those of the last `window` steps.

    "report": a line names the step. "skip": the step also changes nothing. The limit is the median plus `threshold`
    standard deviations, estimated by the median absolute deviation; there is none in the first `window`/2 steps, or 20.
    """

    action: Annotated[Literal["ignore", "report", "skip"], one_of(("ignore", "report", "skip"))] = "ignore"
    window: Annotated[int, number(20, whole=True)] = 128
    threshold: Annotated[float, number(above=0)] = 6.0


class ThroughputConfig(Section):
    """The samples-per-second line."""

    enabled: Flag = True


class TimersConfig(Section):
    """Timers."""

    throughput: ThroughputConfig = ThroughputConfig()


class ProgressConfig(Section):
    """Choose what process 0 shows besides the progress lines: a live `panel`, and a `summary` at the end of the run.

    The panel "auto" appears on a terminal and in a notebook; true: wherever the output goes.
    """

    panel: Annotated[bool | Literal["auto"], kinds.FLAG_OR_AUTO] = "auto"
    summary: Flag = True


class FilesConfig(Section):
    """A monitor that writes files to `output_path`/`job_name`."""

    enabled: Flag = False
    output_path: Text = ""
    job_name: Text = "DeepSpeedJobName"


class WandbConfig(Section):
    """Weights & Biases."""

    enabled: Flag = False
    group: TextOrNone = None
    team: TextOrNone = None
    project: Text = "deepspeed"


class CometConfig(Section):
    """Comet: what its `start` takes, and the number of samples between two values of a curve."""

    enabled: Flag = False
    samples_log_interval: PositiveInt32 = 100
    project: TextOrNone = None
    workspace: TextOrNone = None
    api_key: TextOrNone = None
    experiment_name: TextOrNone = None
    experiment_key: TextOrNone = None
    online: Annotated[bool | None, kinds.FLAG_OR_NULL] = None
    mode: TextOrNone = None


class FlopsProfilerConfig(Section):
    """A table of the FLOPs of step `profile_step` by module, with the rate that the step reached.

    It has modules down to `module_depth` (-1: all), or, with `detailed` false, the `top_modules` with the most FLOPs at
    each depth. It is printed, or written to `output_file`, where it replaces only an earlier table.
    """

    enabled: Flag = False
    profile_step: PositiveInt32 = 1
    module_depth: Annotated[int, number(-1, whole=True)] = -1
    top_modules: PositiveInt32 = 1
    detailed: Flag = True
    output_file: TextOrNone = None


class CommsLoggerConfig(Section):
    """A table of the collectives of a step: kind, mesh axes, dtype, loops, number and bytes, exactly as compiled.

    It comes after the first step. On GPUs the second step is profiled, and the table has the bandwidth of each kind.
    `verbose` gives every operation a row of its own, and `debug` shows their names in JAX, with the module. With
    `prof_all` false the table has only the kinds of `prof_ops`, by DeepSpeed's names.
    """

    enabled: Flag = False
    verbose: Flag = False
    prof_all: Flag = True
    prof_ops: Annotated[tuple[str, ...], COLLECTIVES] = ()
    debug: Flag = False


class ProfilerConfig(Section):
    """A trace for XProf and Perfetto of the steps from the first to the last of `steps`, in files in `output_path`.

    `python` also traces Python's calls. Process 0 traces its devices; with `all_processes` each process does, in a
    directory of its own.
    """

    steps: Annotated[tuple[int, int] | None, STEPS] = None
    output_path: Text = "traces"
    python: Flag = False
    all_processes: Flag = False
