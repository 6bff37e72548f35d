"""Between a run and its mirror: `RunMirror.push` after each checkpoint, `take_up` at the start."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from ludus.config.schema import RunConfig
from ludus.core.errors import ConfigError, LudusError, MirrorError
from ludus.core.files import atomic_folder, atomic_write
from ludus.store import RunStore
from ludus.store.folders import RunFolder
from ludus.store.mirror.remote import Entry, MirrorTaken, Remote, Snapshot, StepEntry
from ludus.telemetry.logs import get_logger

NOTE = ".mirror.json"
"""In the run's folder: which mirror, and the snapshot that the folder came from or went into."""

_PAUSES_S = (1.0, 5.0)
_LEFT_OUT = {"sampler"}  # weights on their way to a server: every start writes them anew
_CHECKPOINTS = ("checkpoints", "reference")
log = get_logger(__name__)


class RunMirror:
    """Keeps the copy of one run that this process owns.

    Args:
        url: where the copy is.
        rows: whether the run's rows are copied too: not where the store is a server.
        note: tells the user.
    """

    def __init__(
        self, url: str, folder: RunFolder, store: RunStore, rows: bool, note: Callable[[str], None]
    ) -> None:
        self._remote = Remote(url)
        self._folder, self._store, self._rows = folder, store, rows
        self._note = note
        self._known = _noted(folder, self._remote.url)
        self._contents: dict[tuple[str, int, int], Entry] = {}
        self._steps: dict[tuple[str, int, float], StepEntry] | None = None

    def push(self) -> None:
        """Bring the copy up to date. Errors: MirrorTaken, MirrorError after three attempts."""
        for pause in (*_PAUSES_S, None):
            try:
                self._push()
                return
            except MirrorTaken:
                raise
            except MirrorError as error:
                if pause is None:
                    raise
                log.warning("the mirror failed, once more", error=str(error))
                time.sleep(pause)

    def after_checkpoint(self) -> None:
        """`push`, but storage that is out of reach for a while does not end the run.

        Errors: MirrorTaken.
        """
        try:
            self.push()
        except MirrorTaken:
            raise
        except MirrorError as error:
            self._note(f"{error}. The run goes on; the next checkpoint is copied with this one")

    def _push(self) -> None:
        sequence = self._remote.number_for(self._known)
        present = self._remote.sizes()
        files = {
            path.relative_to(self._folder.path).as_posix(): self._upload(path, present)
            for path in _files(self._folder.path)
        }
        steps = tuple(self._upload_steps(present)) if self._rows else None
        row = self._store.run(self._folder.id)
        run = {
            "id": row.id,
            "name": row.name,
            "config": dict(row.config),
            "versions": dict(row.versions),
            "status": row.status.value,
            "error": row.error,
        }
        self._remote.commit(Snapshot(sequence, run, files, steps))
        self._known = sequence
        _write_note(self._folder, self._remote.url, sequence)
        try:
            self._remote.prune()
        except MirrorError as error:  # costs space, not the run
            log.warning("the mirror keeps what is old", error=str(error))

    def _upload(self, path: Path, present: dict[str, int]) -> Entry:
        """The file's entry, uploaded where it is not there yet.

        A file that may grow at any time is copied first, so that what is uploaded is what was
        hashed; a checkpoint never changes.
        """
        facts = path.stat()
        key = (str(path), facts.st_size, facts.st_mtime_ns)
        known = self._contents.get(key)
        if known is not None and present.get(known.sha256) == known.size:
            return known
        if path.relative_to(self._folder.path).parts[0] in _CHECKPOINTS:
            entry = self._send(path, present)
        else:
            with tempfile.TemporaryDirectory(prefix="ludus-mirror-") as aside:
                copy = Path(aside) / "file"
                shutil.copyfile(path, copy)
                entry = self._send(copy, present)
        self._contents[key] = entry
        return entry

    def _send(self, source: Path | bytes, present: dict[str, int]) -> Entry:
        if isinstance(source, bytes):
            entry = Entry(len(source), hashlib.sha256(source).hexdigest())
        else:
            with source.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            entry = Entry(source.stat().st_size, digest)
        if present.get(entry.sha256) != entry.size:
            self._remote.put(source, entry)
            present[entry.sha256] = entry.size
        return entry

    def _upload_steps(self, present: dict[str, int]) -> Iterator[StepEntry]:
        """The run's recorded steps; those that the last snapshot has are not read again."""
        if self._steps is None:
            newest = self._remote.newest()
            self._steps = {
                (s.stage, s.step, s.started): s for s in (newest.steps if newest else None) or ()
            }
        for row in self._store.steps(self._folder.id):
            key = (row.stage, row.step, row.started.timestamp())
            known = self._steps.get(key)
            if known is None or present.get(known.content.sha256) != known.content.size:
                packed = self._store.pack_step(self._folder.id, row.stage, row.step)
                known = self._steps[key] = StepEntry(*key, self._send(packed, present))
            yield known


