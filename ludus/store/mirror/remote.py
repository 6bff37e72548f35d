"""The storage of a mirror, through fsspec.

    objects/<sha256>            contents, named by their digest, written once
    snapshots/00000012.json     the digests of a run's files, with the snapshot's own SHA-256

Objects are uploaded first, then the snapshot that names them, in one request that fails if the
snapshot's number exists. So a process killed at any point leaves earlier snapshots intact, and of
two processes that both own the run only one continues. Incomplete uploads are detected: an
incomplete snapshot does not match its digest and is ignored; an incomplete object has the wrong
size and is uploaded again.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ludus.core.errors import ConfigError, LudusError, MirrorError, MissingDependency
from ludus.telemetry.logs import get_logger

FORMAT = 1
KEEP = 2
"""Number of snapshots to keep: the newest, and a fallback if one of its objects is damaged."""

_NAME = re.compile(r"(\d{8,})\.json")
log = get_logger(__name__)


class MirrorTaken(MirrorError):
    """Another process has continued the run."""


@dataclass(frozen=True, slots=True)
class Entry:
    """The content of one file."""

    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class StepEntry:
    """A recorded step; `started` distinguishes a step from its repetition after a rewind."""

    stage: str
    step: int
    started: float
    content: Entry


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A run at one moment. `run` is the run's row: id, name, config, versions, status, error.

    `steps` is None if the run store is a server, which holds the rows itself.
    """

    sequence: int
    run: Mapping[str, Any]
    files: Mapping[str, Entry]
    steps: tuple[StepEntry, ...] | None

    def contents(self) -> dict[str, Entry]:
        """Returns all objects of the snapshot, by digest."""
        steps = (step.content for step in self.steps or ())
        return {entry.sha256: entry for entry in (*self.files.values(), *steps)}


