"""HostPages: pages leave the device and come back bit-equal, in the order of the log."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from enginebay.compose.composition import make_engine, make_plan
from enginebay.config import EngineConfig
from enginebay.contracts.cache import PageMove
from enginebay.contracts.commands import PageIn, PageOut
from enginebay.errors import InternalError
from enginebay_paged.engine import is_paged
from enginebay_runtime.engine import StepEngine
from enginebay_runtime.host_pages import MAX_UNREAD, MOVED_PAGES, PageStorage
from tests.brief import LEAST

NUM_PAGES = 90


def made(**choices: Any) -> StepEngine:
    options = {"page_size": 16, "num_pages": NUM_PAGES, "prefix_host_bytes": 2**24}
    sizes: Any = {"max_model_len": 64, "max_num_seqs": 2, "max_num_batched_tokens": 32}
    engine: Any = {"name": "oengine", **options}
    config = EngineConfig(model=LEAST, engine=engine, dtype="float32", **sizes, **choices)
    made = make_engine(make_plan(config))
    assert is_paged(made)
    made.make_arrays()
    return made


@pytest.fixture(
    params=[{"kv_cache_dtype": "int8"}, {"mesh": {"tensor": 2}}], ids=["int8", "two devices"]
)
def engine(request: pytest.FixtureRequest) -> Iterator[StepEngine]:
    one = made(**request.param)
    yield one
    one.close()


def content(engine: StepEngine, pages: list[int]) -> dict[str, np.ndarray]:
    found = [engine.executor.run(PageOut({"full": np.asarray([page], np.int32)})) for page in pages]
    return {name: np.concatenate([np.asarray(one[name]) for one in found]) for name in found[0]}


def write(engine: StepEngine, pages: list[int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    for page in pages:
        values = {
            name: rng.integers(0, 100, array.shape).astype(array.dtype)
            for name, array in content(engine, [page]).items()
        }
        engine.executor.run(PageIn({"full": np.asarray([page], np.int32)}, values))


def move(kind: Any, source: int, target: int) -> PageMove:
    return PageMove(kind, "full", source, target)


def test_moves_are_made_in_order_and_keep_every_byte(engine: StepEngine) -> None:
    pages = list(range(1, 8))
    write(engine, pages, seed=1)
    before = content(engine, pages)
    assert all(array.any() for array in before.values())
    engine.host.run([move("out", page, page + 10) for page in pages], engine.executor)
    write(engine, pages, seed=2)
    others = content(engine, pages)
    moves = [
        move("out", 1, 5),  # before page 1 is written
        *(move("in", page + 10, page) for page in pages),
        move("copy", 1, 30),
        move("in", 5, 1),
        move("out", 2, 5),  # after slot 5 was read
        move("in", 5, 31),
    ]
    engine.host.run(moves, engine.executor)
    after = content(engine, [*pages, 30, 31])
    for name, array in after.items():
        assert array[0].tobytes() == others[name][0].tobytes()
        assert array[1:7].tobytes() == before[name][1:].tobytes()
        assert array[7].tobytes() == before[name][0].tobytes()
        assert array[8].tobytes() == before[name][1].tobytes()


def test_any_number_of_pages_moves_with_few_programs_and_little_of_the_device() -> None:
    engine = made()
    try:
        assert engine.host.compile(engine.executor) == 2 * len(MOVED_PAGES)
        num_compiled = engine.compilations.count
        for num in (1, 3, 20, 79):
            pages = list(range(1, num + 1))
            engine.host.run([move("out", page, page) for page in pages], engine.executor)
            assert engine.host.num_unread <= MAX_UNREAD
            engine.host.run([move("in", page, page) for page in pages], engine.executor)
        assert engine.compilations.count == num_compiled
    finally:
        engine.close()


class Seen(PageStorage):
    """Remembers what it gets."""

    def __init__(self) -> None:
        self.pages: list[tuple[str, bytes, bytes, float]] = []
        self.is_closed = False

    def keep(self, group: str, digest: bytes, content: bytes, age_s: float) -> None:
        self.pages.append((group, digest, content, age_s))

    def close(self) -> None:
        self.is_closed = True


def test_a_keeper_gets_the_bytes_from_which_a_slot_is_filled() -> None:
    threads = set(threading.enumerate())
    engine, seen = made(), Seen()
    engine.host.keeper = seen
    write(engine, [1, 2], seed=3)
    before = content(engine, [1])
    engine.host.run([PageMove("out", "full", 1, 3, b"digest", 2.0)], engine.executor)
    engine.host.finish()
    ((group, digest, data, age_s),) = seen.pages
    assert (group, digest, age_s) == ("full", b"digest", 2.0)
    assert data == b"".join(array[0].tobytes() for array in before.values())
    with pytest.raises(InternalError, match="bytes are no page of the group 'full'"):
        engine.host.fill("full", data[:-1], 4)
    engine.host.fill("full", data, 4)
    engine.host.run([move("in", 4, 2)], engine.executor)
    for name, array in content(engine, [2]).items():
        assert array.tobytes() == before[name].tobytes()
    assert {one.name for one in set(threading.enumerate()) - threads} >= {"enginebay-host-pages_0"}
    engine.close()
    assert seen.is_closed
    assert "enginebay-host-pages_0" not in {
        one.name for one in set(threading.enumerate()) - threads
    }


def test_places_that_are_written_twice_have_the_last_page_and_files_have_each() -> None:
    engine, seen = made(), Seen()
    engine.host.keeper = seen
    pages = list(range(1, 21))
    for page in pages:
        write(engine, [page], seed=page)
    before = content(engine, pages)
    moves = [PageMove("out", "full", page, page % 3, str(page).encode()) for page in pages]
    engine.host.run(moves, engine.executor)
    engine.host.run([move("in", page % 3, 30) for page in pages], engine.executor)
    engine.host.finish()
    assert [digest for _, digest, _, _ in seen.pages] == [str(page).encode() for page in pages]
    for number, (_, _, data, _) in enumerate(seen.pages):
        assert data == b"".join(array[number].tobytes() for array in before.values())
    for name, array in content(engine, [30]).items():
        assert array[0].tobytes() == before[name][-1].tobytes()
    engine.close()


def test_few_places_do_not_let_more_pages_wait_on_the_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, seen, waiting = made(), Seen(), list[int]()
    engine.host.keeper = seen
    engine.host._thread.submit(time.sleep, 0.2)  # the thread is slow
    run = engine.executor.run

    def counted(command: Any) -> Any:
        waiting.append(len(waiting) - len(seen.pages))
        return run(command)

    monkeypatch.setattr(engine.executor, "run", counted)
    moves = [PageMove("out", "full", 1, 1 + i % 2, b"digest") for i in range(3 * MAX_UNREAD)]
    engine.host.run(moves, engine.executor)
    engine.host.finish()
    assert len(seen.pages) == 3 * MAX_UNREAD
    assert max(waiting) <= MAX_UNREAD
    engine.close()


def test_a_page_that_cannot_be_read_fails_its_return_and_is_forgotten() -> None:
    engine, seen = made(), Seen()
    seen.keep = fail  # type: ignore[method-assign]
    engine.host.keeper = seen
    for forgets in (False, True):
        engine.host.run([PageMove("out", "full", 1, 3, b"digest")], engine.executor)
        if forgets:
            engine.host.forget()
        else:
            with pytest.raises(RuntimeError, match="the device is gone"):
                engine.host.run([move("in", 3, 2)], engine.executor)
    engine.close()


def fail(*_: object) -> None:
    raise RuntimeError("the device is gone")


def test_closing_frees_everything_when_pages_cannot_be_saved(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine, seen = made(), Seen()
    seen.keep = fail  # type: ignore[method-assign]
    engine.host.keeper = seen
    engine.host.run([PageMove("out", "full", 1, 3, b"digest")], engine.executor)
    engine.close()
    assert seen.is_closed
    assert "the device is gone" in caplog.text
    assert not engine.executor.has_state
    engine.close()
