"""Judges that were built, by their arguments: the least recently used is closed."""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from ludus.core.errors import ConfigError, LudusError, described
from ludus.core.types import Spec
from ludus.judges import JUDGES
from ludus.judges.base import Judge, close_all


@dataclass
class _Kept:
    judge: Judge
    num_users: int = 0
    evicted: bool = False


class KeptJudges:
    """At most `most` judges, those in use apart: a judge is closed after its last user."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._kept: OrderedDict[str, _Kept] = OrderedDict()
        self._closing: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._kept)

    @asynccontextmanager
    async def using(self, spec: Spec) -> AsyncIterator[Judge]:
        """A judge for some evaluations. Errors: ConfigError for wrong arguments."""
        key = json.dumps([spec.name, spec.args], sort_keys=True, default=repr)
        if key not in self._kept:
            self._kept[key] = _Kept(_built(spec))
        self._kept.move_to_end(key)
        kept = self._kept[key]
        kept.num_users += 1
        self._evict()
        try:
            yield kept.judge
        finally:
            kept.num_users -= 1
            if kept.evicted and not kept.num_users:
                self._close(kept)

    async def close(self) -> None:
        """Close all judges."""
        judges = [kept.judge for kept in self._kept.values()]
        self._kept.clear()
        await asyncio.gather(close_all(judges), *self._closing)

    def _evict(self) -> None:
        while len(self._kept) > self._most:
            _, kept = self._kept.popitem(last=False)
            kept.evicted = True
            if not kept.num_users:
                self._close(kept)

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
