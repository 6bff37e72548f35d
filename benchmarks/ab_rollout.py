"""A/B tests looked at after each sample: false positives, power, and whole roll-outs.

Compares the betting test of `ludus.evaluate.sequential` with a z-test that is looked at just as
often, a z-test of a fixed size, and the tests of the package ville, where it is installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import platform
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from ab_traffic import Arm, Outcome, Traffic, simulate
from numpy.typing import NDArray

from ludus.evaluate.sequential import Difference
from ludus.services.model.rollout.events import RolloutSettings

RESULTS = Path(__file__).parents[1] / "docs" / "benchmarks" / "ab-rollout.json"
Z = statistics.NormalDist()
ALPHA = 0.05
FIRST_LOOK = 20
"""Of the z-test, whose variance estimate needs some samples of each variant."""

Scores = NDArray[np.float64]
Draw = Callable[[np.random.Generator, int], Scores]


def coin(rate: float) -> Draw:
    return lambda draw, num: (draw.random(num) < rate).astype(float)


def beta(mean: float, weight: float) -> Draw:
    return lambda draw, num: draw.beta(mean * weight, (1 - mean) * weight, num)


def stars(*weights: float) -> Draw:
    """Scores 0, 0.25, ... 1 with these probabilities."""
    return lambda draw, num: draw.choice(len(weights), num, p=weights) / (len(weights) - 1)


Test = Callable[[Scores, NDArray[np.bool_], float], tuple[int, int] | None]
"""First sample at which the test rejects, and the sign of the difference; None: never."""


def betting(y: Scores, is_b: NDArray[np.bool_], share: float) -> tuple[int, int] | None:
    test = Difference()
    for n, (value, b) in enumerate(zip(y.tolist(), is_b.tolist(), strict=True), 1):
        if test.add(b, value, share) is None:
            continue
        if test.above.rejects(ALPHA / 2):
            return n, 1
        if test.below.rejects(ALPHA / 2):
            return n, -1
    return None


def z_peeking(y: Scores, is_b: NDArray[np.bool_], share: float) -> tuple[int, int] | None:
    z, num = z_statistics(y, is_b)
    hits = np.flatnonzero((np.abs(z) > Z.inv_cdf(1 - ALPHA / 2)) & (num >= FIRST_LOOK))
    return (int(hits[0]) + 1, int(np.sign(z[hits[0]]))) if hits.size else None


def z_fixed(y: Scores, is_b: NDArray[np.bool_], share: float) -> tuple[int, int] | None:
    z, _ = z_statistics(y, is_b)
    return (len(y), int(np.sign(z[-1]))) if abs(z[-1]) > Z.inv_cdf(1 - ALPHA / 2) else None


def z_statistics(y: Scores, is_b: NDArray[np.bool_]) -> tuple[Scores, Scores]:
    """z of the difference of means after each sample, and the samples of the rarer variant."""
    parts = []
    for mask in (is_b, ~is_b):
        num = np.cumsum(mask)
        safe = np.maximum(num, 1)
        mean = np.cumsum(y * mask) / safe
        var = np.maximum(np.cumsum(y * y * mask) / safe - mean**2, 1e-12)
        parts.append((num, mean, var / safe))
    (num_b, mean_b, var_b), (num_a, mean_a, var_a) = parts
    return (mean_b - mean_a) / np.sqrt(var_a + var_b), np.minimum(num_a, num_b).astype(float)


def ville_test() -> Test:
    import ville

    def test(y: Scores, is_b: NDArray[np.bool_], share: float) -> tuple[int, int] | None:
        made = ville.AsymptoticABTest(alpha=ALPHA, propensity=share)
        made.fit(y, is_b.astype(float))
        n = made.stopping_time()
        return None if n is None else (n, int(np.sign(made.lower_[n - 1] + made.upper_[n - 1])))

    return test


def tests() -> dict[str, Test]:
    found: dict[str, Test] = {"betting (ludus)": betting}
    if importlib.util.find_spec("ville"):
        found["ville AsymptoticABTest"] = ville_test()
    found["z-test, looked at after each sample"] = z_peeking
    found["z-test, at the end only"] = z_fixed
    return found


def drawn(a: Draw, b: Draw, num: int, share: float, seed: int) -> tuple[Scores, NDArray[np.bool_]]:
    draw = np.random.default_rng(seed)
    is_b = draw.random(num) < share
    return np.where(is_b, b(draw, num), a(draw, num)), is_b


def wilson(hits: int, num: int) -> tuple[float, float]:
    z, p = Z.inv_cdf(0.975), hits / num
    centre = (p + z * z / (2 * num)) / (1 + z * z / num)
    half = z * math.sqrt(p * (1 - p) / num + z * z / (4 * num * num)) / (1 + z * z / num)
    return max(0.0, centre - half), min(1.0, centre + half)


SAME: dict[str, tuple[Draw, float]] = {
    "yes or no, 50 %": (coin(0.5), 0.5),
    "yes or no, 50 %, share 5 %": (coin(0.5), 0.05),
    "yes or no, 10 %": (coin(0.1), 0.5),
    "yes or no, 1 %": (coin(0.01), 0.5),
    "five stars": (stars(0.1, 0.1, 0.2, 0.3, 0.3), 0.5),
    "beta(8, 2)": (beta(0.8, 10), 0.5),
}

OTHER: dict[str, tuple[Draw, Draw, float]] = {
    "50 % against 60 %": (coin(0.5), coin(0.6), 0.5),
    "50 % against 55 %": (coin(0.5), coin(0.55), 0.5),
    "50 % against 60 %, share 5 %": (coin(0.5), coin(0.6), 0.05),
    "90 % against 92 %": (coin(0.9), coin(0.92), 0.5),
    "five stars, 0.65 against 0.7": (
        stars(0.1, 0.1, 0.2, 0.3, 0.3),
        stars(0.05, 0.1, 0.2, 0.3, 0.35),
        0.5,
    ),
    "beta, 0.80 against 0.82": (beta(0.8, 10), beta(0.82, 10), 0.5),
}


def false_positives(case: str, num_tests: int, length: int) -> list[dict[str, Any]]:
    scores, share = SAME[case]
    hits = dict.fromkeys(tests(), 0)
    for seed in range(num_tests):
        y, is_b = drawn(scores, scores, length, share, seed)
        for name, test in tests().items():
            hits[name] += test(y, is_b, share) is not None
    return [
        {
            "case": case,
            "test": name,
            "rate": count / num_tests,
            "interval": wilson(count, num_tests),
        }
        for name, count in hits.items()
    ]


def fixed_size(a: Draw, b: Draw, share: float) -> int:
    """Samples of both variants with which the fixed z-test has 80 % power."""
    draw = np.random.default_rng(0)
    one, other = a(draw, 400_000), b(draw, 400_000)
    difference = float(other.mean() - one.mean())
    spread = float(one.var() / (1 - share) + other.var() / share)
    needed: float = (Z.inv_cdf(1 - ALPHA / 2) + Z.inv_cdf(0.8)) ** 2 * spread / difference**2
    return math.ceil(needed)


def power(case: str, num_tests: int) -> list[dict[str, Any]]:
    a, b, share = OTHER[case]
    size = fixed_size(a, b, share)
    found = []
    for name, test in tests().items():
        if name.endswith("after each sample"):
            continue  # its false positives make its power meaningless
        ends, wrong = [], 0
        length = size if name.endswith("only") else 4 * size
        for seed in range(num_tests):
            y, is_b = drawn(a, b, length, share, seed)
            got = test(y, is_b, share)
            ends.append(got[0] if got and got[1] > 0 else math.inf)
            wrong += bool(got and got[1] < 0)
        ends.sort()
        found.append(
            {
                "case": case,
                "test": name,
                "size": size,
                "power": [sum(end <= k * size for end in ends) / num_tests for k in (1, 2, 4)],
                "median": ends[num_tests // 2] / size,
                "wrong_sign": wrong / num_tests,
            }
        )
    return found


GOOD = Arm()
ROLLOUTS: dict[str, tuple[Arm, Arm, Traffic]] = {
    "equal": (GOOD, GOOD, Traffic()),
    "equal, 2 % of requests fail": (Arm(fail_rate=0.02), Arm(fail_rate=0.02), Traffic()),
    "equal, sessions of 8 turns with alike scores": (
        GOOD,
        GOOD,
        Traffic(turns=8, session_spread=0.7),
    ),
    "equal, challenger scored half as often, 10 min later": (
        GOOD,
        Arm(scored=0.25, delay_s=600),
        Traffic(),
    ),
    "better: 60 % against 50 %": (GOOD, Arm(score=lambda d: float(d.random() < 0.6)), Traffic()),
    "worse: 40 % against 50 %": (GOOD, Arm(score=lambda d: float(d.random() < 0.4)), Traffic()),
    "all requests fail": (GOOD, Arm(fail_rate=1.0), Traffic()),
    "10 % of requests fail": (GOOD, Arm(fail_rate=0.1), Traffic()),
    "3 % of requests fail": (GOOD, Arm(fail_rate=0.03), Traffic()),
    "twice as slow": (GOOD, Arm(median_s=2.0), Traffic()),
    "1.7 times as slow": (GOOD, Arm(median_s=1.7), Traffic()),
}


def rollouts(case: str, num: int, num_requests: int) -> dict[str, Any]:
    champion, challenger, traffic = ROLLOUTS[case]
    settings = RolloutSettings()
    played: list[Outcome] = [
        simulate(settings, champion, challenger, num_requests, seed, traffic) for seed in range(num)
    ]
    ends: dict[str, int] = {}
    for outcome in played:
        cause = outcome.reason.partition(":")[0]
        why = f" ({cause})" if outcome.action == "roll_back" else ""
        ends[outcome.action + why] = ends.get(outcome.action + why, 0) + 1
    done = [outcome for outcome in played if outcome.action != "running"]
    return {
        "case": case,
        "num": num,
        "requests": num_requests,
        "ends": {key: count / num for key, count in sorted(ends.items(), key=lambda i: -i[1])},
        "challenged": quartiles([float(outcome.num_challenged) for outcome in done]),
        "hours": quartiles([outcome.seconds / 3600 for outcome in done]),
    }


def quartiles(values: list[float]) -> list[float] | None:
    """Median, and the 95th of 100."""
    if not values:
        return None
    values = sorted(values)
    return [values[len(values) // 2], values[min(len(values) - 1, int(0.95 * len(values)))]]


def page(results: dict[str, Any]) -> str:
    """The tables of the benchmark's page."""
    lines = ["| scores | test | false positives | 95 % interval |", "|---|---|---|---|"]
    lines += [
        f"| {r['case']} | {r['test']} | {r['rate']:.1%} | {r['interval'][0]:.1%} to "
        f"{r['interval'][1]:.1%} |"
        for r in results["same"]
    ]
    lines += [
        "",
        "| scores | test | samples N of the fixed test | power at N | at 2 N | at 4 N | "
        "median of samples | wrong sign |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for r in results["other"]:
        fixed = r["test"].endswith("only")
        powers = [f"{p:.0%}" for p in r["power"]]
        told = [powers[0], "", "", "N"] if fixed else [*powers, f"{r['median']:.2f} N"]
        lines.append(
            f"| {r['case']} | {r['test']} | {r['size']:,} | {' | '.join(told)} | "
            f"{r['wrong_sign']:.1%} |"
        )
    lines += [
        "",
        "| challenger | ends | requests of the challenger until then: median, 95 % | hours |",
        "|---|---|---|---|",
    ]
    for r in results["rollouts"]:
        ends = ", ".join(f"{key} {share:.1%}" for key, share in r["ends"].items())
        sizes = [
            "" if not r[key] else " / ".join(f"{value:{form}}" for value in r[key])
            for key, form in (("challenged", ",.0f"), ("hours", ".2f"))
        ]
        lines.append(f"| {r['case']} | {ends} | {sizes[0]} | {sizes[1]} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--tests", type=int, default=1000, help="A/A tests a case")
    parser.add_argument("--rollouts", type=int, default=400, help="of the first case")
    parser.add_argument("--length", type=int, default=5000, help="samples of an A/A test")
    parser.add_argument("--power-tests", type=int, default=400)
    parser.add_argument("--requests", type=int, default=10_000, help="of a simulated roll-out")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    started = time.perf_counter()
    with ProcessPoolExecutor(options.processes) as pool:
        same = [pool.submit(false_positives, c, options.tests, options.length) for c in SAME]
        other = [pool.submit(power, case, options.power_tests) for case in OTHER]
        played = [
            pool.submit(rollouts, case, num_of(case, options.rollouts), options.requests)
            for case in ROLLOUTS
        ]
        results: dict[str, Any] = {
            "tests": options.tests,
            "length": options.length,
            "power_tests": options.power_tests,
            "same": [row for future in same for row in future.result()],
            "other": [row for future in other for row in future.result()],
            "rollouts": [future.result() for future in played],
        }
    results["machine"] = f"Python {platform.python_version()}, {os.cpu_count()} cores"
    results["versions"] = {
        name: version(name) for name in ("numpy", "ville") if importlib.util.find_spec(name)
    }
    results["seconds"] = round(time.perf_counter() - started)
    options.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(page(results))


def num_of(case: str, num: int) -> int:
    """Roll-outs to play: the wrong ends of equal models are rare, so they need most."""
    return num if case == "equal" else max(1, num // 4)


if __name__ == "__main__":
    main()
