"""The config: one JSON file, as DeepSpeed writes it, read strictly.

Every key is a field below, a key that something else replaces, or a key that jzero refuses by name
(`jzero.config_keys`). All problems of a config are reported together.

>>> config = Config.load({"train_batch_size": 32, "bf16": {"enabled": True}, "zero_optimization": {"stage": 3}})
>>> config
Config(train_batch_size=32, bf16=BF16Config(enabled=True), zero_optimization=ZeroConfig(stage=3))
>>> config.precision, config.batch(replicas=8).micro, config.mesh_degrees(8)
('bf16', 4, {'pipe': 1, 'data': 1, 'zero': 8, 'tensor': 1})
>>> Config.load({"zero_optimization": {"stge": 3}})
Traceback (most recent call last):
jzero.errors.ConfigError: zero_optimization.stge = 3: unknown key; did you mean "stage"?
"""

import base64
import binascii
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import hjson
from pydantic import BaseModel, ConfigDict, PlainValidator, PrivateAttr, ValidationError

from jzero import config_keys as keys
from jzero.config_keys import DTYPE_NAMES, DTYPE_SPELLINGS, Replaced, number, one_of, show
from jzero.errors import ConfigError

Dtype = Literal["fp32", "fp16", "bf16"]

Flag = Annotated[bool, PlainValidator(keys.FLAG)]
Text = Annotated[str, PlainValidator(keys.TEXT)]
Count = Annotated[int, PlainValidator(keys.COUNT)]
Positive = Annotated[int, PlainValidator(keys.POSITIVE)]
PositiveOrNone = Annotated[int | None, PlainValidator(number(1, whole=True, none=True))]
PositiveOrRest = Annotated[int, PlainValidator(number(1, whole=True, or_=-1))]
NonNegative = Annotated[float, PlainValidator(number(0))]
Params = Annotated[dict[str, Any], PlainValidator(keys.PARAMS)]


# ---- sections -----------------------------------------------------------------------------------------------------


