"""StepPlanner: turns a decision of the scheduler into the plans of its steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from enginebay.config import EngineConfig
from enginebay.contracts.engine import Engine, RowPlan, StepPlan
from enginebay.contracts.proposer import MAX_VERIFIED_ROWS
from enginebay.contracts.scheduler import Decision
from enginebay.errors import InternalError
from enginebay.serving.admission import Admission
from enginebay.serving.guided import must_wait, next_mask
from enginebay.serving.running import Running
from enginebay.serving.speculation import Speculation

PlannedSteps = Iterator[tuple[StepPlan, list[Running]]]
"""Plans of steps, each with the requests of its rows. Each step is launched before the next one is
planned, because the next plan depends on it.
"""


class StepPlanner:
    """Plans prefill, decode and verify steps. Belongs to the loop's thread."""

    def __init__(
        self,
        engine: Engine,
        config: EngineConfig,
        admission: Admission,
        speculation: Speculation | None,
        commit_all: Callable[[], None],
    ) -> None:
        """`commit_all` reads every launched step: without `overlap_execution`, before the next one
        is planned.
        """
        self.engine = engine
        self.config = config
        self.admission = admission
        self.requests = admission.requests
        self.speculation = speculation
        self.commit_all = commit_all
        self.current_requests: Sequence[Running] | None = None
        """The requests of the step that is being planned, launched or read; they end if it
        fails.
        """
        self._mixes = config.mixed_steps == "on" and speculation is None

    def steps(self, decision: Decision) -> PlannedSteps:
        """The steps of a decision, in their order: prefills, then decodes. With mixed steps, the
        first prefill contains the decoding rows.
        """
        num_steps, decoding = self.reserve(decision)  # before admission uses the free cache
        if decision.prefill:
            beside = decoding if self._mixes else []
            has_prefilled = False
            for planned in self._prefills(decision, beside):
                has_prefilled = True
                yield planned
            if has_prefilled and not self.config.overlap_execution:
                self.commit_all()
            if has_prefilled and beside:
                return
        if decoding:
            yield from self._decodes(decoding, num_steps)

    def _prefills(self, decision: Decision, beside: Sequence[Running]) -> PlannedSteps:
        """A step with the chunks that can run now and the decoding rows `beside` them; then a step
        with completions whose prompt is in the cache after the first step.

        Other completions are held back, unless nothing at all would be launched: no scheduler can
        stall the loop.
        """
        find = self.requests.find
        asked = [(t, num) for r, num in decision.prefill if (t := find(r)) is not None]
        left = [(t, num) for t, num in asked if not t.is_late]
        demand = self.requests.demand()
        launched = False
        for hold in (True, True, False):
            if launched and not hold:
                break
            if not self.config.overlap_execution:
                self.commit_all()
            chunks, left = self.admission.admit_chunks(left, hold=hold)
            plans = tuple([self._plan_chunk(*chunk) for chunk in chunks])
            if plans:
                others = () if launched else beside
                decodes = [_plan_decode(t, t.max_steps(1), decodes=True) for t in others]
                rows = [*others, *[tracked for tracked, _ in chunks]]
                yield StepPlan((*decodes, *plans), 0, demand), rows
                launched = True
            for tracked, _ in chunks:
                self.admission.set_computed(tracked, tracked.num_computed)
            if not left:
                break

    @property
    def _drafting(self) -> Speculation | None:
        """What drafts the next tokens of rows; None without a proposer, and for too many rows."""
        return self.speculation if len(self.requests.running) <= MAX_VERIFIED_ROWS else None

    def reserve(self, decision: Decision) -> tuple[int, list[Running]]:
        """The number of decode steps, and the rows for which cache could be reserved."""
        if not decision.decode:
            return 0, []
        running = self.requests.running
        found = [t for r in decision.decode if (t := running.get(r)) and t.num_new_left > 0]
        chosen = [t for t in found if t.constraint is None or not must_wait(t)]
        if self.speculation is not None and (drafting := self._drafting) is not None:
            chosen = [t for t in chosen if not drafting.waits(t)]
        most = max([t.num_new_left for t in chosen], default=0)
        steps = min(decision.decode_steps, self.config.decode_steps, most)
        if chosen and steps < 1:
            raise InternalError(
                f"the scheduler decodes {decision.decode_steps} steps, not 1 or more"
            )
        if True in [t.request.sampling.returns_all for t in chosen]:
            steps = 1  # [vocab] values per token would need much memory
        reserve = self.admission.reserve
        able = [t for t in chosen if reserve(t, t.num_tokens - 1 + t.max_steps(steps))]
        return steps, able

    def _decodes(self, rows: Sequence[Running], num_steps: int) -> PlannedSteps:
        """Steps of decoding rows: first rows with drafts, then guided rows, whose tokens are read
        while the others run, then the others.
        """
        if self.speculation is not None and (drafting := self._drafting) is not None:
            rows, plans, drafted = self._drafted(drafting, rows)
            if plans:  # first, because it is then read first, and its rows wait for it
                most = max([len(plan.draft_token_ids) for plan in plans])
                yield StepPlan(tuple(plans), most + 1, self.requests.demand()), drafted
                if not self.config.overlap_execution:
                    self.commit_all()
            num_steps = drafting.fewer_steps(rows, num_steps)
        guided = [t for t in rows if t.constraint is not None] if num_steps > 1 else []
        if guided:
            yield self._plan_decodes(guided, 1)
            if not self.config.overlap_execution:
                self.commit_all()
            rows = [t for t in rows if t.constraint is None]
        if rows:
            yield self._plan_decodes(rows, num_steps)

    def _plan_decodes(
        self, rows: Sequence[Running], num_steps: int
    ) -> tuple[StepPlan, list[Running]]:
        plans = tuple([_plan_decode(t, t.max_steps(num_steps)) for t in rows])
        return StepPlan(plans, num_steps, self.requests.demand()), list(rows)

    def _drafted(
        self, speculation: Speculation, rows: Sequence[Running]
    ) -> tuple[list[Running], list[RowPlan], list[Running]]:
        """Draft tokens of rows. Returns the rows without drafts or without cache for them; the
        plans of the other rows; and these rows.
        """
        others: list[Running] = []
        plans: list[RowPlan] = []
        chosen: list[Running] = []
        for tracked in rows:
            self.current_requests = [tracked]
            drafts = speculation.drafts(tracked)
            self.current_requests = None
            reserve = self.admission.reserve
            has_room = bool(drafts) and reserve(tracked, tracked.num_tokens + len(drafts))
            if not has_room and len(drafts) > speculation.most:
                drafts = drafts[: speculation.most]  # the drafts of one pass
                has_room = reserve(tracked, tracked.num_tokens + len(drafts))
            if not has_room:
                others.append(tracked)
                continue
            plans.append(_plan_decode(tracked, len(drafts) + 1, drafts))
            chosen.append(tracked)
        return others, plans, chosen

    def _plan_chunk(self, tracked: Running, num_tokens: int) -> RowPlan:
        lease, start = tracked.row_lease, tracked.num_computed
        count = min(num_tokens, self.admission.chunk_end(tracked) - start)
        if count < 1:
            left = tracked.num_prefill - start
            raise InternalError(
                f"the scheduler prefills {num_tokens} tokens of a request with {left} left, not 1 "
                "or more of each"
            )
        tracked.num_computed += count
        is_last = tracked.num_computed == tracked.num_prefill
        tracked.num_launched += is_last
        pooling = tracked.request.pooling
        samples = is_last and tracked.request.generates
        pools = pooling == "mean" or (is_last and pooling == "last")
        if not self.admission.reserve(tracked, tracked.num_computed):
            raise InternalError(
                f"the scheduler promised {tracked.num_computed} tokens of cache that are not free"
            )
        mask = next_mask(tracked) if samples and tracked.constraint is not None else ()
        asks = tracked.returns_prompt
        return RowPlan(
            lease.row, lease, start, count, samples, mask, returns_prompt=asks, pools=pools
        )


def _plan_decode(
    tracked: Running, num_new: int, drafts: tuple[int, ...] = (), *, decodes: bool = False
) -> RowPlan:
    """The plan of a row that gets up to `num_new` tokens."""
    lease, start = tracked.row_lease, tracked.num_tokens - 1
    mask = () if tracked.constraint is None else next_mask(tracked)
    tracked.num_launched += num_new
    return RowPlan(lease.row, lease, start, 1, True, mask, decodes=decodes, draft_token_ids=drafts)
