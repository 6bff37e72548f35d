"""Cgroups: a bound on the memory of all processes of a run together.

Version 1 (a `memory` hierarchy) and version 2 (`memory` in `cgroup.subtree_control`). A group is
made below the group of this process, so limits of a container or of systemd stay in force.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
PREFIX = "ludus-"


class CgroupError(Exception):
    """No cgroup can be made here; the message says why."""


@dataclass(slots=True)
class Cgroup:
    """A group of processes. `version` is 1 or 2."""

    path: Path
    version: int
    memory_mb: int = 0

    def add(self, pid: int) -> None:
        """Move a process in. It takes about 7 ms, so it is done once for each slot."""
        (self.path / "cgroup.procs").write_text(str(pid))

    def limit(self, memory_mb: int) -> None:
        """Bound the memory, swap included, of all processes together."""
        if memory_mb == self.memory_mb:
            return
        names: tuple[str, ...] = ("memory.max",)
        if self.version == 1:
            names = ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes")
            if memory_mb > self.memory_mb > 0:
                names = names[::-1]  # the sum with swap may never be the smaller
        for name in names:
            _write(self.path / name, str(memory_mb * 2**20), optional=name.startswith("memory.mem"))
        if self.version == 2:
            _write(self.path / "memory.swap.max", "0", optional=True)
        self.memory_mb = memory_mb

    def num_kills(self) -> int:
        """Number of processes that the kernel ended for lack of memory."""
        name = "memory.oom_control" if self.version == 1 else "memory.events"
        for line in (self.path / name).read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
        return 0

    def remove(self, wait_s: float = 0.0) -> bool:
        """Remove the group; False if processes are left in it after `wait_s`."""
        ends = time.monotonic() + wait_s
        while True:
            try:
                self.path.rmdir()
            except FileNotFoundError:
                return True
            except OSError:
                if time.monotonic() >= ends:
                    return False
                time.sleep(0.01)
            else:
                return True


def make_cgroup(name: str) -> Cgroup:
    """Make a group with a memory controller.

    Errors: CgroupError.
    """
    problems = []
    for parent, version in _parents():
        group = Cgroup(parent / f"{PREFIX}{name}", version)
        try:
            if version == 2:
                _enable_memory(parent)
            group.path.mkdir()
            needed = "memory.limit_in_bytes" if version == 1 else "memory.max"
            if not (group.path / needed).exists():
                group.remove()
                raise CgroupError(f"{parent} has no memory controller")
        except (OSError, CgroupError) as error:
            problems.append(str(error))
        else:
            return group
    raise CgroupError("; ".join(problems) or "no cgroup file system is mounted")


def remove_stale() -> None:
    """Remove the groups of processes that were killed."""
    for parent, _ in _parents():
        for path in parent.glob(f"{PREFIX}*"):
            pid = path.name.removeprefix(PREFIX).partition("-")[0]
            if pid.isdigit() and not os.path.exists(f"/proc/{pid}"):
                Cgroup(path, 2).remove()


def _parents() -> Iterator[tuple[Path, int]]:
    """The folders of this process's groups that may hold a memory controller."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "" and (ROOT / "cgroup.controllers").exists():
            yield ROOT / path.lstrip("/"), 2
        elif "memory" in controllers.split(","):
            yield ROOT / "memory" / path.lstrip("/"), 1


def _enable_memory(parent: Path) -> None:
    control = parent / "cgroup.subtree_control"
    if "memory" not in control.read_text().split():
        control.write_text("+memory")


def _write(path: Path, text: str, *, optional: bool) -> None:
    try:
        path.write_text(text)
    except OSError:
        if not optional:
            raise
