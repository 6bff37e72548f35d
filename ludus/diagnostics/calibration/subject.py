"""The subject of a calibration: an environment, or a data set of questions with answers."""

from __future__ import annotations

import asyncio
import inspect
import re
from bisect import bisect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Literal, get_args

from ludus.config.tasks import TasksConfig
from ludus.core.errors import ConfigError, DataError, EnvError, LudusError, did_you_mean
from ludus.core.files import not_there
from ludus.core.system.signals import run
from ludus.core.types import Spec, Task
from ludus.diagnostics.calibration.rows import (
    Rows,
    check_answers,
    check_different,
    of_rows,
    repeated,
    unscorable,
)
from ludus.envs import ENVS
from ludus.envs.base import Env, expert_knows_more, is_blocking, tiers_of
from ludus.rollout.hosts.threads import in_daemon
from ludus.tasks import READERS
from ludus.tasks.readers import (
    FILE_KINDS,
    BadLine,
    OnBadLine,
    TaskList,
    load_hf,
    parse_line,
    read_tasks,
)

MAX_TIERS = 4
"""Levels that a first recipe trains on unless `--tiers` names them: the shortest."""

CONSTRUCTOR_S = 10.0
"""Seconds that the constructor of one's own environment may take."""

HELDOUT_SEED = 1_000_000
"""First seed of the held-out tasks."""


@dataclass(frozen=True, slots=True)
class Subject:
    """An environment with tasks from seeds, or the rows of a data set with a judge.

    Args:
        given: as the user named it.
        env: None with the kind `env`: `reader` makes the tasks from seeds, for an agent.
        tiers: levels of the environment that are trained on; empty: it has none.
        levels: all that it has.
        rows: number of the data set's rows; 0: tasks come from seeds.
        fields: the reader's arguments for the fields of a row.
        gaps: of each row that is left out, the number of tasks before it.
        on_bad_line: treatment of a malformed row by the reader.
        warnings: what the rows foretell.
    """

    kind: Literal["env", "data"]
    given: str
    name: str
    env: Spec | None = None
    tiers: Sequence[str] = ()
    levels: Sequence[str] = ()
    reader: str = "env"
    rows: int = 0
    fields: Mapping[str, Any] = field(default_factory=dict)
    judge: Spec | None = None
    tasks: Sequence[Task] = ()
    gaps: Sequence[int] = ()
    on_bad_line: OnBadLine = "refuse"
    warnings: Sequence[str] = ()

    def maker(self) -> Env | None:
        """The environment; None for a data set."""
        return ENVS.build(self.env, "env") if self.env else None

    def own_threads(self, task: Task) -> bool:
        """True for the user's own class whose steps run in worker threads."""
        if self.env is None or ":" not in self.env.name:
            return False
        return is_blocking(ENVS.load(self.env.name), task, self.env.args)

    def searches(self, task: Task) -> bool:
        """True if the expert knows what an agent must find out first. Errors: ConfigError."""
        if self.env is None:
            return False
        try:
            return expert_knows_more(ENVS.load(self.env.name), task, self.env.args)
        except EnvError as error:
            raise ConfigError(str(error)) from error

    @property
    def heldout_tiers(self) -> Sequence[str]:
        """The levels that the environment holds out for these, `LEVEL/test`; empty: none."""
        env = self.maker() if self.tiers else None
        own = [f"{tier}/test" for tier in self.tiers]
        return own if env is not None and set(own) <= set(env.tiers()) else []

    def reader_of(self, num_tasks: int, first: int, tiers: Sequence[str] = ()) -> Spec:
        """The reader of `num_tasks` tasks from a seed, or a row, on. `tiers`: other levels."""
        if self.kind == "env":
            args: dict[str, Any] = {"first_seed": first, "num_tasks": num_tasks}
            if chosen := tiers or self.tiers:
                args = {"tiers": list(chosen), **args}
            return Spec(name=self.reader, args={**self.fields, **args})
        if first:
            first += sum(before <= first for before in self.gaps)
        first += int(self.fields.get("skip", 0))
        skip = {"skip": first} if first else {}
        return Spec(name=self.reader, args={**self.fields, **skip, "limit": num_tasks})

    def take(self, num_tasks: int, first: int) -> list[Task]:
        """Tasks from a seed, or a row, on."""
        if self.kind == "data":
            return list(self.tasks[first : first + num_tasks])
        return list(read_tasks(self.reader_of(num_tasks, first), "tasks", maker=self.maker()))


