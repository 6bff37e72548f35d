"""Untrusted code in a jail on this machine: see `docs/sandbox.md` for the layers.

zygote (bubblewrap, unprivileged user) -> slot (cgroup) -> init (namespaces) -> program
"""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from ludus.core.errors import ConfigError, ToolError
from ludus.sandbox.base import Code, Limits, RunResult, Sandbox
from ludus.sandbox.bubblewrap import (
    ENVIRONMENT,
    FORWARD_DIR,
    INSIDE,
    PACKAGES_DIR,
    Jailed,
    command,
    jailed,
)
from ludus.sandbox.calls import COMPILE_MEMORY_MB, job_of, result_of
from ludus.sandbox.cgroups import Cgroup, CgroupError, make_cgroup, remove_stale
from ludus.sandbox.gvisor import make_bundle
from ludus.sandbox.layers import require_layers
from ludus.sandbox.seccomp import filter_program
from ludus.sandbox.zygotes import Ground, Slot, start_zygote
from ludus.telemetry.logs import get_logger
from ludus.telemetry.queues import queued

log = get_logger(__name__)

PACKAGES = ("numpy", "sympy")
"""Packages of the jail by default, where they are installed."""

NUMBERS = count()

CGROUP_WAIT_S = 15.0
"""Killed processes leave their cgroup within milliseconds, on a loaded machine within seconds."""


