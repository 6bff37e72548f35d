"""Which addresses a model's endpoint may not have: a cloud machine's own services, and multicast.

Who may post rollouts names an address, and this machine sends requests there. A cloud's metadata
service answers whoever asks from the machine itself, with its credentials too. So a number is
checked when it is given, a name when it is given, before each connection, and by the address that
the connection came to: names may stand for one address now and for another in a second.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Awaitable, Callable
from typing import Any

METADATA = frozenset(map(ipaddress.ip_address, ("100.100.100.200", "192.0.0.192", "fd00:ec2::254")))
"""Metadata services that are not link-local: Alibaba's, Oracle's, and Amazon's over IPv6."""

NAT64 = ipaddress.ip_network("64:ff9b::/96")

Trace = Callable[[str, dict[str, Any]], Awaitable[None]]


class OffLimits(Exception):
    """An address that no model has."""


def off_limits(text: str) -> bool:
    """Whether it is the number of such an address, in any of the forms that carry an IPv4 one."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return False
    if isinstance(address, ipaddress.IPv6Address):
        within = address.ipv4_mapped or address.sixtofour
        if within is None and address in NAT64:
            within = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        address = within or address
    return address.is_link_local or address.is_multicast or address in METADATA


async def check_host(host: str, port: int) -> None:
    """Errors: OffLimits where the name stands for such an address, beside others too.

    A name that is not known passes: connecting to it will say so.
    """
    try:
        found = await asyncio.to_thread(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return
    for *_, address in found:
        _refuse(host, str(address[0]))


def guard(host: str) -> Trace:
    """For httpcore's `trace`: checks connections to `host` before they are made, and what they
    came to before anything is sent. A connection to a proxy is not one to the host."""
    direct = False

    async def watch(event: str, info: dict[str, Any]) -> None:
        nonlocal direct
        if event == "connection.connect_tcp.started":
            if direct := info["host"] == host:
                await check_host(host, info["port"])
        elif event == "connection.connect_tcp.complete" and direct:
            stream = info["return_value"]
            peer = stream.get_extra_info("server_addr")
            try:
                _refuse(host, str(peer[0]) if peer else "")
            except OffLimits:
                await stream.aclose()
                raise

    return watch


def _refuse(host: str, address: str) -> None:
    if off_limits(address):
        raise OffLimits(f"{host} is {address}: link-local, multicast, or a cloud's own service")
