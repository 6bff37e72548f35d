"""The attacks: all are stopped, and those with a control succeed where nothing stops them."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

import ludus
from ludus.diagnostics.doctor import run_attacks
from ludus.sandbox.attacks import ATTACKS, Attack, attack, attack_all, bait
from ludus.sandbox.base import Code
from ludus.sandbox.bubblewrap import is_readable
from ludus.sandbox.jail import Jail
from ludus.sandbox.layers import check_cgroup

pytestmark = pytest.mark.usefixtures("layers")


def available(item: Attack) -> None:
    if item.language == "c" and shutil.which("gcc") is None:
        pytest.skip("gcc is not installed")
    if item.cgroup and not check_cgroup().ok:
        pytest.skip("no cgroup is writable")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def jail() -> AsyncIterator[Jail]:
    """One jail for all attacks: an attack must not help the next either."""
    async with Jail(packages=(), max_runs=1) as opened:
        yield opened


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("item", ATTACKS, ids=lambda item: item.name)
async def test_an_attack_is_stopped(jail: Jail, item: Attack) -> None:
    available(item)
    async with bait() as laid:
        outcome = await attack(jail, item, laid)
    assert outcome.held, outcome.detail


@pytest.mark.slow
@pytest.mark.parametrize(
    "item", [item for item in ATTACKS if item.control], ids=lambda item: item.name
)
async def test_without_isolation_the_attack_succeeds(item: Attack) -> None:
    available(item)
    async with Jail("none", packages=(), max_runs=1) as unprotected, bait() as laid:
        outcome = await attack(unprotected, item, laid)
    assert not outcome.held, outcome.detail


@pytest.mark.slow
async def test_files_of_a_call_at_the_same_time_are_not_visible() -> None:
    writes = "import time\nfor f in ('/tmp/s', 's', '/dev/shm/s'): open(f, 'w').write('t0ken')"
    reads = (
        "import glob\nfor f in glob.glob('/proc/*/' + 'root/tmp/*') + glob.glob('/tmp/*') + "
        "glob.glob('/dev/shm/*') + glob.glob('/proc/*/cwd/s'): print(open(f).read())"
    )
    async with Jail(packages=(), max_runs=2) as jail:
        other = asyncio.create_task(jail.run(Code(f"{writes}\ntime.sleep(3)")))
        await asyncio.sleep(0.5)
        result = await jail.run(Code(reads))
        assert (await other).status == "finished"
    assert (result.stdout, result.stderr) == ("", "")


ORDINARY = """
import asyncio
from ludus.diagnostics.doctor import run_attacks
from ludus.sandbox.attacks import attack_all
from ludus.sandbox.jail import Jail
async def main():
    async with Jail(packages=(), max_runs=1) as jail:
        for outcome in await attack_all(jail):
            if not outcome.held and not outcome.attack.cgroup:
                print(outcome.attack.name, outcome.detail)
asyncio.run(main())
print("done")
"""


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="the other tests run as an ordinary user")
def test_attacks_as_an_ordinary_user_are_stopped() -> None:
    python = f"/usr/bin/python{sys.version_info.major}.{sys.version_info.minor}"
    if not Path(python).exists():
        pytest.skip(f"there is no {python} for an ordinary user")
    packages = [path for path in sys.path if path.endswith("-packages")]
    for path in (Path(ludus.__file__), *map(Path, packages)):
        if not is_readable(path, root=True):
            pytest.skip(f"an ordinary user may not read {path}")
    done = subprocess.run(
        [python, "-c", ORDINARY],
        env={"PYTHONPATH": ":".join([str(Path(ludus.__file__).parents[1]), *packages])},
        capture_output=True,
        text=True,
        user=1000,
        group=1000,
        extra_groups=[],
        cwd="/",
        timeout=300,
    )
    assert done.stdout == "done\n", done.stderr


@pytest.mark.slow
async def test_attacks_in_a_row_leave_a_working_sandbox() -> None:
    async with Jail(max_runs=1) as jail:
        outcomes = await attack_all(jail)
        assert (await jail.run(Code("print(1)"))).stdout == "1\n"
    assert [outcome for outcome in outcomes if not outcome.held and not outcome.attack.cgroup] == []


def test_the_doctor_attacks(monkeypatch: pytest.MonkeyPatch) -> None:
    files = [item for item in ATTACKS if item.name in ("host files", "daemon")]
    monkeypatch.setattr("ludus.sandbox.attacks.ATTACKS", files)
    checks = run_attacks()
    assert [(check.name, check.ok) for check in checks] == [
        ("attack: host files", True),
        ("attack: daemon", True),
    ]
    monkeypatch.setattr("ludus.diagnostics.doctor.Jail", lambda _: Jail("none", packages=()))
    [check, _] = run_attacks()
    assert (check.ok, check.essential) == (False, True)
    assert "NOT stopped" in check.detail
