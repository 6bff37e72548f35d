"""Many hosts of one environment: which takes a session, which are well, who has to wait.

A session goes to the host with the largest weight for its key among those that take sessions. The
first call of an event loop makes its fleet. A task watches the hosts while sessions are open:

    NEW, DOWN, REFUSED   asked again after a pause; UP where it answers and is like the others
    UP                   pinged; DOWN where it is silent, refuses connections or answers rubbish
    draining, full       opens no session until it says so, or until the time that it named
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from ludus.core.errors import ConfigError, EnvError
from ludus.envs.remote.ask import Description, agreed, describe, reasons
from ludus.envs.remote.host import IDLE_S, Host, Session, State, Use
from ludus.envs.remote.hosts import HostList, weight
from ludus.envs.remote.lag import Lag
from ludus.envs.remote.wire import Draining, Full, Gone, Refused
from ludus.telemetry.hosts import HOSTS
from ludus.telemetry.logs import get_logger

log = get_logger(__name__)

TICK_S = 0.25
SUSPENDED_S = 1.0
"""Delay of a tick that means that this process did not run."""

MAX_OPENING = 256
"""Sessions that are being opened at the same time; others wait for their turn."""

FILE_S, DNS_S = 1.0, 5.0
"""Seconds between two looks at a list of hosts."""

MAX_AVOIDED = 100_000
"""Keys whose last host is remembered."""

_FLEETS: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[Place, Fleet]] = WeakKeyDictionary()
_REFERENCES: dict[Place, Description] = {}
"""The environment of a fleet's hosts, as the first has said; for all loops of this process."""


@dataclass(frozen=True)
class Place:
    """A fleet's hosts, and how they are used."""

    hosts: HostList
    use: Use

    def fleet(self) -> Fleet:
        """The fleet of the running loop."""
        fleets = _FLEETS.setdefault(asyncio.get_running_loop(), {})
        if self not in fleets:
            fleets[self] = Fleet(self)
        return fleets[self]

    def refer(self, told: Description) -> str | None:
        """The difference of a host from the first; None: they are alike, or it is the first."""
        return _REFERENCES.setdefault(self, told).difference(told)

    def description(self) -> Description:
        """The environment of the hosts. The first call blocks: not for an episode's event loop.

        Errors: ConfigError where two hosts differ, or the list is wrong; EnvError where none
        answers.
        """
        if self not in _REFERENCES:
            urls, env = self.hosts.read(), self.use.env
            alone = not self.use.compared
            told = describe(urls[0], env, compared=False) if alone else agreed(urls, env)
            _REFERENCES.setdefault(self, told)
        return _REFERENCES[self]


