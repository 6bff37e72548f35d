"""Demonstrations: episodes of an environment's expert, played in parallel worker processes.

A hanging episode is killed with its process. An episode that raises, dies or is lost is recorded
with its reason; the others continue. The file is written atomically. Its content depends on the
tasks alone, not on the number of workers or on timing (except for episodes close to the timeout).
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import random
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from ludus.config.schema import MarkersConfig
from ludus.core.errors import DataError, LudusError, first_fault
from ludus.core.files import atomic_file, open_regular
from ludus.core.modules import require, told
from ludus.core.system.signals import ctrl_c_kept_from_children
from ludus.core.types import Spec, Task, Wire
from ludus.data.expert import CodeBlocks, Demonstration, Format, run_expert
from ludus.envs import ENVS
from ludus.envs.base import NoExpert
from ludus.rollout.hosts.host import LocalEnvs
from ludus.tools.toolbox import Toolbox

EPISODES_PER_JOB = 16
"""Episodes of a job. Sending a job costs as much as playing a short episode."""

JOBS_PER_WORKER = 4
"""Jobs scheduled ahead of the next job to write."""

MAX_BROKEN = 3
"""Pools that break one after the other without a result, from which no more are started."""

MAX_DEATHS, DEATHS_SHARE = 8, 0.05
"""Episodes that end their process, and their share of all, from which no more are played."""


class Dropped(Wire):
    """An episode that gave no demonstration. `kind`: timeout, died, error, no expert, or lost."""

    task_id: str
    tier: str | None
    kind: str
    reason: str


@dataclass(frozen=True, slots=True)
class Summary:
    """Result of `generate_demonstrations`. `dropped` counts the episodes left out, by kind."""

    path: Path
    num_kept: int
    seconds: float
    dropped: dict[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        text = f"{self.num_kept} demonstrations in {self.seconds:.1f} s"
        if self.dropped:
            kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(self.dropped.items()))
            text += f"; dropped: {kinds}"
        return text


def generate_demonstrations(
    env: Spec,
    tasks: Sequence[Task],
    path: Path | str,
    *,
    num_workers: int = 2,
    timeout_s: float = 20.0,
    only_successful: bool = True,
    format: Format | Callable[[Task], Format] = "plain",
    mistakes: float = 0.0,
    code_share: float = 1.0,
    tools: Sequence[Spec] = (),
    markers: Callable[[Task], MarkersConfig] | None = None,
    max_turns: int | None = None,
    on_episode: Callable[[Demonstration | Dropped], object] | None = None,
) -> Summary:
    """Run the expert on `tasks` and write the episodes to `path`, in the order of the tasks.

    Args:
        env: environment of the tasks that name none.
        timeout_s: seconds after which the process of an episode is killed.
        only_successful: drop lost episodes.
        format: format of an action: plain text, after `Action:`, or a tool call; or a function
            that returns the format of a task.
        mistakes: probability of a wrong action before each turn of the expert.
        code_share: share of the episodes of the format `code` that run the expert's code.
        tools: of the format `code`; one of them runs the expert's code.
        markers: the markers of a task in that format; None: the usual ones.
        max_turns: turns after which an episode fails; None: only `timeout_s` ends it.
        on_episode: called after each episode, in the order of the tasks.

    Errors: ConfigError for a wrong spec, MissingDependency, DataError if the file cannot be
    written.
    """
    path = Path(path)
    ENVS.check(env)
    require_pool()
    start = time.perf_counter()
    dropped: Counter[str] = Counter()
    num_kept = 0
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with (
            atomic_file(dropped_path(path)) as dropped_new,
            atomic_file(path) as kept_new,
            dropped_new.open("w", encoding="utf-8", newline="\n") as dropped_file,
            kept_new.open("w", encoding="utf-8", newline="\n") as kept_file,
        ):
            style = _Style(
                mistakes=mistakes, code_share=code_share, tools=list(tools), max_turns=max_turns
            )
            format_of = format if callable(format) else lambda _: format
            markers_of = markers or (lambda _: MarkersConfig())

            def form_of(task: Task) -> str:
                return _Form(format=format_of(task), markers=markers_of(task)).model_dump_json()

            for result in _play_all(env, tasks, num_workers, timeout_s, form_of, style):
                if isinstance(result, Demonstration) and only_successful and not result.success:
                    reason = f"the expert's reward was {result.reward:g}"
                    result = Dropped(
                        task_id=result.task_id, tier=result.tier, kind="lost", reason=reason
                    )
                if isinstance(result, Dropped):
                    dropped[result.kind] += 1
                    dropped_file.write(_line(result))
                    _refuse_deaths(env, result, dropped, num_kept)
                else:
                    num_kept += 1
                    kept_file.write(_line(result))
                if on_episode is not None:
                    on_episode(result)
    except OSError as error:
        raise DataError(f"{path}: cannot write demonstrations: {error}") from error
    return Summary(path, num_kept, time.perf_counter() - start, dict(dropped))


def _refuse_deaths(env: Spec, last: Dropped, dropped: Counter[str], num_kept: int) -> None:
    """Stop where each worker plays a few episodes and dies: each start takes seconds.

    Errors: LudusError.
    """
    died, played = dropped["died"], num_kept + dropped.total()
    if died >= MAX_DEATHS and died > DEATHS_SHARE * played:
        raise LudusError(
            f"{env.name}: {died} of {played} episodes of the expert ended their process, the last "
            f"with: {last.reason}. An environment must not call os._exit, nor crash in native "
            "code; exit code -9: it was killed, often for its memory"
        )


def require_pool() -> None:
    """Check that the expert's worker processes can start. Errors: MissingDependency."""
    require("pebble", "envs", "demonstrations: the pool of the expert's processes")


