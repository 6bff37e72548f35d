"""Damaged files, full disks, lost servers, hostile answers."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from coevolve_world import ALL, ROOT, Disturbed, bits, label_after, rows, write_recipe
from harness import TEXTCRAFT, Ludus
from service_world import Command, start

from ludus.coevolve.storage import Storage, write_rows


def test_two_programs_cannot_use_one_folder(after: Disturbed) -> None:
    ludus = after("iteration-1/score")
    with Storage(ludus.cwd / ROOT).locked():
        said = f"{ROOT} is in use by process {os.getpid()}: wait for its end"
        ludus("coevolve", "sums.yaml").refused(1, said)
    ludus("coevolve", "sums.yaml", "filter").ok()


def test_a_storage_that_is_a_file_is_refused(ludus: Ludus) -> None:
    recipe = write_recipe(ludus.cwd)
    ludus("coevolve", recipe, "--storage", "held.jsonl").refused(
        1, "held.jsonl/sums: cannot be used: Not a directory"
    )


def test_the_recipes_of_a_run_and_of_a_coevolution_are_told_apart(ludus: Ludus) -> None:
    recipe = write_recipe(ludus.cwd)
    ludus("coevolve", TEXTCRAFT).refused(2, "ludus train")
    ludus("train", recipe).refused(2, "ludus coevolve")


@pytest.mark.parametrize("text", ["", '{"stages": 3}', '{"sta', "[]"])
def test_a_damaged_list_of_stages_is_named(after: Disturbed, text: str) -> None:
    ludus = after("iteration-1/score")
    (ludus.cwd / ROOT / "state.json").write_text(text)
    ludus("coevolve", "sums.yaml").refused(1, f"{ROOT}/state.json is damaged", "Remove it")


@pytest.mark.parametrize("damage", ["cut", "empty", "rubbish"])
def test_a_damaged_chunk_is_named_and_played_again(
    whole: Ludus, after: Disturbed, damage: str
) -> None:
    ludus = after("iteration-1/curriculum")
    chunk = "coevolve/sums/temp_results/iteration-1/proposals-00000.jsonl"
    made = (whole.cwd / chunk).read_text().splitlines(keepends=True)
    texts = {"cut": "".join(made[:-1]), "empty": "", "rubbish": "".join([made[0], "{...\n"])}
    (ludus.cwd / chunk).parent.mkdir(parents=True)
    (ludus.cwd / chunk).write_text(texts[damage])
    command = ["coevolve", "sums.yaml", "generate"]
    ludus(*command).refused(1, chunk, "Remove the file: its problems are played again")
    (ludus.cwd / chunk).unlink()
    ludus(*command).ok()
    assert bits(ludus.cwd / ROOT) == bits(whole.cwd.parent / "iteration-1-generate" / ROOT)


def test_a_chunk_in_the_middle_stays_and_the_rest_has_the_same_bits(
    whole: Ludus, after: Disturbed
) -> None:
    ludus = after("iteration-1/generate")
    chunk = "coevolve/sums/temp_results/iteration-1/answers-00001.jsonl"
    (ludus.cwd / chunk).parent.mkdir(parents=True, exist_ok=True)
    (ludus.cwd / chunk).write_bytes((whole.cwd / chunk).read_bytes())
    os.utime(ludus.cwd / chunk, (1, 1))
    ludus("coevolve", "sums.yaml", "score").ok()
    assert (ludus.cwd / chunk).stat().st_mtime == 1
    assert bits(ludus.cwd / ROOT) == bits(whole.cwd.parent / "iteration-1-score" / ROOT)


def test_a_file_that_is_gone_is_named(after: Disturbed) -> None:
    ludus = after("iteration-1/generate")
    path = f"{ROOT}/generated_question/iteration-1/proposals.jsonl"
    (ludus.cwd / path).unlink()
    ludus("coevolve", "sums.yaml").refused(1, f"{path} does not exist", "from state.json")


def test_a_damaged_model_is_named(after: Disturbed) -> None:
    ludus = after("iteration-1/generate")
    weights = ludus.cwd / ROOT / "models/start/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    done = ludus("coevolve", "sums.yaml")
    assert done.code in (1, 2)
    done.refused(done.code, "models/start")


FULL = [
    ("iteration-1/generate", "ludus.coevolve.questions:write_rows", 2),
    ("iteration-1/filter", "ludus.coevolve.questions:write_rows", 1),
    ("iteration-1/filter", "ludus.coevolve.storage:Storage.record", 1),
]


@pytest.mark.parametrize(("stage", "target", "nth"), FULL)
def test_on_a_full_disk_it_stops_and_can_be_resumed(
    whole: Ludus, after: Disturbed, stage: str, target: str, nth: int
) -> None:
    ludus = after(ALL[ALL.index(stage) - 1])
    command = ["coevolve", "sums.yaml", stage.rpartition("/")[2]]
    done = ludus(*command, setup=f"strike({target!r}, {nth}, 'full')")
    done.refused(1, ROOT, "File too large", "free some space")
    ludus(*command).ok()
    assert bits(ludus.cwd / ROOT) == bits(whole.cwd.parent / label_after(stage) / ROOT)


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["iteration-1/executor", "iteration-1/evaluate"])
def test_on_a_full_disk_a_run_stops_and_can_be_resumed(
    whole: Ludus, after: Disturbed, stage: str
) -> None:
    ludus = after(ALL[ALL.index(stage) - 1])
    target = "ludus.pipeline.build:build"
    command = ["coevolve", "sums.yaml", stage.rpartition("/")[2], "--iteration", "1"]
    ludus(*command, setup=f"strike({target!r}, 1, 'full')").refused(1, ROOT)
    ludus(*command).ok()
    assert bits(ludus.cwd / ROOT) == bits(whole.cwd.parent / label_after(stage) / ROOT)


def edit_proposals(ludus: Ludus, questions: list[str | None]) -> None:
    """Put these proposals in place of those that were generated."""
    path = Storage(ludus.cwd / ROOT).questions(1, "proposals")
    made = [
        {"id": f"p{n}", "status": "completed", "text": "", "question": question, "claimed": "7"}
        for n, question in enumerate(questions)
    ]
    write_rows(path, made)


def test_texts_that_are_no_proposals_end_at_the_filter(after: Disturbed) -> None:
    ludus = after("iteration-1/generate")
    edit_proposals(ludus, [None] * 5)
    ludus("coevolve", "sums.yaml", "score").ok()
    ludus("coevolve", "sums.yaml", "filter").refused(
        1, "kept none of 5 proposals", "5  the text is no proposal", "Most texts are no proposals"
    )


def test_of_problems_that_are_all_alike_one_is_kept(after: Disturbed) -> None:
    ludus = after("iteration-1/generate")
    edit_proposals(ludus, ["3 + 4 ="] * 5)
    ludus("coevolve", "sums.yaml", "score").ok()
    ludus("coevolve", "sums.yaml", "filter").ok()
    folder = ludus.cwd / ROOT / "generated_question/iteration-1"
    assert len(rows(ludus.cwd / ROOT / "temp_results/iteration-1/answers.jsonl")) == 1
    assert [row["id"] for row in rows(folder / "problems.jsonl")] == ["p0"]
    reasons = {row["reason"] for row in rows(folder / "rejected.jsonl")}
    assert reasons == {"the question was kept before"}


def taught(folder: Path, answers: dict[str, list[str]]) -> None:
    """Conversations of the first run: each question with its answers, as often."""
    lines = [
        [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        for question, known in answers.items()
        for answer in known
    ]
    text = "".join(json.dumps({"messages": line}) + "\n" for line in lines)
    (folder / "taught.jsonl").write_text(text)


@pytest.mark.slow
def test_endless_unread_and_tied_answers_end_the_scoring(ludus: Ludus) -> None:
    changes: dict[str, Any] = {
        "reward": {"limit_s": 1.0},
        "answers": {"number": 8},
        "questions": {"min_consistency": 0.1},
    }
    recipe = write_recipe(ludus.cwd, **changes)
    tower, tie = "\\boxed{10^{10^{10^{10}}}}", ["<answer>1</answer>", "<answer>2</answer>"]
    taught(
        ludus.cwd,
        {"the tower ?": [tower] * 4, "the riddle ?": ["no idea"] * 4, "the coin ?": tie * 2},
    )
    ludus("coevolve", recipe, "start").ok()
    storage = Storage(ludus.cwd / ROOT)
    storage.record("iteration-1/curriculum", {})
    storage.record("iteration-1/generate", {})
    edit_proposals(ludus, ["the tower ?", "the riddle ?", "the coin ?"])
    ludus("coevolve", recipe, "score").ok()
    towers, riddle, coin = rows(storage.temporary(1, "answers"))
    assert [row["consistency"] for row in (towers, riddle)] == [0, 0]
    assert [row["answer"] for row in (towers, riddle)] == [None, None]
    assert coin["answer"] in ("1", "2")
    assert coin["tie"] == (coin["consistency"] == 0.5)
    ludus("coevolve", recipe, "filter").ok()
    reasons = [row["reason"] for row in rows(storage.questions(1, "rejected"))]
    assert reasons == ["no answer of the executor could be read"] * 2
    assert [row["id"] for row in rows(storage.questions(1, "problems"))] == ["p2"]


@pytest.mark.slow
def test_a_tool_server_killed_in_mid_scoring_gives_no_wrong_answers(after: Disturbed) -> None:
    """A chunk without a vote stops the stage; with the server again, it goes on."""
    server = start("calculator", verb="tools")
    try:
        ludus = after("nothing")
        tools = [{"name": "remote", "args": {"url": server.url, "deadline_s": 2}}]
        changes = {"start": {"tools": tools}, "executor": {"tools": tools}}
        recipe = write_recipe(ludus.cwd, **changes, questions={"chunk": 1})
        for stage in ("start", "curriculum", "generate"):
            ludus("coevolve", recipe, stage).ok()
        dies = f"import os\ndef die(): os.kill({server.process.pid}, 9)\n{DIES}"
        done = ludus("coevolve", recipe, "score", setup=dies)
        done.refused(1, "a tool failed in the answers to all of 1 problems", "works again, run")
        close(server)
        server = start("calculator", verb="tools", port=server.port)
        ludus("coevolve", recipe, "score").ok()
    finally:
        close(server)
    for row in rows(ludus.cwd / ROOT / "temp_results/iteration-1/answers.jsonl"):
        counted = row["statuses"].count("completed")
        assert len(row["classes"]) == counted >= 2
        assert row["consistency"] * counted == row["counts"][0][1]


def close(server: Command) -> None:
    server.kill()
    assert server.process.stdout is not None
    server.process.stdout.close()


DIES = """
import ludus.tools.toolbox as toolbox
call, calls = toolbox.Toolbox.call, 0
async def counted(self, *args, **kwargs):
    global calls
    calls += 1
    if calls == 2:
        die()
    return await call(self, *args, **kwargs)
toolbox.Toolbox.call = counted
"""
