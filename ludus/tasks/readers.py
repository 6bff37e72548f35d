"""Readers: JSON lines, Hugging Face data sets, and tasks that an environment makes from seeds.

    tasks = read_tasks(Spec(name="json", args={"path": "gsm8k.jsonl"}), "tasks.train")
    tasks[0].id        'gsm8k.jsonl:1'
    tasks.skipped      skipped lines (`on_bad_line: skip`), each with its reason
    tasks.rows         row numbers of tasks from files: {'gsm8k.jsonl:1': 1}

The reader's arguments map the fields of a row to the fields of a task; all other fields of the row
go to `Task.data`.
"""

from __future__ import annotations

import json
from bdb import BdbQuit
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol

from pydantic import Field

from ludus.core.errors import ConfigError, DataError, MissingDependency, did_you_mean
from ludus.core.files import not_there, searched
from ludus.core.modules import own_frame, told
from ludus.core.types import Spec, Task
from ludus.tasks import READERS
from ludus.tasks.fields import REMEDIES, REMEDY, FieldMapping, NoField
from ludus.tasks.splits import Taken, fingerprint

OnBadLine = Literal["refuse", "skip"]

FILE_KINDS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}
"""Files of rows: the name of their format in `datasets`, by suffix."""

SKIPPED_BY = "tasks.on_bad_line: skip"
"""The setting of a recipe that skips malformed rows."""

_NUM_SHOWN = 5  # bad lines or ids that an error lists
_MOST_FIELDS = 20  # of a row that an error lists
_MAX_TRIES = 1000  # seeds to try in place of a held-out task that training has


@dataclass(frozen=True, slots=True)
class BadLine:
    """A malformed row: its number, counted from 1, and the reason."""

    source: str
    number: int
    reason: str

    def __str__(self) -> str:
        return f"{self.source}:{self.number}: {self.reason}"


class TaskList(list[Task]):
    """A list of tasks, with the skipped lines, the row numbers of tasks from files by id, the rows
    of a benchmark's file or split and, for a mixture, the ratios of its parts and the parts of
    which a step has no task twice."""

    def __init__(
        self,
        tasks: Iterable[Task] = (),
        skipped: Iterable[BadLine] = (),
        ratios: Mapping[str, int] | None = None,
        rows: Mapping[str, int] | None = None,
        distinct: Iterable[str] = (),
        num_rows: int = 0,
    ) -> None:
        super().__init__(tasks)
        self.skipped = list(skipped)
        self.ratios = dict(ratios or {})
        self.rows = dict(rows or {})
        self.distinct = frozenset(distinct)
        self.num_rows = num_rows


class TaskMaker(Protocol):
    """The part of an environment that readers use; `ludus.envs.base.Env` has it."""

    @property
    def agentgym(self) -> str | None: ...

    def members(self) -> Mapping[str, TaskMaker]: ...

    def tiers(self) -> Sequence[str]: ...

    def check_tier(self, tier: str) -> None: ...

    def task(self, tier: str | None, seed: int) -> Task: ...


def read_tasks(
    spec: Spec,
    where: str = "",
    *,
    maker: TaskMaker | None = None,
    on_bad_line: OnBadLine = "refuse",
    taken: Taken | None = None,
    skipped_by: str = SKIPPED_BY,
) -> TaskList:
    """Read the tasks of a reader's spec. `where` is its config path, for errors.

    Args:
        maker: the run's environment, for readers that take tasks from it.
        skipped_by: the setting that skips malformed lines, for the error.
        taken: tasks to leave out; readers that make tasks from seeds make others in their place,
            other readers ignore it.

    Errors: ConfigError for a wrong argument; DataError for a missing file, for malformed lines
    (unless they are skipped), for duplicate ids, and if there is no task.
    """
    place = where or f"reader {spec.name!r}"
    context = {"maker": maker, "on_bad_line": on_bad_line, "place": place, "taken": taken}
    read = READERS.build(spec, where, **context, skipped_by=skipped_by)
    given: Any = read
    found = list(given) if isinstance(given, Iterable) else [given]
    if wrong := [task for task in found if not isinstance(task, Task)]:
        raise ConfigError(
            f"{place}: {spec.name!r} gives {wrong[0]!r:.80}, not a task: name a function that "
            "returns a list of ludus.core.types.Task"
        )
    tasks = read if isinstance(read, TaskList) else TaskList(found)
    if not tasks:
        reason = f": all {len(tasks.skipped)} lines are malformed" if tasks.skipped else ""
        raise DataError(f"{place} gives no task{reason}")
    twice = [id for id, count in Counter(task.id for task in tasks).items() if count > 1]
    if twice:
        raise DataError(
            f"{place}: {len(twice)} ids belong to more than one task: "
            f"{_listed(repr(id) for id in twice)}"
        )
    return tasks


