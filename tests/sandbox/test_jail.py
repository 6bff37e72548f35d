"""The jail: languages, files, limits, sessions, ends."""

from __future__ import annotations

import asyncio
import gc
import os
import time
from contextlib import suppress
from pathlib import Path

import pytest

from ludus.core.errors import ConfigError, ToolError
from ludus.sandbox import cgroups
from ludus.sandbox.base import Code, Limits, RunStatus
from ludus.sandbox.bubblewrap import jailed
from ludus.sandbox.jail import Jail
from ludus.sandbox.languages import LANGUAGES
from ludus.sandbox.zygotes import Zygote
from tests.sandbox.conftest import Run

pytestmark = [pytest.mark.usefixtures("layers"), pytest.mark.asyncio(loop_scope="module")]

HELLO = {
    "python": "import sys; print(sys.stdin.read().upper())",
    "bash": "tr a-z A-Z",
    "c": "#include <stdio.h>\n#include <ctype.h>\n"
    "int main(void) { int c; while ((c = getchar()) != EOF) putchar(toupper(c)); }",
    "cpp": "#include <iostream>\nint main() { for (char c; std::cin.get(c);)"
    " std::cout << (char) std::toupper(c); }",
    "javascript": "process.stdin.on('data', d => process.stdout.write(String(d).toUpperCase()))",
}


@pytest.mark.parametrize("language", LANGUAGES)
async def test_each_language_reads_its_input_and_answers(run_once: Run, language: str) -> None:
    if not LANGUAGES[language].is_installed:
        pytest.skip(f"{LANGUAGES[language].program} is not installed")
    result = await run_once(HELLO[language], language, stdin=b"hi there")
    assert (result.status, result.stdout.strip(), result.exit_code) == ("finished", "HI THERE", 0)
    assert (result.compile_seconds is not None) == (language in ("c", "cpp"))


async def test_python_without_a_loaded_process() -> None:
    async with Jail(packages=(), warm=False) as jail:
        result = await jail.run(Code("import sys; print(sys.flags.utf8_mode, __name__)"))
    assert result.stdout == "1 __main__\n"


async def test_files_go_in_and_come_out(run_once: Run) -> None:
    code = "import pathlib, helper\npathlib.Path('out.bin').write_bytes(helper.double(b'\\xff'))"
    files = {"helper.py": b"def double(x): return x + x", "deep/er/x": b""}
    result = await run_once(code, files=files, fetch=["out.bin", "absent", "deep/er/x", "deep"])
    assert result.files == {"out.bin": b"\xff\xff", "deep/er/x": b""}


@pytest.mark.parametrize("path", ["/etc/x", "../x", "a/../../x", "", "a\0b", "\ud800"])
async def test_a_path_out_of_the_working_folder_is_refused(run_once: Run, path: str) -> None:
    with pytest.raises(ConfigError, match="not a path within the working folder"):
        await run_once("", files={path: b""})


@pytest.mark.parametrize(
    ("files", "told"),
    [
        ({"a": b"", "a/b": b""}, "files.a/b: File exists: the files of a call need paths that do"),
        ({"a/b": b"", "a": b""}, "files.a: Is a directory"),
        ({"x" * 256: b""}, "File name too long: .* at most 255 bytes"),
        ({"x": bytes(3 << 20), "y": bytes(3 << 20)}, "files.y: No space left .* 4 MB at most"),
    ],
)
async def test_files_that_cannot_be_written_are_the_callers_mistake(
    run_once: Run, files: dict[str, bytes], told: str
) -> None:
    with pytest.raises(ConfigError, match=told):
        await run_once("", files=files, limits={"disk_mb": 4})


async def test_fetched_files_have_a_limit_together(run_once: Run) -> None:
    """Links name one file many times; the jail would send each."""
    code = "import os\nopen('f', 'wb').write(bytes(3 << 20))\nos.link('f', 'g')"
    result = await run_once(code, fetch=["f", "g"], limits={"disk_mb": 4})
    assert (result.status, list(result.files)) == (RunStatus.OUTPUT_LIMIT, ["f"])
    result = await run_once(code, fetch=["g"], limits={"disk_mb": 4})
    assert (result.status, list(result.files)) == (RunStatus.FINISHED, ["g"])


async def test_an_error_shows_the_codes_own_traceback(run_once: Run) -> None:
    result = await run_once("def f():\n    return 1 / 0\nf()")
    assert (result.status, result.exit_code) == (RunStatus.ERROR, 1)
    assert result.stderr.startswith('Traceback (most recent call last):\n  File "main.py", line 3')
    assert "inside" not in result.stderr
    assert result.stderr.endswith("division by zero\n")


