"""What a service costs: steps a second and a core, in process, over HTTP and over WebSocket.

    python benchmarks/env_service.py textcraft babyai            # the table
    python benchmarks/env_service.py --soak 120                  # 2,000 sessions, memory over time

Every way plays the same episodes (those of an environment's seeds, with its expert's actions, which
are found beforehand). The service is `ludus serve env` in a process of its own; the client plays
`sessions` of them at once. Time is of two kinds: the wall's, of each step as its client sees it,
and the processor's, of service and client, which other load on the machine does not touch.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
from websockets.asyncio.client import connect

from ludus.core.types import Message, Task
from ludus.envs import ENVS
from ludus.envs.base import NoExpert

SESSIONS = (1, 64, 512)
Episode = tuple[Task, list[str]]


@dataclass(frozen=True)
class Row:
    """One line: latencies in ms, steps a second of one core's time."""

    env: str
    way: str
    sessions: int
    num_steps: int
    p50_ms: float
    p99_ms: float
    steps_per_s: float
    steps_per_core_s: float


async def episodes_of(name: str, num: int) -> list[Episode]:
    """Tasks of an environment, and what its expert does in them."""
    env: Any = ENVS.build(name)
    found: list[Episode] = []
    for seed in range(10 * num):
        task = type(env).task(None, seed)
        actions: list[str] = []
        await env.reset(task)
        try:
            while len(actions) < 50:
                actions.append(env.expert_action())
                if (await env.step(Message(role="assistant", content=actions[-1]))).done:
                    break
        except NoExpert:
            continue
        found.append((task, actions))
        if len(found) == num:
            break
    await env.close()
    return found


