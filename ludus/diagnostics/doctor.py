"""`ludus doctor`: look at this machine, and say what to install or to change.

Every line is measured here and now: packages are imported, torch multiplies, SQLite writes. What
may crash or hang runs in a process of its own. Nothing heavy is imported in this one, so that the
doctor works where torch does not.
"""

from __future__ import annotations

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
from typing import Any

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

DISTRIBUTION = "ludus-rl"
MIN_MEMORY_GIB = 4.0
MIN_DISK_GIB = 2.0
MIN_SQLITE = (3, 35)
"""The first release with RETURNING, which SQLAlchemy uses; WAL is older."""
TIMEOUT_S = 180.0
NOT_USERS = ("all", "dev")
"""Extras that the doctor does not ask for."""


@dataclass(frozen=True, slots=True)
class Check:
    """One finding: what was looked at, what was found, and, if it is not well, what would mend it.

    An `essential` check that is not ok means that ludus does not work here.
    """

    name: str
    ok: bool
    detail: str
    fix: str = ""
    essential: bool = False


def run_doctor(runs_dir: str | Path = "runs") -> list[Check]:
    """All checks, in the order of their importance. `runs_dir` is where runs would be written."""
    folder = Path(runs_dir)
    jobs: list[Callable[[], Sequence[Check]]] = [
        lambda: [check_python()],
        check_packages,
        lambda: [check_machine(), check_disk(folder), check_sqlite(folder)],
        lambda: _if_installed("torch", check_torch),
        lambda: _if_installed("torch", check_threads),
        lambda: _if_installed("transformers", check_transformers),
        lambda: _if_installed("torchvision", check_companion),
        lambda: _if_installed("torchaudio", check_companion),
        lambda: _if_installed("psycopg", check_postgres),
        lambda: _if_installed("wandb", check_wandb),
    ]
    with ThreadPoolExecutor(max_workers=2) as pool:
        return [check for found in pool.map(lambda job: job(), jobs) for check in found]


def exit_code(checks: Sequence[Check]) -> int:
    """1 if something essential is broken, else 0."""
    return int(any(check.essential and not check.ok for check in checks))


def render_checks(checks: Sequence[Check]) -> RenderableType:
    """A table for a terminal: ok, note (ludus works all the same) or broken, and what to do."""
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
    """The version of Python, against what the package asks for."""
    found = platform.python_version()
    try:
        wanted = metadata(DISTRIBUTION)["Requires-Python"] or ""
    except PackageNotFoundError:
        return Check(
            "python", False, f"{found}; {DISTRIBUTION} is not installed", "pip install -e ."
        )
    ok = SpecifierSet(wanted).contains(found, prereleases=True)
    fix = "" if ok else f"use Python {wanted}"
    return Check("python", ok, f"{found} ({platform.platform()})", fix, essential=True)


def check_packages() -> list[Check]:
    """The core's dependencies, then each extra's: there, absent, or too old."""
    try:
        lines = requires(DISTRIBUTION) or []
    except PackageNotFoundError:
        return []
    groups: dict[str, list[Requirement]] = {"": []}
    for line in lines:
        requirement = Requirement(line)
        groups.setdefault(_extra_of(requirement), []).append(requirement)
    return [
        _check_group(extra, wanted)
        for extra, wanted in sorted(groups.items())
        if extra not in NOT_USERS
    ]


def _extra_of(requirement: Requirement) -> str:
    """The extra whose marker makes the requirement apply; "" for the core's own."""
    marker = str(requirement.marker or "")
    return marker.partition("extra == ")[2].split('"')[1] if "extra == " in marker else ""


def _check_group(extra: str, wanted: list[Requirement]) -> Check:
    absent, found = [], []
    for requirement in wanted:
        has = _version(requirement.name)
        if has is None:
            absent.append(requirement.name)
        elif not requirement.specifier.contains(has, prereleases=True):
            absent.append(f"{requirement.name} {has} (needs {requirement.specifier})")
        else:
            found.append(f"{requirement.name} {has}")
    target = f"'{DISTRIBUTION}[{extra}]'" if extra else DISTRIBUTION
    detail = f"absent: {', '.join(absent)}" if absent else ", ".join(found)
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
    """Cores and memory that this process may use, limits of its container included."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = float(len(affinity(0)) if affinity else os.cpu_count() or 1)
    quota, _, period = _read("/sys/fs/cgroup/cpu.max").partition(" ")
    if quota.isdigit() and period.isdigit():
        cores = min(cores, int(quota) / int(period))
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = _read("/sys/fs/cgroup/memory.max")
    memory = min(memory, int(limit)) if limit.isdigit() else memory
    ok = memory >= MIN_MEMORY_GIB * 2**30
    fix = "" if ok else f"small recipes need about {MIN_MEMORY_GIB:g} GiB"
    return Check("machine", ok, f"{cores:g} cores, {memory / 2**30:.1f} GiB of memory", fix)


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def check_disk(runs_dir: Path) -> Check:
    """Room where runs are written."""
    place = _existing(runs_dir)
    free = shutil.disk_usage(place).free / 2**30
    ok = free >= MIN_DISK_GIB
    fix = "" if ok else "free some space, or choose another folder: runs_dir=..."
    return Check("disk", ok, f"{free:.1f} GiB free for {runs_dir}", fix)


def check_sqlite(runs_dir: Path) -> Check:
    """Whether the default run store works there: a reader must see a base being written."""
    name, found = "run store", f"SQLite {sqlite3.sqlite_version}"
    elsewhere = "choose a folder on a local disk (runs_dir=...), or a PostgreSQL store"
    if sqlite3.sqlite_version_info < MIN_SQLITE:
        fix = "use a Python that is built with a newer SQLite"
        return Check(name, False, f"{found} is too old", fix, essential=True)
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
        return Check(name, False, f"{found} cannot write to {runs_dir}: {error}", elsewhere, True)
    ok = mode == "wal" and rows == 0
    detail = f"{found}, readable while written" if ok else f"{found}: no WAL in {runs_dir}"
    return Check(name, ok, detail, "" if ok else elsewhere, essential=True)


def _existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that exists."""
    place = folder.absolute()
    while not place.is_dir():
        place = place.parent
    return place


