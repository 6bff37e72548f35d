"""Calls in batches between a driver and an actor, with the actor in this process."""

from __future__ import annotations

import asyncio
import pickle
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from ludus.backends.ray.channel import ActorLost, Channel
from ludus.backends.ray.link import Address, Broken, Link
from ludus.backends.ray.station import Call, Station
from ludus.core.errors import EnvError, LudusError

pytest.importorskip("ray", reason="needs the extra ray")


class Target:
    def __init__(self) -> None:
        self.heard: list[int] = []
        self.cancelled = 0

    async def double(self, value: int, delay_s: float = 0.0) -> int:
        try:
            await asyncio.sleep(delay_s)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return 2 * value

    def hear(self, value: int) -> None:
        self.heard.append(value)

    async def fail(self, error: Exception) -> None:
        raise error

    def apply(self, function: Callable[[], int]) -> int:
        return function()

    def function(self) -> Callable[[], int]:
        return lambda: 7


class Method:
    """`actor.method.remote(...)`, in this process."""

    def __init__(self, method: Any) -> None:
        self._method = method
        self.calls: list[Any] = []

    def remote(self, *args: Any) -> Any:
        self.calls.append(args)
        return asyncio.ensure_future(self._method(*args))


class Actor:
    """An actor in this process. `direct`: it listens for a direct connection."""

    def __init__(self, target: Target, *, direct: bool = True) -> None:
        self.station = Station(target, lambda: {"calls": 1.0})
        self.start = Method(self.station.start)
        self.results = Method(self.station.results)
        self.watch = Method(self.station.watch)
        self.listen = Method(self.station.listen if direct else nowhere)
        stations.append(self.station)


stations: list[Station] = []


@pytest.fixture(autouse=True)
async def _closed() -> AsyncIterator[None]:
    """Close the sockets of a test's actors in its event loop."""
    yield
    while stations:
        stations.pop().close()
    await asyncio.sleep(0)


async def nowhere() -> None:
    return None


@pytest.fixture(params=[True, False], ids=["direct", "by Ray"])
def actor(request: pytest.FixtureRequest) -> Actor:
    return Actor(Target(), direct=request.param)


async def test_calls_of_one_tick_are_one_message() -> None:
    actor = Actor(target := Target(), direct=False)
    channel = Channel(actor, "worker")
    channel.tell("hear", 1)
    results = await asyncio.gather(*(channel.call("double", n) for n in range(50)))
    assert results == [2 * n for n in range(50)]
    assert target.heard == [1]
    assert len(actor.start.calls) < 3
    assert len(actor.results.calls) < 5
    assert channel.counters == {"calls": 1.0}


async def test_a_direct_connection_needs_no_call_of_ray() -> None:
    actor = Actor(target := Target())
    channel = Channel(actor, "worker")
    channel.tell("hear", 1)
    for number in range(20):
        assert await channel.call("double", number) == 2 * number
    channel.tell("hear", 2)
    assert await channel.call("double", 1) == 2
    assert target.heard == [1, 2]
    assert (actor.start.calls, actor.results.calls, channel.direct) == ([], [], True)
    assert channel.counters == {"calls": 1.0}


async def test_results_come_as_they_are_ready(actor: Actor) -> None:
    channel = Channel(actor, "worker")
    slow = asyncio.create_task(channel.call("double", 1, 0.5))
    assert await channel.call("double", 2) == 4
    assert not slow.done()
    assert await slow == 2


async def test_errors_keep_their_type(actor: Actor) -> None:
    channel = Channel(actor, "worker")
    with pytest.raises(EnvError, match="broken"):
        await channel.call("fail", EnvError("broken"))

    class Unpicklable(Exception):
        pass

    with pytest.raises(LudusError, match="Unpicklable: local"):
        await channel.call("fail", Unpicklable("local"))


@pytest.mark.parametrize("direct", [True, False])
async def test_a_cancelled_call_is_cancelled_in_the_actor(direct: bool) -> None:
    channel = Channel(Actor(target := Target(), direct=direct), "worker")
    task = asyncio.create_task(channel.call("double", 1, 60))
    assert await channel.call("double", 1) == 2
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await channel.call("double", 2) == 4
    assert target.cancelled == 1


async def test_batches_run_in_order_though_they_arrive_in_another() -> None:
    station = Station(target := Target())
    await station.start(1, [Call(None, "hear", (2,))])
    assert target.heard == []
    await station.start(0, [Call(None, "hear", (1,))])
    assert target.heard == [1, 2]


async def test_a_repeated_request_gets_the_same_results() -> None:
    station = Station(Target())
    await station.start(0, [Call(n, "double", (n,)) for n in range(2)])
    await asyncio.sleep(0.01)
    for _ in range(2):  # the first answer did not arrive
        got = await station.results(0)
        assert (got.first, [r.value for r in got.results]) == (0, [0, 2])
    await station.start(1, [Call(2, "double", (2,))])
    got = await station.results(2)
    assert (got.first, [r.value for r in got.results]) == (2, [4])


async def test_a_batch_runs_once() -> None:
    station = Station(target := Target())
    for _ in range(2):
        await station.start(0, [Call(None, "hear", (1,))])
    assert target.heard == [1]