class Section(BaseModel):
    """A part of the config: frozen, strict, and printed as what differs from the defaults."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    def __repr_args__(self) -> Iterator[tuple[str, Any]]:
        for name, field in type(self).model_fields.items():
            if (value := getattr(self, name)) != field.get_default(call_default_factory=True):
                yield name, value

    def __str__(self) -> str:
        return repr(self)


class DataTypes(Section):
    """The dtype in which gradients accumulate over micro-batches (DeepSpeed: the model's; here fp32)."""

    grad_accum_dtype: Annotated[Dtype, PlainValidator(one_of(DTYPE_NAMES, DTYPE_SPELLINGS, none="fp32"))] = "fp32"


class OptimizerConfig(Section):
    """An optimizer by name, with its parameters."""

    type: Text
    params: Params = {}


class SchedulerConfig(Section):
    """A learning-rate schedule by name, with its parameters."""

    type: Text
    params: Params = {}


class FP16Config(Section):
    """float16 compute with loss scaling; `loss_scale` 0 is dynamic, anything else static."""

    enabled: Flag = False
    loss_scale: NonNegative = 0.0
    initial_scale_power: Count = 16
    loss_scale_window: Positive = 1000
    hysteresis: Positive = 2
    consecutive_hysteresis: Flag = False
    min_loss_scale: NonNegative = 1.0
    fp16_master_weights_and_grads: Flag = False


class BF16Config(Section):
    """bfloat16 compute."""

    enabled: Flag = False
    check_grad_overflow: Flag = True
    bf16_master_weights_and_grads: Flag = False
    bf16_optimizer_states: Flag = False


class ZeroConfig(Section):
    """What the `zero` axis of the mesh partitions: stage 1 optimizer state, 2 also gradients, 3 also parameters."""

    stage: Annotated[int, PlainValidator(keys.STAGE)] = 0
    stage3_param_persistence_threshold: Count = 100_000
    mics_shard_size: PositiveOrRest = -1
    zero_hpz_partition_size: Positive = 1


class ActivationCheckpointing(Section):
    """What the backward pass recomputes: all of a layer, or what lies between its matrix products."""

    policy: Annotated[Literal["none", "full", "matmuls"], PlainValidator(one_of(("none", "full", "matmuls")))] = "full"
    cpu_checkpointing: Flag = False


class MeshConfig(Section):
    """Devices along each axis; -1 means the rest."""

    pipe: PositiveOrRest = 1
    data: PositiveOrRest = 1
    zero: PositiveOrRest = -1
    tensor: PositiveOrRest = 1


class StackConfig(Section):
    """How the layer stack runs: unrolled, as a scan, or "auto"."""

    unroll: Annotated[bool | Literal["auto"], PlainValidator(keys.UNROLL)] = "auto"


class ThroughputConfig(Section):
    """The samples-per-second line."""

    enabled: Flag = True


class TimersConfig(Section):
    """Timers."""

    throughput: ThroughputConfig = ThroughputConfig()


class BatchSizes(NamedTuple):
    """train = micro × accum × replicas; `inferred` says which of them the config left out."""

    train: int
    micro: int
    accum: int
    inferred: str


class Config(Section):
    """A whole config. `Config.load` reads it; the keywords of the constructor are its sections."""

    train_batch_size: PositiveOrNone = None
    train_micro_batch_size_per_gpu: PositiveOrNone = None
    gradient_accumulation_steps: PositiveOrNone = None
    managed_gradient_accumulation: Flag = True
    steps_per_print: PositiveOrNone = None
    gradient_clipping: NonNegative = 1.0
    gradient_allreduce_op: Annotated[Literal["mean", "sum"], PlainValidator(one_of(("mean", "sum")))] = "mean"
    communication_data_type: Annotated[
        Dtype | None, PlainValidator(one_of(DTYPE_NAMES, DTYPE_SPELLINGS, none=None))
    ] = None
    data_types: DataTypes = DataTypes()
    optimizer: OptimizerConfig | None = None
    scheduler: SchedulerConfig | None = None
    fp16: FP16Config = FP16Config()
    bf16: BF16Config = BF16Config()
    zero_optimization: ZeroConfig = ZeroConfig()
    activation_checkpointing: ActivationCheckpointing | None = None
    mesh: MeshConfig = MeshConfig()
    data_parallel_size: PositiveOrNone = None
    frozen_parameters: Annotated[tuple[str, ...], PlainValidator(keys.PATTERNS)] = ()
    stack: StackConfig = StackConfig()
    compiler_options: Annotated[dict[str, bool | int | float | str], PlainValidator(keys.OPTIONS)] = {}
    seed: Count = 0
    dataloader_drop_last: Flag = False
    timers: TimersConfig = TimersConfig()

    _replaced: tuple[Replaced, ...] = PrivateAttr(())

    def __init__(self, /, **given: Any):
        data = _plain(given)
        replaced, problems = _screen(data)
        bad: set[str] = set()
        while True:  # what is wrong is reported and left out, so that the rest is still checked against itself
            try:
                super().__init__(**data)
                break
            except ValidationError as error:
                for detail in error.errors():
                    path = ".".join(map(str, detail["loc"]))
                    value = _pop(data, *detail["loc"])
                    bad.add(path)
                    problems.append(_explain(path, value, detail))
                    if value is _MISSING:  # a required key is missing: its section goes
                        _pop(data, *detail["loc"][:-1])
        for involved, check in CHECKS:
            if not bad & set(involved):
                problems.extend(check(self))
        if problems:
            raise ConfigError(*dict.fromkeys(problems))
        self._replaced = replaced

    @classmethod
    def load(cls, source: "str | os.PathLike[str] | Mapping[str, Any] | Config") -> "Config":
        """Read a config from a JSON or hjson file, a dict, a urlsafe-base64 string of JSON, or another Config.

        Raises:
          ConfigError: with every problem of the config in `.problems`.
        """
        return source if isinstance(source, Config) else cls(**_read(source))

    @property
    def replaced(self) -> tuple[Replaced, ...]:
        """The keys the user gave that have no meaning under JAX, each with what replaces it."""
        return self._replaced

    @property
    def precision(self) -> Literal["fp32", "fp16", "bf16"]:
        """The compute dtype."""
        return "bf16" if self.bf16.enabled else "fp16" if self.fp16.enabled else "fp32"

    def batch(self, replicas: int) -> BatchSizes:
        """The three batch sizes on `replicas` data-parallel replicas (|data| × |zero|), inferring what is not given.

        >>> Config.load({"train_batch_size": 32, "gradient_accumulation_steps": 2}).batch(4)
        BatchSizes(train=32, micro=4, accum=2, inferred='train_micro_batch_size_per_gpu = 4')
        """
        return _batch(self, replicas)

    def mesh_degrees(self, num_devices: int) -> dict[str, int]:
        """Devices along each mesh axis, outermost first, on `num_devices` devices.

        >>> Config.load({"zero_optimization": {"stage": 3, "mics_shard_size": 4}}).mesh_degrees(16)
        {'pipe': 1, 'data': 4, 'zero': 4, 'tensor': 1}
        """
        return _mesh_degrees(self, num_devices)


# ---- reading a source ---------------------------------------------------------------------------------------------


class _Pairs(list[tuple[str, Any]]):
    """A JSON object before its keys are known to be distinct."""


def _read(source: object) -> dict[str, Any]:
    if isinstance(source, Mapping):
        return {str(key): value for key, value in source.items()}
    accepted = "a path to a JSON or hjson file, a dict, a urlsafe-base64 string of JSON, or a Config"
    if not isinstance(source, str | os.PathLike):
        raise ConfigError(f"config = {show(source)}: must be {accepted}; got {type(source).__name__}")
    path = Path(source)
    if os.path.isfile(path):
        try:
            return _parse(path.read_text(encoding="utf-8"), str(path))
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"config = {show(str(path), 400)}: cannot be read as text ({error})") from None
    if isinstance(source, str) and (text := _base64(source)):
        return _parse(text, "the base64 config")
    what = "is a directory" if os.path.isdir(path) else "no such file"
    hint = "; for JSON text, pass json.loads(text)" if str(source).lstrip().startswith("{") else ""
    raise ConfigError(f"config = {show(str(source), 400)}: {what}; a config is {accepted}{hint}")


