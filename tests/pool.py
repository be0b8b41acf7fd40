"""One pool of real engines per pytest process.

Tests lease engines from the pool, so that each program is compiled once for all tests.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import pkgutil
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest

from enginebay import memory_maps
from enginebay.compose.composition import Progress, make_engine
from enginebay.compose.plan import Plan
from enginebay.contracts.engine import Engine
from enginebay.ops.select import is_import_path
from enginebay_runtime.buckets import BucketSizes, default_sizes
from tests.fakes import is_installed

MAKERS = (
    ("enginebay.compose.composition", "make_engine"),
    ("enginebay_vinference.loaded_model", "make_engine"),
)
"""Functions that make an engine from a plan, and their modules."""

SIZER = "enginebay_runtime.buckets.default_sizes"
"""The function that chooses the sizes in which an engine compiles its steps."""


def largest_sizes(**given: Any) -> BucketSizes:
    """Only the largest of the default sizes of each kind."""
    usual = default_sizes(**given)
    each = (usual.decode_rows, usual.prefill_rows, usual.prefill_tokens, usual.kv_lens)
    return BucketSizes(*(sizes[-1:] for sizes in each), usual.prefill_tokens[-1:])


@contextlib.contextmanager
def few_sizes() -> Iterator[None]:
    """Within the block, new engines pad every step to one size: at most four programs each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SIZER, largest_sizes)
        yield


def key_of(plan: Plan) -> tuple[object, ...] | None:
    """The key under which the pool keeps an engine: all that the engine is made of.

    None means that the pool does not keep the engine. Fake engines have no key, nor has an engine
    that only one test can use: with adapters, an import path, an open checkpoint, a shadow or a
    step dump.
    """
    config = plan.config
    if is_installed():
        return None
    if (
        any(is_import_path(reason.chosen) for reason in plan.reasons)
        or config.dump_step is not None
    ):
        return None
    is_named = config.model == "demo" or Path(config.model) == plan.checkpoint.folder
    if plan.shadow is not None or plan.adapters is not None or not is_named:
        return None
    parts = tuple(
        (entry.kind, entry.op, entry.name, entry.package) for entry in plan.registry.entries
    )
    return (
        config.model_dump_json(),
        tuple(plan.kernels.names.items()),
        parts,
        pkgutil.resolve_name(SIZER),
    )


MAX_IDLE = 12
"""Engines that the pool keeps. The programs of one take up to ten thousand of the memory maps of a
process, of which Linux allows 65,530.
"""

ROOM = 0.6
"""The share of these maps above which `make_room` gives up what was compiled."""

MANY_PROGRAMS = 50
"""After how many new programs `make_room` counts the maps: to count them takes 50 ms."""

POOLS = weakref.WeakSet["EnginePool"]()
_counted = [0]
"""How many programs there were when `make_room` last counted."""


def num_programs() -> int:
    """How many compiled programs this process holds."""
    return len(jax.devices()[0].client.live_executables())


def share_of_maps() -> float:
    """The share of its memory maps that this process has taken; 0 where no limit is told."""
    try:
        limit = int(memory_maps.LIMIT.read_text(encoding="ascii"))
        with memory_maps.MAPS.open("rb") as lines:
            return sum(1 for _ in lines) / limit
    except (OSError, ValueError):
        return 0.0


def make_room() -> None:
    """Close idle engines while programs take more than ROOM of the memory maps, those that came
    back first at first; if that is not enough, let JAX forget its programs. It does nothing until
    MANY_PROGRAMS were compiled since the last time.
    """
    num = num_programs()
    _counted[0] = min(_counted[0], num)
    if num - _counted[0] < MANY_PROGRAMS:
        return
    _counted[0] = num
    for pool in list(POOLS):
        while share_of_maps() > ROOM and pool.close_first():
            gc.collect()
    if share_of_maps() > ROOM:
        jax.clear_caches()
        gc.collect()


class EnginePool:
    """Idle engines by key. An engine that comes back must be idle; its cache is emptied. Those that
    came back first are closed when there are more than MAX_IDLE.
    """

    def __init__(self) -> None:
        self._free: dict[tuple[object, ...], list[Engine]] = {}
        self._idle: list[tuple[tuple[object, ...], Engine]] = []
        """All free ones, in the order in which they came back."""
        POOLS.add(self)
        self.num_made = 0
        self.num_leased = 0

    @contextlib.contextmanager
    def leases(self) -> Iterator[None]:
        """Within the block, code that composes an engine receives an engine of the pool.

        All engines come back at the block's end. Close every loop or LLM that drives one before
        that.
        """
        leased: list[tuple[tuple[object, ...], Engine]] = []

        def lease(plan: Plan, progress: Progress | None = None) -> Engine:
            key = key_of(plan)
            if key is None:
                return make_engine(plan, progress)
            self.num_leased += 1
            free = self._free.setdefault(key, [])
            if not free:
                self.num_made += 1
            if free:
                engine = free.pop()
                self._idle.remove((key, engine))
            else:
                engine = make_engine(plan, progress)
            leased.append((key, engine))
            engine.close = lambda: None  # closing an LLM would free the programs
            return engine

        # A module that is imported while another is patched would keep the patch.
        places = [(importlib.import_module(module), name) for module, name in MAKERS]
        with pytest.MonkeyPatch.context() as patch:
            for module, name in places:
                patch.setattr(module, name, lease)
            try:
                yield
            finally:
                for key, engine in leased:
                    self._take_back(key, engine)

    def _take_back(self, key: tuple[object, ...], engine: Engine) -> None:
        engine.ledger.check()
        assert engine.rows.num_reqs == 0, f"an engine comes back with {engine.rows.num_reqs} rows"
        del engine.close
        engine.drop_arrays()  # drops kept prefixes too
        engine.compilations.forbidden = False
        self._free[key].append(engine)
        self._idle.append((key, engine))
        while len(self._idle) > MAX_IDLE:
            self.close_first()

    def close_first(self) -> bool:
        """Close the idle engine that came back first. Return whether there was one."""
        if not self._idle:
            return False
        key, engine = self._idle.pop(0)
        self._free[key].remove(engine)
        engine.close()
        return True
