"""ludus' API of the environment service: answers and errors."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
from typing import Any

import httpx
import pytest
from service_world import LIGHTLY, OBEYS, service, until
from variants import variants
from websockets.sync.client import connect

from ludus.core.types import Message, StepResult, Task, ToolCall
from ludus.envs.textcraft.env import TextCraft


def opened(client: httpx.Client, env: str = OBEYS, seed: int | None = 0) -> str:
    """A session's path, reset unless `seed` is None."""
    path = f"/sessions/{client.post('/sessions', json={'env': env}).json()['session']}"
    if seed is not None:
        assert client.post(f"{path}/reset", json={"seed": seed}).status_code == 200
    return path


def refused(answer: httpx.Response, status: int, kind: str) -> str:
    """The message of a typed error."""
    assert answer.status_code == status, answer.text
    assert answer.json()["error"]["type"] == kind
    return str(answer.json()["error"]["message"])


async def in_process(seed: int, actions: list[str]) -> list[StepResult]:
    env = TextCraft()
    await env.reset(TextCraft.task("depth-1", seed))
    return [await env.step(Message(role="assistant", content=action)) for action in actions]


def test_episode_equals_the_local_environment(client: httpx.Client) -> None:
    path = opened(client, "textcraft", None)
    client.post(f"{path}/reset", json={"tier": "depth-1", "seed": 5}).raise_for_status()
    actions, told = [], []
    done = False
    while not done:
        actions.append(client.post(f"{path}/expert").json()["action"])
        answer = client.post(f"{path}/step", json={"action": actions[-1]})
        told.append(StepResult.model_validate_json(answer.content))
        done = told[-1].done
    assert told == asyncio.run(in_process(5, actions))
    standing = client.get(path).json()
    assert (standing["state"], standing["score"]) == ("over", 1.0)
    assert standing["num_steps"] == len(actions)


def test_environment_schema(client: httpx.Client) -> None:
    told = client.get("/envs/babyai").json()
    assert told["score_range"] == [0.0, 1.0]
    assert told["max_turns"] == 20
    assert "GoToLocal" in told["tiers"]
    assert [tool["name"] for tool in told["tools"]] == ["act"]
    task = Task.model_validate(client.get("/envs/babyai/task?seed=3&tier=GoToDoor").json())
    assert task.data == {"level": "GoToDoor", "seed": 3}
    call = client.post("/envs/babyai/call", json={"action": "go forward"}).json()
    assert call["arguments"] == {"action": "go forward"}


def test_environment_parses_tool_calls(client: httpx.Client) -> None:
    path = opened(client)

    def act(call: ToolCall) -> dict[str, Any]:
        message = Message(role="assistant", tool_calls=[call])
        return client.post(f"{path}/step", json={"message": message.model_dump()}).json()

    told = act(ToolCall(name="act", arguments={"action": "win"}, id="7"))
    assert told["terminated"]
    assert told["messages"][0]["tool_call_id"] == "7"
    client.post(f"{path}/reset", json={"seed": 0})
    assert "the argument action is missing" in act(ToolCall(name="act"))["messages"][0]["content"]


WRONG = {
    "unknown environment": ("POST", "/sessions", {"env": "chess"}, 404, "unknown_env"),
    "no environment": ("POST", "/sessions", {}, 422, "invalid"),
    "an unknown key": ("POST", "/sessions", {"env": OBEYS, "x": 1}, 422, "invalid"),
    "a wrong type": ("POST", "/sessions", {"env": 3}, 422, "invalid"),
    "unknown session": ("POST", "/sessions/ab12/step", {"action": "x"}, 404, "unknown_session"),
    "no session id": ("POST", "/sessions/;--/step", {"action": "x"}, 404, "unknown_session"),
    "unknown path": ("GET", "/session", None, 404, "unknown_path"),
    "wrong method": ("PUT", "/sessions", {}, 405, "wrong_method"),
    "negative seed": ("GET", "/envs/babyai/task?seed=-1", None, 422, "invalid"),
    "huge seed": ("GET", f"/envs/babyai/task?seed={10**30}", None, 422, "invalid"),
    "unknown tier": ("GET", "/envs/textcraft/task?seed=1&tier=x", None, 422, "bad_task"),
    "no action": ("POST", "/envs/textcraft/call", {"action": "fly"}, 422, "bad_action"),
    "a batch too long": ("POST", "/batch", {"calls": [{"op": "x"}] * 2000}, 422, "invalid"),
}


