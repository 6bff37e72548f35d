"""`ludus doctor`: check this machine, and print what to install or change.

Every check runs the real thing: it imports packages, multiplies with torch, writes with SQLite.
Checks that may crash or hang run in a subprocess. This process imports nothing heavy, so the doctor
works on machines where torch fails.
"""

from __future__ import annotations

import asyncio
import json
import os
import platform
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, metadata, requires, version
from pathlib import Path
from typing import Any, Literal

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from ludus.core.machine import machine_memory
from ludus.core.modules import DISTRIBUTION, extra_of
from ludus.sandbox.attacks import Outcome, attack_all
from ludus.sandbox.jail import Jail
from ludus.sandbox.layers import layers

MIN_MEMORY_GIB = 4.0
MIN_DISK_GIB = 2.0
MIN_SQLITE = (3, 35)
"""The first release with RETURNING, which SQLAlchemy uses; WAL is older."""
TIMEOUT_S = 180.0
SKIPPED_EXTRAS = ("all", "dev")
"""Extras that the doctor skips."""


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one check; `fix` says how to correct a failure.

    ludus does not work if an `essential` check fails.
    """

    name: str
    ok: bool
    detail: str
    fix: str = ""
    essential: bool = False


def run_doctor(
    runs_dir: str | Path = "runs", begins: Callable[[str], object] = lambda _: None
) -> list[Check]:
    """Run all checks, in order of importance.

    Args:
        runs_dir: the folder for runs.
        begins: called with the name of each check at its start, from threads.
    """
    folder = Path(runs_dir)
    jobs: dict[str, Callable[[], Sequence[Check]]] = {
        "Python": lambda: [check_python()],
        "packages": check_packages,
        "the machine": lambda: [check_machine(), check_disk(folder), check_sqlite(folder)],
        "the sandbox": check_sandbox,
        "torch": lambda: _if_installed("torch", check_torch),
        "torch's threads": lambda: _if_installed("torch", check_threads),
        "native code, which a compiler builds once": lambda: _if_installed("torch", check_native),
        "transformers": lambda: _if_installed("transformers", check_transformers),
        "torchvision": lambda: _if_installed("torchvision", check_companion),
        "torchaudio": lambda: _if_installed("torchaudio", check_companion),
        "PostgreSQL": lambda: _if_installed("psycopg", check_postgres),
        "wandb": lambda: _if_installed("wandb", check_wandb),
    }

    def run(name: str) -> Sequence[Check]:
        begins(name)
        return jobs[name]()

    with ThreadPoolExecutor(max_workers=2) as pool:
        return [check for checks in pool.map(run, jobs) for check in checks]


def exit_code(checks: Sequence[Check]) -> int:
    """Returns 1 if an essential check failed, else 0."""
    return int(any(check.essential and not check.ok for check in checks))


def render_checks(checks: Sequence[Check]) -> RenderableType:
    """Returns a table of states (ok, note: not essential, broken) and fixes."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    for check in checks:
        state = ("ok", "green") if check.ok else ("note", "yellow")
        if not check.ok and check.essential:
            state = ("broken", "bold red")
        detail = Text(check.detail)
        if check.fix:
            detail.append(f"\n-> {check.fix}", style="bold")
        table.add_row(Text(*state), Text(check.name), detail)
    return table


# Python and packages


def check_python() -> Check:
    """Compare Python's version with the package's requirement."""
    current = platform.python_version()
    try:
        required = metadata(DISTRIBUTION)["Requires-Python"] or ""
    except PackageNotFoundError:
        detail = f"{current}; {DISTRIBUTION} is not installed"
        return Check("python", False, detail, "pip install -e .")
    ok = SpecifierSet(required).contains(current, prereleases=True)
    fix = "" if ok else f"use Python {required}"
    return Check("python", ok, f"{current} ({platform.platform()})", fix, essential=True)


def check_packages() -> list[Check]:
    """Check the core's dependencies, then each extra's: installed, absent, or too old."""
    try:
        lines = requires(DISTRIBUTION) or []
    except PackageNotFoundError:
        return []
    groups: dict[str, list[Requirement]] = {"": []}
    for line in lines:
        requirement = Requirement(line)
        groups.setdefault(extra_of(requirement), []).append(requirement)
    return [
        _check_group(extra, requirements)
        for extra, requirements in sorted(groups.items())
        if extra not in SKIPPED_EXTRAS
    ]


def _check_group(extra: str, requirements: list[Requirement]) -> Check:
    absent, installed = [], []
    for requirement in requirements:
        current = _version(requirement.name)
        if current is None:
            absent.append(requirement.name)
        elif not requirement.specifier.contains(current, prereleases=True):
            absent.append(f"{requirement.name} {current} (needs {requirement.specifier})")
        else:
            installed.append(f"{requirement.name} {current}")
    target = f"'{DISTRIBUTION}[{extra}]'" if extra else DISTRIBUTION
    detail = f"absent: {', '.join(absent)}" if absent else ", ".join(installed)
    fix = f"pip install {target}" if absent else ""
    name = f"extra {extra}" if extra else "core packages"
    return Check(name, not absent, detail, fix, essential=not extra)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _if_installed(package: str, check: Callable[[str], Check]) -> list[Check]:
    return [check(package)] if _version(package) else []


