"""Shared state of a rate limit: a file for the processes of one host, Redis for several hosts.

    full_at     the time at which the bucket is full again, if nobody takes a permit (GCRA's TAT)
    waiting     tickets of the waiters in order of arrival, each with the time it will ask again

A permit moves `full_at` by one interval. The permit n places behind falls at
`full_at - (burst - 1 - n) * interval`. A store without state counts as empty since its clock began
(the host's boot, the start of the Redis server), so a restart adds no burst.
"""

from __future__ import annotations

import fcntl
import math
import os
import sqlite3
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from ludus.config.sections import LimitConfig
from ludus.core.errors import ConfigError, MissingDependency

AHEAD_S = 0.02
"""A permit is granted up to this early, and the caller sleeps until its time: late timers and a
busy store waste no permit."""

REDIS_AHEAD_S = 0.05
"""The same over a network: half of a round trip is lost on the way to the store."""

ABSENT_S = 0.25
"""Delay of a waiter after which those behind it move up."""

CHECK_S = (0.25, 5.0)
"""Shortest and longest time between two questions of a waiter; between them, half of its wait."""

REDIS_TIMEOUT_S = 2.0


class StoreUnavailable(Exception):
    """The store did not answer. Another attempt may help."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A store's answer to a waiter.

    `ticket`: its place in the queue, for its next question. `granted`: it has the permit; it falls
    in `wait_s`, at `at_ns` on the store's clock. Otherwise: ask again in `wait_s`.
    """

    ticket: int
    granted: bool
    wait_s: float
    at_ns: int = 0


class LimitStore(ABC):
    """State of one limit, for one thread. Errors: StoreUnavailable."""

    @abstractmethod
    def take(self, tickets: Sequence[int]) -> list[Answer]:
        """Ask for a permit for each ticket; 0 joins the queue. Atomic."""

    @abstractmethod
    def leave(self, ticket: int) -> None:
        """Leave the queue. Does not raise: a ticket whose owner does not ask is passed over."""

    @abstractmethod
    def close(self) -> None:
        """Release the connection."""


def open_store(config: LimitConfig, name: str, where: str) -> LimitStore:
    """The store of a limit. Errors: ConfigError, MissingDependency."""
    if config.store.startswith(("redis://", "rediss://")):
        return RedisStore(config, name, where)
    return FileStore(config, name, where)


