"""Faults planted into the attention kernel are found away from any device: each breaks one function
of it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

from enginebay.ops.spec import AttnSpec
from enginebay_pallas import attention_kernel
from enginebay_pallas.attention import attention
from enginebay_pallas.layout import TpuRpaLayout
from enginebay_testing import kernels
from enginebay_testing.attention_inputs import make_problem
from enginebay_testing.kernels import AttentionCase

pytestmark = pytest.mark.long

# Two blocks of two pages for one row: the smallest that prefetches.
DECODE = AttentionCase(
    "faults_decode",
    "decode",
    (1,),
    (28,),
    AttnSpec(1, 1, 128),
    page_size=8,
    capacity=32,
    padding_rows=0,
)
PREFILL = dataclasses.replace(
    DECODE, name="faults_prefill", mode="prefill", q_lens=(20,), kv_lens=(20,)
)


def check(case: AttentionCase) -> None:
    kernels.check_attention(attention.interpreted(), case, TpuRpaLayout)


@dataclasses.dataclass(frozen=True)
class Moved:
    """A page table whose entries are off."""

    table: Any
    by: int

    def __getitem__(self, index: Any) -> Any:
        return self.table[index] + self.by


@dataclasses.dataclass(frozen=True)
class Replaced:
    """A page table with one page in all places."""

    page_id: int

    def __getitem__(self, index: Any) -> Any:
        return self.page_id


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Callable[..., Any]], None]:
    """Replaces a function of the kernel by one that is given the original first."""

    def replace(name: str, fault: Callable[..., Any]) -> None:
        original = getattr(attention_kernel, name)
        monkeypatch.setattr(
            attention_kernel, name, lambda **arguments: fault(original, **arguments)
        )

    return replace


@pytest.mark.long
@pytest.mark.parametrize("case", [DECODE, PREFILL], ids=lambda case: case.mode)
def test_the_kernel_itself_passes(case: AttentionCase) -> None:
    check(case)


def test_a_missing_wait_is_found(broken: Callable[..., None]) -> None:
    def fault(original: Callable[..., Any], act: Any, **others: Any) -> None:
        def forgetful(copy: Any) -> None:
            if act.__code__.co_names == ("start",):
                act(copy)

        original(act=forgetful, **others)

    broken("for_each_read", fault)
    with pytest.raises(AssertionError, match="off by nan"):
        check(DECODE)


@pytest.mark.long
def test_a_mask_that_is_off_by_one_is_found(broken: Callable[..., None]) -> None:
    def fault(original: Callable[..., Any], span: Any, **others: Any) -> Any:
        return original(span=span._replace(position=span.position + 1), **others)

    broken("attend_block", fault)
    with pytest.raises(AssertionError, match="is off by"):
        check(PREFILL)


@pytest.mark.long
def test_a_page_read_out_of_bounds_is_found(broken: Callable[..., None]) -> None:
    def fault(original: Callable[..., Any], tables: Any, **others: Any) -> None:
        moved = tables._replace(page_table=Moved(tables.page_table, 6))
        original(tables=moved, **others)

    broken("for_each_read", fault)
    with pytest.raises(jax.errors.JaxRuntimeError, match="Out-of-bounds read"):
        check(DECODE)


@pytest.mark.parametrize(
    "case", [DECODE, pytest.param(PREFILL, marks=pytest.mark.matrix)], ids=lambda case: case.mode
)
def test_a_write_outside_the_table_is_found(
    case: AttentionCase, broken: Callable[..., None]
) -> None:
    problem = make_problem(case, TpuRpaLayout)
    used = set(np.asarray(problem.batch.page_table).ravel().tolist())
    free = next(page for page in range(problem.layout.num_pages) if page not in used)

    def fault(original: Callable[..., Any], tables: Any, **others: Any) -> None:
        original(tables=tables._replace(page_table=Replaced(free)), **others)

    broken("for_each_write", fault)
    # Writes of several rows to the one page race too, which is found before the cache is looked at.
    found = (AssertionError, jax.errors.JaxRuntimeError)
    with pytest.raises(found, match=r"unwritten places|races with its own"):
        check(case)


@pytest.mark.long
def test_a_race_between_the_buffers_is_found(broken: Callable[..., None]) -> None:
    def fault(original: Callable[..., Any], slot: Any, **others: Any) -> None:
        original(slot=1 - slot, **others)

    broken("attend_block", fault)
    with pytest.raises(jax.errors.JaxRuntimeError, match="races with its own DMAs"):
        check(DECODE)
