"""Speed of the sandbox, and what it leaves: writes docs/benchmarks/sandbox.json and sandbox.md.

    python benchmarks/sandbox.py --calls 2000

Calls a second of two callers at the same time, as many as this machine has cores, and the time of a
call, for warm Python, cold Python, the other languages, and gVisor where it is installed; the
overtime of calls that never end; processes, mounts, files, cgroups and memory before and after all
calls.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import platform
import shutil
import statistics
import subprocess
import time
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ludus.sandbox import cgroups
from ludus.sandbox.attacks import descendants
from ludus.sandbox.base import Code, Limits
from ludus.sandbox.jail import Jail
from ludus.sandbox.languages import LANGUAGES
from ludus.sandbox.layers import check_gvisor

RESULTS = Path(__file__).parents[1] / "docs" / "benchmarks"
CALLERS = 2
PYTHON = Code("print(1 + 1)")
SYMPY = Code(
    "import sympy, numpy\nx = sympy.Symbol('x')\nprint(sympy.diff(x**2, x), numpy.ones(2))"
)
CODES = {
    "bash": Code("echo 2", "bash"),
    "c": Code('#include <stdio.h>\nint main(void) { puts("2"); }', "c"),
    "javascript": Code("console.log(2)", "javascript"),
}


async def measure(jail: Jail, code: Code, num_calls: int) -> dict[str, float]:
    """Calls a second of CALLERS callers, and milliseconds of a call."""
    times: list[float] = []

    async def caller(number: int) -> None:
        for _ in range(number):
            began = time.perf_counter()
            result = await jail.run(code, Limits(run_s=60))
            times.append(1000 * (time.perf_counter() - began))
            assert result.status == "finished", result

    await asyncio.gather(*(caller(1) for _ in range(CALLERS)))  # the slots are open
    times.clear()
    began = time.perf_counter()
    used_s = processor_s()
    await asyncio.gather(*(caller(num_calls // CALLERS) for _ in range(CALLERS)))
    seconds = time.perf_counter() - began
    used_s = processor_s() - used_s
    ordered = sorted(times)
    return {
        "calls": len(times),
        "calls_per_s": len(times) / seconds,
        "p50_ms": statistics.median(ordered),
        "p99_ms": ordered[int(0.99 * (len(ordered) - 1))],
        "processor_ms": 1000 * used_s / len(times),
    }


def processor_s() -> float:
    """Seconds of processor time of this process and of all below it, those that ended included."""
    ticks = 0
    for pid in {os.getpid(), *descendants()}:
        with suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += sum(map(int, fields[11:13] if pid == os.getpid() else fields[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


async def overtime(jail: Jail, num_calls: int) -> dict[str, float]:
    """Seconds that calls which never end take beyond their limit."""
    late = []
    for number in range(num_calls):
        code = Code(("while True: pass", "import time; time.sleep(60)")[number % 2])
        began = time.perf_counter()
        await jail.run(code, Limits(run_s=0.5))
        late.append(time.perf_counter() - began - 0.5)
    return {"calls": num_calls, "p50_s": statistics.median(late), "max_s": max(late)}


def held() -> dict[str, int]:
    """Resources that this process holds on the machine."""
    gc.collect()
    status = Path("/proc/self/status").read_text()
    groups = [
        path for parent, _ in cgroups._parents() for path in parent.glob(f"ludus-{os.getpid()}-*")
    ]
    return {
        "processes": len(set(descendants())),
        "mounts, others' included": len(Path("/proc/self/mounts").read_text().splitlines()),
        "open files": len(os.listdir("/proc/self/fd")),
        "files in /tmp, others' included": len(os.listdir("/tmp")),
        "cgroups": len(groups),
        "memory, MB": int(status.split("VmRSS:")[1].split()[0]) // 1024,
    }


async def run(num_calls: int) -> dict[str, Any]:
    """All measurements."""
    found: dict[str, Any] = {"rows": {}}
    async with Jail(max_runs=CALLERS) as jail:
        began = time.perf_counter()
        await jail.run(PYTHON)
        found["start_s"] = time.perf_counter() - began
        await measure(jail, PYTHON, 20)
        before = held()
        found["rows"]["python, warm"] = await measure(jail, PYTHON, num_calls)
        found["rows"]["python, warm, numpy and sympy"] = await measure(
            jail, SYMPY, min(200, num_calls)
        )
        for name, code in CODES.items():
            if LANGUAGES[name].is_installed:
                found["rows"][name] = await measure(jail, code, 30)
        found["overtime"] = await overtime(jail, 10)
        await measure(jail, PYTHON, 20)  # the slots are open again
        found["held"] = {"before": before, "after": held()}
    async with Jail(max_runs=CALLERS, warm=False) as jail:
        found["rows"]["python, cold"] = await measure(jail, PYTHON, 30)
        found["rows"]["python, cold, numpy and sympy"] = await measure(jail, SYMPY, 10)
    found["held"]["closed"] = held()
    if check_gvisor().ok:
        found["gvisor"] = await run_gvisor()
    return found


async def run_gvisor() -> dict[str, Any]:
    """The same calls with a gVisor sandbox for each: always cold."""
    codes = {"python": (PYTHON, 30), "python, numpy and sympy": (SYMPY, 4), "c": (CODES["c"], 8)}
    load = f"{os.getloadavg()[0]:.1f} (others' included)"
    found: dict[str, Any] = {"version": gvisor_version(), "load": load, "rows": {}}
    async with Jail("gvisor", max_runs=CALLERS) as jail:
        for name, (code, calls) in codes.items():
            if code.language == "python" or LANGUAGES[code.language].is_installed:
                row = await measure(jail, code, calls)
                del row["processor_ms"]  # gVisor's processes are not below this one
                found["rows"][f"{name}, gVisor"] = row
    return found


def facts() -> dict[str, str]:
    """The machine and the versions."""
    names = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    return {
        "processor": f"{(names or [platform.machine()])[0]}, {os.cpu_count()} cores",
        "load": f"{os.getloadavg()[0]:.1f} (others' included)",
        "kernel": platform.release(),
        "python": platform.python_version(),
        "numpy": version("numpy"),
        "sympy": version("sympy"),
        "user": "root" if os.geteuid() == 0 else "ordinary",
        "bubblewrap": shutil.which("bwrap") or "",
    }


def gvisor_version() -> str:
    """The version of `runsc`."""
    told = subprocess.run(["runsc", "--version"], capture_output=True, text=True, check=True)
    return told.stdout.split()[2]


def page(found: dict[str, Any]) -> str:
    """The measurements as a page."""
    lines = ["# Sandbox: speed, and what is left", ""]
    lines += ["`python benchmarks/sandbox.py` writes this page.", ""]
    lines += [", ".join(f"{name} {value}" for name, value in found["facts"].items()) + ".", ""]
    lines += [f"{CALLERS} callers at the same time; each call has namespaces of its own.", ""]
    lines += [
        "| call | calls | calls/s | p50, ms | p99, ms | processor, ms |",
        "|---|---|---|---|---|---|",
    ]
    stronger = found.get("gvisor", {"rows": {}})
    for name, row in (found["rows"] | stronger["rows"]).items():
        digits = 0 if row["calls_per_s"] >= 10 else 1
        used = f"{row['processor_ms']:.1f}" if "processor_ms" in row else ""
        shown = f"{row['calls_per_s']:.{digits}f} | {row['p50_ms']:.1f} | {row['p99_ms']:.1f}"
        lines.append(f"| {name} | {row['calls']} | {shown} | {used} |")
    if stronger["rows"]:
        lines += ["", f"gVisor: runsc {stronger['version']}; load {stronger['load']}."]
        lines += ["Each call starts gVisor and Python. Processor time is not measured there."]
    warm = found["rows"]["python, warm"]["processor_ms"]
    lines += ["", "`processor`: time of all processes of a call, the caller's included. By it,"]
    room = f"{1000 * CALLERS / warm:.0f} warm calls/s"
    lines += [f"{CALLERS} cores without other load have room for {room} (computed, not measured)."]
    late = found["overtime"]
    lines += ["", f"Start of the sandbox, packages loaded: {found['start_s']:.2f} s."]
    lines += [
        f"Overtime of {late['calls']} calls that never end: median {late['p50_s']:.3f} s, "
        f"at most {late['max_s']:.3f} s."
    ]
    states = found["held"]
    lines += ["", "| held | before | after all calls | sandbox closed |", "|---|---|---|---|"]
    for name, value in states["before"].items():
        lines.append(f"| {name} | {value} | {states['after'][name]} | {states['closed'][name]} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument("--gvisor", action="store_true", help="measure gVisor, keep the rest")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.gvisor:
        before = options.out / "sandbox.json"
        if not before.is_file():
            raise SystemExit(
                f"--gvisor: it adds to the measurements of {before}, which is not there; measure "
                f"them first: python benchmarks/sandbox.py --out {options.out}"
            )
        if not (gvisor := check_gvisor()).ok:
            raise SystemExit(f"--gvisor: {gvisor.detail}; {gvisor.fix}")
        found = json.loads(before.read_text())
        found["gvisor"] = asyncio.run(run_gvisor())
    else:
        found = asyncio.run(run(options.calls))
        found["facts"] = facts()
    options.out.joinpath("sandbox.json").write_text(json.dumps(found, indent=1) + "\n")
    options.out.joinpath("sandbox.md").write_text(page(found))


if __name__ == "__main__":
    main()
