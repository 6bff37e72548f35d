"""Brings a database to this code's schema, in one transaction, whoever else opens it meanwhile.

Both databases roll back DDL, so a process that dies in mid-migration leaves the schema it found.
A change of the schema is a change of `schema.py` plus one file in `migrations/versions/`.
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

    Errors: StoreError where the schema is newer than `scripts`, where the database is somebody
    else's, and, on a database opened for reading, where the schema is older.
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
            f"{head}): open it once for writing to bring it up to date"
        )

    def upgrade(connection: Connection) -> None:
        if connection.dialect.name == "postgresql":
            connection.execute(
                text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": _ADVISORY_LOCK}
            )
        if _check(connection, known, database.url) != head:  # nobody was faster
            config.attributes["connection"] = connection
            with _alembic_is_global:
                command.upgrade(config, "head")

    database.transact(upgrade, write=True)


def _check(connection: Connection, known: set[str], url: str) -> str | None:
    """The database's revision, None for an empty one. Errors: StoreError where it is not ours."""
    context = MigrationContext.configure(connection, opts={"version_table": VERSION_TABLE})
    current = context.get_current_revision()
    if current is not None and current not in known:
        raise StoreError(
            f"{url} was written by a newer ludus (schema {current}; this one knows up to "
            f"{max(known)}): upgrade with pip install -U ludus-rl, or use another store"
        )
    if current is None:
        taken = sorted(set(inspect(connection).get_table_names()) & set(metadata.tables))
        if taken:
            raise StoreError(
                f"{url} already has tables named {', '.join(taken)} that are not ludus's: "
                "give the run store a database of its own"
            )
    return current
