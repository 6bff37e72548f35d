"""Messages between processes: JSON behind its length, on a socket."""

from __future__ import annotations

import json
import socket
import struct
from typing import Any

from ludus.sandbox.inside.frames import exactly

HEAD = struct.Struct("=I")
MAX_BYTES = 32 << 20


def send(sock: socket.socket, value: Any) -> None:
    """Send a value; what JSON does not have is sent as text."""
    data = json.dumps(value, default=str).encode()
    sock.sendall(HEAD.pack(len(data)) + data)


def receive(sock: socket.socket) -> Any:
    """Returns the next value.

    Errors: EOFError at the end of the stream; ValueError for what is no message.
    """
    [length] = HEAD.unpack(exactly(sock, HEAD.size))
    if length > MAX_BYTES:
        raise ValueError(f"a message of {length} bytes")
    return json.loads(exactly(sock, length))
