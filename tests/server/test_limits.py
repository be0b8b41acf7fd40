"""ConcurrencyLimit: no place is lost or given twice, whoever leaves when."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from enginebay_server.limits import ConcurrencyLimit


def limit_of(max_concurrency: int, max_queue: int) -> ConcurrencyLimit:
    from enginebay_server.limits import ConcurrencyLimit

    return ConcurrencyLimit(max_concurrency, max_queue, 1)


def test_places_are_given_in_order() -> None:
    async def run() -> list[int]:
        limit = limit_of(1, 10)
        order: list[int] = []

        async def one(number: int) -> None:
            await limit.enter()
            order.append(number)
            await asyncio.sleep(0)
            limit.leave()

        await asyncio.gather(*map(one, range(5)))
        return order

    assert asyncio.run(run()) == [0, 1, 2, 3, 4]


def test_a_place_that_comes_as_its_taker_leaves_goes_to_the_next() -> None:
    async def run() -> None:
        limit = limit_of(1, 10)
        await limit.enter()
        first, second = (asyncio.create_task(limit.enter()) for _ in range(2))
        await asyncio.sleep(0)
        limit.leave()  # the place is the first one's, who has not run yet
        first.cancel()
        await second
        assert limit.num_waiting == 0
        third = asyncio.create_task(limit.enter())
        fourth = asyncio.create_task(limit.enter())
        await asyncio.sleep(0)
        third.cancel()
        limit.leave()  # passes over the third, who has not run yet
        await fourth
        with pytest.raises(asyncio.CancelledError):
            await third

    asyncio.run(run())


@pytest.mark.parametrize("seed", range(20))
def test_no_place_is_lost_when_clients_disconnect(seed: int) -> None:
    draw = random.Random(seed)

    async def run() -> None:
        limit = limit_of(3, 1000)
        most = running = 0

        async def one() -> None:
            nonlocal most, running
            await limit.enter()
            running += 1
            most = max(most, running)
            try:
                await asyncio.sleep(0)
            finally:
                running -= 1
                limit.leave()

        tasks = [asyncio.create_task(one()) for _ in range(60)]
        while not all(task.done() for task in tasks):
            draw.choice(tasks).cancel()
            await asyncio.sleep(0)
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        assert not [end for end in ends if isinstance(end, Exception)]
        assert (most, limit.num_waiting, limit._places._value) == (3, 0, 3)

    asyncio.run(run())
