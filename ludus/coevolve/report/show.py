"""Terminal display of a co-evolution: its iterations, the problems of one, one problem in full.

Texts are the model's, so they are untrusted: control characters are escaped, and markup is not
interpreted.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from ludus.coevolve.report.facts import COUNTS, Facts, read_facts, stages_done
from ludus.coevolve.report.problems import Answer, Problem, read_problems
from ludus.coevolve.storage import Storage
from ludus.core.errors import ConfigError, DataError
from ludus.evaluate.results import Estimate
from ludus.store.show import make_table, plain

MAX_LINE = 200
"""Characters of a question in a list."""


def render(storage: Storage, iteration: int | None, problem: str | None) -> RenderableType:
    """Returns the iterations; with `iteration`, its problems; with `problem`, one of them.

    Args:
        problem: its number in the list, or its id.

    Errors: DataError where the folder or the iteration has no problems, or a file is damaged;
        ConfigError for a problem that is not there.
    """
    stages_done(storage)
    if iteration is None:
        return render_iterations(read_facts(storage))
    problems = read_problems(storage, iteration)
    if not problems:
        numbers = [str(n) for n in range(1, 1001) if storage.questions(n, "proposals").is_file()]
        there = f"those with proposals: {', '.join(numbers)}" if numbers else "none has any yet"
        raise DataError(f"iteration {iteration} has no proposals; {there}")
    return (
        render_problems(problems) if problem is None else render_problem(_find(problems, problem))
    )


def render_iterations(facts: Facts) -> RenderableType:
    """Returns a row for each iteration."""
    head = ("iteration", *COUNTS, "claims", "calls", "frontier", "held-out")
    rows = []
    for one in facts.iterations:
        front = one.frontier.pass_rate if one.frontier else None
        accuracy = one.heldout.success if one.heldout else None
        rows.append(
            [
                str(one.number),
                *(str(one.counts.get(name, "")) for name in COUNTS),
                _percent(one.claims),
                "" if one.tool_calls is None else f"{one.tool_calls:.2f}",
                _percent(front),
                str(accuracy or ""),
            ]
        )
    hint = "--iteration N shows the problems of an iteration"
    return Group(make_table(head, rows), Text(hint, "dim"))


def render_problems(problems: Sequence[Problem]) -> RenderableType:
    """Returns a row for each proposal, in their order."""
    rows = []
    for one in problems:
        text = one.question if one.question is not None else one.text or ""
        line = " ".join(text.split())
        rows.append(
            [
                str(one.number),
                "" if one.p is None else f"{one.p:.2f}",
                _cut(one.answer or "", 24),
                _cut(one.claimed or "", 24),
                " ".join(str(count) for _, count in one.counts),
                "" if one.mean_tool_calls is None else f"{one.mean_tool_calls:.1f}",
                one.fate,
                _cut(line, MAX_LINE),
            ]
        )
    head = ("problem", "p", "label", "claimed", "votes", "calls", "filter", "question")
    hint = "--problem N shows a problem with its answers"
    return Group(make_table(head, rows), Text(hint, "dim"))


def render_problem(problem: Problem) -> RenderableType:
    """Returns a problem with all of its answers, in full."""
    votes = ", ".join(f"{text} ({count})" for text, count in problem.counts)
    agrees = {True: "the majority agrees", False: "the majority differs", None: ""}[problem.agrees]
    facts = {
        "problem": f"{problem.number}, {problem.id}",
        "question": problem.question,
        "text": problem.text if problem.question is None else None,
        "claimed": problem.claimed and f"{problem.claimed}  {agrees}".strip(),
        "p": None if problem.p is None else f"{problem.p:.2f}{', a tie' * problem.tie}",
        "label": problem.answer,
        "votes": votes,
        "filter": problem.fate or "did not run",
        "reason": problem.remark,
        "repeats": "a proposal before it has the same question, and its answers"
        if problem.repeats
        else None,
    }
    parts: list[RenderableType] = [
        make_table(("", ""), [(name, value) for name, value in facts.items() if value])
    ]
    for number, answer in enumerate(problem.answers, start=1):
        parts += [Text(f"\nanswer {number}: {_about(answer)}", "bold"), plain(answer.text or "")]
    return Group(*parts)


def _about(answer: Answer) -> str:
    vote = "not read" if answer.group is None else f"class {answer.group + 1}"
    vote = "majority" if answer.group == 0 else vote
    calls = f"{answer.tool_calls} tool call{'' if answer.tool_calls == 1 else 's'}"
    return f"{vote}, {answer.status.replace('_', ' ')}, {calls}"


def _find(problems: Sequence[Problem], wanted: str) -> Problem:
    for problem in problems:
        if wanted in (str(problem.number), problem.id):
            return problem
    raise ConfigError(
        f"--problem {wanted}: the iteration has the problems 1 to {len(problems)}, "
        f"{problems[0].id} to {problems[-1].id}"
    )


def _percent(estimate: Estimate | None) -> str:
    return "" if estimate is None else f"{100 * estimate.value:.1f} %"


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[: limit - 1]}…"
