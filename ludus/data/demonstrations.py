"""Demonstrations: episodes of an environment's expert, played in parallel worker processes.

A hanging episode is killed with its process. An episode that raises, dies or is lost is recorded
with its reason; the others continue. The file is written atomically. Its content depends on the
tasks alone, not on the number of workers or on timing (except for episodes close to the timeout).
"""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from ludus.core.errors import DataError, EnvError, described
from ludus.core.files import atomic_file
from ludus.core.modules import require
from ludus.core.signals import ctrl_c_kept_from_children
from ludus.core.types import Message, Spec, Task, Wire
from ludus.envs import ENVS
from ludus.envs.base import Env, NoExpert, awaited
from ludus.rollout.host import LocalEnvs, check_opening, check_result, check_total

Format = Literal["plain", "react", "tools"]

EPISODES_PER_JOB = 16
"""Episodes of a job. Sending a job costs as much as playing a short episode."""

JOBS_PER_WORKER = 4
"""Jobs scheduled ahead of the next job to write."""


class Demonstration(Wire):
    """An episode of the expert: the environment's messages and the expert's turns."""

    task_id: str
    tier: str | None
    messages: list[Message]
    reward: float
    success: bool
    num_turns: int


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
    format: Format = "plain",
    on_episode: Callable[[Demonstration | Dropped], object] | None = None,
) -> Summary:
    """Run the expert on `tasks` and write the episodes to `path`, in the order of the tasks.

    Args:
        env: environment of the tasks that name none.
        timeout_s: seconds after which the process of an episode is killed.
        only_successful: drop lost episodes.
        format: format of an action: plain text, after `Action:`, or a tool call.
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
            for result in _play_all(env, tasks, num_workers, timeout_s, format):
                if isinstance(result, Demonstration) and only_successful and not result.success:
                    reason = f"the expert's reward was {result.reward:g}"
                    result = Dropped(
                        task_id=result.task_id, tier=result.tier, kind="lost", reason=reason
                    )
                if isinstance(result, Dropped):
                    dropped[result.kind] += 1
                    dropped_file.write(_line(result))
                else:
                    num_kept += 1
                    kept_file.write(_line(result))
                if on_episode is not None:
                    on_episode(result)
    except OSError as error:
        raise DataError(f"{path}: cannot write demonstrations: {error}") from error
    return Summary(path, num_kept, time.perf_counter() - start, dict(dropped))


def require_pool() -> None:
    """Check that the expert's worker processes can start. Errors: MissingDependency."""
    require("pebble", "envs", "demonstrations: the pool of the expert's processes")


def dropped_path(path: Path) -> Path:
    """The file of the dropped episodes, `demonstrations.dropped.jsonl` in the same folder."""
    return path.with_name(f"{path.stem}.dropped.jsonl")


def load_demonstrations(path: Path | str) -> Iterator[Demonstration]:
    """Yields the demonstrations of a file. Errors: DataError with line number and reason."""
    path = Path(path)
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                try:
                    yield Demonstration.model_validate_json(line)
                except ValidationError as error:
                    first = error.errors()[0]
                    place = ".".join(str(part) for part in first["loc"])
                    reason = f"{place}: {first['msg']}" if place else first["msg"]
                    raise DataError(f"{path}, line {number}: {reason}") from None
    except OSError as error:
        raise DataError(f"{path}: cannot read demonstrations: {error.strerror}") from error


def _line(record: Wire) -> str:
    return record.model_dump_json(exclude_defaults=True) + "\n"


