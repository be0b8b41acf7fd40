"""The compiled step of oEngine: chunks of prompts and rows that decode, in one call that takes
weights, cache and rows as arguments and donates the last two. The documents make these arrays the
user's, so that no executor can own them; the work is done by the paged engine's `PageSteps`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import tree_util
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from enginebay.contracts.cache import Lease
from enginebay.contracts.compilations import Compilations
from enginebay.contracts.executor import EngineParts
from enginebay.contracts.model import Weights
from enginebay.errors import ConfigError, InputError, RequestError
from enginebay_oengine.compiling import cjit
from enginebay_oengine.generation_state import GenerationState, LeaseHandles
from enginebay_oengine.opened_model import OpenedModel
from enginebay_oengine.page_manager import HBMPageManager
from enginebay_oengine.paged_cache import PagedAttentionCache
from enginebay_paged.page_steps import (
    POOL,
    DecodePart,
    PageResult,
    PageRows,
    PageSteps,
    PrefillPart,
    Views,
    copy_page_within,
    place_rows,
    read_pages,
    rows_of_one,
    take_rows,
    write_pages,
)

DEVICE_AXIS = "tensor"
"""The name of the only mesh axis, for a configuration without a mesh."""

_FIELDS = ("complete", "token_id", "next_position", "packed")


@functools.partial(tree_util.register_dataclass, data_fields=["prefill", "decode"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class ModelInputBatch:
    """The inputs of one step: chunks of prompts, rows that decode, or both. A part that is None is
    skipped.
    """

    prefill: PrefillPart | None = None
    decode: DecodePart | None = None


@functools.partial(
    tree_util.register_dataclass,
    data_fields=[f"{part}_{field}" for part in ("prefill", "decodes") for field in _FIELDS],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class ModelOutputBatch:
    """The results of a step for the P rows of its prefill and the B slots; None for a part that did
    not run.

    complete bool [P], [B]: whether the row has ended. token_id int32: its new token, -1 for none.
    next_position int32: the position of its next token, or of its next chunk; -1 when it has ended
    or did not run. packed int32 [., 3]: the data of ResultTokens.
    """

    prefill_complete: Any = None
    prefill_token_id: Any = None
    prefill_next_position: Any = None
    prefill_packed: Any = None
    decodes_complete: Any = None
    decodes_token_id: Any = None
    decodes_next_position: Any = None
    decodes_packed: Any = None


@dataclasses.dataclass(frozen=True, eq=False)
class GraphDef:
    """The static argument of a step: the engine's steps, number of slots, and pad token id."""

    steps: PageSteps
    num_slots: int
    pad_token_id: int


def execute_forward(
    graphdef: GraphDef,
    graphstate: Weights,
    graphothers: Weights,
    inputs: ModelInputBatch,
    storage: PagedAttentionCache,
    rows: PageRows,
    rngs: jax.Array | None,
) -> tuple[ModelOutputBatch, PagedAttentionCache, PageRows]:
    """Run the parts of `inputs`, the prefill first. The compiled version donates storage and rows.

    rngs uint32 [2]: folded into the rows' own keys for this decode. None: rows use their own keys.
    """
    weights, views = {**graphstate, **graphothers}, storage.views
    found: dict[str, jax.Array] = {}
    if inputs.prefill is not None:
        result = graphdef.steps.prefill(weights, views, rows, inputs.prefill)
        views, rows = result.views, result.rows
        found |= {f"prefill_{name}": value for name, value in _output(graphdef, result).items()}
    if inputs.decode is not None:
        result = graphdef.steps.decode(weights, views, rows, inputs.decode, rngs)
        views, rows = result.views, result.rows
        output = _output(graphdef, result)
        found |= {f"decodes_{name}": value[: graphdef.num_slots] for name, value in output.items()}
    return ModelOutputBatch(**found), PagedAttentionCache(views), rows


def _output(graphdef: GraphDef, result: PageResult) -> dict[str, jax.Array]:
    """The output fields of a step's rows [S]."""
    rows, row_ids, tokens = result.rows, result.row_ids, result.token_ids
    is_row = row_ids < rows.length.shape[0]
    valid = tokens >= 0
    complete = valid & rows.finished.at[row_ids].get(mode="fill", fill_value=False)
    columns = (rows.length, rows.prompt_length)
    length, prompt = (column.at[row_ids].get(mode="fill", fill_value=0) for column in columns)
    num_sampled = jnp.maximum(length - prompt, 0)
    packed = jnp.stack(
        [jnp.where(valid, tokens, graphdef.pad_token_id), valid, num_sampled], axis=1
    )
    return {
        "complete": complete,
        "token_id": tokens,
        "next_position": jnp.where(is_row & ~complete, result.num_computed, -1),
        "packed": packed.astype(jnp.int32),
    }


def _take(rows: PageRows, num_rows: int, num_tokens: int) -> tuple[PageRows, jax.Array]:
    """The first num_rows rows, and the ResultTokens data of their last tokens."""
    taken = take_rows(rows, num_rows, num_tokens)
    one = jnp.ones(num_rows, jnp.int32)
    return taken, jnp.stack([taken.last_token, one, taken.length - taken.prompt_length], axis=1)


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
        steps = PageSteps.of(parts, metadata.layouts)
        self.graphdef = GraphDef(steps, num_slots, pad_token_id)
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
        self._copy = compiled(copy_page_within, (), (0,), where.views)
        self._read = compiled(read_pages, (), (), None)
        self._write = compiled(write_pages, (), (0,), where.views)
        self._place = compiled(place_rows, (), (0,), whole)
        self.take = compiled(_take, (1, 2), (), whole)
        self.held: weakref.WeakSet[LeaseHandles] = weakref.WeakSet()
        """The pages held by prefixes."""

    def run(
        self,
        weights: Weights,
        inputs: ModelInputBatch,
        rows: PageRows,
        rngs: np.ndarray | None = None,
    ) -> tuple[ModelOutputBatch, PageRows]:
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
            steps = PageSteps.of(parts, self.manager.metadata.layouts)
            graphdef = dataclasses.replace(before, steps=steps)
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
        rows: PageRows,
        prefix: GenerationState,
        places: Mapping[int, tuple[int, int]],
    ) -> PageRows:
        """Put rows of a prefix into slots: slot -> (row of the prefix, completion's index)."""
        count = rows.length.shape[0]
        slots = np.full(count, count, np.int32)
        source, index = np.zeros(count, np.int32), np.zeros(count, np.int32)
        for i, (slot, (row, number)) in enumerate(places.items()):
            slots[i], source[i], index[i] = slot, row, number
        placed: PageRows = self._place(rows, prefix.rows, prefix.base_keys, source, slots, index)
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
        return GenerationState(rows_of_one(whole), whole, views)

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
