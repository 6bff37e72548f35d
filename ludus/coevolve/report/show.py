"""Terminal display of a co-evolution: its iterations, the problems of one, one problem in full.

Texts are the model's, so they are untrusted: control characters are escaped, and markup is not
interpreted.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
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
    """Returns two tables with a row for each iteration: its problems, the executor after it.

    One table would be wider than 80 columns.
    """
    problems = [
        [str(one.number), *(str(one.counts.get(name, "")) for name in COUNTS), _percent(one.claims)]
        for one in facts.iterations
        if one.counts
    ]
    executor = [
        [
            str(one.number),
            "" if one.tool_calls is None else f"{one.tool_calls:.2f}",
            _percent(one.frontier.pass_rate if one.frontier else None),
            str((one.heldout.success if one.heldout else None) or ""),
        ]
        for one in facts.iterations
    ]
    hint = "--iteration N shows the problems of an iteration"
    return Group(
        make_table(("iteration", *COUNTS, "claims agree"), problems),
        Text(),
        make_table(("iteration", "tool calls", "frontier", "held-out"), executor),
        Text(hint, "dim"),
    )


def render_problems(problems: Sequence[Problem]) -> RenderableType:
    """Returns an entry for each proposal, in their order: its number, id and votes; its text."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for one in problems:
        text = one.question if one.question is not None else one.text or ""
        table.add_row(str(one.number), plain(f"{one.id}  {_outcome(one)}"))
        table.add_row("", plain(_cut(" ".join(text.split()), MAX_LINE)))
    hint = "--problem N, or --problem ID, shows a problem with its answers"
    return Group(table, Text(hint, "dim"))


def _outcome(problem: Problem) -> str:
    """`kept, p 0.60, label 7, claimed 7, votes 6 4, calls 1.2`: what is known of a problem."""
    calls = problem.mean_tool_calls
    facts = {
        "p": None if problem.p is None else f"{problem.p:.2f}",
        "label": problem.answer and _cut(problem.answer, 24),
        "claimed": problem.claimed and _cut(problem.claimed, 24),
        "votes": " ".join(str(count) for _, count in problem.counts),
        "calls": None if calls is None else f"{calls:.1f}",
    }
    told = [f"{name} {value}" for name, value in facts.items() if value]
    return ", ".join([problem.fate or "not filtered yet", *told])


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
