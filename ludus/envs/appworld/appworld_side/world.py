"""A world: the engine's databases and APIs, without its ground truth and without the model's code.

The model's code runs in another process, in the sandbox. It reaches this one through a socket only,
on which it asks for API calls. `Gate` refuses the calls that an agent may not make.
"""

from __future__ import annotations

import select
import socket
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from appworld import AppWorld, update_root
from appworld.apps.api_lib import CompanyNotifier
from appworld.apps.supervisor.constants import TASK_STATUS_LITERAL
from appworld.common.utils import get_name_to_apis, get_type_args
from appworld.requester import METHOD_NOT_ALLOWED_MESSAGE, _get_api_name_to_doc

from ludus.envs.appworld.appworld_side.frames import receive, send

RESERVED = frozenset({"client", "raise_on_failure", "show", "track"})
"""Arguments of the engine's requester, beside those of the API."""

UNSAFE = frozenset("/\\?#%{}")
"""Characters that would make another address of a part of an address."""

NO_TOKEN = "no-such-token"
COMPANIES = ("amazon", "file_system", "gmail", "phone", "simple_note", "splitwise", "spotify",
             "todoist", "venmo")  # fmt: skip


class RefusedError(Exception):
    """A call that an agent may not make; the message is for the agent."""


class Gate:
    """The calls that an agent may make of a world's APIs.

    Four ways around the rules work on the engine itself, and are closed here:

        the app `admin`, which credits payment cards
        a parameter that is part of an address, such as `../../admin/credit`
        access tokens that the agent signed itself: the engine's key is a constant
        the accounts of companies, which send out reset codes: their password is a constant
    """

    def __init__(self, apps: Mapping[str, Any]) -> None:
        self.apis = {app: sorted(get_name_to_apis(app)) for app in apps if app != "admin"}
        self._tokens: set[str] = set()
        companies = [CompanyNotifier(name) for name in COMPANIES]
        self._companies = {name.email_address for name in companies}
        self._companies |= {name.phone_number for name in companies}

    def check(self, app: Any, api: Any, arguments: Any) -> dict[str, Any]:
        """Returns the call's arguments, as they may be used. Errors: RefusedError."""
        if app not in self.apis:
            raise RefusedError(f"No app named '{app}' found.")
        if api not in self.apis[app]:
            raise RefusedError(f"No API named '{api}' found in the {app} app.")
        if not isinstance(arguments, dict):
            raise RefusedError("The arguments have to be given by name.")
        for name in arguments:
            if name in RESERVED or name.startswith("_"):
                raise RefusedError(f"The API {app}.{api} has no parameter {name!r}.")
        path = _get_api_name_to_doc(app, include_private_apis=True)[api]["path"]
        for name, value in arguments.items():
            if f"{{{name}}}" in path and not is_segment(str(value)):
                raise RefusedError(METHOD_NOT_ALLOWED_MESSAGE)
        checked = dict(arguments)
        if "access_token" in checked and checked["access_token"] not in self._tokens:
            checked["access_token"] = NO_TOKEN
        if api == "login" and str(checked.get("username", "")).strip().lower() in self._companies:
            checked["password"] = NO_TOKEN
        return checked

    def learn(self, answer: Any) -> None:
        """Note an access token that the engine gave out."""
        if isinstance(answer, dict) and isinstance(token := answer.get("access_token"), str):
            self._tokens.add(token)


def is_segment(value: str) -> bool:
    """True for a text that stays one part of an address, such as `17` or `ann@example.com`."""
    return value.isprintable() and value.strip(". ") != "" and not UNSAFE & set(value)


class World:
    """One episode at a time on the engine, whose databases are global to a process."""

    def __init__(self) -> None:
        self.calls: socket.socket | None = None
        self._world: Any = None
        self._gate = Gate({})

    def reset(self, root: str, task: str, experiment: str, max_calls: int) -> dict[str, Any]:
        """Open a task's world; the socket of its calls came with this request."""
        self._end()
        update_root(root)
        world = AppWorld(
            task_id=task,
            experiment_name=experiment,
            load_ground_truth=False,
            max_api_calls_per_interaction=max_calls,
        )
        self._world, self._gate = world, Gate(world.task.app_descriptions)
        return {
            "instruction": world.task.instruction,
            "supervisor": dict(world.task.supervisor),
            "apps": world.task.app_descriptions,
            "apis": self._gate.apis,
            "datetime": world.task.datetime.isoformat(),
        }

    def attach(self) -> None:
        """The model's code has a new process, whose socket came with this request."""

    def status(self) -> dict[str, Any]:
        """The task's status, after a step: whether it is marked complete, and the calls so far."""
        requester = self._world.requester
        requester.reset_request_count()
        active = requester.request("supervisor", "show_active_task", track=False)
        ended = active["status"] in get_type_args(TASK_STATUS_LITERAL)
        return {"completed": ended, "num_calls": len(requester.requests)}

    def save(self) -> None:
        """Write the changes of the databases, for the evaluator; no call is served after it."""
        self.hang_up()
        self._world._save_state(self._world.output_db_home_path_on_disk)

    def close(self) -> None:
        """End the episode."""
        self.hang_up()
        self._end()

    def _end(self) -> None:
        if self._world is not None:
            world, self._world = self._world, None
            with suppress(Exception):
                world.close()
            AppWorld.close_all()

    def hang_up(self) -> None:
        """Close the socket of the model's code."""
        if self.calls is not None:
            self.calls.close()
            self.calls = None

    def serve_call(self) -> None:
        """Serve one API call of the model's code."""
        assert self.calls is not None
        try:
            call = receive(self.calls)
            reply = self._call(call)
            send(self.calls, {**reply, "number": call["number"]})
        except (EOFError, OSError, ValueError, TypeError, KeyError):
            self.hang_up()

    def _call(self, call: dict[str, Any]) -> dict[str, Any]:
        try:
            arguments = self._gate.check(call["app"], call["api"], call["arguments"])
            failing = bool(call.get("raise_on_failure", True))
            answer = self._world.requester.request(
                call["app"], call["api"], raise_on_failure=failing, **arguments
            )
        except Exception as error:
            name = type(error).__name__
            plain = name in ("Exception", "RefusedError", "NumRequestsLimitError")
            return {"error": str(error) if plain else f"{name}: {error}"}
        self._gate.learn(answer)
        return {"answer": answer}


def serve_world(host: socket.socket) -> None:
    """Serve the host, and the model's code between its requests."""
    world = World()
    while True:
        ready = select.select([host, *([world.calls] if world.calls else [])], [], [])[0]
        if world.calls in ready:
            world.serve_call()
        if host in ready and not _serve_host(host, world):
            return


def _serve_host(host: socket.socket, world: World) -> bool:
    """Serve one request: a letter, with the socket of new model's code where it is `c`; a message.

    False at the end of the stream.
    """
    letter, fds, _, _ = socket.recv_fds(host, 1, 1)
    if not letter:
        return False
    if fds:
        world.hang_up()
        world.calls = socket.socket(fileno=fds[0])
    request = receive(host)
    try:
        answer = getattr(world, request.pop("op"))(**request)
        send(host, {"ok": answer})
    except Exception as error:
        send(host, {"error": f"{type(error).__name__}: {error}"})
    return True