def dropped_path(path: Path) -> Path:
    """The file of the dropped episodes, `demonstrations.dropped.jsonl` in the same folder."""
    return path.with_name(f"{path.stem}.dropped.jsonl")


def load_demonstrations(path: Path | str) -> Iterator[Demonstration]:
    """Yields the demonstrations of a file. Errors: DataError with line number and reason."""
    return _load(Path(path), Demonstration, "demonstrations")


def load_dropped(path: Path) -> list[Dropped]:
    """Returns the episodes that gave no demonstration for the file `path`; empty without such.

    Errors: DataError with line number and reason.
    """
    dropped = dropped_path(path)
    return list(_load(dropped, Dropped, "dropped episodes")) if dropped.exists() else []


RecordType = TypeVar("RecordType", bound=Wire)


def _load(path: Path, kind: type[RecordType], what: str) -> Iterator[RecordType]:
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                try:
                    yield kind.model_validate_json(line)
                except ValidationError as error:
                    reason = first_fault(error, whole="")
                    raise DataError(f"{path}, line {number}: {reason}") from None
    except OSError as error:
        raise DataError(f"{path}: cannot read {what}: {error.strerror}") from error


def _line(record: Wire) -> str:
    return record.model_dump_json(exclude_defaults=True) + "\n"


class _Style(Wire):
    """The expert's way to play and write, for the worker processes."""

    mistakes: float
    code_share: float
    tools: list[Spec]
    max_turns: int | None = None


class _Form(Wire):
    """The form of one episode's turns."""

    format: Format
    markers: MarkersConfig


def _play_all(
    env: Spec,
    tasks: Sequence[Task],
    num_workers: int,
    timeout_s: float,
    form_of: Callable[[Task], str],
    style: _Style,
) -> Iterator[Demonstration | Dropped]:
    """Yields the results of all tasks, in order. Errors: LudusError if no worker can start.

    A worker that dies before it has said which job it took breaks its pool. The next pool plays
    the jobs that are left.
    """
    size = EPISODES_PER_JOB
    jobs = deque(tasks[i : i + size] for i in range(0, len(tasks), size))
    num_broken = 0
    while jobs:
        try:
            for outcomes in _play_in_pool(env, jobs, num_workers, timeout_s, form_of, style):
                num_broken = 0
                yield from outcomes
        except RuntimeError as error:  # the pool's: an error of an episode is in its outcome
            num_broken += 1
            if num_broken == MAX_BROKEN:
                raise LudusError(
                    f"{env.name}: a worker process of the expert died before an episode: it was "
                    "killed, often for its memory (then use fewer workers), or cannot import the "
                    "environment"
                ) from error


