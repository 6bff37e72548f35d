"""Judges that were built, by their arguments, up to a number that may have processes."""

from __future__ import annotations

import asyncio
import json
from collections import Counter as Counts
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from ludus.core.errors import ConfigError, LudusError, described
from ludus.core.types import Spec
from ludus.judges import JUDGES
from ludus.judges.base import Judge, close_all


class TooManyJudges(LudusError):
    """All judges that a client, or all of them, may have are in use."""


@dataclass
class _Kept:
    judge: Judge
    users: Counts[str] = field(default_factory=Counts)
    """Evaluations under way, by tenant."""


class KeptJudges:
    """At most `most` judges with arguments of clients, `share` of them in use by one tenant.

    Each may have processes of its own, so no more are built while all of them are in use. The
    judges with the operator's arguments alone are always there.
    """

    def __init__(self, most: int, share: int) -> None:
        self._most, self._share = most, share
        self._operators: dict[str, _Kept] = {}
        self._clients: OrderedDict[str, _Kept] = OrderedDict()
        self._closing: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._operators) + len(self._clients)

    @asynccontextmanager
    async def using(self, spec: Spec, tenant: str, *, is_operators: bool) -> AsyncIterator[Judge]:
        """A judge for some evaluations.

        Errors: ConfigError for wrong arguments; TooManyJudges.
        """
        key = json.dumps([spec.name, spec.args], sort_keys=True, default=repr)
        if is_operators:
            if key not in self._operators:
                self._operators[key] = _Kept(_built(spec))
            kept = self._operators[key]
        else:
            kept = self._of_client(key, spec, tenant)
        kept.users[tenant] += 1
        try:
            yield kept.judge
        finally:
            kept.users[tenant] -= 1
            kept.users += Counts()  # without the tenants that are at 0

    async def close(self) -> None:
        """Close all judges."""
        judges = [one.judge for some in (self._operators, self._clients) for one in some.values()]
        self._operators.clear()
        self._clients.clear()
        await asyncio.gather(close_all(judges), *self._closing)

    def _of_client(self, key: str, spec: Spec, tenant: str) -> _Kept:
        """Errors: ConfigError, TooManyJudges."""
        kept = self._clients.get(key)
        if kept is None or not kept.users[tenant]:
            used = sum(tenant in other.users for other in self._clients.values())
            if used >= self._share:
                raise TooManyJudges(f"{used} judges with other arguments are in use, your share")
        if kept is None:
            judge = _built(spec)
            if len(self._clients) >= self._most:
                self._make_room()
            kept = self._clients[key] = _Kept(judge)
        self._clients.move_to_end(key)
        return kept

    def _make_room(self) -> None:
        """Close the least recently used judge of those not in use. Errors: TooManyJudges."""
        idle = next((key for key, kept in self._clients.items() if not kept.users), None)
        if idle is None:
            raise TooManyJudges(f"{self._most} judges with other arguments are in use")
        self._close(self._clients.pop(idle))

    def _close(self, kept: _Kept) -> None:
        closing = asyncio.ensure_future(close_all([kept.judge]))
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)


def _built(spec: Spec) -> Judge:
    """Errors: ConfigError, also for arguments on which the judge raises."""
    try:
        return JUDGES.build(spec, "judge")
    except LudusError:
        raise
    except Exception as error:
        raise ConfigError(f"judge.args: it cannot be built: {described(error)[:300]}") from error
