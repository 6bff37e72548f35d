"""Atomic writes: a file or folder is the old one or the new one, whatever fails."""

from __future__ import annotations

import errno
import os
import signal
import stat
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from ludus.core.files import (
    InUse,
    atomic_file,
    atomic_folder,
    atomic_write,
    lock_itself,
    locked_by,
    open_regular,
    remove_folder,
    temporary_folder,
)


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("failing", ["fsync", "replace"])
def test_a_failed_write_keeps_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    path = tmp_path / "b.txt"
    atomic_write(path, "old")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, failing, full)
        with pytest.raises(OSError, match="No space"):
            atomic_write(path, "new")
    assert path.read_text() == "old"
    atomic_write(path, b"new\xff", flush=False)
    assert path.read_bytes() == b"new\xff"
    assert names_in(tmp_path) == ["b.txt"]


def test_a_file_has_the_usual_permissions(tmp_path: Path) -> None:
    (tmp_path / "plain").write_text("x")
    atomic_write(tmp_path / "atomic", "x")
    modes = {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert len(modes) == 1


def test_an_interrupted_body_leaves_nothing(tmp_path: Path) -> None:
    def interrupted() -> None:
        with atomic_file(tmp_path / "new") as temporary:
            temporary.write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert names_in(tmp_path) == []


def test_threads_may_write_one_file(tmp_path: Path) -> None:
    texts = [str(number) * 100_000 for number in range(8)]
    path = tmp_path / "shared"
    threads = [threading.Thread(target=atomic_write, args=(path, text)) for text in texts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert path.read_text() in texts
    assert names_in(tmp_path) == ["shared"]


def test_a_folder_appears_complete(tmp_path: Path) -> None:
    target = tmp_path / "tokenizer"

    def killed() -> None:
        with atomic_folder(target) as folder:
            (folder / "half").write_text("x")
            raise RuntimeError("killed")

    with pytest.raises(RuntimeError):
        killed()
    assert not target.exists()
    for text in ("one", "two"):
        with atomic_folder(target) as folder:
            (folder / text).write_text(text)
        assert names_in(target) == [text]
    assert names_in(tmp_path) == ["tokenizer"]


def test_a_folder_removes_what_a_dead_process_left(tmp_path: Path) -> None:
    dead = 2**22 + 1  # above the largest process number of Linux
    (tmp_path / f".tmp-a-{dead}").mkdir()
    (tmp_path / f".tmp-b-{dead}").mkdir()
    with atomic_folder(tmp_path / "a") as folder:
        (folder / "x").write_text("x")
    assert names_in(tmp_path) == [f".tmp-b-{dead}", "a"]
    remove_folder(tmp_path / "a")
    assert names_in(tmp_path) == [f".tmp-b-{dead}"]


def test_a_pipe_is_written_and_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    atomic_write(pipe, "text")
    assert os.read(reader, 100) == b"text"
    assert pipe.is_fifo()
    os.close(reader)


def test_a_file_is_locked_under_all_its_names(tmp_path: Path) -> None:
    path, other = tmp_path / "file", tmp_path / "other"
    first = open_regular(path, os.O_RDWR | os.O_CREAT)
    other.hardlink_to(path)
    second = open_regular(other)
    assert locked_by(other) is None
    lock_itself(first, path)
    with pytest.raises(InUse, match=f"in use by process {os.getpid()}"):
        lock_itself(second, other)
    assert locked_by(other) == os.getpid()
    os.close(first)
    lock_itself(second, other)
    os.close(second)


def test_a_folder_of_a_killed_process_is_removed_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "mark-file").write_text("no folder")
    (tmp_path / "mark-link").symlink_to(tmp_path / "other")
    (tmp_path / "other").mkdir()
    code = "import sys, time; from ludus.core.files import temporary_folder as made\n"
    code += (
        "with made('mark-') as path: (path / 'x').touch(); print(path, flush=True); time.sleep(99)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE, text=True, env={**os.environ, "TMPDIR": str(tmp_path)},
    ) as process:  # fmt: skip
        assert process.stdout is not None
        killed = Path(process.stdout.readline().strip())
        with temporary_folder("mark-") as mine, temporary_folder("mark-") as another:
            assert killed.exists()
            assert mine.exists()
            assert mine != another
        process.send_signal(signal.SIGKILL)
    assert killed.exists()
    with temporary_folder("mark-"):
        assert not killed.exists()
    assert names_in(tmp_path) == ["mark-file", "mark-link", "other"]
