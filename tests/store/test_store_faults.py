"""Database faults: full, locked, damaged, gone; a writer that is killed."""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from sqlalchemy import text, update
from store_examples import make_groups
from variants import variants

from ludus.core.errors import ConfigError, MissingDependency, StoreError
from ludus.store import RunStore
from ludus.store import schema as db

Open = Callable[..., RunStore]
CHILD = Path(__file__).parents[1] / "support" / "store_child.py"


def child(url: str, action: str, pattern: str = "never", nth: int = 1) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(CHILD), url, "", action, pattern, str(nth)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def check_integrity(url: str) -> None:
    if url.startswith("sqlite"):
        connection = sqlite3.connect(url.removeprefix("sqlite:///"))
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        assert connection.execute("PRAGMA foreign_key_check").fetchall() == []
        connection.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ludus.db"


def test_a_full_database(path: Path) -> None:
    with RunStore.open(f"sqlite:///{path}") as store:
        store.create_run("run-1", "demo", {}, {})
        store.record_step("run-1", "rl", 0, make_groups(0), {})

        def limit(pages: int) -> None:
            with store._database.engine.connect() as connection:  # the pool's only connection
                connection.exec_driver_sql(f"PRAGMA max_page_count={pages}")

        limit(1)  # SQLite raises it to the size that there is
        many = make_groups(1, num_groups=40, size=8)
        with pytest.raises(StoreError, match=r"ludus\.db: the database or its disk is full: free"):
            store.record_step("run-1", "rl", 0, many, {})
        assert store.groups("run-1", "rl", 0) == make_groups(0), "what was there is still there"
        limit(10**6)
        store.record_step("run-1", "rl", 0, many, {})
        assert store.groups("run-1", "rl", 0) == many
    check_integrity(f"sqlite:///{path}")


def test_a_locked_file(path: Path) -> None:
    url = f"sqlite:///{path}"
    with RunStore.open(url, timeout_s=0.1) as store:
        store.create_run("run-1", "demo", {}, {})
        other = sqlite3.connect(path, isolation_level=None)
        other.execute("BEGIN EXCLUSIVE")
        with pytest.raises(StoreError, match="another process holds the lock: wait for that"):
            store.record_step("run-1", "rl", 0, make_groups(0), {})
        assert store.steps("run-1") == [], "reading goes on"
        RunStore.open(url, timeout_s=0.1).close()  # nothing to migrate: opening needs no lock
        other.execute("ROLLBACK")
        other.close()
        store.record_step("run-1", "rl", 0, make_groups(0), {})
        assert store.groups("run-1", "rl", 0) == make_groups(0)


def test_a_new_file_that_is_locked(path: Path) -> None:
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    with pytest.raises(StoreError, match="another process holds the lock"):
        RunStore.open(f"sqlite:///{path}", timeout_s=0.1)
    other.close()
    RunStore.open(f"sqlite:///{path}", timeout_s=0.1).close()


def test_a_locked_table(postgres_url: str) -> None:
    import psycopg

    with RunStore.open(postgres_url, timeout_s=0.1) as store:
        store.create_run("run-1", "demo", {}, {})
        with psycopg.connect(postgres_url) as other:
            other.execute("LOCK TABLE steps IN ACCESS EXCLUSIVE MODE")
            with pytest.raises(StoreError, match="another session holds the lock: wait for that"):
                store.record_step("run-1", "rl", 0, make_groups(0), {})
        store.record_step("run-1", "rl", 0, make_groups(0), {})
        assert store.groups("run-1", "rl", 0) == make_groups(0)


def test_a_connection_that_breaks_is_made_again(postgres_url: str) -> None:
    import psycopg

    with RunStore.open(postgres_url) as store:
        store.create_run("run-1", "demo", {}, {})
        with psycopg.connect(postgres_url, autocommit=True) as other:
            kill = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            kill += "WHERE application_name = 'ludus' AND datname = current_database()"
            assert other.execute(kill).fetchall() == [(True,)]
            store.record_step("run-1", "rl", 0, make_groups(0), {})
            assert len(other.execute(kill).fetchall()) == 1
            assert store.groups("run-1", "rl", 0) == make_groups(0)


def test_no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ludus.store.database._BACKOFF_S", (0.0,))
    with pytest.raises(StoreError, match="no connection: check that the server runs") as caught:
        RunStore.open("postgresql://me:secret@127.0.0.1:1/none")
    assert "secret" not in str(caught.value)


