"""Fixtures of rollout tests."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import played_envs
import pytest
from rollout_world import World, make_world


@pytest.fixture(scope="session")
def world() -> World:
    return make_world()


@pytest.fixture(autouse=True)
def released() -> Iterator[None]:
    """Let what hangs end when its test does."""
    played_envs.RELEASE = threading.Event()
    played_envs.CLOSED.clear()
    played_envs.ATTEMPTS.clear()
    played_envs.THREADS.clear()
    yield
    played_envs.RELEASE.set()
