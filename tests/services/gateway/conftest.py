"""Fixtures of the gateway's tests."""

from __future__ import annotations

import pytest
from rollout_world import World, make_world


@pytest.fixture(scope="session")
def world() -> World:
    return make_world()
