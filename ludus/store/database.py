"""Database connections: open, transactions with retries, error messages.

SQLite: WAL (readers continue while a step is written), foreign keys, a busy timeout, and full
synchronisation (a recorded step survives a power cut). Python's implicit transactions are off,
because they exclude DDL. Writers take the lock at BEGIN: they wait there and do not fail later.
PostgreSQL: psycopg 3, with the same timeout on locks.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

from sqlalchemy import URL, Connection, Engine, create_engine, event, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, OperationalError
from sqlalchemy.pool import QueuePool

from ludus.core.errors import ConfigError, MissingDependency, StoreError

T = TypeVar("T")

_BACKOFF_S = (0.05, 0.2, 0.8, 3.2)
_CONNECT_TIMEOUT_S = 10
_WRITE = "ludus_write"

_SQLITE_ADVICE = {
    sqlite3.SQLITE_BUSY: "another process holds the lock: wait for that process, or end it",
    sqlite3.SQLITE_LOCKED: "another process holds the lock: wait for that process, or end it",
    sqlite3.SQLITE_FULL: "the database or its disk is full: free some space, then resume the run",
    sqlite3.SQLITE_CORRUPT: "the file is damaged: restore a backup, or move the file away",
    sqlite3.SQLITE_NOTADB: "the file is not an SQLite database: name another file, or move it away",
    sqlite3.SQLITE_READONLY: "the file is read-only: check the rights on file and folder",
    sqlite3.SQLITE_CANTOPEN: "the file cannot be opened: check that the path is a readable "
    "file and that its folder exists and is writable",
    sqlite3.SQLITE_IOERR: "the disk failed or is full: check the disk, then resume the run",
}
_POSTGRES_ADVICE = {  # by SQLSTATE, or by its first two characters
    "53100": "the server's disk is full: free some space, then resume the run",
    "53300": "the server has no free connection: close connections, or raise max_connections",
    "55P03": "another session holds the lock: wait for that session, or end it",
    "57P": "the server is shutting down or starting: try again when it is up",
    "42501": "permission denied: grant this user the rights on the database",
    "25006": "the server refuses writes (possibly a standby): use the primary's address",
    "40": "a conflict with other sessions: try again",
    "XX": "the database is damaged: see the server's log, restore a backup",
}
_UNREACHABLE = "no connection: check that the server runs, the address, the user and the database"


class Database:
    """A SQLAlchemy engine; `transact` is the only access.

    Errors: ConfigError for an invalid URL, StoreError for every database error.
    """

    def __init__(self, url: str, *, read_only: bool = False, timeout_s: float = 30.0) -> None:
        parsed = _parse(url)
        self.url = parsed.render_as_string(hide_password=True)
        self.read_only = read_only
        if parsed.drivername == "sqlite":
            self.engine = _sqlite(parsed, read_only, timeout_s)
        else:
            self.engine = _postgres(parsed, read_only, timeout_s)
        if self.engine.dialect.name == "sqlite" and not read_only:
            self._use_wal(timeout_s)

    def transact(self, work: Callable[[Connection], T], *, write: bool = False) -> T:
        """Run `work` in one transaction and return its result; retry transient failures.

        A failed attempt is rolled back, so `work` must only be safe to call again.
        Errors: StoreError, with the database's error as its cause.
        """
        if write and self.read_only:
            raise StoreError(f"run store {self.url} was opened read-only")
        attempt = 0
        while True:
            try:
                with self.engine.connect() as connection:
                    connection.execution_options(**{_WRITE: write})
                    with connection.begin():
                        return work(connection)
            except DBAPIError as error:
                if attempt == len(_BACKOFF_S) or not _is_transient(error):
                    raise self._explained(error) from error
            time.sleep(_BACKOFF_S[attempt])
            attempt += 1

    def close(self) -> None:
        """Close all connections. Safe to call twice."""
        self.engine.dispose()

    def _use_wal(self, timeout_s: float) -> None:
        """Switch to WAL, with retries: SQLite does not wait for the lock here."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                with self.engine.connect() as connection:
                    raw = connection.connection.dbapi_connection
                    assert raw is not None
                    raw.cursor().execute("PRAGMA journal_mode=WAL")
                return
            except (sqlite3.Error, DBAPIError) as error:
                origin = error.orig if isinstance(error, DBAPIError) else error
                locked = _sqlite_code(origin) in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
                if not locked or time.monotonic() > deadline:
                    self.close()
                    raise self._explained(error) from error
                time.sleep(0.02)

    def _explained(self, error: DBAPIError | sqlite3.Error) -> StoreError:
        origin = error.orig if isinstance(error, DBAPIError) else error
        if isinstance(origin, sqlite3.Error):
            advice = _SQLITE_ADVICE.get(_sqlite_code(origin), "")
        else:
            state = getattr(origin, "sqlstate", None)
            codes = (state[:length] for length in (5, 3, 2)) if state else ()
            advice = next((_POSTGRES_ADVICE[key] for key in codes if key in _POSTGRES_ADVICE), "")
            if state is None or state.startswith("08"):
                advice = _UNREACHABLE
        reason = " ".join(str(origin).split())
        return StoreError(
            f"run store {self.url}: " + (f"{advice} ({reason})" if advice else reason)
        )


