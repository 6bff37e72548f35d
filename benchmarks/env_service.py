"""Overhead of the environment service: steps per second and core, in process, HTTP, WebSocket.

    python benchmarks/env_service.py                      # all environments, and 2,000 sessions
    python benchmarks/env_service.py textcraft --soak 0   # one environment

All three play the same episodes: an environment's seeds with its expert's actions, computed first.
The service is `ludus serve env` in its own process; the client plays `sessions` episodes at once.
Two clocks: wall time of each step at the client, and processor time of service and client, which is
independent of other load on the machine.
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
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx
from common import machine, processor_seconds, tabulate, write
from websockets.asyncio.client import connect

from ludus.core.types import Message, Task
from ludus.envs import ENVS
from ludus.envs.base import NoExpert

SESSIONS = (1, 64, 512)
ALL = ("babyai", "textcraft", "webshop", "alfworld")
ALL += ("scienceworld", "textworldexpress", "reasoning")
WAYS = {"in_process": "in process", "http": "HTTP", "websocket": "WebSocket"}
MOST = {"textworldexpress": 256, "scienceworld": 256}
"""Sessions that an environment has room for: those of its JVMs."""

NUM_EPISODES = 24
"""Different ones, played again and again: fewer than ALFWorld remembers translations of."""

Episode = tuple[Task, list[str]]


@dataclass(frozen=True)
class Row:
    """One line: latencies of a step in ms, steps a second of the wall, processor's time in ms.

    `reset_p50_ms` is that of a reset; the rest of the wall's and processor's time includes resets.
    `around_ms` is a step's mean time less its mean time in the service's environment.
    """

    env: str
    way: str
    sessions: int
    num_steps: int
    p50_ms: float
    p99_ms: float
    around_ms: float | None
    reset_p50_ms: float
    steps_per_s: float
    service_cpu_ms: float
    memory_mb: float


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
    command += ["--step-deadline", "600"]  # hundreds of slow worlds wait for each other
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


def env_seconds_of(url: str, env: str) -> tuple[float, float]:
    """Seconds that the service's environment has stepped so far, and its steps, by `/metrics`."""
    text = httpx.get(url + "/metrics").text
    name = rf'ludus_env_call_seconds_{{}}{{{{call="step",env="{env}"}}}} (\S+)'
    found = [re.search(name.format(what), text) for what in ("sum", "count")]
    total, num = (float(match[1]) if match else 0.0 for match in found)
    return total, num