class Fleet:
    """The hosts, as the episodes of one event loop see them."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._hosts: dict[str, Host] = {}
        self._leaving: list[Host] = []
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._avoided: dict[str, str] = {}
        self._num_opening, self._turns = 0, asyncio.Semaphore(MAX_OPENING)
        self._lag = Lag()
        self._keeper: asyncio.Task[None] | None = None
        self._stamp: object = None
        self._read_at = 0.0
        self._complaint = ""

    async def open(self, key: str, deadline: float) -> Session:
        """Open a session at the key's host. Errors: EnvError where no host takes it in time."""
        began = time.monotonic()
        self._num_opening += 1
        try:
            await self._start()
            await self._turn(deadline)
        except BaseException:
            self._num_opening -= 1
            raise
        try:
            while True:
                host = self._choose(key)
                if host is None:
                    await self._wait(deadline)
                    continue
                if host.state is State.NEW:
                    await asyncio.shield(host.check())
                    continue
                try:
                    session = await host.open(key)
                except Gone as error:
                    self._note(host, error)
                    if time.monotonic() > deadline:
                        raise EnvError(self._hopeless()) from error
                    continue
                HOSTS.open(host.url, time.monotonic() - began)
                self._avoided.pop(key, None)
                self._wake(2)
                return session
        finally:
            self._num_opening -= 1
            self._turns.release()

    async def _turn(self, deadline: float) -> None:
        """Wait until this session may be opened. Errors: EnvError at the deadline."""
        if not self._turns.locked():
            await self._turns.acquire()
            return
        try:
            async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                await self._turns.acquire()
        except TimeoutError:
            raise EnvError(self._hopeless()) from None

    def avoid(self, key: str, host: Host) -> None:
        """The next session of the key goes to another host, if one takes it."""
        HOSTS.count("lost")
        if len(self._avoided) < MAX_AVOIDED:
            self._avoided[key] = host.url

    def keeps(self, session: Session) -> bool:
        """True if the session may play another episode."""
        host = session.host
        return session.is_open and host.listed and not host.draining

    # Choice

    def _choose(self, key: str) -> Host | None:
        now, avoided = time.monotonic(), self._avoided.get(key)
        able = [host for host in self._hosts.values() if host.takes_session(now)]
        others = [host for host in able if host.url != avoided]
        return max(others or able, key=lambda host: weight(host.url, key), default=None)

    def _note(self, host: Host, error: Gone) -> None:
        """A host has not opened a session: another one will."""
        HOSTS.count("moved")
        if isinstance(error, Full):
            if time.monotonic() >= host.full_until:
                host.fill(error)
        elif isinstance(error, Draining):
            host.drain()
        elif isinstance(error, Refused):
            host.refuse(str(error))

    async def _wait(self, deadline: float) -> None:
        """Wait until a host may take a session. Errors: EnvError at the deadline, or where all
        hosts are refused."""
        refused = all(host.state is State.REFUSED for host in self._hosts.values())
        left = deadline - time.monotonic()
        if refused or left <= 0:
            raise EnvError(self._hopeless())
        waiting = asyncio.get_running_loop().create_future()
        self._waiting.append(waiting)
        try:
            async with asyncio.timeout(left):
                await waiting
        except TimeoutError:
            raise EnvError(self._hopeless()) from None
        finally:
            if not waiting.done():
                waiting.cancel()

    def _hopeless(self) -> str:
        told = {host.url: host.condition for host in self._hosts.values()}
        if len(told) == 1:
            url, why = next(iter(told.items()))
            return why if url in why else f"{url}: {why}"
        return f"none of {len(told)} environment hosts takes a session: {reasons(told)}"

    def _wake(self, number: int = 1) -> None:
        while self._waiting and number > 0:
            waiting = self._waiting.popleft()
            if not waiting.done():
                waiting.set_result(None)
                number -= 1

    # Care of the hosts

    async def _start(self) -> None:
        if not self._hosts:
            urls = self._place.hosts.given or await asyncio.to_thread(self._place.hosts.read)
            self._stamp = self._place.hosts.stamp
            if not self._hosts:  # else another episode has read them
                self._set_hosts(urls)
        if self._keeper is None or self._keeper.done():
            self._keeper = asyncio.create_task(self._keep())

    def _set_hosts(self, urls: Sequence[str]) -> None:
        """Take over a list: new hosts take sessions, those that left finish theirs."""
        for url in [url for url in self._hosts if url not in urls]:
            host = self._hosts.pop(url)
            host.listed = False
            self._leaving.append(host)
            HOSTS.leave(url)
        for url in urls:
            if url not in self._hosts:
                self._hosts[url] = self._returned(url) or self._new(url)

    def _new(self, url: str) -> Host:
        return Host(url, self._place.use, self._wake, self._place.refer, self._lag)

    def _returned(self, url: str) -> Host | None:
        for host in self._leaving:
            if host.url == url:
                self._leaving.remove(host)
                host.listed = True
                return host
        return None

    async def _keep(self) -> None:
        """Watch the hosts until no session has been open for a while."""
        used = ticked = time.monotonic()
        lag = asyncio.create_task(self._lag.measure())
        try:
            while time.monotonic() - used < IDLE_S:
                await asyncio.sleep(TICK_S)
                now = time.monotonic()
                everyone = [*self._hosts.values(), *self._leaving]
                if now - ticked > TICK_S + SUSPENDED_S:
                    for host in everyone:
                        host.forget_pings()
                ticked = now
                if self._num_opening or any(host.num_sessions for host in everyone):
                    used = now
                for host in everyone:
                    host.watch(now)
                self._leaving = [host for host in self._leaving if host.num_sessions]
                await self._refresh(now)
                self._look(now)
        except asyncio.CancelledError:  # the loop ends: nothing of it may stay
            fleets = _FLEETS.get(asyncio.get_running_loop(), {})
            fleets.pop(self._place, None)
            raise
        finally:
            lag.cancel()
            for host in [*self._hosts.values(), *self._leaving]:
                host.end()

    def _look(self, now: float) -> None:
        """Ask the hosts again whose pause is over; let sessions try those that were full."""
        for host in self._hosts.values():
            if host.state is State.NEW or (not host.is_up and now >= host.retry_at):
                host.check()
            elif host.takes_session(now):
                self._wake()

    async def _refresh(self, now: float) -> None:
        """Read the list of hosts again, where it may have changed."""
        hosts = self._place.hosts
        if not hosts.changes or now - self._read_at < (FILE_S if hosts.file else DNS_S):
            return
        self._read_at = now
        if hosts.file is not None and hosts.stamp == self._stamp:
            return
        self._stamp = hosts.stamp
        try:
            self._set_hosts(await asyncio.to_thread(hosts.read))
            self._complaint = ""
        except ConfigError as error:
            if self._complaint != str(error):
                self._complaint = str(error)
                log.warning(
                    "the list of hosts is not read", reason=str(error), kept=len(self._hosts)
                )
