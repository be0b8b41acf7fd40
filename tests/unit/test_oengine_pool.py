"""Page pool and prefix index of the paged engine: who holds a page, which tokens it has, and when
it is forgotten.
"""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from enginebay.contracts.cache_shape import pages_for
from enginebay.contracts.prefix_key import PrefixKey
from enginebay.errors import InternalError
from enginebay_paged.pool import DUMMY_PAGE, PagePool, check_pages
from enginebay_paged.prefix import PrefixIndex, key_digest, page_digests


def counts(pool: PagePool) -> tuple[int, int, int]:
    pool.check()
    return pool.num_used, pool.num_cached, pool.num_free


def test_pages_are_used_then_cached_then_free() -> None:
    pool = PagePool(4)
    assert counts(pool) == (0, 0, 3)
    page = pool.take()
    pool.share(page)
    assert counts(pool) == (1, 0, 2)
    assert not pool.drop(page, keep=True)
    assert pool.drop(page, keep=True)
    assert counts(pool) == (0, 1, 2)
    pool.share(page)
    assert (counts(pool), pool.holders(page)) == ((1, 0, 2), 1)
    pool.drop(page, keep=True)
    pool.reclaim(page)
    assert counts(pool) == (0, 0, 3)


def test_the_dummy_page_is_never_given_out() -> None:
    pool = PagePool(4)
    assert DUMMY_PAGE not in {pool.take() for _ in range(3)}
    with pytest.raises(InternalError, match="without a free page"):
        pool.take()


def test_wrong_calls_are_refused() -> None:
    pool = PagePool(3)
    page = pool.take()
    with pytest.raises(InternalError, match="not cached"):
        pool.reclaim(page)
    pool.drop(page, keep=False)
    with pytest.raises(InternalError, match="has no holder"):
        pool.drop(page, keep=False)
    with pytest.raises(InternalError, match="which is free"):
        pool.share(page)
    with pytest.raises(InternalError, match="at least one more"):
        PagePool(1)
    assert counts(pool) == (0, 0, 2)


@pytest.mark.parametrize(
    ("holders", "free", "cached", "found"),
    [
        ([0, 1, 0, 0, 0], [4, 3, 2, 4], set(), "in the free list twice"),
        ([0, 1, 0, 0, 0], [4, 3], set(), "none of"),
        ([0, 1, 0, 0, 0], [4, 3, 2], {4}, "more than one of"),
        ([0, 1, 0, 0, 0], [4, 3, 2], {1}, "more than one of"),
        ([0, 1, 0, 0, 0], [4, 3, 2, DUMMY_PAGE], set(), "dummy page"),
        ([0, 1, -1, 0, 0], [4, 3], set(), "negative number"),
    ],
)
def test_broken_books_are_found(
    holders: list[int], free: list[int], cached: set[int], found: str
) -> None:
    check_pages([0, 1, 0, 0, 0], [4, 3], {2})
    with pytest.raises(InternalError, match=found):
        check_pages(holders, free, cached)


def test_pages_that_tokens_need() -> None:
    assert [pages_for(n, 8) for n in (0, 1, 8, 9, 16)] == [0, 1, 1, 2, 2]


TOKENS = np.arange(20, dtype=np.int32)


def digests(token_ids: np.ndarray, salt: PrefixKey | None = None) -> list[str]:
    return [d.hex() for d in page_digests(key_digest(salt or PrefixKey()), token_ids, 8)]


def test_a_hash_covers_all_tokens_before() -> None:
    first, second = digests(TOKENS)
    assert digests(TOKENS[:16].astype(np.int64)) == [first, second]
    assert digests(TOKENS[8:16])[0] not in {first, second}
    other = TOKENS.copy()
    other[0] = 99
    assert not set(digests(other)) & {first, second}
    assert digests(TOKENS[:7]) == []


def test_a_chain_goes_on_where_it_ended() -> None:
    first, second = page_digests(key_digest(PrefixKey()), TOKENS, 8)
    assert list(page_digests(first, TOKENS[8:], 8)) == [second]