def memory_of(pid: int) -> float:
    """Resident memory of a process, in MB."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


Reset = Callable[[Task], Awaitable[Any]]
Step = Callable[[str], Awaitable[Any]]


@dataclass
class Times:
    """Seconds of each reset and step, and of the whole."""

    resets: list[float] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)
    wall: float = 0.0


async def play(opened: list[tuple[Reset, Step]], episodes: list[Episode], seconds: float) -> Times:
    """Play in all sessions at once for so long, and in each until it has taken two steps."""
    times = Times()

    async def timed(call: Awaitable[Any], kept: list[float]) -> None:
        began = time.perf_counter()
        await call
        kept.append(time.perf_counter() - began)

    async def seat(number: int, reset: Reset, step: Step) -> None:
        turn, taken = number, 0
        while taken < 2 or time.perf_counter() < ends:
            task, actions = episodes[turn % len(episodes)]
            turn += 1
            await timed(reset(task), times.resets)
            for action in actions:
                if taken >= 2 and time.perf_counter() >= ends:
                    break
                await timed(step(action), times.steps)
                taken += 1

    began = time.perf_counter()
    ends = began + seconds
    await asyncio.gather(*(seat(n, *given) for n, given in enumerate(opened)))
    times.wall = time.perf_counter() - began
    return times


async def measured(
    env: str, way: str, sessions: int, seconds: float, url: str, pid: int, episodes: list[Episode]
) -> Row:
    inside = way == "in_process"
    async with Ways(url, env) as ways:
        opened = [await getattr(ways, way)() for _ in range(sessions)]
        stepped = env_seconds_of(url, env)
        before, own = processor_seconds(pid), time.process_time()
        times = await play(opened, episodes, seconds)
        cpu = time.process_time() - own if inside else processor_seconds(pid) - before
        memory = memory_of(os.getpid() if inside else pid)
        total, num = (
            now - then for now, then in zip(env_seconds_of(url, env), stepped, strict=True)
        )
    percentiles = statistics.quantiles(times.steps, n=100)
    return Row(
        env=env,
        way=way,
        sessions=sessions,
        num_steps=len(times.steps),
        p50_ms=1000 * percentiles[49],
        p99_ms=1000 * percentiles[98],
        around_ms=None if inside else 1000 * (statistics.mean(times.steps) - total / num),
        reset_p50_ms=1000 * statistics.median(times.resets),
        steps_per_s=len(times.steps) / times.wall,
        service_cpu_ms=1000 * cpu / len(times.steps),
        memory_mb=memory,
    )


class LeanClient:
    """HTTP/1.1 over one kept connection, and no more: what is measured is the service.

    `httpx` would add 0.4 ms of its own to each call, and with many sessions be the bottleneck.
    """

    def __init__(self, url: str) -> None:
        self._host, _, port = url.removeprefix("http://").partition(":")
        self._port = int(port)
        self._lock = asyncio.Lock()
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def call(self, method: str, path: str, body: Any = None) -> Any:
        sent = json.dumps(body).encode() if body is not None else b""
        head = f"{method} {path} HTTP/1.1\r\nHost: {self._host}\r\nContent-Type: application/json"
        async with self._lock:
            if self._streams is None:
                self._streams = await asyncio.open_connection(self._host, self._port)
            reader, writer = self._streams
            writer.write(f"{head}\r\nContent-Length: {len(sent)}\r\n\r\n".encode() + sent)
            told = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            length = int(told.partition("content-length:")[2].partition("\r\n")[0])
            answer = await reader.readexactly(length)
        if not told.startswith("http/1.1 2"):
            raise RuntimeError(f"{path}: {told.splitlines()[0]}: {answer.decode()}")
        return json.loads(answer)

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()


class Ways:
    """The ways to an environment; each opens a session and gives its reset and step."""

    def __init__(self, url: str, env: str) -> None:
        self._url, self._env = url, env
        self._closing: list[Callable[[], Awaitable[Any]]] = []

    async def __aenter__(self) -> Ways:
        return self

    async def __aexit__(self, *_: object) -> None:
        for close in self._closing:
            await close()

    async def in_process(self) -> tuple[Reset, Step]:
        env: Any = ENVS.build(self._env)
        self._closing.append(env.close)

        async def step(action: str) -> None:
            await env.step(Message(role="assistant", content=action))

        return env.reset, step

    async def http(self) -> tuple[Reset, Step]:
        client = LeanClient(self._url)
        made = await client.call("POST", "/sessions", {"env": self._env})
        path = f"/sessions/{made['session']}"

        async def reset(task: Task) -> None:
            await client.call("POST", f"{path}/reset", {"task": task.model_dump(mode="json")})

        async def step(action: str) -> None:
            await client.call("POST", f"{path}/step", {"action": action})

        async def close() -> None:
            await client.call("DELETE", path)
            client.close()

        self._closing.append(close)
        return reset, step

    async def websocket(self) -> tuple[Reset, Step]:
        url = self._url.replace("http", "ws") + "/ws"
        socket = await connect(url, compression=None, ping_interval=None, proxy=None)
        self._closing.append(socket.close)

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


async def warm_up(url: str, env: str, episodes: list[Episode], seconds: float) -> None:
    """Play for `seconds` in process and in the service, in one session per JVM.

    Afterwards code is compiled and caches are filled: Java's steps are twice as fast.
    """
    for way in ("in_process", "websocket"):
        async with Ways(url, env) as ways:
            await play([await getattr(ways, way)() for _ in range(4)], episodes, seconds)


async def all_rows(
    envs: Sequence[str], sizes: Sequence[int], seconds: float, repeats: int
) -> list[Row]:
    """All rows; the ways alternate, and the repeat of the median p50 counts."""
    rows: list[Row] = []
    for env in envs:
        episodes = await episodes_of(env, NUM_EPISODES)
        with service(env) as (url, pid):
            await warm_up(url, env, episodes, 10 * seconds)
            for sessions in sorted({min(size, MOST.get(env, size)) for size in sizes}):
                found: dict[str, list[Row]] = {}
                for _ in range(repeats):
                    for way in WAYS:
                        row = await measured(env, way, sessions, seconds, url, pid, episodes)
                        found.setdefault(way, []).append(row)
                for way in found:
                    ordered = sorted(found[way], key=lambda row: row.p50_ms)
                    rows.append(ordered[len(ordered) // 2])
                    print(rows[-1], file=sys.stderr, flush=True)
    return rows


def ms(value: float, sign: str = "") -> str:
    """Three digits of it, at least."""
    return f"{value:{sign},.0f} ms" if abs(value) >= 1000 else f"{value:{sign}.3g} ms"


def shown(rows: list[Row]) -> str:
    inside = {row.sessions: row.p50_ms for row in rows if row.way == "in_process"}

    def over(row: Row) -> str:
        return "" if row.way == "in_process" else ms(row.p50_ms - inside[row.sessions], "+")

    return tabulate(
        rows,
        ("sessions", lambda row: str(row.sessions)),
        ("way", lambda row: WAYS[row.way]),
        ("step p50", lambda row: ms(row.p50_ms)),
        ("p99", lambda row: ms(row.p99_ms)),
        ("over in process", over),
        ("around the environment", lambda r: "" if r.around_ms is None else ms(r.around_ms, "+")),
        ("reset p50", lambda row: ms(row.reset_p50_ms)),
        ("steps/s", lambda row: f"{row.steps_per_s:,.0f}"),
        ("processor per step", lambda row: ms(row.service_cpu_ms)),
        ("memory", lambda row: f"{row.memory_mb:,.0f} MB"),
    )


PAGE = """# The environment service

