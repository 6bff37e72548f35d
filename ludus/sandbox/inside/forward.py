"""Forwards TCP connections of a call to a Unix socket of the host: all that it reaches."""

from __future__ import annotations

import asyncio
import os
import socket
from contextlib import suppress
from typing import NoReturn

READ_BYTES = 1 << 16


def listen(port: int) -> socket.socket:
    """A listening socket of the call's loopback device."""
    return socket.create_server(("127.0.0.1", port), backlog=128)


def serve(listening: socket.socket, target: str) -> NoReturn:
    """Forward until the call ends."""

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            try:
                theirs = await asyncio.open_unix_connection(target)
                await asyncio.gather(copy(reader, theirs[1]), copy(theirs[0], writer))
                theirs[1].close()
            finally:
                writer.close()

    async def main() -> None:
        server = await asyncio.start_server(connected, sock=listening)
        await server.serve_forever()

    try:
        asyncio.run(main())
    finally:
        os._exit(1)


async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copy until the end of the stream, and pass that on."""
    try:
        while piece := await reader.read(READ_BYTES):
            writer.write(piece)
            await writer.drain()
        writer.write_eof()
    except OSError:
        writer.close()  # the other direction ends too
