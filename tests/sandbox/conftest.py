from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from ludus.core.errors import ConfigError
from ludus.sandbox.base import Code, Limits, RunResult
from ludus.sandbox.jail import Jail
from ludus.sandbox.layers import require_layers

Run = Callable[..., Awaitable[RunResult]]


@pytest.fixture(scope="session")
def layers() -> None:
    try:
        require_layers()
    except ConfigError as error:
        pytest.skip(str(error))


async def run_once(code: str, language: str = "python", **options: Any) -> RunResult:
    """Run code in a jail of its own, without packages: they take a second to load."""
    limits = Limits(**options.pop("limits", {}))
    async with Jail(packages=()) as jail:
        return await jail.run(Code(code, language, **options), limits)
