"""One account of device memory for the models of an engine, with limits from the environment."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
from collections.abc import Iterator, Sequence

import jax

from enginebay.compose.composition import make_engine
from enginebay.compose.plan import Plan
from enginebay.errors import ConfigError, shown
from enginebay.memory import MemoryPlan
from enginebay_dashinfer.statuses import AsStatus, RefusedError
from enginebay_dashinfer.stored_model import StoredModel
from enginebay_paged.sizing import free_bytes

DEFAULT_RATIO = 0.9
MIB = 2**20


@dataclasses.dataclass(frozen=True, slots=True)
class TakenMemory:
    """The memory of a loaded model. `mapped_bytes` of its weights are pages of a file, which the
    system reports as available, because the system can read these pages again. `host_bytes`: max
    bytes of a CPU's memory that its prefixes take beside the cache.
    """

    plan: MemoryPlan
    mapped_bytes: int = 0
    host_bytes: int = 0


class ModelMemory:
    """The account of the memory of an engine's models. Any thread may call the methods.

    All models together take at most BFC_MEM_RATIO (default 0.9) of a device's memory, and on a CPU
    of the memory that is free without them; BFC_LEFTOVER_MB (default 0) MiB stay free.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._taken: dict[object, TakenMemory] = {}

    @contextlib.contextmanager
    def taking(self, owner: object, plan: Plan) -> Iterator[Plan]:
        """Yield `plan` with the number of pages that fit beside the other models, at most those of
        max_num_seqs requests of max_model_len tokens. The block allocates; until it ends, no other
        model is measured. `owner` holds the memory from then on, unless the block raises.

        RefusedError with the bytes that are missing when there is no room for one request of
        max_model_len tokens: ALLSPARK_CACHE_MEMORY_OUT when only the cache does not fit, otherwise
        ALLSPARK_PARAM_ERROR.
        """
        with self._lock:
            usable = usable_bytes(
                plan.placement.device,
                plan.platform.hardware().memory_bytes,
                list(self._taken.values()),
            )
            on_host = host_bytes(plan)
            sized, memory = fitting_plan(plan, usable - on_host)
            yield sized
            mapped = min(memory.weights_bytes, mapped_bytes(plan))
            self._taken[owner] = TakenMemory(memory, mapped, on_host)

    def release(self, owner: object) -> None:
        """Remove `owner` from the account, because its memory is free again."""
        with self._lock:
            self._taken.pop(owner, None)


def usable_bytes(device: jax.Device, device_bytes: int, others: Sequence[TakenMemory]) -> int:
    """Return the bytes that a further model may use beside the loaded `others` on a device of
    `device_bytes`.

    ConfigError for a wrong value of BFC_MEM_RATIO or BFC_LEFTOVER_MB.
    """
    ratio, leftover = memory_limits()
    held = sum(one.plan.weights_bytes + one.plan.cache_bytes for one in others)
    mapped = sum(one.mapped_bytes for one in others)
    later = sum(one.plan.workspace_bytes + one.host_bytes for one in others)
    free = free_bytes(device, device_bytes)
    stats = device.memory_stats()
    total = int(stats["bytes_limit"]) if stats and "bytes_limit" in stats else free + held - mapped
    return min(int(ratio * total) - held, free - mapped) - later - leftover


def mapped_bytes(plan: Plan) -> int:
    """Return the bytes of a plan's weights that a CPU uses where their file is mapped."""
    checkpoint = plan.checkpoint
    if plan.placement.device.platform != "cpu" or not isinstance(checkpoint, StoredModel):
        return 0
    return checkpoint.mapped_bytes


def host_bytes(plan: Plan) -> int:
    """Return the bytes that the prefixes of a plan may take of a CPU's memory beside the cache."""
    if plan.placement.device.platform != "cpu":
        return 0
    return int(plan.config.engine.options.get("prefix_host_bytes") or 0)


def fitting_plan(plan: Plan, usable: int) -> tuple[Plan, MemoryPlan]:
    """Return `plan` with as many pages as fit into `usable` bytes, and its memory. RefusedError as
    in `ModelMemory.taking`.
    """
    config = plan.config
    assert config.max_model_len is not None, "make_plan settles max_model_len"
    row_pages = -(-config.max_model_len // int(config.engine.options["page_size"]))
    whole = with_pages(plan, 1 + config.max_num_seqs * row_pages)
    memory = planned_memory(whole)
    if memory.total_bytes <= usable:
        return whole, memory
    least = planned_memory(with_pages(plan, 1 + row_pages))
    if (missing := least.total_bytes - usable) > 0:
        cache_only = least.total_bytes - least.cache_bytes <= usable
        raise RefusedError(
            AsStatus.ALLSPARK_CACHE_MEMORY_OUT if cache_only else AsStatus.ALLSPARK_PARAM_ERROR,
            f"a model that needs {least.total_bytes} bytes (weights {least.weights_bytes}, steps "
            f"{least.workspace_bytes}, cache of a request of {config.max_model_len} tokens "
            f"{least.cache_bytes}), of which {missing} bytes are missing",
            f"at most {max(0, usable)} bytes beside the other models of the engine",
            "Release or unload another model, raise BFC_MEM_RATIO, or lower max_length, max_batch "
            "or max_prefill_length.",
        )
    more = (usable - least.total_bytes) * (config.max_num_seqs - 1) * row_pages
    sized = with_pages(plan, 1 + row_pages + more // (memory.total_bytes - least.total_bytes))
    return sized, planned_memory(sized)


def with_pages(plan: Plan, num_pages: int) -> Plan:
    """Return `plan` with a cache of this number of pages, including the dummy page."""
    engine = plan.config.engine
    sized = engine.model_copy(update={"options": engine.options | {"num_pages": num_pages}})
    return dataclasses.replace(plan, config=plan.config.model_copy(update={"engine": sized}))


def planned_memory(plan: Plan) -> MemoryPlan:
    """Return the memory of a plan's engine. Nothing is allocated."""
    engine = make_engine(plan)
    try:
        return engine.memory
    finally:
        engine.close()


def memory_limits() -> tuple[float, int]:
    """Return BFC_MEM_RATIO, and BFC_LEFTOVER_MB in bytes. ConfigError for other values."""
    ratio = _number("BFC_MEM_RATIO", DEFAULT_RATIO)
    leftover = int(_number("BFC_LEFTOVER_MB", 0.0) * MIB)
    if not 0.0 < ratio <= 1.0:
        raise ConfigError(f"BFC_MEM_RATIO = {ratio}", "above 0, up to 1", "Set 0.9, for example.")
    return ratio, leftover


def host_tier_bytes() -> int | None:
    """Return the bytes of the host tier of a model; None when it has no host tier.

    CPU_CACHE_RATIO (default 0) is the share of the host's free memory. ConfigError for other
    values.
    """
    ratio = _number("CPU_CACHE_RATIO", 0.0)
    if ratio > 1.0:
        raise ConfigError(f"CPU_CACHE_RATIO = {ratio}", "0 to 1", "Set 0.1, for example.")
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return int(ratio * free_bytes(jax.devices("cpu")[0], whole)) or None


def _number(name: str, default: float) -> float:
    text = os.environ.get(name)
    try:
        number = default if text is None else float(text)
    except ValueError:
        number = -1.0
    if not 0.0 <= number < float("inf"):
        given, todo = f"{name} = {shown(text)}", f"Set {name} to a number, or unset it."
        raise ConfigError(given, "a number from 0 up", todo)
    return number
