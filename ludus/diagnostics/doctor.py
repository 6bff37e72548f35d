"""`ludus doctor`: check this machine, and print what to install or change.

Every check runs the real thing: it imports packages, multiplies with torch, writes with SQLite.
Checks that may crash or hang run in a subprocess (`probes`). This process imports nothing heavy, so
the doctor works on machines where torch fails.
"""

from __future__ import annotations

import asyncio
import platform
import shutil
import sqlite3
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from importlib.metadata import PackageNotFoundError, metadata, requires
from pathlib import Path
from typing import Literal

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from ludus.core.modules import DISTRIBUTION, extra_of
from ludus.core.system.machine import machine_memory, num_cores
from ludus.diagnostics.probes import (
    Check,
    check_companion,
    check_native,
    check_postgres,
    check_threads,
    check_torch,
    check_transformers,
    check_wandb,
    if_installed,
    installed_version,
)
from ludus.sandbox.attacks import Outcome, attack_all
from ludus.sandbox.jail import Jail
from ludus.sandbox.layers import layers

MIN_MEMORY_GIB = 4.0
MIN_DISK_GIB = 2.0
MIN_SQLITE = (3, 35)
"""The first release with RETURNING, which SQLAlchemy uses; WAL is older."""
SKIPPED_EXTRAS = ("all", "dev")
"""Extras that the doctor skips."""


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
        "torch": lambda: if_installed("torch", check_torch),
        "torch's threads": lambda: if_installed("torch", check_threads),
        "native code, which a compiler builds once": lambda: if_installed("torch", check_native),
        "transformers": lambda: if_installed("transformers", check_transformers),
        "torchvision": lambda: if_installed("torchvision", check_companion),
        "torchaudio": lambda: if_installed("torchaudio", check_companion),
        "PostgreSQL": lambda: if_installed("psycopg", check_postgres),
        "wandb": lambda: if_installed("wandb", check_wandb),
    }

    def run(name: str) -> Sequence[Check]:
        begins(name)
        return jobs[name]()

    with ThreadPoolExecutor(max_workers=2) as pool:
        return [check for checks in pool.map(run, jobs) for check in checks]


def check_hosts(listed: str) -> list[Check]:
    """Check a fleet of environment hosts: whether each answers, drains, and is like the others.

    Args:
        listed: addresses separated by commas, `file:PATH` or `dns+http://NAME:PORT`.

    Errors: ConfigError for a wrong list.
    """
    from ludus.envs.remote.ask import surveyed
    from ludus.envs.remote.hosts import HostList

    urls = HostList.of(listed.split(",") if "," in listed else listed).read()
    return [
        Check(url, not state.problem, state.told, state.problem, essential=True)
        for url, state in surveyed(urls).items()
    ]


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
        current = installed_version(requirement.name)
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


# The machine


def check_machine() -> Check:
    """Check the cores and memory available to this process, with container limits."""
    cores = float(num_cores())
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
