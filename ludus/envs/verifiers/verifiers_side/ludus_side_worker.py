"""The taskset, its environment, and the model's endpoint that its harness calls."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import json
import math
import os
import sys
import types
from contextlib import AsyncExitStack, suppress
from itertools import count, islice
from pathlib import Path
from typing import Any

import verifiers.v1 as vf
from aiohttp import web
from ludus_side_harness import LudusHarness
from ludus_side_session import Refused, Session

TASKSET, HARNESS = "ludus_taskset", "ludus_harness"
"""Names under which verifiers imports the taskset's class and the harness of ludus."""

PROBE_S = 120.0
MAX_BODY = 64 * 2**20


class Worker:
    """The taskset, its environment, and the running episodes."""

    def __init__(self, given: dict[str, Any]) -> None:
        self._given = given
        self._sessions: dict[str, Session] = {}
        self._numbers = count(1)
        self._stack = AsyncExitStack()
        self._env: Any = None
        self._base_url = ""
        self._tasks: list[Any] = []
        self._iterator: Any = None
        self._tools: list[dict[str, Any]] | None = None
        self._probing = asyncio.Lock()

    async def start(self) -> None:
        """Serve the model's endpoint and load the taskset. Errors: Refused."""
        app = web.Application(client_max_size=MAX_BODY)
        app.router.add_post("/v1/chat/completions", self._complete)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        self._stack.push_async_callback(runner.cleanup)
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self._base_url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        try:
            self._env = vf.load_environment(vf.resolve_env_config(self._config()))
            self._check_harnesses()
            self._iterator = iter(self._env.taskset)
            await self._stack.enter_async_context(self._env.serving())
        except Refused:
            raise
        except (Exception, SystemExit) as error:
            raise Refused(f"{self._given['taskset']!r}: {described(error)}", "config") from error

    async def close(self) -> None:
        for name in list(self._sessions):
            await self._end(name)
        await self._stack.aclose()

    def _config(self) -> dict[str, Any]:
        """verifiers' config of the environment, with the user's on top."""
        given = self._given
        taskset = _register(given["taskset"])
        harness = given["harness"]
        if harness == "ludus":
            module = types.ModuleType(HARNESS)
            vars(module).update(LudusHarness=LudusHarness, __all__=["LudusHarness"])
            sys.modules[HARNESS] = module
            harness = HARNESS
        agent = {
            "harness": {"id": harness},
            "runtime": {"type": "subprocess"},
            "max_turns": given["max_turns"],
        }
        config = {"taskset": {**given["taskset_args"], "id": taskset}}
        if given["env"] is not None:
            config["id"] = given["env"]
        return _merged({**config, given["agent"]: agent}, given["config"])

    def _check_harnesses(self) -> None:
        """Refuse a harness that runs the model's code on this machine. Errors: Refused."""
        for name, harness in self._env._harnesses.items():
            local = self._env._agent_specs[name].runtime.type == "subprocess"
            if harness.EXECUTES_CODE and local:
                raise Refused(
                    f"the harness {harness.config.id!r} of {name!r} runs the model's code on this "
                    f"machine: use the harness ludus, or set config.{name}.runtime.type to docker",
                    "config",
                )

    async def describe(self, call: dict[str, Any]) -> dict[str, Any]:
        """Number of tasks (null: without end), and the tools of the first task's episode."""
        async with self._probing:
            if self._tools is None:
                opened = await asyncio.wait_for(self.reset({"index": 0}), PROBE_S)
                self._tools = self._sessions[opened["session"]].tools
                await self.close_session(opened)
        bounded = self._env.taskset.bounded
        if bounded:
            self._read()
        return {"num_tasks": len(self._tasks) if bounded else None, "tools": self._tools}

    async def reset(self, call: dict[str, Any]) -> dict[str, Any]:
        """Start an episode; its opening messages."""
        task = self._task(call["index"])
        session = Session(f"ludus-{next(self._numbers)}")
        self._sessions[session.name] = session
        client = vf.EvalClientConfig(base_url=self._base_url, api_key_var="LUDUS_VERIFIERS_KEY")
        context = vf.ModelContext(model=session.name, client=client, sampling=vf.Sampling())
        session.episode = asyncio.create_task(self._env.run_episode(task, context))
        try:
            messages = await session.next_request()
            if messages is None:
                faults = _faults(session.episode.result())
                raise Refused(faults or "the episode ended before it called the model")
        except BaseException:
            await self._end(session.name)
            raise
        return {"session": session.name, "messages": messages, "tools": session.tools}

    async def step(self, call: dict[str, Any]) -> dict[str, Any]:
        """Give the model's message; the messages until its next turn, or the episode's end."""
        session = self._sessions.get(call["session"])
        if session is None or session.waiting is None:
            raise Refused("the episode is over, or was never reset")
        try:
            session.answer(call["message"])
            messages = await session.next_request()
            if messages is not None:
                return {"messages": messages, "done": False}
            assert session.episode is not None
            result = self._result(session, session.episode.result())
        except BaseException:
            await self._end(session.name)
            raise
        await self._end(session.name)
        return result

    async def close_session(self, call: dict[str, Any]) -> dict[str, Any]:
        await self._end(call["session"])
        return {}

    def _result(self, session: Session, episode: Any) -> dict[str, Any]:
        """The end of an episode: its reward and scores. Errors: Refused for a failed one."""
        if faults := _faults(episode):
            raise Refused(faults)
        agent = self._given["agent"]
        own = [t for t in episode.traces if (t.agent.name or agent) == agent]
        if len(own) != 1:
            names = sorted({str(t.agent.name) for t in episode.traces})
            raise Refused(
                f"the episode has {len(own)} traces of the agent {agent!r}; its agents are "
                f"{', '.join(names) or 'none'}: name one with a single trace as `agent`"
            )
        trace = own[0]
        rewards = {name: r.score for name, r in trace.rewards.items() if r is not None}
        metrics = {name: m for name, m in trace.metrics.items() if m is not None}
        if not rewards or not math.isfinite(trace.reward):
            raise Refused(f"the task's rewards sum to {trace.reward}: {rewards}")
        return {
            "messages": [],
            "done": True,
            "truncated": trace.stop_condition in ("max_turns", "agent_timeout"),
            "reward": trace.reward,
            "rewards": rewards,
            "metrics": {name: value for name, value in metrics.items() if math.isfinite(value)},
            "stop": trace.stop_condition,
        }

    def _task(self, index: int) -> Any:
        self._read(index + 1)
        if index >= len(self._tasks):
            raise Refused(
                f"there is no task {index}: the taskset has {len(self._tasks)} tasks, from 0 on; "
                "first_seed + num_tasks must not exceed that"
            )
        return self._tasks[index]

    def _read(self, num_tasks: int | None = None) -> None:
        """Load tasks until there are `num_tasks`, or all."""
        try:
            more = None if num_tasks is None else max(0, num_tasks - len(self._tasks))
            self._tasks += islice(self._iterator, more)
        except Exception as error:
            message = f"{self._given['taskset']!r} cannot load its tasks: {described(error)}"
            raise Refused(message) from error

    async def _end(self, name: str) -> None:
        session = self._sessions.pop(name, None)
        if session is None or session.episode is None:
            return
        session.episode.cancel()
        with suppress(BaseException):
            await asyncio.wait_for(session.episode, 10)

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        """The chat completion that a harness asks for: it waits for the next step."""
        body = await request.json()
        session = self._sessions.get(body["model"])
        if session is None:
            return web.json_response({"error": {"message": "the episode is over"}}, status=410)
        future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        session.requests.put_nowait((body, future))
        message = await future
        finish = "tool_calls" if message.get("tool_calls") else "stop"
        fields = {"id": "ludus", "created": 0, "model": body["model"]}
        usage = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
        if not body.get("stream"):
            choice = {"index": 0, "message": message, "finish_reason": finish}
            whole = {**fields, "object": "chat.completion", "choices": [choice], "usage": usage}
            return web.json_response(whole)
        calls = message.get("tool_calls") or ()
        delta = {**message, **({"tool_calls": _numbered(calls)} if calls else {})}
        parts: list[dict[str, Any]] = [
            {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]},
            {"choices": [{"index": 0, "delta": {}, "finish_reason": finish}]},
            {"choices": [], "usage": usage},
        ]
        stream = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await stream.prepare(request)
        for part in parts:
            chunk = {**fields, "object": "chat.completion.chunk", **part}
            await stream.write(f"data: {json.dumps(chunk)}\n\n".encode())
        await stream.write(b"data: [DONE]\n\n")
        return stream


