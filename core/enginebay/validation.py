"""Base class of pydantic models whose errors are ours."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Self, TypeVar

from pydantic import BaseModel, Field, ValidationError

from enginebay.errors import EnginebayError
from enginebay.startup import startup

Given = TypeVar("Given")
Kept = TypeVar("Kept")

if TYPE_CHECKING:

    class Accepts(Generic[Given, Kept]):
        """The type of a field that a caller may set to a `Given`, and that stores a `Kept`."""

        def __get__(self, instance: object, owner: object) -> Kept: ...
        def __set__(self, instance: object, value: Given) -> None: ...

else:

    class Accepts:
        """The same at run time: the type that the field stores."""

        def __class_getitem__(cls, types):
            return types[1]


def option(default: Any, **checks: Any) -> Any:
    """pydantic's Field for fields whose default has another type than the annotation."""
    return Field(default=default, **checks)


class Validated(BaseModel):
    """A pydantic model that raises `refusal` in place of pydantic's ValidationError."""

    refusal: ClassVar[type[EnginebayError]]

    @classmethod
    def refused(cls, error: ValidationError) -> EnginebayError:
        """Return the error to raise in place of pydantic's."""
        return own_error(error, cls.refusal) or cls.refusal(describe_validation(error, cls))

    @classmethod
    @contextlib.contextmanager
    def _refusing(cls) -> Iterator[None]:
        try:
            yield
        except ValidationError as error:
            raise cls.refused(error) from None

    if not TYPE_CHECKING:  # a type checker derives the keywords from the fields

        def __init__(self, **fields):
            with self._refusing():
                super().__init__(**fields)

    @classmethod
    def model_validate(cls, obj: Any, **options: Any) -> Self:
        """Pydantic's, with an error of `refusal`."""
        with cls._refusing():
            return super().model_validate(obj, **options)

    @classmethod
    def model_validate_json(cls, json_data: str | bytes | bytearray, **options: Any) -> Self:
        """Pydantic's, with an error of `refusal`."""
        with cls._refusing():
            return super().model_validate_json(json_data, **options)

    def __repr_args__(self) -> list[tuple[str | None, Any]]:
        """Return the fields whose values are not the defaults, for a short repr."""
        values = (
            (name, getattr(self, name), field) for name, field in type(self).model_fields.items()
        )
        return [
            (name, value)
            for name, value, field in values
            if value != field.get_default(call_default_factory=True)
        ]


def describe_validation(error: ValidationError, model: type[BaseModel]) -> str:
    """Return pydantic's findings as our messages, one for each wrong field."""
    return startup().described(error, model)


def own_error(error: ValidationError, kind: type[EnginebayError]) -> EnginebayError | None:
    """Return the error of class `kind` that one of our validators raised, or None. Its message has
    the three parts already.
    """
    causes = (finding.get("ctx", {}).get("error") for finding in error.errors())
    return next((cause for cause in causes if isinstance(cause, kind)), None)
