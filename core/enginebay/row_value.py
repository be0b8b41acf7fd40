"""Metadata for fields of sampling parameters: the value on the device, the name in a checkpoint,
and the logits processor that applies the field.
"""

from __future__ import annotations

import dataclasses
from typing import Literal, TypeVar

from pydantic import BaseModel

T = TypeVar("T")

Stage = Literal["penalty", "temperature", "filter", "processor"]
"""The stage of sampling that reads a value, in order; "processor": an option of a logits
processor.
"""


@dataclasses.dataclass(frozen=True, slots=True)
class RowValue:
    """Metadata of a pydantic field whose value the device holds for each row, in an array [rows].

    Example: `typical_p: Annotated[float, RowValue("float32")]` in the options of a logits
    processor. Fields of SamplingParams also name the stage that reads the value.
    """

    dtype: Literal["float32", "int32", "bool"]
    neutral: float = 0
    """The value that changes nothing; rows without a request have it."""
    stage: Stage = "processor"
    lowest: float | None = None
    """The device uses this value in place of smaller ones; None: no limit."""
    highest: float | None = None
    """The device uses this value in place of larger ones; None: no limit."""

    def clip(self, value: float) -> float:
        """Return `value`, or the limit that it exceeds."""
        low = value if self.lowest is None else max(value, self.lowest)
        return low if self.highest is None else min(low, self.highest)


@dataclasses.dataclass(frozen=True, slots=True)
class FromCheckpoint:
    """Metadata of a field that generation_config.json of a checkpoint may set."""

    name: str
    """The name of the field in generation_config.json."""


@dataclasses.dataclass(frozen=True, slots=True)
class ProcessorOption:
    """Metadata of a field whose value becomes an option of a logits processor."""

    processor: str
    option: str
    uses: bool = True
    """Whether a request uses the processor as soon as the field has another value than its
    default.
    """


def declared(model: type[BaseModel], kind: type[T]) -> dict[str, T]:
    """Return field -> metadata of class `kind`, for the fields of a model that have it."""
    found = ((name, one) for name, field in model.model_fields.items() for one in field.metadata)
    return {name: one for name, one in found if isinstance(one, kind)}
