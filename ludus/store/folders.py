"""Run folders: paths, names, and the lock that gives a run to one process."""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import shutil
import tempfile
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import IO, Any

from ludus.core.errors import ConfigError, DataError, LudusError, did_you_mean
from ludus.core.files import InUse, atomic_write, lock, read_json

_EVALUATION = re.compile(r"([a-z]+)-([0-9]{6,})\.json")
DISK_FAULTS = {
    errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO,
    errno.EISDIR, errno.ENOTDIR,
}  # fmt: skip


@dataclass
class RunFolder:
    """`<runs_dir>/<id>/` and its files; beside those below: versions.json and log.jsonl."""

    path: Path

    def __post_init__(self) -> None:
        path = self.path
        self.id = path.name
        self.config = path / "config.yaml"  # the resolved configuration
        self.facts = path / "run.json"  # a random identity, which the run's checkpoints carry
        self.demonstrations = path / "demonstrations.jsonl"  # episodes of the expert
        self.splits = path / "splits.json"  # held-out tasks replaced as training tasks
        self.tokenizer = path / "tokenizer"  # a folder in Hugging Face format
        self.checkpoints = path / "checkpoints"  # one folder per checkpoint
        self.evaluations = path / "evaluations"  # one JSON file per evaluation
        self.metrics = path / "metrics.jsonl"
        self.code = path / "code.json"  # versions, and digests of plug-ins' files
        self.budget = path / "budget.json"  # seconds and tokens spent, over all processes
        self.live = path / "live.json"  # the running step, once a second; absent after the end
        self.findings = path / "findings.json"  # what the diagnosis told; absent without a finding
        self.report = path / "report.html"

    @property
    def removed(self) -> bool:
        """True where the folder is gone, or was made anew by what was saved since."""
        return not self.config.exists()

    def lock(self) -> IO[str]:
        """Lock the run until the returned file is closed or the process ends.

        Errors: LudusError where another process holds the lock, or the folder cannot be locked.
        """
        try:
            return lock(self.path / ".lock")
        except InUse as error:
            raise LudusError(f"run {self.id} is {error}") from None
        except OSError as error:
            raise LudusError(
                f"{self.path / '.lock'}: cannot lock the run: {error.strerror or error}"
            ) from None

    def identity(self) -> str | None:
        """Returns a name that no other run has; None for runs that were made without it.

        It stays the same where the folder is renamed, copied or fetched from a mirror.

        Errors: DataError for a damaged file.
        """
        identity = read_facts(self.facts).get("identity")
        return None if identity is None else str(identity)

    def evaluation_files(self) -> list[tuple[str, int, Path]]:
        """Returns label, step and path of each evaluation; files with other names are ignored."""
        found = []
        for path in sorted(self.evaluations.glob("*.json")):
            if match := _EVALUATION.fullmatch(path.name):
                found.append((match[1], int(match[2]), path))
        return found

    def owner(self) -> int | None:
        """Returns the process that locked the run last; None before the first."""
        with suppress(OSError, ValueError):
            return int((self.path / ".lock").read_text())
        return None


def read_facts(path: Path) -> dict[str, Any]:
    """Returns the object in one of a run's JSON files; empty where there is no file.

    Errors: DataError for a damaged file.
    """
    try:
        facts = read_json(path)
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise DataError(f"{path} is damaged: {error}; remove it") from None
    if not isinstance(facts, dict):
        raise DataError(f"{path} is damaged: it holds no object; remove it")
    return facts


def check_runs_dir(runs_dir: str | Path) -> None:
    """Check that runs can be created in a folder; leaves nothing behind. Errors: ConfigError."""
    parent = Path(runs_dir)
    absent = [path for path in (parent, *parent.parents) if not path.exists()]
    try:
        parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".tmp-", dir=parent):
            pass
    except OSError as error:
        raise _cannot_create(parent, error) from None
    finally:
        with suppress(OSError):  # another run uses it already
            for path in absent:
                path.rmdir()


def _cannot_create(parent: Path, error: OSError) -> ConfigError:
    return ConfigError(f"runs_dir: cannot create a run in {parent}: {error.strerror}")


