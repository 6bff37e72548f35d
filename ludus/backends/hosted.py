"""Finished groups on their way from a host's workers to the process of the run.

Each worker appends JSON lines to a file of its own; the run reads what is complete. Both sides are
the same ludus.
"""

from __future__ import annotations

import json
import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from ludus.core.types import Group

EPISODES = "episodes"
"""Folder of the workers' files, in the host's folder."""


@dataclass(frozen=True, slots=True)
class HostedGroup:
    """A group of the step of a stage: `rl`, or `evaluate/rl`."""

    stage: str
    step: int
    group: Group


_ADAPTER: TypeAdapter[HostedGroup] = TypeAdapter(HostedGroup)


class EpisodesWriter:
    """A worker's file."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{socket.gethostname()}-{os.getpid()}.jsonl"
        self._file = path.open("ab", buffering=0)

    def write(self, group: HostedGroup) -> None:
        """Append a finished group."""
        line = json.dumps(_ADAPTER.dump_python(group, mode="json"), separators=(",", ":"))
        self._file.write(line.encode() + b"\n")

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._file.close()


class LinesReader:
    """Reads the complete lines that were appended to a folder's files since the last call."""

    def __init__(self) -> None:
        self._read: dict[Path, int] = {}

    def lines(self, path: Path) -> list[bytes]:
        """The new complete lines of one file; none where there is no file."""
        try:
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                data = file.read()
        except FileNotFoundError:
            return []
        end = data.rfind(b"\n") + 1
        self._read[path] = self._read.get(path, 0) + end
        return data[:end].splitlines()


class EpisodesReader:
    """Reads the groups that the workers wrote."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._lines = folder, LinesReader()

    def groups(self) -> list[HostedGroup]:
        """The groups that ended since the last call."""
        found = []
        for path in sorted(self._folder.glob("*.jsonl")):
            for line in self._lines.lines(path):
                found.append(_ADAPTER.validate_python(json.loads(line)))
        return found


class StepsReader:
    """Reads the host's file of steps: (its number, metrics) of each complete step."""

    def __init__(self, path: Path) -> None:
        self._path, self._lines = path, LinesReader()

    def steps(self) -> list[tuple[int, dict[str, Any]]]:
        """The steps since the last call."""
        lines = map(json.loads, self._lines.lines(self._path))
        return [(int(line["step"]), line["data"]) for line in lines]


def task_lines(path: Path) -> list[bytes]:
    """The lines of a file of tasks, as JSON. A text may have other separators of lines in it."""
    return path.read_bytes().splitlines()
