"""What lies behind a mirror's URL, whichever storage that is (fsspec).

    objects/<sha256>            contents, named by what they hold, written once
    snapshots/00000012.json     which contents make up the run, with the SHA-256 of itself

Objects are uploaded first, then the snapshot that names them, in one request that fails where that
number is taken. So a process killed at any point leaves the snapshots before it whole, and of two
processes that both believe to own the run only one goes on. What is cut off in the middle is seen:
a snapshot does not match its own digest and does not count; an object has another size than it
should and is uploaded again.
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
"""Snapshots that stay: the newest, and one to fall back on where an object of it is damaged."""

_NAME = re.compile(r"(\d{8,})\.json")
log = get_logger(__name__)


class MirrorTaken(MirrorError):
    """Another process has gone on with the run."""


@dataclass(frozen=True, slots=True)
class Entry:
    """The content of one file."""

    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class StepEntry:
    """A recorded step: `started` tells a step from one that was made again after a rewind."""

    stage: str
    step: int
    started: float
    content: Entry


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A run at one moment. `run` holds the run's row: id, name, config, versions, status, error.

    `steps` is None where the run store is a server, which keeps its rows itself.
    """

    sequence: int
    run: Mapping[str, Any]
    files: Mapping[str, Entry]
    steps: tuple[StepEntry, ...] | None

    def contents(self) -> dict[str, Entry]:
        """All that the snapshot needs, by digest."""
        steps = (step.content for step in self.steps or ())
        return {entry.sha256: entry for entry in (*self.files.values(), *steps)}


class Remote:
    """The storage behind a URL: `s3://bucket/folder`, `gs://...`, `file:///folder`, `memory://x`.

    Errors: ConfigError for a URL that names no storage, MissingDependency, and from every method
    MirrorError for whatever the storage refuses.
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
        """The newest snapshot that was written whole; None where there is none.

        Args:
            skip_damaged: pass over snapshots of which an object is missing or cut.
        """
        sizes = self._sizes() if skip_damaged else {}
        for number in reversed(self._numbers()):
            snapshot = self._read(number)
            if snapshot is None:
                log.warning("a snapshot was cut off: it does not count", number=number)
                continue
            wanted = snapshot.contents().values()
            if not skip_damaged or all(sizes.get(e.sha256) == e.size for e in wanted):
                return snapshot
            log.warning("skipped a damaged snapshot", number=number)
        return None

    def last_number(self) -> int:
        """The highest number that is taken, by a whole snapshot or not; 0 for none."""
        return max(self._numbers(), default=0)

    def sizes(self) -> dict[str, int]:
        """The objects that are there: digest to size."""
        return self._sizes()

    def put(self, source: Path | bytes, entry: Entry) -> None:
        """Upload an object. `source` must not change meanwhile."""
        with self._told(f"cannot write {entry.size} bytes"):
            if isinstance(source, bytes):
                self._fs.pipe_file(self._object(entry.sha256), source)
            else:
                self._fs.put_file(str(source), self._object(entry.sha256))

    def get(self, entry: Entry, target: Path) -> None:
        """Download an object and verify it. Errors: MirrorError where it is not what it was."""
        with self._told(f"cannot read the object {entry.sha256}"):
            self._fs.get_file(self._object(entry.sha256), str(target))
        with target.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != entry.sha256:
            raise MirrorError(f"{self.url}: the object {entry.sha256} is damaged")

    def commit(self, snapshot: Snapshot) -> None:
        """Make a snapshot the newest. Errors: MirrorTaken where another has its number."""
        newest = self.last_number()
        data = _encode(snapshot)
        if newest >= snapshot.sequence and not self._holds(snapshot.sequence, data):
            raise self._taken(newest)
        with self._told("cannot write a snapshot"):
            try:
                self._fs.pipe_file(self._snapshot(snapshot.sequence), data, mode="create")
            except FileExistsError:
                # our own request may have come through though its answer was lost
                if not self._holds(snapshot.sequence, data):
                    raise self._taken(snapshot.sequence) from None

    def number_for(self, known: int) -> int:
        """The number of the next snapshot, of a process whose own newest is `known`.

        Errors: MirrorTaken where there is a newer one. A number that was cut off stays unused.
        """
        numbers = self._numbers()
        for number in numbers:
            if number > known and self._read(number) is not None:
                raise self._taken(number)
        return max([known, *numbers]) + 1

    def prune(self) -> None:
        """Remove old snapshots, then the objects that no snapshot needs."""
        numbers = self._numbers()
        whole = [(n, s) for n in numbers if (s := self._read(n)) is not None]
        kept = whole[-KEEP:]
        if not kept:
            return
        needed = {digest for _, snapshot in kept for digest in snapshot.contents()}
        first = kept[0][0]
        with self._told("cannot remove what is old"):
            for number in numbers:
                if number < first:
                    self._fs.rm_file(self._snapshot(number))
            for digest in self._sizes():
                if digest not in needed:
                    self._fs.rm_file(self._object(digest))

    def _taken(self, number: int) -> MirrorTaken:
        return MirrorTaken(
            f"{self.url}: another process went on with this run (snapshot {number}): this one "
            "stops. `ludus train RECIPE mirror=...` takes up the newest"
        )

    def _holds(self, number: int, data: bytes) -> bool:
        try:
            return bool(self._fs.cat_file(self._snapshot(number)) == data)
        except FileNotFoundError:
            return False

    def _read(self, number: int) -> Snapshot | None:
        """A snapshot; None where it was cut off, or removed a moment ago."""
        with self._told(f"cannot read snapshot {number}"):
            try:
                data = self._fs.cat_file(self._snapshot(number))
            except FileNotFoundError:
                return None
        return _decode(data, f"{self.url}: snapshot {number}")

    def _numbers(self) -> list[int]:
        names = (_NAME.fullmatch(name) for name in self._listed("snapshots"))
        return sorted(int(match[1]) for match in names if match)

    def _sizes(self) -> dict[str, int]:
        return {name: int(info["size"]) for name, info in self._listed("objects").items()}

    def _listed(self, folder: str) -> dict[str, Any]:
        with self._told("cannot be read"):
            self._fs.invalidate_cache()
            try:
                found = self._fs.ls(f"{self._root}/{folder}", detail=True)
            except FileNotFoundError:
                return {}
        return {info["name"].rpartition("/")[2]: info for info in found if info["type"] == "file"}

    def _object(self, digest: str) -> str:
        return f"{self._root}/objects/{digest}"

    def _snapshot(self, number: int) -> str:
        return f"{self._root}/snapshots/{number:08d}.json"

    @contextmanager
    def _told(self, what: str) -> Iterator[None]:
        """Storages raise what their libraries raise: any of it becomes one line."""
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
        raise MirrorError(f"{where} is of format {content['format']}, this ludus reads {FORMAT}")
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
