"""A real Redis server on loopback."""

from __future__ import annotations

import socket
import subprocess
import time
from pathlib import Path


def start_redis(port: int, folder: Path) -> subprocess.Popen[bytes]:
    command = ["redis-server", "--port", str(port), "--save", "", "--dir", str(folder)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    while True:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            return server
        except ConnectionRefusedError:
            assert server.poll() is None
            time.sleep(0.02)
