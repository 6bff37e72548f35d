"""Synchronise a run with its mirror: `RunMirror.push` and `fetch_run`."""

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
"""File in the run's folder: the mirror's URL and the number of the folder's snapshot."""

_PAUSES_S = (1.0, 5.0)
_EXCLUDED = {"sampler"}  # weights for a server; every start writes them again
_CHECKPOINTS = ("checkpoints", "reference", "policies")
log = get_logger(__name__)


class RunMirror:
    """Updates the copy of a run that this process owns.

    Args:
        url: of the copy.
        rows: copy the run's rows too; off where the store is a server.
        note: prints a line for the user.
    """

    def __init__(
        self, url: str, folder: RunFolder, store: RunStore, rows: bool, note: Callable[[str], None]
    ) -> None:
        self._remote = Remote(url)
        self._folder, self._store, self._rows = folder, store, rows
        self._note = note
        self._sequence = _read_note(folder, self._remote.url)
        self._contents: dict[tuple[str, int, int], Entry] = {}
        self._steps: dict[tuple[str, int, float], StepEntry] | None = None

    def push(self) -> None:
        """Update the copy. Errors: MirrorTaken; MirrorError after three attempts."""
        for pause in (*_PAUSES_S, None):
            try:
                self._push()
                return
            except MirrorTaken:
                raise
            except MirrorError as error:
                if pause is None:
                    raise
                log.warning("the mirror failed; retrying", error=str(error))
                time.sleep(pause)

    def after_checkpoint(self) -> None:
        """`push`, but a storage failure does not end the run.

        Errors: MirrorTaken.
        """
        try:
            self.push()
        except MirrorTaken:
            raise
        except MirrorError as error:
            self._note(f"{error}. The run continues; the next update includes this checkpoint")

    def _push(self) -> None:
        sequence = self._remote.number_for(self._sequence)
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
            "elapsed_s": row.elapsed_s,
        }
        self._remote.commit(Snapshot(sequence, run, files, steps))
        self._sequence = sequence
        _write_note(self._folder, self._remote.url, sequence)
        try:
            self._remote.prune()
        except MirrorError as error:  # costs space only
            log.warning("old snapshots of the mirror were not removed", error=str(error))

    def _upload(self, path: Path, present: dict[str, int]) -> Entry:
        """Upload the file unless it is stored already; return its entry.

        A file that may grow is copied first, so the uploaded bytes match the digest. The files of
        checkpoints never grow; a manifest that gets a metric is replaced.
        """
        stat = path.stat()
        key = (str(path), stat.st_size, stat.st_mtime_ns)
        cached = self._contents.get(key)
        if cached is not None and present.get(cached.sha256) == cached.size:
            return cached
        if path.relative_to(self._folder.path).parts[0] in _CHECKPOINTS:
            entry = self._send(path, present)
        else:
            with tempfile.TemporaryDirectory(prefix="ludus-mirror-") as folder:
                copy = Path(folder) / "file"
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
        """Upload the run's recorded steps; steps of the last snapshot are not read again."""
        if self._steps is None:
            newest = self._remote.newest()
            self._steps = {
                (s.stage, s.step, s.started): s for s in (newest.steps if newest else None) or ()
            }
        for row in self._store.steps(self._folder.id):
            key = (row.stage, row.step, row.started.timestamp())
            entry = self._steps.get(key)
            if entry is None or present.get(entry.content.sha256) != entry.content.size:
                packed = self._store.pack_step(self._folder.id, row.stage, row.step)
                entry = self._steps[key] = StepEntry(*key, self._send(packed, present))
            yield entry


