"""Engines: the processes that play the tasks of one folder of AppWorld data.

engine = engine_of(root, settings)         shared by the environments of a process
episode = engine.open("82e2fac_1")
output, completed = episode.run("print(apis.supervisor.show_profile())")
report = episode.finish()
episode.close()
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
import threading
from collections import deque
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from socket import socketpair
from typing import Any

from ludus.core.errors import EnvError, EnvLost
from ludus.envs.appworld import jail
from ludus.envs.appworld.processes import Helper, Server, Shell, probe, python_of, shell_pair
from ludus.sandbox.cgroups import Cgroup, CgroupError, make_cgroup
from ludus.telemetry.logs import get_logger

log = get_logger(__name__)

PREFIX = "ludus-appworld-"
"""Of an engine's folder; the number of its process follows."""

CALL_LIMIT_S = 60.0
"""Limit of a reset, a status or an evaluation, which take about 0.1 s on an idle core."""

GRACE_S = 5.0
"""Seconds after the engine's own time limit at which the process of a code is killed."""

MAX_RESETS = 100
"""Episodes of a world's or evaluator's process, which grows; a new one replaces it."""

MAX_OUTPUT = 100_000
"""Characters of a code's output; the middle of a longer one is left out."""

ENDED = (
    "Execution failed. Traceback:\nThe interpreter exceeded {limit}, and was started anew: its "
    "variables are gone."
)


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of an engine; environments with equal ones share it."""

    python: str
    isolated: bool = True
    memory_mb: int = 512
    max_worlds: int = 32
    timeout_s: int = 30
    max_calls: int = 1000


class Engine:
    """Processes for the tasks below `root`, a folder with AppWorld's `data`. Thread-safe."""

    def __init__(self, root: Path, settings: Settings) -> None:
        self.settings = settings
        self.root, self._lock, self._owner = root, threading.Lock(), os.getpid()
        remove_stale()
        self._folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-"))
        self._launcher: Server | None = None
        self._zygote: Server | None = None
        self._evaluator: Helper | None = None
        self._evaluating = threading.Lock()
        self._free: deque[Helper] = deque()
        self._num_worlds, self._numbers = 0, count()
        self._has_cgroups = settings.isolated

    # Processes

    def start(self) -> tuple[Server, Server]:
        """The launcher and the zygote, started together where they do not run."""
        with self._lock:
            launcher, zygote = self._launcher, self._zygote
            if launcher and zygote and not launcher.ended and not zygote.ended:
                return launcher, zygote
            for old in (launcher, zygote):
                if old is not None:
                    log.error("appworld: the engine was ended from outside; it starts anew")
                    old.close()
            self._close_helpers()
            version, packages = probe(self.settings.python)
            told = jail.settings(self.settings.isolated, self.settings.memory_mb)
            code = link_code(self._folder / "code")
            environment = engine_environment(code, self._folder)
            command = jail.command(packages, version, self._folder)
            if not self.settings.isolated:
                log.warning("appworld: isolation is none: code has all rights of this process")
                command = [self.settings.python, "-X", "utf8", "-m", jail.PROGRAM]
            module = "ludus.envs.appworld.appworld_side.launcher"
            with ExitStack() as started:
                launcher = Server([self.settings.python, "-X", "utf8", "-m", module], environment)
                started.callback(launcher.close)
                zygote = Server(command, None if self.settings.isolated else environment, told)
                started.callback(zygote.close)
                launcher.wait()
                zygote.wait()
                started.pop_all()
            self._launcher, self._zygote = launcher, zygote
            return launcher, zygote

    def _close_helpers(self) -> None:
        while self._free:
            self._free.pop().close()
        if self._evaluator is not None:
            self._evaluator.close()
            self._evaluator = None

    def helper(self, letter: bytes, name: str) -> Helper:
        """A new process of a kind. Errors: EnvError where the engine does not start."""
        launcher, _ = self.start()
        ours, theirs = socketpair()
        try:
            launcher.fork(letter, [theirs])
        except EnvLost:
            ours.close()
            raise
        return Helper(ours, name)

    def shell(self) -> tuple[Shell, int]:
        """A process for code, and the world's end of the socket of its API calls."""
        _, zygote = self.start()
        host, host_theirs = shell_pair()
        world, world_theirs = socketpair()
        try:
            zygote.fork(b"s", [host_theirs, world_theirs])
            return Shell(host, self._cgroup()), world.detach()
        except (EnvLost, OSError) as error:
            host.close()
            world.close()
            if isinstance(error, EnvLost):
                raise
            raise EnvLost(f"appworld: no process for code starts: {error}") from None

    def _cgroup(self) -> Cgroup | None:
        if not self._has_cgroups:
            return None
        try:
            cgroup = make_cgroup(f"{os.getpid()}-appworld-{next(self._numbers)}")
        except CgroupError:
            self._has_cgroups = False
            return None
        cgroup.limit(self.settings.memory_mb + 64)
        return cgroup

    # Episodes

    def open(self, task: str) -> Episode:
        """Open a task's world. Errors: EnvError where none is free, or it does not open."""
        with self._lock:
            if self._num_worlds >= self.settings.max_worlds:
                raise EnvError(
                    f"appworld: all {self.settings.max_worlds} worlds are in use, about 120 MB "
                    "each: raise env.args.max_worlds, or lower rollout.concurrency"
                )
            self._num_worlds += 1
        try:
            return Episode(self, self._take(), task)
        except BaseException:
            with self._lock:
                self._num_worlds -= 1
            raise

    def _take(self) -> Helper:
        self.start()
        with suppress(IndexError):
            return self._free.pop()
        return self.helper(b"w", "world")

    def release(self, world: Helper, reusable: bool) -> None:
        """Return an episode's world."""
        if reusable and world.num_resets < MAX_RESETS:
            self._free.append(world)
        else:
            world.close()
        with self._lock:
            self._num_worlds -= 1

    def evaluate(self, task: str, experiment: str) -> dict[str, Any]:
        """Run a task's tests on the state that its world saved."""
        with self._evaluating:
            if self._evaluator is not None and self._evaluator.num_resets >= MAX_RESETS:
                self._evaluator.close()
                self._evaluator = None
            if self._evaluator is None:
                self._evaluator = self.helper(b"e", "evaluator")
            self._evaluator.num_resets += 1
            arguments = {"root": str(self.full), "task": task, "experiment": experiment}
            try:
                report: dict[str, Any] = self._evaluator.call(CALL_LIMIT_S, **arguments)
            except EnvLost:
                self._evaluator.close()
                self._evaluator = None
                raise
            return report

    # Folders

    @property
    def full(self) -> Path:
        """A root with all data, for the evaluator; what worlds save lies beside the user's data."""
        folder = self._folder / "full"
        if not folder.exists():
            folder.mkdir()
            (folder / "data").symlink_to(self.root / "data")
            (folder / "experiments").symlink_to(self._folder / "experiments")
        return folder

    def view(self, task: str) -> Path:
        """A root without ground truth, for worlds. Errors: EnvError for an unknown task."""
        source = self.root / "data" / "tasks" / task
        if not (source / "specs.json").is_file():
            raise EnvError(f"appworld: there is no task {task!r} below {self.root / 'data'}")
        folder = self._folder / "view"
        with self._lock:
            target = folder / "data" / "tasks" / task
            target.mkdir(parents=True, exist_ok=True)
            (self._folder / "experiments").mkdir(exist_ok=True)
            for link, shown in {
                folder / "experiments": self._folder / "experiments",
                folder / "data" / "base_dbs": self.root / "data" / "base_dbs",
                folder / "data" / "api_docs": self.root / "data" / "api_docs",
                target / "specs.json": source / "specs.json",
                target / "dbs": source / "dbs",
            }.items():
                if not link.is_symlink():
                    link.symlink_to(shown)
        return folder

    def close(self) -> None:
        """End all processes. A fork of the owner leaves them alone."""
        if os.getpid() != self._owner:
            return
        self._close_helpers()
        for server in (self._launcher, self._zygote):
            if server is not None:
                server.close()
        shutil.rmtree(self._folder, ignore_errors=True)