def _base64(source: str) -> str | None:
    """The JSON object that the string encodes, as text; None if it is something else."""
    try:
        text = base64.b64decode(source + "=" * (-len(source) % 4), altchars=b"-_", validate=True).decode()
    except (binascii.Error, ValueError):
        return None
    return text if text.lstrip().startswith("{") else None


def _parse(text: str, name: str) -> dict[str, Any]:
    try:
        tree = json.loads(text, object_pairs_hook=_Pairs)
    except ValueError:
        try:
            tree = hjson.loads(text, object_pairs_hook=_Pairs)
        except ValueError as error:
            raise ConfigError(f"{name} is neither JSON nor hjson: {error}") from None
    if not isinstance(tree, _Pairs):
        raise ConfigError(f"{name} = {show(tree)}: must be a JSON object {{...}} of config keys")
    twice: list[str] = []
    data = _distinct(tree, "", twice)
    if twice:
        raise ConfigError(*[f"{key}: given twice in {name}; keep one of the two" for key in twice])
    return data


def _distinct(node: Any, path: str, twice: list[str]) -> Any:
    """Pairs to dicts; dotted keys that occur twice go to `twice`."""
    if isinstance(node, _Pairs):
        data: dict[str, Any] = {}
        for key, value in node:
            if key in data:
                twice.append(f"{path}{key}")
            data[key] = _distinct(value, f"{path}{key}.", twice)
        return data
    return [_distinct(item, path, twice) for item in node] if isinstance(node, list) else node


# ---- screening ----------------------------------------------------------------------------------------------------

_MISSING: Any = object()


def _plain(node: Any, path: str = "") -> Any:
    """A copy of the config as dicts, without the keys whose value is "auto" (XLA options keep theirs)."""
    if isinstance(node, Section):
        node = {key: getattr(node, key) for key in node.model_fields_set}
    if not isinstance(node, Mapping) or path == "compiler_options.":
        return node
    return {str(k): _plain(v, f"{path}{k}.") for k, v in node.items() if not (isinstance(v, str) and v == "auto")}


def _pop(data: Any, *sections_and_key: Any) -> Any:
    """Remove a key and return its value."""
    *sections, key = sections_and_key
    for section in sections:
        data = data.get(section) if isinstance(data, dict) else None
    return data.pop(key, _MISSING) if isinstance(data, dict) else _MISSING


