"""Added time of a call of an agent: in process, and over HTTP through the gateway.

    python benchmarks/gateway.py           # all ways; 1, 64 and 512 sessions
    python benchmarks/gateway.py --quick   # one small case, nothing written

The sampler returns a recorded turn, at once or after a while. Added is what the agent waits for a
call less what the sampler takes for it. HTTP clients are a process of their own, as agents are.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

import httpx
import openai
from common import machine, tabulate, write
from env_service import LeanClient, ms

from ludus.config.schema import RolloutConfig
from ludus.core.types import Message, Spec, ToolCall, ToolSpec, Trajectory
from ludus.models.chat.renderer import Renderer
from ludus.models.chat.tokenizers import train_tokenizer
from ludus.models.samplers.base import Completion, SamplingParams
from ludus.rollout.hosts.threads import EnvThread
from ludus.rollout.sessions.agent_session import AgentSession
from ludus.rollout.sessions.call_options import AgentRenderers
from ludus.rollout.workflow import Model
from ludus.services.gateway.gateway import HttpGateway

SESSIONS = (1, 64, 512)
TURNS = 8
WAYS = {
    "chat": "`model.chat`",
    "own_openai": "`model.openai()`, no socket",
    "bare": "HTTP, bare sockets",
    "httpx": "HTTP, `httpx`",
    "openai": "HTTP, `openai`",
}
OUTSIDE = ("bare", "httpx", "openai")

TEXT = "the agent reads a page and says which words of it are red or blue . "
TOOLS = [
    ToolSpec(
        name=name,
        description=TEXT,
        parameters={
            "type": "object",
            "properties": {"word": {"type": "string"}},
            "required": ["word"],
        },
    )
    for name in ("say", "read", "search")
]
OFFERED = [{"type": "function", "function": tool.model_dump()} for tool in TOOLS]
OPENING = [
    {"role": "system", "content": TEXT * 15},
    {"role": "user", "content": TEXT * 5},
]


def next_messages(message: dict[str, Any]) -> list[dict[str, Any]]:
    """The turn, and what the agent sends after it."""
    (call,) = message["tool_calls"]
    result = {"role": "tool", "tool_call_id": call["id"], "content": TEXT * 3}
    return [{"role": "assistant", "content": message["content"], "tool_calls": [call]}, result]


class Recorded:
    """A sampler that returns the same turn after about `seconds`, and records what it took."""

    context_length = 100_000

    def __init__(self, completion: Completion, seconds: float) -> None:
        self._completion, self._seconds = completion, seconds
        self.took: dict[str, list[float]] = {}

    def open(self, session: str) -> None:
        self.took.setdefault(session, [])

    def close(self, session: str) -> None:
        pass

    async def sample(self, ids: list[int], params: SamplingParams, *, session: str) -> Completion:
        began = time.perf_counter()
        if self._seconds:
            await asyncio.sleep(self._seconds * random.uniform(0.5, 1.5))
        self.took[session].append(time.perf_counter() - began)
        return self._completion


class World:
    """Sessions of one sampler behind a gateway."""

    def __init__(self, seconds: float, gateway: HttpGateway) -> None:
        tokenizer = train_tokenizer(Spec(name="words"), [TEXT], "plain", TOOLS)
        renderer = Renderer(tokenizer)
        turn = Message(
            role="assistant",
            content=TEXT * 3,
            tool_calls=[ToolCall(name="say", arguments={"word": "red"})],
        )
        ids = renderer.with_tools(TOOLS).assistant(turn)
        completion = Completion(ids, [-0.5] * len(ids), "stop", policy_version=1)
        self.sampler = Recorded(completion, seconds)
        self._renderers, self._gateway = AgentRenderers(renderer), gateway
        self.sessions: list[AgentSession] = []

    def session(self) -> AgentSession:
        session = AgentSession(
            Trajectory(f"e{len(self.sessions)}", "g", "t"),
            self.sampler,
            self._renderers,
            RolloutConfig(max_tokens_per_turn=4096),
            seed=0,
            gateway=self._gateway,
        )
        session.start()
        self.sessions.append(session)
        return session


Call = Callable[[list[dict[str, Any]]], Awaitable[dict[str, Any]]]


async def episode(call: Call) -> list[float]:
    """Play an episode; returns the seconds of its calls."""
    messages, seconds = list(OPENING), []
    for _ in range(TURNS):
        began = time.perf_counter()
        message = await call(messages)
        seconds.append(time.perf_counter() - began)
        messages += next_messages(message)
    return seconds


async def inside(way: str, sessions: list[list[AgentSession]]) -> list[list[list[float]]]:
    """Seconds by seat and episode; each seat's agent is in a thread of its own, as in a run."""

    def chat_of(model: Model) -> Call:
        async def call(messages: list[dict[str, Any]]) -> dict[str, Any]:
            said = await model.chat(messages, TOOLS)
            calls = [
                {
                    "id": c.id,
                    "type": "function",
                    "function": {"name": c.name, "arguments": json.dumps(c.arguments)},
                }
                for c in said.tool_calls
            ]
            return {"content": said.content, "tool_calls": calls}

        return call

    async def seat(own: list[AgentSession]) -> list[list[float]]:
        async def act() -> list[list[float]]:
            found = []
            for session in own:
                model = Model(session)
                call = chat_of(model) if way == "chat" else openai_call(model.openai())
                found.append(await episode(call))
                await model.close()
            return found

        thread = EnvThread()
        try:
            return await thread.run(act, None, blocking=True)
        finally:
            thread.close()

    return await asyncio.gather(*(seat(own) for own in sessions))


