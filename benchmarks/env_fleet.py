"""20,000 open sessions on a fleet of environment services, of which one is killed every 10 s.

    python benchmarks/env_fleet.py                                   # about 7 minutes
    python benchmarks/env_fleet.py --sessions 2000 --hosts 4 --episodes 4000 --dry   # no page

Each host is `ludus serve env textcraft` in a process of its own. A client in one process plays
episodes through the collector, with the expert's actions after a pause, as an agent that thinks.
Every episode that is played to its end therefore earns 1: a reward of 0 would be a lost session
that was scored. A host that is killed (SIGKILL) is started again on its port.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import random
import resource
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx
from common import machine, processor_seconds, table, write

from ludus.config.schema import RolloutConfig
from ludus.core.types import Group, Message, Spec, Task
from ludus.envs.remote.env import RemoteEnv
from ludus.envs.textcraft.env import TextCraft
from ludus.models.endpoint.client import Reply
from ludus.rollout.collect import Collector
from ludus.telemetry.hosts import HOSTS
from ludus.telemetry.logs import setup_logging

NUM_TASKS = 200
NUM_ACTIONS = (2,)
FIRST_PORT = 21_000
CALLS_PER_HOST = 32

LATENCIES: dict[str, list[tuple[float, float]]] = {"reset": [], "step": []}
"""Time of the call, and its seconds."""


class TimedEnv(RemoteEnv):
    """Notes the seconds of each call that succeeds."""

    async def reset(self, task: Task) -> Any:
        began = time.monotonic()
        opening = await super().reset(task)
        LATENCIES["reset"].append((began, time.monotonic() - began))
        return opening

    async def step(self, action: Message) -> Any:
        began = time.monotonic()
        result = await super().step(action)
        LATENCIES["step"].append((began, time.monotonic() - began))
        return result


class Expert:
    """In place of a model's endpoint: the expert's next action, once all are open, and a pause."""

    model = "expert"

    def __init__(self, plans: dict[str, list[str]], pause_s: float) -> None:
        self._plans, self._pause_s, self._random = plans, pause_s, random.Random(0)
        self.may_act = asyncio.Event()

    async def chat(self, messages: Sequence[Message], *_: Any) -> Reply:
        await self.may_act.wait()
        await asyncio.sleep(self._pause_s * self._random.uniform(0.5, 1.5))
        turn = sum(message.role == "assistant" for message in messages)
        action = self._plans[messages[0].content][turn]
        return Reply(Message(role="assistant", content=action), "stop")


async def tasks_and_plans() -> tuple[list[Task], dict[str, list[str]]]:
    """Tasks that the expert solves in few actions; its actions by the opening's text."""
    tasks: list[Task] = []
    plans: dict[str, list[str]] = {}
    for seed in range(100 * NUM_TASKS):
        env, actions, done = TextCraft(), [], False
        opening = (await env.reset(TextCraft.task("depth-1", seed))).messages[0].content
        while not done and len(actions) <= max(NUM_ACTIONS):
            actions.append(env.expert_action())
            done = (await env.step(Message(role="assistant", content=actions[-1]))).done
        if done and len(actions) in NUM_ACTIONS and opening not in plans:
            plans[opening] = actions
            tasks.append(RemoteEnv.task("depth-1", seed))
        if len(tasks) == NUM_TASKS:
            break
    return tasks, plans


class Services:
    """The hosts' processes."""

    def __init__(self, number: int) -> None:
        self.ports = [FIRST_PORT + place for place in range(number)]
        self.urls = [f"http://127.0.0.1:{port}" for port in self.ports]
        self.processes = [self.start(port) for port in self.ports]
        self.ended_s, self.ended_mb = 0.0, 0.0
        for url in self.urls:
            self.wait(url)

    def start(self, port: int) -> subprocess.Popen[bytes]:
        words = ["serve", "env", "textcraft", "--port", str(port)]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(
            [sys.executable, "-m", "ludus", *words], stdout=subprocess.DEVNULL, env=env
        )

    def wait(self, url: str) -> None:
        deadline = time.monotonic() + 600
        while time.monotonic() < deadline:
            try:
                if httpx.get(url + "/health", timeout=5).status_code == 200:
                    return
            except httpx.HTTPError:
                time.sleep(0.1)
        raise SystemExit(f"{url} does not start")

    def kill(self, place: int) -> None:
        """Kill a host, and start it again on its port."""
        process = self.processes[place]
        self.ended_s += processor_seconds(process.pid)
        self.ended_mb = max(self.ended_mb, memory_mb(process.pid))
        os.kill(process.pid, signal.SIGKILL)

    def replace(self, place: int) -> None:
        self.processes[place].wait()
        self.processes[place] = self.start(self.ports[place])

    def open_sessions(self) -> int:
        return sum(
            int(httpx.get(url + "/health", timeout=10).json()["sessions"]) for url in self.urls
        )

    def processor_s(self) -> float:
        return self.ended_s + sum(processor_seconds(process.pid) for process in self.processes)

    def most_mb(self) -> float:
        return max(self.ended_mb, *(memory_mb(process.pid) for process in self.processes))

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()


