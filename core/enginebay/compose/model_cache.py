"""The quantised cache that a model's configuration requests, as a value of kv_cache_dtype."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from enginebay.config import EngineConfig
from enginebay.config_sections import AUTO
from enginebay.contracts.model import ModelInfo
from enginebay.errors import UnsupportedError, shown

FIELD = "kv_cache_quantization_method"

STORAGES = {
    "8bit": "int8",
    "a8bit": "int8",
    "a8q": "int8",
    "int8": "int8",
    "4bit": "uint4",
    "a4bit": "uint4",
    "a4q": "uint4",
    "int4": "uint4",
    "uint4": "uint4",
    "fp8": "fp8",
    "float8": "fp8",
}
"""Method, in lower case -> value of kv_cache_dtype."""

NO_METHOD = ("", "none")


@dataclasses.dataclass(frozen=True, slots=True)
class RequestedCache:
    """The value of kv_cache_dtype that a model's configuration requests, and why."""

    dtype: str
    why: str


def model_cache(config: Mapping[str, Any]) -> RequestedCache | None:
    """Return the cache that the config.json of a model requests; None when it requests none.

    UnsupportedError for a method that no cache implements.
    """
    method = config.get(FIELD)
    if method is None:
        return None
    name = method.lower() if isinstance(method, str) else ""
    if isinstance(method, str) and name in NO_METHOD:
        return None
    where = f"{FIELD} = {shown(method)} in the model's configuration"
    if name not in STORAGES:
        raise UnsupportedError(
            where,
            "8bit (int8), 4bit (uint4), fp8, none",
            "Choose a cache with --cache-dtype (kv_cache_dtype), which replaces this field.",
        )
    return RequestedCache(STORAGES[name], where)


def dtypes_by_group(
    info: ModelInfo, config: EngineConfig, cached: RequestedCache | None
) -> dict[str, str]:
    """Return the dtype of each cache group that has one: from the configuration, or else from
    `cached`.
    """
    given = config.kv_cache_dtype if cached is None else cached.dtype
    each = dict.fromkeys(info.attention, given) if isinstance(given, str) else given
    return {group: dtype for group, dtype in each.items() if dtype != AUTO}