def open_subject(given: str, args: Mapping[str, Any], tiers: str | None) -> Subject:
    """Find out what a name is. Errors: ConfigError, DataError, MissingDependency."""
    if is_rows(given):
        if tiers is not None:
            raise ConfigError("--tiers selects levels of an environment; a data set has rows")
        return data_set(given, args)
    if given.endswith(".py") and Path(given).is_file():
        classes = re.findall(r"^class (\w+)", Path(given).read_text(encoding="utf-8"), re.MULTILINE)
        of = " or ".join(f"{given}:{name}" for name in classes[:3]) or f"{given}:CLASS"
        raise ConfigError(f"{given}: name the environment's class too: {of}")
    if given not in ENVS.names() and ":" not in given:
        near = did_you_mean(given, ENVS.names())
        raise ConfigError(
            f"{given!r} is no environment{near}: give its name, FILE.py:Class, a .jsonl, .json, "
            ".parquet or .csv file, the name of a data set on the hub (OWNER/NAME), or an agent "
            "(FILE.py:function)"
        )
    return environment(given, args, tiers)


def environment(
    given: str, args: Mapping[str, Any], tiers: str | None, prefix: str = ""
) -> Subject:
    """An environment and its levels.

    Args:
        tiers: the names of some levels, as in `chosen_tiers`; None: all `for_training`.
        prefix: of its arguments in the command.

    Errors: ConfigError, MissingDependency.
    """
    env = Spec(name=given, args=dict(args))
    try:
        with as_arguments(given, "env", prefix):
            maker = _constructed(env)
    except ConfigError as error:
        if ":" not in given or inspect.isclass(ENVS.load(given)):
            raise
        raise ConfigError(
            f"{error} ({given} is taken as an environment's: an agent is a function of `task` and "
            "`model`)"
        ) from None
    if not hasattr(maker, "tiers"):
        raise ConfigError(
            f"{given} is neither an environment (derive the class from ludus.Env) nor an "
            "agent (a function of `task` and `model`: async def run(task, model))"
        )
    known = _tiers_of(given, maker)
    if tiers is not None and not known:
        raise ConfigError(f"--tiers: {given} has no levels: leave it out")
    chosen = chosen_tiers(tiers, known) if tiers is not None else []
    for tier in chosen:
        try:
            maker.check_tier(tier)
        except LudusError:
            raise
        except Exception as error:
            raise ConfigError(f"{given}: check_tier({tier!r}) {_raised(error)}") from error
    name = given.rpartition(":")[2] if ":" in given else given
    return Subject("env", given, slug(name, chosen), env, chosen or for_training(known), known)


def for_training(levels: Sequence[str]) -> list[str]:
    """The levels without those that are held out for others: `LEVEL/test` and `LEVEL/dev`."""
    others = {f"{level}/{part}" for level in levels for part in ("test", "dev")}
    return [level for level in levels if level not in others]


def chosen_tiers(text: str, known: Sequence[str]) -> list[str]:
    """The levels of `--tiers`: a name, which may contain commas, or several with commas between.

    Errors: ConfigError for an empty name, and for a level that is named twice.
    """
    names = [text] if text in known else [name.strip() for name in text.split(",")]
    if not all(names):
        raise ConfigError(f"--tiers: {text!r} has an empty name: separate levels by single commas")
    if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
        raise ConfigError(f"--tiers: {twice[0]} is named twice")
    return names


