"""The processes of AppWorld's engine, which runs in an environment of its own (`make appworld`).

    launcher    has loaded the engine; forks worlds, an evaluator, a generator
      world       databases and APIs of an episode; reused by later ones
      evaluator   the only one that reads the ground truth
    zygote      in the sandbox; forks a shell for each episode
      shell       runs the model's code; asks its world for API calls, on a socket of their own

One world a process: the engine's databases are global to it.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from ludus.core.errors import ConfigError, EnvError, EnvLost
from ludus.envs.appworld.appworld_side.frames import receive, send
from ludus.sandbox.cgroups import Cgroup
from ludus.sandbox.zygotes import greet

START_LIMIT_S = 120.0
DEFAULT_PYTHON = ".venv-appworld/bin/python"

PROBE = """
import importlib.util as u, json, sys, sysconfig, os
spec = u.find_spec("appworld")
folder = spec and os.path.dirname(spec.origin)
apps = spec and os.path.exists(os.path.join(folder, "apps", "venmo", "apis.py"))
version = "%d.%d" % sys.version_info[:2]
print(json.dumps([bool(spec), bool(apps), version, sysconfig.get_paths()["purelib"]]))
"""


def python_of(python: str | None) -> str:
    """The interpreter of AppWorld's environment: the one given, else $LUDUS_APPWORLD_PYTHON, else
    that of `make appworld`. Errors: ConfigError where there is none."""
    name = python or os.environ.get("LUDUS_APPWORLD_PYTHON")
    here = [Path(DEFAULT_PYTHON), Path(__file__).parents[3] / DEFAULT_PYTHON]
    found = [Path(name)] if name else here
    for path in found:
        if path.is_file():
            return str(path.absolute())
    raise ConfigError(
        f"appworld: there is no {found[0]}: run `make appworld`, which installs the engine into an "
        "environment of its own, or name that environment's Python (env.args.python)"
    )


@cache
def probe(python: str) -> tuple[str, Path]:
    """The version of an environment's Python, such as `3.11`, and the folder of its packages.

    Errors: ConfigError where the engine is not installed there.
    """
    done = subprocess.run([python, "-c", PROBE], capture_output=True, text=True, timeout=60)
    try:
        package, apps, version, packages = json.loads(done.stdout)
    except ValueError:
        said = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise ConfigError(f"appworld: {python} does not run: {said}") from None
    if not package:
        raise ConfigError(f"appworld: {python} has no package appworld: run `make appworld`")
    if not apps:
        raise ConfigError(
            f"appworld: its apps are not unpacked: run {python} -m appworld.cli install"
        )
    return version, Path(packages)


class Helper:
    """A helper process, by its socket. One call at a time."""

    def __init__(self, sock: socket.socket, name: str) -> None:
        self._sock, self._name, self.num_resets = sock, name, 0

    def call(self, limit_s: float, fds: Sequence[int] = (), /, **request: Any) -> Any:
        """Returns the helper's answer. Errors: EnvError that it reports; EnvLost where it is gone,
        or does not answer in time: it has to be closed then."""
        try:
            self._sock.settimeout(limit_s)
            socket.send_fds(self._sock, [b"c"], list(fds))
            send(self._sock, request)
            answer = receive(self._sock)
        except TimeoutError:
            raise EnvLost(f"appworld: the {self._name} gave no answer in {limit_s:g} s") from None
        except (EOFError, OSError, ValueError):
            raise EnvLost(f"appworld: the {self._name} ended; the episode can be retried") from None
        if "error" in answer:
            raise EnvError(f"appworld: {answer['error']}")
        return answer["ok"]

    def close(self) -> None:
        """End the helper."""
        self._sock.close()


class Shell:
    """The process of an episode's code. Nothing that it says is believed."""

    def __init__(self, sock: socket.socket, cgroup: Cgroup | None) -> None:
        """Takes a socket of `shell_pair`. Errors: OSError where the process ended."""
        self._sock, self._cgroup = sock, cgroup
        self._handle = greet(sock, cgroup)

    def run(self, message: Mapping[str, Any], limit_s: float) -> Any:
        """Returns its answer; None where it ended, said nonsense, or gave no answer in time."""
        ends = time.monotonic() + limit_s
        try:
            self._sock.settimeout(limit_s)
            send(self._sock, message)
            return receive(_Deadline(self._sock, ends))  # type: ignore[arg-type]
        except (EOFError, OSError, ValueError, RecursionError):
            return None

    def close(self) -> None:
        """Kill the process, and all that it started. May be called more than once."""
        if self._handle < 0:
            return
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._handle, signal.SIGKILL)
        os.close(self._handle)
        self._handle = -1
        self._sock.close()
        if self._cgroup is not None:
            self._cgroup.remove(wait_s=1.0)


def shell_pair() -> tuple[socket.socket, socket.socket]:
    """A pair of sockets, on whose first end the other end's process is known."""
    ours, theirs = socket.socketpair()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
    return ours, theirs


class _Deadline:
    """A socket that stops receiving at a time, however slowly the other side sends."""

    def __init__(self, sock: socket.socket, ends: float) -> None:
        self._sock, self._ends = sock, ends

    def recv(self, size: int) -> bytes:
        left = self._ends - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._sock.settimeout(left)
        return self._sock.recv(size)


class Server:
    """A process that forks others: one for each socket (or pair of sockets) that it is sent."""

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str] | None, settings: Any = None
    ) -> None:
        self._sock, theirs = socket.socketpair()
        self._lock, self._command = threading.Lock(), command
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as this
        with theirs:
            self._process = subprocess.Popen(
                [*command, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._log,
                env=environment,
                cwd="/",
                process_group=0,  # Ctrl-C reaches this process only, which may finish a step
            )
        if settings is not None:
            send(self._sock, settings)

    def wait(self) -> None:
        """Wait until it has loaded the engine. Errors: EnvError with what it said."""
        try:
            self._sock.settimeout(START_LIMIT_S)
            receive(self._sock)
        except (EOFError, OSError, ValueError) as error:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(1.0)
            self._log.seek(0)
            said = self._log.read()[-2000:].decode(errors="replace").strip().splitlines()
            self.close()
            reason = said[-1] if said else (str(error) or "it ended")
            raise EnvError(f"appworld: the engine does not start: {reason}") from None

    def fork(self, letter: bytes, sockets: Sequence[socket.socket]) -> None:
        """Fork a process that serves these sockets, which are closed here."""
        try:
            with self._lock:
                socket.send_fds(self._sock, [letter], [sock.fileno() for sock in sockets])
        except OSError:
            raise EnvLost(
                "appworld: the engine's process ended; the episode can be retried"
            ) from None
        finally:
            for sock in sockets:
                sock.close()

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    def close(self) -> None:
        """End it, and all that it forked."""
        self._sock.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._log.close()
