"""StepLauncher: the storage, its pages' books and the compiled functions over both; everything on
the device goes through here.
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

from enginebay.cache import Lease
from enginebay.engine import Compilations
from enginebay.errors import ConfigError, InputError, RequestError
from enginebay.executor.parts import EngineParts
from enginebay.model import Weights
from enginebay_executor.device import COLUMNS, DeviceRows
from enginebay_executor.pages import copy_page
from enginebay_executor.step import Program
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

DEVICE_AXIS = "tensor"
"""The name of the only mesh axis where the configuration has no mesh."""


class StepLauncher:
    """Launches, one at a time: hold `lock` around a sequence of them. Storage and rows go in
    donated and come back.
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
        meshed = (
            self.placement.mesh is not None
        )  # donated arrays are reused only when they come back as they went
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
        """Pages that prefixes hold."""

    def run(
        self,
        weights: Weights,
        inputs: ModelInputBatch,
        rows: DeviceRows,
        rngs: np.ndarray | None = None,
    ) -> tuple[ModelOutputBatch, DeviceRows]:
        """Copy pages that would be written to and are shared, then launch a step."""
        self._copy_pages()
        output, self.storage, rows = self.forward(
            self.graphdef, weights, {}, inputs, self.storage, rows, rngs
        )
        return output, rows

    @contextlib.contextmanager
    def override(self, parts: EngineParts, free_slots: Callable[[], None]) -> Iterator[None]:
        """While the block lasts, steps are those of other parts; the former programs come back, and
        the others are dropped.

        RequestError while sequences hold pages: what one implementation computed is none of
        another's. At the end `free_slots` is called, and the pages of prefixes are taken back.
        Within the block programs may be compiled, whatever `compilations` says.
        """
        with self.lock:
            count = self.manager.num_sequences
            if count:
                raise RequestError(
                    f"{count} sequences hold pages while implementations are to be swapped",
                    "none, in slots and prefixes",
                    "Free the slots, release the prefixes, and try again.",
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
        """Rows with those of a prefix in slots: slot -> (row of the prefix, completion's index)."""
        count = rows.length.shape[0]
        slots = np.full(count, count, np.int32)
        source, index = np.zeros(count, np.int32), np.zeros(count, np.int32)
        for i, (slot, (row, number)) in enumerate(places.items()):
            slots[i], source[i], index[i] = slot, row, number
        placed: DeviceRows = self._place(rows, prefix.rows, prefix.base_keys, source, slots, index)
        return placed

    def read(self, leases: Sequence[Lease]) -> Views:
        """The pages of leases, as many for each as the longest has, rounded up."""
        with self.lock:
            self._copy_pages()
            views: Views = self._read(self.storage.views, self._table(leases, 0))
            return views

    def write(self, views: Views, leases: Sequence[Lease]) -> None:
        """Put what read() gave into the pages of other leases. InputError for pages of another
        model or size.
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
                "one of the same model, dtype and page size",
                "Prefill again.",
            ) from error
        self.storage = PagedAttentionCache(written)

    def prefix_sharding(self) -> GenerationState:
        """Where the leaves of a prefix lie, as a GenerationState of NamedShardings."""
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
    """ConfigError for a storage that is in use, or was not made of the manager's metadata."""
    metadata = manager.metadata
    wanted = {
        group: [metadata.layouts[group].shapes()] * count
        for group, count in metadata.num_layers.items()
    }
    if _sizes(wanted) != _sizes(storage.views):
        raise ConfigError(
            "a storage of other sizes than the manager's",
            "a storage and a manager of one metadata",
            "Make both of the same PagedAttentionCacheMetaData.",
        )
    if any(array.is_deleted() for array in jax.tree.leaves(storage)):
        raise ConfigError(
            "a storage that another engine has taken over",
            "a storage of its own for each engine",
            "Call init_cache again.",
        )
    if manager.in_use:
        raise ConfigError(
            "the manager of another engine",
            "a manager of its own for each engine",
            "Make another one.",
        )
