"""Kernels on a GPU that has no sandbox: values and times, of cubins that were made before.

    python benchmarks/kernels_gpu.py --prepare gpu-kit/kernels.json    # here: NVRTC, the sandbox
    python benchmarks/kernels_gpu.py --run gpu-kit/kernels.json        # there: a device and torch

Honest kernels of the tests for generated problems must pass, and cheats must not; references are
ludus' own, so they run without a jail. Written without a device: `--run` has not run on one yet.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import sys
import time
import types
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from common import tabulate

from ludus.core.errors import DataError
from ludus.kernels.benchmark.benchmarker import Benchmarker
from ludus.kernels.benchmark.work import Parameter, Step, Work
from ludus.kernels.verify.compare import Tensor, Trial
from ludus.kernels.verify.inside import _bytes, _trial
from ludus.kernels.verify.job import trial_seeds
from ludus.kernels.verify.problem import KernelProblem

TRIALS = 6


async def prepare(path: Path, architecture: str, number: int) -> None:
    from ludus.kernels.benchmark.work import cuda_work
    from ludus.kernels.compiler import CudaCompiler
    from ludus.kernels.expert import WAYS, kernels_for
    from ludus.kernels.launches import read_launches
    from ludus.kernels.verify.verifier import KernelVerifier
    from ludus.tasks.kernels.generated import read_generated
    from tests.kernels.verify.cheats import CHEATS, REFERENCE

    cases = [
        (f"{task.id} {i}", KernelProblem.of(task), source)
        for kind in WAYS
        for task in read_generated(number, kinds=[kind])  # type: ignore[list-item]
        for i, source in enumerate(kernels_for(task))
    ]
    cheat = KernelProblem("2 * relu(a) + b", REFERENCE)
    cases += [(f"cheat: {name}", cheat, source) for name, (source, _) in CHEATS.items()]
    found: list[dict[str, Any]] = []
    async with KernelVerifier(parallel=1) as verifier, CudaCompiler(parallel=1) as compiler:
        for name, problem, source in cases:
            told = await verifier.verify(source, problem, seed=1)
            if told.status not in ("passed", "wrong", "crashed"):
                continue
            face = await verifier.interface(problem, seed=1)
            try:
                plan = read_launches(source, face.shapes, face.numbers)
                work = await cuda_work(compiler, source, plan, architecture)
            except DataError:
                continue
            if isinstance(work, Work):
                cubins = [base64.b64encode(module).decode() for module in work.modules]
                case = {"name": name, "reference": problem.reference, "shim": str(told.status)}
                found.append({**case, "work": work.header(), "cubins": cubins})
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"architecture": architecture, "cases": found}))
    print(f"{path}: {len(found)} kernels, {path.stat().st_size / 1e6:.1f} MB")


def read_work(case: dict[str, Any]) -> Work:
    steps = [
        Step(
            step["module"], step["symbol"], tuple(step["grid"]), tuple(step["block"]),
            step["shared"],
            tuple(
                Parameter(value) if kind == "buffer" else Parameter(None, bytes.fromhex(value))
                for kind, value in step["parameters"]
            ),
            step["line"],
        )
        for step in case["work"]["steps"]
    ]  # fmt: skip
    cubins = tuple(base64.b64decode(text) for text in case["cubins"])
    return Work(cubins, tuple(steps), case["work"]["scratch"])


def read_trials(reference: str) -> list[Trial]:
    """The trials of one of ludus' own references, in this process."""
    module: Any = types.ModuleType("reference")
    exec(compile(reference, "reference.py", "exec"), module.__dict__)
    trials = []
    for seed in trial_seeds(1, TRIALS):
        tensors, numbers, out, _ = _trial(module, seed)
        all_of_them = [
            Tensor(name, tuple(t.shape), str(t.dtype).removeprefix("torch."), _bytes(t))
            for name, t in [*tensors, ("out", out)]
        ]
        trials.append(Trial(tuple(all_of_them[:-1]), numbers, all_of_them[-1]))
    return trials


async def run(path: Path, out: Path | None, seconds: float) -> int:
    given = json.loads(path.read_text())
    until, rows = time.monotonic() + seconds, []
    async with Benchmarker(trust_references=True, kernel_s=30) as benchmarker:
        device = await benchmarker.device()
        if device.architecture != given["architecture"]:
            print(f"made for {given['architecture']}, and this is {device}", file=sys.stderr)
            return 1
        for case in given["cases"]:
            if time.monotonic() > until:
                print(f"no time is left after {len(rows)} of {len(given['cases'])} kernels")
                break
            problem = KernelProblem(case["name"], case["reference"])
            trials, honest = read_trials(case["reference"]), not case["name"].startswith("cheat")
            found = await benchmarker.measure(read_work(case), problem, trials, timed=honest)
            agree = (str(found.status) == "passed") == (case["shim"] == "passed")
            row = {"kernel": case["name"], "shim": case["shim"], "device": str(found.status)}
            row |= {"agree": agree, "message": found.message}
            if found.speedups is not None:
                row |= {"speedup": found.speedups.over_eager, "us": 1e6 * found.speedups.kernel_s}
                row |= {"over_compile": found.speedups.over_compile}
            rows.append(row)
            if out is not None:
                facts = {"device": device.name, "copied": device.copied, "kernels": rows}
                out.mkdir(parents=True, exist_ok=True)
                (out / "kernels.json").write_text(json.dumps(facts, indent=1) + "\n")
    columns = [(key, lambda row, key=key: str(row.get(key, ""))) for key in
               ("kernel", "shim", "device", "agree", "us", "speedup", "message")]  # fmt: skip
    print(f"{device.name}: {sum(row['agree'] for row in rows)} of {len(rows)} agree\n")
    print(tabulate(rows, *columns))
    return 0 if all(row["agree"] for row in rows) else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--prepare", type=Path)
    parser.add_argument("--run", type=Path)
    parser.add_argument("--architecture", default="sm_90")
    parser.add_argument("--number", type=int, default=2, help="problems of each kind")
    parser.add_argument("--seconds", type=float, default=150)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.prepare:
        asyncio.run(prepare(args.prepare, args.architecture, args.number))
    elif args.run:
        sys.exit(asyncio.run(run(args.run, args.out, args.seconds)))
    else:
        parser.error("--prepare FILE or --run FILE")