Path_ = Annotated[str, Field(min_length=1, description="The file.")]
PromptField = Annotated[str, Field(description="Field with the prompt: a text, or messages.")]
AnswerField = Annotated[str | None, Field(description="Field with the answer; null: none.")]
IdField = Annotated[str | None, Field(description="Field with the id; null: source and number.")]
TierField = Annotated[str | None, Field(description="Field with the tier; null: none.")]
ToolsField = Annotated[
    str | None,
    Field(description="Field with the names of the task's tools, a list or null; null: all tools."),
]
ConsistencyField = Annotated[
    str | None,
    Field(description="Field with the share of answers that agree with the answer (p), 0 to 1."),
]
DataFields = Annotated[
    list[str] | None, Field(description="Fields kept in the task's data; null: all the others.")
]
EnvSpec = Annotated[Spec | None, Field(description="Environment; none: without; null: the run's.")]
JudgeSpec = Annotated[Spec | None, Field(description="Judge; null: the run's.")]
Limit = Annotated[
    int | None, Field(ge=1, description="Read only so many rows, after `skip`; null: all.")
]
Skip = Annotated[
    int, Field(ge=0, description="Leave out the first rows: they are another split's.")
]

LeaveOut = Annotated[
    list[int] | None,
    Field(description="Numbers of rows to leave out, from 1 as in messages; null: none."),
]


def read_json(
    path: Path_,
    prompt: PromptField = "prompt",
    answer: AnswerField = "answer",
    id: IdField = None,
    tier: TierField = None,
    tools: ToolsField = None,
    consistency: ConsistencyField = None,
    data: DataFields = None,
    env: EnvSpec = None,
    judge: JudgeSpec = None,
    limit: Limit = None,
    skip: Skip = 0,
    leave_out: LeaveOut = None,
    on_bad_line: OnBadLine = "refuse",
    skipped_by: str = SKIPPED_BY,
) -> TaskList:
    """Read a file of JSON lines: one object a line, UTF-8; empty lines are skipped."""
    file = Path(path)
    if not file.is_file():
        what = "is a folder, not a file" if file.is_dir() else not_there(file)
        raise DataError(f"{path} {what}")
    mapping = FieldMapping(path, prompt, answer, id, tier, tools, consistency, data, env, judge)

    def make(number: int, line: bytes) -> Task:
        return mapping.task(number, parse_line(line))

    check_encoding(file)
    with file.open("rb") as lines:
        filled = ((n, line) for n, line in enumerate(lines, start=1) if line.strip())
        rows = _but(leave_out, islice(filled, skip, None))
        return read_rows(rows, make, path, on_bad_line, limit, skipped_by)


def read_hf(
    path: Annotated[str, Field(min_length=1, description="Hub name, local folder, or file.")],
    name: Annotated[str | None, Field(description="Configuration of the data set.")] = None,
    split: Annotated[str, Field(description="Split, or a slice of one: train[:1000].")] = "train",
    revision: Annotated[str | None, Field(description="Hub revision; pins the data.")] = None,
    prompt: PromptField = "prompt",
    answer: AnswerField = "answer",
    id: IdField = None,
    tier: TierField = None,
    tools: ToolsField = None,
    consistency: ConsistencyField = None,
    data: DataFields = None,
    env: EnvSpec = None,
    judge: JudgeSpec = None,
    limit: Limit = None,
    skip: Skip = 0,
    leave_out: LeaveOut = None,
    on_bad_line: OnBadLine = "refuse",
    skipped_by: str = SKIPPED_BY,
) -> TaskList:
    """Read a Hugging Face data set: a hub name, a saved data set, a data folder or a data file."""
    rows = load_hf(path, name, split, revision)
    columns = list(rows.column_names)
    fields = {"prompt": prompt, "answer": answer, "id": id, "tier": tier, "tools": tools}
    fields["consistency"] = consistency
    for key, field in fields.items():
        if field is not None and field not in columns:
            raise DataError(
                f"{path}, split {split}, has no column {field!r}{did_you_mean(field, columns)}: "
                f"{REMEDIES.get(key, REMEDY).format(key=key)}"
            )
    fixed = tools, consistency, data, env, judge
    mapping = FieldMapping(f"{path}/{split}", prompt, answer, id, tier, *fixed)
    numbered = _but(leave_out, islice(enumerate(rows, start=1), skip, None))
    return read_rows(numbered, mapping.task, mapping.source, on_bad_line, limit, skipped_by)


