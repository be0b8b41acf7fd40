"""The checks of one attention kernel: its cases, each in a layout and at shapes that it
supports.
"""

from __future__ import annotations

import dataclasses
import functools
import unittest
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from enginebay.contracts.cache import KVLayout
from enginebay.ops.bound import AttentionImpl
from enginebay.ops.caps import Caps, Env
from enginebay_testing.attention_axes import DEVICE, INTERPRETED, attention_covering_cases
from enginebay_testing.attention_cases import (
    GROUPS,
    HEAD_DIMS,
    IN_THE_DEFAULT_CHECK,
    PAGE_SIZES,
    ROWS,
    AttentionCase,
    attention_cases,
)
from enginebay_testing.attention_runs import (
    DEVICE_RUNS,
    INTERPRETED_RUNS,
    OFTEN_INTERPRETED,
    AttentionRuns,
    check_case,
)
from enginebay_testing.compile_suite import attention_programs
from enginebay_testing.op_kit import CaseBudget, OpCase, OpKit
from enginebay_testing.traits import traits_of


@dataclasses.dataclass(frozen=True)
class AttentionCheck:
    """A case in a layout, and the function that checks the kernel on it. SkipTest gives the reason
    why the kernel does not support the case.

    The `representative` cases cover every pair of values of different axes (see `attention_axes`).
    """

    name: str
    case: AttentionCase
    run: Callable[[], None]
    representative: bool


def attention_checks(
    kernel: AttentionImpl,
    env: Env,
    layouts: Sequence[type[KVLayout]],
    *,
    interpreted: bool = False,
    triples: bool = True,
    num_seeds: int = 1,
    seed: int = 1,
) -> Iterator[AttentionCheck]:
    """Return the checks of a kernel, small ones first: the named cases of the default check, all
    pairs, the other named cases, and all triples if requested.

    Each constructed case runs with `num_seeds` sets of arrays, or more; the second has `seed`. On a
    CPU, XLA compiles the cases of pairs with few optimizations, and the others as it does for
    users.
    """

    def constructed(*, triples: bool) -> Iterator[AttentionCheck]:
        return constructed_checks(
            kernel,
            env,
            layouts,
            interpreted=interpreted,
            triples=triples,
            num_seeds=num_seeds,
            seed=seed,
        )

    named = list(named_checks(kernel, env, layouts))
    yield from (check for check in named if check.representative)
    found = set()
    for check in constructed(triples=False):
        found.add(check.name)
        yield check
    yield from (check for check in named if not check.representative)
    if triples:
        yield from (check for check in constructed(triples=True) if check.name not in found)


def constructed_checks(
    kernel: AttentionImpl,
    env: Env,
    layouts: Sequence[type[KVLayout]],
    *,
    interpreted: bool = False,
    triples: bool = False,
    num_seeds: int = 1,
    seed: int = 1,
) -> Iterator[AttentionCheck]:
    """Return the cases that cover every pair, or triple, of values that the kernel declares, with
    lengths that suit the kernel.
    """
    kinds = {layout.__name__: layout for layout in layouts}
    reach = INTERPRETED if interpreted else DEVICE
    cases = list(attention_covering_cases(kernel, env, kinds, reach, triples=triples))
    shortest = _shortest([case for case, _ in cases])
    for case, layout in cases:
        runs = DEVICE_RUNS
        if interpreted:
            runs = OFTEN_INTERPRETED if case.name in shortest else INTERPRETED_RUNS
        run = functools.partial(
            _run_constructed,
            kernel,
            case,
            layout,
            env,
            dataclasses.replace(
                runs, num_seeds=num_seeds, spares=not triples, seed=seed, quickly=not triples
            ),
        )
        yield AttentionCheck(
            f"{case.name}[{layout.__name__}]", case, run, representative=not triples
        )


def _shortest(cases: Sequence[AttentionCase]) -> set[str]:
    """Return the name of the case with the fewest tokens, or an empty set without cases."""
    return {min(cases, key=lambda c: sum(c.kv_lens) + 10 * sum(c.q_lens)).name} if cases else set()


def _run_constructed(
    kernel: AttentionImpl,
    case: AttentionCase,
    layout: type[KVLayout],
    env: Env,
    runs: AttentionRuns,
) -> None:
    _refuse(kernel, case, layout, env)
    check_case(kernel, case, layout, env, runs)