def _constructed(env: Spec) -> Any:
    """Construct what a spec names; one's own class in a thread, which may hang.

    Errors: ConfigError; those of the constructor.
    """
    if ":" not in env.name:
        return ENVS.build(env, "env")

    async def construct() -> Any:
        timer = asyncio.timeout(CONSTRUCTOR_S)
        try:
            async with timer:
                return await in_daemon(partial(ENVS.build, env, "env"))
        except TimeoutError:
            if not timer.expired():  # the constructor's own
                raise
            raise ConfigError(
                f"{env.name}: the constructor takes longer than {CONSTRUCTOR_S:g} s: each episode "
                "has an environment of its own, so load what all share once, in `prepare`"
            ) from None

    return run(construct())


@contextmanager
def as_arguments(given: str, place: str, prefix: str = "") -> Iterator[None]:
    """Name a plug-in's arguments as the command takes them: `env.args.size` is `size=...`.

    Errors: ConfigError.
    """

    def as_given(found: re.Match[str]) -> str:
        within, name, required, kind = found.groups()
        if required:
            words = f" ({kind.removeprefix(': ')})" if kind else ""
            return f"{given} needs `{prefix}{name}=...`{words}"
        return f"{within}{prefix}{name}" if within else f"{given}: {prefix}{name}"

    try:
        yield
    except ConfigError as error:
        key = rf"(?m)(?:^|([ (])){re.escape(place)}\.args\.(\w+)( is required(: .+)?$)?"
        raise ConfigError(re.sub(key, as_given, str(error))) from error


def _tiers_of(given: str, env: Any) -> list[str]:
    """The levels of an environment. Errors: ConfigError for anything else than names."""
    try:
        return tiers_of(env)
    except EnvError as error:
        raise ConfigError(f"{given}: {error}") from error
    except Exception as error:
        raise ConfigError(f"{given}: tiers() {_raised(error)}") from error


def _raised(error: Exception) -> str:
    """`raised KeyError: 'a'`, in one line."""
    return " ".join(f"raised {type(error).__name__}: {error}".split())


def slug(name: str, tiers: Sequence[str]) -> str:
    """A run's name of letters, digits and dashes; with the level where there is one."""
    text = "-".join([name, *tiers] if len(tiers) == 1 else [name]).lower()
    return "".join(c if c.isalnum() and c.isascii() else "-" for c in text).strip("-") or "run"


WHOLE = Spec(name="answer", args={"extract": "whole"})
"""The judge of a data set: the whole turn is the answer, as in SFT; numbers are equal by value."""

NUM_FIRST = 100
"""Rows whose fields are looked at."""

PROMPTS = ("prompt", "question", "problem", "instruction", "input", "query")
ANSWERS = ("answer", "solution", "target", "output", "label", "response", "completion")


def is_rows(given: str) -> bool:
    """True for the name of a file of rows, of a folder, or of a data set on the hub."""
    path = Path(given)
    if path.suffix in FILE_KINDS:
        return True
    known = given in ENVS.names() or ":" in given
    return not known and (path.is_dir() or given.count("/") == 1)


def data_set(given: str, args: Mapping[str, Any]) -> Subject:
    """The rows of a data set, each with an answer. Errors: ConfigError, DataError."""
    subject = rows_of(
        given, args, f"ludus init {given} ", needs_answer=True, compared=lambda _: True
    )
    return replace(subject, judge=WHOLE)


