"""A GRPO step on a CPU with the native code and in plain torch: what a C compiler brings.

    python benchmarks/native.py [--threads 1] [--repeats 7] [--quick]

*native*: the kernels of sampler and learner, built by the system's C compiler. *torch*:
`LUDUS_NATIVE=0`, the path of a machine without a compiler. Each program is a process of its own, on
the same weights and tasks; both keep their process, and take their steps in turns.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import Spread, arguments, clock, machine, make_model, ratios, rounds, tabulate, write
from fixed import LudusSteps, Work

CASES = [
    ("0.9 M", Work(prompt=64, turn=64)),
    ("0.9 M", Work(prompt=64, turn=16, turns=8)),
    ("5.8 M", Work(prompt=64, turn=64)),
]
PROGRAMS = {"native": "1", "torch": "0"}


def serve(case: int, threads: int) -> None:
    """Take a step for each line of standard input; print its seconds."""
    name, work = CASES[case]
    with tempfile.TemporaryDirectory() as folder:
        steps = LudusSteps(make_model(name), work, Path(folder), threads=threads)
        for _ in sys.stdin:
            start = clock()
            metrics = steps.step()
            row = {"step": clock() - start, "rollout": metrics["time/rollout_s"]}
            print(json.dumps(row), flush=True)


def measure(case: int, threads: int, repeats: int) -> dict[str, Any]:
    programs = {
        name: subprocess.Popen(
            [sys.executable, __file__, "--threads", str(threads), "--serve", str(case)],
            env={**os.environ, "LUDUS_NATIVE": value},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for name, value in PROGRAMS.items()
    }  # fmt: skip
    seconds: dict[str, list[float]] = {name: [] for name in PROGRAMS}
    for number, name in rounds(PROGRAMS, repeats):
        pipes = programs[name]
        assert pipes.stdin
        assert pipes.stdout
        pipes.stdin.write("\n")
        pipes.stdin.flush()
        row = json.loads(pipes.stdout.readline())
        if number >= 0:
            seconds[name].append(row["step"])
        print(CASES[case][0], number, name, row, flush=True)
    for program in programs.values():
        program.communicate()
    return {"model": CASES[case][0], "work": CASES[case][1].show(), **seconds}


def main() -> None:
    if "--serve" in sys.argv:
        place = sys.argv.index("--serve")
        case = int(sys.argv[place + 1])
        del sys.argv[place : place + 2]
        return serve(case, arguments(__doc__ or "").threads)
    args = arguments(__doc__ or "")
    facts = machine(args.threads)
    cases = range(1 if args.quick else len(CASES))
    rows = [measure(case, args.threads, args.repeats) for case in cases]
    if not args.quick:
        write("native", page(rows, args.repeats), facts | {"repeats": args.repeats}, rows)
    return None


def page(rows: list[dict[str, Any]], repeats: int) -> str:
    table = tabulate(
        rows,
        ("model", lambda row: row["model"]),
        ("work of a step", lambda row: row["work"]),
        ("native, s", lambda row: Spread.of(row["native"]).show(".2f")),
        ("torch, s", lambda row: Spread.of(row["torch"]).show(".2f")),
        ("torch / native", lambda row: ratios(row["torch"], row["native"]).bold()),
    )
    told = (__doc__ or "").partition("\n\n")[2].partition("\n\n")[2]
    told += f"\nMedians (and quartiles) of {repeats} steps, after one that warms up."
    return f"# Native code\n\n{told}\n\n{table}\n"


if __name__ == "__main__":
    main()
