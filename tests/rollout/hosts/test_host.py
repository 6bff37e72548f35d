"""Worker threads and hosted environments: hangs, cancellation, races."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import played_envs
import pytest
from played_envs import Say, task_of

from ludus.core.errors import EnvError, EpisodeTimeout
from ludus.core.types import Message, Observation, Spec, StepResult, Task
from ludus.envs.base import Env
from ludus.rollout.hosts import threads
from ludus.rollout.hosts.host import HostedEnv, LocalEnvs
from ludus.rollout.hosts.threads import EnvThread, Overdue, WorkerThread

ACT = Message(role="assistant", content="red")


async def until(condition: Any) -> None:
    while not condition():
        await asyncio.sleep(0.002)


class Gate(Env):
    """Blocks its thread until the test opens the gate."""

    def __init__(self, where: str = "step") -> None:
        self.where = where
        self.inside, self.open = threading.Event(), threading.Event()
        self.log: list[str] = []
        if where == "init":
            self._wait()

    def _wait(self) -> None:
        MADE.append(self)
        self.inside.set()
        self.open.wait()

    async def reset(self, task: Task) -> Observation:
        if self.where == "reset":
            self._wait()
        return Observation(messages=[Message(role="user", content="x")])

    async def step(self, action: Message) -> StepResult:
        if self.where == "step":
            self._wait()
        self.log.append("step ended")
        return StepResult(messages=[Message(role="user", content="x")])

    async def close(self) -> None:
        self.log.append(f"closed in {threading.current_thread().name}")


MADE: list[Gate] = []


@pytest.fixture(autouse=True)
def gates() -> Any:
    MADE.clear()
    yield
    for gate in MADE:
        gate.open.set()


@pytest.mark.parametrize("where", ["init", "reset", "step"])
@pytest.mark.parametrize("how", ["deadline", "cancel"])
async def test_an_abandoned_environment_is_closed_in_its_own_thread(where: str, how: str):
    thread = EnvThread()
    env = HostedEnv(lambda: Gate(where), thread, 0.1 if how == "deadline" else 60.0)

    async def play() -> None:
        await env.reset(task_of(0))
        await env.step(ACT)

    playing = asyncio.create_task(play())
    await until(lambda: MADE)
    if how == "cancel":
        playing.cancel()
    with pytest.raises(EpisodeTimeout if how == "deadline" else asyncio.CancelledError):
        await playing
    await env.close()
    (gate,) = MADE
    assert gate.log == []
    gate.open.set()
    await until(lambda: gate.log)
    await until(lambda: len(gate.log) == (2 if where == "step" else 1))
    assert gate.log[-1] == "closed in ludus-env"
    # The EnvThread continues with another worker thread.
    other = HostedEnv(Say, thread, 60.0)
    await other.reset(task_of(0))
    await other.close()
    thread.close()


async def test_a_hanging_close_is_abandoned():
    class Clings(Say):
        async def close(self) -> None:
            played_envs.RELEASE.wait()

    thread = EnvThread()
    env = HostedEnv(Clings, thread, 0.1)
    await env.reset(task_of(0))
    await env.close()
    await env.close()
    other = HostedEnv(Say, thread, 60.0)
    await other.reset(task_of(0))
    thread.close()


async def test_closing_twice_closes_once():
    thread = EnvThread()
    env = HostedEnv(Say, thread, 60.0)
    await env.close()
    await env.reset(task_of(0))
    await env.close()
    await env.close()
    assert played_envs.CLOSED == ["say/0"]
    with pytest.raises(EnvError, match="before reset"):
        env.env  # noqa: B018
    thread.close()


async def test_a_result_at_its_deadline():
    """Either outcome is valid, and the thread stays usable."""
    thread, outcomes = EnvThread(), set()
    for _ in range(60):
        try:
            outcomes.add(
                await thread.run(lambda: asyncio.sleep(0.001, "in time"), 0.001, blocking=True)
            )
        except Overdue:
            outcomes.add("overdue")
    assert outcomes <= {"in time", "overdue"}
    assert await thread.run(lambda: asyncio.sleep(0, "still here"), 60.0, blocking=True)
    thread.close()


async def test_a_cancellation_is_never_lost():
    """Also when the result arrives at the same moment."""
    for turns in range(60):
        thread = EnvThread()

        async def endless(thread: EnvThread = thread) -> None:
            while True:
                await thread.run(lambda: asyncio.sleep(0), 60.0, blocking=True)

        task = asyncio.create_task(endless())
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        thread.close()


async def test_a_blocking_environment_keeps_its_thread_and_loop():
    seen = set()

    class Looks(Say):
        async def reset(self, task: Task) -> Observation:
            seen.add((threading.get_ident(), asyncio.get_running_loop()))
            self.lock = asyncio.Lock()
            return await super().reset(task)

        async def step(self, action: Message) -> StepResult:
            seen.add((threading.get_ident(), asyncio.get_running_loop()))
            async with self.lock:
                return await super().step(action)

        async def close(self) -> None:
            seen.add((threading.get_ident(), asyncio.get_running_loop()))

    thread = EnvThread()
    env = HostedEnv(Looks, thread, 60.0)
    await env.reset(task_of(0))
    await env.step(ACT)
    await env.close()
    thread.close()
    assert len(seen) == 1
    (only,) = seen
    assert only[0] != threading.get_ident()


async def test_an_awaiting_environment_lives_in_the_loop_of_the_rollouts():
    loops = set()

    class Looks(Say):
        blocking = False

        def __init__(self) -> None:
            super().__init__()
            loops.add(asyncio.get_running_loop())

        async def step(self, action: Message) -> StepResult:
            loops.add(asyncio.get_running_loop())
            return await super().step(action)

    env = HostedEnv(Looks, EnvThread(), 60.0, blocking=False)
    await env.reset(task_of(0))
    await env.step(ACT)
    await env.close()
    assert loops == {asyncio.get_running_loop()}


async def test_a_step_that_is_not_a_coroutine():
    class Plain(Say):
        def step(self, action: Message) -> StepResult:  # type: ignore[override]
            return StepResult()

    env = HostedEnv(Plain, EnvThread(), 60.0)
    await env.reset(task_of(0))
    with pytest.raises(
        EnvError, match=r"step is not async \(it returned StepResult\): write `async def"
    ):
        await env.step(ACT)


def test_threads_end_when_they_are_idle(monkeypatch: pytest.MonkeyPatch):
    """No thread is lost or reused after its end, whatever the timing."""
    monkeypatch.setattr(threads, "IDLE_S", 0.002)
    monkeypatch.setattr(threads, "_idle", type(threads._idle)())
    before = {t.ident for t in threading.enumerate()}

    async def use() -> None:
        for n in range(150):
            thread = EnvThread()
            assert await thread.run(lambda n=n: asyncio.sleep(0, n), 60.0, blocking=True) == n
            thread.close()
            await asyncio.sleep(0.0015 + 0.001 * (n % 3) / 3)
        await until(lambda: not threads._idle)

    asyncio.run(use())
    for thread in threading.enumerate():
        if thread.ident not in before and thread.name == "ludus-env":
            thread.join(60)
            assert not thread.is_alive()


def test_a_worker_thread_outlives_the_loop_of_its_caller():
    """A job whose caller's loop has closed ends only its thread."""
    gate = threading.Event()
    thread = WorkerThread()

    async def wait() -> None:
        gate.wait()

    async def start() -> None:
        asyncio.get_running_loop().create_task(thread.run(wait))
        await asyncio.sleep(0.01)

    asyncio.run(start())
    gate.set()
    workers = [t for t in threading.enumerate() if t.name == "ludus-env"]
    assert all(t.daemon for t in workers)


class Engine(Say):
    """Takes longer to prepare than a step may."""

    prepared: list[Task]
    seconds: float = 0.4

    async def prepare(self, task: Task) -> None:
        await asyncio.sleep(self.seconds)
        self.prepared = [task]

    async def reset(self, task: Task) -> Observation:
        assert self.prepared == [task]
        return await super().reset(task)


async def test_a_preparation_does_not_count_as_a_step():
    thread = EnvThread()
    env = HostedEnv(Engine, thread, 0.2, prepares=True)
    await env.reset(task_of(0))
    await env.close()
    own = LocalEnvs(Spec(name=f"{__name__}:Engine")).host(task_of(0), thread, 0.2)
    assert own is not None
    await own.reset(task_of(0))
    await own.close()
    thread.close()


async def test_a_preparation_has_a_limit_of_its_own(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("ludus.rollout.hosts.host.PREPARE_S", 0.1)
    thread = EnvThread()
    env = HostedEnv(Engine, thread, 60.0, prepares=True)
    with pytest.raises(EpisodeTimeout, match=r"the environment's prepare took longer than 0.1 s$"):
        await env.reset(task_of(0))
    await env.close()
    thread.close()
