"""vInferenceConfig: settings of a generation, such as chunk size, special tokens and sampling."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, Self

from enginebay.errors import ConfigError, RequestError, shown
from enginebay.json_text import parse_json
from enginebay.types import SamplingParams
from enginebay_shared.opening import Rules
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

    max_new_tokens: max new tokens per row. streaming_chunks: tokens per row of one compiled call;
    `generate` yields after each call. num_return_sequences: completions of each row of a batch; a
    mapping sets it by hash of the precompile configuration, with 1 for other hashes; None is 1.
    pad_token_id, bos_token_id, eos_token_id: None takes those of the model or its tokenizer.
    partition_rules: (pattern, PartitionSpec) pairs; None derives them from partition_axis.
    _loop_rows: number of chunks for max_new_tokens, computed. sampling_params: defaults for
    requests without parameters, as SamplingParams or a mapping of their fields; None is
    SamplingParams(max_tokens=max_new_tokens). A request without max_tokens uses the max_tokens of
    sampling_params, or else max_new_tokens.
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
        own = (
            params.model_copy() if isinstance(params, SamplingParams) else _sampling_params(params)
        )
        object.__setattr__(self, "sampling_params", own)

    def _check(self) -> None:
        """Raise ConfigError for a value of a wrong type or size."""
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
                raise ConfigError(given, allowed, "Pass such values to vInferenceConfig.")
        if not isinstance(self.sampling_params, SamplingParams | Mapping | None):
            given = f"sampling_params of type {type(self.sampling_params).__name__}"
            raise ConfigError(
                given,
                "SamplingParams, or a mapping of their fields",
                "Make them with SamplingParams(...).",
            )

    __hash__ = None  # type: ignore[assignment]  # it contains mutable mappings

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """All end-of-sequence token ids, each once."""
        ids = self.eos_token_id
        return () if ids is None else tuple(dict.fromkeys(ids if isinstance(ids, list) else [ids]))

    def sequences_for(self, compile_config: vInferencePreCompileConfig) -> int:
        """Return num_return_sequences for a precompile configuration."""
        counts = self.num_return_sequences
        if isinstance(counts, Mapping):
            return counts.get(compile_config.get_default_hash(), 1)
        return counts or 1

    def get_partition_rules(
        self, runtime_config: vInferencePreCompileConfig | None = None
    ) -> Rules:
        """Return partition_rules, or the default rules for partition_axis. AssertionError without
        both.

        `runtime_config` does not change the default rules.
        """
        if self.partition_rules is not None:
            return self.partition_rules
        if self.partition_axis is None:
            raise MissingSettingError(
                "neither partition_rules nor partition_axis",
                "one of them",
                "Pass partition_axis=PartitionAxis() for the default rules.",
            )
        return default_rules(self.partition_axis)

    def replace(self, **changes: Any) -> vInferenceConfig:
        """Return a copy with other values; computed values are updated. TypeError for an unknown
        field.
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
        """Return plain values for JSON. from_dict() reads them."""
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
        """Return the configuration that to_dict() stored."""
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
        """Return to_dict() as JSON text; `options` are passed to json.dumps."""
        return json.dumps(self.to_dict(), **options)

    @classmethod
    def from_json(cls, json_str: str) -> Self:
        """Return the configuration that to_json() stored."""
        return cls.from_dict(parse_json(json_str))


def _sampling_params(fields: Mapping[str, Any]) -> SamplingParams:
    """Make SamplingParams from a mapping. Errors name the configuration's field."""
    try:
        return SamplingParams(**fields)
    except RequestError as error:
        raise ConfigError(f"sampling_params: {error}") from None
    except TypeError:  # raised by Python for keys that are not strings
        wrong = next(key for key in fields if not isinstance(key, str))
        raise ConfigError(
            f"the key {shown(wrong)} of sampling_params",
            "names of the fields of SamplingParams",
            "Use the field's name, as a string.",
        ) from None


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
