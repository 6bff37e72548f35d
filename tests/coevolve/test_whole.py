"""A co-evolution from the first run to the last evaluation."""

from __future__ import annotations

import json

from coevolve_world import ALL, ROOT, groups, rows
from harness import Ludus
from safetensors.torch import load_file

from ludus.coevolve.storage import Storage
from ludus.models.chat.tokenizers import load_tokenizer


def test_the_folder_has_all_files_of_the_layout(whole: Ludus) -> None:
    root = whole.cwd / ROOT
    stages = json.loads((root / "state.json").read_text())["stages"]
    assert tuple(stages) == ALL
    assert all(row["seconds"] > 0 for row in stages.values())
    models = ["curriculum-1", "curriculum-2", "executor-1", "executor-2", "start"]
    assert sorted(path.name for path in (root / "models").iterdir()) == models
    for name in models:
        assert load_tokenizer(str(root / "models" / name)).eos_token
        assert load_file(root / "models" / name / "model.safetensors")
    for iteration in ("iteration-1", "iteration-2"):
        made = sorted(
            path.name for path in (root / "generated_question" / iteration).glob("*.jsonl")
        )
        assert made == ["problems.jsonl", "proposals.jsonl", "rejected.jsonl"]
        assert (root / "temp_results" / iteration / "answers.jsonl").is_file()
        assert (root / "evaluation" / f"{iteration}.json").is_file()
    assert (root / "evaluation" / "iteration-0.json").is_file()


def test_each_problem_has_its_votes_p_label_and_tool_calls(whole: Ludus) -> None:
    root = whole.cwd / ROOT
    for iteration in (1, 2):
        proposals = rows(root / f"generated_question/iteration-{iteration}/proposals.jsonl")
        problems = rows(root / f"generated_question/iteration-{iteration}/problems.jsonl")
        rejected = rows(root / f"generated_question/iteration-{iteration}/rejected.jsonl")
        answers = rows(root / f"temp_results/iteration-{iteration}/answers.jsonl")
        assert len(proposals) == 16 == len(problems) + len(rejected)
        assert len(problems) > 1
        by_question = {row["question"]: row for row in answers}
        assert len(by_question) == len(answers)
        for row in problems:
            vote = by_question[row["question"]]
            label, votes = vote["counts"][0]
            assert row["answer"] == label
            assert row["consistency"] == votes / 4 == vote["consistency"]
            assert vote["classes"].count(0) == votes
        assert any(sum(row["tool_calls"]) for row in answers)
        assert {row["reason"] for row in rejected} <= {
            "the question was kept before",
            "the question is one of the held-out tasks",
            "the text is no proposal",
        }


def test_a_held_out_question_is_no_problem(whole: Ludus) -> None:
    root = whole.cwd / ROOT / "generated_question"
    rejected = [row for path in root.glob("*/rejected.jsonl") for row in rows(path)]
    held_out = [row for row in rejected if row["reason"].endswith("held-out tasks")]
    assert {row["question"] for row in held_out} == {"5 + 1 ="}
    problems = [row for path in root.glob("*/problems.jsonl") for row in rows(path)]
    assert "5 + 1 =" not in {row["question"] for row in problems}


def test_the_evaluation_has_the_held_out_tasks_and_the_frontier(whole: Ludus) -> None:
    first, *later = (
        json.loads((whole.cwd / ROOT / "evaluation" / f"iteration-{n}.json").read_text())
        for n in range(3)
    )
    assert "frontier" not in first
    assert first["heldout"]["num_tasks"] == 3
    for record in later:
        assert record["heldout"]["num_excluded"] == 0
        assert record["frontier"]["executor"] == "executor-1"
        assert record["frontier"]["num_scored"] == record["frontier"]["num_problems"] == 4
        assert record["frontier"]["pass_rate"] > 0


def test_the_roles_start_from_the_same_model_and_part(whole: Ludus) -> None:
    models = Storage(whole.cwd / ROOT).model
    weights = {
        name: (models(name) / "model.safetensors").read_bytes()
        for name in ("start", "curriculum-1", "curriculum-2", "executor-1", "executor-2")
    }
    assert len(set(weights.values())) == 5


def test_p_reaches_the_trained_samples(whole: Ludus) -> None:
    root = whole.cwd / ROOT
    problems = rows(root / "generated_question/iteration-1/problems.jsonl")
    known = {row["question"]: row["consistency"] for row in problems}
    tasks = [group.task for group in groups(whole, "executor-1-1")]
    assert len(tasks) == 4
    for task in tasks:
        assert task.consistency == known[task.prompt[-1].content]