class Remote:
    """The storage behind a URL: `s3://bucket/folder`, `gs://...`, `file:///folder`, `memory://x`.

    Errors: ConfigError for an invalid URL, MissingDependency; every method raises MirrorError for
    the storage's errors.
    """

    def __init__(self, url: str) -> None:
        try:
            from fsspec.core import url_to_fs
            from fsspec.implementations.local import LocalFileSystem
        except ImportError:
            raise MissingDependency("fsspec", "mirror", "`mirror`") from None
        scheme = url.partition("://")[0]
        self.url = url.rstrip("/")
        try:
            self._fs, self._root = url_to_fs(self.url, skip_instance_cache=True)
        except ImportError as error:
            if scheme == "s3":
                raise MissingDependency("s3fs", "s3", url) from None
            raise ConfigError(f"mirror: {url}: {error}") from None
        except Exception as error:
            raise ConfigError(
                f"mirror: {url}: {error}. Write s3://BUCKET/FOLDER, gs://BUCKET/FOLDER or "
                "file:///FOLDER"
            ) from None
        if isinstance(self._fs, LocalFileSystem):
            self._fs.auto_mkdir = True

    def newest(self, *, skip_damaged: bool = False) -> Snapshot | None:
        """Returns the newest complete snapshot, or None.

        Args:
            skip_damaged: skip snapshots with a missing or incomplete object.
        """
        sizes = self.sizes() if skip_damaged else {}
        for number in reversed(self._numbers()):
            snapshot = self._read(number)
            if snapshot is None:
                log.warning("ignored an incomplete snapshot", number=number)
                continue
            entries = snapshot.contents().values()
            if not skip_damaged or all(sizes.get(e.sha256) == e.size for e in entries):
                return snapshot
            log.warning("skipped a damaged snapshot", number=number)
        return None

    def last_number(self) -> int:
        """Returns the highest snapshot number, of complete and incomplete snapshots; 0 for none."""
        return max(self._numbers(), default=0)

    def sizes(self) -> dict[str, int]:
        """Returns the size of every stored object, by digest."""
        return {name: int(info["size"]) for name, info in self._list("objects").items()}

    def put(self, source: Path | bytes, entry: Entry) -> None:
        """Upload an object. `source` must not change during the upload."""
        with self._mirror_errors(f"cannot write {entry.size} bytes"):
            if isinstance(source, bytes):
                self._fs.pipe_file(self._object(entry.sha256), source)
            else:
                self._fs.put_file(str(source), self._object(entry.sha256))

    def get(self, entry: Entry, target: Path) -> None:
        """Download and verify an object. Errors: MirrorError for a damaged object."""
        with self._mirror_errors(f"cannot read the object {entry.sha256}"):
            self._fs.get_file(self._object(entry.sha256), str(target))
        with target.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != entry.sha256:
            raise MirrorError(f"{self.url}: the object {entry.sha256} is damaged")

    def commit(self, snapshot: Snapshot) -> None:
        """Write a snapshot as the newest. Errors: MirrorTaken if its number exists."""
        newest = self.last_number()
        data = _encode(snapshot)
        if newest >= snapshot.sequence and not self._holds(snapshot.sequence, data):
            raise self._taken(newest)
        with self._mirror_errors("cannot write a snapshot"):
            try:
                self._fs.pipe_file(self._snapshot(snapshot.sequence), data, mode="create")
            except FileExistsError:
                # our request may have succeeded although its response was lost
                if not self._holds(snapshot.sequence, data):
                    raise self._taken(snapshot.sequence) from None

    def number_for(self, last: int) -> int:
        """Returns the number of the next snapshot of a process whose last snapshot is `last`.

        Errors: MirrorTaken if there is a newer snapshot. Numbers of incomplete snapshots are
        skipped.
        """
        numbers = self._numbers()
        for number in numbers:
            if number > last and self._read(number) is not None:
                raise self._taken(number)
        return max([last, *numbers]) + 1

    def prune(self) -> None:
        """Remove old snapshots, then unreferenced objects."""
        numbers = self._numbers()
        complete = [(n, s) for n in numbers if (s := self._read(n)) is not None]
        kept = complete[-KEEP:]
        if not kept:
            return
        referenced = {digest for _, snapshot in kept for digest in snapshot.contents()}
        first = kept[0][0]
        with self._mirror_errors("cannot remove old snapshots"):
            for number in numbers:
                if number < first:
                    self._fs.rm_file(self._snapshot(number))
            for digest in self.sizes():
                if digest not in referenced:
                    self._fs.rm_file(self._object(digest))

    def _taken(self, number: int) -> MirrorTaken:
        return MirrorTaken(
            f"{self.url}: another process has continued this run (snapshot {number}): this "
            "process stops. `ludus train RECIPE mirror=...` continues from the newest snapshot"
        )

    def _holds(self, number: int, data: bytes) -> bool:
        try:
            return bool(self._fs.cat_file(self._snapshot(number)) == data)
        except FileNotFoundError:
            return False

    def _read(self, number: int) -> Snapshot | None:
        """Returns a snapshot; None if incomplete or just removed."""
        with self._mirror_errors(f"cannot read snapshot {number}"):
            try:
                data = self._fs.cat_file(self._snapshot(number))
            except FileNotFoundError:
                return None
        return _decode(data, f"{self.url}: snapshot {number}")

    def _numbers(self) -> list[int]:
        names = (_NAME.fullmatch(name) for name in self._list("snapshots"))
        return sorted(int(match[1]) for match in names if match)

    def _list(self, folder: str) -> dict[str, Any]:
        with self._mirror_errors("cannot be read"):
            self._fs.invalidate_cache()
            try:
                infos = self._fs.ls(f"{self._root}/{folder}", detail=True)
            except FileNotFoundError:
                return {}
        return {info["name"].rpartition("/")[2]: info for info in infos if info["type"] == "file"}

    def _object(self, digest: str) -> str:
        return f"{self._root}/objects/{digest}"

    def _snapshot(self, number: int) -> str:
        return f"{self._root}/snapshots/{number:08d}.json"

    @contextmanager
    def _mirror_errors(self, what: str) -> Iterator[None]:
        """Convert any error of the storage's library into a MirrorError of one line."""
        try:
            yield
        except LudusError:
            raise
        except Exception as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise MirrorError(f"mirror {self.url} {what}: {reason}") from error


def _encode(snapshot: Snapshot) -> bytes:
    content: dict[str, Any] = {
        "format": FORMAT,
        "sequence": snapshot.sequence,
        "run": dict(snapshot.run),
        "files": {name: [e.size, e.sha256] for name, e in snapshot.files.items()},
        "steps": None
        if snapshot.steps is None
        else [
            [s.stage, s.step, s.started, s.content.size, s.content.sha256] for s in snapshot.steps
        ],
    }
    return json.dumps({**content, "sha256": _digest(content)}).encode()


def _decode(data: bytes, where: str) -> Snapshot | None:
    try:
        content = json.loads(data)
        digest = content.pop("sha256")
    except (ValueError, KeyError, AttributeError):
        return None
    if digest != _digest(content):
        return None
    if content["format"] != FORMAT:
        raise MirrorError(
            f"{where} is of format {content['format']}, this ludus reads format {FORMAT}"
        )
    steps = content["steps"]
    return Snapshot(
        content["sequence"],
        content["run"],
        {name: Entry(*entry) for name, entry in content["files"].items()},
        None
        if steps is None
        else tuple(
            StepEntry(stage, step, started, Entry(size, digest))
            for stage, step, started, size, digest in steps
        ),
    )


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
