"""Virtual token counters: what each tenant has been served, as an immutable record and two
functions on it.

Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024. A tenant that is served pays
for it; a tenant that comes back to the queue is lifted to the least of those that are in it, so
that nobody saves up service by staying away. Counters of two tenants that both have requests
waiting then differ by a bounded amount.
"""

from __future__ import annotations

import dataclasses
import math

from enginebay.scheduler import Decision, SchedulerView, WaitingView
from enginebay_schedulers.batch import One, everybody


@dataclasses.dataclass(frozen=True, slots=True)
class TokenWeights:
    """What a token costs: a prompt token that is processed, and a generated one."""

    input: float
    output: float


@dataclasses.dataclass(frozen=True, slots=True)
class Account:
    """A tenant's service so far. `queued`: it had requests left waiting after the last decision."""

    tenant: str
    counter: float = 0.0
    admitted_s: float = -math.inf
    """When a request of it was last admitted."""
    queued: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Counters:
    """The accounts, and up to how many tokens each request that was ever admitted is paid for."""

    accounts: tuple[Account, ...] = ()
    paid: tuple[tuple[str, int], ...] = ()
    last: str = ""
    """The tenant that was admitted last: whoever comes back to an empty queue is lifted to its
    counter.
    """


def settle(
    view: SchedulerView, state: Counters, weights: TokenWeights, forget_s: float
) -> Counters:
    """The counters before a decision: corrected by what the view shows, and with tenants that came
    back lifted.

    An account is forgotten when its tenant has no request and none was admitted for `forget_s`; not
    that of the tenant that was admitted last.
    """
    present = {one.request_id: one for one in everybody(view)}
    tenants = {one.tenant: None for one in present.values()}
    accounts = {a.tenant: a for a in state.accounts if _is_kept(a, view, state, tenants, forget_s)}
    accounts |= {tenant: Account(tenant) for tenant in tenants if tenant not in accounts}
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
    """The counters after a decision: its tokens are paid for by those who get them.

    A row that a stop token ends has paid for the rest of its steps too. What is computed again
    after a preemption is not paid twice.
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
        Account(t, counter, admitted[t], t in waiting) for t, counter in counters.items()
    )
    return Counters(accounts, tuple(paid.items()), last)


def _is_kept(
    account: Account,
    view: SchedulerView,
    state: Counters,
    tenants: dict[str, None],
    forget_s: float,
) -> bool:
    recent = view.now_s - account.admitted_s <= forget_s
    return account.tenant in tenants or account.tenant == state.last or recent


def _num_tokens(one: One) -> int:
    return one.num_prompt_tokens if isinstance(one, WaitingView) else one.num_tokens