def _play_all(
    env: Spec, tasks: Sequence[Task], num_workers: int, timeout_s: float, format: Format
) -> Iterator[Demonstration | Dropped]:
    """Yields the results of all tasks, in order."""
    from pebble import ProcessPool

    pool = ProcessPool(
        max_workers=max(1, min(num_workers, len(tasks))),
        initializer=_prepare_worker,
        initargs=(env.model_dump_json(),),
        context=multiprocessing.get_context("spawn"),
    )
    size = EPISODES_PER_JOB
    waiting = (tasks[i : i + size] for i in range(0, len(tasks), size))
    running: deque[tuple[Sequence[Task], Any]] = deque()

    def start(job: Sequence[Task]) -> Any:
        args = ([task.model_dump_json() for task in job], format)
        return pool.schedule(_play_job, args=args, timeout=timeout_s)

    def schedule(count: int) -> None:
        for job in islice(waiting, count):
            running.append((job, start(job)))

    try:
        with ctrl_c_kept_from_children():  # here the pool starts its workers
            schedule(JOBS_PER_WORKER * num_workers)
        while running:
            job, future = running.popleft()
            outcomes = _outcomes(job, future, timeout_s)
            schedule(1)
            if outcomes is not None:
                yield from outcomes
                continue
            for task in job:  # an episode failed its job: play each alone, with the full timeout
                yield from _outcomes([task], start([task]), timeout_s) or ()
        pool.close()
    finally:
        pool.stop()  # kills running jobs; there are none unless an exception interrupted us
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
_runner: asyncio.Runner


def _prepare_worker(spec_json: str) -> None:
    """Import the environment before the first episode, so the import does not count as its time."""
    global _envs, _runner
    spec = Spec.model_validate_json(spec_json)
    ENVS.check(spec)
    _envs = LocalEnvs(spec)
    _runner = asyncio.Runner()


def _play_job(tasks: list[str], format: Format) -> list[tuple[str, str]]:
    return [_play_one(task, format) for task in tasks]


def _play_one(task_json: str, format: Format) -> tuple[str, str]:
    """Returns ("played", Demonstration as JSON), or (kind, reason) of a Dropped."""
    task = Task.model_validate_json(task_json)
    try:
        return "played", _runner.run(run_expert(_envs.make(task), task, format)).model_dump_json()
    except NoExpert as error:
        return "no expert", str(error)
    except (Exception, SystemExit, asyncio.CancelledError) as error:
        return "error", described(error)


async def run_expert(env: Env, task: Task, format: Format = "plain") -> Demonstration:
    """Run one episode of the environment's expert. Errors: NoExpert, and errors of the env."""
    try:
        messages = list(check_opening(await awaited("reset", env.reset(task))).messages)
        reward, num_turns, success = 0.0, 0, None
        while True:
            action = _to_message(env, env.expert_action(), num_turns, format)
            result = check_result(await awaited("step", env.step(action)))
            messages += [_as_written(action, format), *_replies(action, result.messages)]
            reward += result.reward or 0.0
            num_turns += 1
            if result.done:
                success = result.info.get("success", reward >= env.success_at)
                break
    finally:
        await env.close()
    check_total(reward)
    return Demonstration(
        task_id=task.id,
        tier=task.tier,
        messages=messages,
        reward=reward,
        success=bool(success),
        num_turns=num_turns,
    )


def _to_message(env: Env, action: Any, turn: int, format: Format) -> Message:
    """The message for the environment: the action's text, with its tool call in that format."""
    if not isinstance(action, str):
        raise EnvError(f"expert_action returned {action!r:.80}; it has to return a text")
    if format != "tools":
        return Message(role="assistant", content=action)
    call = env.call_of(action).model_copy(update={"id": f"call_{turn}"})
    return Message(role="assistant", content=action, tool_calls=[call])


def _as_written(action: Message, format: Format) -> Message:
    """The expert's turn as a model writes it in this format."""
    if format == "react":
        return Message(role="assistant", content=f"Action: {action.content}")
    return action.model_copy(update={"content": ""}) if action.tool_calls else action


def _replies(action: Message, messages: list[Message]) -> list[Message]:
    """The environment's messages; the first answers the tool call, if any."""
    if not action.tool_calls or not messages:
        return messages
    call = action.tool_calls[0]
    answer = {"role": "tool", "name": call.name, "tool_call_id": call.id}
    return [messages[0].model_copy(update=answer), *messages[1:]]
