"""BIG-Bench Extra Hard: the text after `The answer is:` against the target."""

from __future__ import annotations

from ludus.core.types import Score, Task, Trajectory
from ludus.judges.base import accepted_answers, final_answer

PREFIXES = ("The answer is:", "The final answer is ", "The final answer is: ", "The answer is ")
WRAPPERS = ("boxed{", "text{", "texttt{")


class BBEHJudge:
    """Scores 1 if the answer after `The answer is:` is the task's, else 0.

    The comparison is that of the benchmark's `evaluate.py` (Kazemi et al. 2025, arXiv:2502.19187),
    so a text without a prefix is compared from its beginning: the text after the last prefix; its
    first line, in lower case, without LaTeX wrappers, bold marks and a final full stop; equal to
    the target, or equal as numbers, or with brackets, quotes or a question mark more.

    Parts: `correct`, and `found` (the message has a prefix).

    Errors: Unscorable if the task has no answer, or the assistant wrote nothing.
    """

    async def __call__(self, task: Task, trajectory: Trajectory) -> Score:
        targets = [target_of(text) for text in accepted_answers(task)]
        text = final_answer(trajectory).content
        given = answer_of(text)
        correct = float(any(same(given, target) for target in targets))
        found = float(any(prefix in text for prefix in PREFIXES))
        told = repr(given[:200]) if found else "no `The answer is:`"
        expected = " or ".join(repr(target[:200]) for target in targets)
        return Score(
            value=correct,
            parts={"correct": correct, "found": found},
            explanation=f"{told}, {'equal to' if correct else 'expected'} {expected}",
        )


def answer_of(text: str) -> str:
    """The answer in a message, normalised."""
    answer = text.strip()
    for prefix in PREFIXES:
        if prefix in answer:
            answer = answer.split(prefix)[-1].strip()
    answer = _unwrapped(answer.removesuffix(".")).lower().replace(", ", ",").replace("**", "")
    return answer.split("\n")[0].removesuffix(".")


def target_of(text: str) -> str:
    """The target, normalised."""
    return text.strip().lower().replace(", ", ",")


def same(answer: str, target: str) -> bool:
    """True if the normalised answer is the normalised target."""
    if answer == target:
        return True
    for one, other in ((answer, target), (target, answer)):
        if len(one) == 3 and one[0] == "(" and one[-1] == ")":
            return one[1] == other
    try:
        if float(answer) == float(target):
            return True
    except ValueError:
        pass  # no numbers
    return (
        answer.replace("'", "") == target.replace("'", "")
        or answer == f"[{target}]"
        or target == f"[{answer}]"
        or (answer.endswith("?") and answer[:-1] == target)
    )


def _unwrapped(answer: str) -> str:
    if answer.startswith("$") and answer.endswith("$"):
        answer = answer[1:-1]
    for wrapper in WRAPPERS:
        if wrapper in answer and answer.endswith("}"):
            answer = answer[:-1].split(wrapper)[1]
    return answer
