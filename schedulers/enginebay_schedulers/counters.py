"""Virtual token counters: the service that each tenant has received, as an immutable record.

Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024. Service increases the counter
of a tenant. When a tenant returns to the queue, its counter is raised to the smallest counter in
the queue, so that a tenant gains nothing by staying away. The counters of two tenants with waiting
requests then differ by a bounded amount.
"""

from __future__ import annotations

import dataclasses
import math

from enginebay.contracts.scheduler import Decision, SchedulerView, WaitingView
from enginebay_schedulers.batch import One, everybody


@dataclasses.dataclass(frozen=True, slots=True)
class TokenWeights:
    """Cost of a prompt token, and of a generated token."""

    input: float
    output: float


@dataclasses.dataclass(frozen=True, slots=True)
class TenantCounter:
    """The service of a tenant; `queued` says whether it had waiting requests after the last
    decision.
    """

    tenant: str
    counter: float = 0.0
    admitted_s: float = -math.inf
    """Time of the last admission of one of its requests."""
    queued: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Counters:
    """The accounts, and the number of tokens that each admitted request has been charged for."""

    accounts: tuple[TenantCounter, ...] = ()
    paid: tuple[tuple[str, int], ...] = ()
    last: str = ""
    """The tenant that was admitted last. A tenant that returns to an empty queue is raised to its
    counter.
    """


def settle(
    view: SchedulerView, state: Counters, weights: TokenWeights, forget_s: float
) -> Counters:
    """Return the counters before a decision.

    They are corrected by the view, and the counters of returned tenants are raised. An account is
    forgotten when its tenant has no request and none was admitted for `forget_s` seconds. The
    account of the tenant that was admitted last is kept.
    """
    present = {one.request_id: one for one in everybody(view)}
    tenants = {one.tenant: None for one in present.values()}
    accounts = {a.tenant: a for a in state.accounts if _is_kept(a, view, state, tenants, forget_s)}
    accounts |= {tenant: TenantCounter(tenant) for tenant in tenants if tenant not in accounts}
    counters = {tenant: account.counter for tenant, account in accounts.items()}
    paid = {row.request_id: row.num_tokens for row in view.running}
    for name, num in state.paid:
        if name in present:
            paid[name] = _num_tokens(present[name])
            counters[present[name].tenant] += weights.output * (paid[name] - num)
    queue = {one.tenant for one in view.waiting}
    stayed = [counters[tenant] for tenant in queue if accounts[tenant].queued]
    floor = min(stayed, default=counters.get(state.last, 0.0))
    for tenant in queue:
        if not accounts[tenant].queued:
            counters[tenant] = max(counters[tenant], floor)
    settled = tuple(dataclasses.replace(a, counter=counters[a.tenant]) for a in accounts.values())
    return Counters(settled, tuple(paid.items()), state.last)


def charge(
    view: SchedulerView, decision: Decision, state: Counters, weights: TokenWeights
) -> Counters:
    """Return the counters after a decision, with its tokens charged.

    A row that ends at a stop token has been charged for all steps of the decision. Tokens that are
    computed again after a preemption are not charged again.
    """
    present = {one.request_id: one for one in everybody(view)}
    counters = {account.tenant: account.counter for account in state.accounts}
    admitted = {account.tenant: account.admitted_s for account in state.accounts}
    paid, last = dict(state.paid), state.last
    queued = {one.request_id: one.tenant for one in view.waiting}
    for name, num in decision.prefill:
        one = present[name]
        if isinstance(one, WaitingView):
            last = queued.pop(name)
            admitted[last] = view.now_s
            if name not in paid:
                counters[last] += weights.input * one.num_left
                paid[name] = one.num_prompt_tokens
        if num == one.num_left:
            counters[one.tenant] += weights.output
            paid[name] += 1
    decoded = set(decision.decode)
    for row in view.running:
        if row.request_id in decoded:
            num = min(decision.decode_steps, row.max_new_left)
            counters[row.tenant] += weights.output * num
            paid[row.request_id] += num
    waiting = set(queued.values())
    accounts = tuple(
        TenantCounter(t, counter, admitted[t], t in waiting) for t, counter in counters.items()
    )
    return Counters(accounts, tuple(paid.items()), last)


def _is_kept(
    account: TenantCounter,
    view: SchedulerView,
    state: Counters,
    tenants: dict[str, None],
    forget_s: float,
) -> bool:
    recent = view.now_s - account.admitted_s <= forget_s
    return account.tenant in tenants or account.tenant == state.last or recent


def _num_tokens(one: One) -> int:
    return one.num_prompt_tokens if isinstance(one, WaitingView) else one.num_tokens
