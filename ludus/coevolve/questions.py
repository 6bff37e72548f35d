"""Problems between the roles: proposals, the executor's answers to them, and the filter.

    generate   the curriculum agent's proposals     -> proposals.jsonl
    score      k answers to each, with their votes  -> answers.jsonl
    filter     problems with labels, and the others -> problems.jsonl, rejected.jsonl

`generate` and `score` write a chunk of problems once it is complete, while the next ones are
played. Seeds belong to a problem's number, so chunks that are done stay, and the rest gets the same
bits.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from statistics import fmean
from typing import Any

from ludus.coevolve.roles import Roles
from ludus.coevolve.storage import Row, read_rows, write_rows
from ludus.config.schema import RunConfig
from ludus.core.errors import DataError, ToolError, Unscorable
from ludus.core.types import Group, Status, Task, Trajectory
from ludus.envs import ENVS
from ludus.judges.base import final_answer
from ludus.judges.proposals.judge import CurriculumJudge
from ludus.judges.proposals.parse import Proposal, visible
from ludus.judges.proposals.select import Problem, explain_empty, select
from ludus.judges.proposals.votes import Vote, mean_tool_calls
from ludus.pipeline.build import Player
from ludus.pipeline.monitoring.progress import Observer
from ludus.tasks.readers import read_tasks

HELD_OUT = "the question is one of the held-out tasks"
OVER_MAX = "more than `questions.max_problems`"

GO_ON = (
    "Nothing is lost: run the same command with `questions.min_consistency=...` or "
    "`questions.max_consistency=...`, and only the filter runs again."
)


def generate(roles: Roles, iteration: int, observer: Observer) -> Row:
    """Let the curriculum agent propose problems. Returns what the state records."""
    config = roles.proposing(iteration, iteration)
    tasks = list(islice(cycle(_prompts(config)), roles.config.questions.proposals))
    judge = roles.judge()

    async def finish(number: int, group: Group) -> Row:
        return _proposal_row(judge, group)

    work = _Work("proposals", "generate", tasks, 1, finish)
    rows = _in_chunks(roles, iteration, config, work, observer)
    write_rows(roles.storage.questions(iteration, "proposals"), rows)
    valid = [row["question"] for row in rows if row["question"] is not None]
    return {"proposals": len(rows), "valid": len(valid), "distinct": len(set(valid))}


def _prompts(config: RunConfig) -> Sequence[Task]:
    env = ENVS.build(config.env, "env") if config.env else None
    where = "curriculum.tasks.train"
    return read_tasks(config.tasks.train, where, maker=env, on_bad_line=config.tasks.on_bad_line)


def _proposal_row(judge: CurriculumJudge, group: Group) -> Row:
    (trajectory,) = group.trajectories
    row: Row = {"id": trajectory.id, "status": trajectory.status.value, "text": None}
    row |= {"question": None, "claimed": None, "reason": trajectory.error}
    try:
        row["text"] = final_answer(trajectory).content
    except Unscorable as error:
        return {**row, "reason": row["reason"] or str(error)}
    if not trajectory.status.trainable:
        return row
    found = judge.parse(row["text"])
    if isinstance(found, Proposal):
        return {**row, "question": found.question, "claimed": found.answer}
    return {**row, "reason": found.reason}


def score(roles: Roles, iteration: int, observer: Observer) -> Row:
    """Let the executor answer each distinct problem k times, and count the votes."""
    proposals = read_rows(roles.storage.questions(iteration, "proposals"))
    first_of: dict[str, Row] = {}
    for row in proposals:
        if row["question"] is not None:
            first_of.setdefault(row["question"], row)
    problems, judge = list(first_of.values()), roles.judge()

    async def finish(number: int, group: Group) -> Row:
        return await _answer_row(judge, problems[number], group)

    config = roles.answering(iteration - 1, iteration)
    tasks = [judge.task(row["id"], row["question"]) for row in problems]
    work = _Work("answers", "score", tasks, roles.config.answers.number, finish, _refuse_lost_tools)
    rows = _in_chunks(roles, iteration, config, work, observer)
    write_rows(roles.storage.temporary(iteration, "answers"), rows)
    voted = [row for row in rows if row["consistency"] is not None]
    statuses = [Status(status) for row in rows for status in row["statuses"]]
    excluded = sum(not status.trainable for status in statuses)
    result: Row = {"problems": len(rows), "voted": len(voted), "excluded_answers": excluded}
    if voted:
        result["mean_p"] = fmean(row["consistency"] for row in voted)
        result["tool_calls"] = fmean(row["mean_tool_calls"] for row in voted)
    return result


def _refuse_lost_tools(rows: Sequence[Row]) -> None:
    """Errors: ToolError where tools failed in every problem of a chunk, so that none has a vote:
    their server is lost."""
    lost = [row for row in rows if row["consistency"] is None]
    if lost == rows and all(Status.ERROR_TOOL in row["statuses"] for row in rows):
        raise ToolError(
            f"a tool failed in the answers to all of {len(rows)} problems. {rows[0]['reason']}. "
            "Once the tool works again, run the same command: what is complete stays"
        )


async def _answer_row(judge: CurriculumJudge, proposal: Row, group: Group) -> Row:
    row: Row = {key: proposal[key] for key in ("id", "question", "claimed")}
    row["statuses"] = [t.status.value for t in group.trajectories]
    row["tool_calls"] = [int(t.metrics.get("tool_calls", 0)) for t in group.trajectories]
    row["texts"] = [_last_text(t) for t in group.trajectories]
    try:
        vote = await judge.vote(group.trajectories, [proposal["claimed"]])
    except Unscorable as error:
        return {**row, "consistency": None, "reason": str(error)}
    return {
        **row,
        "consistency": vote.p,
        "answer": vote.answer,
        "counts": [list(count) for count in vote.counts],
        "classes": list(vote.classes),
        "tie": vote.tie,
        "agrees": vote.claims[0],
        "mean_tool_calls": mean_tool_calls(group.trajectories),
        "reason": None,
    }


def _last_text(trajectory: Trajectory) -> str | None:
    try:
        return final_answer(trajectory).content
    except Unscorable:
        return None


def select_problems(roles: Roles, iteration: int, stand_ins: int = 0) -> Row:
    """Keep the problems with p in the band; the others are written with the reason.

    Where none is kept, `stand_ins` sums take their place: for `--test-mode`.

    Errors: DataError where none is kept, with the distribution of p and what to change.
    """
    settings, storage = roles.config.questions, roles.storage
    proposals = read_rows(storage.questions(iteration, "proposals"))
    answers = {row["question"]: row for row in read_rows(storage.temporary(iteration, "answers"))}
    band = settings.min_consistency, settings.max_consistency
    problems = [_problem(row, answers.get(row["question"])) for row in proposals]
    kept, rejected = select(
        problems, min_consistency=band[0], max_consistency=band[1], ties=settings.ties
    )
    known = roles.heldout_questions()
    is_known = [visible(problem.question or "") in known for problem in kept]
    held_out = [problem for problem, found in zip(kept, is_known, strict=True) if found]
    kept = [problem for problem, found in zip(kept, is_known, strict=True) if not found]
    faults = {row["id"]: row.get("reason") for row in proposals}  # of texts that are no proposal
    rows = [
        {"id": p.id, "question": p.question, "reason": str(why), "detail": faults[p.id]}
        for p, why in rejected
    ]
    rows += [{"id": p.id, "question": p.question, "reason": HELD_OUT} for p in held_out]
    more = kept[settings.max_problems :] if settings.max_problems else []
    rows += [{"id": p.id, "question": p.question, "reason": OVER_MAX} for p in more]
    kept = kept[: settings.max_problems]
    write_rows(storage.questions(iteration, "rejected"), rows)
    if not kept and stand_ins:
        write_rows(storage.questions(iteration, "problems"), map(_stand_in, range(stand_ins)))
        return {"kept": 0, "rejected": len(rows), "stand_ins": stand_ins}
    if not kept:
        raise DataError(f"{explain_empty(rejected, *band)}\n{GO_ON}")
    write_rows(
        storage.questions(iteration, "problems"),
        [_problem_row(p, answers[p.question]) for p in kept],
    )
    shares = [problem.vote.p for problem in kept if problem.vote is not None]
    result: Row = {"kept": len(kept), "rejected": len(rows), "mean_p": fmean(shares)}
    return {**result, "band": list(band)}


def _stand_in(number: int) -> Row:
    return {
        "id": f"stand-in-{number}",
        "question": f"{number} + {number} = ?",
        "answer": str(2 * number),
        "consistency": 0.5,
        "tie": False,
    }


def _problem(proposal: Row, answer: Row | None) -> Problem:
    vote = None
    if answer is not None and answer["consistency"] is not None:
        vote = Vote(
            p=answer["consistency"],
            answer=answer["answer"],
            counts=tuple((text, count) for text, count in answer["counts"]),
            classes=tuple(answer["classes"]),
            tie=answer["tie"],
        )
    return Problem(proposal["id"], proposal["question"], vote)


def _problem_row(problem: Problem, answer: Row) -> Row:
    keys = ("answer", "consistency", "tie", "claimed", "agrees", "mean_tool_calls")
    return {"id": problem.id, "question": problem.question, **{key: answer[key] for key in keys}}


@dataclass(frozen=True, slots=True)
class _Work:
    """Tasks to be played `k` times, and the row of each.

    Args:
        name: of the files. label: of the episodes, in their ids and seeds.
        finish: returns the row of the task of a number, from its complete group.
        check: sees the rows of each chunk before they are written.
    """

    name: str
    label: str
    tasks: Sequence[Task]
    k: int
    finish: Callable[[int, Group], Coroutine[Any, Any, Row]]
    check: Callable[[Sequence[Row]], None] = lambda _: None


def _in_chunks(
    roles: Roles, iteration: int, config: RunConfig, work: _Work, observer: Observer
) -> list[Row]:
    """Returns the row of each task. A chunk is written once its rows are complete; chunks that an
    earlier process wrote are read. Votes are taken while the next problems are played."""
    size = roles.config.questions.chunk
    starts = range(0, len(work.tasks), size)
    name = f"{work.name}-{{:05d}}"
    paths = [roles.storage.temporary(iteration, name.format(n)) for n in range(len(starts))]
    lengths = [len(work.tasks[start : start + size]) for start in starts]
    missing = [n for n, path in enumerate(paths) if not path.is_file()]
    for n in set(range(len(paths))) - set(missing):
        _chunk(paths[n], lengths[n])  # a damaged one is refused before the others are played
    found: dict[int, dict[int, Row]] = {n: {} for n in missing}

    async def finish(number: int, group: Group) -> None:
        row = await work.finish(number, group)
        chunk, place = divmod(number, size)
        found[chunk][place] = row
        if len(found[chunk]) == lengths[chunk]:
            rows = [row for _, row in sorted(found.pop(chunk).items())]
            work.check(rows)
            write_rows(paths[chunk], rows)
            observer.tick()

    async def play(player: Player) -> None:
        for first, end in _spans(missing):
            some = work.tasks[first * size : end * size]
            await player.stream(some, work.label, iteration, work.k, finish, first * size)

    if missing:
        observer.stage(work.name, len(starts), len(starts) - len(missing))
        Player.run_with(config, play, observer.episode)
    chunks = [_chunk(*chunk) for chunk in zip(paths, lengths, strict=True)]
    return [row for chunk in chunks for row in chunk]


def _spans(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """First and end of each span of numbers that follow one another."""
    spans: list[tuple[int, int]] = []
    for number in numbers:
        if spans and spans[-1][1] == number:
            spans[-1] = spans[-1][0], number + 1
        else:
            spans.append((number, number + 1))
    return spans


def _chunk(path: Path, length: int) -> list[Row]:
    """Errors: DataError where the chunk is damaged."""
    try:
        rows = read_rows(path, ("id", "question"))
        if len(rows) != length:
            raise DataError(f"{path}: {len(rows)} lines in place of {length}")
    except DataError as error:
        raise DataError(f"{error}. Remove the file: its problems are played again") from None
    return rows
