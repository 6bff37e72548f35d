"""Run folders: names, locks, files that are whole or absent."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from ludus.cli.checkpoints import checkpoint_list
from ludus.config.load import load_config
from ludus.core.errors import ConfigError, DataError, LudusError
from ludus.report.collect import read_evaluations
from ludus.store.folders import RunFolder, create_run, find_run, read_facts, unrecorded


def make(runs_dir: Path, *names: str) -> None:
    for name in names:
        create_run(runs_dir, name, "name: x\n")


def test_runs_are_numbered(tmp_path: Path):
    runs = tmp_path / "deep" / "runs"
    assert [create_run(runs, "demo", "name: x\n").id for _ in range(3)] == [
        "demo-1",
        "demo-2",
        "demo-3",
    ]
    assert create_run(runs, "other", "name: x\n").id == "other-1"
    shutil.rmtree(runs / "demo-2")
    assert create_run(runs, "demo", "name: x\n").id == "demo-2", "the first number that is free"


def test_a_number_that_a_shared_store_holds_is_left_out(tmp_path: Path):
    taken = {"demo-1", "demo-3", "other-2"}
    made = [create_run(tmp_path, "demo", "name: x\n", taken).id for _ in range(2)]
    assert made == ["demo-2", "demo-4"]
    assert not (tmp_path / "demo-1").exists()


def test_runs_made_at_once_have_folders_of_their_own(tmp_path: Path):
    ids: list[str] = []
    threads = [
        threading.Thread(target=lambda: ids.append(create_run(tmp_path, "x", "name: x\n").id))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(ids) == [f"x-{n}" for n in range(1, 9)]


def test_a_folder_that_cannot_be_written(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"runs_dir: cannot create a run in .*file/runs: Not a"):
        create_run(tmp_path / "file" / "runs", "demo", "name: x\n")
    with pytest.raises(ConfigError, match="runs_dir: cannot create a run in"):
        create_run(tmp_path / "file", "demo", "name: x\n")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_the_right_to_write(tmp_path: Path):
    tmp_path.chmod(0o500)
    with pytest.raises(ConfigError, match="Permission denied"):
        create_run(tmp_path, "demo", "name: x\n")


def test_a_run_is_found_by_id_and_by_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    make(tmp_path / "runs", "babyai-tiny")
    path = tmp_path / "runs" / "babyai-tiny-1"
    assert find_run(tmp_path / "runs", "babyai-tiny-1").path == path
    assert find_run("elsewhere", str(path)).id == "babyai-tiny-1"
    monkeypatch.chdir(path)
    assert find_run("elsewhere", ".").id == "babyai-tiny-1"


def test_the_nearest_run_is_suggested(tmp_path: Path):
    make(tmp_path, "babyai-tiny", "textcraft")
    with pytest.raises(ConfigError, match=r"no run 'babyai-tyni-1' .*\(did you mean babyai-tiny-1"):
        find_run(tmp_path, "babyai-tyni-1")
    with pytest.raises(ConfigError, match=r"\(known: babyai-tiny-1, textcraft-1\)"):
        find_run(tmp_path, "zzz")
    with pytest.raises(ConfigError, match="holds no runs"):
        find_run(tmp_path / "nothing", "x")
    with pytest.raises(ConfigError, match="there is no run ''"):
        find_run(tmp_path, "")
    with pytest.raises(ConfigError, match=r"there is no run 'x{100}' in"):
        find_run(tmp_path, "x" * 300)


HOLD = """
import sys, time
from pathlib import Path
from ludus.store.folders import RunFolder
with RunFolder(Path(sys.argv[1])).lock():
    print("locked", flush=True)
    sys.stdin.read()
