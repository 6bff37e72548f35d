"""Frames on a socket: a length, a JSON header, and the bytes that its `blobs` announce."""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Mapping, Sequence
from typing import Any


def send_frame(sock: socket.socket, header: Mapping[str, Any], blobs: Sequence[bytes] = ()) -> None:
    """Send a header and bytes."""
    head = json.dumps({**header, "blobs": [len(blob) for blob in blobs]}).encode()
    for part in (struct.pack("=I", len(head)) + head, *blobs):
        sock.sendall(part)


def receive_frame(sock: socket.socket) -> tuple[dict[str, Any], list[bytes]] | None:
    """Returns header and blobs; None at the end of the stream."""
    try:
        size = struct.unpack("=I", exactly(sock, 4))[0]
        header = json.loads(exactly(sock, size))
        return header, [exactly(sock, length) for length in header["blobs"]]
    except EOFError:
        return None


def exactly(sock: socket.socket, length: int) -> bytes:
    """Receive this number of bytes.

    Errors: EOFError at the end of the stream.
    """
    data = bytearray()
    while len(data) < length:
        piece = sock.recv(min(length - len(data), 1 << 20))
        if not piece:
            raise EOFError
        data += piece
    return bytes(data)