async def test_a_connection_that_ends_loses_and_doubles_nothing() -> None:
    """It ends at every message in turn: calls under way, results not yet received."""
    for ends_after in range(8):
        actor = Actor(target := Target())
        channel = Channel(actor, "worker")

        async def play(channel: Channel, value: int) -> int:
            channel.tell("hear", value)
            return await channel.call("double", value, 0.001 * value)

        calls = [asyncio.create_task(play(channel, n)) for n in range(8)]
        await calls[ends_after]
        assert channel._link is not None
        channel._link.close()
        assert await asyncio.gather(*calls) == [2 * n for n in range(8)]
        assert await play(channel, 8) == 16
        assert target.heard == list(range(9))
        assert not channel.direct


async def test_what_pickle_cannot_write_goes_by_ray() -> None:
    channel = Channel(Actor(Target()), "worker")
    assert await channel.call("double", 1) == 2
    assert await channel.call("apply", lambda: 5) == 5  # Ray's pickle can
    assert not channel.direct
    channel = Channel(Actor(Target()), "worker")
    assert (await channel.call("function"))() == 7
    assert await channel.call("double", 1) == 2
    assert not channel.direct


async def test_strangers_are_not_served() -> None:
    actor = Actor(target := Target())
    address = await actor.station.listen()
    assert address is not None
    for greeting in (b"GET / HTTP/1.1\r\n\r\n".ljust(32), b"", bytes(100_000)):
        reader, writer = await asyncio.open_connection(address.host, address.port)
        writer.write(greeting + pickle.dumps((0, [Call(None, "hear", (1,))], 0)))
        writer.write_eof()
        assert await reader.read() == b""
        writer.close()
    channel = Channel(actor, "worker")
    assert await channel.call("double", 1) == 2
    assert target.heard == []


class Bomb:
    """Runs code where it is unpickled."""

    read = False

    def __reduce__(self) -> Any:
        return setattr, (Bomb, "read", True)


@pytest.mark.parametrize("answers", [False, True], ids=["no proof", "the driver's secret"])
async def test_messages_of_another_program_at_the_address_are_not_read(
    answers: bool,
) -> None:
    """The actor's port may belong to another program by the time the driver connects."""
    data = pickle.dumps(Bomb())

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        secret = await reader.readexactly(32)
        writer.write((secret if answers else b"") + len(data).to_bytes(8, "big") + data)
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1")
    port = server.sockets[0].getsockname()[1]

    with pytest.raises(Broken, match="another program"):
        await (await Link.connect(Address("127.0.0.1", port, bytes(32), b"p" * 32))).receive()
    server.close()
    assert not Bomb.read


async def test_no_connection_beside_a_ray_with_tls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_USE_TLS", "1")
    actor = Actor(Target())
    channel = Channel(actor, "worker")
    assert await channel.call("double", 1) == 2
    assert await actor.station.listen() is None
    assert not channel.direct


async def test_no_connection_to_the_address() -> None:
    actor = Actor(Target())

    async def closed() -> Address:
        return Address("127.0.0.1", 9, bytes(32), bytes(32))

    actor.listen = Method(closed)
    channel = Channel(actor, "worker 2")
    assert await asyncio.gather(*(channel.call("double", n) for n in range(3))) == [0, 2, 4]
    assert not channel.direct
    assert len(actor.start.calls) == 1


@pytest.mark.parametrize("direct", [True, False])
def test_calls_from_one_event_loop_after_another(direct: bool) -> None:
    """The actor has an event loop of its own, which goes on."""
    target = Target()
    actor = Actor(target, direct=direct)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def elsewhere(method: Any) -> Method:
        async def run(*args: Any) -> Any:
            return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(method(*args), loop))

        return Method(run)

    for name in ("start", "results", "watch", "listen"):
        setattr(actor, name, elsewhere(getattr(actor, name)._method))

    async def use(channel: Channel, value: int) -> Any:
        channel.tell("hear", value)
        return await channel.call("double", value)

    channel = Channel(actor, "worker")
    for value in range(3):
        assert asyncio.run(use(channel, value)) == 2 * value
    assert channel.direct == direct
    assert target.heard == [0, 1, 2]

    async def end() -> None:
        stations.pop().close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    asyncio.run_coroutine_threadsafe(end(), loop).result()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


@pytest.mark.parametrize("direct", [True, False])
async def test_a_dead_actor_ends_all_calls(direct: bool) -> None:
    from ray.exceptions import ActorDiedError

    async def died(*args: Any) -> None:
        await asyncio.sleep(0.1)
        raise ActorDiedError

    actor = Actor(Target(), direct=direct)
    actor.watch = Method(died)
    if not direct:
        actor.results = Method(died)
    channel = Channel(actor, "worker 3")
    done = await asyncio.gather(
        *(channel.call("double", n, 60) for n in range(3)), return_exceptions=True
    )
    assert all(isinstance(error, ActorLost) for error in done)
    assert "worker 3 has died" in str(done[0])
    with pytest.raises(ActorLost):
        await channel.call("double", 1)