def memory_mb(pid: int | str = "self") -> float:
    text = Path(f"/proc/{pid}/statm").read_text().split()[1]
    return int(text) * resource.getpagesize() / 2**20


def num_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@dataclass
class Death:
    """A kill: sessions open there, seconds until the client noticed and used the host again."""

    sessions: int
    noticed_s: float
    back_s: float


class Chaos(threading.Thread):
    """Kills a host every `every_s` seconds, one after the other."""

    def __init__(self, services: Services, every_s: float) -> None:
        super().__init__(daemon=True)
        self._services, self._every_s = services, every_s
        self.deaths: list[Death] = []
        self.stopped = threading.Event()

    def run(self) -> None:
        place, due = 0, time.monotonic() + self._every_s
        while not self.stopped.wait(max(0.0, due - time.monotonic())):
            due += self._every_s
            url, began = self._services.urls[place], time.monotonic()
            death = Death(HOSTS.sessions[url], float("nan"), float("nan"))
            self._services.kill(place)
            if self._until(url, "down"):
                death.noticed_s = time.monotonic() - began
            self._services.replace(place)
            if self._until(url, "up"):
                death.back_s = time.monotonic() - began
            self.deaths.append(death)
            place = (place + 1) % len(self._services.urls)

    def _until(self, url: str, state: str) -> bool:
        while not self.stopped.is_set():
            if HOSTS.states.get(url) == state:
                return True
            time.sleep(0.005)
        return False


@dataclass
class Tally:
    """The ends of the episodes."""

    statuses: Counter[str] = field(default_factory=Counter)
    rewards: Counter[float | None] = field(default_factory=Counter)
    attempts: Counter[int] = field(default_factory=Counter)
    ids: set[str] = field(default_factory=set)
    num: int = 0
    most_open: int = 0
    most_mb: float = 0.0
    most_files: int = 0
    full_s: float = 0.0
    most_late_s: float = 0.0
    full_at: float = float("inf")
    loads: list[float] = field(default_factory=list)

    async def add(self, _: int, group: Group) -> None:
        for trajectory in group.trajectories:
            self.num += 1
            self.ids.add(trajectory.id)
            self.statuses[str(trajectory.status)] += 1
            self.rewards[trajectory.reward] += 1
            self.attempts[1 + int(trajectory.metrics["retries"])] += 1

    async def watch(self, sessions: int, hold_s: float, may_act: asyncio.Event) -> None:
        """Note the most of everything, once a second; let the agents act after `hold_s`."""
        while True:
            began = time.monotonic()
            await asyncio.sleep(1.0)
            self.most_late_s = max(self.most_late_s, time.monotonic() - began - 1.0)
            now_open = sum(HOSTS.sessions.values())
            self.full_s += now_open >= 0.9 * sessions
            if now_open >= 0.99 * sessions:
                self.full_at = min(self.full_at, time.monotonic())
            if time.monotonic() > self.full_at + hold_s:
                may_act.set()
            self.loads.append(os.getloadavg()[0])
            self.most_open = max(self.most_open, now_open)
            self.most_mb = max(self.most_mb, memory_mb())
            self.most_files = max(self.most_files, num_files())
            if int(time.monotonic()) % 10 == 0:
                print(f"{now_open:,} open, {self.num:,} episodes", file=sys.stderr, flush=True)


async def play(options: argparse.Namespace, services: Services, tally: Tally) -> None:
    tasks, plans = await tasks_and_plans()
    args = {
        "url": services.urls,
        "env": "textcraft",
        "patience_s": 600.0,
        "calls_per_host": CALLS_PER_HOST,
    }
    config = RolloutConfig(
        format="plain",
        concurrency=options.sessions,
        max_retries=50,
        max_turns=8,
        step_deadline_s=700.0,
        episode_deadline_s=3600.0,
    )
    collector = Collector(
        None,
        None,
        config,
        Spec(name="env_fleet:TimedEnv", args=args),
        endpoint=(expert := Expert(plans, options.pause)),  # type: ignore[arg-type]
    )
    gc.freeze()  # as a training does
    watching = asyncio.create_task(tally.watch(options.sessions, options.hold, expert.may_act))
    todo = (tasks[number % len(tasks)] for number in range(options.episodes))
    await collector.stream(todo, 0, 1, tally.add, backlog=4096)
    watching.cancel()


