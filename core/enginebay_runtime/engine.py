"""StepEngine: an engine made of a ledger, the sizes of its cache, and an executor of commands."""

from __future__ import annotations

import dataclasses
import functools
import logging
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from enginebay.contracts.adapters import ADAPTER_WEIGHTS
from enginebay.contracts.cache import CacheLayout, Lease, Ledger
from enginebay.contracts.cache_shape import pages_for
from enginebay.contracts.commands import (
    ClearPages,
    Drop,
    Grow,
    Make,
    Put,
    RowUpdate,
    SetAdapter,
    SetParts,
    SetWeights,
    Step,
    Take,
    WriteRows,
    values_of,
)
from enginebay.contracts.engine import (
    AttentionProblem,
    Demand,
    Engine,
    LaterCompilation,
    Pending,
    RowState,
    StepPlan,
)
from enginebay.contracts.executor import EngineParts, Executor, Report
from enginebay.contracts.processor import RowValues
from enginebay.contracts.step_key import StepKey
from enginebay.errors import InternalError
from enginebay.weights import KEY_CENTERS, merge_weights
from enginebay_runtime.account import ACCOUNT
from enginebay_runtime.assemble import (
    TableCopies,
    decode_command,
    needs_of,
    prefill_command,
    prefill_writes,
    takes_embeds,
    verify_command,
    wants_all,
)
from enginebay_runtime.compiling import release_memory as trim_heap
from enginebay_runtime.geometry import CacheSizes, Geometry, Shapes
from enginebay_runtime.host_pages import HostPages
from enginebay_runtime.local import LocalExecutor
from enginebay_runtime.memory import plan_memory
from enginebay_runtime.parts_of_step import (
    PendingParts,
    StepPart,
    decode_parts,
    prefill_parts,
)
from enginebay_runtime.programs import in_order, plain
from enginebay_runtime.rows import RowTable
from enginebay_runtime.verify import drafts_a_step

log = logging.getLogger("enginebay.engine")

NO_DEMAND = Demand()


