"""Ports for servers that open one themselves."""

from __future__ import annotations

import errno
import random
import socket

EPHEMERAL = 32768
"""First port that Linux gives to connections and to servers that ask for any port. Between a probe
and the start of a server, one of the tests at work would sometimes be given the probed port."""


def free_port() -> int:
    """A port on loopback that nothing has open, and that nobody is given by chance."""
    draw = random.SystemRandom()
    while True:
        port = draw.randrange(20_000, EPHEMERAL)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                continue
        return port