def openai_call(client: openai.AsyncOpenAI) -> Call:
    async def call(messages: list[dict[str, Any]]) -> dict[str, Any]:
        given: Any = {"messages": messages, "tools": OFFERED}
        reply = await client.chat.completions.create(model="policy", **given)
        return reply.choices[0].message.model_dump()

    return call


async def outside(way: str, url: str, keys: list[list[str]]) -> list[list[list[float]]]:
    """As `inside`, over HTTP; a connection for each seat."""

    async def seat(own: list[str]) -> list[list[float]]:
        found = []
        lean = LeanClient(url)
        async with httpx.AsyncClient(timeout=600, verify=False, trust_env=False) as client:
            for key in own:
                found.append(await episode(call_of(client, lean, key)))
        lean.close()
        return found

    def call_of(client: httpx.AsyncClient, lean: LeanClient, key: str) -> Call:
        if way == "openai":
            own = openai.AsyncOpenAI(
                base_url=f"{url}/v1", api_key=key, http_client=client, max_retries=0
            )
            return openai_call(own)

        async def call(messages: list[dict[str, Any]]) -> dict[str, Any]:
            body = {"model": "policy", "messages": messages, "tools": OFFERED}
            path = f"/s/{key}/v1/chat/completions"
            if way == "bare":
                answer = await lean.call("POST", path, body)
            else:
                answer = (await client.post(url + path, json=body)).json()
            message: dict[str, Any] = answer["choices"][0]["message"]
            return message

        return call

    return await asyncio.gather(*(seat(own) for own in keys))


class Client:
    """`outside`, in a process of its own."""

    async def __aenter__(self) -> Client:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            __file__,
            "--client",
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            limit=2**26,
        )
        await self._read()
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        await self._process.wait()

    async def play(self, way: str, url: str, keys: list[list[str]]) -> list[list[list[float]]]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([way, url, keys]).encode() + b"\n")
        found: list[list[list[float]]] = await self._read()
        return found

    async def _read(self) -> Any:
        assert self._process.stdout is not None
        return json.loads(await self._process.stdout.readline())


def serve_as_client() -> None:
    """Play what standard input asks for, until it ends."""
    print("[]", flush=True)
    for line in sys.stdin:
        print(json.dumps(asyncio.run(outside(*json.loads(line)))), flush=True)


async def fixed(client: Client, way: str, episodes: int) -> float:
    """Median seconds of a client's call to a server that answers a fixed body: its own time."""
    call = {"name": "say", "arguments": '{"word": "red"}'}
    message = {
        "role": "assistant",
        "content": TEXT * 3,
        "tool_calls": [{"id": "call_1_0", "type": "function", "function": call}],
    }
    choice = {"index": 0, "message": message, "finish_reason": "tool_calls"}
    frame = {"id": "x", "object": "chat.completion", "created": 0, "model": "policy"}
    body = json.dumps({**frame, "choices": [choice]}).encode()
    head = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
    answer = head.encode() + b"\r\n\r\n" + body

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                asked = (await reader.readuntil(b"\r\n\r\n")).lower()
                length = asked.partition(b"content-length:")[2].partition(b"\r\n")[0]
                await reader.readexactly(int(length))
                writer.write(answer)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        found = await client.play(way, f"http://127.0.0.1:{port}", [["key"] * episodes])
    return statistics.median(seconds for one in found[0] for seconds in one)


@dataclass(frozen=True)
class Row:
    """One line: added time in ms, calls a second of the wall, processor's time of the run's process
    for a call in ms. `own_p50_ms` is the client's own time, with a server of a fixed answer."""

    way: str
    sessions: int
    sampler_s: float
    num_calls: int
    p50_ms: float
    p99_ms: float
    own_p50_ms: float | None
    calls_per_s: float
    cpu_ms: float
    lost: int


