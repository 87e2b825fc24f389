"""What sections are made of: a frozen model, and the types of its fields."""

from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, PlainValidator

from jzero.values import kinds
from jzero.values.layer_specs import LAYER_SPECS

Flag = Annotated[bool, PlainValidator(kinds.FLAG)]
Text = Annotated[str, PlainValidator(kinds.TEXT)]
TextOrNone = Annotated[str | None, PlainValidator(kinds.TEXT_OR_NULL)]
Count = Annotated[int, PlainValidator(kinds.COUNT)]
PositiveInt32 = Annotated[int, PlainValidator(kinds.INT32)]
PositiveOrNone = Annotated[int | None, PlainValidator(kinds.POSITIVE_OR_NULL)]
PositiveInt32OrNone = Annotated[int | None, PlainValidator(kinds.INT32_OR_NULL)]
PositiveOrRest = Annotated[int, PlainValidator(kinds.INT32_OR_REST)]
PositivesOrNone = Annotated[tuple[int, ...] | None, PlainValidator(kinds.POSITIVES_OR_NULL)]
NonNegative = Annotated[float, PlainValidator(kinds.NON_NEGATIVE)]
Params = Annotated[dict[str, Any], PlainValidator(kinds.PARAMS)]
Options = Annotated[dict[str, bool | int | float | str], PlainValidator(kinds.OPTIONS)]
Dimensions = Annotated[dict[str, int], PlainValidator(kinds.DIMENSIONS)]
LayerSpecs = Annotated[tuple[dict[str, Any], ...], PlainValidator(LAYER_SPECS)]
Patterns = Annotated[tuple[str, ...], PlainValidator(kinds.PATTERNS)]
PatternsOrNone = Annotated[tuple[str, ...] | None, PlainValidator(kinds.PATTERNS_OR_NULL)]


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
