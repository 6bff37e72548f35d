"""Blocks link-local, multicast and cloud metadata addresses for model endpoints (SSRF).

Clients that post rollouts choose the address to which this machine sends requests. A cloud's
metadata service answers any local process, and returns credentials. Therefore IP addresses are
checked when given. Host names are checked when given, before each connection, and by the peer
address after connecting, since a name can resolve to another address at any time.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Awaitable, Callable
from typing import Any

METADATA = frozenset(map(ipaddress.ip_address, ("100.100.100.200", "192.0.0.192", "fd00:ec2::254")))
"""Metadata services that are not link-local: Alibaba, Oracle, and Amazon over IPv6."""

NAT64 = ipaddress.ip_network("64:ff9b::/96")

Trace = Callable[[str, dict[str, Any]], Awaitable[None]]


class BlockedAddress(Exception):
    """The address is blocked for endpoints."""


def is_blocked(text: str) -> bool:
    """True if `text` is a blocked IP address, also when an IPv6 form embeds an IPv4 address."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return False
    if isinstance(address, ipaddress.IPv6Address):
        embedded = address.ipv4_mapped or address.sixtofour
        if embedded is None and address in NAT64:
            embedded = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        address = embedded or address
    return address.is_link_local or address.is_multicast or address in METADATA


async def check_host(host: str, port: int) -> None:
    """Errors: BlockedAddress where any address of the host is blocked.

    An unknown name passes; connecting to it fails later.
    """
    try:
        resolved = await asyncio.to_thread(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return
    for *_, address in resolved:
        _refuse(host, str(address[0]))


def guard(host: str) -> Trace:
    """Returns a `trace` callback for httpcore that checks connections to `host`: before connecting,
    and the peer address before sending. Connections to a proxy are not checked."""
    direct = False

    async def check_event(event: str, info: dict[str, Any]) -> None:
        nonlocal direct
        if event == "connection.connect_tcp.started":
            if direct := info["host"] == host:
                await check_host(host, info["port"])
        elif event == "connection.connect_tcp.complete" and direct:
            stream = info["return_value"]
            peer = stream.get_extra_info("server_addr")
            try:
                _refuse(host, str(peer[0]) if peer else "")
            except BlockedAddress:
                await stream.aclose()
                raise

    return check_event


def _refuse(host: str, address: str) -> None:
    if is_blocked(address):
        raise BlockedAddress(
            f"{host} is {address}: link-local, multicast, or a cloud metadata service"
        )
