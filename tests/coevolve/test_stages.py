"""Stages as verbs, refused input, changed recipes."""

from __future__ import annotations

import json

import pytest
from coevolve_world import ROOT, Disturbed, bits, groups, rows, write_recipe
from harness import Ludus

from ludus.coevolve.storage import Storage


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["score"], "iteration-1/score needs iteration-1/curriculum, which is not complete"),
        (["generate", "--iteration", "2"], "iteration-2/generate needs iteration-1/curriculum"),
        (["start"], "start: complete"),
        (["start", "--iteration", "0"], "start is complete: its files are in coevolve/sums"),
        (["filter", "--iteration", "3"], "--iteration 3: filter has the iterations 1 to 2"),
        (["scroe"], "scroe: this recipe has no such stage (did you mean score?)"),
        (["score", "filter"], "score filter: name one stage, or none for all"),
        (["--iteration", "1"], "--iteration belongs to a stage: name one"),
    ],
)
def test_a_stage_that_cannot_run_is_refused(after: Disturbed, words: list[str], said: str) -> None:
    after("iteration-0/evaluate")("coevolve", "sums.yaml", *words).refused(2, said)


@pytest.mark.parametrize(
    ("changes", "stage", "reason"),
    [
        ({"start": None}, "start", "`start` is null"),
        ({"curriculum": {"rl": None}}, "curriculum", "`curriculum.rl` is null"),
    ],
)
def test_an_absent_stage_has_a_reason(
    ludus: Ludus, changes: dict[str, object], stage: str, reason: str
) -> None:
    recipe = write_recipe(ludus.cwd, **changes)
    ludus("coevolve", recipe, stage).refused(2, f"{stage}: this recipe has no such stage", reason)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["shwo"], "shwo: this recipe has no such stage (did you mean show?)"),
        (["nonsense"], "no such stage (known: curriculum, evaluate, executor, filter, "),
        (["filter", "--iteration", "3"], "--iteration 3: filter has the iterations 1 to 2"),
    ],
)
def test_a_wrong_stage_makes_no_folder(ludus: Ludus, words: list[str], said: str) -> None:
    recipe = write_recipe(ludus.cwd)
    ludus("coevolve", recipe, *words).refused(2, said)
    assert not (ludus.cwd / "coevolve").exists()


def test_a_stage_alone_makes_the_bits_of_the_whole(whole: Ludus, after: Disturbed) -> None:
    ludus = after("iteration-1/curriculum")
    for stage in ("generate", "score", "filter"):
        ludus("coevolve", "sums.yaml", stage).ok()
    assert bits(ludus.cwd / ROOT) == bits(whole.cwd.parent / "iteration-1-filter" / ROOT)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["seed=3"], "seed was 0, is 3: iteration-1/evaluate has begun"),
        (["answers.number=5"], "answers.number was 4, is 5: iteration-1/score has begun"),
        (["questions.chunk=8"], "questions.chunk was 4, is 8: iteration-1/score has begun"),
        (["curriculum.rl.steps=3"], "curriculum.rl.steps was 2, is 3: iteration-1/generate"),
        (["reward.tool=0.1"], "reward.tool was null, is 0.1: iteration-1/score has begun"),
        (["executor.rl.steps=9"], "executor.rl.steps was 2, is 9: iteration-1/executor has begun"),
    ],
)
def test_a_key_of_a_stage_that_has_begun_may_not_change(
    after: Disturbed, words: list[str], said: str
) -> None:
    ludus = after("iteration-1/evaluate")
    before = bits(ludus.cwd / ROOT)
    ludus("coevolve", "sums.yaml", *words).refused(2, said, "give the new one another `name`")
    assert bits(ludus.cwd / ROOT) == before


def test_keys_of_the_filter_may_change_before_it_runs(after: Disturbed) -> None:
    ludus = after("iteration-1/score")
    done = ludus("coevolve", "sums.yaml", "filter", "questions.max_problems=2").ok()
    assert "changed: questions.max_problems was null, is 2" in done.err
    root = ludus.cwd / ROOT
    assert len(rows(root / "generated_question/iteration-1/problems.jsonl")) == 2
    assert Storage(root).complete()["iteration-1/filter"]["band"] == [0, 1]
    ludus("coevolve", "sums.yaml", "seed=1").refused(2, "seed was 0, is 1")


def test_a_fault_in_the_recipe_of_a_stage_that_never_began_can_be_mended(ludus: Ludus) -> None:
    (ludus.cwd / "wrong.jsonl").write_text('{"text": "no messages"}\n')
    recipe = write_recipe(ludus.cwd, start={"sft": {"data": "wrong.jsonl"}})
    ludus("coevolve", recipe, "start").refused(1, "wrong.jsonl")
    words = ["start.sft.data=taught.jsonl", "start.sft.steps=2", "iterations=1"]
    ludus("coevolve", recipe, "start", *words).ok()
    assert Storage(ludus.cwd / ROOT).complete()["start"]["steps"] == 2


def test_fewer_iterations_than_are_complete_leave_all_as_it_is(
    whole: Ludus, after: Disturbed
) -> None:
    ludus = after("iteration-2/evaluate")
    ludus("coevolve", "sums.yaml", "iterations=1").ok()
    assert bits(ludus.cwd / ROOT) == bits(whole.cwd / ROOT)


def test_no_problem_in_the_band_is_a_clear_stop_that_loses_nothing(
    whole: Ludus, after: Disturbed
) -> None:
    ludus = after("iteration-1/score")
    band = ["questions.min_consistency=0.6", "questions.max_consistency=0.7"]
    before = Storage(ludus.cwd / ROOT).complete()
    ludus("coevolve", "sums.yaml", *band).refused(
        1,
        "the filter kept none of 16 proposals (0.6 <= p <= 0.7)",
        "p, the share of answers that agree with their majority",
        "1.0",
        "questions.min_consistency=...",
    )
    assert Storage(ludus.cwd / ROOT).complete() == before
    wide = ["questions.min_consistency=0", "questions.max_consistency=1"]
    ludus("coevolve", "sums.yaml", "filter", *wide).ok()
    assert bits(ludus.cwd / ROOT) == bits(whole.cwd.parent / "iteration-1-filter" / ROOT)


@pytest.mark.slow
def test_problems_that_the_user_edits_are_trained_on(after: Disturbed) -> None:
    ludus = after("iteration-1/filter")
    path = ludus.cwd / ROOT / "generated_question/iteration-1/problems.jsonl"
    kept = rows(path)[:2]
    path.write_text("".join(json.dumps({**row, "answer": "0"}) + "\n" for row in kept))
    ludus("coevolve", "sums.yaml", "executor").ok()
    tasks = [group.task for group in groups(ludus, "executor-1-1")]
    assert {task.answer for task in tasks} == {"0"}
    assert {task.prompt[-1].content for task in tasks} <= {row["question"] for row in kept}