def test_weights_and_adapter_separate_prefixes() -> None:
    salts = [PrefixKey(), PrefixKey("w"), PrefixKey("w", "a"), PrefixKey("", "w"), PrefixKey("wa")]
    assert len({digests(TOKENS, salt)[0] for salt in salts}) == len(salts)


def test_hashes_are_the_same_in_every_process() -> None:
    assert digests(TOKENS, PrefixKey("weights", "adapter"))[0] == "4b7c74da0383f5585ad4731f0c2d0693"
    code = (
        "import numpy as np; from enginebay.contracts.prefix_key import *;"
        "from enginebay_paged.prefix import *;"
        "print(*[d.hex() for d in page_digests(key_digest(PrefixKey('w', 'a')), np.arange(20, "
        "dtype=np.int32), 8)])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == digests(TOKENS, PrefixKey("w", "a"))


def index_of(pages: int, ttl_s: float | None = None) -> PrefixIndex:
    """Pages 1, 2, ... that rest since second 1, 2, ..."""
    index = PrefixIndex(ttl_s)
    for page in range(1, pages + 1):
        index.add(bytes([page]), page)
        index.rest(page, float(page))
    index.check()
    return index


def test_the_page_that_rested_longest_is_evicted_first() -> None:
    index = index_of(3)
    index.wake(1)
    index.rest(1, 4.0)
    assert [index.evict().page for _ in range(2)] == [2, 3]
    assert index.find(bytes([2])) is None
    assert index.find(bytes([1])) == 1
    index.wake(1)
    with pytest.raises(InternalError, match="without a resting page"):
        index.evict()
    index.check()


def test_passed_pages_are_evicted_first_while_they_are_more_than_a_quarter() -> None:
    index = index_of(6)
    for page in range(7, 13):
        index.add(bytes([page]), page)
        index.rest(page, float(page), is_passed=True)
    index.check()
    assert [index.evict().page for _ in range(6)] == [7, 8, 9, 10, 1, 11]
    assert [index.evict(latest=True).page for _ in range(6)] == [6, 5, 4, 3, 2, 12]
    index.check()


def test_a_page_that_another_row_has_used_is_not_passed() -> None:
    index = index_of(2)
    index.wake(1)
    index.rest(1, 3.0, is_passed=True)
    index.add(bytes([3]), 3)
    index.rest(3, 4.0, is_passed=True)
    assert [index.evict().page for _ in range(3)] == [3, 2, 1]
    index.add(bytes([1]), 1)
    index.rest(1, 5.0, is_passed=True)
    index.add(bytes([2]), 2)
    index.rest(2, 6.0)
    assert index.evict().page == 1, "an evicted page begins anew"


def test_passed_pages_expire_too() -> None:
    index = PrefixIndex(10.0)
    for page, is_passed in ((1, False), (2, True), (3, False), (4, True)):
        index.add(bytes([page]), page)
        index.rest(page, float(page), is_passed=is_passed)
    assert index.next_expiry_s(5.0, 10.0) == 6.0
    assert sorted(index.expire(12.5)) == [1, 2]
    assert sorted(index.clear()) == [3, 4]
    index.check()


def test_pages_expire_after_their_time() -> None:
    index = index_of(3, ttl_s=10.0)
    assert index.expire(10.5) == []
    assert index.expire(12.0) == [1, 2]
    assert len(index) == index.num_resting == 1
    assert index_of(2).expire(1e9) == []


def test_equal_tokens_are_named_once() -> None:
    index = PrefixIndex()
    assert index.add(b"a", 1)
    assert not index.add(b"a", 2)
    assert 2 not in index
    assert index.add(b"b", 2)
    with pytest.raises(InternalError, match="another hash"):
        index.add(b"c", 2)


def test_clearing_gives_the_resting_pages() -> None:
    index = index_of(3)
    index.wake(2)
    assert sorted(index.clear()) == [1, 3]
    assert (len(index), index.num_resting, 2 in index) == (0, 0, False)
    index.check()