class StepEngine(Engine):
    """Turns step plans into commands, which its executor runs.

    An engine plugin supplies the ledger, which writes its pages to the page tables of `rows`, and
    the sizes. Before a step runs, the arrays grow to hold everything that the ledger has promised
    to its rows.
    """

    rows: RowTable

    def __init__(
        self,
        parts: EngineParts,
        rows: RowTable,
        ledger: Ledger,
        sizes: CacheSizes,
        host: HostPages | None = None,
        identify: Callable[[Executor], str] | None = None,
    ) -> None:
        """`host`: holds the pages that the ledger moves to the host; unset: made here. `identify`:
        returns a name of the weights and of all else that cached pages depend on, the same in every
        process; if unset or "", `weights_version` is valid in this process only.
        """
        self.host = host or HostPages(parts, sizes.whole, ledger.host_slots)
        self.parts, self.rows, self.ledger, self.sizes = parts, rows, ledger, sizes
        self.adapters = parts.adapters
        if parts.adapters is not None:
            parts.adapters.write = self._set_adapter
        self.executor: Executor = (parts.make_executor or LocalExecutor)(parts)
        self.memory = plan_memory(parts, sizes)
        self.compilations = self.executor.compilations
        widths = {g: pages_for(rows.max_model_len, s.page_size) for g, s in sizes.first.items()}
        self._sent = TableCopies(ledger, rows.max_num_reqs, widths)
        self._first = self._shapes = sizes.first
        self._has_arrays = False
        self._num_updates = 0
        self._identify, self._identity = identify, ""
        self._identified: int | None = None
        """The number of updates for which `_identity` was computed."""
        self._swapped = ""
        self.geometry: Geometry = sizes.geometry(sizes.first)

    @property
    def layouts(self) -> Mapping[str, CacheLayout]:
        """The layouts of the arrays that the engine has now, by cache group."""
        return self.parts.layouts(self._shapes)

    @property
    def weights_version(self) -> str:
        parts = self.parts
        kv_dtypes = [spec.cache_dtype for spec in parts.model.info.attention.values()]
        identity = self._find_identity()
        if identity:
            return f"{identity}{self._swapped}"
        dtypes = f"{parts.weight_format} {parts.dtype} {kv_dtypes}"
        return f"{parts.config.model} {dtypes} {self._num_updates}"

    def _find_identity(self) -> str:
        """What `identify` returns, computed once for each version of the weights, when the engine
        has arrays; "" before.
        """
        if self._identify is not None and self._identified != self._num_updates:
            if not self._has_arrays:
                return ""
            self._identity = self._identify(self.executor)
            self._identified = self._num_updates
        return self._identity

    def set_weights(self, weights: Mapping[str, np.ndarray | jax.Array]) -> None:
        """Replace weights by path, each with an array of the same shape and dtype. Cached prefixes
        of the former weights are not found any more. The centres of keys are measured again, unless
        they are among `weights`. InternalError while rows are running.
        """
        self._no_rows("weights are replaced")
        base = {n: one for n, one in weights.items() if not n.startswith(ADAPTER_WEIGHTS)}
        self.executor.run(SetWeights({**base, **self._centers_after(base)}))
        self._num_updates += 1

    def _centers_after(
        self, weights: Mapping[str, np.ndarray | jax.Array]
    ) -> Mapping[str, jax.Array]:
        """The centres of keys after a change of weights; {} where it has them, or no cache does."""
        paths = [path for path in self.parts.model.weight_specs() if path.startswith(KEY_CENTERS)]
        if not paths or any(path in weights for path in paths):
            return {}
        after = merge_weights(self.executor.weights(), weights)
        return self.parts.measured_centers(
            {path: one for path, one in after.items() if not path.startswith(ADAPTER_WEIGHTS)}
        )

    def _set_adapter(self, slot: int, arrays: Mapping[str, np.ndarray]) -> None:
        self.executor.run(SetAdapter(slot, arrays))

    def make_arrays(self) -> None:
        if not self._has_arrays:
            ACCOUNT.promise(self, self.memory, self.parts.placement.devices)
            self._set_shapes(self._first)
            self.executor.run(Make(self._shapes))
            self._has_arrays = True

    def save_pages(self) -> None:
        if not self._has_arrays or self.host.keeper is None:
            return
        try:
            self.ledger.save_pages()
            self.host.run(self.ledger.take_moves(), self.executor)
            self.host.finish()
        except Exception:  # whoever closes an engine may have more to close
            log.exception("cached pages were not saved, because the device or their keeper failed")

    def release_memory(self) -> float | None:
        if not self._has_arrays:
            return None
        due_s = None
        if self.parts.platform.demand_memory:
            due_s = self.ledger.drop_idle()
            moves = self.ledger.take_moves()
            if moves:  # of pages that are free as soon as their content is elsewhere
                self.host.run(moves, self.executor)
            self.host.finish()
            pages = {group: ids for group, ids in self.ledger.free_pages().items() if len(ids)}
            if pages:
                self.executor.run(ClearPages(pages))
        trim_heap()
        return due_s

    def close(self) -> None:
        try:
            self.save_pages()
        finally:
            self.host.close()
            self.executor.close()
            self._has_arrays = False
            ACCOUNT.release(self)

    def _no_rows(self, what: str) -> None:
        if self.rows.num_reqs:
            raise InternalError(f"{what} while {self.rows.num_reqs} rows are running")

    def drop_arrays(self) -> None:
        self._no_rows("the cache is dropped")
        self.ledger.forget()
        self.host.forget()
        if self._has_arrays:
            self.executor.run(Drop())
            self._has_arrays = False

    def _set_shapes(self, shapes: Shapes) -> None:
        """Record new array sizes; the page tables are new too."""
        self._shapes, self.geometry = shapes, self.sizes.geometry(shapes)
        self.ledger.resized(shapes)
        self._sent.forget()

    def _grow(self, shapes: Shapes) -> None:
        if shapes != self._shapes:
            self.executor.run(Grow(shapes))
            self._set_shapes(shapes)

    def _catch_up(self, leases: Sequence[Lease], demand: Demand = NO_DEMAND) -> None:
        """Grow the arrays to what the ledger, the leases and the demand need, and make the moves
        that the ledger has ordered.
        """
        shapes = self.sizes.wanted(self._shapes, leases, demand, self.ledger)
        if shapes != self._shapes:
            self._grow(shapes)
        moves = self.ledger.take_moves()
        if moves:
            self.host.run(moves, self.executor)

    def step(self, plan: StepPlan) -> Pending:
        self._catch_up([row.lease for row in plan.rows], plan.demand)
        key = self._key(plan)
        if self.executor.serves(key):
            command = self._command(plan, key)
            if command.program.bucket != key.bucket:
                self._note_stand_ins(key, (command,))
            return self.executor.run(command)
        parts, commands, each = self._parts(plan), list[Step](), []
        for part in parts:
            commands.append(self._command(part.plan, self._key(part.plan)))
            each.append(self.executor.run(commands[-1]))
        self._note_stand_ins(key, commands)
        return PendingParts(parts, each) if len(each) > 1 else each[0]

    def _note_stand_ins(self, key: StepKey, commands: Sequence[Step]) -> None:
        """Count a step once for each other step as which it ran."""
        others = [one.program for one in commands if one.program.bucket != key.bucket]
        for ran in set(map(plain, others)):
            self.compilations.stand_ins[plain(key), ran] += 1

    def _key(self, plan: StepPlan) -> StepKey:
        """The program that a step asks for, whatever its rows need of a sampler."""
        rows, table, geometry = plan.rows, self.rows, self.geometry
        own = [row.row for row in rows]
        adapts = bool(table.adapters[own].any())
        if plan.verifies:
            key = geometry.verify_key(len(rows))
        elif plan.is_decode:
            key = geometry.decode_key(len(rows), _longest(plan))
        else:
            num_tokens = sum([row.num_tokens for row in rows])
            no_prefix = max([row.num_computed for row in rows]) == 0
            bucket = geometry.prefill_bucket(len(rows), num_tokens, no_prefix=no_prefix)
            full_vocab = True in [row.returns_prompt for row in rows] or wants_all(
                [row for row in rows if row.samples], table
            )
            return StepKey(
                "prefill",
                bucket,
                full_vocab=full_vocab,
                pools=True in [row.pools for row in rows],
                embeds=True in [takes_embeds(row, table) for row in rows],
                adapts=adapts,
            )
        full_vocab = wants_all(rows, table)
        if full_vocab or adapts:
            key = dataclasses.replace(key, full_vocab=full_vocab, adapts=adapts)
        return key

    def _parts(self, plan: StepPlan) -> list[StepPart]:
        """The parts of a step for which no program is compiled yet, of the largest size that one
        serves; the whole step where none does.
        """
        geometry, serves = self.geometry, self.executor.serves

        def served(parts: Sequence[StepPart]) -> list[StepPart]:
            # The last part may be so small that it gets none of the programs of the others.
            return [
                smaller
                for part in parts
                for smaller in (
                    [part] if serves(self._key(part.plan)) else part.split(self._parts(part.plan))
                )
            ]

        if plan.is_decode:
            for num in geometry.row_sizes(verifies=plan.verifies):
                key = (
                    geometry.verify_key(num)
                    if plan.verifies
                    else geometry.decode_key(num, _longest(plan))
                )
                if num < len(plan.rows) and serves(key):
                    return served(decode_parts(plan, num))
        else:
            whole = self._key(plan).bucket.tokens
            for num, tokens in geometry.prefill_sizes():
                bucket = geometry.prefill_bucket(num, tokens, no_prefix=False)
                if tokens < whole and serves(StepKey("prefill", bucket)):
                    return served(prefill_parts(plan, num, tokens))
        return [StepPart(plan, tuple(range(len(plan.rows))))]

    def _command(self, plan: StepPlan, key: StepKey) -> Step:
        """The command of a step. What it needs in its rows is written to them here."""
        rows, table = plan.rows, self.rows
        # Rows that do not sample count too: FULL records their history.
        own = np.asarray([row.row for row in rows], np.int32)
        key = self.executor.choose(key, needs_of(table, own))
        if not plan.is_decode:
            self.executor.run(prefill_writes(rows, table))
            width = self.parts.model.info.hidden_size
            return prefill_command(rows, key, table, self._sent, width)
        updates = tuple([RowUpdate(row.row, row.update) for row in rows if row.update])
        if updates:
            self.executor.run(WriteRows(updates=updates))
        if plan.verifies:
            most = drafts_a_step(self.parts, key.bucket)
            return verify_command(rows, key, most, table, self._sent)
        places = own if key.bucket.rows_are_pages else np.arange(len(rows), dtype=np.int32)
        return decode_command(rows, key, places, plan.num_steps, table, self._sent)

    def warmup(self, progress: Report | None = None) -> int:
        keys = self._whole_steps()
        num_movers = self._prepare_moves()
        return num_movers + self.executor.compile_all(keys, progress, copies=self.ledger.forks)

    def begin_warmup(self, progress: Report | None = None) -> LaterCompilation | None:
        keys = self._whole_steps()
        self._prepare_moves()
        return self.executor.compile_first(keys, progress, copies=self.ledger.forks)

    def warmup_steps(self) -> tuple[Sequence[StepKey], Sequence[StepKey]]:
        keys = self.sizes.geometry(self.sizes.whole).all_steps()
        return in_order(keys, self.parts.config, self.parts.free_padding_rows)

    def _prepare_moves(self) -> int:
        """Compile the moves to the host, and identify the weights. Returns the number of programs
        of the moves.
        """
        self._find_identity()
        return self.host.compile(self.executor)

    def _whole_steps(self) -> list[StepKey]:
        """All steps over the whole cache. The cache has its whole size from now on, so that the
        compiled programs fit it.
        """
        self._first = self.sizes.whole
        self._grow(self._first)
        return self.geometry.all_steps()

    def attention_problems(self) -> list[AttentionProblem]:
        whole = self.sizes.whole
        return self.sizes.geometry(whole).problems(
            self.parts.kv_layouts(whole), drafts_are_rows=self.parts.drafts_are_rows
        )

    def _pages(self, lease: Lease) -> dict[str, np.ndarray]:
        """The pages of a lease by group, int32 [pages]."""
        pages = {}
        for group, shape in self._shapes.items():
            table = np.zeros((1, pages_for(lease.capacity, shape.page_size)), np.int32)
            self.ledger.write_table(group, [lease], table)
            pages[group] = table[0]
        return pages

    def take(self, lease: Lease) -> RowState:
        self._catch_up([lease])
        token_ids = self.rows.token_ids[lease.row, : self.rows.num_tokens[lease.row]]
        return self.executor.run(Take(lease.row, self._pages(lease), token_ids.copy()))

    def put(self, lease: Lease, state: RowState) -> None:
        pages = self.ledger.resume(lease, state.num_cached)
        self._catch_up([lease])
        self.executor.run(Put(lease.row, pages or self._pages(lease), state))

    def row_values(self, lease: Lease) -> tuple[RowValues, ...]:
        state = self.executor.run(Take(lease.row, {}, np.zeros(0, np.int32)))
        return tuple(values_of(state))

    @property
    def shadow_report(self) -> Any:
        return self.executor.shadow_report

    def swap(
        self, parts: Mapping[str, object], *, returns_logits: bool = False
    ) -> Callable[[], None]:
        before, first, swapped = self.sizes, self._first, self._swapped
        changed = self.parts.changed(parts) if parts else self.parts
        names = {setting: part for setting, part in parts.items() if isinstance(part, str)}
        if returns_logits or len(names) < len(parts):
            swap_back = self.executor.swap(
                dataclasses.replace(changed, returns_logits=returns_logits)
            )
        else:
            self.executor.run(SetParts(names))
            swap_back = functools.partial(self.executor.run, SetParts({}))
        self.drop_arrays()
        self._swapped = f" {uuid.uuid4()}"  # no other engine finds the pages of these parts
        self.sizes = dataclasses.replace(before, compact_decode=changed.compact_decode)
        self.make_arrays()

        def undo() -> None:
            self.drop_arrays()
            swap_back()
            self.sizes, self._first, self._swapped = before, first, swapped
            self.make_arrays()

        return undo


def _longest(plan: StepPlan) -> int:
    """The longest context of a decode step's rows after it."""
    steps = plan.num_steps
    return max([min(row.num_computed + steps, row.lease.capacity) for row in plan.rows])