"""


def test_one_process_at_a_time_owns_a_run(tmp_path: Path):
    folder = create_run(tmp_path, "demo", "name: x\n")
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder.path)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "locked\n"
        with pytest.raises(LudusError, match=rf"run demo-1 is in use by process {holder.pid}$"):
            folder.lock()
        holder.kill()  # the lock dies with its process
    with folder.lock():
        assert (folder.path / ".lock").read_text() == str(os.getpid())
        with pytest.raises(LudusError, match="is in use"):
            folder.lock()
    folder.lock().close()


def test_a_run_that_cannot_be_locked(tmp_path: Path):
    with pytest.raises(LudusError, match=r"demo-1/\.lock: cannot lock the run: No such file"):
        RunFolder(tmp_path / "demo-1").lock()
    folder = create_run(tmp_path, "demo", "name: x\n")
    os.mkfifo(folder.path / ".lock")
    with pytest.raises(LudusError, match="cannot lock the run: File or stream is not seekable"):
        folder.lock()


def test_the_parts_of_a_folder(tmp_path: Path):
    folder = RunFolder(tmp_path / "demo-1")
    parts = [folder.config, folder.demonstrations, folder.tokenizer, folder.checkpoints]
    parts += [folder.evaluations, folder.metrics, folder.report]
    assert {part.parent for part in parts} == {folder.path}
    assert len(set(parts)) == 7


def test_a_run_appears_with_its_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A process that is killed at any time leaves a run to resume, or nothing."""
    (tmp_path / "demo-1").mkdir()  # an empty folder is no run
    (tmp_path / "demo-2").write_text("")
    steps: list[tuple[str, ...]] = []
    rename = os.rename

    def listing(source: Path, target: Path) -> None:
        steps.append(tuple(sorted(p.name for p in tmp_path.glob("[!.]*/*"))))
        rename(source, target)

    monkeypatch.setattr("ludus.store.folders.os.rename", listing)
    assert create_run(tmp_path, "demo", "name: x\n").id == "demo-1"
    assert steps == [()], "nothing is in place before the rename"
    assert (tmp_path / "demo-1" / "config.yaml").read_text() == "name: x\n"
    assert create_run(tmp_path, "demo", "name: x\n").id == "demo-3"
    assert [run.id for run in unrecorded(tmp_path, {"demo-3"})] == ["demo-1"]
    assert not list(tmp_path.glob(".tmp*"))


def test_files_of_other_names_are_no_evaluations(tmp_path: Path) -> None:
    """Also editors' copies and notes, which made a resumed run raise an error."""
    folder = RunFolder(tmp_path / "a-1")
    assert folder.evaluation_files() == []
    folder.evaluations.mkdir(parents=True)
    for name in ("after-000000", "rl-000020", "notes", "rl-000020 (copy)", "rl-x", "rl-1"):
        (folder.evaluations / f"{name}.json").write_text("{")
    found = [(label, step) for label, step, _ in folder.evaluation_files()]
    assert found == [("after", 0), ("rl", 20)]


def test_a_damaged_file_of_a_run_is_named(tmp_path: Path) -> None:
    path = tmp_path / "code.json"
    assert read_facts(path) == {}
    for content in (b"", b"\xff", b"[]", b'{"a"'):
        path.write_bytes(content)
        with pytest.raises(DataError, match=r"code.json is damaged: .*; remove it"):
            read_facts(path)
    path.write_text('{"torch": "2.13"}')
    assert read_facts(path) == {"torch": "2.13"}


def test_a_damaged_evaluation_is_named(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "a-1")
    folder.evaluations.mkdir(parents=True)
    (folder.evaluations / "after-000000.json").write_text("{")
    with pytest.raises(DataError, match=r"after-000000.json is no evaluation of a run: restore"):
        read_evaluations(folder, load_config("babyai-tiny"))


def test_damaged_checkpoints_are_listed_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a-1" / "checkpoints" / "rl-000003").mkdir(parents=True)
    (tmp_path / "a-1" / "config.yaml").write_text("{}")
    checkpoint_list("a-1", str(tmp_path))
    assert capsys.readouterr().out == "rl-000003: damaged (manifest.json is missing)\n"