@dataclass(eq=False)
class Episode:
    """An episode in a world of the engine."""

    engine: Engine
    world: Helper
    task: str
    opening: Mapping[str, Any] = field(default_factory=dict)
    num_calls: int = 0
    _shell: Shell | None = None
    _state: str = "playing"

    def __post_init__(self) -> None:
        self._experiment = f"{os.getpid()}-{id(self)}"
        try:
            self._shell, calls = self.engine.shell()
            self.world.num_resets += 1
            try:
                self.opening = self.world.call(
                    CALL_LIMIT_S,
                    [calls],
                    op="reset",
                    root=str(self.engine.view(self.task)),
                    task=self.task,
                    experiment=self._experiment,
                    max_calls=self.engine.settings.max_calls,
                )
            finally:
                os.close(calls)
            self._begin()
        except BaseException:
            if self._shell is not None:
                self._shell.close()
            self.world.close()
            raise

    def _begin(self) -> None:
        told = {"apis": self.opening["apis"], "datetime": self.opening["datetime"]}
        assert self._shell is not None
        if self._shell.run({**told, "timeout_s": self.engine.settings.timeout_s}, 60.0) != "open":
            raise EnvLost("appworld: the process of the code does not start")

    def run(self, code: str) -> tuple[str, bool]:
        """Run code; returns its output, and whether it marked the task as complete.

        Errors: EnvLost where the world ended.
        """
        assert self._shell is not None
        limit_s = self.engine.settings.timeout_s + GRACE_S
        answer = self._shell.run({"code": code}, limit_s)
        output = answer.get("output") if isinstance(answer, dict) else None
        if not isinstance(output, str):
            limits = f"its time limit of {self.engine.settings.timeout_s} s, or its memory limit"
            output = ENDED.format(limit=limits)
            self._renew_shell()
        status = self._call(op="status")
        self.num_calls = status["num_calls"]
        return shortened(output), bool(status["completed"])

    def _renew_shell(self) -> None:
        assert self._shell is not None
        self._shell.close()
        self._shell, calls = self.engine.shell()
        try:
            self._call(calls, op="attach")
        finally:
            os.close(calls)
        self._begin()

    def _call(self, *fds: int, **request: Any) -> Any:
        try:
            return self.world.call(CALL_LIMIT_S, fds, **request)
        except EnvError:
            self._state = "lost"
            raise

    def finish(self) -> dict[str, Any]:
        """End the code, and test the state that it left: `success`, `num_tests`, `passed`, ..."""
        if self._shell is not None:
            self._shell.close()
        self._call(op="save")
        return self.engine.evaluate(self.task, self._experiment)

    def close(self) -> None:
        """Release the processes. May be called more than once."""
        if self._state == "closed":
            return
        lost, self._state = self._state == "lost", "closed"
        if self._shell is not None:
            self._shell.close()
        with suppress(EnvError):
            if not lost:
                self.world.call(CALL_LIMIT_S, op="close")
        self.engine.release(self.world, reusable=not lost)


