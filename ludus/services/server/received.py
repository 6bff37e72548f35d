"""Bytes of unfinished bodies and messages, limited for a process.

A body has a limit of its own, but thousands of half-sent ones could fill the memory. Beyond the
limit, the tenant that holds the most bytes gives way: its oldest connection is refused. So nobody
shuts others out.
"""

from __future__ import annotations

from typing import Protocol


class Receiving(Protocol):
    """A connection that receives a body or a message."""

    def give_way(self) -> None:
        """Refuse what is being received, and close."""


class ReceivedBytes:
    """Bytes that connections have received of unfinished bodies and messages, by tenant."""

    def __init__(self, limit: int) -> None:
        self.limit, self.total = limit, 0
        self._held: dict[Receiving, tuple[str, int]] = {}
        self._by_tenant: dict[str, dict[Receiving, None]] = {}
        self._sizes: dict[str, int] = {}

    def hold(self, connection: Receiving, tenant: str, size: int) -> None:
        """Set the bytes that a connection holds. Beyond the limit, connections are refused."""
        before, held = self._held.get(connection, (tenant, 0))
        if before != tenant or not size:
            self.release(connection)
            held = 0
        if not size:
            return
        self._held[connection] = (tenant, size)
        self._by_tenant.setdefault(tenant, {})[connection] = None
        self._sizes[tenant] = self._sizes.get(tenant, 0) + size - held
        self.total += size - held
        while self.total > self.limit:
            heaviest = max(self._sizes, key=self._sizes.__getitem__)
            oldest = next(iter(self._by_tenant[heaviest]))
            self.release(oldest)
            oldest.give_way()

    def release(self, connection: Receiving) -> None:
        """Forget a connection's bytes; may be called again."""
        if connection not in self._held:
            return
        tenant, size = self._held.pop(connection)
        self.total -= size
        self._sizes[tenant] -= size
        del self._by_tenant[tenant][connection]
        if not self._by_tenant[tenant]:
            del self._by_tenant[tenant], self._sizes[tenant]
