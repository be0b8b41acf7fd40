"""vInferencePreCompileConfig: the shapes that an inference compiles before prompts arrive."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import numbers
from collections.abc import Mapping
from typing import Any, Self

from enginebay.errors import ConfigError, explain
from enginebay.json_text import parse_json

Props = Mapping[str, Mapping[str, Any]]


@dataclasses.dataclass(frozen=True)
class vInferencePreCompileConfig:  # noqa: N801  # the name its users know
    """Batch size and padded prompt length (in tokens) to compile for, or lists of them.

    Lists describe several configurations: the first one takes the first element of each list, the
    second one the second elements, and so on; a shorter list repeats its last element
    (`get_standalones`). prefill_length None is the longest prompt that the inference accepts. The
    vision fields and required_props are stored, but no model uses them yet. Tuples become lists,
    and NumPy integers become int, so that a configuration equals its JSON copy.
    """

    batch_size: int | list[int] = 1
    prefill_length: int | list[int] | None = None
    vision_included: bool | list[bool] = False
    vision_batch_size: int | list[int] | None = None
    vision_channels: int | list[int] | None = None
    vision_height: int | list[int] | None = None
    vision_width: int | list[int] | None = None
    required_props: Props | list[Props] | None = None

    def __post_init__(self) -> None:
        for name, value in self.extract().items():
            object.__setattr__(self, name, _json_types(value))
        for name, given in self.extract().items():
            if name == "required_props":
                continue
            is_flag = name == "vision_included"
            allowed = "True or False" if is_flag else "a count of at least 1"
            for value in given if isinstance(given, list) else [given]:
                is_unset = value is None and name not in ("batch_size", "vision_included")
                is_count = type(value) is int and value >= 1
                if not (is_unset or (type(value) is bool if is_flag else is_count)):
                    todo = f"Pass such a value, or a list of them, as {name}."
                    raise ConfigError(f"{name} = {given!r}", f"{allowed}, or a list", todo)

    def __hash__(self) -> int:
        return self.get_default_hash()

    def extract(self) -> dict[str, Any]:
        """Return all eight fields by name."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def get_default_hash(self) -> int:
        """Return a 60-bit number that is the same for equal configurations in every process.
        `hash()` returns it, too.
        """
        text = json.dumps(self.extract(), sort_keys=True, default=_unsupported)
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 4

    def get_standalones(self) -> list[vInferencePreCompileConfig]:
        """Return the configurations without lists that this one describes. ValueError for an empty
        list.
        """
        lists = {name: value for name, value in self.extract().items() if isinstance(value, list)}
        if not lists:
            return [self]
        for name, values in lists.items():
            if not values:
                raise ConfigError(
                    f"{name} = []",
                    "a value, or a list of at least one",
                    f"Pass a value, or omit {name}.",
                )
        return [
            dataclasses.replace(
                self, **{name: values[min(i, len(values) - 1)] for name, values in lists.items()}
            )
            for i in range(max(map(len, lists.values())))
        ]

    @classmethod
    def create_optimized_compo(
        cls,
        batch_size: int | list[int] = 1,
        max_prefill_length: int = 2048,
        min_prefill_length: int = 64,
        vision_included: bool | list[bool] = False,  # noqa: FBT001, FBT002  # the documented signature
        vision_batch_size: int | list[int] | None = None,
        vision_channels: int | list[int] | None = None,
        vision_height: int | list[int] | None = None,
        vision_width: int | list[int] | None = None,
        required_props: Props | list[Props] | None = None,
    ) -> Self:
        """Make a configuration whose prompt lengths double from min_prefill_length up to
        max_prefill_length, which is the last one.

        A list of batch sizes is paired with the lengths like any other list. ValueError when
        min_prefill_length exceeds max_prefill_length.
        """
        if not 1 <= min_prefill_length <= max_prefill_length:
            raise ConfigError(
                f"prompt lengths from {min_prefill_length} to {max_prefill_length}",
                "1 <= min_prefill_length <= max_prefill_length",
                "Raise max_prefill_length, or lower min_prefill_length.",
            )
        lengths = [min_prefill_length]
        while lengths[-1] < max_prefill_length:
            lengths.append(min(2 * lengths[-1], max_prefill_length))
        return cls(
            batch_size=batch_size,
            prefill_length=lengths,
            vision_included=vision_included,
            vision_batch_size=vision_batch_size,
            vision_channels=vision_channels,
            vision_height=vision_height,
            vision_width=vision_width,
            required_props=required_props,
        )

    def replace(self, **changes: Any) -> vInferencePreCompileConfig:
        """Return a copy with other values. TypeError for an unknown field."""
        return dataclasses.replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON. from_dict() reads them."""
        return json.loads(self.to_json())

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Return the configuration that to_dict() stored."""
        return cls(**data)

    def to_json(self, **options: Any) -> str:
        """Return to_dict() as JSON text; `options` are passed to json.dumps."""
        return json.dumps(self.extract(), default=_unsupported, **options)

    @classmethod
    def from_json(cls, json_str: str) -> Self:
        """Return the configuration that to_json() stored."""
        return cls.from_dict(parse_json(json_str))


def plain_int(value: Any) -> Any:
    """Return a NumPy integer as int, and any other value unchanged."""
    return (
        int(value) if isinstance(value, numbers.Integral) and not isinstance(value, bool) else value
    )


def _json_types(value: Any) -> Any:
    """Return `value` with the types of JSON at every depth: tuples become lists, NumPy integers
    int.
    """
    if isinstance(value, list | tuple):
        return [_json_types(one) for one in value]
    if isinstance(value, Mapping):
        return {key: _json_types(one) for key, one in value.items()}
    return plain_int(value)


def _unsupported(value: Any) -> Any:
    """`default` of json.dumps: TypeError for a type that JSON does not have."""
    raise TypeError(
        explain(
            f"a {type(value).__name__} in required_props",
            "numbers, strings, lists and mappings",
            "Convert it to one of these.",
        )
    )
