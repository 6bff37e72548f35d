"""`breakpoint_at`: without effect when off; pdb here; pdb over a socket; debugpy."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from debug_client import DebugClient

import ludus
from ludus.core.debugging import debugger
from ludus.core.debugging.breakpoints import HERE, breakpoint_at
from ludus.core.debugging.breaks import EVENTS, FOLDER, TAGS, WAITING, let_go
from ludus.core.debugging.debugger import DEBUGGER

PROGRAM = """
import os, sys, threading
import ludus

def user(number):
    doubled = 2 * number
    ludus.breakpoint_at("tag")
    ludus.breakpoint_at("other")
    return doubled + 1

if "here" in sys.argv:
    os.environ["LUDUS_BREAK_HERE"] = str(os.getpid())
if "threads" in sys.argv:
    threads = [threading.Thread(target=user, args=(number,)) for number in (1, 2)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
for number in range(20, 20 + sys.argv.count("again") + 1):
    print("result", user(number), flush=True)
"""
LINE = 8
"""Of the statement after the breakpoint."""


@pytest.fixture
def program(tmp_path: Path) -> Iterator[Any]:
    """Start the program with some tags on."""
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    started: list[subprocess.Popen[str]] = []

    def start(*argv: str, tags: str = "tag", **env: str) -> subprocess.Popen[str]:
        root = str(Path(ludus.__file__).parents[1])
        process = subprocess.Popen(
            [sys.executable, str(path), *argv],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**os.environ, TAGS: tags, "PYTHONPATH": root, **env},
        )  # fmt: skip
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout, process.stderr):
            stream.close()  # not read to its end: debugpy's adapter inherits it


@pytest.fixture
def command(tmp_path: Path) -> Path:
    """The folder of a command that listens."""
    folder = tmp_path / "command"
    folder.mkdir()
    (folder / EVENTS).touch()
    (folder / WAITING).touch()
    return folder


def socket_of(process: subprocess.Popen[str]) -> str:
    """Read where a breakpoint waits: two lines."""
    assert process.stderr is not None
    line = process.stderr.readline()
    assert re.match(r"breakpoint \w+ \(program\.py, line \d+\) in process \d+ waits:$", line), line
    return process.stderr.readline().split()[-1]


def client(socket: str, commands: str) -> str:
    """Connect the client to a waiting pdb; returns what it printed."""
    command = [sys.executable, "-m", "ludus.core.debugging.debugger", socket]
    done = subprocess.run(command, input=commands, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_breakpoint_that_is_off_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(debugger, "stop", pytest.fail)
    for tags in (None, "", "tags,ta,g"):
        if tags is None:
            monkeypatch.delenv(TAGS, raising=False)
        else:
            monkeypatch.setenv(TAGS, tags)
        breakpoint_at("tag")
        breakpoint_at(7)  # type: ignore[arg-type]
        breakpoint_at("a/b\0")


def test_it_loads_no_debugger() -> None:
    code = "import ludus, sys; ludus.breakpoint_at('x')\n"
    absent = {"pdb", "debugpy", "asyncio", "ludus.core.debugging.debugger"}
    code += f"assert not {absent} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_pdb_opens_in_the_frame_of_the_user(program) -> None:
    out, err = program("here").communicate("p 'double', doubled\nn\nc\n", timeout=60)
    assert err == ""
    assert f"program.py({LINE})user()" in out
    assert "(Pdb) ('double', 40)" in out
    assert "result 41" in out


def test_without_input_pdb_ends_the_program(program) -> None:
    _, err = program("here").communicate("", timeout=60)
    assert "BdbQuit" in err


def test_pdb_over_a_socket(program) -> None:
    process = program()
    said = client(socket_of(process), "p 'double', doubled\nnext\nrestart\ninteract\nc\n")
    assert f"program.py({LINE})user()" in said
    assert "('double', 40)" in said
    assert said.count("*** not over a socket") == 2
    assert process.stdout.readline() == "result 41\n"
    assert process.wait(60) == 0


@pytest.mark.parametrize("leaving", ["q\n", "", "b 9\nc\nclear\nq\n"])
def test_a_client_that_leaves_lets_the_program_go_on(program, leaving: str) -> None:
    process = program()
    client(socket_of(process), leaving)
    assert process.stdout.readline() == "result 41\n"
    assert process.wait(60) == 0


def test_a_stop_follows_another(program) -> None:
    """In the same session while the client steps; in a new one after `continue`."""
    process = program("again", tags="tag,other")
    said = client(socket_of(process), "n\nn\nc\n")
    assert said.count("program.py(9)user()") >= 1
    for _ in range(2):
        client(socket_of(process), "c\n")
    assert process.stdout.read() == "result 41\nresult 43\n"


def test_threads_have_a_socket_each(program) -> None:
    """Both wait at once; either may be answered first."""
    process = program("threads")
    both = [socket_of(process), socket_of(process)]
    said = [client(socket, "p 'n', number\nc\n") for socket in reversed(both)]
    said.append(client(socket_of(process), "p 'n', number\nc\n"))
    seen = [re.findall(r"\('n', (\d+)\)", text)[0] for text in said]
    assert sorted(seen) == ["1", "2", "20"]
    assert process.wait(60) == 0


def test_debugpy_attaches_and_stops_in_the_frame_of_the_user(program) -> None:
    pytest.importorskip("debugpy")
    process = program("again", **{DEBUGGER: "debugpy"})
    line = process.stderr.readline()
    client = DebugClient(int(re.search(r"to 127\.0\.0\.1:(\d+)$", line.strip())[1]))
    for double in ("40", "42"):
        assert client.wait()[0] == ("user", LINE)
        assert client.value("doubled") == double
        client.go_on()
    assert [process.stdout.readline() for _ in "ab"] == ["result 41\n", "result 43\n"]
    client.leave()
    assert process.wait(60) == 0


@pytest.mark.parametrize("name", debugger.DEBUGGERS)
def test_it_goes_on_once_breakpoints_are_let_go(
    program, command: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "debugpy":
        pytest.importorskip("debugpy")
    process = program("threads", "again", **{DEBUGGER: name, FOLDER: str(command)})
    while (command / EVENTS).read_text().count("waits") < 2:
        assert process.poll() is None
    monkeypatch.setenv(FOLDER, str(command))
    let_go()
    out, err = process.communicate(timeout=60)
    assert (out, err) == ("result 41\nresult 43\n", "")
    assert not list(command.glob("*.sock"))


def test_letting_go_ends_a_session(program, command: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    process = program(**{FOLDER: str(command)})
    while not (sockets := list(command.glob("*.sock"))):
        assert process.poll() is None
    argv = [sys.executable, "-m", "ludus.core.debugging.debugger", str(sockets[0])]
    with subprocess.Popen(
        argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as attached:
        assert attached.stdout.readline().startswith("> ")
        monkeypatch.setenv(FOLDER, str(command))
        let_go()
        assert attached.wait(60) == 0, "the client ends, although its input does not"
    assert process.communicate(timeout=60) == ("result 41\n", "")


@pytest.mark.parametrize("with_command", [True, False])
def test_nobody_attaches(
    command: Path, with_command: bool, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.setattr(debugger, "WAIT_S", 0.0)
    monkeypatch.setattr(debugger, "POLL_S", 0.01)
    monkeypatch.setenv(TAGS, "tag")
    monkeypatch.delenv(HERE, raising=False)
    monkeypatch.delenv(FOLDER, raising=False)
    if with_command:
        monkeypatch.setenv(FOLDER, str(command))
    for _ in range(2):
        breakpoint_at("tag")
    said = (command / EVENTS).read_text() if with_command else capsys.readouterr().err
    assert said.count(": no debugger within 0 s: all breakpoints are off now") == 1


def test_a_path_too_long_for_a_socket_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    folder = tmp_path / ("long" * 30)
    folder.mkdir()
    (folder / WAITING).touch()
    monkeypatch.setenv(FOLDER, str(folder))
    monkeypatch.setenv(TAGS, "tag")
    breakpoint_at("tag")
    assert "cannot wait" in capsys.readouterr().err


def test_the_client_names_an_absent_socket(tmp_path: Path) -> None:
    for argv, code, said in (
        ([], 2, "usage"),
        ([str(tmp_path / "none")], 1, "no breakpoint waits"),
    ):
        command = [sys.executable, "-m", "ludus.core.debugging.debugger", *argv]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == code
        assert said in done.stderr
        assert "Traceback" not in done.stderr


def test_tags_are_reported_once(program, command: Path) -> None:
    process = program("here", "again", tags="other", **{FOLDER: str(command)})
    process.communicate("c\nc\n", timeout=60)
    lines = (command / EVENTS).read_text().splitlines()
    assert [json.loads(line) for line in lines] == [["off", "tag"], ["reached", "other"]]
