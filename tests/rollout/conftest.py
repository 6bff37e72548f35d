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
def release_hanging() -> Iterator[None]:
    """End hanging environments with their test."""
    played_envs.RELEASE = threading.Event()
    played_envs.CLOSED.clear()
    played_envs.ATTEMPTS.clear()
    played_envs.THREADS.clear()
    yield
    played_envs.RELEASE.set()
