"""Outputs a second of `ludus serve evaluation`, with batches of 1 and 256.

python benchmarks/evaluation_service.py [SECONDS]

The service runs in its own process with its defaults; the client is AsyncEvaluationClient, with 16
requests at once (batches of 256: 2). Every output and truth is another one.
"""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import time
from importlib.metadata import version
from itertools import count

from ludus import AsyncEvaluationClient


async def measured(url: str, judge: str, batch: int, seconds: float) -> float:
    """Outputs a second."""
    numbers, done = count(1), 0
    lanes = 16 if batch == 1 else 2
    async with AsyncEvaluationClient(url, batch=batch, max_in_flight=lanes) as client:

        async def lane(until: float) -> None:
            nonlocal done
            while time.perf_counter() < until:
                values = [next(numbers) for _ in range(batch)]
                outputs = [rf"So \boxed{{\frac{{{2 * value}}}{{2}}}}" for value in values]
                results = await client.evaluate_many(outputs, [str(v) for v in values], judge)
                assert all(result.scored for result in results)
                done += batch

        async def run(length: float) -> float:
            nonlocal done
            done, started = 0, time.perf_counter()
            await asyncio.gather(*(lane(started + length) for _ in range(lanes)))
            return done / (time.perf_counter() - started)

        await run(1.0)  # starts the processes
        return await run(seconds)


def main() -> None:
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 5.0
    command = [sys.executable, "-m", "ludus", "serve", "evaluation", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as service:
        try:
            assert service.stdout is not None
            found = re.search(r"http://[\d.]+:\d+", service.stdout.readline())
            assert found is not None
            for judge in ("math", "answer"):
                for batch in (1, 256):
                    rate = asyncio.run(measured(found[0], judge, batch, seconds))
                    print(f"{judge}, batches of {batch}: {rate:,.0f} outputs a second")
        finally:
            service.terminate()
    load = os.getloadavg()[0]
    print(f"{os.cpu_count()} cores, load {load:.1f}, math-verify {version('math-verify')}")


if __name__ == "__main__":
    main()
