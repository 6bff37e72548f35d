"""Schema migrations, in one transaction and safe with several processes.

Both databases roll back DDL, so a process killed during a migration leaves the old schema.
A schema change is a change of `schema.py` and one new file in `migrations/versions/`.
"""

from __future__ import annotations

import threading
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, inspect, text

from ludus.core.errors import StoreError
from ludus.store.database import Database
from ludus.store.schema import metadata

MIGRATIONS = Path(__file__).parent / "migrations"
VERSION_TABLE = "ludus_version"
_ADVISORY_LOCK = 0x6C75647573  # "ludus"
_alembic_is_global = threading.Lock()


def migrate(database: Database, scripts: Path = MIGRATIONS) -> None:
    """Upgrade the database to the newest schema in `scripts`.

    Errors: StoreError for a schema newer than `scripts`, for tables of another program, and for an
    older schema in a database opened read-only.
    """
    config = Config(attributes={"connection": None})
    config.set_main_option("script_location", str(scripts).replace("%", "%%"))
    directory = ScriptDirectory.from_config(config)
    head = directory.get_current_head()
    known = {script.revision for script in directory.walk_revisions()}

    current = database.transact(lambda connection: _check(connection, known, database.url))
    if current == head:
        return
    if database.read_only:
        raise StoreError(
            f"{database.url} has the schema {current or 'none'} of an older ludus (this one reads "
            f"{head}): `ludus view --migrate` upgrades it, as does the next run in it"
        )

    def upgrade(connection: Connection) -> None:
        if connection.dialect.name == "postgresql":
            connection.execute(
                text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": _ADVISORY_LOCK}
            )
        if _check(connection, known, database.url) != head:  # no other process was faster
            config.attributes["connection"] = connection
            with _alembic_is_global:
                command.upgrade(config, "head")

    database.transact(upgrade, write=True)


def revision(database: Database) -> str | None:
    """Returns the schema of a store; None where the database holds none."""
    return database.transact(_revision)


def _revision(connection: Connection) -> str | None:
    context = MigrationContext.configure(connection, opts={"version_table": VERSION_TABLE})
    return context.get_current_revision()


def _check(connection: Connection, known: set[str], url: str) -> str | None:
    """Returns the database's revision; None if empty. Errors: StoreError for foreign tables."""
    # Tables first: a migration that another process commits in between then shows its revision.
    taken = sorted(set(inspect(connection).get_table_names()) & set(metadata.tables))
    current = _revision(connection)
    if current is not None and current not in known:
        raise StoreError(
            f"{url} was written by a newer ludus (schema {current}; this ludus reads up to "
            f"{max(known)}): upgrade with pip install -U ludus-rl, or use another store"
        )
    if current is None and taken:
        raise StoreError(
            f"{url} already has tables named {', '.join(taken)} of another program: "
            "use a separate database for the run store"
        )
    return current