def quantiles(values: Iterable[float]) -> tuple[float, float, float]:
    """Median, 99 %, the largest."""
    ordered = sorted(values) or [float("nan")]
    return statistics.median(ordered), ordered[int(0.99 * (len(ordered) - 1))], ordered[-1]


def measure(options: argparse.Namespace) -> dict[str, Any]:
    services = Services(options.hosts)
    tally, chaos = Tally(), Chaos(services, options.every)
    try:
        base_mb, base_s = memory_mb(), services.processor_s()
        began, own_s = time.monotonic(), time.process_time()
        chaos.start()
        asyncio.run(play(options, services, tally))
        seconds, own_s = time.monotonic() - began, time.process_time() - own_s
        chaos.stopped.set()
        chaos.join()
        spent_s, most_mb = services.processor_s() - base_s, services.most_mb()
        time.sleep(1.0)
        for url in services.urls:
            services.wait(url)
        left = services.open_sessions()
    finally:
        services.stop()
    events = HOSTS.metrics()
    import env_fleet

    latencies = env_fleet.LATENCIES
    calls = sum(map(len, latencies.values()))
    return {
        "sessions": options.sessions,
        "hosts": options.hosts,
        "episodes": tally.num,
        "distinct_ids": len(tally.ids),
        "statuses": dict(tally.statuses),
        "rewards": {str(reward): number for reward, number in tally.rewards.items()},
        "attempts": {str(n): tally.attempts[n] for n in sorted(tally.attempts)},
        "opened": events["hosts/opened"],
        "lost": events["hosts/lost"],
        "moved": events["hosts/moved"],
        "failures": events["hosts/failures"],
        "left_at_client": sum(HOSTS.sessions.values()),
        "left_at_hosts": left,
        "seconds": seconds,
        "most_open": tally.most_open,
        "seconds_above_90_percent": tally.full_s,
        "client_base_mb": base_mb,
        "client_most_mb": tally.most_mb,
        "client_kb_per_session": (tally.most_mb - base_mb) * 1024 / options.sessions,
        "client_files": tally.most_files,
        "client_most_late_s": tally.most_late_s,
        "client_cpu_share": own_s / seconds,
        "client_ms_per_call": 1000 * own_s / calls,
        "hosts_cpu_share": spent_s / seconds,
        "host_most_mb": most_mb,
        "load": quantiles(tally.loads),
        "ramp_s": tally.full_at - began,
        **{
            f"{call}_{phase}_s": quantiles(
                s for at, s in some if (at > tally.full_at) == (phase == "full")
            )
            for call, some in latencies.items()
            for phase in ("ramp", "full")
        },
        "deaths": [asdict(death) for death in chaos.deaths if death.noticed_s == death.noticed_s],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sessions", type=int, default=20_000, help="open at the same time")
    parser.add_argument("--hosts", type=int, default=32, help="service processes")
    parser.add_argument("--episodes", type=int, default=20_000)
    parser.add_argument("--every", type=float, default=10.0, help="seconds between two kills")
    parser.add_argument("--pause", type=float, default=20.0, help="mean seconds before an action")
    parser.add_argument("--hold", type=float, default=30.0, help="seconds with all open")
    parser.add_argument("--dry", action="store_true", help="print, and write no page")
    options = parser.parse_args()
    setup_logging()
    facts: dict[str, Any] = {**machine(2), "use": "shared with other jobs", "clock": "wall"}
    figures = measure(options)
    for name, value in figures.items():
        print(f"{name}: {value}")
    figures["options"] = vars(options)
    if not options.dry:
        write("env-fleet", page(figures), facts, [figures], ["websockets", "uvicorn", "fastapi"])


PAGE = """# A fleet of environment hosts

`benchmarks/env_fleet.py`: {sessions:,} sessions are open at the same time on {hosts} services
(`ludus serve env textcraft`, one process each) on one machine. One service is killed (SIGKILL)
every {every:g} s, in turn, and started again on its port. A client in one process plays
{episodes:,} episodes through the collector, over `remote` with a list of {hosts} addresses. The
expert's actions take the place of a model's. No agent acts before all sessions have been open for
{hold:g} s; then each acts after {low:g} to {high:g} s. An episode that is played to its end earns
1: a reward of 0 would be a lost session that was scored. An agent learns at its next action that
its host is gone, so sessions of killed hosts count as open until then.

{counts}

## Failures

{faults}

## Latency

Seconds at the client, with the wait for one of the {calls} places of calls that are under way at a
host. A reset includes the opening of its session, so its first row is that of opening
{sessions:,} sessions at once.

{latencies}

## Cost

{costs}

Both cores were shared with other jobs all the time. Latencies are mostly waits for the processor;
the counts do not depend on it."""


def page(figures: dict[str, Any]) -> str:
    options, rewards = figures["options"], figures["rewards"]
    return PAGE.format(
        sessions=figures["sessions"],
        hosts=figures["hosts"],
        every=options["every"],
        episodes=options["episodes"],
        hold=options["hold"],
        low=0.5 * options["pause"],
        high=1.5 * options["pause"],
        calls=CALLS_PER_HOST,
        counts=table(("", ""), counts(figures, rewards)),
        faults=table(("", "median", "worst"), faults(figures["deaths"])),
        latencies=table(("", "median", "p99", "worst"), latencies(figures)),
        costs=table(("", ""), costs(figures)),
    )


def counts(figures: dict[str, Any], rewards: dict[str, int]) -> Iterator[tuple[str, str]]:
    won, done = rewards.get("1.0", 0), figures["statuses"].get("completed", 0)
    other = sum(rewards.values()) - won
    total, lost = f"{figures['opened']:,.0f}", f"{figures['lost']:,.0f}"
    tries = [f"{number:,} with {n}" for n, number in figures["attempts"].items()]
    yield "episodes that finished", f"**{done:,}**, with {figures['distinct_ids']:,} different ids"
    yield "with reward 1; with any other reward", f"**{won:,}**; **{other}**"
    yield "attempts of an episode", ", ".join(tries)
    yield "sessions opened = finished + lost with a killed host", f"{total} = {done:,} + {lost}"
    left = f"{figures['left_at_client']}; {figures['left_at_hosts']}"
    yield "sessions open at the end, at the client; at the hosts", left
    seen = f"{len(figures['deaths'])}; {figures['failures']:.0f}"
    yield "hosts killed; failures of hosts that the client noticed", seen
    yield "openings that another host had to take", f"{figures['moved']:,.0f}"
    full = f"{figures['most_open']:,}; {figures['seconds_above_90_percent']:.0f}"
    yield "most sessions open; seconds with 90 % of them or more", full
    yield (
        "seconds in all; until 99 % were open",
        f"{figures['seconds']:.0f}; {figures['ramp_s']:.0f}",
    )


def faults(deaths: list[dict[str, float]]) -> Iterator[tuple[str, str, str]]:
    names = {
        "sessions": ("sessions open on a killed host", ",.0f"),
        "noticed_s": ("seconds from the kill until the client noticed", ".2f"),
        "back_s": ("seconds until the host, started again, was used again", ".2f"),
    }
    for name, (told, form) in names.items():
        values = [death[name] for death in deaths if death[name] == death[name]]
        if name == "noticed_s":
            some = [death[name] for death in deaths if death["sessions"]]
            with_sessions = f"{statistics.median(some):{form}}", f"{max(some):{form}}"
            yield f"{told}, with sessions open there", *with_sessions
        yield told, f"{statistics.median(values):{form}}", f"{max(values):{form}}"


def latencies(figures: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    for call, name in (("reset", "opening and reset"), ("step", "step")):
        for phase, when in (("ramp", "until all were open"), ("full", "after that")):
            values = figures[f"{call}_{phase}_s"]
            if values[0] == values[0]:
                yield f"{name}, {when}", *(f"{value:.2f}" for value in values)


def costs(figures: dict[str, Any]) -> Iterator[tuple[str, str]]:
    memory = f"{figures['client_base_mb']:,.0f} MB; {figures['client_most_mb']:,.0f} MB"
    yield "client: memory before (with torch, which it does not use); most", memory
    each = f"{figures['client_kb_per_session']:.1f} KB"
    yield "client: memory per open session, with its episode and trajectory", each
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    yield "client: open files at most; the limit here", f"{figures['client_files']}; {limit:,}"
    yield "client: processor", f"{figures['client_cpu_share']:.0%} of a core"
    yield "client: longest delay of its event loop", f"{figures['client_most_late_s']:.1f} s"
    each = f"{figures['client_ms_per_call']:.2f} ms"
    yield "client: processor per reset or step, the collector included", each
    yield "hosts: processor of all, starts included", f"{figures['hosts_cpu_share']:.0%} of a core"
    yield "hosts: most memory of one", f"{figures['host_most_mb']:,.0f} MB"
    load = f"{figures['load'][0]:.1f}; {figures['load'][2]:.1f}"
    yield "load of the machine with its 2 cores: median; worst", load


if __name__ == "__main__":
    main()
