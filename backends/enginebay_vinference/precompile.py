"""vInferencePreCompileConfig: the shapes that an inference is compiled for ahead of its prompts."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import numbers
from collections.abc import Mapping
from typing import Any, Self

from enginebay.errors import ConfigError, explain
from enginebay.nesting import parse_json

Props = Mapping[str, Mapping[str, Any]]


@dataclasses.dataclass(frozen=True)
class vInferencePreCompileConfig:  # noqa: N801  # the name its users know
    """Batch size and padded prompt length (in tokens) to compile for, or lists of them.

    With lists it stands for several configurations: the first elements make the first one, the
    second elements the second, and so on; a shorter list repeats its last element
    (`get_standalones`). prefill_length None means the longest prompt that the inference can take.
    The vision fields and required_props are carried along; nothing uses them until there is a model
    with vision. Lists and JSON are the same to it: tuples become lists, and NumPy's integers become
    int.
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
            object.__setattr__(self, name, _listed(value))
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
        """All eight fields by name."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def get_default_hash(self) -> int:
        """A number of 60 bits that equal configurations share, in every process; `hash()` is the
        same number.
        """
        text = json.dumps(self.extract(), sort_keys=True, default=_refuse)
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 4

    def get_standalones(self) -> list[vInferencePreCompileConfig]:
        """The configurations without lists that this one stands for. ValueError for an empty
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
                    "Give one, or leave it out.",
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
        """Prompt lengths that double from the least to the longest; the last one is
        max_prefill_length itself.

        A list of batch sizes is paired with the lengths like any other list. ValueError when the
        least is the greater one.
        """
        if not 1 <= min_prefill_length <= max_prefill_length:
            raise ConfigError(
                f"prompt lengths from {min_prefill_length} to {max_prefill_length}",
                "1 <= min_prefill_length <= max_prefill_length",
                "Correct them.",
            )
        lengths = [min_prefill_length]
        while lengths[-1] < max_prefill_length:
            lengths.append(min(2 * lengths[-1], max_prefill_length))
        return cls(
            batch_size, lengths, vision_included, vision_batch_size, vision_channels,
            vision_height, vision_width, required_props,
        )  # fmt: skip

    def replace(self, **changes: Any) -> vInferencePreCompileConfig:
        """This one with other values; TypeError for a field that there is not."""
        return dataclasses.replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as from_dict takes them."""
        return json.loads(self.to_json())

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """The configuration that to_dict() was called on."""
        return cls(**data)

    def to_json(self, **options: Any) -> str:
        """to_dict() as text; `options` go to json.dumps."""
        return json.dumps(self.extract(), default=_refuse, **options)

    @classmethod
    def from_json(cls, json_str: str) -> Self:
        """The configuration that to_json() was called on."""
        return cls.from_dict(parse_json(json_str))


def plain_int(value: Any) -> Any:
    """An integer of NumPy's as int; anything else as it is."""
    return (
        int(value) if isinstance(value, numbers.Integral) and not isinstance(value, bool) else value
    )


def _listed(value: Any) -> Any:
    """`value` with the types that JSON gives back: lists for tuples, ints for NumPy's integers, at
    every depth.
    """
    if isinstance(value, list | tuple):
        return [_listed(one) for one in value]
    if isinstance(value, Mapping):
        return {key: _listed(one) for key, one in value.items()}
    return plain_int(value)


def _refuse(value: Any) -> Any:
    """For json.dumps: TypeError for a value that JSON does not have."""
    raise TypeError(
        explain(
            f"a {type(value).__name__} in required_props",
            "numbers, texts, lists and mappings",
            "Convert it.",
        )
    )
