"""AgentJet's environment protocol: requests of its client, and our own client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from http.server import BaseHTTPRequestHandler
from typing import Any

import httpx
import pytest
from service_world import OBEYS, command, service, until
from threaded_server import body_of, reply, serving

from ludus.core.errors import ConfigError, DataError, EnvError
from ludus.core.types import Message, Spec, Task
from ludus.data.expert import run_expert
from ludus.envs.agentjet import AgentJet
from ludus.envs.checks.check import check_env
from ludus.envs.textcraft.env import TextCraft
from ludus.tasks.readers import read_tasks


class EnvClient(AbstractContextManager["EnvClient"]):
    """The requests of AgentJet's `EnvClient`, and what its trainer reads of the answers."""

    def __init__(self, url: str, headers: dict[str, str] | None = None) -> None:
        self._http = httpx.Client(base_url=url, timeout=30, headers=headers)

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def raw(self, endpoint: str, **given: Any) -> httpx.Response:
        data = {"env_type": "default", "task_id": None, "instance_id": None}
        return self._http.post(endpoint, json={**data, "messages": {}, "params": {}, **given})

    def _make_request(self, endpoint: str, **given: Any) -> dict[str, Any]:
        answer: dict[str, Any] = self.raw(endpoint, **given).raise_for_status().json()
        return answer

    def get_env_profile(self, env_type: str, split: str = "train", **params: Any) -> list[str]:
        params = {"split": split, **params}
        found: list[str] = self._make_request("/get_env_profile", env_type=env_type, params=params)[
            "data"
        ]
        return found

    def create_instance(self, env_type: str, task_id: str, instance_id: str) -> dict[str, Any]:
        fields = {"env_type": env_type, "task_id": task_id, "instance_id": instance_id}
        data: dict[str, Any] = self._make_request("create", **fields)["data"]
        assert all(isinstance(message["content"], str) for message in data["state"])
        return data

    def step(self, instance_id: str, action: dict[str, Any]) -> tuple[str, bool]:
        data = self._make_request("step", instance_id=instance_id, messages=action)["data"]
        return data["state"][0]["content"], data["is_terminated"]

    def evaluate(self, instance_id: str, **params: Any) -> float:
        answer = self._make_request("evaluate", instance_id=instance_id, params=params)
        return float(answer["data"])

    def get_tools_info(self, instance_id: str, **params: Any) -> Any:
        return self._make_request("get_info", instance_id=instance_id, params=params)["data"]

    def release_instance(self, instance_id: str) -> bool:
        return bool(self._make_request("release", instance_id=instance_id)["success"])

    def refused(self, endpoint: str, **given: Any) -> tuple[int, str]:
        answer = self.raw(endpoint, **given)
        return answer.status_code, answer.json()["error"]["type"]

    def message(self, endpoint: str, **given: Any) -> str:
        answer = self.raw(endpoint, **given)
        assert answer.status_code == 422, answer.text
        return str(answer.json()["error"]["message"])