def take_up(
    config: RunConfig, store: RunStore, note: Callable[[str], None], *, skip_damaged: bool = False
) -> RunFolder | None:
    """The folder of the run that `config.mirror` holds, fetched where it is not here already.

    None where the mirror holds nothing yet. A local copy that is older than the mirror, because
    another machine went on, is set aside as `.<run>.stale`.

    Errors: ConfigError where the mirror, or the folder, belongs to another run; LudusError where
    another process has the run; MirrorError.
    """
    assert config.mirror is not None
    remote = Remote(config.mirror)
    snapshot = remote.newest(skip_damaged=skip_damaged)
    if snapshot is None:
        return None
    if snapshot.run["name"] != config.name:
        raise ConfigError(
            f"mirror: {remote.url} holds run {snapshot.run['id']}, which is no run of "
            f"{config.name!r}: name another folder, or set name={snapshot.run['name']}"
        )
    folder = RunFolder(Path(config.runs_dir) / str(snapshot.run["id"]))
    if folder.config.exists():
        known = _noted(folder, remote.url)
        if not known:
            raise ConfigError(
                f"mirror: {remote.url} holds run {folder.id}, but {folder.path} is another run of "
                "that name: choose another runs_dir"
            )
        if known >= snapshot.sequence:
            return folder
        with folder.lock():
            stale = folder.path.with_name(f".{folder.id}.stale")
            shutil.rmtree(stale, ignore_errors=True)
            os.rename(folder.path, stale)
        note(f"{folder.path} was older than {remote.url}: set aside as {stale.name}")
    # Where damaged ones are passed over, they are passed over for good.
    stands_at = remote.last_number() if skip_damaged else snapshot.sequence
    _fetch(remote, snapshot, folder, store, stands_at)
    note(f"run {folder.id}: fetched snapshot {snapshot.sequence} of {remote.url}")
    return folder


def _fetch(
    remote: Remote, snapshot: Snapshot, folder: RunFolder, store: RunStore, stands_at: int
) -> None:
    """Rows first, then the folder, which appears whole: killed before, it is fetched again."""
    try:
        with atomic_folder(folder.path) as temporary:
            if snapshot.steps is not None:
                _fetch_rows(remote, snapshot, store, temporary / "step")
            for name, entry in snapshot.files.items():
                target = _inside(temporary, name)
                target.parent.mkdir(parents=True, exist_ok=True)
                remote.get(entry, target)
            _write_note(RunFolder(temporary), remote.url, stands_at)
    except OSError as error:
        raise LudusError(f"{error.filename or folder.path}: {error.strerror}") from error


def _fetch_rows(remote: Remote, snapshot: Snapshot, store: RunStore, aside: Path) -> None:
    run = snapshot.run
    if run["id"] not in store.run_ids():
        store.create_run(run["id"], run["name"], run["config"], run["versions"])
    elif store.run(run["id"]).config != run["config"]:  # its rows are not ours to replace
        raise ConfigError(
            f"mirror: {remote.url} holds run {run['id']}, but the store {store.url} has another "
            "run of that name: choose another runs_dir"
        )
    store.rewind(run["id"], {})
    for step in snapshot.steps or ():
        remote.get(step.content, aside)
        store.unpack_step(run["id"], aside.read_bytes())
    if run["status"] != "running":
        store.finish_run(run["id"], run["status"], run["error"])
    with suppress(FileNotFoundError):
        aside.unlink()


def _inside(folder: Path, name: str) -> Path:
    """A file of the run. Errors: MirrorError for a name that leads out of its folder."""
    path = folder / name
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise MirrorError(f"the mirror names a file outside of the run: {name!r}")
    return path


def _files(folder: Path) -> Iterator[Path]:
    """What belongs to a run: no locks, nothing half-written, nothing set aside."""
    for parent, folders, names in os.walk(folder):
        top = Path(parent) == folder
        folders[:] = sorted(
            name for name in folders if name[0] != "." and not (top and name in _LEFT_OUT)
        )
        for name in sorted(names):
            path = Path(parent) / name
            if name[0] != "." and path.is_file() and not path.is_symlink():
                yield path


def _noted(folder: RunFolder, url: str) -> int:
    """The number of the snapshot that the folder stands at; 0 for none of this mirror."""
    try:
        noted: dict[str, Any] = json.loads((folder.path / NOTE).read_text(encoding="utf-8"))
        return int(noted["sequence"]) if noted["url"] == url else 0
    except (OSError, ValueError, KeyError, TypeError):
        return 0


def _write_note(folder: RunFolder, url: str, sequence: int) -> None:
    atomic_write(folder.path / NOTE, json.dumps({"url": url, "sequence": sequence}))