class Jail(Sandbox):
    """Runs code in namespaces of its own, on this machine.

    It starts with the first run. All its calls belong to one event loop.
    """

    def __init__(
        self,
        isolation: Annotated[
            Literal["jail", "gvisor", "none"],
            Field(
                description="gvisor: a kernel of its own for each run, stronger and slower; none: "
                "no protection, for trusted code only, warns at each start"
            ),
        ] = "jail",
        packages: Annotated[
            Sequence[str] | None,
            Field(description="Python packages that code may import; they are loaded once"),
        ] = None,
        warm: Annotated[
            bool, Field(description="run Python in a process that has loaded the packages")
        ] = True,
        max_runs: Annotated[
            int | None, Field(ge=1, description="runs at the same time; default: 2 for each core")
        ] = None,
        max_sessions: Annotated[
            int, Field(ge=1, description="open sessions; each is a process")
        ] = 256,
    ) -> None:
        self._isolation, self._isolated, self._warm = isolation, isolation != "none", warm
        self._packages = PACKAGES if packages is None else packages
        self._who: Jailed | None = None
        if self._isolated:
            require_layers(isolation)
            self._who = jailed(self._packages)
            if packages and self._who.absent:
                raise ConfigError(
                    f"sandbox.packages: {', '.join(self._who.absent)}: not installed, or not "
                    "readable for other users; install them, or take them from the list"
                )
        self._max_sessions = max_sessions
        self._turns = asyncio.Semaphore(max_runs or 2 * (os.cpu_count() or 1))
        self._starting = asyncio.Lock()
        self._ground: Ground | None = None
        self._slots: set[Slot] = set()
        self._free: list[Slot] = []
        self._sessions: dict[str, _Session] = {}
        self._cgroups: list[Cgroup] = []  # of slots that ended
        self._has_cgroups = self._isolated
        self._forward: tuple[int, Path] | None = None
        self._prelude: dict[str, str] = {}

    def forward(self, port: int, path: Path) -> None:
        """Let programs reach a Unix socket of this machine at 127.0.0.1:port; before any run.

        The isolation has to be `jail`, and the jail's user needs access to the socket. Its folder
        is visible in the jail.
        """
        assert self._isolation == "jail"
        assert self._ground is None
        self._forward = port, path

    def prelude(self, module: str, source: str) -> None:
        """Give programs a module of ludus' own that is loaded once, in the zygote; before any run.

        The isolation has to be `jail`. What the source prepares (a library, its first use) is found
        by each program as the zygote left it: a program cannot change it for the next. An error of
        the source ends the start: ToolError with its traceback.
        """
        assert self._isolation == "jail"
        assert self._ground is None
        self._prelude[module] = source

    async def run(
        self, code: Code, limits: Limits | None = None, *, session: str | None = None
    ) -> RunResult:
        limits = limits or Limits()
        cold = None if self._warm else self.python
        job, blobs = job_of(code, limits, in_session=session is not None, python=cold)
        if session is not None:
            return await self._run_in_session(session, job, blobs, limits)
        async with queued(self._turns):
            needed_mb = max(limits.memory_mb, COMPILE_MEMORY_MB if job["compile"] else 0)
            slot = await self._take(needed_mb)
            try:
                return await self._call(slot, job, blobs, limits)
            finally:
                slot.end_call()
                if slot.spoiled:
                    self._discard(slot)
                else:
                    self._free.append(slot)

    async def close_session(self, session: str) -> None:
        found = self._sessions.pop(session, None)
        if found is not None and found.slot is not None:
            if found.lock.locked():
                found.slot.kill()  # the run that it serves discards it
            else:
                self._discard(found.slot)

    async def close(self) -> None:
        for name in list(self._sessions):
            await self.close_session(name)
        for slot in self._free:
            self._discard(slot)
        self._free.clear()
        for slot in self._slots:  # their runs end with a ToolError
            slot.kill()
        if self._ground is not None:
            self._ground.close()
            self._ground = None
        for cgroup in self._cgroups:
            await asyncio.to_thread(cgroup.remove, wait_s=CGROUP_WAIT_S)
        self._cgroups.clear()

    # Slots

    async def _take(self, memory_mb: int) -> Slot:
        """A slot for a call, with its memory limited."""
        if self._ground is not None and self._ground.ended:
            log.error("sandbox: the jail was ended from outside; it starts anew")
            for slot in self._free:
                self._discard(slot)
            self._free.clear()
            self._ground.close()
            self._ground = None
        slot = self._free.pop() if self._free else await self._open_slot()
        if slot.cgroup is not None and self._ground is not None:
            slot.cgroup.limit(memory_mb + self._ground.overhead_mb)
        return slot

    async def _open_slot(self) -> Slot:
        async with self._starting:
            if self._ground is None:
                self._ground = await self._start()
        self._cgroups = [group for group in self._cgroups if not group.remove()]
        cgroup = None
        if self._has_cgroups:
            try:
                cgroup = make_cgroup(f"{os.getpid()}-{next(NUMBERS)}")
            except CgroupError:
                self._has_cgroups = False
        try:
            slot = await self._ground.open_slot(cgroup)
        except BaseException:
            self._cgroups += [cgroup] if cgroup else []
            raise
        self._slots.add(slot)
        return slot

    def _discard(self, slot: Slot) -> None:
        if slot in self._slots:
            self._slots.remove(slot)
            slot.close()
            if slot.cgroup is not None:
                self._cgroups.append(slot.cgroup)

    async def _start(self) -> Ground:
        who = self._who
        loaded = [*self._packages] if self._warm else []
        settings: dict[str, Any] = {"packages": loaded, "packages_dir": PACKAGES_DIR}
        settings["prelude"] = self._prelude
        if who is None:
            log.warning("sandbox: isolation is none: code has all rights of this process")
            script = str(INSIDE / "zygote.py")
            settings |= {"isolated": False, "environment": {**os.environ}}
            return await start_zygote([sys.executable, script], settings, {})
        settings |= {"isolated": True, "environment": ENVIRONMENT, "uid": who.uid, "gid": who.gid}
        settings |= {"filter": filter_program(loopback=self._forward is not None).hex()}
        if self._forward is not None:
            port, path = self._forward
            settings["forward"] = {"port": port, "socket": f"{FORWARD_DIR}/{path.name}"}
        await asyncio.to_thread(remove_stale)
        try:
            make_cgroup(f"{os.getpid()}-{next(NUMBERS)}").remove()
        except CgroupError as error:
            self._has_cgroups = False
            log.warning(
                "sandbox: no cgroup: memory is limited for each process, not for all of a run "
                "together",
                reason=str(error),
            )
        user: dict[str, Any] = {}
        if os.geteuid() == 0:
            user = {"user": who.uid, "group": who.gid, "extra_groups": []}
        if self._isolation == "gvisor":
            return await asyncio.to_thread(make_bundle, who, settings, user)
        bwrap = shutil.which("bwrap") or "bwrap"
        forwarded = self._forward[1].parent if self._forward else None
        return await start_zygote(command(who, bwrap, forwarded), settings, user)

    # A call

    async def _call(
        self, slot: Slot, job: Mapping[str, Any], blobs: Sequence[bytes], limits: Limits
    ) -> RunResult:
        kills = slot.cgroup.num_kills() if slot.cgroup else 0
        try:
            await slot.begin(job, blobs, limits.output_bytes)
            result, files, end = await self._result(slot, job, limits, until_end=True)
        except BaseException:
            slot.kill()
            raise
        slot.drain()
        return result_of(slot, job, result, files, end, kills)

    async def _result(
        self, slot: Slot, job: Mapping[str, Any], limits: Limits, *, until_end: bool
    ) -> tuple[dict[str, Any], list[bytes], dict[str, Any]]:
        """The frame of the result, and of the end."""
        seconds = limits.run_s + (limits.compile_s if job["compile"] else 0)
        max_bytes = limits.output_bytes + (limits.disk_mb << 20)
        result: dict[str, Any] = {}
        files: list[bytes] = []
        while True:
            event, blobs = await slot.next_event(seconds, max_bytes)
            if event["event"] != "result":
                return result, files, event
            result, files = event, blobs
            if not until_end and event.get("how") == "answer":
                return result, files, {}

    # Sessions

    async def _run_in_session(
        self, name: str, job: dict[str, Any], blobs: Sequence[bytes], limits: Limits
    ) -> RunResult:
        if name not in self._sessions and len(self._sessions) >= self._max_sessions:
            raise ToolError(f"sandbox: {self._max_sessions} sessions are open: close one")
        session = self._sessions.setdefault(name, _Session())
        async with queued(session.lock), queued(self._turns):  # one run of a session at a time
            alive = False
            try:
                if session.slot is None:
                    session.slot = await self._take(limits.memory_mb)
                    slot, send = session.slot, session.slot.begin
                else:
                    slot, send = session.slot, session.slot.proceed
                kills = slot.cgroup.num_kills() if slot.cgroup else 0
                await send(job, blobs, limits.output_bytes)
                result, files, end = await self._result(slot, job, limits, until_end=False)
                slot.drain()
                outcome = result_of(slot, job, result, files, end, kills)
                alive = result.get("how") == "answer" and not slot.spoiled
                return outcome
            finally:
                if not alive:
                    if session.slot is not None:
                        self._discard(session.slot)
                    if self._sessions.get(name) is session:
                        del self._sessions[name]

    @property
    def python(self) -> str:
        """Path of Python in the jail."""
        return self._who.python if self._who else sys.executable


@dataclass(slots=True)
class _Session:
    slot: Slot | None = None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