async def measured(client: Client, way: str, seats: int, episodes: int, sampler_s: float) -> Row:
    gc.unfreeze()
    gc.collect()
    gc.freeze()  # as a run does: its libraries and model are no work for the garbage collector
    gateway = HttpGateway()
    world = World(sampler_s, gateway)
    sessions = [[world.session() for _ in range(episodes)] for _ in range(seats)]
    began, cpu = time.perf_counter(), time.process_time()
    if way in OUTSIDE:
        keys = [[s.address.api_key for s in own if s.address] for own in sessions]
        address = sessions[0][0].address
        assert address is not None
        seconds = await client.play(way, address.base_url.partition("/s/")[0], keys)
    else:
        seconds = await inside(way, sessions)
    cpu, wall = time.process_time() - cpu, time.perf_counter() - began
    added, lost = [], 0
    for own_sessions, of_seat in zip(sessions, seconds, strict=True):
        for session, waited in zip(own_sessions, of_seat, strict=True):
            took = world.sampler.took[session.trajectory.id]
            lost += session.trajectory.num_turns != TURNS
            added += [w - t for w, t in zip(waited, took, strict=True)]
            session.close()
    gateway.close()
    alone = way in OUTSIDE and seats == 1
    own = 1000 * await fixed(client, way, episodes) if alone else None
    percentiles = statistics.quantiles(added, n=100)
    return Row(
        way=way,
        sessions=seats,
        sampler_s=sampler_s,
        num_calls=len(added),
        p50_ms=1000 * percentiles[49],
        p99_ms=1000 * percentiles[98],
        own_p50_ms=own,
        calls_per_s=len(added) / wall,
        cpu_ms=1000 * cpu / len(added),
        lost=lost,
    )


def shown(rows: list[Row]) -> str:
    return tabulate(
        rows,
        ("sessions", lambda row: str(row.sessions)),
        ("way", lambda row: WAYS[row.way]),
        ("added p50", lambda row: ms(row.p50_ms)),
        ("p99", lambda row: ms(row.p99_ms)),
        ("of it the client", lambda r: "" if r.own_p50_ms is None else ms(r.own_p50_ms)),
        ("calls/s", lambda row: f"{row.calls_per_s:,.0f}"),
        ("processor per call", lambda row: ms(row.cpu_ms)),
        ("calls", lambda row: f"{row.num_calls:,}"),
        ("episodes with a lost call", lambda row: str(row.lost)),
    )


PAGE = """# The gateway

`benchmarks/gateway.py` plays episodes of {turns} turns with three tools; the conversation grows
with each turn. The sampler returns a recorded turn of a text and a tool call.

- *added*: what the agent waits for a call less what the sampler takes for it.
- *`model.chat`*, *`model.openai()`*: the agent is in a thread of the run's process, as agents are.
- *HTTP*: the client is a process of its own, with a connection for each session.
- *of it the client*: median of the same calls to a server that answers a fixed body, which is the
  client's own time.
- *processor per call*: processor time of the run's process (gateway, session, renderer; with the
  first two ways also the agent).

Each cell is one of {repeats} runs, that of the median p50. The targets: under 1 ms in process,
under 3 ms over HTTP, at p50, and 512 sessions of which none is lost."""


def report(rows: list[Row], repeats: int) -> str:
    parts = [PAGE.format(turns=TURNS, repeats=repeats)]
    slow = sorted({row.sampler_s for row in rows if row.sampler_s})
    for seconds in slow:
        parts.append(
            f"## A sampler that takes {seconds:g} s\n\n0.5 to 1.5 times as long, evenly spread: "
            "all sessions wait for the sampler most of the time, as in a run.\n\n"
            + shown([row for row in rows if row.sampler_s == seconds])
        )
    parts.append(
        "## A sampler that answers at once\n\nWith 64 or 512 sessions without a pause, a call "
        "mostly waits for the others.\n\n" + shown([row for row in rows if not row.sampler_s])
    )
    return "\n\n".join(parts)


async def all_rows(sizes: list[int], ways: list[str], repeats: int, seconds: float) -> list[Row]:
    """All rows; the ways alternate, and the repeat of the median p50 counts."""
    rows = []
    cases = [(size, 0.0) for size in sizes]
    cases += [(size, seconds) for size in sizes if size > 1 and seconds]
    async with Client() as client:
        for size, sampler_s in cases:
            episodes = 1 if sampler_s else max(1, 64 // size)
            found: dict[str, list[Row]] = {way: [] for way in ways}
            for _ in range(repeats):
                for way in ways:
                    found[way].append(await measured(client, way, size, episodes, sampler_s))
            for way in ways:
                ordered = sorted(found[way], key=lambda row: row.p50_ms)
                rows.append(ordered[len(ordered) // 2])
                print(rows[-1], file=sys.stderr, flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("ways", nargs="*", help=f"default: {' '.join(WAYS)}")
    parser.add_argument("--sessions", type=int, nargs="+", default=list(SESSIONS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=4.0, help="of the slow sampler; 0: none")
    parser.add_argument("--quick", action="store_true", help="one small case, nothing written")
    parser.add_argument("--client", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.client:
        serve_as_client()
        return
    ways = args.ways or list(WAYS)
    if args.quick:
        rows = asyncio.run(all_rows([1, 8], ways, 1, 0.2))
        print(report(rows, 1))
        return
    facts = machine(1) | {"clock": "wall", "use": "all of them used"}
    rows = asyncio.run(all_rows(args.sessions, ways, args.repeats, args.seconds))
    text = report(rows, args.repeats)
    print(text)
    if ways == list(WAYS) and tuple(args.sessions) == SESSIONS:
        packages = ("httpx", "openai", "fastapi", "uvicorn")
        write("gateway", text, facts, [asdict(row) for row in rows], packages)


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        main()
