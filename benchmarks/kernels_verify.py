"""Kernels compiled and verified a minute on one core: `python benchmarks/kernels_verify.py`.

The honest kernels of ludus' expert for ten generated problems of each kind, one after the other,
with the references and the start of all processes. The process and its children have one core.
Each round begins with empty caches.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import time
from collections import defaultdict

from ludus.kernels.expert import WAYS, kernels_for
from ludus.kernels.verify.problem import KernelProblem
from ludus.kernels.verify.verifier import KernelVerifier
from ludus.tasks.kernels.generated import read_generated


async def verify(seed: int) -> tuple[int, float, dict[str, list[float]]]:
    """Returns the number of kernels, the seconds of all, and those of each by stage."""
    stages: dict[str, list[float]] = defaultdict(list)
    problems = read_generated(10 * len(WAYS), kinds=list(WAYS), first_seed=1000 * seed)  # type: ignore[arg-type]
    count, began = 0, time.perf_counter()
    async with KernelVerifier(parallel=1) as verifier:
        for task in problems:
            for source in kernels_for(task):
                found = await verifier.verify(source, KernelProblem.of(task), seed=count)
                assert found.ok, (task.id, found.message)
                for stage, seconds in found.seconds.items():
                    stages[stage].append(seconds)
                count += 1
    return count, time.perf_counter() - began, stages


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    for number in range(rounds):
        load = os.getloadavg()[0]
        count, seconds, stages = asyncio.run(verify(number))
        means = ", ".join(f"{s} {1e3 * statistics.mean(v):.1f}" for s, v in stages.items())
        median = 1e3 * statistics.median(stages["compile"])
        print(
            f"{count} kernels in {seconds:.1f} s: {60 * count / seconds:.0f} a minute; "
            f"compile p50 {median:.1f} ms; means in ms: {means}; load {load:.1f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
