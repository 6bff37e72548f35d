"""Reads KernelBench and the AI CUDA Engineer Archive, from the Hugging Face hub or from files.

    tasks.train: {name: kernelbench, args: {levels: [1, 2]}}                    the hub's splits
    tasks.train: {name: cuda_engineer_archive, args: {path: level_1.parquet}}   a file

A task has the problem in `data`: `reference`, `name`, `level`, `number`; of the archive, where
asked for, a kernel with its `claims`. Its tier is the problem's difficulty. It has no prompt and no
judge: an environment for kernels opens the episode and verifies what is written.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from ludus.core.errors import ConfigError, DataError
from ludus.core.types import Task
from ludus.tasks.benchmarks.reader import file_rows
from ludus.tasks.kernels.rows import (
    ARCHIVE_COLUMNS,
    KERNEL_COLUMNS,
    KERNELBENCH_COLUMNS,
    Problem,
    archive_row,
    kernelbench_row,
)
from ludus.tasks.readers import Limit, OnBadLine, TaskList, load_hf, parse_line, read_rows

KERNELBENCH, ARCHIVE = "ScalingIntelligence/KernelBench", "SakanaAI/AI-CUDA-Engineer-Archive"

SUFFIXES = (".parquet", ".jsonl", ".json")

_LEVEL_IN_NAME = re.compile(r"level_(\d+)")

Make = Callable[[int, Problem], Task | None]

KernelPath = Annotated[
    str | None,
    Field(
        min_length=1,
        description="A file with the hub's columns (.parquet, .jsonl, .json), or a folder with "
        "level_1.parquet, level_2.parquet, ...; null: the hub.",
    ),
]
Levels = Annotated[
    list[int] | None, Field(min_length=1, description="Levels to read; null: all of the source.")
]
Revision = Annotated[str | None, Field(description="Hub revision; pins the data.")]


def read_kernelbench(
    path: KernelPath = None,
    levels: Levels = None,
    revision: Revision = None,
    limit: Limit = None,
    on_bad_line: OnBadLine = "refuse",
) -> TaskList:
    """Read the problems of KernelBench (Ouyang et al. 2025, arXiv:2502.10517)."""
    seen: set[object] = set()

    def make(_: int, problem: Problem) -> Task:
        key = problem.level, problem.number
        if key in seen:
            of = "" if problem.level is None else f" of level {problem.level}"
            raise ValueError(f"repeats problem {problem.number}{of}")
        seen.add(key)
        return _task(problem)

    sources = _sources(KERNELBENCH, path, levels, revision, (1, 2, 3, 4), KERNELBENCH_COLUMNS)
    return _read(sources, kernelbench_row, make, levels, limit, on_bad_line)


def read_archive(
    path: KernelPath = None,
    levels: Levels = None,
    unit: Annotated[
        Literal["problem", "kernel"],
        Field(
            description="problem: a task a problem, from its first row, without kernels. kernel: a "
            "task a row, with its kernel and what the archive claims of it."
        ),
    ] = "problem",
    claimed_correct: Annotated[
        bool | None,
        Field(description="Rows that claim this; null: all. A claim is no verification."),
    ] = None,
    revision: Revision = None,
    limit: Limit = None,
    on_bad_line: OnBadLine = "refuse",
) -> TaskList:
    """Read the AI CUDA Engineer Archive (Sakana AI, CC BY 4.0): problems of KernelBench, each with
    many kernels."""
    if unit == "problem" and claimed_correct is not None:
        raise ConfigError("`claimed_correct` is of kernels: set `unit: kernel`, or remove it")
    seen: set[object] = set()

    def make(number: int, problem: Problem) -> Task | None:
        if problem.claims is not None:
            wanted = claimed_correct is None or problem.claims["correct"] is claimed_correct
            return _task(problem, number) if wanted else None
        key = problem.level, problem.number
        if key in seen:
            return None
        seen.add(key)
        return _task(problem)

    kernel = unit == "kernel"
    columns = (*ARCHIVE_COLUMNS, *(KERNEL_COLUMNS if kernel else ()))
    sources = _sources(ARCHIVE, path, levels, revision, (1, 2, 3), columns)
    row_of = partial(archive_row, kernel=kernel)
    return _read(sources, row_of, make, levels, limit, on_bad_line)


def _task(problem: Problem, row: int | None = None) -> Task:
    """The task of a problem; with `row`, that of the kernel in the row.

    Both data sets number the problems alike, so both give a problem the same id: a problem of the
    one that is held out cannot be trained on from the other.
    """
    level = "x" if problem.level is None else problem.level
    id = f"kernelbench:{level}/{problem.number}"
    facts = {key: value for key, value in asdict(problem).items() if value is not None}
    tier = facts.pop("tier")
    return Task(id=id if row is None else f"{id}/{row}", data=facts, tier=tier)


# Sources


@dataclass(frozen=True, slots=True)
class _Source:
    """A file, or a split of the hub, with the level that its name tells."""

    name: str
    level: int | None
    rows: Callable[[], Iterable[tuple[int, Any]]]


def _read(
    sources: Sequence[_Source],
    row_of: Callable[[Any, int | None], Problem],
    make: Make,
    levels: Sequence[int] | None,
    limit: int | None,
    on_bad_line: OnBadLine,
) -> TaskList:
    """The tasks of all sources, up to `limit`."""
    found = TaskList()
    for source in sources:

        def task(number: int, row: Any, source: _Source = source) -> Task | None:
            if isinstance(row, bytes):
                row = parse_line(row)
            if not isinstance(row, dict):
                raise ValueError(f"is not an object but {type(row).__name__}")
            problem = row_of(row, source.level)
            if levels is not None and problem.level not in levels:
                return None
            made = make(number, problem)
            return made and made.model_copy(update={"source": source.name})

        left = None if limit is None else limit - len(found)
        if left != 0:
            read = read_rows(source.rows(), task, source.name, on_bad_line, left)
            found.extend(read)
            found.skipped += read.skipped
            found.rows |= read.rows
    return found


def _sources(
    hub: str,
    path: str | None,
    levels: Sequence[int] | None,
    revision: str | None,
    published: Sequence[int],
    columns: Sequence[str],
) -> list[_Source]:
    """The files or splits to read. Errors: ConfigError for an unknown level; DataError for files
    that are not there."""
    if unknown := sorted(set(levels or ()) - set(published)):
        known = ", ".join(map(str, published))
        raise ConfigError(f"{hub} has no level {unknown[0]}: its levels are {known}")
    if path is None:
        return [_split(hub, level, revision, columns) for level in levels or published]
    if revision is not None:
        raise ConfigError(f"{hub}: `revision` is of the hub, and `path` names a file: remove one")
    files = [Path(path)]
    if files[0].is_dir():
        files = [_file_of(files[0], level) for level in levels or _levels_in(files[0])]
        if not files:
            raise DataError(f"{path} has no level_1{SUFFIXES[0]}, level_2{SUFFIXES[0]}, ...")
    for file in files:
        if file.is_file() and file.suffix.lower() not in SUFFIXES:
            raise DataError(f"{file}: the file type must be one of {', '.join(SUFFIXES)}")
    return [_file(str(file), columns) for file in files]


def _split(hub: str, level: int, revision: str | None, columns: Sequence[str]) -> _Source:
    split = f"level_{level}"

    def rows() -> Iterable[tuple[int, Any]]:
        loaded = load_hf(hub, None, split, revision)
        return enumerate(loaded.select_columns(_of(columns, loaded.column_names)), start=1)

    return _Source(f"{hub}/{split}", level, rows)


def _file(path: str, columns: Sequence[str]) -> _Source:
    named = _LEVEL_IN_NAME.fullmatch(Path(path).stem)
    return _Source(path, int(named[1]) if named else None, lambda: file_rows(path, columns))


def _of(columns: Sequence[str], present: Sequence[str]) -> list[str]:
    """The columns that there are; an absent one is found wanting in the first row."""
    return [column for column in columns if column in present]


def _levels_in(folder: Path) -> list[int]:
    named = (_LEVEL_IN_NAME.fullmatch(file.stem) for file in folder.iterdir())
    return sorted({int(found[1]) for found in named if found})


def _file_of(folder: Path, level: int) -> Path:
    for suffix in SUFFIXES:
        if (file := folder / f"level_{level}{suffix}").is_file():
            return file
    raise DataError(f"{folder} has no level_{level}{SUFFIXES[0]} ({', '.join(SUFFIXES[1:])})")