def _get(data: Any, path: str) -> Any:
    for key in path.split("."):
        data = data.get(key, _MISSING) if isinstance(data, dict) else _MISSING
    return data


def _fields(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every dotted key of the model, with its field."""
    for name, field in model.model_fields.items():
        yield prefix + name, field
        for part in (field.annotation, *getattr(field.annotation, "__args__", ())):
            if isinstance(part, type) and issubclass(part, Section):
                yield from _fields(part, f"{prefix}{name}.")


FIELDS = dict(_fields(Config))
KNOWN = (*FIELDS, *keys.REPLACED, *keys.REFUSED)
_TABLE_SECTIONS = sorted(
    {".".join(parts[:depth]) for parts in (key.split(".") for key in KNOWN) for depth in range(1, len(parts))}
    - set(FIELDS),
    key=lambda path: -path.count("."),
)  # deepest first


def _unknown(section: str, key: str, value: Any) -> str:
    path = f"{section}.{key}" if section else key
    return f"{path} = {show(value)}: unknown key; {keys.suggest(section, key, FIELDS, KNOWN)}"


def _screen(data: dict[str, Any]) -> tuple[tuple[Replaced, ...], list[str]]:
    """Take the replaced, refused and old keys out of `data`; what is left is for the models."""
    replaced, problems = [], []
    for old, new in keys.DEPRECATED.items():
        if _get(data, old) not in (None, _MISSING) and _get(data, new) not in (None, _MISSING):
            problems.append(f"{old} = {show(_get(data, old))}: the deprecated name of {new}, also given; keep {new}")
    if (old_bf16 := _pop(data, "bfloat16")) is not _MISSING:
        data.setdefault("bf16", old_bf16)
    if isinstance(stage := data.get("zero_optimization"), bool):
        data["zero_optimization"] = {"stage": int(stage)}
    for path, row in keys.REPLACED.items():
        if (value := _pop(data, *path.split("."))) is _MISSING or value is None:
            continue
        try:
            row.kind(value)
            replaced.append(Replaced(path, value, row.by))
        except ValueError as wrong:
            problems.append(f"{path} = {show(value)}: {wrong}; or leave it out: replaced by {row.by}")
    for path, refused in keys.REFUSED.items():
        if (value := _pop(data, *path.split("."))) is not _MISSING and value not in refused.off:
            problems.append(refused.message(path, value))
    for path in _TABLE_SECTIONS:
        section = _pop(data, *path.split("."))
        if isinstance(section, dict):
            problems.extend(_unknown(path, key, value) for key, value in section.items())
        elif section not in (_MISSING, None, False):
            problems.append(f"{path} = {show(section)}: {_section_of(path)}")
    return tuple(replaced), problems


def _section_of(path: str) -> str:
    names = sorted({k.removeprefix(f"{path}.").split(".")[0] for k in KNOWN if k.startswith(f"{path}.")})
    hint = '; did you mean {"enabled": true}?' if "enabled" in names else ""
    return f"must be a section {{...}} with the keys {', '.join(names)}{hint}"


def _explain(path: str, value: Any, detail: Any) -> str:
    """One pydantic error as a sentence with the key, its value, what is allowed and the fix."""
    if detail["type"] == "extra_forbidden":
        *sections, key = detail["loc"]
        return _unknown(".".join(sections), key, value)
    if detail["type"] == "missing":
        return f'{path}: required; write for example "{path.split(".")[-1]}": "{_EXAMPLES.get(path, "...")}"'
    if detail["type"] == "value_error":
        default = FIELDS[path].default
        fix = "; or leave it out" + (f" for the default {show(default)}" if default is not None else "")
        fix = "" if FIELDS[path].is_required() else fix
        return f"{path} = {show(value)}: {detail['ctx']['error']}{fix}"
    return f"{path} = {show(value)}: {_section_of(path)}"


_EXAMPLES = {"optimizer.type": "AdamW", "scheduler.type": "WarmupLR"}


# ---- settings that contradict each other --------------------------------------------------------------------------


def _two_precisions(c: Config) -> Iterator[str]:
    if c.fp16.enabled and c.bf16.enabled:
        yield 'fp16.enabled = true and bf16.enabled = true: only one may be on; remove the "fp16" section to use bf16'


def _bf16_states(c: Config) -> Iterator[str]:
    if c.bf16.bf16_optimizer_states and not c.bf16.bf16_master_weights_and_grads:
        yield "bf16.bf16_optimizer_states = true: needs bf16.bf16_master_weights_and_grads = true; set both or neither"


def _two_shard_sizes(c: Config) -> Iterator[str]:
    zero = c.zero_optimization
    if zero.mics_shard_size > 0 and zero.zero_hpz_partition_size > 1:
        yield (
            f"zero_optimization.mics_shard_size = {zero.mics_shard_size} and zero_optimization.zero_hpz_partition_size"
            f" = {zero.zero_hpz_partition_size}: both set the size of a ZeRO group; keep one"
        )


def _shard_against_mesh(c: Config) -> Iterator[str]:
    key, shard = _shard(c)
    if shard and "zero" in c.mesh.model_fields_set and c.mesh.zero not in (-1, shard):
        yield f"{key} = {shard} and mesh.zero = {c.mesh.zero}: both set the size of a ZeRO group; keep one"


def _one_rest(c: Config) -> Iterator[str]:
    rest = [f"mesh.{axis} = -1" for axis, degree in _asked_degrees(c).items() if degree == -1]
    if len(rest) > 1:
        default = "" if "zero" in c.mesh.model_fields_set else "; -1 is the default of mesh.zero: set it to 1 for none"
        yield " and ".join(rest) + f": -1 (the rest) is allowed on one axis only{default}"


def _axes_to_come(c: Config) -> Iterator[str]:
    for axis, what in _AXES_TO_COME.items():
        if (degree := getattr(c.mesh, axis)) > 1:
            yield f"mesh.{axis} = {degree}: not yet: {what}; only 1 is accepted"


def _no_policy(c: Config) -> Iterator[str]:
    remat = c.activation_checkpointing
    if remat and remat.policy == "none" and remat.cpu_checkpointing:
        yield (
            'activation_checkpointing.cpu_checkpointing = true: does nothing with policy = "none"; remove it or use '
            'policy "full"'
        )


_AXES_TO_COME = {"pipe": "pipeline stages", "tensor": "tensor parallelism"}
_MICS, _HPZ = "zero_optimization.mics_shard_size", "zero_optimization.zero_hpz_partition_size"
_MESH = ("mesh", *(f"mesh.{axis}" for axis in MeshConfig.model_fields))
# The keys a check reads (it is left out when one of them is wrong in itself), and the check.
CHECKS: tuple[tuple[tuple[str, ...], Callable[[Config], Iterator[str]]], ...] = (
    (("fp16", "bf16", "fp16.enabled", "bf16.enabled"), _two_precisions),
    (("bf16", "bf16.bf16_optimizer_states", "bf16.bf16_master_weights_and_grads"), _bf16_states),
    ((_MICS, _HPZ), _two_shard_sizes),
    ((_MICS, _HPZ, "mesh.zero"), _shard_against_mesh),
    ((_MICS, _HPZ, *_MESH), _one_rest),
    (_MESH, _axes_to_come),
    (("activation_checkpointing.policy",), _no_policy),
)


# ---- batch sizes and mesh degrees ---------------------------------------------------------------------------------

_BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def _divisors(n: int) -> list[int]:
    return sorted({d for i in range(1, math.isqrt(n) + 1) if n % i == 0 for d in (i, n // i)})


def _around(target: float, choices: list[int]) -> str:
    """The choices next to the target, as text."""
    below, above = [c for c in choices if c <= target], [c for c in choices if c > target]
    return " or ".join(map(str, below[-1:] + above[:1]))


def _batch(c: Config, replicas: int) -> BatchSizes:
    if replicas < 1:
        raise ConfigError(f"replicas = {replicas}: must be a positive integer (the mesh's data × zero)")
    train, micro, accum = given = tuple(getattr(c, key) for key in _BATCH)
    if train is None and micro is None:
        accum_part = f"gradient_accumulation_steps = {accum} alone does not say it; " if accum else ""
        raise ConfigError(
            f"no batch size: {accum_part}give {_BATCH[0]} or {_BATCH[1]} (a positive integer);"
            f" {_BATCH[0]} = {_BATCH[1]} × {_BATCH[2]} × {replicas} replicas"
        )
    if accum is None:
        accum = train // micro // replicas if train and micro else 1
    if micro is None:
        micro = train // replicas // accum
    if train is None:
        train = micro * accum * replicas
    sizes = (train, micro, accum)
    inferred = ", ".join(f"{k} = {v}" for k, g, v in zip(_BATCH, given, sizes, strict=True) if g is None)
    if train == micro * accum * replicas and micro > 0 and accum > 0:
        return BatchSizes(train, micro, accum, inferred)
    terms = [f"{k} {v}" + (" (inferred)" if g is None else "") for k, g, v in zip(_BATCH, given, sizes, strict=True)]
    unit = math.prod(g for g in given[1:] if g) * replicas
    totals = [unit] if all(given) else [k * unit for k in (train // unit, train // unit + 1) if k]
    fixes = [f"{_BATCH[0]} = {_around(train, totals)}"]
    for key, own, other in ((_BATCH[1], given[1], given[2]), (_BATCH[2], given[2], given[1])):
        if own and train % (replicas * (other or 1)) == 0:
            fits = train // (replicas * (other or 1))
            fixes.append(f"{key} = {_around(own, [fits] if all(given) else _divisors(fits))}")
    raise ConfigError(
        f"{_BATCH[0]} = {train}: must equal {terms[1]} × {terms[2]} × {replicas} replicas = {micro * accum * replicas};"
        f" inferred: {inferred or 'nothing'}; nearest valid: {', or '.join(fixes)}"
    )


def _shard(c: Config) -> tuple[str, int]:
    """The key that sets the size of a ZeRO group, and the size; 0 if none does."""
    zero = c.zero_optimization
    if zero.mics_shard_size > 0:
        return _MICS, zero.mics_shard_size
    return (_HPZ, zero.zero_hpz_partition_size) if zero.zero_hpz_partition_size > 1 else ("mesh.zero", 0)


def _asked_degrees(c: Config) -> dict[str, int]:
    """The mesh as asked for, with at most one -1 once `_one_rest` has passed."""
    degrees = c.mesh.model_dump()
    if shard := _shard(c)[1]:
        degrees["zero"] = shard
        if "data" not in c.mesh.model_fields_set and -1 not in degrees.values():
            degrees["data"] = -1
    return degrees


def _mesh_degrees(c: Config, num_devices: int) -> dict[str, int]:
    if num_devices < 1:
        raise ConfigError(f"num_devices = {num_devices}: must be a positive integer")
    degrees = _asked_degrees(c)
    fixed = math.prod(n for n in degrees.values() if n != -1)
    rest = [axis for axis, n in degrees.items() if n == -1]
    if num_devices % fixed if rest else num_devices != fixed:
        keys_of = {axis: _shard(c)[0] if axis == "zero" else f"mesh.{axis}" for axis in degrees}
        product = " × ".join(f"{keys_of[axis]} {n}" for axis, n in degrees.items() if n > 1) or "mesh 1"
        fits = []
        for axis, n in degrees.items():
            others = fixed // n if n != -1 else 0
            if others and num_devices % others == 0 and (n > 1 or not rest) and axis not in _AXES_TO_COME:
                choices = _divisors(num_devices // others) if rest else [num_devices // others]
                fits.append(f"{keys_of[axis]} = {' or '.join(map(str, choices))}")
        where = f"{'does not divide' if rest else 'does not use'} the {num_devices} devices"
        advice = "what fits: " + "; ".join(fits) if fits else f"use axes whose product divides {num_devices}"
        raise ConfigError(f"{product} = {fixed} devices: {where}; {advice}")
    degrees |= {axis: num_devices // fixed for axis in rest}
    problems = [
        f"mesh.{axis} = -1 is {degrees[axis]} on {num_devices} devices: not yet: {what}; only 1 is accepted"
        for axis, what in _AXES_TO_COME.items()
        if degrees[axis] > 1
    ]
    replicas = degrees["data"] * degrees["zero"]
    if c.data_parallel_size not in (None, replicas):
        problems.append(
            f"data_parallel_size = {c.data_parallel_size}: must be data {degrees['data']} × zero {degrees['zero']}"
            f" = {replicas} on this mesh; leave it out, or change the mesh section"
        )
    if problems:
        raise ConfigError(*problems)
    return degrees
