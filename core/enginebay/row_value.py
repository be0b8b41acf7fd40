"""Metadata for fields of sampling parameters: the value on the device, the names in checkpoints and
requests, the logits processor that applies the field, and the limits on long values.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, Literal, TypeVar

import numpy as np
from pydantic import BaseModel

from enginebay.errors import RequestError, shown

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
    """Metadata of a field that a checkpoint may set."""

    name: str
    """The name of the field in generation_config.json."""
    gguf: str | None = None
    """Its name in `general.sampling` of a GGUF file; None: such a file does not set it."""


@dataclasses.dataclass(frozen=True, slots=True)
class HttpName:
    """Metadata of a field whose name in requests to the server is not its own."""

    name: str | None
    """The name in chats and completions; None: they do not carry the field, or only a route that
    declares it does.
    """


@dataclasses.dataclass(frozen=True, slots=True)
class ProcessorOption:
    """Metadata of a field whose value becomes an option of a logits processor."""

    processor: str
    option: str
    uses: bool = True
    """Whether a request uses the processor as soon as the field has another value than its
    default.
    """


@dataclasses.dataclass(frozen=True, slots=True)
class MaxItems:
    """Metadata of a field that takes a list or a mapping: its max length, which is checked before
    any item is read.
    """

    items: int
    chars: int | None = None
    """Max number of characters of each text in a list; None: no limit."""

    def check(self, name: str, value: object) -> None:
        """Raise RequestError when a value of the field `name` has more items, or one of its texts
        more characters, than are allowed.
        """
        if not isinstance(value, Sequence | AbstractSet | Mapping | np.ndarray):
            return
        if isinstance(value, range):  # which may have more items than len() can say
            if value[self.items :]:
                raise RequestError(
                    f"{name} = {shown(value)}", f"at most {self.items} items", "Leave some out."
                )
            return
        texts: Any = [value] if isinstance(value, str) else value
        if len(texts) > self.items:
            raise RequestError(
                f"{name} = a list of {len(texts)} items", f"at most {self.items}", "Leave some out."
            )
        longest = 0
        if self.chars is not None:
            longest = max((len(one) for one in texts if isinstance(one, str)), default=0)
        if self.chars is not None and longest > self.chars:
            raise RequestError(
                f"{name} = a text of {longest} characters", f"at most {self.chars}", "Shorten it."
            )


def declared(model: type[BaseModel], kind: type[T]) -> dict[str, T]:
    """Return field -> metadata of class `kind`, for the fields of a model that have it."""
    found = ((name, one) for name, field in model.model_fields.items() for one in field.metadata)
    return {name: one for name, one in found if isinstance(one, kind)}