def _sqlite_code(error: BaseException | None) -> int:
    """Returns SQLite's primary result code, the low byte of an extended code."""
    return int(getattr(error, "sqlite_errorcode", 0)) & 0xFF


def _is_transient(error: DBAPIError) -> bool:
    """True if a retry makes sense: a lost connection, a deadlock, a starting server.

    A locked SQLite file is not transient: the busy timeout has already passed.
    """
    if isinstance(error.orig, sqlite3.Error):
        return False
    state = getattr(error.orig, "sqlstate", None)
    if state is None:  # no connection, or a broken connection
        return isinstance(error, OperationalError)
    return error.connection_invalidated or state[:2] in ("08", "40") or state[:3] == "57P"


def _parse(url: str) -> URL:
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError) as error:  # not shown: the URL may hold a password
        raise ConfigError(
            "store: this is not a database URL: write sqlite:///FOLDER/FILE.db, or "
            "postgresql://USER:PASSWORD@HOST:PORT/DATABASE"
        ) from error
    kind = parsed.drivername.partition("+")[0]
    if kind in ("postgresql", "postgres"):
        if find_spec("psycopg") is None:
            raise MissingDependency("psycopg", "postgres", "a run store on PostgreSQL")
        return parsed.set(drivername="postgresql+psycopg")
    if kind != "sqlite":
        raise ConfigError(f"store: {kind} is not supported: use sqlite:///... or postgresql://...")
    if parsed.database in (None, "", ":memory:"):
        raise ConfigError("store: the run store must outlive the run: sqlite:///FOLDER/FILE.db")
    return parsed.set(drivername="sqlite")


def _sqlite(url: URL, read_only: bool, timeout_s: float) -> Engine:
    path = Path(url.database or "").expanduser().absolute()
    if path.is_dir():
        raise ConfigError(f"store: {path} is a folder: name a file in it, sqlite:///FOLDER/FILE.db")
    if path.exists() and not path.is_file():
        raise ConfigError(f"store: {path} is a pipe or a device: move it away, or name a file")
    if read_only and not path.exists():
        raise StoreError(f"there is no run store at {path}: a training run creates a store")
    if not read_only:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(f"run store {path}: its folder cannot be created ({error})") from error
    address = f"file:{quote(str(path))}?mode={'ro' if read_only else 'rwc'}"

    def connect() -> sqlite3.Connection:
        connection = sqlite3.connect(
            address, uri=True, timeout=timeout_s, isolation_level=None, check_same_thread=False
        )
        connection.execute("PRAGMA foreign_keys=ON")
        connection.execute("PRAGMA synchronous=FULL")
        return connection

    engine = create_engine("sqlite://", creator=connect, poolclass=QueuePool)

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        write = connection.get_execution_options().get(_WRITE, False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if write else "BEGIN")

    return engine


def _postgres(url: URL, read_only: bool, timeout_s: float) -> Engine:
    query = {"connect_timeout": str(_CONNECT_TIMEOUT_S), "application_name": "ludus", **url.query}
    engine = create_engine(
        url.set(query=query), execution_options={"postgresql_readonly": True} if read_only else {}
    )

    @event.listens_for(engine, "connect")
    def configure(connection: Any, _record: Any) -> None:
        connection.execute(f"SET lock_timeout = {max(1, int(timeout_s * 1000))}")
        connection.commit()

    return engine
