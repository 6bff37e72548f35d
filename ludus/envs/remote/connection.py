"""A WebSocket to a host, shared by many sessions.

Each message is a call of one session, with a number that its answer repeats. Calls of different
sessions are under way at the same time, so 20,000 sessions need a few hundred connections.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import InvalidStatus, WebSocketException

from ludus.core.errors import EnvError
from ludus.core.remote import retry_after
from ludus.envs.remote import wire
from ludus.envs.remote.ask import CONNECT_S
from ludus.envs.remote.lag import Lag
from ludus.envs.remote.wire import Answer, Full, Gone, Refused

PULSE_S = 0.5
"""Seconds without a message before a ping is sent."""

SILENCE_S = 1.0
"""Timeout of the ping, in seconds."""

Late = Callable[[Answer], None]


class _Direct(connect):
    """Follows no redirect: the session would be at a host that is not in the list."""

    def process_redirect(self, exc: Exception) -> Exception:
        return exc


class Connection:
    """An open WebSocket. `on_lost` is called once, when it is lost; then `lost` has the reason."""

    def __init__(
        self, url: str, socket: ClientConnection, on_lost: Callable[[Connection], None]
    ) -> None:
        self.url, self._socket, self._on_lost = url, socket, on_lost
        self.lost: str | None = None
        self.is_rubbish = False
        self.num_sessions = 0
        self.last_heard = self.last_used = time.monotonic()
        self.ping_sent: float | None = None
        self._number = 0
        self._pending: dict[int, asyncio.Future[Answer]] = {}
        self._late: dict[int, Late] = {}
        self._tasks = {asyncio.create_task(self._read())}

    @classmethod
    async def open(
        cls, url: str, on_lost: Callable[[Connection], None], lag: Lag, *, again: bool = False
    ) -> Connection:
        """Errors: Gone, also after CONNECT_S; Refused, Full where the host says so."""
        address = "ws" + url.removeprefix("http") + "/ws"
        try:
            socket = await _Direct(
                address,
                additional_headers=wire.headers(),
                compression=None,
                open_timeout=CONNECT_S + lag.slack_s,
                close_timeout=CONNECT_S,
                ping_interval=None,
                max_size=wire.MAX_BYTES,
                proxy=None,
            )
        except InvalidStatus as error:
            raise _refusal(url, error) from error
        except TimeoutError as error:
            if lag.slack_s and not again:  # this process was late itself
                return await cls.open(url, on_lost, lag, again=True)
            raise Gone(wire.no_answer(url, error)) from error
        except (OSError, WebSocketException, ValueError) as error:
            raise Gone(wire.no_answer(url, error)) from error
        return cls(url, socket, on_lost)

    @property
    def is_busy(self) -> bool:
        return bool(self._pending)

    async def call(self, number: int, **fields: Any) -> Answer:
        """Returns the answer to the call with a number of `next_number`. Errors: Gone."""
        if self.lost is not None:
            raise Gone(self.lost)
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._pending[number] = future
        self.last_used = time.monotonic()
        try:
            await self._send({"id": number, **fields})
            return await future
        finally:
            self._pending.pop(number, None)
            if not future.cancel() and not future.cancelled():
                future.exception()  # else asyncio reports it, where sending has failed before

    def next_number(self) -> int:
        self._number += 1
        return self._number

    def when_answered(self, number: int, act: Late) -> None:
        """Act on the answer to a call that nobody waits for any more."""
        if self.lost is None:
            self._late[number] = act

    def post(self, **fields: Any) -> None:
        """Send a call whose answer does not matter."""
        if self.lost is None:
            number = self.next_number()
            self._late[number] = lambda _: None
            self._run(lambda: self._send({"id": number, **fields}))

    def ping(self) -> None:
        """Send a ping, unless one is under way."""
        if self.lost is None and self.ping_sent is None:
            self.ping_sent = time.monotonic()
            self._run(self._ping)

    def end(self, why: str) -> None:
        """Cut the connection; calls that wait get Gone."""
        if self.lost is None:
            self.lost = why
            for future in self._pending.values():
                if not future.done():
                    future.set_exception(Gone(why))
            late = list(self._late.values())
            self._pending.clear()
            self._late.clear()
            self._socket.transport.abort()
            self._on_lost(self)
            for act in late:
                act(Answer(status=503))

    async def _send(self, call: dict[str, Any]) -> None:
        text = json.dumps({key: value for key, value in call.items() if value is not None})
        try:
            await self._socket.send(text)
        except (OSError, WebSocketException) as error:
            self.end(self._gone(error))
            raise Gone(self._gone(error)) from error

    async def _ping(self) -> None:
        with suppress(OSError, WebSocketException):
            # Without a payload, websockets draws one from the global random generator.
            await (await self._socket.ping(str(self.next_number())))
            self._heard()

    async def _read(self) -> None:
        why = self._gone(ConnectionError("closed"))
        try:
            while True:
                text = await self._socket.recv()
                self._heard()
                self._deliver(text)
        except asyncio.CancelledError:
            self._on_lost, why = lambda _: None, "this process has closed the connection"
            raise
        except (OSError, WebSocketException) as error:
            why = self._gone(error)
        except EnvError as error:
            self.is_rubbish, why = True, str(error)
        finally:
            self.end(why)

    def _heard(self) -> None:
        self.last_heard, self.ping_sent = time.monotonic(), None

    def _deliver(self, text: str | bytes) -> None:
        """Errors: EnvError where the message is no answer to a call of this connection."""
        entry = wire.parse(self.url, text)
        answer = wire.read(self.url, Answer, entry)
        number = entry["id"] if isinstance(entry.get("id"), int) else None
        future = self._pending.pop(number, None) if number is not None else None
        late = self._late.pop(number, None) if number is not None else None
        if future is not None and not future.done():
            future.set_result(answer)
        elif late is not None:
            late(answer)
        elif future is None:
            told = f"{entry.get('id')!r:.40} is no call's id"
            raise EnvError(f"{self.url} does not answer as an environment service: {told}")

    def _run(self, work: Callable[[], Awaitable[None]]) -> None:
        # Not a coroutine: a task that is cancelled before it starts would never await it.
        async def run() -> None:
            with suppress(Gone):
                await work()

        task = asyncio.create_task(run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _gone(self, error: BaseException) -> str:
        return f"the environment service at {self.url} is gone ({wire.reason(error)})"


def _refusal(url: str, error: InvalidStatus) -> Gone:
    """The error of a handshake that was answered with another status."""
    response = error.response
    if response.status_code in (401, 403):
        return Refused(f"{url} refuses the token: set LUDUS_TOKEN")
    if response.status_code in (429, 503):
        wait = retry_after(dict(response.headers.raw_items())) or 1.0
        return Full(f"{url} takes no more connections", wait)
    if 300 <= response.status_code < 400:
        where = response.headers.get("location", "")
        return Refused(f"{url} redirects to {where!r:.200}: give that address")
    return Gone(f"{url} answers {response.status_code}")
