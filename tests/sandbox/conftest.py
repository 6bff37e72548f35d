from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest_asyncio

from ludus.sandbox.base import Code, Limits, RunResult
from ludus.sandbox.jail import Jail

Run = Callable[..., Awaitable[RunResult]]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def run_once() -> AsyncIterator[Run]:
    """Runs code in a jail of the file's tests, without packages: they take a second to load."""
    async with Jail(packages=()) as jail:

        async def run(code: str, language: str = "python", **options: Any) -> RunResult:
            limits = Limits(**options.pop("limits", {}))
            return await jail.run(Code(code, language, **options), limits)

        yield run
