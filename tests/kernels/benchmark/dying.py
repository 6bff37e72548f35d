"""A process that answers, dies, hangs or talks nonsense, as its job says; run by the tests."""

from __future__ import annotations

import ctypes
import os
import resource
import socket
import sys
import time

from ludus.sandbox.inside.frames import receive_frame, send_frame


def main() -> None:
    sock = socket.socket(fileno=int(sys.argv[1]))
    while (frame := receive_frame(sock)) is not None:
        job, blobs = frame
        match job["do"]:
            case "abort":
                os.abort()
            case "segfault":
                ctypes.string_at(8)
            case "exit":
                os._exit(3)
            case "hang":
                time.sleep(3600)
            case "memory":
                resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
                bytearray(1 << 33)
            case "nonsense":
                sock.sendall(b"\xff" * 64)
                time.sleep(3600)
            case "half":
                sock.sendall(b"\x40\x00\x00\x00{")
                os._exit(0)
        send_frame(sock, {"pid": os.getpid()}, blobs)


if __name__ == "__main__":
    main()