def rows_of(
    given: str,
    args: Mapping[str, Any],
    command: str,
    *,
    needs_answer: bool,
    compared: Callable[[Sequence[Task]], bool],
) -> Subject:
    """The rows of a data set, whose fields are found by their names.

    With `on_bad_line=skip`, malformed rows are left out, and those that nothing can score or that
    repeat an earlier one.

    Args:
        command: that names a field, up to the field, for the errors.
        compared: whether a judge compares with the answers of these rows.

    Errors: ConfigError, DataError.
    """
    path = Path(given)
    reader = "json" if path.suffix == ".jsonl" else "hf"
    args = {key.removeprefix("tasks."): value for key, value in args.items()}  # as in a recipe
    fields = {"path": given, **args}
    on_bad_line = fields.pop("on_bad_line", "refuse")
    if on_bad_line not in get_args(OnBadLine):
        raise ConfigError(f"on_bad_line must be one of refuse, skip, got {on_bad_line!r}")
    known = {*READERS.arguments(reader).model_fields, "on_bad_line"}
    for key in args:
        if key not in known:
            place = f"{command.rpartition(' ')[2]}{key}"
            raise ConfigError(f"{given}: {place} is not an argument{did_you_mean(key, known)}")
    columns = _columns(given, reader, fields)
    for key, names in (("prompt", PROMPTS), ("answer", ANSWERS)):
        if key in args or key in columns:
            continue
        found = next((n for n in names if n in columns), None)
        if found is None and (key == "prompt" or needs_answer):
            raise DataError(
                f"{given} has the fields {', '.join(columns)}: name the one with the {key}: "
                f"`{command}{key}=FIELD`"
            )
        fields[key] = found
    spec, skips = Spec(name=reader, args=fields), f"{command}on_bad_line=skip"
    with as_arguments(given, given, command.rpartition(" ")[2]):
        tasks = read_tasks(spec, given, on_bad_line=on_bad_line, skipped_by=skips)
    malformed = tasks.skipped
    left_out = {"malformed": malformed}
    if on_bad_line == "skip":
        tasks, others = _without(given, tasks, compared)
        left_out |= others
        if bad := [row.number for rows in others.values() for row in rows]:
            fields["leave_out"] = sorted({*bad, *(fields.get("leave_out") or ())})
    rows = Rows(tasks.rows, skips)
    if compared(tasks):
        check_answers(given, tasks, rows)
    check_different(given, tasks, rows)
    name = path.stem if path.suffix in FILE_KINDS else path.name
    numbers = [tasks.rows[task.id] for task in tasks]
    gone = {*(fields.get("leave_out") or ()), *(row.number for row in malformed)}
    return Subject(
        "data",
        given,
        slug(name, ()),
        reader=reader,
        rows=len(tasks),
        fields=fields,
        tasks=tasks,
        gaps=[bisect(numbers, number) for number in sorted(gone)],
        on_bad_line="skip" if malformed else "refuse",
        warnings=list(of_rows(given, tasks, left_out)),
    )


def _without(
    given: str, tasks: TaskList, compared: Callable[[Sequence[Task]], bool]
) -> tuple[TaskList, dict[str, list[BadLine]]]:
    """The rows but those that nothing can score, or that repeat an earlier one; and these."""
    left_out: dict[str, list[BadLine]] = {}
    for kind, find in (("unscorable", unscorable), ("repeated", repeated)):
        bad = find(tasks) if kind == "repeated" or compared(tasks) else []
        left_out[kind] = [BadLine(given, tasks.rows[task.id], why) for task, why in bad]
        ids = {task.id for task, _ in bad}
        tasks = TaskList((task for task in tasks if task.id not in ids), rows=tasks.rows)
    return tasks, left_out


def _columns(given: str, reader: str, fields: Mapping[str, Any]) -> list[str]:
    """The fields of the first rows."""
    if reader == "hf":
        rows = load_hf(given, fields.get("name"), fields.get("split", "train"), None)
        return list(rows.column_names)
    path = Path(given)
    if not path.is_file():
        what = "is a folder" if path.is_dir() else not_there(path)
        raise DataError(f"{given} {what}")
    found: dict[str, None] = {}
    with path.open("rb") as lines:
        for line in islice(filter(bytes.strip, lines), NUM_FIRST):
            with suppress(ValueError):  # the reader says what is wrong with the line
                found |= dict.fromkeys(parse_line(line))
    return list(found) or ["prompt", "answer"]


def config_tasks(subject: Subject, num_train: int, num_heldout: int) -> TasksConfig:
    """The section `tasks` of the recipe."""
    tiers = subject.heldout_tiers
    first = num_train if subject.kind == "data" else 0 if tiers else HELDOUT_SEED
    return TasksConfig(
        train=subject.reader_of(num_train, 0),
        heldout=subject.reader_of(num_heldout, first, tiers),
        on_bad_line=subject.on_bad_line,
    )
