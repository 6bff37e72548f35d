"""A step moves from one store to another, whichever databases they are."""

from __future__ import annotations

import json
import zlib
from pathlib import Path

import pytest
from store_examples import make_groups

from ludus.core.errors import StoreError
from ludus.store import RunStore


def test_a_step_moves_to_another_store(store: RunStore, tmp_path: Path) -> None:
    groups = make_groups(0)
    store.create_run("a-1", "a", {}, {})
    store.record_step("a-1", "rl", 0, groups, {"m": float("nan")}, dropped=[("row", "why")])
    data = store.pack_step("a-1", "rl", 0)
    with RunStore.open(None, tmp_path / "other") as other:
        other.create_run("z-1", "z", {}, {})
        other.record_step("z-1", "rl", 0, make_groups(1), {})  # other keys
        other.create_run("a-1", "a", {}, {})
        other.unpack_step("a-1", data)
        other.unpack_step("a-1", data)  # once more: in place of the first
        assert repr(other.steps("a-1")) == repr(store.steps("a-1"))
        assert repr(other.groups("a-1", "rl", 0)) == repr(store.groups("a-1", "rl", 0))
        assert other.dropped("a-1") == store.dropped("a-1")
        assert other.pack_step("a-1", "rl", 0) == data, "equal steps give equal bytes"
        store.unpack_step("a-1", other.pack_step("a-1", "rl", 0))
    assert store.pack_step("a-1", "rl", 0) == data


def test_what_is_no_step(store: RunStore) -> None:
    store.create_run("a-1", "a", {}, {})
    with pytest.raises(StoreError, match="no step 3 of rl"):
        store.pack_step("a-1", "rl", 3)
    for data in (b"", b"x", store_bytes({}), store_bytes([])):
        with pytest.raises(StoreError, match="not a step of a run"):
            store.unpack_step("a-1", data)


def store_bytes(value: object) -> bytes:

    return zlib.compress(json.dumps(value).encode())
