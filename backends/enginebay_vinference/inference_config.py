"""vInferenceConfig: how a generation runs, in chunks of compiled steps, and when it ends."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, Self

from enginebay.errors import ConfigError, RequestError, shown
from enginebay.nesting import parse_json
from enginebay.types import SamplingParams
from enginebay_faces.opening import Rules
from enginebay_vinference.errors import MissingSettingError
from enginebay_vinference.partition import (
    PartitionAxis,
    default_rules,
    spec_from_plain,
    spec_to_plain,
)
from enginebay_vinference.precompile import plain_int, vInferencePreCompileConfig

_SIZES = ("max_new_tokens", "streaming_chunks")
_TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id")


@dataclasses.dataclass(frozen=True)
class vInferenceConfig:  # noqa: N801  # the name its users know
    """Settings of a generation.

    max_new_tokens: most new tokens of a row. streaming_chunks: tokens of a row in one compiled
    call, after which `generate` yields. num_return_sequences: completions of each row of a batch; a
    mapping gives it per precompile configuration, keyed by its hash (one it does not name gets 1);
    None is 1. pad, bos and eos ids: those of the model or its tokenizer when None. partition_rules:
    (pattern, PartitionSpec) pairs; without them they are made from partition_axis. _loop_rows:
    chunks that max_new_tokens need, computed. sampling_params: of requests that bring none,
    SamplingParams or a mapping of their fields, by default
    SamplingParams(max_tokens=max_new_tokens); its max_tokens, or else max_new_tokens, is also that
    of requests that set none.
    """

    max_new_tokens: int = 64
    streaming_chunks: int = 16
    num_return_sequences: int | Mapping[int, int] | None = 1
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    partition_rules: Rules | None = None
    partition_axis: PartitionAxis | None = None
    _loop_rows: int | None = None
    sampling_params: SamplingParams | Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        for name in (*_SIZES, *_TOKENS):
            value = getattr(self, name)
            several = isinstance(value, list | tuple)
            plain = [plain_int(v) for v in value] if several else plain_int(value)
            object.__setattr__(self, name, plain)
        self._check()
        if self._loop_rows is None:
            object.__setattr__(self, "_loop_rows", -(-self.max_new_tokens // self.streaming_chunks))
        params = self.sampling_params
        if params is None:
            params = {"max_tokens": self.max_new_tokens}
        own = params.model_copy() if isinstance(params, SamplingParams) else _made(params)
        object.__setattr__(self, "sampling_params", own)

    def _check(self) -> None:
        """ConfigError for a value of another type or size."""
        counts = self.num_return_sequences
        several = counts if isinstance(counts, Mapping) else {0: 1 if counts is None else counts}
        sizes = [(name, getattr(self, name)) for name in _SIZES]
        sizes += [("num_return_sequences", count) for count in several.values()]
        tokens = [(name, getattr(self, name)) for name in _TOKENS]
        ids = [(n, v) for n, v in tokens if v is not None and not isinstance(v, list)]
        eos = self.eos_token_id
        ids += [("eos_token_id", one) for one in (eos if isinstance(eos, list) else [])]
        for wrong, allowed in (
            ([(n, v) for n, v in sizes if not _is_int(v) or v < 1], "counts of at least 1"),
            ([(n, v) for n, v in ids if not _is_int(v)], "token ids"),
            (
                [("a key of num_return_sequences", key) for key in several if not _is_int(key)],
                "hashes of configurations, from get_default_hash()",
            ),
        ):
            if wrong:
                given = ", ".join(f"{name} = {value!r}" for name, value in wrong)
                raise ConfigError(given, allowed, "Correct it.")
        if not isinstance(self.sampling_params, SamplingParams | Mapping | None):
            given = f"sampling_params of type {type(self.sampling_params).__name__}"
            raise ConfigError(
                given,
                "SamplingParams, or a mapping of their fields",
                "Make them with SamplingParams(...).",
            )

    __hash__ = None  # type: ignore[assignment]  # it holds mappings and parameters that can be changed

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """All end-of-sequence ids."""
        ids = self.eos_token_id
        return () if ids is None else tuple(dict.fromkeys(ids if isinstance(ids, list) else [ids]))

    def sequences_for(self, compile_config: vInferencePreCompileConfig) -> int:
        """num_return_sequences under a precompile configuration."""
        counts = self.num_return_sequences
        if isinstance(counts, Mapping):
            return counts.get(compile_config.get_default_hash(), 1)
        return counts or 1

    def get_partition_rules(
        self, runtime_config: vInferencePreCompileConfig | None = None
    ) -> Rules:
        """partition_rules as they are, or the default ones over partition_axis; AssertionError
        without either.

        `runtime_config` makes no difference to the default rules.
        """
        if self.partition_rules is not None:
            return self.partition_rules
        if self.partition_axis is None:
            raise MissingSettingError(
                "neither partition_rules nor partition_axis",
                "one of them",
                "Give partition_axis=PartitionAxis() for the default rules.",
            )
        return default_rules(self.partition_axis)

    def replace(self, **changes: Any) -> vInferenceConfig:
        """This one with other values, what was computed from them anew; TypeError for a field that
        there is not.
        """
        resized = {"max_new_tokens", "streaming_chunks"} & set(changes)
        if resized:
            changes = {"_loop_rows": None, **changes}
        params = self.sampling_params
        assert isinstance(params, SamplingParams), "made when none were given"
        is_default = (
            params.model_fields_set == {"max_tokens"} and params.max_tokens == self.max_new_tokens
        )
        if "max_new_tokens" in changes and is_default:
            changes = {"sampling_params": None, **changes}
        return dataclasses.replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """Plain values that JSON can hold, as from_dict takes them."""
        plain = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        counts, axis, rules = self.num_return_sequences, self.partition_axis, self.partition_rules
        assert isinstance(self.sampling_params, SamplingParams), "made when none were given"
        return plain | {
            "num_return_sequences": {str(k): n for k, n in counts.items()}
            if isinstance(counts, Mapping)
            else counts,
            "partition_rules": rules
            and [[pattern, spec_to_plain(spec)] for pattern, spec in rules],
            "partition_axis": None if axis is None else dataclasses.asdict(axis),
            "sampling_params": self.sampling_params.model_dump(mode="json", exclude_unset=True),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """The configuration that to_dict() was called on."""
        fields = dict(data)
        counts = fields.get("num_return_sequences", 1)
        if isinstance(counts, Mapping):
            fields["num_return_sequences"] = {int(key): count for key, count in counts.items()}
        rules, axis = fields.get("partition_rules"), fields.get("partition_axis")
        if rules is not None:
            fields["partition_rules"] = tuple((p, spec_from_plain(spec)) for p, spec in rules)
        if axis is not None:
            fields["partition_axis"] = PartitionAxis(**axis)
        return cls(**fields)

    def to_json(self, **options: Any) -> str:
        """to_dict() as text; `options` go to json.dumps."""
        return json.dumps(self.to_dict(), **options)

    @classmethod
    def from_json(cls, json_str: str) -> Self:
        """The configuration that to_json() was called on."""
        return cls.from_dict(parse_json(json_str))


def _made(fields: Mapping[str, Any]) -> SamplingParams:
    """SamplingParams of a mapping, whose error says where the wrong field stands."""
    try:
        return SamplingParams(**fields)
    except RequestError as error:
        raise ConfigError(f"sampling_params: {error}") from None
    except TypeError:  # Python's own, for keys that are no texts
        wrong = next(key for key in fields if not isinstance(key, str))
        raise ConfigError(
            f"the key {shown(wrong)} of sampling_params",
            "names of the fields of SamplingParams",
            "Write the key as a text.",
        ) from None


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
