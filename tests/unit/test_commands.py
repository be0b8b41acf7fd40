"""Commands: their bytes, and the size of a decode."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from enginebay import SamplingParams
from enginebay.contracts import commands
from enginebay.contracts.cache import Lease
from enginebay.contracts.cache_shape import CacheShape
from enginebay.contracts.commands import CopyPages, Drop, PageIn, PageOut, Step
from enginebay.contracts.engine import GroupState, RowPlan, RowState
from enginebay.contracts.processor import RowValues
from enginebay.contracts.step_key import StepKey
from enginebay.errors import InputError
from enginebay.ops.spec import Bucket
from enginebay_paged.lease_records import GroupPages
from enginebay_paged.ledger import PageLedger
from enginebay_paged.pool import PagePool
from enginebay_paged.store import PageStore
from enginebay_runtime.assemble import TableCopies, decode_command
from enginebay_runtime.codec import decode, encode
from enginebay_runtime.rows import RowTable
from enginebay_testing.driver import request_of

INTS = np.arange(6, dtype=np.int32).reshape(2, 3)
KEY = StepKey("decode", Bucket(2, 2, 4, 1, 64, "decode"), names=frozenset({"a", "b"}))
STATE = RowState(
    INTS[0], 3, 5, {"full": GroupState(0, {"k": np.ones((1, 3, 2, 4), np.float32)})}, {}, "f"
)
FIELDS = RowValues("mask", {"words": np.asarray([1.5, 2], jnp.bfloat16)})
DECODE = commands.DecodeInputs(INTS[0], np.asarray(3, np.int32))
EXAMPLES: tuple[commands.ExecutorCommand[Any], ...] = (
    Step(KEY, DECODE, INTS[1], {"full": INTS}, spans=((0, 2), (2, 1))),
    commands.WriteRows(
        (commands.KnownTokens(1, INTS[0]),),
        (commands.RowUpdate(0, ()),),
        (commands.RowUpdate(2, (FIELDS,)),),
    ),
    CopyPages({"full": INTS[:, :2]}),
    PageOut({"full": INTS[0]}),
    PageIn({"full": INTS[0]}, {"full/0/k": np.zeros((3, 2), jnp.int4)}),
    commands.Make({"full": CacheShape(1, 9, 8)}),
    commands.Grow({"full": CacheShape(1, 25, 8)}),
    commands.ClearPages({"full": INTS[0]}),
    Drop(),
    commands.Take(1, {}, INTS[0]),
    commands.Put(1, {"full": INTS[0]}, STATE),
    commands.SetParts({"attention.decode": "xla"}),
    commands.SetWeights({"norm": np.zeros(3, np.float16)}),
    commands.SetAdapter(2, {"adapters.layers.0.mlp.up.0.a": np.ones((4, 8), np.float32)}),
)


def same(one: Any, other: Any) -> bool:
    """Whether two pytrees of arrays, numbers and names are equal, dtypes included."""
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and one.shape == other.shape and bool((one == other).all())
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if hasattr(one, "__dataclass_fields__"):
        names = one.__dataclass_fields__
        return type(one) is type(other) and all(
            same(getattr(one, name), getattr(other, name)) for name in names
        )
    return type(one) is type(other) and bool(one == other)


@pytest.mark.parametrize("command", EXAMPLES, ids=lambda command: type(command).__name__)
def test_a_command_comes_back_from_its_bytes(command: commands.ExecutorCommand[Any]) -> None:
    data = encode(command)
    assert same(decode(data), command)
    assert encode(decode(data)) == data


def test_every_command_has_bytes() -> None:
    assert {type(command) for command in EXAMPLES} == set(commands.COMMANDS)


def changed(data: bytes, old: bytes, new: bytes) -> bytes:
    assert old in data
    assert len(old) == len(new)
    return data.replace(old, new, 1)


STEP = encode(EXAMPLES[0])


@pytest.mark.parametrize(
    "data",
    [
        b"",
        STEP[:9],
        STEP[:30],
        STEP[:-1],
        STEP + b"x",
        b"PK" + STEP[2:],
        changed(STEP, b"EBcm\x03", b"EBcm\x04"),
        changed(STEP, b'["Step"', b'["Stop"'),
        changed(STEP, b'"Bucket"', b'"RowSte"'),
        changed(STEP, b'"decode"', b'"decide"'),
        changed(STEP, b'"int32",3]', b'"int32",4]'),
        changed(STEP, b'"int32",3]', b'"int32",-1'[:10]),
        changed(STEP, b'"int32"', b'"int33"'),
        changed(STEP, b"false", b"    1"),
        changed(STEP, b"[0,2]", b"[0  ]"),
        encode(Drop()).replace(b'["Drop"]', b'["Make"]'),
        encode(Drop()).replace(b'["Drop"]', b"[[[[[[["),
    ],
    ids=range(17),
)
def test_bytes_that_are_no_command_are_refused(data: bytes) -> None:
    with pytest.raises(InputError, match=r"no command.*Record the commands again"):
        decode(data)


def test_a_value_without_bytes_is_refused() -> None:
    with pytest.raises(TypeError, match="a function, which has no bytes"):
        encode(commands.SetParts({"attention": lambda: None}))  # type: ignore[dict-item]


NUM_ROWS, STEPS, LONGEST, SMALLEST_PAGE = 32, 16, 131072, 8


@pytest.mark.parametrize("length", [40, 4000, LONGEST - 2 * STEPS])
def test_a_decode_of_32_rows_has_at_most_2_kb_at_any_context(length: int) -> None:
    table = RowTable(NUM_ROWS, LONGEST, 1024, 96, [SMALLEST_PAGE])
    pages = GroupPages(
        PageStore(PagePool(1 + NUM_ROWS * LONGEST // SMALLEST_PAGE)), table.page_tables[0]
    )
    ledger = PageLedger({"full": pages}, NUM_ROWS, LONGEST)
    sent = TableCopies(ledger, NUM_ROWS, {"full": LONGEST // SMALLEST_PAGE})
    prompt = np.zeros(length, np.int32)
    leases = []
    for row in range(NUM_ROWS):
        table.add_request(request_of([1], SamplingParams(max_tokens=4), f"row {row}"), row)
        lease = ledger.admit(row, prompt, length)
        assert lease is not None
        leases.append(lease)
    sent.changes(leases, LONGEST // SMALLEST_PAGE)  # as the prefill sends them
    key = StepKey("decode", Bucket(NUM_ROWS, NUM_ROWS, LONGEST // SMALLEST_PAGE, 1, LONGEST))
    sizes = []
    for start in (length, length + STEPS):
        assert all(ledger.reserve(lease, start + STEPS) for lease in leases)
        plans = [RowPlan(lease.row, lease, start, 1, samples=True) for lease in leases]
        places = np.arange(NUM_ROWS, dtype=np.int32)
        step = decode_command(plans, key, places, STEPS, table, sent)
        assert len(step.tables["full"]) == NUM_ROWS * STEPS // SMALLEST_PAGE, "all rows need more"
        sizes.append(len(encode(step)))
    assert max(sizes) <= 2048
    again = decode_command(plans, key, places, STEPS, table, sent)
    assert again.tables == {}, "nothing has changed since"


class Lent(PageLedger):
    """Writes the table that it is given."""

    def __init__(self, rows: Sequence[Sequence[int]]) -> None:
        self.rows = np.asarray(rows, np.int32)

    def write_table(self, group: str, leases: Sequence[Lease], table: np.ndarray) -> None:
        table[:] = self.rows[[lease.row for lease in leases], : table.shape[1]]


def test_pages_behind_a_row_are_not_sent_and_pages_given_back_are() -> None:
    ledger = Lent([[5, 6, 7, 0], [8, 9, 0, 0]])
    sent = TableCopies(ledger, 2, {"window": 4})
    leases = [Lease(0, 24), Lease(1, 16)]
    assert sent.changes(leases, 2)["window"].tolist() == [
        [0, 0, 5],
        [0, 1, 6],
        [1, 0, 8],
        [1, 1, 9],
    ]
    assert sent.changes(leases, 4)["window"].tolist() == [[0, 2, 7]]
    ledger.rows = np.asarray([[0, 6, 7, 4], [3, 0, 0, 0]], np.int32)
    assert sent.changes(leases, 4)["window"].tolist() == [[0, 0, 0], [0, 3, 4], [1, 0, 3]]
    assert sent.changes(leases, 4) == {}
    sent.forget()
    assert len(sent.changes(leases, 4)["window"]) == 4