@contextmanager
def service(*words: str) -> Iterator[tuple[str, int]]:
    """`ludus serve env`: its address and process id."""
    command = [sys.executable, "-m", "ludus", "serve", "env", *words, "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    found = re.search(r"http://[\d.]+:\d+", process.stdout.readline())
    assert found is not None
    try:
        for _ in range(500):
            try:
                httpx.get(found[0] + "/health")
                break
            except httpx.HTTPError:
                time.sleep(0.02)
        yield found[0], process.pid
    finally:
        process.terminate()
        process.wait(60)
        process.stdout.close()


def cpu_of(pid: int | None) -> float:
    """Processor seconds of a process so far."""
    if pid is None:
        return 0.0
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def memory_of(pid: int) -> float:
    """Resident memory of a process, in MB."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


Step = Callable[[str], Awaitable[Any]]
Open = Callable[[], Awaitable[tuple[Callable[[Task], Awaitable[Any]], Step]]]


async def play(
    opened: Open, episodes: list[Episode], sessions: int, num_steps: int
) -> tuple[list[float], float]:
    """Play in so many sessions until that many steps were taken: their times, and the wall's."""
    times: list[float] = []

    async def seat(number: int, reset: Callable[[Task], Awaitable[Any]], step: Step) -> None:
        turn = number
        while len(times) < num_steps:
            task, actions = episodes[turn % len(episodes)]
            turn += 1
            await reset(task)
            for action in actions:
                began = time.perf_counter()
                await step(action)
                times.append(time.perf_counter() - began)

    seats = [await opened() for _ in range(sessions)]
    began = time.perf_counter()
    await asyncio.gather(*(seat(n, *given) for n, given in enumerate(seats)))
    return times, time.perf_counter() - began


async def measured(
    env: str, way: str, sessions: int, num_steps: int, url: str, pid: int, episodes: list[Episode]
) -> Row:
    """One row."""
    async with Ways(url, env, sessions) as ways:
        await play(getattr(ways, way), episodes, sessions, min(num_steps, 4 * sessions))
        served = None if way == "in_process" else pid
        before, own = cpu_of(served), time.process_time()
        times, wall = await play(getattr(ways, way), episodes, sessions, num_steps)
        cpu = cpu_of(served) - before + (time.process_time() - own if served is None else 0.0)
    percentiles = statistics.quantiles(times, n=100)
    return Row(
        env=env,
        way=way,
        sessions=sessions,
        num_steps=len(times),
        p50_ms=1000 * percentiles[49],
        p99_ms=1000 * percentiles[98],
        steps_per_s=len(times) / wall,
        steps_per_core_s=len(times) / max(cpu, 0.01),
    )


class Ways:
    """The ways to an environment; each opens a session and gives its reset and step."""

    def __init__(self, url: str, env: str, sessions: int) -> None:
        self._url, self._env = url, env
        limits = httpx.Limits(max_connections=min(sessions, 64), max_keepalive_connections=64)
        self._http = httpx.AsyncClient(base_url=url, limits=limits, timeout=60)
        self._sockets: list[Any] = []

    async def __aenter__(self) -> Ways:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()
        for socket in self._sockets:
            await socket.close()

    async def in_process(self) -> Any:
        env: Any = ENVS.build(self._env)

        async def step(action: str) -> None:
            await env.step(Message(role="assistant", content=action))

        return env.reset, step

    async def http(self) -> Any:
        made = await self._http.post("/sessions", json={"env": self._env})
        path = f"/sessions/{made.json()['session']}"

        async def reset(task: Task) -> None:
            body = {"task": task.model_dump(mode="json")}
            (await self._http.post(f"{path}/reset", json=body)).raise_for_status()

        async def step(action: str) -> None:
            answer = await self._http.post(f"{path}/step", json={"action": action})
            answer.raise_for_status()
            answer.json()

        return reset, step

    async def websocket(self) -> Any:
        socket = await connect(
            self._url.replace("http", "ws") + "/ws",
            compression=None,
            ping_interval=None,
            proxy=None,
        )
        self._sockets.append(socket)

        async def call(**given: Any) -> Any:
            await socket.send(json.dumps(given))
            told = json.loads(await socket.recv())
            assert told["status"] == 200, told
            return told["result"]

        id = (await call(op="create", env=self._env))["session"]

        async def reset(task: Task) -> None:
            await call(op="reset", session=id, task=task.model_dump(mode="json"))

        async def step(action: str) -> None:
            await call(op="step", session=id, action=action)

        return reset, step


async def soak(seconds: float, num: int = 2000, env: str = "textcraft") -> list[dict[str, float]]:
    """Many open sessions, played in turn for a while: the service's memory, and those lost."""
    episodes = await episodes_of(env, 64)
    lines: list[dict[str, float]] = []
    with service(env) as (url, pid):
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            calls = [{"op": "create", "env": env}] * 500
            ids: list[str] = []
            while len(ids) < num:
                told = (await client.post("/batch", json={"calls": calls})).json()["results"]
                ids += [entry["result"]["session"] for entry in told]
            began, turn, steps, lost = time.monotonic(), 0, 0, 0
            while time.monotonic() - began < seconds:
                task, actions = episodes[turn % len(episodes)]
                turn += 1
                plan: list[dict[str, Any]] = [{"op": "reset", "task": task.model_dump(mode="json")}]
                plan += [{"op": "step", "action": action} for action in actions]
                for call in plan:
                    for first in range(0, num, 500):
                        some = [{**call, "session": id} for id in ids[first : first + 500]]
                        told = await client.post("/batch", json={"calls": some})
                        statuses = [entry["status"] for entry in told.json()["results"]]
                        lost += sum(status != 200 for status in statuses)
                        steps += len(statuses)
                elapsed = time.monotonic() - began
                if not lines or elapsed - lines[-1]["seconds"] > seconds / 10:
                    open_now = (await client.get("/health")).json()["sessions"]
                    line = {"seconds": elapsed, "calls": steps, "lost": lost, "open": open_now}
                    lines.append({**line, "memory_mb": memory_of(pid)})
    return lines


async def table(envs: list[str], num_steps: int, repeats: int) -> list[Row]:
    """All rows; the ways alternate, and the median of the repeats counts."""
    rows: list[Row] = []
    for env in envs:
        episodes = await episodes_of(env, 64)
        with service(env) as (url, pid):
            for sessions in SESSIONS:
                found: dict[str, list[Row]] = {}
                for _ in range(repeats):
                    for way in ("in_process", "http", "websocket"):
                        row = await measured(env, way, sessions, num_steps, url, pid, episodes)
                        found.setdefault(way, []).append(row)
                for way in found:
                    ordered = sorted(found[way], key=lambda row: row.p50_ms)
                    rows.append(ordered[len(ordered) // 2])
                    print(rows[-1], file=sys.stderr)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("envs", nargs="*", default=["textcraft", "babyai"])
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--soak", type=float, default=0.0, help="Seconds; instead of the table.")
    parser.add_argument("--out", type=Path, default=None)
    given = parser.parse_args()
    found: Any
    if given.soak:
        found = asyncio.run(soak(given.soak))
    else:
        found = [asdict(r) for r in asyncio.run(table(given.envs, given.steps, given.repeats))]
    text = json.dumps(found, indent=1)
    print(text)
    if given.out is not None:
        given.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
