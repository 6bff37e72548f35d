"""Aggregates over two workers: `/health`, `/metrics` and the list of rollouts."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from chat_server import ChatServer, text
from prometheus_client.parser import text_string_to_metric_families
from service_world import OBEYS, Command, command, until

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/task").exists(), reason="two processes on one socket, as Linux has it"
)

TOKENS = ("a-token-of-sixteen-letters", "another-of-sixteen-letters")
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


@pytest.fixture(scope="module")
def served() -> Iterator[Command]:
    """One service for all tests, which close their sessions."""
    with command(OBEYS, "--workers", "2", env={"LUDUS_TOKENS": ",".join(TOKENS)}) as started:
        yield started


def ask(served: Command, method: str, path: str, token: int = 0, **body: Any) -> httpx.Response:
    """A request on a new connection, which any worker may accept."""
    headers = {"Authorization": f"Bearer {TOKENS[token]}"}
    asked = httpx.request(method, served.url + path, headers=headers, json=body or None, timeout=30)
    asked.raise_for_status()
    return asked


def spread(served: Command, open_one: Callable[[], str]) -> dict[str, int]:
    """Opened ids by worker: at least six, and some in both workers."""
    found: dict[str, int] = {}
    while len(found) < 6 or len(set(found.values())) < 2:
        id = open_one()
        found[id] = int(id, 16) % 2
    return found


def close(served: Command, ids: Iterable[str]) -> None:
    for id in ids:
        ask(served, "DELETE", f"/sessions/{id}")


def samples(answer: httpx.Response) -> Samples:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for metric in text_string_to_metric_families(answer.text)
        for sample in metric.samples
    }


def total(found: Samples, name: str, **labels: str) -> float:
    """The sum of the samples with these labels."""
    return sum(
        value
        for (n, has), value in found.items()
        if n == name and labels.items() <= dict(has).items()
    )


def is_whole(answer: httpx.Response) -> bool:
    """True if both workers answered in time; on a busy machine they may not."""
    if answer.url.path == "/health":
        return not answer.json()["silent_workers"]
    if answer.url.path == "/metrics":
        return total(samples(answer), "ludus_worker_up") == 2
    return "x-ludus-silent-workers" not in answer.headers


def whole(served: Command, path: str, token: int = 0) -> httpx.Response:
    """An answer that covers both workers."""
    answers: list[httpx.Response] = []

    def asked() -> bool:
        answers.append(ask(served, "GET", path, token))
        return is_whole(answers[-1])

    until(asked)
    return answers[-1]


def test_health_and_metrics_cover_all_workers(served: Command) -> None:
    def opened() -> str:
        id = str(ask(served, "POST", "/sessions", env=OBEYS).json()["session"])
        ask(served, "POST", f"/sessions/{id}/reset", seed=0)
        return id

    first = samples(whole(served, "/metrics"))
    ids = spread(served, opened)
    for _ in range(8):
        told = whole(served, "/health").json()
        assert (told["status"], told["workers"], told["sessions"]) == ("ok", 2, len(ids)), told
        found = samples(whole(served, "/metrics"))
        for worker in (0, 1):
            mine = sum(owner == worker for owner in ids.values())
            assert total(found, "ludus_env_sessions", worker=str(worker)) == mine
            assert total(found, "ludus_worker_up", worker=str(worker)) == 1
        for route in ("/sessions", "/sessions/{session}/reset"):  # once each, handed over or not
            earlier = total(first, "ludus_http_seconds_count", route=route)
            assert total(found, "ludus_http_seconds_count", route=route) == earlier + len(ids)
        assert total(found, "ludus_http_seconds_count", route="none") == 0
    calls = [{"op": "step", "session": id, "action": "win"} for id in ids]
    ask(served, "POST", "/batch", calls=calls)
    headers = {"x-ludus-handed-over": "1"}  # as if a worker had sent it: it counts all the same
    httpx.get(served.url + "/health", headers=headers).raise_for_status()  # and needs no token
    before = total(found, "ludus_http_seconds_count", route="/health")
    found = samples(whole(served, "/metrics"))
    assert total(found, "ludus_http_seconds_count", route="/batch") == 1  # no other test has one
    assert total(found, "ludus_http_seconds_count", route="/health") == before + 1
    steps = total(first, "ludus_env_call_seconds_count", call="step") + len(ids)
    assert total(found, "ludus_env_call_seconds_count", call="step") == steps
    assert httpx.get(served.url + "/metrics").status_code == 401
    close(served, ids)


@pytest.mark.slow
def test_silent_worker_does_not_block_health_and_metrics(served: Command) -> None:
    ids = spread(served, lambda: str(ask(served, "POST", "/sessions", env=OBEYS).json()["session"]))
    before = samples(whole(served, "/metrics"))
    with frozen(served, ids) as worker:
        told = httpx.get(served.url + "/health", timeout=30).json()
        other = sum(owner != worker for owner in ids.values())
        assert (told["status"], told["sessions"]) == ("ok", other)
        assert told["silent_workers"] == [worker]
        during = samples(ask(served, "GET", "/metrics"))
        assert total(during, "ludus_worker_up", worker=str(worker)) == 0
        listed = ask(served, "GET", "/rollouts")
        assert (listed.json(), listed.headers["x-ludus-silent-workers"]) == ([], str(worker))
    after = samples(whole(served, "/metrics"))
    for earlier, later in ((before, during), (during, after), (before, after)):
        fallen = [
            key
            for key, value in earlier.items()
            if key[0].endswith(("_total", "_count", "_bucket")) and later.get(key, value) < value
        ]
        assert not fallen  # a silent worker's series are absent; none jumps
    assert {key for key in before if "worker" in dict(key[1])} <= after.keys()
    close(served, ids)


@contextmanager
def frozen(served: Command, ids: dict[str, int]) -> Iterator[int]:
    """Stop one worker; yields its number."""
    id, worker = next(iter(ids.items()))
    ask(served, "POST", f"/sessions/{id}/reset", seed=0)
    said = ask(served, "POST", f"/sessions/{id}/step", action="pid").json()
    pid = int(said["messages"][0]["content"])
    os.kill(pid, signal.SIGSTOP)
    try:
        yield worker
    finally:
        os.kill(pid, signal.SIGCONT)


def test_rollout_list_covers_all_workers(served: Command) -> None:
    over = threading.Event()

    async def say(_: dict[str, Any]) -> Any:
        while not over.is_set():
            await asyncio.sleep(0.01)
        return text("Action: win")

    def listed(token: int = 0) -> list[str]:
        return [each["job"] for each in whole(served, "/rollouts", token).json()]

    def play(url: str, jobs: list[str]) -> None:
        headers = {"Authorization": f"Bearer {TOKENS[0]}"}
        body = {"env": OBEYS, "model": "m", "base_url": url, "ids": [0], "stream": True}
        with httpx.stream(
            "POST", served.url + "/rollouts", headers=headers, json=body, timeout=60
        ) as answer:
            for line in answer.iter_lines():
                told = json.loads(line)
                if told["event"] == "start":
                    jobs.append(told["job"])

    jobs: list[str] = []
    with ChatServer(say) as model, ThreadPoolExecutor(32) as pool:

        def start() -> str:
            known = len(jobs)
            pool.submit(play, model.url, jobs)
            until(lambda: len(jobs) > known)
            return jobs[-1]

        try:
            started = spread(served, start)
            for _ in range(8):
                assert sorted(listed()) == sorted(started)
                assert listed(1) == []  # another's are none
            for job in started:
                ask(served, "DELETE", f"/rollouts/{job}")
            until(lambda: listed() == [])
        finally:
            over.set()