def remove_stale() -> None:
    """Remove the folders of processes that were killed."""
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*-*"):
        pid = path.name.removeprefix(PREFIX).partition("-")[0]
        if pid.isdigit() and not os.path.exists(f"/proc/{pid}"):
            shutil.rmtree(path, ignore_errors=True)


def shortened(text: str) -> str:
    """A text without its middle, where it is very long."""
    if len(text) <= MAX_OUTPUT:
        return text
    half = MAX_OUTPUT // 2
    return f"{text[:half]}\n[{len(text) - 2 * half} characters left out]\n{text[-half:]}"


def link_code(folder: Path) -> Path:
    """Make a folder with the parts of ludus that run in AppWorld's environment, and no others:
    the rest of ludus needs packages that are not there."""
    for place, source in jail.CODE.items():
        link = folder / place
        if not link.is_symlink():
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(source)
    return folder


def engine_environment(code: Path, folder: Path) -> dict[str, str]:
    """Environment variables of the engine's processes outside of the sandbox."""
    names = {"PATH", "LANG", "LC_ALL", "TMPDIR", "LD_LIBRARY_PATH"}
    kept = {name: value for name, value in os.environ.items() if name in names}
    own = {"PYTHONPATH": str(code), "PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1"}
    own |= {"APPWORLD_ROOT": str(folder), "APPWORLD_CACHE": str(folder / "cache")}
    return {**kept, **own, "HOME": str(folder), "IPYTHONDIR": str(folder / "ipython")}


_engines: dict[tuple[int, Path, Settings], Engine] = {}
_lock = threading.Lock()


def engine_of(root: Path, settings: Settings) -> Engine:
    """The engine of a folder, which lives as long as this process."""
    key = os.getpid(), root, settings  # a fork's engine would be its parent's
    with _lock:
        if key not in _engines:
            engine = _engines[key] = Engine(root, settings)
            atexit.register(engine.close)
        return _engines[key]


def settings_of(python: str | None, **given: Any) -> Settings:
    """Settings with the environment's interpreter. Errors: ConfigError without one."""
    return Settings(python=python_of(python), **given)
