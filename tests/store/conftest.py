"""Both databases, for real: SQLite files, and a PostgreSQL server started for the session."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ludus.store import RunStore

UNPRIVILEGED = "nobody"  # PostgreSQL refuses to run as root


def _as_user(command: list[str]) -> list[str]:
    return ["runuser", "-u", UNPRIVILEGED, "--", *command] if os.geteuid() == 0 else command


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[str]:
    """The URL of a fresh server, without a database name."""
    psycopg = pytest.importorskip("psycopg", reason="psycopg is not installed")
    for program in ("initdb", "postgres", *(["runuser"] if os.geteuid() == 0 else [])):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not on PATH: no PostgreSQL server to test against")
    folder = Path(tempfile.mkdtemp(prefix="ludus-pg-"))
    if os.geteuid() == 0:
        shutil.chown(folder, UNPRIVILEGED)
    data, port = folder / "data", _free_port()
    init = ["initdb", "-D", str(data), "-U", "ludus", "-A", "trust", "-E", "UTF8", "--no-sync"]
    made = subprocess.run(_as_user(init), cwd=folder, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    options = ["-c", "fsync=off", "-c", "full_page_writes=off", "-c", "max_connections=40"]
    options += ["-c", "listen_addresses=127.0.0.1", "-c", f"unix_socket_directories={folder}"]
    with (folder / "log").open("w") as log:
        server = subprocess.Popen(
            _as_user(["postgres", "-D", str(data), "-p", str(port), *options]),
            cwd=folder,
            stdout=log,
            stderr=log,
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
        server.terminate()
        server.wait(timeout=30)
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def postgres_url(postgres_server: str) -> str:
    """The URL of an empty database."""
    import psycopg

    name = f"t{uuid.uuid4().hex}"
    with psycopg.connect(f"{postgres_server}/postgres", autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")  # type: ignore[call-overload]
    return f"{postgres_server}/{name}"


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