def read_env(
    num_tasks: Annotated[int, Field(ge=1, description="Number of tasks.")],
    tiers: Annotated[
        list[str] | None, Field(min_length=1, description="Levels or depths; null: all.")
    ] = None,
    first_seed: Annotated[int, Field(ge=0, description="Seed of the first task.")] = 0,
    maker: TaskMaker | None = None,
    taken: Taken | None = None,
    place: str = "tasks",
) -> TaskList:
    """Make tasks from seeds: task i has tier i mod n and seed first_seed + i div n, for n tiers.

    `num_tasks` tasks use ceil(num_tasks / n) seeds. A held-out task that training has is replaced
    by the first task of its tier, from the seeds after these, that training does not have.
    """
    if maker is None:
        raise ConfigError("the reader 'env' needs an environment: set the config's `env`")
    for name in tiers or ():
        maker.check_tier(name)
    chosen: list[str | None] = [*(tiers or maker.tiers())] or [None]
    num_tiers = len(chosen)
    next_seed: dict[str | None, int] = dict.fromkeys(chosen, first_seed - (-num_tasks // num_tiers))
    tasks: list[Task] = []
    try:
        for i in range(num_tasks):
            tier = chosen[i % num_tiers]
            tasks.append(_made(maker, tier, first_seed + i // num_tiers, place))
            if taken is not None and taken(tasks[-1]):
                tasks[-1], next_seed[tier] = _further(maker, tier, next_seed[tier], taken, place)
        return TaskList(tasks)
    except NotImplementedError as error:
        raise ConfigError(
            f"the reader 'env': {error}; give the class a method `task`, or use another reader"
        ) from None


class NoHeldoutTask(DataError):
    """Training has all tasks that an environment makes."""


def _made(maker: TaskMaker, tier: str | None, seed: int, place: str) -> Task:
    """Returns the task of a tier and a seed. Errors: ConfigError for something else; DataError
    where a class from outside of ludus raises."""
    name = getattr(maker, "__name__", type(maker).__name__)
    try:
        task: Any = maker.task(tier, seed)
    except (NotImplementedError, BdbQuit):
        raise
    except (Exception, SystemExit) as error:
        if own_frame(error) is None:
            raise
        raise DataError(f"{place}: {name}.task({tier!r}, {seed}) raised {told(error)}") from error
    if not isinstance(task, Task):
        raise ConfigError(
            f"{name}.task({tier!r}, {seed}) returned {task!r:.80}; it has to return a Task"
        )
    return task


def _further(
    maker: TaskMaker, tier: str | None, seed: int, taken: Taken, place: str
) -> tuple[Task, int]:
    """Returns the first task from `seed` on that is not taken, and the seed after it."""
    different: set[str] = set()
    for further in range(seed, seed + _MAX_TRIES):
        if not taken(task := _made(maker, tier, further, place)):
            return task, further + 1
        different.add(fingerprint(task))
    if len(different) == 1:
        name = getattr(maker, "__name__", type(maker).__name__)
        raise DataError(
            f"{name}.task({tier!r}, seed) makes the same task of {_MAX_TRIES} seeds (data "
            f"{task.data!s:.80}), and training has it, so no held-out task is left: put what "
            "the seed changes into Task.data, from which `reset` takes it; of an environment with "
            "one task only, `tasks.allow_overlap: true` evaluates on it"
        )
    of_tier = f"tier {tier}: " if tier else ""
    raise NoHeldoutTask(
        f"{of_tier}training has the tasks of {_MAX_TRIES} seeds in a row, {seed} to "
        f"{seed + _MAX_TRIES - 1}, so no held-out task is left: give `tasks.train` fewer tasks"
        f"{' of this tier, hold out another tier,' if tier else ','} or set `tasks.allow_overlap: "
        "true`; if different tasks open alike, override the environment's `world`, so that it "
        "names what differs"
    )


def read_rows(
    rows: Iterable[tuple[int, Any]],
    make: Callable[[int, Any], Task | None],
    source: str,
    on_bad_line: OnBadLine,
    limit: int | None,
    skip: str = SKIPPED_BY,
) -> TaskList:
    """Make a task of each numbered row, up to `limit`; refuse or report the malformed rows.

    Args:
        make: raises ValueError with the reason for a malformed row; None leaves a row out.
        skip: the setting that skips malformed rows, for the error.

    Errors: DataError.
    """
    tasks: list[Task] = []
    numbers: dict[str, int] = {}
    bad_lines: list[BadLine] = []
    lacking: NoField | None = None
    for number, row in rows:
        if limit is not None and len(tasks) >= limit:
            break
        try:
            if (task := make(number, row)) is not None:
                tasks.append(task)
                numbers[task.id] = number
        except ValueError as error:
            lacking = error if isinstance(error, NoField) else lacking
            bad_lines.append(BadLine(source, number, str(error)))
    if lacking is not None and not tasks:  # not the rows are wrong, but the name of the field
        raise DataError(
            f"{source}: no row has the field {lacking.name!r} (fields: "
            f"{', '.join(lacking.known[:_MOST_FIELDS]) or 'none'}): {lacking.remedy}"
        )
    if bad_lines and on_bad_line == "refuse":
        raise DataError(
            f"{source}: {len(bad_lines)} malformed {'line' if len(bad_lines) == 1 else 'lines'} "
            f"(`{skip}` skips them): "
            + _listed(f"line {bad.number} {bad.reason}" for bad in bad_lines)
        )
    return TaskList(tasks, bad_lines, rows=numbers)


def _but(
    leave_out: Sequence[int] | None, rows: Iterable[tuple[int, Any]]
) -> Iterator[tuple[int, Any]]:
    """The numbered rows but these."""
    left_out = frozenset(leave_out or ())
    return (row for row in rows if row[0] not in left_out)


def check_encoding(file: Path) -> None:
    """Refuse a file in UTF-16 or UTF-32, or of no text, of which each line would be malformed.

    Errors: DataError.
    """
    with file.open("rb") as opened:
        start = opened.read(400)
    encoding = json.detect_encoding(start[:4])
    if encoding.startswith("utf-8"):
        return
    if start.decode(encoding, errors="ignore").lstrip("\ufeff \t\r\n")[:1] not in ("{", "["):
        raise DataError(f"{file} is not text: it has to be a file of JSON lines, in UTF-8")
    raise DataError(
        f"{file} is in {encoding.upper()}, and has to be in UTF-8: "
        f"`iconv -f {encoding.upper()} -t UTF-8 {file} > NEW_FILE` converts it"
    )


def parse_line(line: bytes) -> dict[str, Any]:
    """The object of a line of JSON. Errors: ValueError with the reason for any other line."""
    try:
        row = json.loads(line.decode("utf-8-sig").rstrip("\r\n"), parse_constant=_no_constant)
    except UnicodeDecodeError as error:
        raise ValueError(f"is not UTF-8 (byte {error.start})") from None
    except json.JSONDecodeError as error:
        what = error.msg.removesuffix(" at")
        raise ValueError(f"is not JSON: {what} at column {error.colno}") from None
    except RecursionError:
        raise ValueError("is nested too deeply") from None
    if not isinstance(row, dict):
        raise ValueError(f"is not an object but {type(row).__name__}")
    if b"\\ud" in line.lower():  # the escape of a surrogate
        check_unicode(row)
    return row


def check_unicode(value: Any) -> None:
    """Refuse a lone surrogate: JSON can escape it, UTF-8 and tokenizers cannot hold it.

    Errors: ValueError.
    """
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        code = ord(error.object[error.start])
        raise ValueError(f"has a lone surrogate, \\u{code:04x}, which is no character") from None


def _no_constant(name: str) -> None:
    raise ValueError(f"has {name}, which is not JSON")


def load_hf(path: str, name: str | None, split: str, revision: str | None) -> Any:
    """Load a split of a Hugging Face data set: hub name, saved data set, folder or file.

    Errors: DataError, MissingDependency.
    """
    try:
        import datasets
    except ModuleNotFoundError as error:
        raise MissingDependency("datasets", "data", "the reader 'hf'") from error
    local = Path(path)
    saved = any((local / mark).is_file() for mark in ("state.json", "dataset_dict.json"))
    if local.suffix in FILE_KINDS and not local.is_file():
        siblings = [item.name for item in local.parent.glob("*") if item.is_file()]
        near = did_you_mean(local.name, siblings)
        raise DataError(f"there is no file {path}{searched(local)}{near}")
    try:
        if saved:
            loaded = datasets.load_from_disk(path)
            if isinstance(loaded, dict) and split not in loaded:
                raise DataError(f"{path} has no split {split!r}{did_you_mean(split, loaded)}")
            return loaded[split] if isinstance(loaded, dict) else loaded
        if local.is_file():
            kind = FILE_KINDS.get(local.suffix)
            if kind is None:
                raise DataError(f"{path}: the file type must be one of {', '.join(FILE_KINDS)}")
            if kind != "parquet":
                check_encoding(local)
            return datasets.load_dataset(kind, data_files={"train": path}, split=split)
        return datasets.load_dataset(path, name, split=split, revision=revision)
    except DataError:
        raise
    except Exception as error:  # `datasets` passes on errors of httpx, pyarrow and others
        raise DataError(f"cannot load the data set {path}, split {split}: {error}") from error


def _listed(items: Iterable[str]) -> str:
    """The first items, and the number of the others."""
    every = list(items)
    more = len(every) - _NUM_SHOWN
    return "; ".join(every[:_NUM_SHOWN]) + (f"; and {more} more" if more > 0 else "")
