"""Rare searches for dead reference cycles."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from ludus.core.system.garbage import NEW_OBJECTS, OLDER, collect_rarely, rare_collections


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)
    gc.unfreeze()


def searches_for(new_objects: int) -> int:
    """The number of searches that begin while objects are made."""
    starts: list[str] = []

    def note(phase: str, _info: dict[str, int]) -> None:
        starts.append(phase)

    gc.collect()
    gc.callbacks.append(note)
    try:
        _alive = [[] for _ in range(new_objects)]
    finally:
        gc.callbacks.remove(note)
    return starts.count("start")


def test_fewer_searches_begin_in_the_block() -> None:
    gc.set_threshold(700, 10, 10)
    assert searches_for(20_000) > 10
    with rare_collections():
        assert searches_for(20_000) == 0
        assert searches_for(3 * NEW_OBJECTS) > 0  # cycles are found still
    assert gc.get_threshold() == (700, 10, 10)


def test_objects_before_the_block_are_left_out_of_searches() -> None:
    before = gc.get_freeze_count()
    with rare_collections():
        assert gc.get_freeze_count() > before
    assert gc.get_freeze_count() == 0


def test_a_program_that_searches_never_or_more_rarely_keeps_it() -> None:
    gc.set_threshold(0, 5, 5)
    with rare_collections():
        assert gc.get_threshold() == (0, 5, 5)
    gc.set_threshold(10 * NEW_OBJECTS, 5, 5)
    collect_rarely()
    assert gc.get_threshold() == (10 * NEW_OBJECTS, OLDER, OLDER)
