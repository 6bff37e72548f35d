"""A real sshd on loopback, with keys of its own."""

from __future__ import annotations

import getpass
import os
import shutil
import socket
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from ports import free_port


@dataclass(frozen=True, slots=True)
class SshServer:
    """It listens on 127.0.0.1 and 127.0.0.2, for the user of the tests."""

    port: int
    folder: Path
    process: subprocess.Popen[bytes]

    @property
    def ssh(self) -> dict[str, Any]:
        """The section `ssh` of a HOSTS.yaml."""
        return {
            "user": getpass.getuser(),
            "port": self.port,
            "key": str(self.folder / "user"),
            "options": [
                "StrictHostKeyChecking=yes",
                f"UserKnownHostsFile={self.folder / 'known'}",
                "IdentitiesOnly=yes",
                "IdentityAgent=none",
            ],
        }

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(10)


def start_sshd(folder: Path) -> SshServer:
    """Start sshd; skips the test where it is not installed."""
    sshd = shutil.which("sshd") or shutil.which("sshd", path="/usr/sbin:/sbin")
    if sshd is None or shutil.which("ssh") is None:
        pytest.skip("no sshd on this machine (apt-get install openssh-server)")
    if os.getuid() == 0:  # it separates privileges there
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    for name in ("host", "user"):
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
        subprocess.run(command, check=True)
    port = free_port()
    key = (folder / "host.pub").read_text()
    (folder / "known").write_text(f"[127.0.0.1]:{port} {key}[127.0.0.2]:{port} {key}")
    settings = [
        f"Port {port}",
        "ListenAddress 127.0.0.1",
        "ListenAddress 127.0.0.2",
        f"HostKey {folder / 'host'}",
        f"AuthorizedKeysFile {folder / 'user.pub'}",
        "PasswordAuthentication no",
        "KbdInteractiveAuthentication no",
        "UsePAM no",
        "StrictModes no",
        "PermitRootLogin prohibit-password",
        f"PidFile {folder / 'pid'}",
    ]
    (folder / "config").write_text("\n".join(settings) + "\n")
    with (folder / "log").open("w") as log:
        process = subprocess.Popen([sshd, "-D", "-e", "-f", folder / "config"], stderr=log)
    while True:
        with suppress(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", port)).close()
            return SshServer(port, folder, process)
        assert process.poll() is None, (folder / "log").read_text()
        time.sleep(0.02)
