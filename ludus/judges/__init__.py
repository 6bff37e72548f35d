"""Judges score trajectories."""

from ludus.config.registry import Registry, Row
from ludus.judges.base import Judge

JUDGES: Registry[Judge] = Registry(
    "judge",
    {"answer": Row("ludus.judges.answer:AnswerJudge", "", "the final answer against the task's")},
    needs=("__call__",),
)
