"""The host's side of `isolation: gvisor`: a gVisor sandbox, so a kernel of its own, for each call.

runsc (gVisor, unprivileged user) -> init (process 1 in gVisor) -> program
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from tempfile import gettempdir, mkdtemp
from typing import Any

from ludus.core.errors import ToolError
from ludus.sandbox.bubblewrap import (
    PACKAGES_DIR,
    SETTINGS,
    START_ENVIRONMENT,
    Jailed,
    agent,
    links,
    shown,
)
from ludus.sandbox.cgroups import Cgroup
from ludus.sandbox.languages import PATH
from ludus.sandbox.zygotes import START_TIMEOUT_S, EndedError, Slot, open_outputs, send

CAPABILITIES = ("CHOWN", "KILL", "SETGID", "SETPCAP", "SETUID", "SYS_ADMIN")
"""Rights in gVisor, not on this machine, of the process that sets a call up; code has none."""
FOLDERS = ("proc", "dev", "tmp", "work", "etc", PACKAGES_DIR[1:])
WAIT_FOR_CGROUP = 'read -r _; exec "$0" "$@"'
PREFIX = "ludus-gvisor-"
NUMBERS = count()


def runsc(*arguments: str, state: str | Path) -> list[str]:
    """A command of gVisor's, for an ordinary user and without a network."""
    options = ["--rootless", "--network=none", "--ignore-cgroups", "--overlay2=none"]
    return [shutil.which("runsc") or "runsc", *options, f"--root={state}", *arguments]


@dataclass(slots=True, eq=False, kw_only=True)
class GvisorSlot(Slot):
    """A gVisor sandbox that serves one call, or those of a session."""

    process: subprocess.Popen[bytes]
    state: Path
    settings: Mapping[str, Any]
    answered: bool = False

    async def begin(
        self, job: Mapping[str, Any], blobs: Sequence[bytes], output_bytes: int
    ) -> None:
        try:
            await send(self.sock, self.settings)
        except OSError:
            raise ToolError("sandbox: the jail ended") from None
        await self.proceed(job, blobs, output_bytes)

    async def next_event(
        self, seconds: float, max_bytes: int
    ) -> tuple[dict[str, Any], list[bytes]]:
        if self.answered:  # its processes have ended, and it serves no other call
            self.kill()
            return {"event": "end"}, []
        try:
            event, blobs = await Slot.next_event(self, seconds, max_bytes)
        except EndedError:  # by a lack of memory, or from outside
            self.kill()
            return {"event": "end"}, []
        self.answered = event.get("how") != "answer"
        return event, blobs

    def said(self) -> str:
        """Returns the output of runsc, and forgets it."""
        error = self.outputs[1]
        error.limit = 2000
        error.read()
        return error.take().decode(errors="replace").strip()

    def close(self) -> None:
        Slot.close(self)
        self.process.wait()
        shutil.rmtree(self.state, ignore_errors=True)


@dataclass(slots=True)
class Bundle:
    """A folder with what gVisor starts from: an empty root, and the list of what is shown there."""

    folder: Path
    settings: Mapping[str, Any]
    user: Mapping[str, Any]
    overhead_mb: int = 256  # gVisor's own processes, and the files that it has read
    ended: bool = False

    async def open_slot(self, cgroup: Cgroup | None) -> GvisorSlot:
        """Start a gVisor sandbox in a cgroup.

        Errors: ToolError with what runsc said.
        """
        opening = asyncio.ensure_future(asyncio.to_thread(self._open, cgroup))
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            with suppress(ToolError):  # of a start that nobody waits for any more
                (await opening).close()
            raise

    def _open(self, cgroup: Cgroup | None) -> GvisorSlot:
        name = f"ludus-{os.getpid()}-{next(NUMBERS)}"
        state = self.folder / "state" / name
        arguments = runsc("run", f"--bundle={self.folder}", name, state=state)
        ours, theirs = socket.socketpair()
        outputs, writers = open_outputs()
        with theirs:
            process = subprocess.Popen(
                ["/bin/sh", "-c", WAIT_FOR_CGROUP, *arguments],
                stdin=theirs.fileno(),
                stdout=writers[0],
                stderr=writers[1],
                env={"PATH": PATH, "HOME": "/"},
                cwd="/",
                start_new_session=True,
                **self.user,
            )
        for writer in writers:
            os.close(writer)
        slot = GvisorSlot(
            ours,
            os.pidfd_open(process.pid),
            cgroup,
            outputs,
            process=process,
            state=state,
            settings=self.settings,
        )
        try:
            if cgroup is not None:
                cgroup.add(process.pid)
            ours.settimeout(START_TIMEOUT_S)
            ours.sendall(b"\n")
            if not ours.recv(1):
                raise OSError("it ended")
            ours.setblocking(False)
        except OSError as error:
            problem = slot.said() or str(error)
            slot.close()
            raise ToolError(f"sandbox: gVisor does not start: {problem}") from None
        slot.said()  # what runsc warns of is not the code's output
        return slot

    def close(self) -> None:
        """Remove the folder."""
        self.ended = True
        shutil.rmtree(self.folder, ignore_errors=True)


