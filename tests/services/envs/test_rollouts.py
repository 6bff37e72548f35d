"""`POST /rollouts`: episodes with a model behind an endpoint, over real HTTP."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import httpx
import pytest
from chat_server import ChatServer, num_turns, text
from service_world import OBEYS, alive, service, until
from starlette.responses import Response

from ludus.data.expert import run_expert
from ludus.envs.textcraft.env import TextCraft
from ludus.rollout.requests import tasks_of
from ludus.services.server.connections import ConnectionLimits

TOKENS = ("a-token-of-one-client", "a-token-of-another-one")


class Model:
    """Answers with `say`; turns of hanging ids wait until the test is over."""

    def __init__(self) -> None:
        self.say: Any = lambda body: text("Action: win")

    async def __call__(self, body: dict[str, Any]) -> Any:
        said = self.say(body)
        return await said if asyncio.iscoroutine(said) else said


@pytest.fixture(scope="module")
def model() -> Iterator[tuple[Model, str]]:
    made = Model()
    with ChatServer(made) as server:
        yield made, server.url


@pytest.fixture(scope="module")
def server() -> Iterator[httpx.Client]:
    with (
        service("textcraft", OBEYS, tokens=TOKENS, step_deadline_s=5.0) as address,
        httpx.Client(base_url=address, timeout=60, headers=bearer(0)) as client,
    ):
        yield client


def bearer(number: int) -> dict[str, str]:
    return {"authorization": f"Bearer {TOKENS[number]}"}


def asked(url: str, env: str = OBEYS, **more: Any) -> dict[str, Any]:
    return {"env": env, "model": "m", "base_url": url, "ids": [0, 1, 2], "max_retries": 0, **more}


def task_number(body: dict[str, Any]) -> int:
    """`order 3` of the first observation."""
    return int(body["messages"][0]["content"].split()[1])


def test_expert_behind_an_endpoint_wins(model: tuple[Model, str], server: httpx.Client) -> None:
    spoken, url = model
    shown: dict[str, list[str]] = {}
    for index in (3, 40):
        messages = asyncio.run(run_expert(TextCraft(), TextCraft.task(None, index))).messages
        shown[messages[0].content] = [m.content for m in messages if m.role == "assistant"]
    spoken.say = lambda body: text(
        f"Thought: x\n\nAction: {shown[body['messages'][0]['content']][num_turns(body)]}"
    )
    answer = server.post("/rollouts", json=asked(url, "textcraft", ids=[3, "textcraft_40"]))
    told = answer.json()
    assert [entry["id"] for entry in told["results"]] == [3, "textcraft_40"]
    assert told["mean_reward"] == told["success_rate"] == 1.0
    assert (told["env"], told["num_evaluated"], told["stopped"]) == ("textcraft", 2, None)
    entry = told["results"][0]
    assert (entry["reward"], entry["success"], entry["status"]) == (1.0, True, "completed")
    assert entry["num_turns"] == len(shown[entry["conversation"][0]["content"]])


def test_invalid_model_answers_give_typed_entries(
    model: tuple[Model, str], server: httpx.Client
) -> None:
    spoken, url = model

    def say(body: dict[str, Any]) -> Any:
        order = ["Action: sleep 0", "Action: win"][num_turns(body)]
        wrong = {1: Response("{}"), 2: text("Action: raise")}
        return (num_turns(body) and wrong.get(task_number(body))) or text(order)

    spoken.say = say
    told = server.post("/rollouts", json=asked(url)).json()
    entries = told["results"]
    assert [e["status"] for e in entries] == ["completed", "error_sampler", "error_env"]
    assert [e["reward"] for e in entries] == [1.0, None, None]
    assert "malformed response" in entries[1]["error"]
    assert "out of order" in entries[2]["error"]
    assert entries[1]["num_turns"] == 1  # what was played before stays
    assert (told["num_evaluated"], told["success_rate"]) == (1, 1.0)


def test_progress_is_streamed(model: tuple[Model, str], server: httpx.Client) -> None:
    spoken, url = model
    first = threading.Event()

    async def say(body: dict[str, Any]) -> Any:
        while task_number(body) and not first.is_set():  # until the first was heard of
            await asyncio.sleep(0.01)
        return text("Action: win")

    spoken.say = say
    events = []
    with server.stream("POST", "/rollouts", json=asked(url, stream=True)) as answer:
        for line in answer.iter_lines():
            events.append(json.loads(line))
            if events[-1]["event"] == "episode":
                first.set()
    assert [e["event"] for e in events] == ["start", *["episode"] * 3, "end"]
    assert events[1]["id"] == 0
    assert events[-1]["success_rate"] == 1.0


@pytest.mark.parametrize("how", ["delete", "leave", "deadline"])
def test_job_can_be_stopped(how: str, model: tuple[Model, str], server: httpx.Client) -> None:
    spoken, url = model
    over = threading.Event()

    async def say(body: dict[str, Any]) -> Any:
        while task_number(body) and not over.is_set():
            await asyncio.sleep(0.01)
        return text("Action: win")

    spoken.say = say
    body = asked(url, stream=True, deadline_s=2.0 if how == "deadline" else 60.0)
    events = []
    with server.stream("POST", "/rollouts", json=body) as answer:
        for line in answer.iter_lines():
            events.append(json.loads(line))
            if events[-1]["event"] == "episode" and len(events) == 2:
                job = events[0]["job"]
                assert [j["job"] for j in server.get("/rollouts").json()] == [job]
                assert server.get("/rollouts", headers=bearer(1)).json() == []
                other = server.delete(f"/rollouts/{job}", headers=bearer(1))
                assert other.json()["error"]["type"] == "unknown_rollout"
                if how == "leave":
                    break
                if how == "delete":
                    assert server.delete(f"/rollouts/{job}").json()["num_done"] == 1
    until(lambda: server.get("/rollouts").json() == [])
    over.set()
    if how == "leave":
        return
    status = {"delete": "aborted", "deadline": "error_timeout"}[how]
    assert [e["status"] for e in events[1:-1]] == ["completed", status, status]
    assert events[-1]["stopped"] == {"delete": "cancelled", "deadline": "deadline"}[how]
    assert (events[-1]["num_evaluated"], events[-1]["num_ids"]) == (1, 3)


def test_each_token_has_a_share_of_the_jobs(
    model: tuple[Model, str], server: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ludus.services.envs.rollouts.MAX_JOBS", 4)
    over = threading.Event()

    async def hang(_: Any) -> Any:
        await asyncio.to_thread(over.wait)
        return text("Action: win")

    spoken, url = model
    spoken.say = hang
    with service(OBEYS, tokens=TOKENS) as address, ExitStack() as stack:

        def post(number: int) -> tuple[int, str]:
            asks = asked(url, ids=[0], stream=True)
            options: Any = {"json": asks, "headers": bearer(number), "timeout": 60}
            answer = stack.enter_context(httpx.stream("POST", f"{address}/rollouts", **options))
            lines = answer.iter_lines()
            kept.append(lines)
            return answer.status_code, next(lines)

        kept: list[Any] = []
        assert [post(0)[0] for _ in range(2)] == [200, 200]
        status, told = post(0)
        assert (status, json.loads(told)["error"]["type"]) == (429, "too_many_rollouts")
        assert [post(1)[0] for _ in range(2)] == [200, 200]
        over.set()


def test_requests_that_are_checked_at_a_time_share_the_places(
    model: tuple[Model, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A place that another request took during the check is not given twice."""
    monkeypatch.setattr("ludus.services.envs.rollouts.MAX_JOBS", 1)
    both, over = threading.Barrier(2), threading.Event()

    def when_both_are_checked(*args: Any) -> Any:
        both.wait(timeout=60)
        return tasks_of(*args)

    async def hang(_: Any) -> Any:
        await asyncio.to_thread(over.wait)
        return text("Action: win")

    monkeypatch.setattr("ludus.services.envs.rollouts.tasks_of", when_both_are_checked)
    spoken, url = model
    spoken.say = hang
    with service(OBEYS) as address, ThreadPoolExecutor(2) as threads:

        def post() -> int:
            asks = asked(url, ids=[0], stream=True)
            with httpx.stream("POST", f"{address}/rollouts", json=asks, timeout=60) as answer:
                told.append(answer.status_code)
                if len(told) == 2:
                    over.set()
                return len(list(answer.iter_lines()))

        told: list[int] = []
        lengths = [job.result() for job in [threads.submit(post), threads.submit(post)]]
        assert sorted(told) == [200, 429]
        assert sorted(lengths) == [1, 3]
        until(lambda: httpx.get(f"{address}/rollouts").json() == [])


