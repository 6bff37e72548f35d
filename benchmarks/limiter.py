"""The rate limiter and well-kept libraries, with 8 processes of 40 callers each.

    python benchmarks/limiter.py                          all cases; needs redis-server
    python benchmarks/limiter.py --cases file redis-kill --seconds 5

Each caller takes permit after permit. A permit's time is the store's for ludus's limiter, and the
moment at which the call returned for a library. The excess is the largest `n - rate * t` over all
windows, to compare with the burst. The rate used counts permits in the measured seconds. Overtaking
is the longest time by which a caller came before another who got a permit before it.

`pyrate-limiter` is no dependency: its cases run where it is installed (with filelock).
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ludus.tools.limits.limiter import LimitSpec, open_limiter

RESULTS = Path(__file__).parents[1] / "docs" / "benchmarks"
PROCESSES, CALLERS = 8, 40


@dataclass(frozen=True)
class Case:
    subject: str
    rate: float = 100.0
    burst: int = 10
    kill: bool = False


CASES = {
    "file": Case("file"),
    "file-kill": Case("file", kill=True),
    "file-burst-1": Case("file", burst=1),
    "redis": Case("redis"),
    "redis-kill": Case("redis", kill=True),
    "redis-burst-1": Case("redis", burst=1),
    "limits-redis": Case("limits-redis", burst=100),  # its shortest window is 1 s
    "pyrate-redis": Case("pyrate-redis"),
    "pyrate-redis-no-buffer": Case("pyrate-redis-no-buffer"),
    "pyrate-sqlite": Case("pyrate-sqlite"),
}
Take = Callable[[], object]


def library(subject: str, rate: float, burst: int, store: str) -> Take:
    """A blocking call that takes a permit from a library's limiter."""
    if subject == "limits-redis":
        from limits import RateLimitItemPerSecond
        from limits.storage import storage_from_string
        from limits.strategies import MovingWindowRateLimiter

        limiter: Any = MovingWindowRateLimiter(storage_from_string(store))
        item = RateLimitItemPerSecond(burst, max(1, round(burst / rate)))

        def take() -> None:
            while not limiter.hit(item):
                time.sleep(max(0.001, limiter.get_window_stats(item).reset_time - time.time()))

        return take
    from pyrate_limiter import Limiter, Rate, RedisBucket, SQLiteBucket

    rates = [Rate(burst, round(1000 * burst / rate))]
    if subject == "pyrate-sqlite":
        bucket: Any = SQLiteBucket.init_from_file(rates, db_path=store, use_file_lock=True)
    else:
        from redis import Redis

        bucket = RedisBucket.init(rates, Redis.from_url(store), "benchmark")
    limiter = Limiter(bucket, buffer_ms=0 if subject.endswith("no-buffer") else 50)
    return lambda: limiter.try_acquire("benchmark")


def play(case: Case, store: str, seconds: float, out: Path) -> None:
    """One process: 40 callers; a line `caller arrived at returned` for each permit."""
    file = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def note(caller: int, arrived: float, at: float, returned: float) -> None:
        line = f"{os.getpid()}.{caller} {arrived!r} {at!r} {returned!r}\n"
        os.write(file, line.encode())  # survives kill -9

    if case.subject in ("file", "redis"):
        asyncio.run(play_ours(case, store, seconds, note))
        os._exit(0)
    take = library(case.subject, case.rate, case.burst, store)
    start = signal_start()
    end = start + seconds

    def call(number: int) -> None:
        time.sleep(max(0.0, start - time.monotonic()))
        while (arrived := time.monotonic()) < end:
            try:
                take()
            except Exception:  # pyrate-limiter's SQLite bucket raises under load
                time.sleep(0.05)
                continue
            now = time.monotonic()
            note(number, arrived, now, now)

    for number in range(CALLERS):
        threading.Thread(target=call, args=(number,), daemon=True).start()
    time.sleep(max(0.0, end + 0.2 - time.monotonic()))
    os._exit(0)


async def play_ours(case: Case, store: str, seconds: float, note: Callable[..., None]) -> None:
    spec = LimitSpec(name="benchmark", rate_per_s=case.rate, burst=case.burst, store=store)
    limiter = open_limiter(spec)
    start = signal_start()
    end = start + seconds

    async def call(number: int) -> None:
        await asyncio.sleep(max(0.0, start - time.monotonic()))
        while (arrived := time.monotonic()) < end:
            permit = await limiter.permit()
            note(number, arrived, permit.at_ns / 1e9, time.monotonic())

    tasks = [asyncio.create_task(call(number)) for number in range(CALLERS)]
    await asyncio.wait(tasks, timeout=max(0.0, end + 0.2 - time.monotonic()))


def signal_start() -> float:
    """Tell the parent that all is loaded; returns the common start on the monotonic clock."""
    print("ready", flush=True)
    return float(sys.stdin.readline())