# What only a process of its own should try


@dataclass(frozen=True, slots=True)
class Probe:
    """What a script printed as its last line of JSON, or why it did not."""

    found: dict[str, Any]
    problem: str = ""


def probe(script: str, timeout_s: float = TIMEOUT_S) -> Probe:
    """Run a script in a fresh Python; it prints one JSON object."""
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
    """torch's build and devices, and whether a product comes out right in both types."""
    result = probe(TORCH)
    if result.problem:
        fix = "reinstall torch: pip install --force-reinstall torch"
        return Check(package, False, f"cannot be used: {result.problem}", fix, essential=True)
    found = result.found
    gpus = ", ".join(found["gpus"]) or "no GPU"
    detail = f"{found['version']}, {found['capability']}, {found['threads']} threads, {gpus}"
    if found["wrong"]:
        detail += f"; wrong products: {', '.join(found['wrong'])}"
        return Check(package, False, detail, "install another build of torch", essential=True)
    return Check(package, True, f"{detail}; float32 and bfloat16 products are right")


THREADS = """
import json, os, sys
import ludus.models
print(json.dumps({"early": "torch" not in sys.modules, "policy": os.environ["OMP_WAIT_POLICY"]}))
"""


def check_threads(package: str) -> Check:
    """Whether torch's idle threads sleep, and so leave the cores to environments."""
    result = probe(THREADS)
    name = "OMP_WAIT_POLICY"
    if result.problem:
        return Check(name, False, f"ludus.models: {result.problem}", "reinstall ludus", True)
    policy, early = result.found["policy"], result.found["early"]
    if policy.upper() != "PASSIVE":
        return Check(name, False, f"{policy}: idle threads spin", f"export {name}=PASSIVE")
    detail = "PASSIVE, set before torch is loaded" if early else "PASSIVE, but torch came first"
    return Check(name, early, detail, "" if early else f"export {name}=PASSIVE")


def check_transformers(package: str) -> Check:
    """Whether a model's code can be imported, which pulls in all that transformers needs."""
    result = probe(
        "import json, transformers, transformers.models.qwen3.modeling_qwen3\n"
        "print(json.dumps({'version': transformers.__version__}))"
    )
    if result.problem:
        fix = "see torchvision and torchaudio, or: pip install --force-reinstall transformers"
        return Check(package, False, f"cannot be used: {result.problem}", fix, essential=True)
    return Check(package, True, f"{result.found['version']}, imports its models")


def check_companion(package: str) -> Check:
    """torchvision or torchaudio: not needed, but of another build they break transformers."""
    result = probe(f"import json, {package}\nprint(json.dumps({{'ok': True}}))")
    found = f"{_version(package)} beside torch {_version('torch')}"
    if result.problem:
        fix = f"pip uninstall {package} (ludus does not need it)"
        return Check(package, False, f"{found} does not import: {result.problem}", fix, True)
    return Check(package, True, f"{found}, not needed")


def check_postgres(package: str) -> Check:
    """Whether the PostgreSQL client and its C library load."""
    result = probe(
        "import json, psycopg\n"
        "print(json.dumps({'libpq': psycopg.pq.version(), 'by': psycopg.pq.__impl__}))"
    )
    if result.problem:
        fix = f"pip install '{DISTRIBUTION}[postgres]'"
        return Check("PostgreSQL client", False, f"cannot be used: {result.problem}", fix)
    libpq = result.found["libpq"] // 10000
    return Check("PostgreSQL client", True, f"{package} {_version(package)}, libpq {libpq}")


def check_wandb(package: str) -> Check:
    """Says where Weights & Biases would write; whether it is logged in is its own matter."""
    detail = (
        f"{_version(package)}: the sink keeps runs in the run's folder; upload one with "
        f"`wandb sync`, or give it `mode: online`"
    )
    return Check(package, True, detail)