def _numbered(calls: Any) -> list[dict[str, Any]]:
    return [{"index": index, **call} for index, call in enumerate(calls)]


def _faults(episode: Any) -> str:
    """The errors of an episode; empty if it has none."""
    errors = [*episode.errors]
    for trace in episode.traces:
        if not trace.ok:
            errors += trace.errors[-1:]
    return "; ".join(f"{error.type}: {error.message[-600:]}" for error in errors)


def described(error: BaseException) -> str:
    """Type and message of an error, in one line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {' '.join(lines)[:600]}"


def _merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """`base` with the entries of `over`, inner dictionaries merged."""
    merged = dict(base)
    for key, value in over.items():
        inner = merged.get(key)
        if isinstance(inner, dict) and isinstance(value, dict):
            merged[key] = _merged(inner, value)
        else:
            merged[key] = value
    return merged


def _register(name: str) -> str:
    """The id by which verifiers finds a taskset: a package's name, or that of "module:Class".

    Errors: Refused.
    """
    module_name, colon, attribute = name.rpartition(":")
    if not colon:
        return name
    try:
        if module_name.endswith(".py"):
            path = Path(module_name).expanduser().resolve()
            search(str(path.parent))
            module_name = path.stem
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        raise Refused(f"taskset {name!r}: {described(error)}", "config") from error
    found = getattr(module, attribute, None)
    if not (isinstance(found, type) and issubclass(found, vf.Taskset)):
        classes = {key: value for key, value in vars(module).items() if isinstance(value, type)}
        names = [k for k, v in classes.items() if issubclass(v, vf.Taskset) and v is not vf.Taskset]
        hint = f"; its tasksets are {', '.join(names)}" if names else ""
        raise Refused(
            f"taskset {name!r}: {attribute} is not a Taskset of verifiers{hint}", "config"
        )
    exported = {attribute: found}
    for key, value in vars(module).items():  # how its author wants it to be played
        own = isinstance(value, type) and value.__module__ == module.__name__
        if own and issubclass(value, vf.Env):
            exported[key] = value
    plugin = types.ModuleType(TASKSET)
    vars(plugin).update(exported, __all__=list(exported))
    sys.modules[TASKSET] = plugin
    # verifiers looks a plug-in up with find_spec, which reads it from the module.
    plugin.__spec__ = importlib.util.spec_from_loader(TASKSET, loader=None)
    return TASKSET


def search(folder: str) -> None:
    """Find modules in a folder, here and in the tool servers, which are processes of their own."""
    sys.path.insert(0, folder)
    paths = [folder, *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