@pytest.mark.parametrize("case", WRONG.values(), ids=list(WRONG))
def test_wrong_requests_are_refused(client: httpx.Client, case: Any) -> None:
    method, path, body, status, kind = case
    refused(client.request(method, path, json=body), status, kind)


STEPS = {
    "an empty step": ({}, 422, "invalid"),
    "two actions": ({"action": "x", "message": {"role": "user"}}, 422, "invalid"),
    "a wrong role": ({"message": {"role": "king"}}, 422, "invalid"),
    "a number": ({"action": 3}, 422, "invalid"),
    "a long action": ({"action": "x" * 160_000}, 413, "action_too_long"),
    "an action of 1 MB": ({"action": "x" * 1_000_000}, 413, "too_large"),
}


@pytest.mark.parametrize("case", STEPS.values(), ids=list(STEPS))
def test_wrong_step_does_not_end_the_episode(client: httpx.Client, case: Any) -> None:
    body, status, kind = case
    path = opened(client)
    refused(client.post(f"{path}/step", json=body), status, kind)
    assert client.post(f"{path}/step", json={"action": "win"}).json()["reward"] == 1.0


@pytest.mark.parametrize("body", [b"{", b"\xff", b"", b"[" * 100_000])
def test_invalid_json_is_refused(client: httpx.Client, body: bytes) -> None:
    headers = {"content-type": "application/json"}
    answer = client.post("/sessions", content=body, headers=headers)
    assert answer.status_code in (400, 422), answer.text
    assert answer.json()["error"]["type"] in ("invalid_json", "invalid")


@pytest.mark.parametrize("kind", ["application/x-www-form-urlencoded", "text/plain", ""])
def test_a_body_of_another_type_is_refused_with_the_header_to_send(
    client: httpx.Client, kind: str
) -> None:
    body = b'{"env": "echo"}'  # what `curl -d` sends without -H
    answer = client.post("/sessions", content=body, headers={"content-type": kind} if kind else {})
    assert answer.status_code == 422
    assert "Content-Type: application/json" in answer.json()["error"]["message"]


def test_body_without_content_length_is_limited(client: httpx.Client) -> None:
    def parts() -> Any:
        for _ in range(20):
            yield b"x" * 100_000

    refused(client.post("/sessions", content=parts()), 413, "too_large")


def test_steps_before_reset_and_after_the_end(client: httpx.Client) -> None:
    path = opened(client, seed=None)
    refused(client.post(f"{path}/step", json={"action": "x"}), 409, "not_reset")
    refused(client.post(f"{path}/expert"), 409, "not_reset")
    client.post(f"{path}/reset", json={"seed": 0})
    assert client.post(f"{path}/step", json={"action": "win"}).json()["terminated"]
    refused(client.post(f"{path}/step", json={"action": "x"}), 409, "episode_over")
    client.post(f"{path}/reset", json={"seed": 1}).raise_for_status()
    assert client.delete(path).json() == {"closed": True}
    refused(client.post(f"{path}/step", json={"action": "x"}), 410, "session_closed")
    refused(client.delete(path), 410, "session_closed")


def test_unplayable_task_is_refused(client: httpx.Client) -> None:
    path = opened(client, seed=None)
    for data in ({"fail": True}, {"crash": True}):
        body = {"task": {"id": "a", "data": data}}
        refused(client.post(f"{path}/reset", json=body), 422, "bad_task")
    refused(client.post(f"{path}/reset", json={}), 422, "invalid")
    assert client.post(f"{path}/reset", json={"seed": 2}).status_code == 200


