"""Processes by pid and start time; children; a program that ends with its parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from ludus.core.system import processes
from ludus.core.system.processes import (
    MARK,
    Process,
    descendants,
    end,
    identify,
    is_alive,
    listening,
    machine,
    marked,
    started,
)

SLEEP = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"]
STUBBORN = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True)\n"
STUBBORN += "time.sleep(600)"


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start a program, and wait for its first line."""
    children: list[subprocess.Popen[str]] = []

    def begin(command: list[str] = SLEEP, **options: object) -> subprocess.Popen[str]:
        child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **options)  # type: ignore[call-overload]
        children.append(child)
        child.first = child.stdout.readline().strip()
        return child

    yield begin
    for child in children:
        child.kill()
        child.wait()
        child.stdout.close()


def eventually(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_process_is_its_pid_and_start_time(start) -> None:
    child = start()
    process = identify(child.pid, "a sleeper")
    assert process is not None
    assert str(process) == f"a sleeper ({child.pid})"
    assert is_alive(process)
    assert not is_alive(Process(child.pid, process.started - 1)), "an earlier one with its pid"
    child.kill()
    eventually(lambda: not is_alive(process))  # a zombie: nobody has waited for it
    assert identify(child.pid) is None
    child.wait()
    assert identify(child.pid) is None


def test_names_with_spaces_and_parentheses_are_read(start, tmp_path: Path) -> None:
    odd = tmp_path / "a) S 1 (b"
    odd.symlink_to("/bin/sleep")
    child = subprocess.Popen([str(odd), "600"])
    try:
        process = identify(child.pid)
        assert process is not None
        assert process in descendants([identify(os.getpid())])
    finally:
        child.kill()
        child.wait()


def test_children_and_theirs_are_found(start) -> None:
    inner = (
        "import subprocess, sys; p = subprocess.Popen(['sleep', '600']); print(p.pid, flush=True)\n"
    )
    child = start([sys.executable, "-c", inner + "p.wait()"])
    parent = identify(child.pid)
    assert parent is not None
    [below] = descendants([parent])
    assert below.pid == int(child.first)
    assert below.what == "sleep"
    assert descendants([Process(child.pid, parent.started + 1)]) == []
    assert end([parent, below], signal.SIGKILL, 30) == []


def test_marked_processes_are_found_after_their_parent_has_died(start) -> None:
    mark = f"m{os.getpid()}"  # of this run of the tests alone
    code = "import subprocess; p = subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
    child = start(
        [sys.executable, "-c", code + "print(p.pid, flush=True)"], env={**os.environ, MARK: mark}
    )
    child.wait()
    found = marked(mark)
    assert [process.pid for process in found] == [int(child.first)]
    assert marked(mark[:-1]) == marked(f"{mark}1") == []
    assert end(found, signal.SIGTERM, 30) == []


def test_a_marked_process_is_found_while_it_is_being_executed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "stat").write_text(f"7 (sleep) S 1 {'0 ' * 17}99 0")
    environ = tmp_path / "7" / "environ"
    environ.write_bytes(b"")
    waited: list[float] = []

    def sleep(seconds: float) -> None:
        waited.append(seconds)
        if seconds:
            environ.write_bytes(f"A=1\0{MARK}=m1\0".encode())

    monkeypatch.setattr(processes, "PROC", tmp_path)
    monkeypatch.setattr(processes, "time", SimpleNamespace(sleep=sleep))
    assert marked("m1") == [Process(7, 99, "sleep")]
    assert waited == [0.0, processes.EXEC_WAITS_S[1]]


def test_a_stubborn_process_outlives_sigterm(start) -> None:
    child = start([sys.executable, "-c", STUBBORN])
    process = identify(child.pid)
    assert process is not None
    assert end([process], signal.SIGTERM, 0.2) == [process]
    assert end([process], None, 0.1) == [process]
    assert end([process], signal.SIGKILL, 30) == []


def test_a_reused_pid_is_not_signalled(start) -> None:
    child = start()
    process = identify(child.pid)
    assert process is not None
    former = Process(child.pid, process.started - 100)
    assert end([former], signal.SIGKILL, 0.1) == []
    assert is_alive(process)
    assert end([Process(2**22 + 1, 5)], signal.SIGKILL, 0.1) == [], "no process has this pid"


def test_children_are_told_of() -> None:
    heard: list[tuple[int, str]] = []
    with listening(lambda pid, what: heard.append((pid, what))):
        started(7, "a server")
    started(8, "another")
    assert heard == [(7, "a server")]


def test_a_machine_without_proc_knows_no_process(monkeypatch, tmp_path: Path) -> None:
    assert machine()
    monkeypatch.setattr(processes, "PROC", tmp_path / "none")
    assert machine() == ""
    assert identify(os.getpid()) is None
    assert marked("m") == []
    assert descendants([Process(os.getpid(), 1)]) == []


def test_a_program_ends_with_its_parent(start) -> None:
    """The parent is killed, so that it cannot end the program itself."""
    wrapped = (
        "[sys.executable, '-m', 'ludus.core.system.with_parent', str(os.getpid()), 'sleep', '600']"
    )
    code = f"import os, subprocess, sys, time\np = subprocess.Popen({wrapped})\n"
    code += "print(p.pid, flush=True)\ntime.sleep(600)"
    child = start([sys.executable, "-c", code])
    program = int(child.first)
    eventually(lambda: (found := identify(program)) is not None and found.what == "sleep")
    child.kill()
    eventually(lambda: identify(program) is None)


def test_a_program_whose_parent_is_gone_does_not_start() -> None:
    command = [sys.executable, "-m", "ludus.core.system.with_parent", "1", "echo", "started"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
