"""Shares: what each tenant may hold, so that no tenant shuts out the others.

A tenant is a token. Without tokens, it is a client's address.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from starlette.types import Scope

from ludus.services.server.peers import SharedCounter


@dataclass(frozen=True, slots=True)
class Client:
    """Sender of a request: its token, which owns what it opens ("" without tokens), its address."""

    token: str
    address: str

    @property
    def tenant(self) -> str:
        return self.token or self.address


def client_of(scope: Scope) -> Client:
    """The client of a request."""
    address = scope.get("client") or ("",)
    return Client(str(scope.get("state", {}).get("owner", "")), str(address[0]))


class Shares:
    """Numbers of things held by tenants, each at most `limit`.

    `limit` is `per_tenant`, or if that is 0 an equal part of `total` for each token. With several
    workers, `counter` makes it a limit for all of them; addresses are counted by each worker alone.
    """

    def __init__(
        self,
        total: int,
        per_tenant: int,
        tokens: Sequence[str],
        counter: SharedCounter | None = None,
    ) -> None:
        self.limit = per_tenant or max(1, total // max(1, len(tokens)))
        self._slots = {token: slot for slot, token in enumerate(tokens, start=1)}
        self._counter = counter
        self._held: Counter[str] = Counter()

    def allows(self, tenant: str, number: int = 1) -> bool:
        """True if the tenant may hold `number` more."""
        slot = self._slots.get(tenant)
        others = self._counter.others(slot) if self._counter and slot else 0
        return self._held[tenant] + others + number <= self.limit

    def add(self, tenant: str, number: int = 1) -> None:
        """Count `number` more; fewer, if negative."""
        self._held[tenant] += number
        if self._held[tenant] <= 0:
            del self._held[tenant]
        if self._counter and (slot := self._slots.get(tenant)):
            self._counter.set(self._held[tenant], slot)