def test_client_that_does_not_read_its_stream_ends_its_job(model: tuple[Model, str]) -> None:
    over = threading.Event()

    async def much(body: dict[str, Any]) -> Any:
        if task_number(body) == 39:
            await asyncio.to_thread(over.wait)
        return text("Thought: " + "x" * 150_000 + "\n\nAction: win")

    spoken, url = model
    spoken.say = much
    limits = ConnectionLimits(send_s=1.0)
    with service(OBEYS, connections=limits) as address, socket.socket() as connection:
        host, _, port = address.removeprefix("http://").partition(":")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect((host, int(port)))
        body = json.dumps(asked(url, ids=list(range(40)), stream=True)).encode()
        head = "POST /rollouts HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        until(lambda: httpx.get(f"{address}/rollouts").json() != [])
        until(lambda: httpx.get(f"{address}/rollouts").json() == [])
        over.set()


@pytest.mark.parametrize(
    ("change", "status", "kind"),
    [
        ({"env": "nowhere"}, 404, "unknown_env"),
        ({"base_url": "file:///etc/passwd"}, 422, "invalid"),
        ({"base_url": "http://169.254.169.254/v1"}, 422, "invalid"),
        ({"base_url": "http://[::ffff:169.254.169.254]/v1"}, 422, "invalid"),
        ({"ids": []}, 422, "invalid"),
        ({"ids": [-1]}, 422, "invalid"),
        ({"env": "textcraft", "ids": [549]}, 422, "invalid"),
        ({"env": "textcraft", "ids": ["babyai_1"]}, 422, "invalid"),
        ({"max_round": 0}, 422, "invalid"),
        ({"max_rounds": 3}, 422, "invalid"),
    ],
)
def test_bad_requests_are_refused(
    change: dict[str, Any], status: int, kind: str, server: httpx.Client
) -> None:
    answer = server.post("/rollouts", json={**asked("http://127.0.0.1:1/v1"), **change})
    assert (answer.status_code, answer.json()["error"]["type"]) == (status, kind)


