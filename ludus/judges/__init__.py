"""Judges score trajectories."""

from ludus.config.registry import Registry, Row
from ludus.judges.base import Judge

JUDGES: Registry[Judge] = Registry(
    "judge",
    {
        "answer": Row("ludus.judges.answer:AnswerJudge", "", "the final answer against the task's"),
        "bbeh": Row("ludus.judges.bbeh:BBEHJudge", "", "the answer as BIG-Bench Extra Hard has it"),
        "choice": Row("ludus.judges.choice:ChoiceJudge", "", "the letter of a multiple choice"),
        "code": Row("ludus.judges.code:CodeJudge", "", "tests of code, in the sandbox"),
        "curriculum": Row(
            "ludus.judges.proposals.judge:CurriculumJudge",
            "coevolve",
            "a proposed problem, by an executor's votes",
        ),
        "first": Row("ludus.judges.combine:FirstJudge", "", "a second judge where one fails"),
        "format": Row("ludus.judges.format:FormatJudge", "", "markers, a pattern, thinking"),
        "math": Row("ludus.judges.math:MathJudge", "math", "equal mathematics, by math-verify"),
        "model": Row("ludus.judges.model:ModelJudge", "remote", "a model at an endpoint"),
        "overlong": Row("ludus.judges.overlong:OverlongJudge", "", "DAPO's length penalty"),
        "qa": Row("ludus.judges.qa:QAJudge", "", "exact match or F1 of the words, as in SQuAD"),
        "remote": Row("ludus.judges.remote.judge:RemoteJudge", "remote", "an evaluation service"),
        "rubric": Row("ludus.judges.rubric:RubricJudge", "remote", "weighted criteria, by a model"),
        "sum": Row("ludus.judges.combine:SumJudge", "", "the weighted sum of judges"),
    },
    context=frozenset({"limits", "make_player"}),
    needs=("__call__",),
)