def measure(name: str, case: Case, store: str, seconds: float) -> dict[str, Any]:
    """Run a case: the processes, the kill in the middle, the figures."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--worker", name, store, str(seconds)]
        workers = [
            subprocess.Popen(
                [*command, f"{folder}/{number}"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
            for number in range(PROCESSES)
        ]
        for worker in workers:
            assert worker.stdout
            assert worker.stdout.readline() == b"ready\n"
        start = time.monotonic() + 0.5
        for worker in workers:
            assert worker.stdin
            worker.stdin.write(f"{start!r}\n".encode())
            worker.stdin.close()
        if case.kill:
            time.sleep(max(0.0, start + seconds / 2 - time.monotonic()))
            workers[0].kill()
        for worker in workers:
            worker.wait()
        text = "".join(path.read_text() for path in Path(folder).iterdir())
    lines = [line.split() for line in text.splitlines()]
    rows = [(caller, *map(float, times)) for caller, *times in lines]
    rows = [row for row in rows if row[3] <= start + seconds]
    return {"case": name, **vars(case), **figures(rows, case, seconds)}


def figures(rows: Sequence[tuple[Any, ...]], case: Case, seconds: float) -> dict[str, Any]:
    per_caller = Counter(row[0] for row in rows)
    counts = [*per_caller.values(), *[0] * (PROCESSES * CALLERS - len(per_caller))]
    latest = overtaken = float("-inf")
    for _, arrived, _, _ in sorted(rows, key=lambda row: row[2]):
        overtaken = max(overtaken, latest - arrived)
        latest = max(latest, arrived)
    waits = sorted(row[3] - row[1] for row in rows)
    return {
        "permits": len(rows),
        "used": len(rows) / (case.rate * seconds),
        "most": most(sorted(row[2] for row in rows), case.rate),
        "most_returned": most(sorted(row[3] for row in rows), case.rate),
        "fewest": min(counts),
        "median": statistics.median(counts),
        "highest": max(counts),
        "overtaken_s": max(0.0, overtaken),
        "wait_p50_s": waits[len(waits) // 2],
        "wait_max_s": waits[-1],
    }


def most(times: Sequence[float], rate: float) -> float:
    """The largest `n - rate * t` over all windows of length t with n permits."""
    lowest, highest = float("inf"), 0.0
    for number, at in enumerate(times):
        at -= times[0]
        lowest = min(lowest, number - rate * at)
        highest = max(highest, number + 1 - rate * at - lowest)
    return highest


async def overhead(store: str, count: int) -> dict[str, float]:
    """Milliseconds of `acquire` where the bucket is never empty, one caller."""
    spec = LimitSpec(name="overhead", rate_per_s=10_000, burst=count, store=store)
    limiter = open_limiter(spec)
    times = []
    for _ in range(count):
        before = time.perf_counter()
        await limiter.acquire()
        times.append(1000 * (time.perf_counter() - before))
    limiter.close()
    return {"p50_ms": statistics.median(times), "p99_ms": sorted(times)[int(0.99 * count)]}


@contextmanager
def redis_server() -> Iterator[str]:
    """A Redis server without persistence; yields its URL."""
    with socket.socket() as free, tempfile.TemporaryDirectory() as folder:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        command = ["redis-server", "--port", str(port), "--save", "", "--dir", folder]
        server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            time.sleep(1.0)
            yield f"redis://127.0.0.1:{port}"
        finally:
            server.terminate()
            server.wait()


def page(results: dict[str, Any]) -> str:
    """The rows of the benchmark's page."""
    head = (
        "| case | burst | permits | rate used | most in a window above `rate * t` | as returned | "
        "permits per caller: fewest, median, most | longest overtaking | longest wait |\n"
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |\n"
    )
    lines = [
        f"| {r['case']} | {r['burst']} | {r['permits']:,} | {r['used']:.1%} | {r['most']:.2f} | "
        f"{r['most_returned']:.2f} | {r['fewest']}, {r['median']:g}, {r['highest']} | "
        f"{r['overtaken_s']:.3g} s | {r['wait_max_s']:.3g} s |"
        for r in results["cases"]
    ]
    return head + "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cases", nargs="*", choices=CASES, default=list(CASES))
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--permits", type=int, default=2000, help="of the overhead")
    parser.add_argument("--out", type=Path, default=RESULTS / "limiter.json")
    parser.add_argument("--worker", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        name, store, seconds, out = options.worker
        play(CASES[name], store, float(seconds), Path(out))
    results: dict[str, Any] = {"seconds": options.seconds, "cases": [], "overhead": {}}
    results["machine"] = f"Python {platform.python_version()}, {os.cpu_count()} cores"
    results["versions"] = {name: version(name) for name in ("limits", "redis")}
    with redis_server() as url, tempfile.TemporaryDirectory() as folder:
        for number, name in enumerate(options.cases):
            case = CASES[name]
            if case.subject.startswith("pyrate") and not importlib.util.find_spec("pyrate_limiter"):
                print(f"{name}: pyrate-limiter is not installed")
                continue
            store = f"file://{folder}" if case.subject == "file" else f"{url}/{number}"
            if case.subject == "pyrate-sqlite":
                store = f"{folder}/pyrate.sqlite"
            results["cases"].append(measure(name, case, store, options.seconds))
            print(page({"cases": results["cases"][-1:]}).splitlines()[-1], flush=True)
            for file in Path(folder).iterdir():
                file.unlink()
        for name, store in {"file": f"file://{folder}", "redis": f"{url}/15"}.items():
            results["overhead"][name] = asyncio.run(overhead(store, options.permits))
    results["load"] = os.getloadavg()[0]
    print(results["overhead"])
    options.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(page(results))


if __name__ == "__main__":
    main()
