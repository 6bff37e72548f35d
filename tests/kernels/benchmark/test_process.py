"""Processes that really die, hang, or talk nonsense: each is replaced, and the next answers."""

from __future__ import annotations

import asyncio
import os

import pytest

from ludus.kernels.benchmark.process import GoneError, Process

MODULE = "tests.kernels.benchmark.dying"


@pytest.mark.parametrize(
    ("what", "how", "text"),
    [
        ("abort", "died", "signal 6"),
        ("segfault", "died", "signal 11"),
        ("exit", "died", "exit code 3"),
        ("memory", "died", "exit code 1"),
        ("half", "died", "exit code 0"),
        ("nonsense", "malformed", "malformed"),
    ],
)
async def test_a_process_that_fails_is_replaced(what: str, how: str, text: str) -> None:
    process = Process(MODULE)
    try:
        first, _ = await process.ask({"do": "echo"}, (), 60)
        with pytest.raises(GoneError, match=text) as caught:
            await process.ask({"do": what}, (), 60)
        assert caught.value.how == how
        again, blobs = await process.ask({"do": "echo"}, (b"x" * 100_000,), 60)
        assert again["pid"] != first["pid"]
        assert blobs == [b"x" * 100_000]
        assert process.starts == 2
    finally:
        await process.close()


async def test_a_process_that_hangs_is_killed_at_the_deadline() -> None:
    process = Process(MODULE)
    try:
        first, _ = await process.ask({"do": "echo"}, (), 60)
        with pytest.raises(GoneError) as caught:
            await process.ask({"do": "hang"}, (), 0.5)
        assert caught.value.how == "late"
        with pytest.raises(ProcessLookupError):
            os.kill(first["pid"], 0)
        assert (await process.ask({"do": "echo"}, (), 60))[0]["pid"] != first["pid"]
    finally:
        await process.close()


async def test_calls_take_turns() -> None:
    process = Process(MODULE)
    try:
        answers = await asyncio.gather(
            *(process.ask({"do": "echo"}, (bytes([i]),), 60) for i in range(8))
        )
        assert [blobs for _, blobs in answers] == [[bytes([i])] for i in range(8)]
        assert process.starts == 1
    finally:
        await process.close()


async def test_a_call_that_is_given_up_ends_the_process() -> None:
    """Its answer would be taken for that of the next call."""
    process = Process(MODULE)
    try:
        first, _ = await process.ask({"do": "echo"}, (), 60)
        call = asyncio.ensure_future(process.ask({"do": "hang"}, (), 60))
        await asyncio.sleep(0.1)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert (await process.ask({"do": "echo"}, (), 60))[0]["pid"] != first["pid"]
    finally:
        await process.close()
