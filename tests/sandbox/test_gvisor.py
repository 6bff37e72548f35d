"""The sandbox with gVisor's real `runsc`: the same runs, limits, ends and attacks as the jail."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ludus.core.errors import ConfigError, ToolError
from ludus.sandbox import cgroups, gvisor
from ludus.sandbox.attacks import ATTACKS, attack, bait
from ludus.sandbox.base import Code, Limits, RunResult, RunStatus
from ludus.sandbox.jail import Jail
from ludus.sandbox.languages import LANGUAGES
from ludus.sandbox.layers import check_gvisor, require_layers
from tests.sandbox.test_attacks import available
from tests.sandbox.test_jail import HELLO, LIMITED

ATTACKS_BY_NAME = {item.name: item for item in ATTACKS}


def _slow_unless(quick: tuple[str, ...], names: Iterable[str]) -> list[Any]:
    marks = {name: [] if name in quick else [pytest.mark.slow] for name in names}
    return [pytest.param(name, marks=marks[name]) for name in marks]


@pytest.fixture(scope="module")
def installed() -> None:
    try:
        require_layers("gvisor")
    except ConfigError as error:
        pytest.skip(str(error))


real = pytest.mark.usefixtures("installed")


async def run_once(code: str, language: str = "python", **options: Any) -> RunResult:
    limits = Limits(**options.pop("limits", {}))
    async with Jail("gvisor", packages=()) as sandbox:
        return await sandbox.run(Code(code, language, **options), limits)


def processes(pid: int) -> Iterator[int]:
    """Processes of gVisor that the process `pid` started, orphans included."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            text = path.read_bytes()
        except OSError:  # it ended
            continue
        if b"--root=" in text and f"/{gvisor.PREFIX}{pid}-".encode() in text:
            yield int(path.parent.name)


def ended(pid: int) -> bool:
    ends = time.monotonic() + 20
    while list(processes(pid)):
        if time.monotonic() > ends:
            return False
        time.sleep(0.02)
    return True


@real
async def test_code_runs_in_a_kernel_of_its_own() -> None:
    kernel = await run_once("import platform; print(platform.release(), end='')")
    assert kernel.status == RunStatus.FINISHED
    assert kernel.stdout != os.uname().release


@real
@pytest.mark.slow
@pytest.mark.parametrize("language", LANGUAGES)
async def test_each_language_reads_its_input_and_answers(language: str) -> None:
    if not LANGUAGES[language].is_installed:
        pytest.skip(f"{LANGUAGES[language].program} is not installed")
    result = await run_once(HELLO[language], language, stdin=b"hi there")
    assert (result.status, result.stdout.strip(), result.stderr) == ("finished", "HI THERE", "")


@real
async def test_files_go_in_and_come_out_and_errors_show_the_code() -> None:
    code = (
        "import pathlib, helper\npathlib.Path('out.bin').write_bytes(helper.double(b'\\xff'))\n1/0"
    )
    files = {"helper.py": b"def double(x): return x + x", "deep/er/x": b""}
    result = await run_once(code, files=files, fetch=["out.bin", "absent", "deep/er/x", "deep"])
    assert result.files == {"out.bin": b"\xff\xff", "deep/er/x": b""}
    assert (result.status, result.exit_code) == (RunStatus.ERROR, 1)
    assert result.stderr.startswith('Traceback (most recent call last):\n  File "main.py", line 3')


@real
@pytest.mark.parametrize("name", _slow_unless(("spin", "memory"), LIMITED))
async def test_limits(name: str) -> None:
    code, limits, status = LIMITED[name]
    result = await run_once(code, limits=limits)
    assert result.status == status
    assert len(result.stdout) <= 5000


