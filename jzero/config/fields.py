"""The base of all sections, a frozen model, and the types of fields, DeepSpeed's `layer_specs` among them."""

from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict
from pydantic.fields import FieldInfo

from jzero.values import kinds
from jzero.values.kinds import FLAG, PATTERNS, Kind, as_json, closest, number, one_of

_DIMENSION = number(0, most=31, whole=True)
_PARTITION = one_of(("column", "row", "skip"))
_NO_TYPES = "is not read: jzero knows no types of models; leave it out, and the specs of other models too"


def _spec(value: object) -> dict[str, Any]:
    """Check one spec, and fill in its defaults."""
    if not isinstance(value, Mapping):
        raise ValueError(f"{as_json(value)} is not an object")
    if unknown := sorted(set(map(str, value)) - _KEYS.keys()):
        close = closest(unknown[0], _KEYS)
        raise ValueError(f"{unknown[0]} is unknown; " + (f'did you mean "{close}"?' if close else _ALLOWED))
    spec = {"partition_type": "column", "shape": None, "partition_dim": None, **value}
    if not spec.get("patterns"):
        raise ValueError(f'it needs "patterns", regular expressions of names; {as_json(value)} has none')
    for key, parse in _KEYS.items():
        try:
            spec[key] = parse(spec.get(key))
        except ValueError as wrong:
            raise ValueError(f"{key} = {as_json(spec.get(key))} {wrong}") from None
    return {key: spec[key] for key in ("patterns", "partition_type", "shape", "partition_dim")}


def _shape(value: object) -> tuple[int | tuple[int, ...], ...] | None:
    """[3, -1], [[q, k, v], -1] or [experts, -1, width]: the weight seen with more dimensions, or as several in one."""
    if value is None:
        return None
    if not isinstance(value, list | tuple) or len(value) not in (2, 3):
        raise ValueError("must be a list of two or three sizes, such as [2, -1]")
    for size in value:
        for part in size if isinstance(size, list | tuple) else [size]:
            if isinstance(part, bool) or not isinstance(part, int) or part == 0 or part < -1:
                raise ValueError("must have positive integers, and -1 for a size that follows from the others")
    return tuple(tuple(size) if isinstance(size, list) else size for size in value)


def _model_types(value: object) -> None:
    if value:
        raise ValueError(_NO_TYPES)


_KEYS: dict[str, Callable[[Any], Any]] = {
    "patterns": PATTERNS,
    "partition_type": _PARTITION,
    "shape": _shape,
    "partition_dim": lambda value: None if value is None else _DIMENSION(value),
    "model_types": _model_types,
    "gather_output": lambda value: None if value is None else FLAG(value),  # jzero's rules gather what is needed whole
}
_ALLOWED = f"the keys are {', '.join(_KEYS)}"


def _layer_specs(value: object) -> tuple[dict[str, Any], ...]:
    if not isinstance(value, list | tuple):
        raise ValueError(f"write [{as_json(value)}]" if isinstance(value, Mapping) else "")
    specs = []
    for i, spec in enumerate(value):
        try:
            specs.append(_spec(spec))
        except ValueError as wrong:
            raise ValueError(f"number {i}: {wrong}") from None
    return tuple(specs)


LAYER_SPECS = Kind("a list of objects, each with patterns and a partition_type", _layer_specs)

Flag = Annotated[bool, kinds.FLAG]
Text = Annotated[str, kinds.TEXT]
TextOrNone = Annotated[str | None, kinds.TEXT_OR_NULL]
Count = Annotated[int, kinds.COUNT]
PositiveInt32 = Annotated[int, kinds.INT32]
PositiveOrNone = Annotated[int | None, kinds.POSITIVE_OR_NULL]
PositiveInt32OrNone = Annotated[int | None, kinds.INT32_OR_NULL]
PositiveOrRest = Annotated[int, kinds.INT32_OR_REST]
PositivesOrNone = Annotated[tuple[int, ...] | None, kinds.POSITIVES_OR_NULL]
NonNegative = Annotated[float, kinds.NON_NEGATIVE]
Params = Annotated[dict[str, Any], kinds.PARAMS]
Options = Annotated[dict[str, bool | int | float | str], kinds.OPTIONS]
Dimensions = Annotated[dict[str, int], kinds.DIMENSIONS]
LayerSpecs = Annotated[tuple[dict[str, Any], ...], LAYER_SPECS]
Patterns = Annotated[tuple[str, ...], kinds.PATTERNS]
PatternsOrNone = Annotated[tuple[str, ...] | None, kinds.PATTERNS_OR_NULL]


OR_NULL = BeforeValidator(lambda section: {} if section is None else section)


class Section(BaseModel):
    """A part of the config: frozen, strict, and printed without its defaults."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    def __repr_args__(self) -> Iterator[tuple[str, Any]]:
        for name, field in type(self).model_fields.items():
            if (value := getattr(self, name)) != field.get_default(call_default_factory=True):
                yield name, value

    def __str__(self) -> str:
        return repr(self)


def kind_of(field: FieldInfo) -> Kind | None:
    """Return the kind of a field's values; None for a section."""
    return next((item for item in field.metadata if isinstance(item, Kind)), None)
