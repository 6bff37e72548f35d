"""Rate limits over processes: exact by the store's clock, in order, and no permit is lost."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import redis
from hypothesis import given, settings
from hypothesis import strategies as st
from ports import free_port
from pydantic import ValidationError
from redis_server import start_redis
from variants import variants

from ludus.core.errors import ConfigError, ToolError
from ludus.tools.limits import stores
from ludus.tools.limits.limiter import LimitSpec, open_limiter
from ludus.tools.limits.stores import Answer, FileStore

SECOND = 1_000_000_000

CALLERS = """
import asyncio, sys
from ludus.tools.limits.limiter import LimitSpec, open_limiter

async def call(limiter, count):
    for _ in range(count):
        permit = await limiter.permit()
        print(permit.at_ns, flush=True)

async def main(spec, callers, count):
    limiter = open_limiter(LimitSpec.model_validate_json(spec))
    print("ready", flush=True)
    sys.stdin.readline()
    await asyncio.gather(*(call(limiter, count) for _ in range(callers)))
    limiter.close()

asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
"""


def assert_exact(times_ns: Sequence[int], rate: float, burst: int) -> None:
    """No window of t seconds has more than `rate * t + burst` permits."""
    times = sorted(times_ns)
    earliest = [at - times[0] - number * SECOND / rate for number, at in enumerate(times)]
    latest = float("-inf")
    for number, value in enumerate(earliest):
        latest = max(latest, value)
        excess = (latest - value) * rate / SECOND  # n - 1 - rate * t over all windows that end here
        assert excess <= burst - 1 + 1e-6, f"{excess + 1:.3f} permits of {burst} at {number}"


@pytest.fixture(scope="module")
def redis_port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    port = free_port()
    server = start_redis(port, tmp_path_factory.mktemp("redis"))
    yield port
    server.kill()
    server.wait()


STORES = ["file", "redis"]


@pytest.fixture(params=STORES)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "file":
        return f"file://{tmp_path}"
    return f"redis://127.0.0.1:{request.getfixturevalue('redis_port')}/0"


def spec_of(store: str, rate: float, burst: int, name: str = "") -> LimitSpec:
    name = name or f"test-{os.getpid()}-{time.monotonic_ns()}"
    return LimitSpec(name=name, rate_per_s=rate, burst=burst, store=store)


def start_callers(
    spec: LimitSpec, processes: int, callers: int, count: int
) -> list[subprocess.Popen[str]]:
    command = [sys.executable, "-c", CALLERS, spec.model_dump_json(), str(callers), str(count)]
    workers = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(processes)
    ]
    for worker in workers:
        assert worker.stdout
        assert worker.stdout.readline() == "ready\n"
    for worker in workers:
        assert worker.stdin
        worker.stdin.write("\n")
        worker.stdin.close()
    return workers


def permits_of(worker: subprocess.Popen[str]) -> list[int]:
    assert worker.stdout
    with worker.stdout as lines:
        times = [int(line) for line in lines.read().split()]
    worker.wait()
    return times


def waiting(spec: LimitSpec) -> int:
    """Number of waiters in a file store."""
    path = Path(spec.store.removeprefix("file://")) / f"{spec.name}.sqlite"
    db = sqlite3.connect(path)
    [[count]] = db.execute("SELECT count(*) FROM waiting").fetchall()
    db.close()
    return int(count)


def test_processes_with_many_callers_are_exact_and_none_starves(store: str) -> None:
    spec = spec_of(store, rate=200, burst=7)
    workers = start_callers(spec, processes=4, callers=20, count=3)
    times = [at for worker in workers for at in permits_of(worker)]
    assert [worker.returncode for worker in workers] == [0] * 4
    assert len(times) == 4 * 20 * 3
    assert_exact(times, 200, 7)


@pytest.mark.parametrize("store", variants(STORES, ["file"]), indirect=True)
def test_killed_waiters_hold_up_nobody(store: str) -> None:
    spec = spec_of(store, rate=100, burst=1)
    workers = start_callers(spec, processes=3, callers=20, count=2)
    assert workers[0].stdout
    first = int(workers[0].stdout.readline())
    workers[0].send_signal(signal.SIGKILL)
    times = [at for worker in workers for at in permits_of(worker)]
    assert [worker.returncode for worker in workers[1:]] == [0, 0]
    assert len(times) >= 2 * 20 * 2  # all callers of the others got theirs
    assert_exact([first, *times], 100, 1)


@pytest.mark.parametrize("store", variants(STORES, ["file"]), indirect=True)
def test_kills_at_any_moment_leave_a_working_store(store: str) -> None:
    spec = spec_of(store, rate=5000, burst=50)
    times = []
    for moment in (0.0, 0.003, 0.01, 0.02):
        [worker] = start_callers(spec, processes=1, callers=10, count=10_000)
        time.sleep(moment)
        worker.kill()
        times += permits_of(worker)
    [worker] = start_callers(spec, processes=1, callers=4, count=5)
    after = permits_of(worker)
    assert worker.returncode == 0
    assert len(after) == 20
    assert_exact([*times, *after], 5000, 50)


async def test_waiters_are_served_in_the_order_of_arrival(store: str) -> None:
    # Permits lie further apart than a store grants them early (see the limiter's docstring).
    limiter = open_limiter(spec_of(store, rate=15, burst=1))
    served: list[int] = []

    async def call(number: int) -> None:
        await limiter.acquire()
        served.append(number)

    await limiter.acquire()
    tasks = []
    for number in range(8):
        tasks.append(asyncio.create_task(call(number)))
        await asyncio.sleep(0.001)
    await asyncio.gather(*tasks)
    limiter.close()
    assert served == list(range(8))


def test_threads_with_loops_of_their_own_share_a_limiter(store: str) -> None:
    limiter = open_limiter(spec_of(store, rate=200, burst=3))
    times: list[int] = []

    def call() -> None:
        for _ in range(4):
            times.append(asyncio.run(limiter.permit()).at_ns)

    threads = [threading.Thread(target=call) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    limiter.close()
    assert len(times) == 24
    assert_exact(times, 200, 3)


async def test_cancelled_and_late_waiters_leave_the_queue(tmp_path: Path) -> None:
    spec = spec_of(f"file://{tmp_path}", rate=0.01, burst=1)
    limiter = open_limiter(spec)
    assert await limiter.acquire() < 60  # the bucket has been full since the machine's start
    tasks = [asyncio.create_task(limiter.acquire()) for _ in range(5)]
    while waiting(spec) < 5:
        await asyncio.sleep(0.01)
    with pytest.raises(ToolError, match=r"no permit within 0\.05 s \(0\.01 calls/s\)"):
        await limiter.acquire(0.05)
    for task in tasks[:4]:
        task.cancel()
    while waiting(spec) > 1:
        await asyncio.sleep(0.01)
    tasks[4].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    limiter.close()
    assert waiting(spec) == 0


async def test_a_cancelled_question_leaves_no_ticket(tmp_path: Path) -> None:
    spec = spec_of(f"file://{tmp_path}", rate=0.01, burst=1)
    limiter = open_limiter(spec)
    await limiter.acquire()
    for turns in range(12):
        task = asyncio.create_task(limiter.acquire())
        for _ in range(turns):
            await asyncio.sleep(0)  # cancel before, during and after the store's answer
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    limiter.close()  # waits for what its thread still does
    assert waiting(spec) == 0


async def test_a_ticket_that_is_granted_while_the_limiter_closes_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = spec_of(f"file://{tmp_path}", rate=0.01, burst=1)
    limiter = open_limiter(spec)
    await limiter.acquire()
    store, asked, closing = limiter._store, threading.Event(), threading.Event()
    take = store.take

    def slow(tickets: list[int]) -> list[Answer]:
        asked.set()
        closing.wait(30)
        return take(tickets)

    monkeypatch.setattr(store, "take", slow)
    task = asyncio.create_task(limiter.acquire())
    await asyncio.to_thread(asked.wait, 30)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    threading.Timer(0.1, closing.set).start()
    limiter.close()
    assert waiting(spec) == 0


@pytest.mark.slow
async def test_a_lost_redis_lets_nothing_through_and_calls_go_on_when_it_is_back(
    tmp_path: Path,
) -> None:
    port = free_port()
    server = start_redis(port, tmp_path)
    limiter = open_limiter(spec_of(f"redis://127.0.0.1:{port}/0", rate=4, burst=16))
    before = [(await limiter.permit()).at_ns for _ in range(16)]
    server.kill()
    server.wait()
    with pytest.raises(ToolError, match=rf"within 0\.3 s: Redis at redis://127.0.0.1:{port}/0 "):
        await limiter.acquire(0.3)
    tasks = [asyncio.create_task(limiter.permit(60)) for _ in range(8)]
    await asyncio.sleep(0.1)
    assert not any(task.done() for task in tasks)
    server = start_redis(port, tmp_path)
    after = [permit.at_ns for permit in await asyncio.gather(*tasks)]
    limiter.close()
    server.kill()
    server.wait()
    assert_exact([*before, *after], 4, 16)  # the restarted server has no state, and adds no burst


def test_a_redis_clock_that_was_set_back_costs_one_burst_of_waiting(redis_port: int) -> None:
    spec = spec_of(f"redis://127.0.0.1:{redis_port}/0", rate=100, burst=5)
    with redis.Redis(port=redis_port) as client:
        key = f"ludus:limit:{{{spec.name}}}:bucket"
        client.hset(key, "full_at", str((int(time.time()) + 3600) * 1_000_000))
    limiter = open_limiter(spec)
    assert asyncio.run(limiter.acquire(60)) < 60  # not an hour
    limiter.close()


class Clock:
    """The clock of a file store, in ns."""

    def __init__(self) -> None:
        self.now = 1000 * SECOND

    def monotonic_ns(self) -> int:
        return self.now


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["come", "ask", "ask", "vanish", "leave"]),
        st.integers(0, 5),
        st.sampled_from([0, 0, 1_000, 3_000_000, 40_000_000, 400_000_000, 7_000_000_000]),
    ),
    max_size=120,
)


@given(EVENTS, st.sampled_from([(0.5, 1), (3.0, 2), (100.0, 1), (1000.0, 10)]))
@settings(max_examples=60, deadline=None)
def test_any_order_of_questions_is_exact(
    events: list[tuple[str, int, int]], limit: tuple[float, int]
) -> None:
    """Waiters come, ask early or late, die and leave; the clock is the test's."""
    rate, burst = limit
    clock, waiters = Clock(), list[int]()
    granted: list[int] = []
    with pytest.MonkeyPatch.context() as patch, patched_store(patch, clock, rate, burst) as store:
        for event, which, pause in events:
            clock.now += pause
            ticket = waiters.pop(which % len(waiters)) if waiters and event != "come" else 0
            if event in ("come", "ask"):
                [answer] = store.take([ticket])
                assert answer.wait_s >= 0
                if answer.granted:
                    assert answer.at_ns >= clock.now
                    assert answer.at_ns <= clock.now + stores.AHEAD_S * 1e9
                    granted.append(answer.at_ns)
                else:
                    waiters.append(answer.ticket)
            elif event == "leave" and ticket:
                store.leave(ticket)
        clock.now += 60 * SECOND  # all tickets are given up: the bucket is full, the queue empty
        fresh = [answer.granted for answer in store.take([0] * burst)]
    assert fresh == [True] * burst
    assert_exact(granted, rate, burst)