# The machine


def check_machine() -> Check:
    """Check the cores and memory available to this process, with container limits."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = float(len(affinity(0)) if affinity else os.cpu_count() or 1)
    quota, _, period = _read("/sys/fs/cgroup/cpu.max").partition(" ")
    if quota.isdigit() and period.isdigit():
        cores = min(cores, int(quota) / int(period))
    memory = machine_memory()
    ok = memory >= MIN_MEMORY_GIB * 2**30
    fix = "" if ok else f"small recipes need about {MIN_MEMORY_GIB:g} GiB"
    return Check("machine", ok, f"{cores:g} cores, {memory / 2**30:.1f} GiB of memory", fix)


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def check_disk(runs_dir: Path) -> Check:
    """Check the free disk space for runs."""
    free = shutil.disk_usage(_existing(runs_dir)).free / 2**30
    ok = free >= MIN_DISK_GIB
    fix = "" if ok else "free some space, or choose another folder: runs_dir=..."
    return Check("disk", ok, f"{free:.1f} GiB free for {runs_dir}", fix)


def check_sqlite(runs_dir: Path) -> Check:
    """Check that the default run store works: reading while another connection writes."""
    name, engine = "run store", f"SQLite {sqlite3.sqlite_version}"
    elsewhere = "choose a folder on a local disk (runs_dir=...), or a PostgreSQL store"
    if sqlite3.sqlite_version_info < MIN_SQLITE:
        fix = "use a Python built with a newer SQLite"
        return Check(name, False, f"{engine} is too old", fix, essential=True)
    try:
        with tempfile.TemporaryDirectory(dir=_existing(runs_dir), prefix=".doctor-") as folder:
            path = Path(folder) / "store.db"
            with closing(sqlite3.connect(path)) as writer, closing(sqlite3.connect(path)) as reader:
                [[mode]] = writer.execute("PRAGMA journal_mode=WAL").fetchall()
                writer.execute("CREATE TABLE t (x)")
                writer.execute("INSERT INTO t VALUES (1)")
                [[rows]] = reader.execute("SELECT count(*) FROM t").fetchall()
                writer.commit()
    except (OSError, sqlite3.Error) as error:
        return Check(name, False, f"{engine} cannot write to {runs_dir}: {error}", elsewhere, True)
    ok = mode == "wal" and rows == 0
    detail = f"{engine}, readable while written" if ok else f"{engine}: no WAL in {runs_dir}"
    return Check(name, ok, detail, "" if ok else elsewhere, essential=True)


def _existing(folder: Path) -> Path:
    """Returns the folder or its nearest existing parent."""
    place = folder.absolute()
    while not place.is_dir():
        place = place.parent
    return place


# The sandbox


def check_sandbox() -> list[Check]:
    """Check each layer between untrusted code and this machine."""
    return [
        Check(f"sandbox: {layer.name}", layer.ok, layer.detail, layer.fix) for layer in layers()
    ]


def run_attacks(
    begins: Callable[[str], object] = lambda _: None,
    isolation: Literal["jail", "gvisor"] = "jail",
) -> list[Check]:
    """Attack the sandbox: a check for each attack, essential unless only a cgroup stops it.

    Errors: ConfigError where the sandbox refuses to run.
    """

    async def attack() -> Sequence[Outcome]:
        async with Jail(isolation) as jail:
            return await attack_all(jail, begins=begins)

    checks = []
    for outcome in asyncio.run(attack()):
        held, needed = outcome.held, not outcome.attack.cgroup
        detail = f"{'stopped' if held else 'NOT stopped'} ({outcome.seconds:.2f} s): "
        fix = "do not run untrusted code here; report it" if needed else "see sandbox: cgroup"
        name = f"attack: {outcome.attack.name}"
        checks.append(Check(name, held, detail + outcome.detail, "" if held else fix, needed))
    return checks


# Checks in a subprocess


@dataclass(frozen=True, slots=True)
class Probe:
    """The JSON that a script printed as its last line, or the reason of a failure."""

    result: dict[str, Any]
    problem: str = ""


def probe(script: str, timeout_s: float = TIMEOUT_S) -> Probe:
    """Run a script that prints one JSON object, in a new Python process."""
    command = [sys.executable, "-c", script]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return Probe({}, f"no answer after {timeout_s:g} s")
    if done.returncode < 0:
        return Probe({}, f"killed by signal {-done.returncode}")
    if done.returncode:
        return Probe({}, (done.stderr.strip().splitlines() or ["failed"])[-1])
    return Probe(json.loads(done.stdout.strip().splitlines()[-1]))


TORCH = """
import json, torch
a = torch.arange(64 * 64, dtype=torch.float32).reshape(64, 64) % 7
exact = (a.long() @ a.long()).float()
def right(device, dtype):
    b = a.to(device, dtype)
    error = ((b @ b).float().cpu() - exact).abs().max()
    return bool(error <= (0 if dtype == torch.float32 else exact.max() / 128))
gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
devices = ["cpu"] + [f"cuda:{i}" for i in range(len(gpus))]
print(json.dumps({
    "version": torch.__version__, "gpus": gpus, "threads": torch.get_num_threads(),
    "capability": torch.backends.cpu.get_cpu_capability(),
    "wrong": [f"{d} {t}" for d in devices for t in (torch.float32, torch.bfloat16)
              if not right(d, t)]}))
"""


def check_torch(package: str) -> Check:
    """Check torch's build, its devices, and matrix products in float32 and bfloat16."""
    probed = probe(TORCH)
    if probed.problem:
        fix = "reinstall torch: pip install --force-reinstall torch"
        return Check(package, False, f"cannot be used: {probed.problem}", fix, essential=True)
    torch = probed.result
    gpus = ", ".join(torch["gpus"]) or "no GPU"
    detail = f"{torch['version']}, {torch['capability']}, {torch['threads']} threads, {gpus}"
    if torch["wrong"]:
        detail += f"; wrong products: {', '.join(torch['wrong'])}"
        return Check(package, False, detail, "install another build of torch", essential=True)
    return Check(package, True, f"{detail}; float32 and bfloat16 products are correct")


THREADS = """
import json, os, sys
import ludus.models
print(json.dumps({"early": "torch" not in sys.modules, "policy": os.environ["OMP_WAIT_POLICY"]}))
"""


def check_threads(package: str) -> Check:
    """Check that torch's idle threads sleep and leave the cores to environments."""
    probed = probe(THREADS)
    name = "OMP_WAIT_POLICY"
    if probed.problem:
        return Check(name, False, f"ludus.models: {probed.problem}", "reinstall ludus", True)
    policy, early = probed.result["policy"], probed.result["early"]
    if policy.upper() != "PASSIVE":
        return Check(name, False, f"{policy}: idle threads spin", f"export {name}=PASSIVE")
    when = "set before torch is loaded" if early else "but set after torch was loaded"
    return Check(name, early, f"PASSIVE, {when}", "" if early else f"export {name}=PASSIVE")


NATIVE = """
import json
from ludus.models.decoders import native
print(json.dumps({"absence": native.absence(), "remedy": native.REMEDY}))
"""


def check_native(package: str) -> Check:
    """Check that a C compiler builds the kernels of sampler and learner for the CPU."""
    probed = probe(NATIVE)
    absence = probed.problem or probed.result["absence"]
    if absence:
        fix = probed.result.get("remedy", "reinstall ludus")
        return Check("native code", False, f"none, {package} computes on a CPU: {absence}", fix)
    return Check("native code", True, "compiled: sampler and learner use it on a CPU")


def check_transformers(package: str) -> Check:
    """Check that a model's code imports, with all dependencies of transformers."""
    probed = probe(
        "import json, transformers, transformers.models.qwen3.modeling_qwen3\n"
        "print(json.dumps({'version': transformers.__version__}))"
    )
    if probed.problem:
        fix = "see torchvision and torchaudio, or: pip install --force-reinstall transformers"
        return Check(package, False, f"cannot be used: {probed.problem}", fix, essential=True)
    return Check(package, True, f"{probed.result['version']}, imports its models")


def check_companion(package: str) -> Check:
    """Check torchvision or torchaudio: optional, but a wrong build breaks transformers."""
    probed = probe(f"import json, {package}\nprint(json.dumps({{'ok': True}}))")
    versions = f"{_version(package)} beside torch {_version('torch')}"
    if probed.problem:
        fix = f"pip uninstall {package} (ludus does not need it)"
        return Check(package, False, f"{versions} does not import: {probed.problem}", fix, True)
    return Check(package, True, f"{versions}, not needed")


def check_postgres(package: str) -> Check:
    """Check that the PostgreSQL client and its C library load."""
    probed = probe("import json, psycopg\nprint(json.dumps({'libpq': psycopg.pq.version()}))")
    if probed.problem:
        fix = f"pip install '{DISTRIBUTION}[postgres]'"
        return Check("PostgreSQL client", False, f"cannot be used: {probed.problem}", fix)
    libpq = probed.result["libpq"] // 10000
    return Check("PostgreSQL client", True, f"{package} {_version(package)}, libpq {libpq}")


def check_wandb(package: str) -> Check:
    """Report the folder of Weights & Biases. The login is not checked."""
    detail = (
        f"{_version(package)}: the sink writes to the run's folder; upload with `wandb sync`, "
        "or set `mode: online`"
    )
    return Check(package, True, detail)
