"""The model's code: the engine's interpreter, in the sandbox, without the engine's databases.

zygote   has loaded the engine's interpreter; forks a shell for each pair of sockets
init     process 1 of a shell's own namespaces (only in the sandbox)
shell    runs code; asks the world for API calls

Nothing that this process says is believed: its answer is the agent's own observation, and its API
calls pass the world's gate.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from appworld import environment
from appworld.apps.api_lib import set_local_date_and_time
from appworld.collections.apis import ApiCollection, _wrap_api_request
from appworld.common.safety_guard import SafetyGuard
from appworld.common.utils import CustomErrorMessageMunch
from appworld.environment import AppWorld, AppWorldInitDefaults
from IPython.terminal.embed import InteractiveShellEmbed
from traitlets.config.loader import Config

from ludus.envs.appworld.appworld_side.frames import receive, send

MAX_STEPS = 1_000_000
ENDED = "The task is over: no API can be called any more."


class NoApis:
    """Stands in for the engine's `ApiCollection` while it runs its preamble."""

    @staticmethod
    def load(**_: Any) -> tuple[None, None]:
        """No APIs: a world serves them."""
        return None, None


class Caller:
    """The engine's requester, in another process: each request is a message to the world."""

    client = None

    def __init__(self, world: socket.socket) -> None:
        self._world, self._number, self._lock = world, 0, threading.Lock()

    def request(
        self,
        _app_name: str,
        _api_name: str,
        client: Any = None,
        raise_on_failure: bool | None = None,
        show: bool = False,
        track: bool = True,
        **arguments: Any,
    ) -> Any:
        """Call an API. Errors: those of the engine, as Exception."""
        failing = raise_on_failure is not False
        call = {"app": _app_name, "api": _api_name, "arguments": arguments}
        with self._lock:
            # A time limit that fell between question and answer would leave the answer unread.
            old = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
            try:
                self._number += 1
                number = self._number
                send(self._world, {**call, "raise_on_failure": failing, "number": number})
                while (reply := receive(self._world))["number"] != number:
                    continue
            except (EOFError, OSError):
                raise Exception(ENDED) from None
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, old)
        if "error" in reply:
            raise Exception(reply["error"])
        return reply["answer"]

    def reset_request_count(self) -> None:
        """The world counts the requests."""


class Shell(AppWorld):  # type: ignore[misc]
    """The part of the engine's `AppWorld` that executes code; the rest is the world's."""

    def __init__(self) -> None:
        config = Config()
        config.HistoryManager.enabled = False
        hook = sys.excepthook
        self.shell = InteractiveShellEmbed(config=config)
        sys.excepthook = hook
        self.shell.ast_node_interactivity = "none"
        self.__dict__.update(AppWorldInitDefaults().dict())
        self.max_interactions, self.num_interactions = MAX_STEPS, 0
        self.models_to_db_home_path = self.models_from_db_home_path = ""
        self.output_db_home_path_on_disk = ""
        self.environment_io: list[dict[str, str]] = []
        self.task = SimpleNamespace(datetime=None, allowed_apps=[])
        with patch.object(environment, "ApiCollection", NoApis):
            self._execute_preamble()
        self.safety_guard = SafetyGuard()

    def _save_state(self, directory: str) -> None:
        """The world saves it."""

    def save_logs(self) -> None:
        """No logs: the trajectory has code and output."""

    def open(self, world: socket.socket, task: Mapping[str, Any]) -> None:
        """Begin an episode."""
        self.timeout_seconds = task["timeout_s"]
        set_local_date_and_time(datetime.fromisoformat(task["datetime"]))
        self.requester = Caller(world)
        self.apis = ApiCollection(error_message="No app named '{key}' found.")
        for app, names in task["apis"].items():
            message = f"No API named '{{key}}' found in the {app} app."
            self.apis[app] = CustomErrorMessageMunch.build(message)
            for name in names:
                self.apis[app][name] = _wrap_api_request(app, name, self.requester)
        self.shell.user_ns.update(apis=self.apis, requester=self.requester)

    def run(self, code: str) -> str:
        """Returns what the engine shows of the code's run."""
        try:
            return str(self.execute(code))
        except Exception as error:  # such as a null byte, on which the engine's check fails
            self.safety_guard.disable()
            return f"Execution failed. Traceback:\n{type(error).__name__}: {error}"


def serve_shell(shell: Shell, host: socket.socket, world: socket.socket) -> None:
    """Serve the host: the task, then code after code."""
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    with suppress(EOFError, OSError):
        shell.open(world, receive(host))
        send(host, "open")
        while True:
            send(host, {"output": shell.run(receive(host)["code"])})


def run_jailed(shell: Shell, fds: list[int], settings: Mapping[str, Any]) -> None:
    """Process 1 of new namespaces: sets them up, and waits for the shell, its child."""
    from ludus.sandbox.inside.init import Init
    from ludus.sandbox.inside.program import confine

    host, world = (socket.socket(fileno=fd) for fd in fds)
    host.sendall(b"h")  # the kernel tells the host this process's id beside it
    init = Init(host, (2, 2), settings, None)
    init.enter(settings["limits"]["disk_mb"])
    pid = os.fork()
    if pid == 0:
        null = os.open(os.devnull, os.O_RDWR)
        confine(settings, "/work", settings["limits"], (null, null, null), kept=fds, warm=True)
        os.chdir("/work")
        serve_shell(shell, host, world)
        os._exit(0)
    host.close()
    world.close()
    os.waitpid(pid, 0)


def fork_shell(shell: Shell, fds: list[int], settings: Mapping[str, Any]) -> None:
    """Fork the process that serves these sockets: host and world."""
    if not settings["isolated"]:
        if os.fork() == 0:
            host, world = (socket.socket(fileno=fd) for fd in fds)
            os.chdir(os.environ["HOME"])  # the engine cuts the folder's name out of its messages
            host.sendall(b"h")
            serve_shell(shell, host, world)
            os._exit(0)
        return
    from ludus.sandbox.inside.kernel import NAMESPACES, PR_SET_PDEATHSIG, clone, libc

    if clone(NAMESPACES) == 0:
        try:
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            run_jailed(shell, fds, settings)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)  # the kernel ends all processes of its namespace


def main() -> None:
    """Fork a shell for each pair of sockets that arrives at the socket whose number is given."""
    control = socket.socket(fileno=int(sys.argv[1]))
    settings = receive(control)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    shell = Shell()
    gc.collect()
    gc.freeze()
    send(control, "ready")
    while True:
        letter, fds, _, _ = socket.recv_fds(control, 1, 2)
        if not letter:
            return
        fork_shell(shell, list(fds), settings)
        for fd in fds:
            os.close(fd)


if __name__ == "__main__":
    main()
