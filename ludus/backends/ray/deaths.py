"""Actors that die: counted against the run's limit, and replaced in the background."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from ludus.core.errors import ConfigError, LudusError
from ludus.telemetry.logs import get_logger

log = get_logger(__name__)


class Deaths:
    """Counts the deaths of one kind of actor.

    Args:
        kind: names the actors in errors, in the plural.
        limit: deaths that the run survives.
    """

    def __init__(self, kind: str, limit: int) -> None:
        self.kind, self.limit = kind, limit
        self.num = 0

    def count(self, reason: object) -> None:
        """Errors: LudusError where more died than the limit allows."""
        self.num += 1
        if self.num > self.limit:
            raise LudusError(
                f"{str(reason).rstrip('.')}; deaths of {self.kind} so far: {self.num}, more than "
                f"backend.args.max_deaths = {self.limit} allows. Resume the run to go on"
            )


class Replacements:
    """Replaces the dead actors of a pool, each in a task of its own.

    Args:
        replace: starts the actor of an index and puts it into the pool.
    """

    def __init__(self, replace: Callable[[int], Awaitable[None]], deaths: Deaths) -> None:
        self._replace, self._deaths = replace, deaths
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._failure: Exception | None = None

    def __contains__(self, index: int) -> bool:
        return index in self._tasks

    def begin(self, index: int, reason: object) -> None:
        """Replace an actor, unless that goes on already. Errors: LudusError: too many died."""
        if index in self._tasks:
            return
        self._deaths.count(reason)
        log.warning("an actor died; replacing it", reason=str(reason))
        task = asyncio.get_running_loop().create_task(self._run(index))
        self._tasks[index] = task
        task.add_done_callback(lambda _: self._tasks.pop(index, None))

    async def wait(self, limit_s: float | None = None) -> None:
        """Wait until one of the replacements has ended. Errors: see `check`."""
        if self._tasks:
            await asyncio.wait(
                self._tasks.values(), timeout=limit_s, return_when=asyncio.FIRST_COMPLETED
            )
        self.check()

    def check(self) -> None:
        """Errors: that of a replacement which failed for good."""
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """End the replacements that go on."""
        for task in list(self._tasks.values()):
            if not task.get_loop().is_closed():
                task.cancel()

    async def _run(self, index: int) -> None:
        """Replace an actor; again where the new one dies, too."""
        while True:
            try:
                await self._replace(index)
                log.info("a dead actor was replaced", index=index)
                return
            except Exception as error:
                self._failure = self._for_good(error)
                if self._failure is not None:
                    return

    def _for_good(self, error: Exception) -> Exception | None:
        """Returns the error after which no other actor is started; None for one more death."""
        if isinstance(error, ConfigError) or not isinstance(error, LudusError):
            return error
        try:
            self._deaths.count(error)
        except LudusError as last:
            return last
        return None
