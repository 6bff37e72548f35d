"""kill -9 in every stage, then resume: the same bits."""

from __future__ import annotations

import pytest
from coevolve_world import ALL, ROOT, Disturbed, bits, label_after
from harness import Ludus

from ludus.coevolve.storage import Storage

KILLS = [
    ("start", "ludus.train.learner:Learner.train_step", 30, "kill"),
    ("start", "ludus.coevolve.flow:export_checkpoint", 1, "kill after"),
    ("iteration-0/evaluate", "ludus.pipeline.build:Player.close", 1, "kill"),
    ("iteration-1/curriculum", "ludus.judges.proposals.votes:Voter.__call__", 3, "kill"),
    ("iteration-1/curriculum", "ludus.train.learner:Learner.train_step", 2, "kill after"),
    ("iteration-1/curriculum", "ludus.coevolve.storage:Storage.record", 1, "kill"),
    ("iteration-1/generate", "ludus.coevolve.questions:write_rows", 2, "kill after"),
    ("iteration-1/score", "ludus.tools.toolbox:Toolbox.call", 1, "kill after"),
    ("iteration-1/score", "ludus.coevolve.questions:write_rows", 2, "kill"),
    ("iteration-1/filter", "ludus.coevolve.questions:write_rows", 1, "kill after"),
    ("iteration-1/executor", "ludus.train.learner:Learner.train_step", 2, "kill"),
    ("iteration-1/executor", "ludus.coevolve.flow:export_checkpoint", 1, "kill after"),
    ("iteration-1/evaluate", "ludus.coevolve.evaluation:atomic_write", 1, "kill after"),
    ("iteration-2/score", "ludus.coevolve.storage:Storage.record", 1, "kill"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "target", "nth", "how"), KILLS)
def test_killed_in_a_stage_and_resumed_it_makes_the_same_bits(
    whole: Ludus, after: Disturbed, stage: str, target: str, nth: int, how: str
) -> None:
    place = ALL.index(stage)
    ludus = after(ALL[place - 1]) if place else after("nothing")
    strike = f"strike({target!r}, {nth}, {how!r})"
    name, iteration = stage.rpartition("/")[2], stage.partition("/")[0].rpartition("-")[2]
    command = ["coevolve", "sums.yaml", name, "--iteration", "0" if name == "start" else iteration]
    assert ludus(*command, setup=strike).code == -9
    assert stage not in Storage(ludus.cwd / ROOT).complete()
    ludus(*command).ok()
    assert bits(ludus.cwd / ROOT) == bits(whole.cwd.parent / label_after(stage) / ROOT)


@pytest.mark.slow
def test_killed_again_and_again_to_the_end_it_makes_the_same_bits(
    whole: Ludus, after: Disturbed
) -> None:
    ludus = after("iteration-1/filter")
    for target, nth in [
        ("ludus.train.learner:Learner.train_step", 1),
        ("ludus.coevolve.storage:Storage.record", 2),
        ("ludus.judges.proposals.votes:Voter.__call__", 5),
        ("ludus.coevolve.questions:write_rows", 3),
        ("ludus.train.learner:Learner.train_step", 2),
    ]:
        strike = f"strike({target!r}, {nth}, 'kill')"
        assert ludus("coevolve", "sums.yaml", setup=strike).code == -9
    ludus("coevolve", "sums.yaml").ok()
    assert bits(ludus.cwd / ROOT) == bits(whole.cwd / ROOT)


@pytest.mark.slow
def test_without_the_list_of_stages_it_finds_the_files_and_makes_the_same_bits(
    whole: Ludus, after: Disturbed
) -> None:
    ludus = after("iteration-1/filter")
    (ludus.cwd / ROOT / "state.json").unlink()
    ludus("coevolve", "sums.yaml", "iterations=1").ok()
    assert bits(ludus.cwd / ROOT) == bits(whole.cwd.parent / "iteration-1-evaluate" / ROOT)


@pytest.mark.slow
@pytest.mark.parametrize(("how", "code"), [("interrupt", 130), ("terminate", 143)])
@pytest.mark.parametrize(
    ("stage", "target", "nth"),
    [
        ("iteration-1/curriculum", "ludus.train.learner:Learner.train_step", 1),
        ("iteration-1/score", "ludus.tools.toolbox:Toolbox.call", 1),
        ("iteration-1/evaluate", "ludus.tools.toolbox:Toolbox.call", 1),
    ],
)
def test_stopped_by_a_signal_it_says_how_to_resume(
    whole: Ludus, after: Disturbed, stage: str, target: str, nth: int, how: str, code: int
) -> None:
    ludus = after(ALL[ALL.index(stage) - 1])
    strike = f"strike({target!r}, {nth}, {how!r})"
    done = ludus("coevolve", "sums.yaml", "iterations=1", setup=strike)
    done.refused(code, f"stopped in {stage}", "resume with: ludus coevolve sums.yaml iterations=1")
    ludus("coevolve", "sums.yaml", "iterations=1").ok()
    assert bits(ludus.cwd / ROOT) == bits(whole.cwd.parent / "iteration-1-evaluate" / ROOT)