@real
async def test_a_session_keeps_its_state_until_a_run_exceeds_a_limit() -> None:
    async with Jail("gvisor", packages=()) as sandbox:
        codes = ["x = 3\nprint('a')", "print(x)", "1 / 0", "print(x + 1)"]
        results = [await sandbox.run(Code(code), session="e") for code in codes]
        assert [result.stdout for result in results] == ["a\n", "3\n", "", "4\n"]
        spun = await sandbox.run(Code("while True: pass"), Limits(run_s=0.3), session="e")
        assert spun.status == RunStatus.TIME_LIMIT
        assert "NameError" in (await sandbox.run(Code("x"), session="e")).stderr


@real
async def test_a_gvisor_that_was_killed_is_an_error_of_the_tool() -> None:
    async with Jail("gvisor", packages=()) as sandbox:
        call = asyncio.create_task(sandbox.run(Code("import time; time.sleep(60)")))
        while not sandbox._slots:
            await asyncio.sleep(0.02)
        [slot] = sandbox._slots
        assert isinstance(slot, gvisor.GvisorSlot)
        slot.process.kill()
        with pytest.raises(ToolError, match="the jail ended"):
            await call
        assert (await sandbox.run(Code("print(1)"))).stdout == "1\n"


@real
def own_groups() -> set[Path]:
    pattern = f"ludus-{os.getpid()}-*"
    return {path for parent, _ in cgroups._parents() for path in parent.glob(pattern)}


async def test_nothing_is_left() -> None:
    open_files = len(os.listdir("/proc/self/fd"))
    others = own_groups()  # of jails that other tests share
    async with Jail("gvisor", packages=(), max_runs=3) as sandbox:
        codes = ["print(1)", "while True: print(1)", "import os; os.fork(); os.setsid()"]
        limits = Limits(output_bytes=10_000)
        await asyncio.gather(*(sandbox.run(Code(code), limits) for code in codes))
        call = asyncio.create_task(sandbox.run(Code("import time; time.sleep(60)")))
        await asyncio.sleep(0.1)  # gVisor is starting
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await sandbox.run(Code("x = 1"), session="e")
        folder = sandbox._ground.folder if isinstance(sandbox._ground, gvisor.Bundle) else None
    assert ended(os.getpid())
    assert folder is not None
    assert not folder.exists()
    assert len(os.listdir("/proc/self/fd")) <= open_files  # others may close theirs meanwhile
    assert own_groups() <= others


KILLED = """
import asyncio
from ludus.sandbox.base import Code
from ludus.sandbox.jail import Jail
async def main():
    sandbox = Jail("gvisor", packages=(), max_runs=1)
    await sandbox.run(Code("x = 1"), session="e")
    print("ready", flush=True)
    await sandbox.run(Code("import time; time.sleep(60)"), session="e")
asyncio.run(main())
"""


@real
async def test_a_killed_ludus_leaves_no_process() -> None:
    with subprocess.Popen([sys.executable, "-c", KILLED], stdout=subprocess.PIPE) as ludus:
        assert ludus.stdout is not None
        assert ludus.stdout.readline() == b"ready\n"
        assert list(processes(ludus.pid))
        ludus.send_signal(signal.SIGKILL)
    assert ended(ludus.pid)
    async with Jail("gvisor", packages=()) as sandbox:  # it removes what the killed one left
        await sandbox.run(Code(""))
    assert not list(Path(gvisor.gettempdir()).glob(f"{gvisor.PREFIX}{ludus.pid}-*"))


@real
@pytest.mark.parametrize("name", _slow_unless(("host files", "signals"), ATTACKS_BY_NAME))
async def test_an_attack_is_stopped(name: str) -> None:
    item = ATTACKS_BY_NAME[name]
    available(item)
    async with Jail("gvisor", packages=(), max_runs=1) as sandbox, bait() as laid:
        outcome = await attack(sandbox, item, laid)
    assert outcome.held, outcome.detail
    assert "ToolError" not in outcome.detail  # the code is to blame, not the sandbox


def test_without_runsc_it_refuses_and_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    layer = check_gvisor()
    assert (layer.ok, layer.needed) == (False, False)
    with pytest.raises(ConfigError, match=r"gvisor: runsc is not installed.*apt install runsc"):
        Jail("gvisor")