def named_checks(
    kernel: AttentionImpl, env: Env, layouts: Sequence[type[KVLayout]]
) -> Iterator[AttentionCheck]:
    """Return the cases of `attention_cases` in the first layout, the plain ones in every layout,
    and rows alone and with neighbours in each mode. The default check has the cases of
    IN_THE_DEFAULT_CHECK.

    A case whose head_dim or page size the kernel does not claim gets the next larger size that the
    kernel claims, and its name says so.
    """
    from enginebay_testing import kernels

    for plain in attention_cases():
        case = fitted(plain, kernel.caps)
        everywhere = plain.name.endswith(("_paged_float32", "_paged_bfloat16"))
        always = plain.name in IN_THE_DEFAULT_CHECK
        once = functools.partial(kernels.check_attention, quickly=always)
        held: list[tuple[str, Callable[..., None], type[KVLayout]]] = [
            (f"{case.name}[{layout.__name__}]", once, layout)
            for layout in (layouts if everywhere else layouts[:1])
        ]
        if plain.name.endswith("_paged_float32"):
            name = f"rows_are_independent[{case.mode}]"
            held += [(name, kernels.check_rows_are_independent, layout) for layout in layouts[:1]]
        for name, check, layout in held:
            run = functools.partial(_run, check, kernel, case, layout, env)
            yield AttentionCheck(name, case, run, representative=always)


def _run(
    held: Callable[..., None],
    kernel: AttentionImpl,
    case: AttentionCase,
    layout: type[KVLayout],
    env: Env,
) -> None:
    _refuse(kernel, case, layout, env)
    held(kernel, case, layout, env)


def _refuse(kernel: AttentionImpl, case: AttentionCase, layout: type[KVLayout], env: Env) -> None:
    """Raise SkipTest with the kernel's reason if it does not support a case."""
    from enginebay_testing import kernels

    reason = kernels.why_not_case(kernel, case, layout, env)
    if reason is not None:
        raise unittest.SkipTest(reason)


def fitted(case: AttentionCase, caps: Caps) -> AttentionCase:
    """Return the case with the next larger head_dim, group and page size that a kernel claims, and
    with no more rows. A size that the kernel claims, or has no replacement, stays.
    """
    head_dim = _next(case.spec.head_dim, HEAD_DIMS, caps.head_dim)
    if head_dim != case.spec.head_dim:
        spec = dataclasses.replace(case.spec, head_dim=head_dim)
        case = dataclasses.replace(case, name=f"{case.name}-dim_{head_dim}", spec=spec)
    group = _next(case.spec.group, GROUPS, caps.group)
    if group != case.spec.group:
        spec = dataclasses.replace(case.spec, num_q_heads=case.spec.num_kv_heads * group)
        case = dataclasses.replace(case, name=f"{case.name}-group_{group}", spec=spec)
    rows = next((n for n in ROWS if caps.rows(n + case.padding_rows)), len(case.q_lens))
    if rows < len(case.q_lens):
        lens: dict[str, Any] = {"q_lens": case.q_lens[:rows], "kv_lens": case.kv_lens[:rows]}
        case = dataclasses.replace(case, name=f"{case.name}-rows_{rows}", **lens)
    if case.contiguous or case.rows_are_pages:
        return case
    page_size = _next(case.page_size, PAGE_SIZES, caps.page_size)
    if page_size != case.page_size:
        capacity = -(-case.capacity // page_size) * page_size
        name = f"{case.name}-page_{page_size}"
        case = dataclasses.replace(case, name=name, page_size=page_size, capacity=capacity)
    return case


def _next(value: int, sizes: Sequence[int], claims: Callable[[int], bool]) -> int:
    if claims(value):
        return value
    return next((size for size in sizes if size > value and claims(size)), value)


def _cases(
    kernel: AttentionImpl, env: Env, layouts: Sequence[type[KVLayout]], extent: CaseBudget
) -> Iterator[OpCase]:
    for check in attention_checks(
        kernel,
        env,
        layouts,
        interpreted=extent.interpreted,
        triples=extent.triples,
        num_seeds=max(1, extent.num_seeds - 1),  # other scores are another set
        seed=extent.seed,
    ):
        traits = traits_of(check.case.spec, check.case.bucket.mode, check.case.actual_page_size)
        yield OpCase(check.name, check.run, check.representative, traits)


KIT = OpKit(_cases, attention_programs, {"layouts": "layout"})
"""The kit of the op attention."""