def _play_in_pool(
    env: Spec,
    jobs: deque[Sequence[Task]],
    num_workers: int,
    timeout_s: float,
    form_of: Callable[[Task], str],
    style: _Style,
) -> Iterator[list[Demonstration | Dropped]]:
    """Yields the results of the jobs, in order; each job leaves the queue with its results.

    Errors: RuntimeError if the pool breaks.
    """
    from pebble import ProcessPool

    others = set(multiprocessing.active_children())
    pool = ProcessPool(
        max_workers=max(1, min(num_workers, sum(map(len, jobs)))),
        initializer=_prepare_worker,
        initargs=(env.model_dump_json(), style.model_dump_json()),
        context=multiprocessing.get_context("spawn"),
    )

    def start(job: Sequence[Task]) -> Any:
        args = ([task.model_dump_json() for task in job], [form_of(task) for task in job])
        return pool.schedule(_play_job, args=args, timeout=timeout_s)

    ahead = JOBS_PER_WORKER * num_workers
    try:
        with ctrl_c_kept_from_children():  # here the pool starts its workers
            running = deque(map(start, islice(jobs, ahead)))  # of the first jobs
        while jobs:
            outcomes = _outcomes(jobs[0], running.popleft(), timeout_s)
            job = jobs.popleft()
            if outcomes is not None:
                yield outcomes
            else:  # an episode failed its job: play each alone, with the full timeout
                alone: list[Sequence[Task]] = [[task] for task in job]
                jobs.extendleft(reversed(alone))
                running.extendleft(reversed([start(task) for task in alone]))
            if len(running) < min(ahead, len(jobs)):
                running.append(start(jobs[len(running)]))
        pool.close()
    finally:
        pool.stop()  # ends running jobs; there are none unless an exception interrupted us
        # `join` gives up the workers' locks, and then ends one after the other: those that still
        # start meanwhile would print a traceback.
        for worker in set(multiprocessing.active_children()) - others:
            worker.kill()
        pool.join()


def _outcomes(
    job: Sequence[Task], future: Any, timeout_s: float
) -> list[Demonstration | Dropped] | None:
    """Results of a job; None if its process failed and the job had several tasks."""
    from pebble import ProcessExpired

    try:
        results = future.result()
    except FutureTimeout:
        results = [("timeout", f"took longer than {timeout_s:g} s")]
    except ProcessExpired as error:
        results = [("died", f"the worker process died with exit code {error.exitcode}")]
    if len(results) != len(job):
        return None
    return [
        Demonstration.model_validate_json(text)
        if kind == "played"
        else Dropped(task_id=task.id, tier=task.tier, kind=kind, reason=text)
        for task, (kind, text) in zip(job, results, strict=True)
    ]


# Code of the worker processes

_envs: LocalEnvs
_style: _Style
_toolbox: Toolbox | None = None
_runner: asyncio.Runner


def _prepare_worker(spec_json: str, style_json: str) -> None:
    """Import the environment before the first episode, so the import does not count as its time."""
    global _envs, _runner, _style
    spec = Spec.model_validate_json(spec_json)
    ENVS.check(spec)
    _envs, _style = LocalEnvs(spec), _Style.model_validate_json(style_json)
    _runner = asyncio.Runner()


def _play_job(tasks: list[str], forms: list[str]) -> list[tuple[str, str]]:
    return [_play_one(task, form) for task, form in zip(tasks, forms, strict=True)]


def _play_one(task_json: str, form_json: str) -> tuple[str, str]:
    """Returns ("played", Demonstration as JSON), or (kind, reason) of a Dropped."""
    task = Task.model_validate_json(task_json)
    form = _Form.model_validate_json(form_json)
    try:
        return "played", _runner.run(_play(task, form)).model_dump_json()
    except NoExpert as error:
        return "no expert", str(error)
    except (Exception, SystemExit, asyncio.CancelledError) as error:
        return "error", told(error)


async def _play(task: Task, form: _Form) -> Demonstration:
    global _toolbox
    blocks = None
    if form.format == "code" and _style.tools:
        _toolbox = _toolbox or await Toolbox.open(_style.tools)
        runs = random.Random(f"code/{task.id}").random() < _style.code_share
        blocks = CodeBlocks(form.markers, _toolbox, runs)
    return await run_expert(
        _envs.make(task), task, form.format, _style.mistakes, blocks, _style.max_turns
    )
