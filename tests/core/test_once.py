"""Work that is done once: shared, kept, dropped."""

import asyncio

import pytest

from ludus.core.once import Once


async def test_a_caller_that_fails_or_gives_up_leaves_the_run_to_the_next():
    once, runs = Once(), []

    async def run(first=None):
        runs.append(first)
        if first == "fails":
            raise OSError
        if first == "hangs":
            await asyncio.sleep(60)
        return "good", True

    for first in ("fails", "hangs"):
        key = first.encode()
        given_up = asyncio.create_task(once.of(key, lambda first=first: run(first)))
        await asyncio.sleep(0)
        others = [asyncio.create_task(once.of(key, run)) for _ in range(2)]
        await asyncio.sleep(0)
        given_up.cancel()
        assert await asyncio.gather(*others) == ["good"] * 2
        assert await once.of(key, run) == "good"
        with pytest.raises((OSError, asyncio.CancelledError)):
            await given_up


async def test_the_oldest_verdict_is_forgotten():
    once, runs = Once(max_results=2), []

    async def run():
        runs.append(1)
        return 1, True

    for key in (b"a", b"b", b"a", b"c", b"a", b"b"):
        await once.of(key, run)
    assert len(runs) == 4  # a, b, c, b


async def test_large_results_leave_by_their_size_and_the_last_one_stays():
    once, runs = Once[bytes](size=len, max_size=10), []

    async def made(number):
        runs.append(number)
        return bytes(6), True

    for number in (1, 1, 2, 2, 1):
        await once.of(bytes([number]), lambda number=number: made(number))
    assert runs == [1, 2, 1]