@pytest.mark.parametrize(
    ("code", "exit_code"),
    [("exit()", 0), ("raise SystemExit(3)", 3), ("import os; os.kill(os.getpid(), 9)", -9)],
)
async def test_exit_codes(run_once: Run, code: str, exit_code: int) -> None:
    result = await run_once(code)
    assert (result.exit_code, result.status) == (exit_code, "error" if exit_code else "finished")


async def test_a_failed_compilation(run_once: Run) -> None:
    result = await run_once("int main( {", "c")
    assert result.compile_failed
    assert result.status == RunStatus.ERROR
    assert "main.c:1" in result.stderr


LIMITED = {
    "spin": ("while True: pass", {"run_s": 0.3}, RunStatus.TIME_LIMIT),
    "sleep": ("import time; time.sleep(60)", {"run_s": 0.3}, RunStatus.TIME_LIMIT),
    "memory": ("x = bytearray(10**9)", {"memory_mb": 100}, RunStatus.MEMORY_LIMIT),
    "output": ("while True: print('x' * 999)", {"output_bytes": 5000}, RunStatus.OUTPUT_LIMIT),
}


@pytest.mark.parametrize("name", LIMITED)
async def test_limits(run_once: Run, name: str) -> None:
    code, limits, status = LIMITED[name]
    result = await run_once(code, limits=limits)
    assert result.status == status
    assert len(result.stdout) <= 5000


async def test_disk_and_processes_are_limited(run_once: Run) -> None:
    result = await run_once(
        "import os\nfor i in range(99):\n open(f'/tmp/{i}', 'wb').write(bytes(1 << 20))",
        limits={"disk_mb": 8},
    )
    assert "No space left on device" in result.stderr
    code = "import os, time\nfor i in range(50):\n if not os.fork(): time.sleep(9)\n print(i)"
    result = await run_once(code, limits={"num_processes": 8})
    assert "BlockingIOError" in result.stderr
    assert int(result.stdout.split()[-1]) < 8


async def test_calls_at_the_same_time_have_limits_of_their_own() -> None:
    code = "import os, time\nfor _ in range(6):\n if not os.fork(): time.sleep(9)\ntime.sleep(0.3)"
    async with Jail(packages=(), max_runs=4) as jail:
        runs = [jail.run(Code(code), Limits(num_processes=8)) for _ in range(4)]
        assert [result.stderr for result in await asyncio.gather(*runs)] == [""] * 4


async def test_a_call_finds_nothing_of_the_one_before() -> None:
    async with Jail(packages=(), max_runs=1) as jail:
        first = "open('/tmp/x', 'w').write('1'); open('y', 'w'); import math; math.pi = 3"
        assert (await jail.run(Code(first))).status == RunStatus.FINISHED
        code = "import os, math; print(os.listdir('/tmp'), os.listdir('.'), math.pi)"
        assert (await jail.run(Code(code))).stdout == "[] ['main.py'] 3.141592653589793\n"


def needs(package: str) -> None:
    """Skip the test where this environment's folder is closed to other users."""
    if jailed((package,)).absent:
        pytest.skip(f"{package} lies in a folder that the jail's user may not read")


async def test_random_numbers_differ_between_calls() -> None:
    needs("numpy")
    async with Jail(packages=("numpy",)) as jail:
        code = Code("import random, numpy; print(random.random(), numpy.random.rand())")
        assert (await jail.run(code)).stdout != (await jail.run(code)).stdout


async def test_a_session_keeps_its_state() -> None:
    async with Jail(packages=()) as jail:
        codes = ["x = 3\nprint('a')", "print(x)", "1 / 0", "print(x + 1)"]
        results = [await jail.run(Code(code), session="e") for code in codes]
        assert [result.stdout for result in results] == ["a\n", "3\n", "", "4\n"]
        assert results[2].status == RunStatus.ERROR
        assert "1 / 0" in results[2].stderr
        other = await jail.run(Code("print(x)"), session="f")
        assert "NameError" in other.stderr
        await jail.close_session("e")
        assert "NameError" in (await jail.run(Code("print(x)"), session="e")).stderr


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("while True: pass", RunStatus.TIME_LIMIT),
        ("while True: print(1)", RunStatus.OUTPUT_LIMIT),
        ("import os; os._exit(3)", RunStatus.ERROR),
    ],
)
async def test_a_run_over_a_limit_ends_its_session(code: str, status: RunStatus) -> None:
    limits = Limits(run_s=1, output_bytes=10_000)
    async with Jail(packages=()) as jail:
        await jail.run(Code("x = 1"), session="e")
        assert (await jail.run(Code(code), limits, session="e")).status == status
        assert "NameError" in (await jail.run(Code("x"), session="e")).stderr


async def test_too_many_sessions_are_an_error_of_the_tool() -> None:
    async with Jail(packages=(), max_sessions=1) as jail:
        await jail.run(Code(""), session="e")
        with pytest.raises(ToolError, match="1 sessions are open"):
            await jail.run(Code(""), session="f")


