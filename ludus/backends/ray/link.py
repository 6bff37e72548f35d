"""A direct connection between a driver and an actor, for messages in both directions.

A message costs a tenth of a call of a Ray actor. The connection is an addition: where there is none
(a firewall), or where it ends, the calls of Ray go on. Messages are pickled, as Ray's own are, so
the actor accepts no connection that does not begin with its secret, and the driver reads none that
does not answer with the actor's proof: another program may have the port by then. Ray brings both
to the driver. They are not encrypted, so there is no connection where Ray uses TLS.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import secrets
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

CONNECT_S = 30.0
"""Time limit of a connection, and of the secret and the proof that begin it, in seconds."""

SECRET_BYTES = 32
_LENGTH_BYTES = 8


class Address(NamedTuple):
    """The address at which an actor listens, the secret it expects, and the proof it answers."""

    host: str
    port: int
    secret: bytes
    proof: bytes


class Broken(Exception):
    """The connection has ended, or brought something that cannot be read."""


class Link:
    """One end of a connection. Of one event loop."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def connect(cls, address: Address) -> Link:
        """Connect to an actor. Errors: OSError, TimeoutError; Broken for another program."""
        async with asyncio.timeout(CONNECT_S):
            reader, writer = await asyncio.open_connection(address.host, address.port)
            link = cls(reader, writer)
            try:
                writer.write(address.secret)
                proof = await reader.readexactly(SECRET_BYTES)
                if not secrets.compare_digest(proof, address.proof):
                    raise Broken("another program listens there")
            except BaseException as error:
                link.close()
                if isinstance(error, asyncio.IncompleteReadError):
                    raise Broken("it ended before the proof") from error
                raise
        return link

    def send(self, message: Any) -> None:
        """Send a message, without waiting. Errors: whatever pickle raises: nothing is sent."""
        data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
        self._writer.writelines([len(data).to_bytes(_LENGTH_BYTES, "big"), data])

    async def receive(self) -> Any:
        """Wait for a message. Errors: Broken."""
        try:
            length = int.from_bytes(await self._reader.readexactly(_LENGTH_BYTES), "big")
            return pickle.loads(await self._reader.readexactly(length))
        except asyncio.CancelledError:
            raise
        except Exception as error:
            raise Broken(str(error)) from error

    def close(self) -> None:
        """End the connection. Idempotent; the loop may have closed."""
        with suppress(RuntimeError):
            self._writer.transport.abort()


class Listener:
    """An actor's end: accepts the driver, and gives each connection to `serve`."""

    def __init__(self, serve: Callable[[Link], Any]) -> None:
        self._serve = serve
        self._secret, self._proof = (secrets.token_bytes(SECRET_BYTES) for _ in range(2))
        self._server: asyncio.Server | None = None

    async def listen(self, host: str) -> Address:
        """Listen on a free port of an address of this machine. Errors: OSError."""
        if self._server is None:
            self._server = await asyncio.start_server(self._accept, host)
        port: int = self._server.sockets[0].getsockname()[1]
        return Address(host, port, self._secret, self._proof)

    def close(self) -> None:
        """Accept no more connections."""
        if self._server is not None:
            self._server.close()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        link = Link(reader, writer)
        try:
            async with asyncio.timeout(CONNECT_S):
                secret = await reader.readexactly(SECRET_BYTES)
            if secrets.compare_digest(secret, self._secret):
                writer.write(self._proof)
                await self._serve(link)
        except (OSError, EOFError, TimeoutError, asyncio.CancelledError):
            pass  # a stranger, a driver that left, or the end of the loop
        finally:
            link.close()


def is_encrypted() -> bool:
    """True where Ray uses TLS in this process."""
    return os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true")
