"""The base of all sections, a frozen model, and the types of fields."""

from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict
from pydantic.fields import FieldInfo

from jzero.values import kinds
from jzero.values.kinds import Kind
from jzero.values.layer_spec_kinds import LAYER_SPECS

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
