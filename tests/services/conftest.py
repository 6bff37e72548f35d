"""Services shared by many tests."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
from service_world import LIGHTLY, OBEYS, service


@pytest.fixture(scope="session")
def url() -> Iterator[str]:
    """A service of the light environments and two test environments."""
    with service(
        "textcraft",
        "babyai",
        "webshop",
        OBEYS,
        LIGHTLY,
        step_deadline_s=3,
        max_action_chars=150_000,
    ) as address:
        yield address


@pytest.fixture(scope="session")
def client(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, timeout=30) as made:
        yield made