@given(st.integers(2, 40), st.integers(1, 5), st.randoms(use_true_random=False))
@settings(max_examples=40, deadline=None)
def test_punctual_waiters_are_served_in_order_at_the_full_rate(
    count: int, burst: int, random: object
) -> None:
    clock = Clock()
    with pytest.MonkeyPatch.context() as patch, patched_store(patch, clock, 10.0, burst) as store:
        answers = store.take([0] * count)
        order = [answer.ticket for answer in answers]
        asks = {a.ticket: clock.now + round(a.wait_s * 1e9) for a in answers if not a.granted}
        served = [(a.ticket, a.at_ns) for a in answers if a.granted]
        while asks:
            ticket = min(asks, key=lambda t: asks[t])
            clock.now = max(clock.now, asks.pop(ticket))
            [answer] = store.take([ticket])
            if answer.granted:
                served.append((ticket, answer.at_ns))
            else:
                asks[ticket] = clock.now + round(answer.wait_s * 1e9)
    assert [ticket for ticket, _ in served] == order
    start = 1000 * SECOND
    expected = [start + max(0, number + 1 - burst) * SECOND // 10 for number in range(count)]
    assert [at for _, at in served] == pytest.approx(expected, abs=count)


def test_a_newcomer_does_not_overtake_and_an_absent_waiter_is_passed_over() -> None:
    clock = Clock()
    with pytest.MonkeyPatch.context() as patch, patched_store(patch, clock, 1.0, 1) as store:
        first, second = store.take([0, 0])
        assert [first.granted, second.granted] == [True, False]
        while second.wait_s > 0.3:  # until its turn is near
            clock.now += round(second.wait_s * 1e9)
            [second] = store.take([second.ticket])
        clock.now = 1001 * SECOND  # its turn; it is late, but not absent
        [third] = store.take([0])
        assert not third.granted
        assert third.wait_s >= 0.4
        [again] = store.take([second.ticket])
        assert again.granted
        clock.now += 60 * SECOND  # nobody has asked for a minute
        [fourth] = store.take([0])
        assert fourth.granted
        [third] = store.take([third.ticket])  # back, with its place
        [fifth] = store.take([0])
        assert not third.granted
        assert fifth.ticket > third.ticket
        assert fifth.wait_s >= third.wait_s


def patched_store(patch: pytest.MonkeyPatch, clock: Clock, rate: float, burst: int) -> TempStore:
    patch.setattr(stores, "time", clock)
    return TempStore(rate, burst)


class TempStore:
    """A file store in a temporary folder."""

    def __init__(self, rate: float, burst: int) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._spec = spec_of(f"file://{self._folder.name}", rate, burst, "property")

    def __enter__(self) -> FileStore:
        self._store = FileStore(self._spec, self._spec.name, "limits")
        return self._store

    def __exit__(self, *_: object) -> None:
        self._store.close()
        self._folder.cleanup()


def test_a_reboot_starts_with_what_the_bucket_gained_since(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(stores, "time", clock)
    spec = spec_of(f"file://{tmp_path}", rate=1, burst=5, name="boots")
    store = FileStore(spec, spec.name, "limits")
    assert [answer.granted for answer in store.take([0] * 6)] == [True] * 5 + [False]
    store.close()
    monkeypatch.setattr(stores, "_boot_id", lambda: "another boot")
    clock.now = 2 * SECOND
    store = FileStore(spec, spec.name, "limits")
    assert [answer.granted for answer in store.take([0] * 3)] == [True, True, False]
    store.close()


def test_a_limiter_can_be_pickled_and_closed(store: str) -> None:
    limiter = open_limiter(spec_of(store, rate=50, burst=1))
    copy = pickle.loads(pickle.dumps(limiter))
    times = [asyncio.run(each.permit()).at_ns for each in (limiter, copy, limiter)]
    copy.close()
    assert_exact(times, 50, 1)
    limiter.close()
    with pytest.raises(ToolError, match="the limiter is closed"):
        asyncio.run(limiter.acquire())


FORKED = """
import asyncio, os, sys
from ludus.tools.limits.limiter import LimitSpec, open_limiter
limiter = open_limiter(LimitSpec.model_validate_json(sys.argv[1]))
print(asyncio.run(limiter.permit()).at_ns, flush=True)
child = os.fork()
print(asyncio.run(limiter.permit()).at_ns, flush=True)
limiter.close()
if child:
    sys.exit(os.waitpid(child, 0)[1])
"""


def test_a_limiter_works_in_a_forked_child(store: str) -> None:
    spec = spec_of(store, rate=20, burst=1)
    command = [sys.executable, "-W", "ignore", "-c", FORKED, spec.model_dump_json()]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    times = [int(line) for line in done.stdout.split()]
    assert len(times) == 3
    assert_exact(times, 20, 1)


def test_a_removed_file_is_made_again_by_all_who_have_it_open(tmp_path: Path) -> None:
    spec = spec_of(f"file://{tmp_path}", rate=0.01, burst=2)
    first, second = (FileStore(spec, spec.name, "limits") for _ in range(2))
    first.take([0])
    for path in tmp_path.iterdir():
        path.unlink()
    answers = [*second.take([0]), *first.take([0]), *second.take([0])]
    assert [answer.granted for answer in answers] == [True, True, False]
    first.close()
    second.close()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"rate_per_s": 0}, "greater than 0"),
        ({"rate_per_s": -1}, "greater than 0"),
        ({"rate_per_s": float("nan")}, "finite number"),
        ({"rate_per_s": float("inf")}, "finite number"),
        ({"rate_per_s": 20_000}, "less than or equal to 10000"),
        ({"burst": 0}, "greater than or equal to 1"),
        ({"burst": 1.5}, "valid integer"),
        ({"max_wait_s": 0}, "greater than 0"),
        ({"store": "memcached://here"}, "String should match"),
        ({"rate_per_s": 1e-9, "burst": 10}, "the bucket never fills"),
    ],
)
def test_wrong_values_are_refused(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        LimitSpec.model_validate({"name": "search", "rate_per_s": 1, **wrong})


def test_stores_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    def refused(store: str) -> str:
        with pytest.raises(ConfigError) as caught:
            open_limiter(spec_of(store, 1, 1, "search"))
        return str(caught.value)

    assert "limits.search.store: /nowhere is not a folder" in refused("file:///nowhere")
    (tmp_path / "search.sqlite").write_text("something else " * 100)
    assert "search.sqlite cannot be used: file is not a database" in refused(f"file://{tmp_path}")
    port = free_port()
    message = refused(f"redis://user:secret@127.0.0.1:{port}/0")
    assert f"no Redis answers at redis://127.0.0.1:{port}/0" in message
    assert "secret" not in message
    assert "limits.search.store: redis://127.0.0.1:port" in refused("redis://127.0.0.1:port")


@pytest.mark.parametrize(
    ("folder_mode", "file_mode"), [(0o777, 0o666), (0o770, 0o660), (0o700, 0o600)]
)
def test_those_who_may_write_the_folder_share_its_files(
    tmp_path: Path, folder_mode: int, file_mode: int
) -> None:
    folder = tmp_path / "limits"
    folder.mkdir()
    folder.chmod(folder_mode)
    limiter = open_limiter(spec_of(f"file://{folder}", 10, 1, "search"))
    try:
        modes = {file.name: file.stat().st_mode & 0o777 for file in folder.iterdir()}
    finally:
        limiter.close()
    assert {"search.lock", "search.sqlite", "search.sqlite-wal"} <= set(modes)
    assert set(modes.values()) == {file_mode}


async def test_a_redis_key_of_another_kind_is_named(tmp_path: Path) -> None:
    port = free_port()
    server = start_redis(port, tmp_path)
    try:
        with redis.Redis(port=port) as client:
            client.lpush("ludus:limit:{search}:bucket", "x")
        limiter = open_limiter(spec_of(f"redis://127.0.0.1:{port}/0", 10, 1, "search"))
        with pytest.raises(ToolError, match=r"refuses \(delete its keys ludus:limit:\{search\}:b"):
            await limiter.acquire(0.3)
        limiter.close()
    finally:
        server.kill()
        server.wait()