class FileStore(LimitStore):
    """An SQLite file. Its clock is CLOCK_MONOTONIC in ns, which nobody can set.

    The lock is `flock` on a file beside it, which ends with the process that holds it; SQLite's own
    would make waiters poll.
    """

    SETUP = (
        "PRAGMA journal_mode = WAL",  # survives kill -9
        "PRAGMA synchronous = OFF",  # a reboot resets the state anyway
        "CREATE TABLE IF NOT EXISTS bucket (boot TEXT, full_at INTEGER, last INTEGER)",
        "CREATE TABLE IF NOT EXISTS waiting (ticket INTEGER PRIMARY KEY, due INTEGER)",
        "CREATE INDEX IF NOT EXISTS by_due ON waiting (due)",
    )

    def __init__(self, config: LimitConfig, name: str, where: str) -> None:
        self._interval = math.ceil(1e9 / config.rate_per_s)
        self._burst, self._boot = config.burst, _boot_id()
        folder = _folder(config.store, where)
        self.path = folder / f"{quote(name, safe='')}.sqlite"
        self._mode = folder.stat().st_mode & 0o666  # who may write the folder shares the limit
        try:
            with self._locked():
                self._connect()
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(
                f"{where}.store: {self.path} cannot be used: {error}; give a folder that this user "
                "may write, as file:///FOLDER, or remove the file"
            ) from error

    def take(self, tickets: Sequence[int]) -> list[Answer]:
        with self._transaction():
            now = time.monotonic_ns()
            self._db.execute("DELETE FROM waiting WHERE due < ?", [now - round(ABSENT_S * 1e9)])
            return [self._answer(ticket, now) for ticket in tickets]

    def _answer(self, ticket: int, now: int) -> Answer:
        full_at, last = self._state(now)
        if not ticket:
            ticket = last = max(last + 1, now)
        [[before]] = self._db.execute("SELECT count(*) FROM waiting WHERE ticket < ?", [ticket])
        wait = max(full_at, now) + (before + 1 - self._burst) * self._interval - now
        if wait <= AHEAD_S * 1e9:
            at = max(now, full_at - (self._burst - 1) * self._interval)
            full_at = max(full_at, at) + self._interval
            self._db.execute("DELETE FROM waiting WHERE ticket = ?", [ticket])
            answer = Answer(ticket, True, (at - now) / 1e9, at)
        else:
            answer = Answer(ticket, False, next_check_s(wait / 1e9))
            due = now + round(answer.wait_s * 1e9)
            self._db.execute("INSERT OR REPLACE INTO waiting VALUES (?, ?)", [ticket, due])
        self._db.execute("UPDATE bucket SET full_at = ?, last = ?", [full_at, last])
        return answer

    def leave(self, ticket: int) -> None:
        try:
            with self._transaction():
                self._db.execute("DELETE FROM waiting WHERE ticket = ?", [ticket])
        except StoreUnavailable:
            pass

    def close(self) -> None:
        self._db.close()

    def _connect(self) -> None:
        os.close(self._opened(self.path))  # SQLite gives its further files the same mode
        self._db = sqlite3.connect(self.path, isolation_level=None, check_same_thread=False)
        for statement in self.SETUP:
            self._db.execute(statement)
        self._inode = self.path.stat().st_ino

    def _state(self, now: int) -> tuple[int, int]:
        """`full_at` and the last ticket; begun anew after a reboot."""
        full = self._burst * self._interval
        for boot, full_at, last in self._db.execute("SELECT * FROM bucket").fetchall():
            if boot == self._boot:
                return min(full_at, now + full + round(AHEAD_S * 1e9)), last
        self._db.execute("DELETE FROM bucket")
        self._db.execute("DELETE FROM waiting")
        self._db.execute("INSERT INTO bucket VALUES (?, ?, 0)", [self._boot, full])
        return full, 0

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        try:
            with self._locked():
                if not self.path.exists() or self.path.stat().st_ino != self._inode:
                    self._db.close()
                    self._connect()  # a cleaner of old files removed it
                self._db.execute("BEGIN IMMEDIATE")
                try:
                    yield
                    self._db.execute("COMMIT")
                except BaseException:
                    if self._db.in_transaction:
                        self._db.execute("ROLLBACK")
                    raise
        except (OSError, sqlite3.Error) as error:
            raise StoreUnavailable(f"{self.path} cannot be written: {error}") from error

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the lock. It is opened each time: a forked child would keep an open one held."""
        lock = self._opened(self.path.with_suffix(".lock"))
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            os.close(lock)

    def _opened(self, path: Path) -> int:
        """Open a file, made if it is missing; returns its descriptor."""
        try:
            return os.open(path, os.O_RDWR)
        except FileNotFoundError:
            made = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
            os.fchmod(made, self._mode)
            return made


class RedisStore(LimitStore):
    """Three keys of a Redis server, changed by a script. Its clock is the server's, in µs."""

    TAKE = """
    local interval, burst = tonumber(ARGV[1]), tonumber(ARGV[2])
    local ahead, absent = tonumber(ARGV[3]), tonumber(ARGV[4])
    local shortest, longest = tonumber(ARGV[5]), tonumber(ARGV[6])
    local bucket, waiting, due = KEYS[1], KEYS[2], KEYS[3]
    local function text(number) return string.format('%.0f', number) end
    local clock = redis.call('TIME')
    local now = clock[1] * 1000000 + clock[2]
    local state = redis.call('HMGET', bucket, 'full_at', 'last')
    local full_at, last = tonumber(state[1]), tonumber(state[2] or 0)
    if not full_at then
        local info = redis.pcall('INFO', 'server')
        local up = type(info) == 'string' and string.match(info, 'uptime_in_seconds:(%d+)') or 0
        full_at = now - up * 1000000 + burst * interval
    end
    full_at = math.min(full_at, now + burst * interval + ahead)  -- the clock was set back
    for _, gone in ipairs(redis.call('ZRANGEBYSCORE', due, '-inf', '(' .. text(now - absent))) do
        redis.call('ZREM', waiting, gone)
        redis.call('ZREM', due, gone)
    end
    local answers = {}
    for i = 7, #ARGV do
        local ticket = tonumber(ARGV[i])
        if ticket == 0 then
            ticket = math.max(last + 1, now)
            last = ticket
        end
        local before = redis.call('ZCOUNT', waiting, '-inf', '(' .. text(ticket))
        local wait = math.max(full_at, now) + (before + 1 - burst) * interval - now
        if wait <= ahead then
            local at = math.max(now, full_at - (burst - 1) * interval)
            full_at = math.max(full_at, at) + interval
            redis.call('ZREM', waiting, text(ticket))
            redis.call('ZREM', due, text(ticket))
            table.insert(answers, {ticket, 1, at - now, at})
        else
            wait = math.min(wait - ahead, math.max(shortest, math.min(wait / 2, longest)))
            redis.call('ZADD', waiting, text(ticket), text(ticket))
            redis.call('ZADD', due, text(now + wait), text(ticket))
            table.insert(answers, {ticket, 0, wait, 0})
        end
    end
    redis.call('HSET', bucket, 'full_at', text(full_at), 'last', text(last))
    local kept = text(math.ceil((full_at - now) / 1000) + 86400000)
    for _, key in ipairs(KEYS) do redis.call('PEXPIRE', key, kept) end
    return answers
    """

    def __init__(self, config: LimitConfig, name: str, where: str) -> None:
        try:
            import redis
            from redis.backoff import NoBackoff
            from redis.retry import Retry
        except ImportError:
            raise MissingDependency("redis", "redis", f"{where}.store: redis://") from None
        self._failure, self._refusal = redis.RedisError, redis.ResponseError
        self._address = _without_password(config.store)
        self._keys = [f"ludus:limit:{{{name}}}:{part}" for part in ("bucket", "waiting", "due")]
        times = [round(s * 1e6) for s in (REDIS_AHEAD_S, ABSENT_S, *CHECK_S)]
        self._settings = [math.ceil(1e6 / config.rate_per_s), config.burst, *times]
        try:
            self._client: Any = redis.Redis.from_url(
                config.store,
                socket_timeout=REDIS_TIMEOUT_S,
                socket_connect_timeout=REDIS_TIMEOUT_S,
                retry=Retry(NoBackoff(), 0),  # the limiter retries, up to its own deadline
            )
            self._client.ping()
        except ValueError as error:
            raise ConfigError(f"{where}.store: {self._address}: {error}") from None
        except self._failure as error:
            raise ConfigError(
                f"{where}.store: no Redis answers at {self._address}: {error}; start one, correct "
                "the address (redis://[[USER]:PASSWORD@]HOST:PORT/DB), or use store: file"
            ) from None
        self._script = self._client.register_script(self.TAKE)

    def take(self, tickets: Sequence[int]) -> list[Answer]:
        try:
            given = self._script(self._keys, [*self._settings, *tickets])
        except self._failure as error:
            told = "refuses" if isinstance(error, self._refusal) else "does not answer"
            if str(error).startswith("WRONGTYPE"):
                told += f" (delete its keys {', '.join(self._keys)}, which hold something else)"
            raise StoreUnavailable(f"Redis at {self._address} {told}: {error}") from error
        return [
            Answer(ticket, bool(granted), wait / 1e6, 1000 * at)
            for ticket, granted, wait, at in given
        ]

    def leave(self, ticket: int) -> None:
        try:
            for key in self._keys[1:]:
                self._client.zrem(key, ticket)
        except self._failure:
            pass

    def close(self) -> None:
        self._client.close()


def next_check_s(wait_s: float) -> float:
    """Seconds until a waiter asks again, if its permit falls in `wait_s`."""
    return min(wait_s - AHEAD_S, max(CHECK_S[0], min(wait_s / 2, CHECK_S[1])))


def _folder(store: str, where: str) -> Path:
    """The folder of a file store; made if it is missing. Errors: ConfigError."""
    if store != "file":
        folder = Path(urlsplit(store).path)
        if not folder.is_dir():
            raise ConfigError(f"{where}.store: {folder} is not a folder: make it first")
        return folder
    folder = Path(tempfile.gettempdir()) / f"ludus-limits-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        owner = folder.lstat().st_uid
    except OSError as error:
        raise ConfigError(f"{where}.store: {folder} cannot be made: {error}") from error
    if owner != os.getuid() or folder.is_symlink():
        raise ConfigError(f"{where}.store: {folder} belongs to another user: use file:///FOLDER")
    return folder


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return "unknown"  # not Linux: the bound on `full_at` limits the error to one burst


def _without_password(url: str) -> str:
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
