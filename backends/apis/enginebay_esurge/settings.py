"""Conversion of the documented options to a configuration of the paged engine; unsupported values
raise errors.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from enginebay.config import EngineConfig, make_config
from enginebay.errors import ConfigError, UnsupportedError
from enginebay.keywords import ServingChoices

log = logging.getLogger("enginebay.esurge")

ENGINE = "oengine"
AXES = ("dp", "fsdp", "ep", "tp", "sp")
"""The axes of sharding_axis_dims."""

DEFAULT_DIMS = (1, 1, 1, -1, 1)
DEFAULT_MODEL_LEN = 8192
SIZES_OF_CACHE = ("num_pages", "cache_bytes", "memory_utilization")
OURS = (
    "model",
    "dtype",
    "engine",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "mesh",
)
"""Fields of EngineConfig that documented options set, so keywords must not."""


class FurtherChoices(ServingChoices, total=False):
    """Keywords of eSurge besides the documented ones: other fields of EngineConfig, and options of
    the engine "oengine".
    """

    engine_options: Mapping[str, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class EngineSettings:
    """The options of the engine. `more`: further fields of EngineConfig, and engine_options."""

    dtype: Any
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int | None
    hbm_utilization: float
    page_size: int
    enable_prefix_caching: bool
    use_aot_forward: bool
    compile_runner: bool
    auto_shard_model: bool
    sharding_axis_dims: Sequence[int]
    overlap_execution: bool
    more: FurtherChoices

    def __post_init__(self) -> None:
        taken = sorted(set(self.more) & {*OURS, "forbid_compiling"})
        if taken:
            raise ConfigError(
                f"{', '.join(taken)} as further keywords",
                "fields of EngineConfig without a documented option, and engine_options",
                "Use the documented option.",
            )

        if not self.auto_shard_model and tuple(self.sharding_axis_dims) != DEFAULT_DIMS:
            raise ConfigError(
                f"sharding_axis_dims = {tuple(self.sharding_axis_dims)} with auto_shard_model "
                "= False",
                "one of the two",
                "Omit one of them.",
            )

    def config(self, model: str, longest: int, num_devices: int, max_tp: int) -> EngineConfig:
        """Return the configuration for a model of at most `longest` tokens on `num_devices`
        devices, of which it can be split over max_tp.

        The default max_model_len is reduced to the model's own. ConfigError for a wrong value.
        """
        more = {name: value for name, value in self.more.items() if name != "engine_options"}
        values: dict[str, Any] = {
            "model": model,
            "dtype": dtype_name(self.dtype),
            "max_model_len": min(longest, DEFAULT_MODEL_LEN)
            if self.is_default_length
            else self.max_model_len,
            "max_num_seqs": self.max_num_seqs,
            "overlap_execution": self.overlap_execution,
            "mesh": mesh_of(self.sharding_axis_dims, num_devices, max_tp)
            if self.auto_shard_model
            else {},
            "forbid_compiling": self.compile_runner and self.use_aot_forward,
            "engine": {"name": ENGINE, "options": self._engine_options()},
        }
        if self.max_num_batched_tokens is not None:
            values["max_num_batched_tokens"] = self.max_num_batched_tokens
        return make_config(more, values)

    @property
    def is_default_length(self) -> bool:
        """Whether max_model_len has its default, which adapts to the model."""
        return self.max_model_len == DEFAULT_MODEL_LEN

    def _engine_options(self) -> dict[str, Any]:
        given = dict(self.more.get("engine_options", {}))
        options: dict[str, Any] = {
            "page_size": self.page_size,
            "prefix_caching": self.enable_prefix_caching,
        }
        if not any(name in given for name in SIZES_OF_CACHE):
            options["memory_utilization"] = self.hbm_utilization
        return given | options


def dtype_name(dtype: Any) -> str:
    """Return the name of a JAX or NumPy dtype; a string is returned unchanged. ConfigError for
    anything else.
    """
    if isinstance(dtype, str):
        return dtype
    try:
        return str(jnp.dtype(dtype).name)
    except TypeError:
        raise ConfigError(
            f"dtype of type {type(dtype).__name__}",
            "a dtype such as jnp.bfloat16, or its name",
            'Pass "bfloat16", for example.',
        ) from None


def mesh_of(dims: Sequence[int], num_devices: int, max_tp: int) -> dict[str, int]:
    """Return the mesh for the number of devices along each of AXES. One number may be -1 for the
    remaining devices, at most max_tp of them for tp.

    UnsupportedError for more than 1 along another axis than tp, the axis of heads and features.
    ConfigError for wrong dims.
    """
    dims = tuple(dims)
    if (
        len(dims) != len(AXES)
        or any(size < 1 and size != -1 for size in dims)
        or dims.count(-1) > 1
    ):
        raise ConfigError(
            f"sharding_axis_dims = {dims}",
            f"numbers of devices along {', '.join(AXES)}, one of which may be -1",
            f"Pass {DEFAULT_DIMS} to split over all devices.",
        )
    fixed = math.prod(size for size in dims if size != -1)
    sizes = {
        axis: num_devices // fixed if size == -1 else size
        for axis, size in zip(AXES, dims, strict=True)
    }
    if dims[AXES.index("tp")] == -1:
        sizes["tp"] = min(sizes["tp"], max_tp)
    wrong = [axis for axis, size in sizes.items() if size > 1 and axis != "tp"]
    if wrong:
        raise UnsupportedError(
            f"sharding_axis_dims = {dims}, which splits {' and '.join(wrong)}",
            "more than 1 along tp only",
            f"Pass {DEFAULT_DIMS}.",
        )
    return {"tensor": sizes["tp"]} if sizes["tp"] != 1 else {}


def take_unused_options(
    min_input_pad: int,
    detokenizer_max_states: int,
    tokenizer_endpoint: str | None,
    detokenizer_endpoint: str | None,
) -> None:
    """Check the documented options that change no answer, and log each option whose value is not
    its default, with the reason. ConfigError for a wrong value.
    """
    one_state = "each request has its own state"
    in_caller = "text is tokenised in this process"
    in_reader = "text is made in this process"
    for name, value, default, why in (
        ("min_input_pad", min_input_pad, 16, "the smallest step has 16 tokens"),
        ("detokenizer_max_states", detokenizer_max_states, 65536, one_state),
        ("tokenizer_endpoint", tokenizer_endpoint, None, in_caller),
        ("detokenizer_endpoint", detokenizer_endpoint, None, in_reader),
    ):
        if default is None:
            allowed, is_right = "an address, or None", value is None or is_address(value)
        else:
            allowed, is_right = "an integer of at least 1", is_count(value)
        if not is_right:
            raise ConfigError(f"{name} = {value!r}", allowed, f"Omit {name}: {why}.")
        if value != default:
            log.info("%s = %r changes nothing here: %s", name, value, why)


def is_address(value: object) -> bool:
    """Return whether a value is text that is not empty."""
    return isinstance(value, str) and value != ""


def is_count(value: object) -> bool:
    """Return whether a value is an integer of at least 1."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
