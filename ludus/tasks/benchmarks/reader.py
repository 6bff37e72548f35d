"""Reads a benchmark from the Hugging Face hub, or from a file with the fields of the hub's rows.

    read_benchmark("gsm8k")                                the hub's split
    read_benchmark("gsm8k", path="gsm8k.jsonl", limit=100) the first rows of a file

Files are JSON lines or a JSON list (.jsonl, .json), Parquet (.parquet) or CSV (.csv).
"""

from __future__ import annotations

import codecs
import csv
import json
import stat
from collections.abc import Callable, Collection, Iterable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from ludus.core.errors import ConfigError, DataError, MissingDependency, did_you_mean
from ludus.core.types import NO_ENV, Message, Task
from ludus.tasks.benchmarks.rows import BENCHMARKS, Benchmark
from ludus.tasks.readers import Limit, OnBadLine, TaskList, load_hf, parse_line, read_rows

Rows = list[tuple[int, Any]]


def find_benchmark(name: str) -> Benchmark:
    """Returns the benchmark of a name. Errors: ConfigError with the nearest name."""
    if name not in BENCHMARKS:
        raise ConfigError(
            f"{name!r} is not a known benchmark{did_you_mean(name, BENCHMARKS)}: "
            "`ludus benchmark --list` lists all"
        )
    return BENCHMARKS[name]


def read_benchmark(
    name: Annotated[str, Field(description="Its name: see `ludus benchmark --list`.")],
    path: Annotated[
        str | None,
        Field(min_length=1, description="A file with the fields of the hub's rows; null: the hub."),
    ] = None,
    revision: Annotated[str | None, Field(description="Hub revision; pins the data.")] = None,
    limit: Limit = None,
    on_bad_line: OnBadLine = "refuse",
) -> TaskList:
    """Read a published benchmark with its prompt and judge, from the hub or from a file."""
    return benchmark_tasks(name, path, revision, limit, on_bad_line)


def benchmark_tasks(
    name: str,
    path: str | None = None,
    revision: str | None = None,
    limit: int | None = None,
    on_bad_line: OnBadLine = "refuse",
    skip: str = "tasks.on_bad_line: skip",
) -> TaskList:
    """The tasks of a benchmark, with the skipped rows.

    Rows with the content or the id of an earlier row of a file are malformed. Those of the hub are
    kept, because published results count them; a repeated id gets its row's number.

    Args:
        skip: the setting that skips malformed rows, for the error.

    Errors: ConfigError for an unknown name; DataError for a data set or rows that cannot be read.
    """
    benchmark = find_benchmark(name)
    if path is None:
        hub = benchmark.hub
        split = load_hf(hub.path, hub.config, hub.split, revision)
        rows: Iterable[tuple[int, Any]] = enumerate(split, start=1)
        num_rows = len(split)
        source = f"{hub.path}/{hub.split}"
    elif revision is not None:
        raise ConfigError(f"{name}: `revision` is of the hub, and `path` names a file: remove one")
    else:
        rows = file_rows(path)
        num_rows, source = len(rows), path
    make = _maker(name, benchmark, source, repeats=path is None)
    tasks = read_rows(rows, make, source, on_bad_line, limit, skip)
    tasks.num_rows = num_rows
    return tasks


def _maker(
    name: str, benchmark: Benchmark, source: str, *, repeats: bool
) -> Callable[[int, Any], Task]:
    """Returns the function that makes a row's task. Without `repeats`, repeated rows are bad."""
    seen: dict[object, int] = {}

    def make(number: int, row: Any) -> Task:
        if isinstance(row, bytes):
            row = parse_line(row)
        if not isinstance(row, dict):
            raise ValueError(f"is not an object but {type(row).__name__}")
        item = benchmark.fields.read(row)
        content = item.question, tuple(sorted(item.options)), item.answer
        repeated = item.id is not None and ("id", item.id) in seen
        if repeated and not repeats:
            raise ValueError(f"has the id of line {seen['id', item.id]}: {item.id!r:.80}")
        if content in seen and not repeats:
            raise ValueError(f"repeats line {seen[content]}")
        seen.setdefault(content, number)
        if item.id is not None:
            seen.setdefault(("id", item.id), number)
        own = str(number) if item.id is None or repeated else item.id
        return Task(
            id=f"{name}:{own}",
            prompt=[Message(role="user", content=benchmark.text(item))],
            answer=item.answer,
            data={"options": list(item.options)} if item.options else {},
            env=NO_ENV,
            judge=benchmark.judge,
            source=source,
            tier=item.category,
        )

    return make


def file_rows(path: str, columns: Collection[str] | None = None) -> Rows:
    """The numbered rows of a file: objects, or lines of JSON as bytes.

    `columns` are those to read of a Parquet file, where they are there; None: all.

    Errors: DataError for a file that is absent, of another kind, damaged or empty.
    """
    file = Path(path)
    try:
        mode = file.stat().st_mode
    except FileNotFoundError:
        raise DataError(f"{path} does not exist") from None
    except OSError as error:
        raise DataError(f"{path:.200}: cannot be read: {error.strerror}") from None
    if not stat.S_ISREG(mode):
        what = "a folder, not a file" if stat.S_ISDIR(mode) else "no regular file"
        raise DataError(f"{path} is {what}")
    kinds: dict[str, Callable[[Path], Rows]] = {
        ".jsonl": _json_rows,
        ".json": _json_rows,
        ".parquet": partial(_parquet_rows, columns=columns),
        ".csv": _csv_rows,
    }
    if (read := kinds.get(file.suffix.lower())) is None:
        raise DataError(f"{path}: the file type must be one of {', '.join(kinds)}")
    try:
        rows = read(file)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None
    if not rows:
        raise DataError(f"{path} has no rows")
    return rows


def _json_rows(file: Path) -> Rows:
    data = file.read_bytes().removeprefix(codecs.BOM_UTF8)
    if not data.lstrip().startswith(b"["):
        return [(n, line) for n, line in enumerate(data.split(b"\n"), start=1) if line.strip()]
    try:
        return list(enumerate(json.loads(data), start=1))
    except (RecursionError, ValueError) as error:
        raise DataError(f"{file} is not a JSON list, nor JSON lines: {error}") from None


def _parquet_rows(file: Path, columns: Collection[str] | None = None) -> Rows:
    try:
        import pyarrow.parquet as pq
        from pyarrow import ArrowException
    except ModuleNotFoundError as error:
        raise MissingDependency("pyarrow", "data", "a Parquet file") from error
    try:
        if columns is not None:
            columns = [name for name in pq.read_schema(file).names if name in columns]
        return list(enumerate(pq.read_table(file, columns=columns).to_pylist(), start=1))
    except ArrowException as error:
        raise DataError(f"{file} is not a Parquet file that can be read: {error}") from None


def _csv_rows(file: Path) -> Rows:
    """Rows of texts, numbered by their last line. A row with too few or many cells is malformed."""
    with file.open(encoding="utf-8-sig", newline="") as text:
        reader = csv.DictReader(text, strict=True)
        try:
            return [(reader.line_num, _cells(row)) for row in reader]
        except (csv.Error, UnicodeDecodeError) as error:
            raise DataError(f"{file}:{reader.line_num + 1} is not CSV: {error}") from None


def _cells(row: dict[str | None, Any]) -> Any:
    """The cells of a row that has one a column; a list of those of another row."""
    if None in row or None in row.values():
        return [cell for cell in row.values() if cell is not None]
    return row
