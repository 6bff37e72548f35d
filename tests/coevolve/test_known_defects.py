"""The known defects of the public code of Agent0 that concern the flow (1, 5, 6)."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from coevolve_world import ROOT, Disturbed, groups, rows
from harness import Ludus

import ludus as package
from ludus.coevolve.storage import write_rows
from ludus.telemetry.metrics import MetricsLog

RUN = "executor-1-1"


def losses(ludus: Ludus) -> list[float]:
    path = ludus.cwd / ROOT / "runs" / RUN / "metrics.jsonl"
    return [line.metrics["train/loss"] for line in MetricsLog.read(path)]


def write_p(ludus: Ludus, p: float) -> None:
    """Replace the p of all problems."""
    path = ludus.cwd / ROOT / "generated_question/iteration-1/problems.jsonl"
    write_rows(path, [{**row, "consistency": p} for row in rows(path)])


@pytest.mark.slow
def test_defect_1_p_reaches_the_loss(after: Disturbed) -> None:
    """The same answers to the same problems: other p, other loss; for GRPO the same."""
    found = {}
    for name in ("adpo", "grpo"):
        for p in (0.3, 0.8):
            ludus = after("iteration-1/filter")
            write_p(ludus, p)
            words = [f"executor.rl.algorithm={name}", "executor.rl.steps=1"]
            ludus("coevolve", "sums.yaml", "executor", *words).ok()
            found[name, p] = losses(ludus), [g.task.consistency for g in groups(ludus, RUN)]
    assert found["adpo", 0.3][1] == [0.3] * 2
    assert found["adpo", 0.3][0] != found["adpo", 0.8][0]
    assert found["grpo", 0.3][0] == found["grpo", 0.8][0]


def test_defect_5_no_stage_sleeps_or_kills_by_name() -> None:
    """Stages wait for what they need, and for nothing else."""
    folder = Path(package.__file__).parent / "coevolve"
    names = set()
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute):
                names.add(node.attr)
            elif isinstance(node, ast.Name | ast.alias):
                names.add(node.id if isinstance(node, ast.Name) else node.name)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                assert "pkill" not in node.value, path
    assert {"Popen", "wait"} <= names  # the search does find calls
    assert not names & {"sleep", "killall", "system", "killpg"}


def test_defect_6_proposals_are_scored_concurrently(after: Disturbed) -> None:
    ludus = after("iteration-1/generate")
    ludus("coevolve", "sums.yaml", "score", setup=CONCURRENT).ok()
    most = int((ludus.cwd / "most").read_text())
    answers = rows(ludus.cwd / ROOT / "temp_results/iteration-1/answers.jsonl")
    assert max(sum(row["tool_calls"]) for row in answers) <= 4 < most


CONCURRENT = """
import asyncio
import ludus.tools.toolbox as toolbox
call, now, most = toolbox.Toolbox.call, 0, 0
async def counted(self, *args, **kwargs):
    global now, most
    now += 1
    most = max(most, now)
    open("most", "w").write(str(most))
    try:
        await asyncio.sleep(0.2)
        return await call(self, *args, **kwargs)
    finally:
        now -= 1
toolbox.Toolbox.call = counted
"""
