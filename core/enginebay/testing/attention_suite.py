"""The checks of one attention kernel: which cases it is held to, in which of its layouts, at shapes that it can do."""

from __future__ import annotations

import dataclasses
import functools
import unittest
from collections.abc import Callable, Iterator, Sequence

from enginebay.cache import KVLayout
from enginebay.ops.bound import AttentionImpl
from enginebay.ops.caps import Caps, Env
from enginebay.testing.attention_cases import (
    HEAD_DIMS,
    PAGE_SIZES,
    REPRESENTATIVE,
    AttentionCase,
    attention_cases,
)


@dataclasses.dataclass(frozen=True)
class AttentionCheck:
    """A case in a layout, and the function that holds the kernel to it; SkipTest says why the kernel does not do it."""

    name: str
    case: AttentionCase
    run: Callable[[], None]
    representative: bool


def attention_checks(
    kernel: AttentionImpl, env: Env, layouts: Sequence[type[KVLayout]]
) -> Iterator[AttentionCheck]:
    """Every case in the first layout, the plain ones in all; rows are compared bit by bit in one case of each mode.

    A case whose head_dim or page size the kernel does not claim is given the next larger one that it does, and bears it in its
    name: what the case is about can be seen at any size.
    """
    from enginebay.testing import kernels

    for plain in attention_cases():
        case = fitted(plain, kernel.caps)
        everywhere = plain.name.endswith(("_paged_float32", "_paged_bfloat16"))
        held: list[tuple[str, Callable[..., None], type[KVLayout]]] = [
            (f"{case.name}[{layout.__name__}]", kernels.check_attention, layout)
            for layout in (layouts if everywhere else layouts[:1])
        ]
        if plain.name.endswith("_paged_float32"):
            name = f"rows_are_independent[{case.mode}]"
            held += [(name, kernels.check_rows_are_independent, layout) for layout in layouts[:1]]
        for name, check, layout in held:
            short = plain.name in REPRESENTATIVE and layout is layouts[0]
            run = functools.partial(_run, check, kernel, case, layout, env)
            yield AttentionCheck(name, case, run, representative=short)


def _run(
    held: Callable[..., None], kernel: AttentionImpl, case: AttentionCase, layout: type[KVLayout], env: Env
) -> None:
    from enginebay.testing import kernels

    reason = kernels.why_not(kernel, case, layout, env)
    if reason is not None:
        raise unittest.SkipTest(reason)
    held(kernel, case, layout, env)


def fitted(case: AttentionCase, caps: Caps) -> AttentionCase:
    """The case with the next larger head_dim and page size that a kernel claims; as it is where it claims its own, or none."""
    head_dim = _next(case.spec.head_dim, HEAD_DIMS, caps.head_dim)
    if head_dim != case.spec.head_dim:
        spec = dataclasses.replace(case.spec, head_dim=head_dim)
        case = dataclasses.replace(case, name=f"{case.name}-dim_{head_dim}", spec=spec)
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
