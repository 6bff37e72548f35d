"""The record of a run's processes, and `kill_run`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ludus.core.errors import DataError, LudusError
from ludus.core.system.processes import MARK, Process, identify, is_alive, machine, started
from ludus.store import processes
from ludus.store.folders import RunFolder
from ludus.store.processes import (
    NOTIFIER,
    RUN,
    ProcessRecord,
    end_leftovers,
    kill_run,
    record_path,
    recorded_processes,
)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    path = tmp_path / "runs" / "demo-1"
    path.mkdir(parents=True)
    return RunFolder(path)


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    child = subprocess.Popen(["sleep", "600"])
    yield child
    child.kill()
    child.wait()


def known(pid: int, what: str) -> Process:
    process = identify(pid, what)
    assert process is not None
    return process


def test_processes_are_recorded_when_they_start(folder: RunFolder, sleeper) -> None:
    with recorded_processes(folder) as left:
        assert left == []
        assert ProcessRecord.read(folder).processes == [known(os.getpid(), RUN)]
        started(sleeper.pid, "a server")
        record = ProcessRecord.read(folder)
        assert record.processes[1] == known(sleeper.pid, "a server")
        assert record.machine == machine()
        assert os.environ[MARK] == record.mark
        child = subprocess.Popen(["sleep", "600"], start_new_session=True)
        try:
            alive = {process.pid for process in record.alive()}
        finally:
            child.kill()
            child.wait()
        assert {sleeper.pid, child.pid} <= alive
        assert os.getpid() not in alive
        sleeper.kill()
        sleeper.wait()
        started(os.getpid(), "again")
        assert sleeper.pid not in {p.pid for p in ProcessRecord.read(folder).processes}
    assert MARK not in os.environ
    assert not record_path(folder).exists()
    started(os.getpid(), "after the end")
    assert not record_path(folder).exists()


def test_what_a_killed_run_left_is_ended_by_the_next(folder: RunFolder, sleeper) -> None:
    stranger = subprocess.Popen(["sleep", "600"])
    try:
        now = known(stranger.pid, "a reused pid")
        former = Process(stranger.pid, now.started - 1, "a server")
        record = ProcessRecord(machine(), "h", "m", [known(sleeper.pid, "vLLM server"), former])
        record.write(folder)
        with recorded_processes(folder) as left:
            assert [str(process) for process in left] == [f"vLLM server ({sleeper.pid})"]
        assert sleeper.wait() == -15
        assert is_alive(now), "a stranger with the pid of a recorded process"
    finally:
        stranger.kill()
        stranger.wait()


def test_leftovers_of_another_machine_stay(folder: RunFolder, sleeper) -> None:
    ProcessRecord("elsewhere", "h", "m", [known(sleeper.pid, "x")]).write(folder)
    assert end_leftovers(folder) == []
    assert sleeper.poll() is None


def test_kill_ends_the_run_first_and_then_what_it_left(folder: RunFolder, sleeper) -> None:
    stubborn = (
        "import signal, time; signal.signal(15, signal.SIG_IGN); print(flush=True); time.sleep(600)"
    )
    main = subprocess.Popen([sys.executable, "-c", stubborn], stdout=subprocess.PIPE)
    assert main.stdout is not None
    main.stdout.readline()
    record = [known(main.pid, RUN), known(sleeper.pid, "a server")]
    ProcessRecord(machine(), "h", "", record).write(folder)
    ended = kill_run(folder, 2)  # seconds: a busy machine takes some for the second, too
    assert [str(one) for one in ended] == [
        f"the run ({main.pid}): SIGKILL", f"a server ({sleeper.pid}): SIGTERM"
    ]  # fmt: skip
    main.wait()
    main.stdout.close()
    with pytest.raises(LudusError, match="demo-1 is not running"):
        kill_run(folder, 2)


def test_the_notification_has_time_to_be_sent(folder: RunFolder, sleeper, monkeypatch) -> None:
    code = (
        "import signal, time; signal.signal(15, signal.SIG_IGN); print(flush=True); time.sleep(0.3)"
    )
    telling = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert telling.stdout is not None
    telling.stdout.readline()
    record = [known(sleeper.pid, RUN), known(telling.pid, NOTIFIER)]
    ProcessRecord(machine(), "h", "", record).write(folder)
    assert [one.process.what for one in kill_run(folder, 5)] == [RUN]
    assert telling.wait() == 0, "it ended by itself"
    telling.stdout.close()
    monkeypatch.setattr(processes, "NOTIFY_S", 0.1)
    hanging = subprocess.Popen(["sleep", "600"])
    ProcessRecord(machine(), "h", "", [known(hanging.pid, NOTIFIER)]).write(folder)
    assert [one.process.what for one in kill_run(folder, 5)] == [NOTIFIER]
    hanging.wait()


def test_a_run_that_is_not_here_is_not_killed(folder: RunFolder, sleeper) -> None:
    with pytest.raises(LudusError, match="is not running"):
        kill_run(folder, 1)
    ProcessRecord("elsewhere", "node-3", "", [known(sleeper.pid, RUN)]).write(folder)
    with pytest.raises(LudusError, match="does not run here: node-3 started it"):
        kill_run(folder, 1)
    assert sleeper.poll() is None


def with_process(pid: object) -> str:
    process = {"pid": pid, "started": 2, "what": ""}
    return json.dumps({"machine": "", "host": "", "mark": "", "processes": [process]})


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{", '{"processes": []}', with_process(1), with_process(-7), with_process("8")],
)
def test_a_damaged_record_kills_nothing(folder: RunFolder, content: str) -> None:
    record_path(folder).write_text(content)
    with pytest.raises(DataError, match=r"\.processes\.json is damaged"):
        kill_run(folder, 1)
    with recorded_processes(folder) as left:
        assert left == []


def test_a_process_of_another_user_is_named(folder: RunFolder, sleeper, monkeypatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(processes, "end", refuse)
    ProcessRecord(machine(), "h", "", [known(sleeper.pid, RUN)]).write(folder)
    with pytest.raises(LudusError, match="another user"):
        kill_run(folder, 1)


def test_a_full_disk_does_not_end_the_run(folder: RunFolder, monkeypatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(processes, "atomic_write", full)
    with recorded_processes(folder):
        started(os.getpid(), "a child")