def fetch_run(
    config: RunConfig, store: RunStore, note: Callable[[str], None], *, skip_damaged: bool = False
) -> RunFolder | None:
    """Returns the folder of the run in `config.mirror`; fetches the run unless it is local already.

    None if the mirror is empty. A local copy older than the mirror (another machine continued the
    run) is renamed to `.<run>.stale`.

    Errors: ConfigError if the mirror or the folder belongs to another run; LudusError if another
    process holds the run; MirrorError.
    """
    assert config.mirror is not None
    remote = Remote(config.mirror)
    snapshot = remote.newest(skip_damaged=skip_damaged)
    if snapshot is None:
        return None
    if snapshot.run["name"] != config.name:
        raise ConfigError(
            f"mirror: {remote.url} holds run {snapshot.run['id']}, not a run of "
            f"{config.name!r}: use another URL, or set name={snapshot.run['name']}"
        )
    folder = RunFolder(Path(config.runs_dir) / str(snapshot.run["id"]))
    if folder.config.exists():
        sequence = _read_note(folder, remote.url)
        if not sequence:
            raise ConfigError(
                f"mirror: {remote.url} holds run {folder.id}, but {folder.path} is another run of "
                "that name: choose another runs_dir"
            )
        if sequence >= snapshot.sequence:
            return folder
        with folder.lock():
            stale = folder.path.with_name(f".{folder.id}.stale")
            shutil.rmtree(stale, ignore_errors=True)
            os.rename(folder.path, stale)
        note(f"{folder.path} was older than {remote.url}: renamed to {stale.name}")
    # Damaged snapshots that were skipped stay skipped.
    sequence = remote.last_number() if skip_damaged else snapshot.sequence
    _fetch(remote, snapshot, folder, store, sequence)
    note(f"run {folder.id}: fetched snapshot {snapshot.sequence} of {remote.url}")
    return folder


def _fetch(
    remote: Remote, snapshot: Snapshot, folder: RunFolder, store: RunStore, sequence: int
) -> None:
    """Fetch the rows, then the folder (atomically). After a kill, the run is fetched again."""
    try:
        with atomic_folder(folder.path) as temporary:
            if snapshot.steps is not None:
                _fetch_rows(remote, snapshot, store, temporary / "step")
            for name, entry in snapshot.files.items():
                if Path(name).is_absolute() or ".." in Path(name).parts:
                    raise MirrorError(f"the mirror names a file outside of the run: {name!r}")
                target = temporary / name
                target.parent.mkdir(parents=True, exist_ok=True)
                remote.get(entry, target)
            _write_note(RunFolder(temporary), remote.url, sequence)
    except OSError as error:
        raise LudusError(f"{error.filename or folder.path}: {error.strerror}") from error


def _fetch_rows(remote: Remote, snapshot: Snapshot, store: RunStore, scratch: Path) -> None:
    run = snapshot.run
    if run["id"] not in store.run_ids():
        store.create_run(run["id"], run["name"], run["config"], run["versions"])
    elif store.run(run["id"]).config != run["config"]:  # rows of another run: not replaced
        raise ConfigError(
            f"mirror: {remote.url} holds run {run['id']}, but the store {store.url} has another "
            "run of that id: choose another runs_dir"
        )
    store.rewind(run["id"], {})
    for step in snapshot.steps or ():
        remote.get(step.content, scratch)
        store.unpack_step(run["id"], scratch.read_bytes())
    if run["status"] != "running":
        store.finish_run(run["id"], run["status"], run["error"], run.get("elapsed_s"))
    with suppress(FileNotFoundError):
        scratch.unlink()


def _files(folder: Path) -> Iterator[Path]:
    """Yields the files of a run: no locks, no temporary files, no renamed leftovers, and not the
    record of the running step."""
    for parent, folders, names in os.walk(folder):
        top = Path(parent) == folder
        excluded = _EXCLUDED if top or Path(parent).parent == folder / "policies" else set()
        folders[:] = sorted(name for name in folders if name[0] != "." and name not in excluded)
        for name in sorted(names):
            path = Path(parent) / name
            if top and name == RunFolder(folder).live.name:
                continue
            if name[0] != "." and path.is_file() and not path.is_symlink():
                yield path


def _read_note(folder: RunFolder, url: str) -> int:
    """Returns the number of the folder's snapshot; 0 if of no snapshot of this mirror."""
    try:
        note: dict[str, Any] = json.loads((folder.path / NOTE).read_text(encoding="utf-8"))
        return int(note["sequence"]) if note["url"] == url else 0
    except (OSError, ValueError, KeyError, TypeError):
        return 0


def _write_note(folder: RunFolder, url: str, sequence: int) -> None:
    atomic_write(folder.path / NOTE, json.dumps({"url": url, "sequence": sequence}))
