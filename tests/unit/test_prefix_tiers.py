"""The host tier in the ledger of the paged engine: which pages move, which are found again, and for
how long.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from enginebay.cli import main
from enginebay.compose.composition import make_engine, make_plan
from enginebay.config import EngineConfig
from enginebay.contracts.cache import Lease, PageMove
from enginebay.contracts.engine import Engine
from enginebay.contracts.prefix_key import NO_KEY, PrefixKey
from enginebay.errors import ConfigError, UnsupportedError
from enginebay_esurge.engine_options import ESurgeOptions
from enginebay_paged.host_tier import MAX_READ_S, HostTier, MoveLog, ReadFile
from enginebay_paged.lease_records import GroupPages
from enginebay_paged.ledger import PageLedger
from enginebay_paged.options import PagedOptions
from enginebay_paged.pool import PagePool
from enginebay_paged.prefix import PrefixIndex, key_digest, page_digests
from enginebay_paged.store import PageStore
from enginebay_runtime.rows import PageTable
from enginebay_testing.ledger_machine import LedgerModel
from tests.brief import LEAST
from tests.parity import tiny
from tests.unit.test_oengine_ledger import Clock

PAGE, ROWS, MOST = 8, 4, 64


def make_ledger(
    num_slots: int,
    num_pages: int = 1 + MOST // PAGE,
    ttl_s: float | None = None,
    kind: type[PageLedger] = PageLedger,
    read_file: ReadFile | None = None,
) -> tuple[PageLedger, Clock]:
    """A ledger whose pool has room for one row, and its clock."""
    log, clock = MoveLog(), Clock()
    host = HostTier("full", num_slots, log, ttl_s, read_file, clock)
    store = PageStore(PagePool(num_pages), PrefixIndex(ttl_s), clock, host)
    groups = {"full": GroupPages(store, PageTable(ROWS, MOST // PAGE, PAGE))}
    return kind(groups, ROWS, MOST, log=log), clock


def prompt(length: int, kind: int = 0) -> np.ndarray:
    return np.arange(length, dtype=np.int32) + 1000 * kind


def admit(ledger: PageLedger, token_ids: np.ndarray, key: PrefixKey = NO_KEY) -> Lease:
    lease = ledger.admit(0, token_ids, len(token_ids) + 1, key)
    assert lease is not None
    ledger.check()
    return lease


def run(
    ledger: PageLedger, token_ids: np.ndarray, key: PrefixKey = NO_KEY
) -> tuple[Lease, list[PageMove]]:
    """A request from admission to release, and the moves that it ordered."""
    lease = admit(ledger, token_ids, key)
    moves = list(ledger.take_moves())
    ledger.commit(lease, token_ids)
    ledger.release(lease)
    ledger.check()
    return lease, moves


def kinds(moves: Sequence[PageMove]) -> list[str]:
    return [move.kind for move in moves]


def test_evicted_pages_come_back_from_the_host_and_stay_there() -> None:
    ledger, _ = make_ledger(num_slots=16)
    assert ledger.host_slots == {"full": 16}
    run(ledger, prompt(60))
    lease, moves = run(ledger, prompt(60, 1))
    assert (kinds(moves), lease.num_from_host) == (["out"] * 7, 0)
    assert ledger.num_cached_tokens(prompt(60)) == 56
    lease, moves = run(ledger, prompt(60))
    assert kinds(moves) == ["out"] * 7 + ["in"] * 7
    assert [move.target for move in moves[7:]] == list(lease.pages["full"][:7])
    assert (lease.num_cached, lease.num_from_host, lease.num_from_disk) == (56, 56, 0)
    _, moves = run(ledger, prompt(60, 1))
    assert kinds(moves) == ["in"] * 7, "the host has all evicted pages already"


def test_a_whole_prompt_from_the_host_gets_a_last_page_of_its_own() -> None:
    ledger, _ = make_ledger(num_slots=16)
    run(ledger, prompt(56))
    run(ledger, prompt(62, 1))
    lease = admit(ledger, prompt(56))
    moves = ledger.take_moves()
    assert (lease.num_cached, lease.num_from_host) == (55, 55)
    assert kinds(moves)[-7:] == ["in"] * 7
    targets = {move.source: move.target for move in moves if move.kind == "in"}
    assert set(targets.values()) == set(lease.pages["full"][:7])
    assert np.flatnonzero(ledger.resume(lease, 55)["full"]).tolist() == [6, 7], "its own pages"


def test_pages_of_the_device_and_of_the_host_make_one_prefix() -> None:
    ledger, _ = make_ledger(num_slots=16)
    run(ledger, prompt(40))
    run(ledger, prompt(30, 1))  # takes the last page of the first request and two free ones
    lease, moves = run(ledger, prompt(40))
    assert lease.num_cached == 39
    assert 0 < lease.num_from_host < 39
    assert kinds(moves).count("in") == -(-lease.num_from_host // PAGE)


def test_no_more_pages_are_kept_than_there_are_slots_and_the_oldest_goes_first() -> None:
    ledger, _ = make_ledger(num_slots=7)
    for kind in range(3):
        run(ledger, prompt(60, kind))
    assert [ledger.num_cached_tokens(prompt(60, kind)) for kind in range(3)] == [0, 56, 56]
    host = ledger.groups["full"].store.host
    assert host is not None
    assert len(host) == 7


def test_a_row_that_needs_every_slot_gets_its_pages_and_saves_none() -> None:
    ledger, _ = make_ledger(num_slots=7)
    run(ledger, prompt(60))
    run(ledger, prompt(60, 1))
    lease, moves = run(ledger, prompt(60))
    assert (lease.num_from_host, kinds(moves)) == (56, ["in"] * 7)


def test_a_refused_admission_moves_nothing() -> None:
    ledger, _ = make_ledger(num_slots=16)
    run(ledger, prompt(60))
    held = admit(ledger, prompt(40, 1))
    ledger.take_moves()
    free = ledger.num_free_tokens
    assert ledger.admit(1, prompt(60), 61) is None
    assert (ledger.take_moves(), ledger.num_free_tokens) == ((), free)
    ledger.release(held)
    assert ledger.num_cached_tokens(prompt(60)) == 56


def test_time_to_live_counts_from_the_last_use_in_every_tier() -> None:
    ledger, clock = make_ledger(num_slots=16, ttl_s=10.0)
    run(ledger, prompt(60))
    clock.now_s = 6.0
    run(ledger, prompt(60, 1))  # the pages of the first request move to the host
    clock.now_s = 9.95  # old pages are forgotten every tenth of a second, but not found before
    assert ledger.num_cached_tokens(prompt(60)) == 56
    clock.now_s = 10.0
    assert ledger.num_cached_tokens(prompt(60)) == 0
    clock.now_s = 15.9
    lease, moves = run(ledger, prompt(60, 1))
    assert (lease.num_cached, kinds(moves)) == (56, [])
    clock.now_s = 25.8
    assert run(ledger, prompt(60, 1))[0].num_cached == 56
    run(ledger, prompt(60, 2))
    clock.now_s = 35.7  # brought back from the host, which is a use as well
    assert run(ledger, prompt(60, 1))[0].num_from_host == 56
    clock.now_s = 45.7
    assert run(ledger, prompt(60, 1))[0].num_cached == 0
    ledger.check()


@pytest.mark.parametrize(
    "other", [PrefixKey("w2"), PrefixKey("w", "salt"), PrefixKey("w", adapter="poet#1")]
)
def test_pages_of_other_weights_salts_and_adapters_are_not_found(other: PrefixKey) -> None:
    ledger, _ = make_ledger(num_slots=16)
    run(ledger, prompt(60), PrefixKey("w"))
    run(ledger, prompt(60, 1), PrefixKey("w"))
    assert run(ledger, prompt(60), other)[0].num_cached == 0
    assert ledger.num_cached_tokens(prompt(60), PrefixKey("w")) == 56


class Files:
    """Has files for some prompts; remembers which slots were written."""

    def __init__(self) -> None:
        self.digests: set[bytes] = set()
        self.slots: list[int] = []
        self.num_read = 0
        self.clock: Clock | None = None

    def __call__(self, digest: bytes) -> Callable[[int], object] | None:
        if digest not in self.digests:
            return None
        self.num_read += 1
        if self.clock is not None:
            self.clock.now_s += MAX_READ_S / 3
        return self.slots.append

    def keep(self, token_ids: np.ndarray) -> None:
        self.digests |= set(page_digests(key_digest(NO_KEY), token_ids, PAGE))


def test_pages_of_files_are_read_to_the_host_and_moved_to_the_device() -> None:
    files = Files()
    ledger, _ = make_ledger(num_slots=8, read_file=files)
    files.keep(prompt(60))
    assert ledger.num_cached_tokens(prompt(60)) == 0, "only admissions read files"
    lease, moves = run(ledger, prompt(60))
    assert (lease.num_cached, lease.num_from_disk, lease.num_from_host) == (56, 56, 0)
    assert [move.source for move in moves] == files.slots
    run(ledger, prompt(60, 1))
    assert run(ledger, prompt(60))[0].num_from_host == 56, "the host has them now"
    assert files.num_read == 7


def test_looking_for_files_costs_the_host_no_pages() -> None:
    ledger, _ = make_ledger(num_slots=7, read_file=Files())
    run(ledger, prompt(60))
    run(ledger, prompt(60, 1))
    held = admit(ledger, prompt(60, 1))
    for kind in range(2, 5):
        assert ledger.admit(1, prompt(60, kind), 61) is None, "the row has all pages"
    ledger.release(held)
    assert ledger.num_cached_tokens(prompt(60)) == 56


def test_a_request_that_waits_reads_no_files_for_which_there_is_no_slot() -> None:
    files = Files()
    ledger, _ = make_ledger(num_slots=3, read_file=files)
    files.keep(prompt(60, 1))
    held = admit(ledger, prompt(40))
    for _ in range(5):
        assert ledger.admit(1, prompt(60, 1), 61) is None
    assert files.num_read == 3
    ledger.release(held)
    assert run(ledger, prompt(60, 1))[0].num_from_disk == 24


def test_an_admission_reads_files_for_a_limited_time() -> None:
    files = Files()
    ledger, clock = make_ledger(num_slots=16, read_file=files)
    files.keep(prompt(60))
    files.clock = clock
    lease, _ = run(ledger, prompt(60))
    assert (files.num_read, lease.num_from_disk) == (3, 24)
    assert run(ledger, prompt(60))[0].num_cached == 56, "the rest was computed"


def test_forgetting_clears_the_host_and_what_is_ordered() -> None:
    ledger, _ = make_ledger(num_slots=16)
    run(ledger, prompt(60))
    lease = admit(ledger, prompt(60, 1))
    ledger.release(lease)
    ledger.forget()
    assert ledger.take_moves() == ()
    assert ledger.num_cached_tokens(prompt(60)) == 0
    ledger.check()


def test_closing_saves_what_was_used_last_first_and_what_the_host_has_too() -> None:
    ledger, clock = make_ledger(num_slots=7)
    run(ledger, prompt(60, 1))
    run(ledger, prompt(60))
    run(ledger, prompt(60, 1))  # the host has it, but perhaps no file has any more
    clock.now_s = 5.0
    digests = list(page_digests(key_digest(NO_KEY), prompt(60, 1), PAGE))
    ledger.save_pages()
    moves = ledger.take_moves()
    assert [move.digest for move in moves] == digests, "a page is found only after those before it"
    assert {(move.kind, move.age_s) for move in moves} == {("out", 5.0)}
    assert ledger.num_cached_tokens(prompt(60, 1)) == 56
    ledger.check()


class Hasty(PageLedger):
    """Writes to pages before it saves what they hold."""

    def take_moves(self) -> Sequence[PageMove]:
        return sorted(super().take_moves(), key=lambda move: move.kind == "out")


@pytest.mark.parametrize("kind", [PageLedger, Hasty])
def test_a_page_that_is_written_before_it_is_saved_is_seen_by_the_kit(
    kind: type[PageLedger],
) -> None:
    ledger, _ = make_ledger(num_slots=16, kind=kind)
    world = LedgerModel(ledger, ROWS, MOST, PAGE)
    prompts = [world.prompt(0, 0, numbers, 3) for numbers in ((1,) * 7, (2,) * 7)]

    def again(number: int) -> None:
        assert world.add(0, list(prompts[number]), 1)
        assert world.step(0, len(prompts[number]))
        world.commit(0)
        world.release(0)

    again(0)
    again(1)
    if kind is PageLedger:
        again(0)
        again(1)
    else:
        again(0)
        with pytest.raises(AssertionError, match="row 0 finds other tokens' keys at position"):
            again(1)


@pytest.mark.parametrize("options", [PagedOptions, ESurgeOptions])
@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"prefix_disk_dir": "/x"}, "prefix_disk_dir needs prefix_host_bytes"),
        ({"prefix_disk_bytes": 9, "prefix_host_bytes": 9}, "prefix_disk_bytes needs prefix_disk"),
        ({"prefix_host_bytes": 0}, "greater than or equal to 1"),
        ({"prefix_host_bytes": 9, "prefix_disk_dir": ""}, "at least 1 character"),
    ],
)
def test_options_that_need_others_are_refused(
    options: Any, given: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValidationError, match=said):
        options(**given)


def test_a_host_tier_needs_prefix_caching() -> None:
    with pytest.raises(ValidationError, match="prefix_host_bytes needs prefix caching"):
        PagedOptions(prefix_caching=False, prefix_host_bytes=9)
    with pytest.raises(ValidationError, match="prefix_host_bytes needs prefix caching"):
        ESurgeOptions(enable_prefix_caching=False, prefix_host_bytes=9)
    paged = ESurgeOptions(prefix_host_bytes=9, prefix_disk_dir="/x").paged()
    assert (paged.prefix_host_bytes, paged.prefix_disk_dir) == (9, "/x")
    assert ESurgeOptions().paged().prefix_host_bytes is None


def engine_of(model: str, **options: Any) -> Engine:
    engine = {"name": "oengine", "page_size": 16, "num_pages": 9, **options}
    sizes: Any = {"max_model_len": 64, "max_num_seqs": 2, "max_num_batched_tokens": 32}
    return make_engine(
        make_plan(EngineConfig(model=model, engine=engine, dtype="float32", **sizes))
    )


def test_sizes_that_hold_no_page_are_refused() -> None:
    with pytest.raises(ConfigError, match="which is a page of 16 tokens"):
        engine_of(LEAST, prefix_host_bytes=100)
    with pytest.raises(ConfigError, match="the memory of the host"):
        engine_of(LEAST, prefix_host_bytes=2**60)
    disk: Any = {"prefix_host_bytes": 2**22, "prefix_disk_dir": "pages"}
    with pytest.raises(ConfigError, match="prefix_disk_bytes = 100") as caught:
        engine_of(LEAST, **disk, prefix_disk_bytes=100)
    (least,) = re.findall(r"at least (\d+)", str(caught.value))
    engine = engine_of(LEAST, **disk, prefix_disk_bytes=int(least))
    assert engine.memory.tiers[1].num_tokens >= 16
    with pytest.raises(ConfigError, match="which is a page of 16 tokens"):
        engine_of(LEAST, **disk, prefix_disk_bytes=int(least) - 1)


def test_the_plan_counts_the_tokens_of_each_tier(tmp_path: Path) -> None:
    bare = engine_of(LEAST)
    assert bare.memory.tiers == ()
    page = bare.memory.cache_bytes // 9
    engine = engine_of(
        LEAST,
        prefix_host_bytes=20 * page,
        prefix_disk_dir=str(tmp_path / "pages"),
        prefix_disk_bytes=100 * page,
    )
    host, disk = engine.memory.tiers
    assert (host.name, host.max_bytes, host.num_tokens) == ("host", 20 * page, 320)
    assert (disk.name, disk.num_tokens, disk.folder) == ("disk", 1600, str(tmp_path / "pages"))
    assert engine.ledger.host_slots == {"full": 20}


def test_explain_shows_the_tiers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = {"num_pages": 9, "prefix_host_bytes": 2**26, "prefix_disk_dir": tmp_path}
    flags = [flag for name, one in options.items() for flag in ("--set", f"engine.{name}={one}")]
    assert main(["explain", "--model", LEAST, "--engine", "oengine", *flags, "--json"]) == 0
    host, disk = json.loads(capsys.readouterr().out)["memory"]["tiers"]
    assert (
        host["max_bytes"]
        <= 2**26
        < host["max_bytes"] + host["max_bytes"] // host["num_tokens"] * 64
    )
    assert disk["folder"] == str(tmp_path)
    assert main(["explain", "--model", LEAST, "--engine", "oengine", *flags]) == 0
    text = capsys.readouterr().out
    assert f"prefixes on the host up to 64 MiB ({host['num_tokens']} tokens)" in text
    assert (
        f"prefixes on the disk up to 10240 MiB ({disk['num_tokens']} tokens) in {tmp_path}" in text
    )


def test_a_model_with_a_state_is_refused(tmp_path: Path) -> None:
    folder = str(tiny.write_checkpoint(tmp_path, "lfm2-mixed"))
    with pytest.raises(UnsupportedError, match="a model that has a recurrent state"):
        engine_of(folder, prefix_host_bytes=2**20)
