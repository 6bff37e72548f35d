"""Both databases, for real: SQLite files, and a PostgreSQL server started for the session."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ports import free_port

from ludus.store import RunStore


def _unprivileged() -> dict[str, Any]:
    """Options of a process that PostgreSQL agrees to: it refuses to run as root."""
    if os.geteuid() != 0:
        return {}
    nobody = pwd.getpwnam("nobody")
    return {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[str]:
    """The URL of a fresh server, without a database name."""
    psycopg = pytest.importorskip("psycopg", reason="psycopg is not installed")
    for program in ("initdb", "postgres"):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not on PATH: no PostgreSQL server to test against")
    folder, user = Path(tempfile.mkdtemp(prefix="ludus-pg-")), _unprivileged()
    if user:
        os.chown(folder, user["user"], user["group"])
    data, port = folder / "data", free_port()
    init = ["initdb", "-D", str(data), "-U", "ludus", "-A", "trust", "-E", "UTF8", "--no-sync"]
    made = subprocess.run(init, cwd=folder, capture_output=True, text=True, **user)
    assert made.returncode == 0, made.stderr
    options = ["-c", "fsync=off", "-c", "full_page_writes=off", "-c", "max_connections=40"]
    options += ["-c", "listen_addresses=127.0.0.1", "-c", f"unix_socket_directories={folder}"]
    with (folder / "log").open("w") as log:
        server = subprocess.Popen(
            ["postgres", "-D", str(data), "-p", str(port), *options],
            cwd=folder,
            stdout=log,
            stderr=log,
            **user,
        )
    url = f"postgresql://ludus@127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 30
        while True:
            try:
                psycopg.connect(f"{url}/postgres").close()
                break
            except psycopg.OperationalError:
                assert server.poll() is None, (folder / "log").read_text()
                assert time.monotonic() < deadline, (folder / "log").read_text()
                time.sleep(0.05)
        yield url
    finally:
        server.send_signal(signal.SIGINT)  # a fast shutdown: it does not wait for clients
        server.wait(timeout=30)
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def postgres_url(postgres_server: str) -> str:
    """The URL of an empty schema (much faster to make than a database)."""
    import psycopg

    name = f"t{uuid.uuid4().hex}"
    with psycopg.connect(f"{postgres_server}/postgres", autocommit=True) as connection:
        connection.execute(f"CREATE SCHEMA {name}")  # type: ignore[call-overload]
    return f"{postgres_server}/postgres?options=-csearch_path%3D{name}"


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of an empty store, on each database."""
    if request.param == "postgres":
        return str(request.getfixturevalue("postgres_url"))
    return f"sqlite:///{tmp_path}/ludus.db"


@pytest.fixture
def open_store(url: str) -> Iterator[Callable[..., RunStore]]:
    """Opens the store; closes what a test opened."""
    opened: list[RunStore] = []

    def open_(**options: object) -> RunStore:
        opened.append(RunStore.open(url, **options))  # type: ignore[arg-type]
        return opened[-1]

    yield open_
    for store in opened:
        store.close()


@pytest.fixture
def store(open_store: Callable[..., RunStore]) -> RunStore:
    """An empty store with a run "run-1"."""
    store = open_store(timeout_s=5)
    store.create_run("run-1", "demo", {"seed": 1}, {"ludus": "0"})
    return store
