"""What a field of sampling parameters declares, as metadata: its value on the device, its name in a
checkpoint, the logits processor that applies it.
"""

from __future__ import annotations

import dataclasses
from typing import Literal, TypeVar

from pydantic import BaseModel

T = TypeVar("T")

Stage = Literal["penalty", "temperature", "filter", "processor"]
"""What of sampling reads a value, in this order; "processor" is a logits processor's own option."""


@dataclasses.dataclass(frozen=True, slots=True)
class RowValue:
    """Metadata of a pydantic field: each row of the device has its value, in an array [rows].

    `typical_p: Annotated[float, RowValue("float32")]` in the options of a logits processor, or in
    SamplingParams with the stage that reads it. Checks of the value are those of the field.
    """

    dtype: Literal["float32", "int32", "bool"]
    neutral: float = 0
    """The value that changes nothing: what rows without a request have."""
    stage: Stage = "processor"
    lowest: float | None = None
    """Smaller values count as this one on the device; None: there is no limit."""
    highest: float | None = None
    """Larger values count as this one on the device; None: there is no limit."""

    def clip(self, value: float) -> float:
        """`value` within the limits."""
        low = value if self.lowest is None else max(value, self.lowest)
        return low if self.highest is None else min(low, self.highest)


@dataclasses.dataclass(frozen=True, slots=True)
class FromCheckpoint:
    """Metadata of a field that a checkpoint's generation_config.json may set."""

    name: str
    """The field's name in that file."""


@dataclasses.dataclass(frozen=True, slots=True)
class AppliedBy:
    """Metadata of a field whose value is an option of a logits processor."""

    processor: str
    option: str
    uses: bool = True
    """Whether a value that is not the default has the request use the processor."""


def declared(model: type[BaseModel], kind: type[T]) -> dict[str, T]:
    """The metadata of class `kind` by field of a model, in the fields' order."""
    found = ((name, one) for name, field in model.model_fields.items() for one in field.metadata)
    return {name: one for name, one in found if isinstance(one, kind)}