def create_run(
    runs_dir: str | Path, name: str, config: str, taken: Collection[str] = ()
) -> RunFolder:
    """Create a folder `<name>-<n>` with the first free n; ids in `taken` are not free.

    The folder appears with its configuration in it, so a run that is killed at any time can be
    resumed. An empty folder counts as free.
    """
    parent = Path(runs_dir)
    new = parent / f".tmp-{name}.{threading.get_ident()}-{os.getpid()}"
    try:
        parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir()
        try:
            atomic_write(new / "config.yaml", config)
            identity = json.dumps({"identity": secrets.token_hex(8)})
            atomic_write(RunFolder(new).facts, identity)
            for number in count(1):
                folder = parent / f"{name}-{number}"
                if folder.name not in taken and _rename_to(new, folder):
                    break
        except BaseException:
            shutil.rmtree(new, ignore_errors=True)
            raise
        return RunFolder(folder)
    except OSError as error:
        raise _cannot_create(parent, error) from None


def _rename_to(new: Path, folder: Path) -> bool:
    """Rename a folder unless `folder` is a file or holds any."""
    try:
        os.rename(new, folder)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            return False
        raise
    return True


def unrecorded(runs_dir: str | Path, recorded: Collection[str]) -> list[RunFolder]:
    """Returns the runs whose folder is there, but which the store does not have."""
    return [RunFolder(Path(runs_dir) / run) for run in _ids(runs_dir) if run not in recorded]


def _ids(runs_dir: str | Path) -> list[str]:
    configs = (path for path in Path(runs_dir).glob("[!.]*/config.yaml") if _is_file(path))
    return sorted(path.parent.name for path in configs)


def _is_file(path: Path) -> bool:
    """False also for a name that is too long, and in a folder that may not be read."""
    return os.path.isfile(path)


def resume_command(folder: RunFolder) -> str:
    """Returns the command that resumes a run."""
    runs_dir = "" if str(folder.path.parent) == "runs" else f" --runs-dir {folder.path.parent}"
    return f"ludus train --resume {folder.id}{runs_dir}"


def show_command(folder: RunFolder, trajectory: str) -> str:
    """Returns the command that prints a recorded rollout."""
    runs_dir = "" if str(folder.path.parent) == "runs" else f" --runs-dir {folder.path.parent}"
    return f"ludus show {folder.id} {trajectory}{runs_dir}"


def find_run(runs_dir: str | Path, run: str) -> RunFolder:
    """Returns an existing run, by id or path. Errors: ConfigError with the nearest id."""
    for folder in (Path(runs_dir) / run, Path(run)):
        if run and _is_file(folder / "config.yaml"):
            is_path = not folder.name or (folder == Path(run) and folder.is_symlink())
            return RunFolder(folder.resolve() if is_path else folder)
    if run and os.path.isdir(Path(runs_dir) / run / "checkpoints"):
        raise ConfigError(
            f"run {run}: {Path(runs_dir) / run / 'config.yaml'} is missing: restore it"
        )
    ids = _ids(runs_dir)
    told = f"there is no run {run[:100]!r}"
    if run and os.path.isdir(run):
        told += " (that folder has no config.yaml, so it is not a run's)"
    if not ids:
        raise ConfigError(f"{told}: {runs_dir} holds no runs")
    raise ConfigError(f"{told} in {runs_dir}{did_you_mean(run, ids)}")


@contextmanager
def disk_faults(folder: RunFolder) -> Iterator[None]:
    """Raise LudusError in place of an OSError that the user has to fix, such as a full disk."""
    try:
        yield
    except OSError as error:
        if isinstance(error, FileNotFoundError) and folder.removed:
            raise LudusError(
                f"the run's folder {folder.path} was removed while the run trained; nothing can be "
                "saved"
            ) from error
        if error.errno not in DISK_FAULTS:
            raise
        raise LudusError(
            f"{error.filename2 or error.filename or folder.path}: {error.strerror}. Everything "
            "saved is intact: free some space or fix the permissions, then resume the run"
        ) from error
