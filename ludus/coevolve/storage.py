"""The folder of a co-evolution: its files, its lock, and the list of complete stages.

recipe.yaml                            the resolved recipe
state.json                             complete stages, with their results and seconds
configs/                               the configuration of each run and player
runs/                                  the runs: `ludus runs --runs-dir FOLDER/runs`
models/                                start/, curriculum-1/, executor-1/: Hugging Face folders
generated_question/iteration-1/        proposals.jsonl, problems.jsonl, rejected.jsonl
temp_results/iteration-1/              chunks of proposals and answers; answers.jsonl
evaluation/                            iteration-0.json, iteration-1.json
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ludus.core.errors import DataError, LudusError
from ludus.core.files import InUse, atomic_write, lock

Row = dict[str, Any]
STATE = "state.json"


@dataclass(frozen=True, slots=True)
class Storage:
    """Paths of a co-evolution."""

    root: Path

    @property
    def recipe(self) -> Path:
        return self.root / "recipe.yaml"

    @property
    def state(self) -> Path:
        return self.root / STATE

    @property
    def configs(self) -> Path:
        return self.root / "configs"

    @property
    def runs(self) -> Path:
        return self.root / "runs"

    @property
    def report(self) -> Path:
        return self.root / "report.html"

    def model(self, name: str) -> Path:
        """The Hugging Face folder of `start`, `curriculum-1`, `executor-1`, ..."""
        return self.root / "models" / name

    def questions(self, iteration: int, name: str) -> Path:
        return self.root / "generated_question" / f"iteration-{iteration}" / f"{name}.jsonl"

    def temporary(self, iteration: int, name: str) -> Path:
        return self.root / "temp_results" / f"iteration-{iteration}" / f"{name}.jsonl"

    def evaluation(self, iteration: int) -> Path:
        return self.root / "evaluation" / f"iteration-{iteration}.json"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder for this process; creates it. Errors: LudusError where it is in use."""
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            held = lock(self.root / ".lock")
        except InUse as error:
            raise LudusError(
                f"{self.root} is {error}: wait for its end, or give this co-evolution another "
                "`name` or `storage`"
            ) from None
        except OSError as error:
            raise LudusError(f"{self.root}: cannot be used: {error.strerror}") from None
        with held:
            yield

    def complete(self) -> dict[str, Row]:
        """The results of the complete stages, by label. Errors: DataError for a damaged file."""
        try:
            stages = json.loads(self.state.read_text(encoding="utf-8"))["stages"]
            return {label: _stage(row) for label, row in dict(stages).items()}
        except FileNotFoundError:
            return {}
        except (OSError, KeyError, RecursionError, TypeError, ValueError) as error:
            raise DataError(
                f"{self.state} is damaged: {error!r}. Remove it: the stages run again, from "
                "the files that are there"
            ) from None

    def record(self, label: str, result: Mapping[str, Any]) -> None:
        """Note that a stage is complete; its files are."""
        stages = {**self.complete(), label: dict(result)}
        atomic_write(self.state, json.dumps({"stages": stages}, indent=1))


def _stage(row: Any) -> Row:
    """A stage's results. Errors: TypeError, ValueError."""
    if not isinstance(row, dict):
        raise TypeError(f"the results of a stage are {row!r:.80}")
    float(row.get("seconds") or 0.0)
    return row


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write JSON lines atomically; creates the folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(path, "".join(map(_line, rows)))


def _line(row: Mapping[str, Any]) -> str:
    """A line of JSON. Half a surrogate pair, which a model may write, is no UTF-8: escaped."""
    line = json.dumps(row, ensure_ascii=False)
    try:
        line.encode()
    except UnicodeEncodeError:
        line = json.dumps(row)
    return f"{line}\n"


def read_rows(path: Path, keys: Collection[str] = ()) -> list[Row]:
    """Read the JSON lines that `write_rows` wrote.

    Errors: DataError names the line that is damaged, or has none of a key of `keys`.
    """
    rows: list[Row] = []
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise DataError(
            f"{path} does not exist: remove the stage that writes it, and those after it, from "
            f"{STATE}; it runs again"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read: {error}") from None
    *lines, rest = text.split("\n")
    if rest:
        raise DataError(f"{path}: line {len(lines) + 1} is damaged: its end is missing")
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(dict(json.loads(line)))
        except (RecursionError, TypeError, ValueError) as error:
            raise DataError(f"{path}: line {number} is damaged: {error}") from None
        if lacking := [key for key in keys if key not in rows[-1]]:
            raise DataError(f"{path}: line {number} has no `{lacking[0]}`")
    return rows
