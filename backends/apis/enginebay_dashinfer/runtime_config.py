"""AsModelConfig, the settings of an installed model, and the builder that makes one."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from enginebay.errors import ConfigError, InputError, shown, unknown_name
from enginebay_dashinfer.statuses import AsCacheMode, TargetDevice

SPAN_SIZES = (16, 32, 64, 128)
"""Allowed values of cache_span_size, in tokens."""

GRAPH_SUFFIX, PARAM_SUFFIX = ".asgraph", ".asparam"
"""Suffixes of the two files of a serialised model: its description, and its weights."""


@dataclasses.dataclass(slots=True)
class AsModelConfig:
    """Settings of a model that is installed into an engine.

    model_path, weights_path: the two files of a serialised model. compute_unit: a kind of device
    and its ids, such as "CPU:0" or "CUDA:0,1". engine_max_length: max tokens of prompt and output
    of a request. engine_max_batch: max number of requests that run together.
    engine_max_prefill_length: max prompt tokens of one step; 0 chooses. num_threads: threads of a
    CPU; 0 takes all that the process may use. cache_span_size: tokens of a page of the cache.
    prefix_cache_ttl: seconds that the cache keeps a prefix which no request uses. lora_max_num,
    lora_max_rank: how many adapters have a place on the device, and their max rank.
    """

    model_name: str = ""
    model_path: str = ""
    weights_path: str = ""
    compute_unit: str = "CUDA:0"
    num_threads: int = 0
    engine_max_length: int = 2048
    engine_max_batch: int = 32
    engine_max_prefill_length: int = 0
    cache_span_size: int = 32
    cache_mode: AsCacheMode = AsCacheMode.AsCacheDefault
    enable_prefix_cache: bool = True
    prefix_cache_ttl: int = 300
    lora_max_num: int = 5
    lora_max_rank: int = 64

    def device(self) -> tuple[TargetDevice, list[int]]:
        """Return the kind and the ids of compute_unit. ConfigError for another text."""
        kind, colon, listed = str(self.compute_unit).partition(":")
        ids = listed.split(",")
        allowed = '"CPU:0", "CUDA:0", "CUDA:0,1" or "CPU_NUMA:0,1", for example'
        if kind not in TargetDevice.__members__ or not colon or not all(map(str.isdecimal, ids)):
            given = f"compute_unit = {shown(self.compute_unit)}"
            raise ConfigError(given, allowed, "Call compute_unit() of the builder.")
        if len(set(ids)) < len(ids):
            given = f"compute_unit = {shown(self.compute_unit)}, with a device twice"
            raise ConfigError(given, "each device once", "Remove the repeated device.")
        return TargetDevice[kind], [int(one) for one in ids]


RuntimeConfig = AsModelConfig
"""Another documented name of the same record."""


class AsModelRuntimeConfigBuilder:
    """Makes AsModelConfigs. Each method checks its value (ConfigError, a ValueError) and returns
    the builder, so that calls can be chained.
    """

    def __init__(self) -> None:
        self._config = AsModelConfig()

    def build(self) -> AsModelConfig:
        """Return a configuration, which later calls of the builder do not change."""
        return dataclasses.replace(self._config)

    def model_name(self, model_name: str) -> Self:
        """Set the name of the model within the engine."""
        if not isinstance(model_name, str) or not model_name:
            given = f"model_name = {shown(model_name)}"
            raise ConfigError(given, "text that is not empty", "Pass a name.")
        return self._set(model_name=model_name)

    def model_dir(self, model_dir: str | Path, file_name_prefix: str) -> Self:
        """Set the folder of a serialised model, and the name that its files begin with."""
        path = str(Path(model_dir) / file_name_prefix)
        return self._set(model_path=path + GRAPH_SUFFIX, weights_path=path + PARAM_SUFFIX)

    def model_file_path(self, model_file_name: str | Path, weight_file_path: str | Path) -> Self:
        """Set the two files of a serialised model."""
        return self._set(model_path=str(model_file_name), weights_path=str(weight_file_path))

    def compute_unit(
        self,
        target_device: TargetDevice | str,
        device_id_array: Sequence[int] | None = None,
        compute_thread_in_device: int = 0,
    ) -> Self:
        """Set the kind of device ("cuda", "cpu" and "cpu_numa" are allowed too), the ids of its
        devices (None: [0]) and the threads of a CPU.

        On a CPU the ids are always [0]; on CPU_NUMA they count the nodes.
        """
        target = _target(target_device)
        given = [0] if device_id_array is None else list(device_id_array)
        ids = [_whole("device_id_array", one, 0) for one in given] or [0]
        listed = [0] if target is TargetDevice.CPU else ids
        threads = _whole("compute_thread_in_device", compute_thread_in_device, 0)
        unit = f"{target.name}:{','.join(map(str, listed))}"
        return self._set(compute_unit=unit, num_threads=threads)

    def max_length(self, length: int) -> Self:
        """Set the max tokens of prompt and output of a request."""
        return self._set(engine_max_length=_whole("max_length", length, 2))

    def max_batch(self, batch: int) -> Self:
        """Set the max number of requests that run together."""
        return self._set(engine_max_batch=_whole("max_batch", batch, 1))

    def max_prefill_length(self, length: int) -> Self:
        """Set the max prompt tokens of one step; longer prompts take several. 0 chooses."""
        return self._set(engine_max_prefill_length=_whole("max_prefill_length", length, 0))

    def kv_cache_mode(self, cache_mode: AsCacheMode) -> Self:
        """Set how keys and values are stored."""
        if not isinstance(cache_mode, AsCacheMode):
            given = f"kv_cache_mode {shown(cache_mode)}"
            names = ", ".join(f"AsCacheMode.{name}" for name in AsCacheMode.__members__)
            raise ConfigError(given, names, "Pass one of these.")
        return self._set(cache_mode=cache_mode)

    def kv_cache_span_size(self, span_size: int) -> Self:
        """Set the tokens of a page of the cache: 16, 32, 64 or 128."""
        if span_size not in SPAN_SIZES:
            allowed = ", ".join(map(str, SPAN_SIZES))
            given = f"kv_cache_span_size = {shown(span_size)}"
            raise ConfigError(given, allowed, "Pass one of these.")
        return self._set(cache_span_size=span_size)

    def prefill_cache(self, enable: bool = True) -> Self:
        """Turn the cache of prefixes on or off."""
        if not isinstance(enable, bool):
            given = f"enable_prefix_cache = {shown(enable)}"
            raise ConfigError(given, "True or False", "Pass one of these.")
        return self._set(enable_prefix_cache=enable)

    def prefix_cache_ttl(self, ttl: int = 300) -> Self:
        """Set the seconds that the cache keeps a prefix which no request uses."""
        return self._set(prefix_cache_ttl=_whole("prefix_cache_ttl", ttl, 1))

    def lora_max_num(self, num: int) -> Self:
        """Set the number of adapters that have a place on the device; 0: no adapters."""
        return self._set(lora_max_num=_whole("lora_max_num", num, 0))

    def lora_max_rank(self, rank: int) -> Self:
        """Set the max rank of an adapter."""
        return self._set(lora_max_rank=_whole("lora_max_rank", rank, 1))

    def from_dict(self, rfield: Mapping[str, Any]) -> Self:
        """Set the name, the compute unit and the sizes, which `rfield` must have, and what else it
        has; see update_from_dict().
        """
        _check_mapping(rfield)
        needed = ("model_name", "compute_unit", "engine_max_length", "engine_max_batch")
        missing = [name for name in needed if name not in rfield]
        if missing:
            given = f"a mapping without {', '.join(missing)}"
            raise ConfigError(given, ", ".join(needed), "Add these, or call update_from_dict().")
        return self.update_from_dict(rfield)

    def update_from_dict(self, rfield: Mapping[str, Any]) -> Self:
        """Set the fields that `rfield` has. UnknownNameError for another field, with nothing set.

        compute_unit is a mapping of device_type, device_ids and compute_thread_in_device, or a text
        as in AsModelConfig. kv_cache_mode is the name of an AsCacheMode.
        """
        _check_mapping(rfield)
        setters: dict[str, Callable[[Any], object]] = {
            "model_name": self.model_name,
            "compute_unit": self._unit_from,
            "engine_max_length": self.max_length,
            "engine_max_batch": self.max_batch,
            "engine_max_prefill_length": self.max_prefill_length,
            "enable_prefix_cache": self.prefill_cache,
            "prefix_cache_ttl": self.prefix_cache_ttl,
            "kv_cache_mode": lambda name: self.kv_cache_mode(_cache_mode(name)),
            "kv_cache_span_size": lambda size: self.kv_cache_span_size(
                _whole("kv_cache_span_size", size, 1)
            ),
            "lora_max_num": self.lora_max_num,
            "lora_max_rank": self.lora_max_rank,
        }
        for name in rfield:
            if name not in setters:
                raise unknown_name("field of a runtime configuration", str(name), setters)
        before = self._config
        try:
            for name, value in rfield.items():
                setters[name](value)
        except InputError:
            self._config = before
            raise
        return self

    def _unit_from(self, value: Mapping[str, Any] | str) -> Self:
        if isinstance(value, str):
            changed = dataclasses.replace(self._config, compute_unit=value)
            changed.device()
            self._config = changed
            return self
        if not isinstance(value, Mapping):
            allowed = "a mapping with device_type, or text such as CPU:0"
            raise ConfigError(f"compute_unit = {shown(value)}", allowed, "Pass such a value.")
        return self.compute_unit(
            value.get("device_type", ""),
            value.get("device_ids"),
            value.get("compute_thread_in_device", 0),
        )

    def _set(self, **values: Any) -> Self:
        self._config = dataclasses.replace(self._config, **values)
        return self


def checked_config(given: AsModelConfig) -> AsModelConfig:
    """Return a copy of a configuration. ConfigError for a value that the builder would refuse, and
    for anything but an AsModelConfig.
    """
    if not isinstance(given, AsModelConfig):
        todo = "Call build() of an AsModelRuntimeConfigBuilder."
        raise ConfigError(f"a configuration {shown(given)}", "an AsModelConfig", todo)
    given.device()
    threads = _whole("num_threads", given.num_threads, 0)
    builder = AsModelRuntimeConfigBuilder().model_name(given.model_name)
    builder.model_file_path(given.model_path, given.weights_path)
    builder.max_length(given.engine_max_length).max_batch(given.engine_max_batch)
    builder.max_prefill_length(given.engine_max_prefill_length).kv_cache_mode(given.cache_mode)
    builder.kv_cache_span_size(given.cache_span_size).prefill_cache(given.enable_prefix_cache)
    builder.prefix_cache_ttl(given.prefix_cache_ttl).lora_max_num(given.lora_max_num)
    built = builder.lora_max_rank(given.lora_max_rank).build()
    return dataclasses.replace(built, compute_unit=given.compute_unit, num_threads=threads)


def _check_mapping(given: Mapping[str, Any]) -> None:
    if not isinstance(given, Mapping):
        raise ConfigError(f"fields {shown(given)}", "a mapping", "Pass names and values.")


def _target(value: TargetDevice | str) -> TargetDevice:
    if isinstance(value, TargetDevice):
        return value
    name = value.upper() if isinstance(value, str) else ""
    if name not in TargetDevice.__members__:
        raise unknown_name("target device", str(value), TargetDevice.__members__)
    return TargetDevice[name]


def _cache_mode(name: AsCacheMode | str) -> AsCacheMode:
    if isinstance(name, AsCacheMode):
        return name
    if name not in AsCacheMode.__members__:
        raise unknown_name("kv_cache_mode", str(name), AsCacheMode.__members__)
    return AsCacheMode[name]


def _whole(name: str, value: Any, lowest: int) -> int:
    """Return a whole number, which may be given as text of digits. ConfigError for another value
    or a smaller number.
    """
    try:
        number = int(value) if isinstance(value, str) else operator.index(value)
    except (TypeError, ValueError):
        number = None
    if number is None or isinstance(value, bool) or number < lowest:
        raise ConfigError(
            f"{name} = {shown(value)}", f"a whole number from {lowest} up", f"Pass a {name}."
        )
    return number
