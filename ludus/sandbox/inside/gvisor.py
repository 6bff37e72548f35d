"""Process 1 of a gVisor sandbox: serves one call, or those of a session, at the socket on stdin.

gVisor gives the call a kernel of its own, so no namespaces are made within it. What this process
sets up is the same as in the jail: small file systems, no capabilities, limits, the filter.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping, Sequence
from typing import Any

sys.path.insert(0, os.path.abspath(f"{os.path.dirname(__file__)}/../../.."))

from ludus.sandbox.inside import kernel
from ludus.sandbox.inside.frames import receive_frame
from ludus.sandbox.inside.init import Init


class GvisorInit(Init):
    """Process 1 of a call in gVisor. It starts as gVisor's root, which is nobody on the host."""

    def enter(self, disk_mb: int) -> None:
        """Mount the file systems; then act as the program's user, but be owned by root.

        gVisor lets a user's processes signal process 1, so its owner is not the program's user.
        """
        uid, gid = self.settings["become"]
        self._mount_work(f"size={disk_mb}m,mode=755")
        for path in ("/work", "/tmp", "/dev/shm"):
            os.chown(path, uid, gid)
        os.setgroups([])
        os.setresgid(gid, gid, gid)
        os.setresuid(0, uid, 0)
        kernel.libc.prctl(kernel.PR_SET_DUMPABLE, 0, 0, 0, 0)


def take_streams() -> tuple[socket.socket, Sequence[int]]:
    """Move the socket and the pipes away from 0, 1 and 2, which are then empty."""
    sock, outputs = socket.socket(fileno=os.dup(0)), [os.dup(1), os.dup(2)]
    null = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(null, number)
    return sock, outputs


def main() -> None:
    """Serve the host."""
    sock, outputs = take_streams()
    sock.sendall(b"h")
    first, second = receive_frame(sock), receive_frame(sock)
    if first is None or second is None:
        return
    settings: Mapping[str, Any] = first[0]
    sys.path.append(settings["packages_dir"])
    GvisorInit(sock, outputs, settings, None).run(*second)


if __name__ == "__main__":
    main()