`benchmarks/env_service.py` runs `ludus serve env` in its own process with one worker. A client in
another process plays the expert's episodes ({num} different episodes per environment) in 1, 64 and
512 sessions at once, without a pause between calls.

- *step p50*, *p99*: latency at the client. With many sessions, calls mostly wait for the worker.
- *over in process*: difference to the same environment without a service.
- *around the environment*: mean step time minus the mean time of the service's environment in
  `/metrics`.
- *steps/s*: per second of wall time, resets included.
- *processor per step*: processor time of the service per step, resets included.
- *memory*: of the process that holds the environments (in process: the client), without Java.

The HTTP client only writes and reads sockets; `httpx` would add about 0.4 ms to a call. Each cell
is one of {repeats} runs of {seconds:g} s, the run of the median p50; in process, HTTP and WebSocket
alternate."""
SOAK = """## 2,000 open sessions

TextCraft in one worker, played in turn by batches of 500 calls, without a pause.

"""


def report(rows: list[Row], lines: list[dict[str, float]], repeats: int, seconds: float) -> str:
    parts = [PAGE.format(num=NUM_EPISODES, repeats=repeats, seconds=seconds)]
    for env in dict.fromkeys(row.env for row in rows):
        parts.append(f"## {env}\n\n" + shown([row for row in rows if row.env == env]))
    if lines:
        soak_table = tabulate(
            lines,
            ("seconds", lambda line: f"{line['seconds']:,.0f}"),
            ("calls", lambda line: f"{line['calls']:,.0f}"),
            ("refused or failed", lambda line: f"{line['lost']:,.0f}"),
            ("sessions open", lambda line: f"{line['open']:,.0f}"),
            ("service's memory in MB", lambda line: f"{line['memory_mb']:,.0f}"),
        )
        parts.append(SOAK + soak_table)
    return "\n\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("envs", nargs="*", default=ALL)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each cell")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--soak", type=float, default=300.0, help="seconds; 0: none")
    parser.add_argument("--quick", action="store_true", help="a moment of each, nothing written")
    given = parser.parse_args()
    sizes: Sequence[int] = SESSIONS
    if given.quick:
        sizes, given.seconds, given.repeats, given.soak = (1, 4), 0.2, 1, min(given.soak, 1.0)
    facts = machine(1)
    rows = asyncio.run(all_rows(given.envs, sizes, given.seconds, given.repeats))
    lines = asyncio.run(soak(given.soak)) if given.soak else []
    text = report(rows, lines, given.repeats, given.seconds)
    if given.quick:
        print(text)
        return
    facts |= {"clock": "wall", "use": "all of them in use"}
    write("env-service", text, facts, [asdict(row) for row in rows] + [{"soak": lines}])


if __name__ == "__main__":
    main()
