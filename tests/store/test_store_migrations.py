"""Migrations: the scripts make the schema; interrupted, concurrent and foreign ones."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import create_engine, inspect, text
from store_examples import make_groups
from variants import variants

from ludus.core.errors import StoreError
from ludus.store import RunStore
from ludus.store.database import Database
from ludus.store.migrate import MIGRATIONS, VERSION_TABLE, migrate
from ludus.store.schema import metadata

CHILD = Path(__file__).parents[1] / "support" / "store_child.py"
Open = Callable[..., RunStore]

NEXT = '''
"""A later schema: a column with a value for every row, in several statements."""
import sqlalchemy as sa
from alembic import op

revision = "9999"
down_revision = "0004"


def upgrade():
    op.add_column("runs", sa.Column("owner", sa.Text()))
    op.execute("UPDATE runs SET owner = 'somebody'")
    op.create_index("ix_runs_owner", "runs", ["owner"])
'''


@pytest.fixture
def later(tmp_path: Path) -> Path:
    """The migration scripts of a later ludus."""
    scripts = tmp_path / "later"
    shutil.copytree(MIGRATIONS, scripts)
    (scripts / "versions" / "r9999_later.py").write_text(NEXT)
    return scripts


@pytest.fixture
def database(url: str) -> Iterator[Database]:
    database = Database(url, timeout_s=20)
    yield database
    database.close()


def tables(database: Database) -> set[str]:
    return set(database.transact(lambda connection: inspect(connection).get_table_names()))


def child(url: str, scripts: str, pattern: str, nth: int) -> int:
    command = [sys.executable, str(CHILD), url, scripts, "open", pattern, str(nth)]
    return subprocess.run(command, capture_output=True, timeout=60).returncode


def test_the_scripts_make_the_schema(store: RunStore) -> None:
    def differences(connection: object) -> list[object]:
        options = {"version_table": VERSION_TABLE, "compare_type": True}
        context = MigrationContext.configure(connection, opts=options)  # type: ignore[arg-type]
        return list(compare_metadata(context, metadata))

    assert store._database.transact(differences) == []


def test_opening_again_changes_nothing(url: str, store: RunStore, open_store: Open) -> None:
    store.record_step("run-1", "rl", 0, make_groups(0), {})
    store.close()
    assert open_store().groups("run-1", "rl", 0) == make_groups(0)


def test_a_store_of_the_first_schema_is_upgraded(
    database: Database, open_store: Open, tmp_path: Path
) -> None:
    scripts = shutil.copytree(MIGRATIONS, tmp_path / "first")
    for later in (scripts / "versions").glob("r000[2-9]*.py"):
        later.unlink()
    migrate(database, scripts)
    store = open_store()
    store.create_run("run-1", "demo", {}, {})
    store.record_step("run-1", "rl", 0, make_groups(0), {})
    assert store.groups("run-1", "rl", 0) == make_groups(0)


@pytest.mark.parametrize("nth", variants([1, 5, 12], [5]))
def test_killed_while_making_the_schema(
    url: str, database: Database, open_store: Open, nth: int
) -> None:
    assert child(url, "", "CREATE", nth) == -signal.SIGKILL
    assert tables(database) == set()
    store = open_store()
    store.create_run("run-1", "demo", {}, {})
    store.record_step("run-1", "rl", 0, make_groups(0), {})
    assert store.groups("run-1", "rl", 0) == make_groups(0)


@pytest.mark.parametrize(
    "pattern", variants(["UPDATE runs", "CREATE INDEX", "UPDATE ludus_version"], ["CREATE INDEX"])
)
def test_killed_while_migrating(
    url: str, store: RunStore, database: Database, later: Path, pattern: str
) -> None:
    store.record_step("run-1", "rl", 0, make_groups(0), {})
    store.close()
    assert child(url, str(later), pattern, 1) == -signal.SIGKILL
    with RunStore.open(url) as old:  # the old schema is untouched: the old code still works
        assert old.groups("run-1", "rl", 0) == make_groups(0)
    migrate(database, later)
    owners = database.transact(lambda c: c.execute(text("SELECT owner FROM runs")).scalars().all())
    assert owners == ["somebody"]


def test_a_newer_schema_is_refused(
    url: str, store: RunStore, database: Database, later: Path
) -> None:
    migrate(database, later)
    store.close()
    for read_only in (False, True):
        with pytest.raises(
            StoreError, match=r"newer ludus \(schema 9999; this ludus reads up to 0004"
        ):
            RunStore.open(url, read_only=read_only)


def test_a_reader_does_not_migrate(url: str, store: RunStore, later: Path) -> None:
    store.close()
    reader = Database(url, read_only=True)
    with pytest.raises(StoreError, match=r"schema 0004 of an older ludus \(this one reads 9999\)"):
        migrate(reader, later)
    reader.close()


def test_somebody_elses_database_is_refused(url: str, database: Database) -> None:
    make = text("CREATE TABLE runs (id INTEGER)")
    database.transact(lambda connection: connection.execute(make), write=True)
    with pytest.raises(StoreError, match="already has tables named runs of another program"):
        RunStore.open(url)
    assert tables(database) == {"runs"}


def test_processes_open_an_empty_store_at_once(url: str, open_store: Open) -> None:
    command = [sys.executable, str(CHILD), url, "", "open", "never", "1"]
    processes = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    for process in processes:
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors
    open_store().create_run("run-1", "demo", {}, {})


def test_threads_open_an_empty_store_at_once(url: str) -> None:
    failures: list[BaseException] = []
    together = threading.Barrier(6)

    def work(n: int) -> None:
        try:
            together.wait(20)
            with RunStore.open(url) as store:
                store.create_run(f"run-{n}", "demo", {}, {})
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    with RunStore.open(url) as store:
        assert {run.id for run in store.runs()} == {f"run-{n}" for n in range(6)}


def test_a_migration_that_ends_while_another_looks(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tables are not taken for those of another program."""
    read = MigrationContext.get_current_revision

    def read_then_migrate(self: MigrationContext) -> str | None:
        revision = read(self)
        monkeypatch.undo()
        RunStore.open(url).close()
        return revision

    monkeypatch.setattr(MigrationContext, "get_current_revision", read_then_migrate)
    RunStore.open(url).close()


def test_sqlite_is_in_wal(tmp_path: Path) -> None:
    RunStore.open(None, tmp_path).close()
    engine = create_engine(f"sqlite:///{tmp_path}/ludus.db")
    with engine.connect() as connection:
        assert connection.exec_driver_sql("PRAGMA journal_mode").scalar() == "wal"
    engine.dispose()


def test_only_a_store_is_upgraded(url: str, tmp_path: Path) -> None:
    """`ludus view --migrate` made an empty store where there was none."""
    with pytest.raises(
        StoreError, match=r"there is no run store (in .*: nothing to upgrade|at .*:)"
    ):
        RunStore.upgrade(url)
    with pytest.raises(StoreError, match=r"there is no run store at .*ludus\.db"):
        RunStore.upgrade(None, tmp_path / "runs")
    assert not (tmp_path / "runs").exists()
    RunStore.open(url).close()
    RunStore.upgrade(url)
