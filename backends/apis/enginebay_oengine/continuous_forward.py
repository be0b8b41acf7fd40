"""StepLauncher: owns the cache's storage and the compiled functions that use it. All device work of
oEngine goes through this class.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from enginebay.contracts.cache import Lease
from enginebay.contracts.compilations import Compilations
from enginebay.contracts.executor import EngineParts
from enginebay.contracts.model import Weights
from enginebay.errors import ConfigError, InputError, RequestError
from enginebay_oengine.compiling import cjit
from enginebay_oengine.forward import GraphDef, ModelOutputBatch, execute_forward
from enginebay_oengine.generation_state import (
    GenerationState,
    HeldLeases,
    Views,
    place_rows,
    read_pages,
    take_rows,
    write_pages,
)
from enginebay_oengine.model_inputs import ModelInputBatch
from enginebay_oengine.opened_model import OpenedModel
from enginebay_oengine.page_manager import POOL, HBMPageManager
from enginebay_oengine.paged_cache import PagedAttentionCache
from enginebay_runtime.device import COLUMNS, DeviceRows
from enginebay_runtime.pages import copy_page
from enginebay_runtime.step import Program

DEVICE_AXIS = "tensor"
"""The name of the only mesh axis, for a configuration without a mesh."""


class StepLauncher:
    """Launches steps, one at a time. Callers hold `lock` during a sequence of calls.

    A step consumes the storage and the rows, which are donated: the launcher keeps the new storage,
    and `run` returns the new rows.
    """

    def __init__(
        self,
        model: OpenedModel,
        storage: PagedAttentionCache,
        manager: HBMPageManager,
        num_slots: int,
        pad_token_id: int,
    ) -> None:
        parts, metadata = model.parts, manager.metadata
        _check_fits(storage, manager)
        manager.in_use = True
        self.manager = manager
        self.storage = storage
        self.lock = threading.RLock()
        self.compilations = Compilations()
        program = Program(parts.model, parts.ops, parts.sampler)
        self.graphdef = GraphDef(
            program, dict(metadata.layouts), parts.compact_decode, num_slots, pad_token_id
        )
        self.placement = metadata.placement
        # A donated array is reused only for an output with the same sharding.
        meshed = self.placement.mesh is not None
        whole = self.placement.replicated
        where = jax.tree.map(lambda array: array.sharding, storage)
        options = parts.platform.compile_options()

        def compiled(
            function: Any, statics: Sequence[int], donated: Sequence[int], outputs: Any
        ) -> Any:
            jitted = jax.jit(
                function,
                static_argnums=statics,
                donate_argnums=donated,
                out_shardings=outputs if meshed else None,
            )
            return cjit(
                jitted,
                static_argnums=statics,
                compile_options=options,
                compilations=self.compilations,
            )

        self.forward = compiled(execute_forward, (0,), (4, 5), (whole, where, whole))
        self._copy = compiled(copy_page, (), (0,), where.views)
        self._read = compiled(read_pages, (), (), None)
        self._write = compiled(write_pages, (), (0,), where.views)
        self._place = compiled(place_rows, (), (0,), whole)
        self.take = compiled(take_rows, (1, 2), (), whole)
        self.held: weakref.WeakSet[HeldLeases] = weakref.WeakSet()
        """The pages held by prefixes."""

    def run(
        self,
        weights: Weights,
        inputs: ModelInputBatch,
        rows: DeviceRows,
        rngs: np.ndarray | None = None,
    ) -> tuple[ModelOutputBatch, DeviceRows]:
        """Copy shared pages that the step would write to, then launch the step."""
        self._copy_pages()
        output, self.storage, rows = self.forward(
            self.graphdef, weights, {}, inputs, self.storage, rows, rngs
        )
        return output, rows

    @contextlib.contextmanager
    def override(self, parts: EngineParts, free_slots: Callable[[], None]) -> Iterator[None]:
        """Run steps of other parts while the block lasts. The former programs return afterwards,
        and the block's programs are dropped.

        RequestError while sequences hold pages, because another implementation may not continue
        from them. The end of the block calls `free_slots` and releases the pages of prefixes.
        Programs may be compiled within the block even if `compilations` forbids it.
        """
        with self.lock:
            count = self.manager.num_sequences
            if count:
                raise RequestError(
                    f"override() while {count} sequences hold pages",
                    "no pages held by slots or prefixes",
                    "Free the slots and release the prefixes first.",
                )
            before, forbidden = self.graphdef, self.compilations.forbidden
            program = Program(parts.model, parts.ops, parts.sampler)
            graphdef = dataclasses.replace(
                before, program=program, compact_decode=parts.compact_decode
            )
            self.graphdef, self.compilations.forbidden = graphdef, False
        try:
            yield
        finally:
            with self.lock:
                free_slots()
                for pages in self.held:
                    pages.let_go()
                self.graphdef, self.compilations.forbidden = before, forbidden
                self.forward.forget(graphdef)

    def place(
        self,
        rows: DeviceRows,
        prefix: GenerationState,
        places: Mapping[int, tuple[int, int]],
    ) -> DeviceRows:
        """Put rows of a prefix into slots: slot -> (row of the prefix, completion's index)."""
        count = rows.length.shape[0]
        slots = np.full(count, count, np.int32)
        source, index = np.zeros(count, np.int32), np.zeros(count, np.int32)
        for i, (slot, (row, number)) in enumerate(places.items()):
            slots[i], source[i], index[i] = slot, row, number
        placed: DeviceRows = self._place(rows, prefix.rows, prefix.base_keys, source, slots, index)
        return placed

    def read(self, leases: Sequence[Lease]) -> Views:
        """Return the pages of leases. All leases have as many pages as the longest one,
        rounded up.
        """
        with self.lock:
            self._copy_pages()
            views: Views = self._read(self.storage.views, self._table(leases, 0))
            return views

    def write(self, views: Views, leases: Sequence[Lease]) -> None:
        """Write the pages that read() returned to the pages of other leases. InputError for pages
        of another model or size.
        """
        num_pages = self.manager.metadata.num_pages
        try:
            width = jax.tree.leaves(views)[0].shape[1]
            table = np.full((len(leases), width), num_pages, np.int32)
            for row, lease in zip(table, leases, strict=True):
                row[: len(lease.pages[POOL])] = lease.pages[POOL]
            written = self._write(self.storage.views, views, table)
        except (TypeError, ValueError, IndexError) as error:
            raise InputError(
                f"a prefix that does not fit this cache ({error})",
                "a prefix of the same model, dtype and page size",
                "Call prefill() of this engine.",
            ) from error
        self.storage = PagedAttentionCache(written)

    def prefix_sharding(self) -> GenerationState:
        """Return the shardings of a prefix's leaves, as a GenerationState of NamedShardings."""
        mesh = self.placement.mesh
        if mesh is None:
            mesh = Mesh(np.array([self.placement.device]), (DEVICE_AXIS,))
        whole = NamedSharding(mesh, PartitionSpec())
        metadata = self.manager.metadata
        views = {
            group: tuple(
                {
                    name: NamedSharding(mesh, self.placement.spec((None, *axes)))
                    for name, axes in metadata.layouts[group].logical_axes().items()
                }
                for _ in range(count)
            )
            for group, count in metadata.num_layers.items()
        }
        rows: Any = DeviceRows.of(dict.fromkeys(COLUMNS, whole), whole)  # type: ignore[arg-type]
        return GenerationState(rows, whole, views)

    def _copy_pages(self) -> None:
        for source, target in self.manager.take_copies():
            pages = dict.fromkeys(self.storage.views, np.asarray([source, target], np.int32))
            views = self._copy(self.storage.views, pages)
            self.storage = PagedAttentionCache(views)

    def _table(self, leases: Sequence[Lease], fill: int) -> np.ndarray:
        most = max(len(lease.pages[POOL]) for lease in leases)
        width = min(1 << (most - 1).bit_length(), self.manager.metadata.max_pages_per_sequence)
        table = np.full((len(leases), max(width, most)), fill, np.int32)
        for row, lease in zip(table, leases, strict=True):
            row[: len(lease.pages[POOL])] = lease.pages[POOL]
        return table


def _sizes(views: Mapping[str, Sequence[Mapping[str, Any]]]) -> Any:
    """Shape and dtype of each array by group, layer and name."""
    return {
        group: [{name: (a.shape, a.dtype) for name, a in layer.items()} for layer in layers]
        for group, layers in views.items()
    }


def _check_fits(storage: PagedAttentionCache, manager: HBMPageManager) -> None:
    """Raise ConfigError for a cache that is in use, or has other metadata than the manager."""
    metadata = manager.metadata
    wanted = {
        group: [metadata.layouts[group].shapes()] * count
        for group, count in metadata.num_layers.items()
    }
    if _sizes(wanted) != _sizes(storage.views):
        raise ConfigError(
            "a PagedAttentionCache of other sizes than the manager's",
            "a cache and a manager with the same metadata",
            "Make both from the same PagedAttentionCacheMetaData.",
        )
    if any(array.is_deleted() for array in jax.tree.leaves(storage)):
        raise ConfigError(
            "a PagedAttentionCache that another engine has taken over",
            "a cache of its own for each engine",
            "Call PagedAttentionCache.init_cache() for each engine.",
        )
    if manager.in_use:
        raise ConfigError(
            "the manager of another engine",
            "a manager of its own for each engine",
            "Make an HBMPageManager for each engine.",
        )