def test_no_such_database(postgres_server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ludus.store.database._BACKOFF_S", ())
    with pytest.raises(StoreError, match=r"and the database .*\"nowhere\" does not exist"):
        RunStore.open(f"{postgres_server}/nowhere")


def test_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(MissingDependency, match=r"pip install 'ludus-rl\[postgres\]'"):
        RunStore.open("postgresql://localhost/db")


def test_a_file_that_is_no_database(path: Path) -> None:
    path.write_bytes(b"run,reward\n1,0.5\n" * 500)
    for read_only in (False, True):
        with pytest.raises(StoreError, match="the file is not an SQLite database"):
            RunStore.open(f"sqlite:///{path}", read_only=read_only)


def test_a_folder_that_cannot_be(path: Path) -> None:
    path.write_text("a file")
    with pytest.raises(StoreError, match="its folder cannot be created"):
        RunStore.open(f"sqlite:///{path}/ludus.db")
    with pytest.raises(ConfigError, match="is a folder: name a file in it"):
        RunStore.open(f"sqlite:///{path.parent}")


def test_a_pipe_is_no_file(path: Path) -> None:
    os.mkfifo(path)
    with pytest.raises(ConfigError, match="is a pipe or a device: move it away"):
        RunStore.open(f"sqlite:///{path}")


def test_damaged_pages(path: Path) -> None:
    with RunStore.open(f"sqlite:///{path}") as store:
        store.create_run("run-1", "demo", {}, {})
        store.record_step("run-1", "rl", 0, make_groups(0, num_groups=60), {})
    data = bytearray(path.read_bytes())
    for page in range(32 * 4096, len(data), 4096):
        data[page : page + 64] = os.urandom(64)
    path.write_bytes(data)
    with (
        RunStore.open(f"sqlite:///{path}") as store,
        pytest.raises(StoreError, match="damaged"),
    ):
        list(store.records("run-1"))


def test_a_damaged_tree(store: RunStore) -> None:
    store.record_step("run-1", "rl", 0, make_groups(0), {})
    whole = store._database.transact(
        lambda connection: connection.execute(db.trees.select().limit(1)).one().token_ids
    )
    for damage in (whole[:-3], b"", b"x" * 20):
        change = update(db.trees).values(token_ids=damage)
        store._database.transact(lambda connection, c=change: connection.execute(c), write=True)
        with pytest.raises(StoreError, match=r"trajectory 's0-g0-0' of rl step 0 is damaged"):
            store.trajectory("run-1", "s0-g0-0")


KILLS = [
    ("DELETE", 1, "before"),
    ("INSERT INTO trajectories", 1, "before"),
    ("INSERT INTO dropped", 1, "before"),
    ("COMMIT", 1, "before"),
    ("never", 1, "after"),
]


@pytest.mark.parametrize(("pattern", "nth", "survives"), variants(KILLS, [KILLS[1], *KILLS[3:]]))
def test_killed_while_recording(
    store: RunStore, url: str, open_store: Open, pattern: str, nth: int, survives: str
) -> None:
    store.record_step("run-1", "rl", 0, make_groups(5), {"of": 5})
    store.close()
    process = child(url, "record", pattern, nth)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == (0 if survives == "after" else -signal.SIGKILL), errors
    again = open_store()
    expected = 5 if survives == "before" else 0
    assert again.groups("run-1", "rl", 0) == make_groups(expected)
    assert [step.metrics for step in again.steps("run-1")] == [{"of": expected}]
    check_integrity(url)
    again.record_step("run-1", "rl", 0, make_groups(1), {})  # no lock is left behind
    assert again.groups("run-1", "rl", 0) == make_groups(1)


def test_killed_at_random_moments(store: RunStore, url: str) -> None:
    """Every step that is there is whole, and it is the last or the one being written."""
    chance = random.Random(0)
    for _ in range(3):
        process = child(url, "loop")
        assert process.stdout is not None
        for _ in range(chance.randrange(3, 9)):
            said = process.stdout.readline()
        time.sleep(chance.random() * 0.02)
        process.kill()
        rest, _ = process.communicate(timeout=60)
        last = int((said + rest).split()[-1])
        store.rewind("run-1", {"rl": 2})  # waits for what the server still does for the dead
        held = {step.step: int(step.metrics["of"]) for step in store.steps("run-1", "rl")}
        newest = max(held.values())
        assert newest in (last, last + 1), "what was acknowledged is there"
        for step, of in held.items():
            assert store.groups("run-1", "rl", step) == make_groups(of)
        assert len(list(store.records("run-1"))) == 6 * len(held)
        store.rewind("run-1", {})
    check_integrity(url)


def test_closing_twice_and_using_after(store: RunStore) -> None:
    store.close()
    store.close()
    assert [run.id for run in store.runs()] == ["run-1"], "it opens anew"
    store._database.transact(lambda connection: connection.execute(text("SELECT 1")))