def test_concurrent_call_of_a_session_is_refused(client: httpx.Client) -> None:
    path = opened(client)
    answers: list[httpx.Response] = []

    def step() -> None:
        answers.append(client.post(f"{path}/step", json={"action": "sleep 0.3"}))

    threads = [threading.Thread(target=step) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(answer.status_code for answer in answers) == [200, 409, 409, 409]
    assert {a.json()["error"]["type"] for a in answers if a.is_error} == {"session_busy"}
    assert client.get(path).json()["num_steps"] == 1


FAILURES = [
    (env, *failure)
    for env in (OBEYS, LIGHTLY)
    for failure in (
        ("hang", 504, "env_timeout"),
        ("await", 504, "env_timeout"),
        ("raise", 502, "env_error"),
        ("tool", 502, "tool_error"),
    )
]
DEADLINES = [(OBEYS, "await"), (LIGHTLY, "hang")]
"""They wait for the deadline of a step, as two quick ones do."""


@pytest.mark.parametrize(
    ("env", "order", "status", "kind"),
    variants(FAILURES, [case for case in FAILURES if case[:2] not in DEADLINES]),
)
def test_failing_session_ends_without_the_others(
    client: httpx.Client, env: str, order: str, status: int, kind: str
) -> None:
    broken, other = opened(client, env), opened(client, env)
    refused(client.post(f"{broken}/step", json={"action": order}), status, kind)
    message = refused(client.post(f"{broken}/step", json={"action": "x"}), 410, "session_closed")
    assert kind in message
    assert client.post(f"{other}/step", json={"action": "win"}).json()["reward"] == 1.0


def test_batch_has_an_entry_per_call(client: httpx.Client) -> None:
    calls: list[dict[str, Any]] = [{"op": "create", "env": OBEYS} for _ in range(3)]
    made = client.post("/batch", json={"calls": calls}).json()["results"]
    ids = [entry["result"]["session"] for entry in made]
    assert len(set(ids)) == 3
    resets = [{"op": "reset", "session": id, "seed": n} for n, id in enumerate(ids)]
    said = client.post("/batch", json={"calls": resets}).json()["results"]
    texts = [entry["result"]["messages"][0]["content"] for entry in said]
    assert texts == ["order 0", "order 1", "order 2"]
    steps = [
        {"op": "step", "session": ids[0], "action": "win"},
        {"op": "step", "session": ids[1], "action": "raise"},
        {"op": "step", "session": "00", "action": "x"},
        {"op": "expert", "session": ids[2]},
        {"op": "close", "session": ids[2]},
    ]
    told = client.post("/batch", json={"calls": steps[:4]}).json()["results"]
    assert [entry["status"] for entry in told] == [200, 502, 404, 200]
    assert told[0]["result"]["reward"] == 1.0
    assert told[1]["error"]["type"] == "env_error"
    assert client.post("/batch", json={"calls": steps[4:]}).json()["results"][0]["status"] == 200


def test_websocket_takes_the_same_calls(url: str, client: httpx.Client) -> None:
    with connect(url.replace("http", "ws") + "/ws", proxy=None) as socket:

        def call(**given: Any) -> dict[str, Any]:
            socket.send(json.dumps(given))
            return dict(json.loads(socket.recv()))

        made = call(id=1, op="create", env=OBEYS)
        id = made["result"]["session"]
        assert (made["id"], made["status"]) == (1, 200)
        assert call(id="b", op="reset", session=id, seed=4)["result"]["messages"]
        assert call(id=3, op="step", session=id, action="win")["result"]["reward"] == 1.0
        assert call(id=4, op="step", session=id, action="x")["error"]["type"] == "episode_over"
        assert call(id=5, op="fly")["error"]["type"] == "invalid"
        assert call(id=[], op="create", env=OBEYS)["status"] == 422
        socket.send("{")
        assert json.loads(socket.recv())["error"]["type"] == "invalid_json"
        socket.send("[" * 50_000)
        assert json.loads(socket.recv())["error"]["type"] == "invalid_json"
        assert client.get(f"/sessions/{id}").status_code == 200
    until(lambda: client.get(f"/sessions/{id}").status_code == 410)


def test_slow_websocket_call_does_not_block_others(url: str) -> None:
    with connect(url.replace("http", "ws") + "/ws", proxy=None) as socket:

        def call(**given: Any) -> dict[str, Any]:
            socket.send(json.dumps(given))
            return dict(json.loads(socket.recv()))

        ids = [call(op="create", env=OBEYS)["result"]["session"] for _ in range(2)]
        for id in ids:
            call(op="reset", session=id, seed=0)
        socket.send(json.dumps({"id": 1, "op": "step", "session": ids[0], "action": "sleep 0.3"}))
        assert call(id=2, op="step", session=ids[1], action="win")["id"] == 2
        assert json.loads(socket.recv())["id"] == 1


TOKENS = ("first-token-of-sixteen", "other-token-of-sixteen")


def test_tokens_authenticate_and_separate_sessions() -> None:
    def bearer(token: str) -> dict[str, str]:
        return {"Authorization": f"Bearer {token}"}

    with service(OBEYS, tokens=TOKENS) as url, httpx.Client(base_url=url) as client:
        assert client.get("/health").json()["status"] == "ok"
        for headers in ({}, bearer("wrong"), {"Authorization": TOKENS[0]}):
            refused(client.get("/envs", headers=headers), 401, "unauthorized")
            refused(client.get("/metrics", headers=headers), 401, "unauthorized")
        mine, theirs = bearer(TOKENS[0]), bearer(TOKENS[1])
        made = client.post("/sessions", json={"env": OBEYS}, headers=mine).json()
        path = f"/sessions/{made['session']}"
        assert client.post(f"{path}/reset", json={"seed": 0}, headers=mine).status_code == 200
        step = {"action": "win"}
        refused(client.post(f"{path}/step", json=step, headers=theirs), 404, "unknown_session")
        refused(client.delete(path, headers=theirs), 404, "unknown_session")
        assert client.post(f"{path}/step", json=step, headers=mine).status_code == 200
        client.delete(path, headers=mine)
        refused(client.get(path, headers=theirs), 404, "unknown_session")
        with pytest.raises(Exception, match="403"):
            connect(url.replace("http", "ws") + "/ws", proxy=None)


def test_limits_on_sessions_and_memory() -> None:
    with service(OBEYS, max_sessions=2) as url, httpx.Client(base_url=url) as client:
        path = opened(client)
        opened(client)
        answer = client.post("/sessions", json={"env": OBEYS})
        refused(answer, 429, "too_many_sessions")
        assert answer.headers["retry-after"]
        client.delete(path)
        assert client.post("/sessions", json={"env": OBEYS}).status_code == 200
    with service(OBEYS, max_memory_mb=1) as url:
        refused(httpx.post(f"{url}/sessions", json={"env": OBEYS}), 503, "out_of_memory")


def test_only_idle_sessions_are_closed() -> None:
    with service(OBEYS, idle_s=0.4) as url, httpx.Client(base_url=url) as client:
        idle, used = opened(client), opened(client)

        def gone() -> bool:
            assert client.post(f"{used}/step", json={"action": "x"}).status_code == 200
            return client.get(idle).status_code == 410

        until(gone)
        assert "idle" in refused(client.get(idle), 410, "session_closed")


def test_metrics_count_sessions_requests_and_ends(client: httpx.Client) -> None:
    path = opened(client, LIGHTLY)
    client.post(f"{path}/step", json={"action": "raise"})
    text = client.get("/metrics").text
    assert f'ludus_env_sessions{{env="{LIGHTLY}"}}' in text
    assert 'ludus_env_sessions_ended_total{reason="env_error"}' in text
    assert f'ludus_env_call_seconds_count{{call="step",env="{LIGHTLY}"}}' in text
    assert 'ludus_http_seconds_count{route="/sessions/{session}/step",status="502"}' in text


def test_ids_cannot_be_guessed(client: httpx.Client) -> None:
    ids = [client.post("/sessions", json={"env": OBEYS}).json()["session"] for _ in range(20)]
    numbers = sorted(int(id, 16) for id in ids)
    gaps = [b - a for a, b in itertools.pairwise(numbers)]
    assert min(gaps) > 2**64