def make_bundle(who: Jailed, settings: Mapping[str, Any], user: Mapping[str, Any]) -> Bundle:
    """Make the folder that gVisor starts from.

    Args:
        settings: what process 1 of each call is told.
        user: `user`, `group` and `extra_groups` of gVisor's processes.
    """
    _remove_stale()
    folder = Path(mkdtemp(prefix=f"{PREFIX}{os.getpid()}-"))
    root, visible = folder / "root", shown(who)
    for path in ("", *FOLDERS):
        (root / path).mkdir()
    for path, target in links().items():
        (root / path[1:]).symlink_to(target)
    for path, source in visible.items():
        _make_place(root / path[1:], Path(source))
    for path in SETTINGS:
        if os.path.isdir(path):
            shutil.copytree(path, root / path[1:], symlinks=True)
        elif os.path.exists(path):
            shutil.copy(path, root / path[1:])
    (folder / "config.json").write_text(json.dumps(_specification(who, root, visible)))
    for place in (folder, root):
        place.chmod(0o755)
    state = folder / "state"
    state.mkdir(mode=0o700)
    if user:
        os.chown(state, who.uid, who.gid)
    return Bundle(folder, {**settings, "become": [who.uid, who.gid]}, user)


def _remove_stale() -> None:
    """Remove the folders of processes that were killed."""
    for path in Path(gettempdir()).glob(f"{PREFIX}*-*"):
        pid = path.name.removeprefix(PREFIX).partition("-")[0]
        if pid.isdigit() and not os.path.exists(f"/proc/{pid}"):
            shutil.rmtree(path, ignore_errors=True)


def _make_place(place: Path, source: Path) -> None:
    """Make the empty file or folder on which something is shown."""
    if source.is_dir():
        place.mkdir(parents=True, exist_ok=True)
    else:
        place.parent.mkdir(parents=True, exist_ok=True)
        place.touch()


def _specification(who: Jailed, root: Path, visible: Mapping[str, str]) -> dict[str, Any]:
    """The bundle's `config.json`, in the words of the Open Container Initiative."""
    mounts: list[dict[str, Any]] = [
        {"destination": "/proc", "type": "proc", "source": "proc"},
        {"destination": "/dev", "type": "tmpfs", "source": "tmpfs"},
    ]
    mounts += [
        {"destination": path, "type": "bind", "source": source, "options": ["ro", "rbind"]}
        for path, source in visible.items()
    ]
    rights = [f"CAP_{name}" for name in CAPABILITIES]
    return {
        "ociVersion": "1.0.2",
        "hostname": "sandbox",
        "root": {"path": str(root), "readonly": True},
        "mounts": mounts,
        "process": {
            "args": agent(who, "gvisor.py"),
            "cwd": "/work",
            "env": [f"{name}={value}" for name, value in START_ENVIRONMENT.items()],
            "user": {"uid": 0, "gid": 0},
            "capabilities": dict.fromkeys(("bounding", "effective", "permitted"), rights),
            "noNewPrivileges": True,
            "rlimits": [{"type": "RLIMIT_MSGQUEUE", "hard": 0, "soft": 0}],
        },
        "linux": {
            "namespaces": [{"type": kind} for kind in ("pid", "ipc", "uts", "mount", "network")]
        },
    }