@pytest.mark.parametrize("address", ["169.254.169.254", "fe80::1", "fd00:ec2::254"])
def test_cloud_metadata_addresses_are_refused(
    address: str, server: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = socket.getaddrinfo
    asked_for = []

    def resolve(host: Any, port: Any, *rest: Any, **more: Any) -> Any:
        if host != "metadata.example":
            return own(host, port, *rest, **more)
        asked_for.append(host)
        stream = (socket.SOCK_STREAM, 6, "")
        second = (address, port, 0, 0) if ":" in address else (address, port)
        kind = socket.AF_INET6 if ":" in address else socket.AF_INET
        return [(socket.AF_INET, *stream, ("127.0.0.1", port)), (kind, *stream, second)]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    answer = server.post("/rollouts", json=asked("http://metadata.example:9/v1"))
    told = answer.json()["error"]
    assert (answer.status_code, told["type"]) == (422, "invalid")
    assert f"metadata.example is {address}" in told["message"]
    assert asked_for


def test_api_key_is_not_exposed(model: tuple[Model, str], server: httpx.Client) -> None:
    spoken, url = model
    spoken.say = lambda body: Response('{"error": "no"}', 401)
    answer = server.post("/rollouts", json=asked(url, api_key="very-secret"))
    assert [e["status"] for e in answer.json()["results"]] == ["error_sampler"] * 3
    assert "very-secret" not in answer.text


@pytest.mark.slow
def test_hanging_isolated_episode_leaves_no_process(model: tuple[Model, str]) -> None:
    spoken, url = model
    orders = {0: ["hang"], 1: ["exit"], 2: ["pid", "hang"], 3: ["pid", "win"]}
    spoken.say = lambda body: text(f"Action: {orders[task_number(body)][num_turns(body)]}")
    asks = asked(url, ids=[0, 1, 2, 3], episode_deadline_s=3.0)
    with service(OBEYS, isolate=True) as address:
        entries = httpx.post(f"{address}/rollouts", json=asks, timeout=60).json()["results"]
        statuses = ["error_timeout", "error_env", "error_timeout", "completed"]
        assert [e["status"] for e in entries] == statuses
        for entry in entries[2:]:
            pid = int(entry["conversation"][2]["content"])
            until(lambda pid=pid: not alive(pid))