async def test_a_cancelled_call_ends_its_processes() -> None:
    async with Jail(packages=(), max_runs=1) as jail:
        call = asyncio.create_task(jail.run(Code("import time; time.sleep(60)")))
        await asyncio.sleep(1)
        call.cancel()
        began = time.monotonic()
        assert (await jail.run(Code("print(1)"))).stdout == "1\n"
        assert time.monotonic() - began < 30


async def test_a_jail_that_was_killed_is_an_error_of_the_tool_and_starts_anew() -> None:
    async with Jail(packages=()) as jail:
        call = asyncio.create_task(jail.run(Code("import time; time.sleep(60)")))
        await asyncio.sleep(1)
        assert isinstance(jail._ground, Zygote)
        jail._ground.process.kill()
        with pytest.raises(ToolError, match="the jail ended"):
            await call
        jail._ground.process.wait()
        assert (await jail.run(Code("print(1)"))).stdout == "1\n"


async def test_nothing_is_left() -> None:
    gc.collect()  # files that other tests left
    before = _open_files(), _cgroups()
    async with Jail(packages=(), max_runs=4) as jail:
        codes = ["print(1)", "while True: print(1)", "import os; os.fork(); os.setsid()"]
        await asyncio.gather(*(jail.run(Code(code)) for code in codes * 4))
        await jail.run(Code("x = 1"), session="e")
        assert isinstance(jail._ground, Zygote)
        process = jail._ground.process
    assert process.poll() is not None
    files, groups = before
    assert _open_files() <= files  # what other tests left may be collected meanwhile
    assert _cgroups() == groups


def _open_files() -> set[str]:
    """The open files of this process, by descriptor and target."""
    found = set()
    for link in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the descriptor of this listing
            found.add(f"{link.name} {os.readlink(link)}")
    return found


def _cgroups() -> set[Path]:
    name = f"ludus-{os.getpid()}-*"
    return {path for parent, _ in cgroups._parents() for path in parent.glob(name)}


async def test_without_isolation_it_runs_and_warns(caplog: pytest.LogCaptureFixture) -> None:
    async with Jail("none", packages=()) as jail:
        result = await jail.run(Code("import os; print(os.getuid(), os.getcwd())", fetch=["x"]))
        spun = await jail.run(Code("while True: pass"), Limits(run_s=0.3))
    uid, folder = result.stdout.split()
    assert int(uid) == os.getuid()
    assert not Path(folder).exists()
    assert spun.status == RunStatus.TIME_LIMIT
    assert "code has all rights of this process" in caplog.text


async def test_an_absent_package_is_named() -> None:
    with pytest.raises(ConfigError, match=r"sandbox.packages: no-such-package: not installed"):
        Jail(packages=["no-such-package"])


@pytest.mark.parametrize("language", ["cobol", "pyton"])
async def test_an_unknown_language_is_named(run_once: Run, language: str) -> None:
    with pytest.raises(ConfigError, match="there is no language"):
        await run_once("", language)


async def test_without_bubblewrap_it_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ConfigError, match=r"bwrap is not installed.*apt install bubblewrap"):
        Jail()


async def test_runs_end_with_the_sandbox() -> None:
    async with Jail(packages=()) as jail:
        sleep = Code("import time; time.sleep(60)")
        runs = [asyncio.create_task(jail.run(sleep, session=name)) for name in (None, "e", "f")]
        await asyncio.sleep(1)
        await jail.close_session("f")
        with pytest.raises(ToolError, match="the jail ended"):
            await runs.pop()
    for run in runs:
        with pytest.raises(ToolError, match="the jail ended"):
            await run


async def test_a_package_of_one_file() -> None:
    needs("typing_extensions")
    async with Jail(packages=["typing_extensions"]) as jail:
        result = await jail.run(Code("import typing_extensions as t; print(t.__file__)"))
    assert result.stdout == "/packages/typing_extensions.py\n"


async def test_a_prelude_is_loaded_once_and_no_program_changes_it_for_the_next() -> None:
    jail = Jail(packages=())
    jail.prelude("ours", "import os\nNAME = __name__\nloaded_by = os.getpid()\nseen = []")
    async with jail:
        code = "import ours, os; ours.seen.append(1); print(ours.NAME, ours.seen, ours.loaded_by)"
        first, second = [await jail.run(Code(code)) for _ in range(2)]
    assert first.stdout == second.stdout
    assert first.stdout.startswith("ours [1] ")


async def test_a_prelude_that_fails_ends_the_start() -> None:
    jail = Jail(packages=())
    jail.prelude("ours", "raise OSError('no library')")
    async with jail:
        with pytest.raises(ToolError, match="OSError: no library"):
            await jail.run(Code("1"))
