"""Caches of oEngine and their pages: sizes, and what the page manager gives and takes."""

from __future__ import annotations

import threading

import jax
import pytest

from enginebay.errors import ConfigError
from enginebay_oengine import HBMPageManager, OpenedModel, PagedAttentionCache
from enginebay_oengine.inference_scheduler import InferenceScheduler
from enginebay_oengine.iteration import GenerationStepTask, InitialSequenceRequest
from tests.unit.oengine.small import NUM_PAGES, PAGE_SIZE
from tests.unit.serving import DEADLOCK_S, within_minutes

pytestmark = pytest.mark.xdist_group("oengine_api")


def test_page_manager_gives_and_takes_pages_but_the_dummy(model: OpenedModel) -> None:  # holds O09
    metadata = PagedAttentionCache.create_metadata(model, page_size=PAGE_SIZE, num_pages=9)
    manager = HBMPageManager(metadata)
    assert (manager.page_size, manager.num_free_pages, manager.dummy_page_index) == (
        PAGE_SIZE,
        8,
        0,
    )
    pages = manager.alloc_hbm_pages(3)
    assert len(set(pages)) == 3
    assert 0 not in pages
    for length, count in ((1, 1), (PAGE_SIZE, 1), (PAGE_SIZE + 1, 2), (0, 0)):
        some = manager.alloc_prefill_hbm_pages(length)
        assert len(some) == count
        assert not set(some) & set(pages)
        manager.free_hbm_pages(some)
    assert manager.alloc_hbm_pages(6) == []
    assert manager.num_free_pages == 5
    with pytest.raises(ValueError, match="to free"):
        manager.free_hbm_pages([*pages, pages[0]])
    assert manager.num_free_pages == 5, "none was taken back"
    manager.free_hbm_pages([0, *pages, 0])
    manager.check()
    assert manager.num_free_pages == 8
    for wrong in (pages[:1], [99], [0, pages[0]]):
        with pytest.raises(ValueError, match="to free"):
            manager.free_hbm_pages(wrong)
    with pytest.raises(ValueError, match="-1 pages"):
        manager.alloc_hbm_pages(-1)
    assert sorted(manager.alloc_hbm_pages(8)) == list(range(1, 9))


@within_minutes
@pytest.mark.parametrize("what", ["prompt", "sequence"])
def test_who_waits_for_work_is_woken(
    model: OpenedModel, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:  # holds O09
    metadata = PagedAttentionCache.create_metadata(model, num_pages=NUM_PAGES)
    scheduler = InferenceScheduler(HBMPageManager(metadata))
    begun, wait = threading.Event(), scheduler._condition.wait

    def waits(timeout: float | None = None) -> bool:
        begun.set()
        return wait(timeout)

    monkeypatch.setattr(scheduler._condition, "wait", waits)
    waiter = threading.Thread(target=scheduler.wait_for_work, daemon=True)
    waiter.start()
    assert begun.wait(DEADLOCK_S)
    if what == "prompt":
        scheduler.enqueue_prefill_request(InitialSequenceRequest("a", [5, 6, 7]))
    else:
        scheduler.enqueue_decodes_request(GenerationStepTask("b", 0, 3, (1,), 8))
    waiter.join(DEADLOCK_S)
    assert not waiter.is_alive()


def test_pages_of_many_threads_are_different_ones(model: OpenedModel) -> None:
    manager = HBMPageManager(PagedAttentionCache.create_metadata(model, num_pages=NUM_PAGES))
    found: list[int] = []

    def work() -> None:
        for _ in range(100):
            pages = manager.alloc_hbm_pages(4)
            manager.free_hbm_pages(pages[:2])
            manager.free_hbm_pages(pages[2:])
        found.extend(manager.alloc_hbm_pages(5))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == len(set(found)) == 20
    manager.check()


def test_caches_are_sized_by_number_or_by_memory_and_wrong_sizes_refused(
    model: OpenedModel,
) -> None:
    create = PagedAttentionCache.create_metadata
    by_memory = create(model, page_size=16, max_num_seqs=2, max_length=64, memory_utilization=0.5)
    assert (by_memory.num_pages, by_memory.max_pages_per_sequence, by_memory.longest_sequence) == (
        9,
        4,
        64,
    )
    cache = PagedAttentionCache.init_cache(by_memory)
    group = model.plan.model.info.groups[0]
    assert len(cache.views[group.name]) == group.num_layers
    assert all(array.shape[0] == 9 and not array.any() for array in jax.tree.leaves(cache))
    for wrong in ({"page_size": 7}, {"num_pages": 1}, {"max_length": 161}, {"max_num_seqs": 0}):
        with pytest.raises(ConfigError, match="Allowed"):
            create(model, **wrong)