def say(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


@pytest.fixture(scope="module")
def theirs(url: str) -> Iterator[EnvClient]:
    with EnvClient(url) as made:
        yield made


def test_an_episode_of_their_client(theirs: EnvClient) -> None:
    ids = theirs.get_env_profile("textcraft", num_tasks=8)
    assert ids[:5] == ["depth-1/0", "depth-2/0", "depth-3/0", "depth-4/0", "depth-1/1"]
    expert = asyncio.run(run_expert(TextCraft(), TextCraft.task("depth-2", 0)))
    said = [message.content for message in expert.messages if message.role == "user"]
    actions = [message.content for message in expert.messages if message.role == "assistant"]
    opening = theirs.create_instance("textcraft", ids[1], "episode-1")
    assert [m["content"] for m in opening["state"] if m["role"] == "user"] == said[:1]
    assert opening["info"]["instance_id"] == "episode-1"
    assert (opening["info"]["task_id"], opening["is_terminated"]) == ("depth-2/0", False)
    for number, action in enumerate(actions, start=1):
        assert theirs.evaluate("episode-1", sparse=False) == 0.0
        text, over = theirs.step("episode-1", say(action))
        assert over == (number == len(actions))
        assert over or text == said[number]
    assert theirs.evaluate("episode-1", sparse=False) == 1.0
    assert theirs.evaluate("episode-1", sparse=True) == 1.0
    assert theirs.refused("step", instance_id="episode-1", messages=say("x")) == (
        409,
        "episode_over",
    )
    assert theirs.release_instance("episode-1")
    assert not theirs.release_instance("episode-1")
    assert theirs.refused("step", instance_id="episode-1", messages=say("x"))[0] == 410
    assert theirs.refused("evaluate", instance_id="never")[0] == 404


def test_splits_share_no_task(theirs: EnvClient) -> None:
    lists = [theirs.get_env_profile("textcraft", split) for split in ("train", "dev", "test")]
    assert [len(ids) for ids in lists] == [100, 100, 100]
    assert len({id for ids in lists for id in ids}) == 300
    assert theirs.get_env_profile("textcraft", tiers=["depth-2"], num_tasks=2, first_seed=7) == [
        "depth-2/7",
        "depth-2/8",
    ]
    assert theirs.get_env_profile(OBEYS, num_tasks=2) == ["0", "1"]


def test_tasks_are_seeds_tiers_and_items_of_agentgym(theirs: EnvClient) -> None:
    def opening(task_id: Any) -> str:
        state = theirs.create_instance("textcraft", task_id, "t")["state"]
        return str(state[-1]["content"])

    assert "Goal" in opening("textcraft_150") or "goal" in opening("textcraft_150")
    assert opening("depth-1/3") != opening("depth-1/4")
    assert opening(3) == opening("3")
    assert theirs.refused("create", env_type="textcraft", task_id="textcraft_549") == (
        422,
        "bad_task",
    )
    assert theirs.refused("create", env_type="textcraft", task_id="moon/3") == (422, "bad_task")


def test_create_with_an_open_id_starts_anew(theirs: EnvClient, client: httpx.Client) -> None:
    """AgentJet's client sends a request again whose answer was lost."""
    before = client.get("/health").json()["sessions"]
    assert theirs.create_instance(OBEYS, "3", "again")["state"][0]["content"] == "order 3"
    theirs.step("again", say("hello"))
    assert theirs.create_instance(OBEYS, "4", "again")["state"][0]["content"] == "order 4"
    assert theirs.get_tools_info("again")["num_steps"] == 0
    assert client.get("/health").json()["sessions"] == before + 1
    theirs.release_instance("again")
    made = theirs.raw("create", env_type=OBEYS, task_id="5").json()["data"]
    assert theirs.release_instance(made["info"]["instance_id"])


def test_actions_as_parts_and_tool_calls(theirs: EnvClient) -> None:
    theirs.create_instance(OBEYS, "1", "calls")
    parts = {"role": "assistant", "content": [{"type": "text", "text": "hello"}]}
    assert theirs.step("calls", parts) == ("you said hello", False)
    tools = theirs.get_tools_info("calls")["tools"]
    assert tools[0]["function"]["name"] == "act"
    function = {"name": "act", "arguments": '{"action": "win"}'}
    call = {"id": "7", "type": "function", "function": function}
    answer = theirs.raw(
        "step",
        instance_id="calls",
        messages={"role": "assistant", "content": None, "tool_calls": [call]},
    ).json()["data"]
    assert answer["is_terminated"]
    assert answer["state"] == [
        {"role": "tool", "content": "you said win", "tool_call_id": "7", "name": "act"}
    ]
    theirs.release_instance("calls")


def test_wrong_requests_say_what_would_be_right(theirs: EnvClient) -> None:
    def told(endpoint: str, **given: Any) -> str:
        return theirs.message(endpoint, **given)

    theirs.create_instance(OBEYS, "1", "bad")
    assert theirs.refused("create", env_type="moon", task_id="1") == (404, "unknown_env")
    assert told("create", env_type=None, task_id="1") == "env_type: is required: a name from /envs"
    assert "task_id: is required" in told("create", env_type=OBEYS)
    assert "use SEED or TIER/SEED" in told("create", env_type=OBEYS, task_id="x")
    assert "use SEED" in told("create", env_type=OBEYS, task_id=f"{2**63}")
    assert told("release") == "instance_id: is required"
    assert told("get_env_profile", env_type=OBEYS, params={"split": "trian"}).startswith(
        "params.split: "
    )
    assert "params.tiers: " in told(
        "get_env_profile", env_type="textcraft", params={"tiers": ["x"]}
    )
    for action in (
        {},
        {"content": 3},
        {"content": [3]},
        {"role": "tool", "content": "x"},
        {"content": "x", "tool_calls": 3},
        {"content": "x", "tool_calls": [3]},
        {"content": "x", "tool_calls": [{"function": {"name": "a", "arguments": "{"}}]},
        {"content": "x", "tool_calls": [{"function": {"name": None}}]},
        {"content": "x", "tool_calls": [{"function": {"name": "a", "arguments": "[1]"}}]},
    ):
        assert told("step", instance_id="bad", messages=action).startswith("messages"), action
    long = say("x" * 150_001)
    assert theirs.refused("step", instance_id="bad", messages=long) == (413, "action_too_long")
    assert theirs.refused("get_info", instance_id="bad", params={"what": "x"}) == (404, "no_view")
    assert theirs.step("bad", say("hello")) == ("you said hello", False)
    theirs.release_instance("bad")


def test_a_failing_environment_ends_its_instance_only(theirs: EnvClient) -> None:
    for id in ("one", "two"):
        theirs.create_instance(OBEYS, "1", id)
    assert theirs.refused("step", instance_id="one", messages=say("raise")) == (502, "env_error")
    assert theirs.refused("evaluate", instance_id="one") == (410, "session_closed")
    assert theirs.step("two", say("hello")) == ("you said hello", False)
    theirs.release_instance("two")


def test_idle_instances_are_reaped() -> None:
    with service(OBEYS, idle_s=0.4) as url, EnvClient(url) as theirs:
        theirs.create_instance(OBEYS, "1", "idle")
        until(lambda: httpx.get(f"{url}/health").json()["sessions"] == 0)
        assert theirs.refused("step", instance_id="idle", messages=say("x")) == (
            410,
            "session_closed",
        )


def test_instances_belong_to_a_token_and_count_as_sessions() -> None:
    tokens = ("a" * 16, "b" * 16)
    sent = [{"authorization": f"Bearer {token}"} for token in tokens]
    with (
        service(OBEYS, tokens=tokens, max_sessions=2) as url,
        EnvClient(url, sent[0]) as a,
        EnvClient(url, sent[1]) as b,
        EnvClient(url) as without,
    ):
        assert without.refused("create", env_type=OBEYS, task_id="1")[0] == 401
        a.create_instance(OBEYS, "1", "same")
        assert b.refused("step", instance_id="same", messages=say("x"))[0] == 404
        assert not b.release_instance("same")
        b.create_instance(OBEYS, "2", "same")
        assert a.refused("create", env_type=OBEYS, task_id="1") == (429, "too_many_sessions")
        assert a.step("same", say("hello"))[0] == "you said hello"


def test_ended_instances_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table of ids does not grow with the number of episodes."""
    monkeypatch.setattr("ludus.services.envs.agentjet.MAX_REMEMBERED", 5)
    with service(OBEYS, max_sessions=1) as url, EnvClient(url) as theirs:
        for number in range(20):
            theirs.create_instance(OBEYS, "1", f"i{number}")
            assert theirs.release_instance(f"i{number}")
        assert theirs.refused("evaluate", instance_id="i0")[0] == 404
        assert theirs.refused("evaluate", instance_id="i19")[0] == 410


@pytest.mark.slow
def test_several_workers_share_instances_by_id() -> None:
    with command("textcraft", "--workers", "2") as served, EnvClient(served.url) as theirs:
        for number in range(12):
            theirs.create_instance("textcraft", "depth-1/0", f"i{number}")
        for number in range(12):
            theirs.step(f"i{number}", say("inventory"))
            assert theirs.get_tools_info(f"i{number}")["num_steps"] == 1
        made = [theirs.raw("create", env_type="textcraft", task_id="1").json() for _ in range(6)]
        for answer in made:
            assert theirs.release_instance(answer["data"]["info"]["instance_id"])


# Our client.


def ours(url: str, env_type: str = "textcraft", **args: Any) -> AgentJet:
    return AgentJet(url=url, env_type=env_type, **args)


@pytest.mark.parametrize("reward", ["evaluate", "end", "steps"])
async def test_episodes_equal_the_local_environment(url: str, reward: Any) -> None:
    local = await run_expert(TextCraft(), TextCraft.task("depth-2", 3))
    env, rewards = ours(url, reward=reward), []
    said = (await env.reset(Task(id="a", data={"task_id": "depth-2/3"}))).messages
    for action in [m for m in local.messages if m.role == "assistant"]:
        result = await env.step(action)
        rewards.append(result.reward)
        said += [action, *result.messages]
    assert said[: len(local.messages)] == local.messages
    assert (result.terminated, result.truncated, rewards[-1]) == (True, False, 1.0)
    assert set(rewards[:-1]) <= {None if reward == "end" else 0.0}
    with pytest.raises(EnvError, match="call reset first"):
        await env.step(Message(role="assistant", content="x"))
    await env.close()


async def test_the_turn_limit_ends_with_an_evaluation(url: str) -> None:
    env = ours(url, OBEYS, max_turns=2, reward="end")
    await env.reset(Task(id="a", data={"task_id": 3}))
    first = await env.step(Message(role="assistant", content="hello \ud800"))
    last = await env.step(Message(role="assistant", content="hello"))
    assert (first.reward, first.done) == (None, False)
    assert (last.reward, last.terminated, last.truncated) == (0.0, False, True)


@pytest.mark.slow
async def test_the_served_environment_passes_the_checks(url: str) -> None:
    spec = Spec(name="agentjet", args={"url": url, "env_type": "textcraft"})
    findings = await check_env(spec, num_tasks=2)
    assert [f for f in findings if f.severity == "error"] == []


async def test_instances_are_released(url: str, client: httpx.Client) -> None:
    before = client.get("/health").json()["sessions"]
    envs = [ours(url, OBEYS) for _ in range(3)]
    for env in envs:
        await env.reset(Task(id="a", data={"task_id": "1"}))
    assert client.get("/health").json()["sessions"] == before + 3
    for env in envs:
        await env.close()
        await env.close()
    assert client.get("/health").json()["sessions"] == before


def test_the_reader(url: str) -> None:
    args = {"url": url, "env_type": "textcraft", "split": "test", "limit": 3}
    tasks = read_tasks(Spec(name="agentjet", args=args))
    assert [task.id for task in tasks] == [f"textcraft/depth-{n}/2000000" for n in (1, 2, 3)]
    assert tasks[0].env == Spec(name="agentjet", args={"url": url, "env_type": "textcraft"})
    env: Any = ours(url)
    run = read_tasks(Spec(name="agentjet", args={"params": {"num_tasks": 2}}), maker=env)
    assert [(task.env, task.data) for task in run] == [
        (None, {"task_id": "depth-1/0"}),
        (None, {"task_id": "depth-2/0"}),
    ]
    with pytest.raises(ConfigError, match="needs url and env_type"):
        read_tasks(Spec(name="agentjet"))
    with pytest.raises(DataError, match=r"404.*'moon' is not served"):
        read_tasks(Spec(name="agentjet", args={**args, "env_type": "moon"}))
    with pytest.raises(DataError, match=r"params\.split"):
        read_tasks(Spec(name="agentjet", args={**args, "split": "trian"}))


# Hostile services.


@contextmanager
def answering(answer: Callable[[str], tuple[int, bytes]]) -> Iterator[str]:
    """An HTTP server whose answer depends on the path."""

    def take(request: BaseHTTPRequestHandler) -> None:
        body_of(request)
        reply(request, *answer(request.path))

    with serving(take) as port:
        yield f"http://127.0.0.1:{port}"


def ok(data: Any) -> tuple[int, bytes]:
    return 200, json.dumps({"success": True, "data": data}).encode()


START = ok({"state": [{"role": "user", "content": "go"}], "info": None})


@pytest.mark.parametrize(
    ("created", "stepped", "evaluated", "said"),
    [
        ((200, b"{no json"), START, ok(0), "the answer is not JSON"),
        ((200, b"\xff"), START, ok(0), "is not UTF-8"),
        ((200, b"[]"), START, ok(0), "must be an object"),
        ((200, b"{}"), START, ok(0), "must have the field data"),
        ((200, b'{"success": false, "detail": "no"}'), START, ok(0), "success is false: no"),
        ((500, b'{"detail": "Traceback"}'), START, ok(0), "answered 500: Traceback"),
        ((400, b"{}"), START, ok(0), "/create"),
        (ok(None), START, ok(0), "does not answer as an environment service"),
        (ok({"state": "x"}), START, ok(0), "does not answer as an environment service: state"),
        (ok({"state": [{"role": "king", "content": ""}]}), START, ok(0), "role"),
        (START, ok({"state": [], "reward": "x"}), ok(0), "reward"),
        (START, START, ok("x"), "/evaluate must give a number, got 'x'"),
        (START, START, ok(True), "/evaluate must give a number"),
        (START, START, (200, b'{"data": NaN}'), "/evaluate must give a number"),
        (START, START, (200, b'{"data": 1' + b"0" * 400 + b"}"), "/evaluate must give a number"),
    ],
)
async def test_answers_of_a_broken_service(
    created: tuple[int, bytes], stepped: tuple[int, bytes], evaluated: tuple[int, bytes], said: str
) -> None:
    answers = {"/create": created, "/step": stepped, "/evaluate": evaluated}
    with answering(lambda path: answers.get(path, ok(None))) as url:
        env = ours(url, "x", deadline_s=5)
        with pytest.raises(EnvError, match=said):
            await _play(env)
        await env.close()


async def _play(env: AgentJet) -> None:
    await env.reset(Task(id="a", data={"task_id": "1"}))
    await env.step(Message(role="assistant", content="x"))


async def test_states_of_older_services() -> None:
    """A state may be one message; an environment may speak in the assistant's role."""
    step = ok({"state": {"role": "assistant", "content": "seen"}, "reward": 0})
    answers = {"/create": START, "/step": step, "/evaluate": ok(0.5)}
    with answering(lambda path: answers.get(path, ok(None))) as url:
        env = ours(url, "x")
        await env.reset(Task(id="a", data={"task_id": "1"}))
        result = await env.step(Message(role="assistant", content="x"))
        assert (result.messages, result.reward) == ([Message(role="user", content="seen")], 0.5)
        again = await env.step(Message(role="assistant", content="x"))
        assert again.reward == 0.0  # the evaluation has not changed
        await env.close()


@pytest.mark.parametrize("profile", [ok([{}]), ok("x"), ok([True]), ok([]), (500, b"")])
def test_profiles_of_a_broken_service(profile: tuple[int, bytes]) -> None:
    args = {"env_type": "x"}
    with answering(lambda path: profile) as url, pytest.raises(DataError):
        read_tasks(Spec(name="agentjet", args={**args, "url": url}))


async def test_a_service_that_is_gone() -> None:
    with answering(lambda path: START) as url:
        pass
    env = ours(url, "x", deadline_s=0.5)
    with pytest.raises(EnvError, match=r"gave no answer within 0\.5 s"):
        await env.reset(Task(id="a", data={"task_id": "1"}))
    await env.close()


def test_wrong_arguments() -> None:
    with pytest.raises(ConfigError, match="does not start with http"):
        ours("ftp://x")
    with pytest.raises(ConfigError, match=r"score_range: .* is empty"):
        ours("http://x", score_range=(1.0, 1.0))
