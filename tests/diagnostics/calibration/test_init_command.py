"""Wrong arguments of `ludus init` are told before anything is measured."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from ludus.cli import app
from ludus.diagnostics.calibration.recipe import flow
from ludus.diagnostics.calibration.subject import (
    chosen_tiers,
    config_tasks,
    environment,
    open_subject,
)
from ludus.tasks.readers import read_tasks


def refusal(*argv: str) -> str:
    done = CliRunner().invoke(app, ["init", *argv])
    assert done.exit_code != 0
    return str(done.exception)


def test_a_file_that_cannot_be_written_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "no/a.yaml cannot be written" in refusal("textcraft", "--out", "no/a.yaml")
    (tmp_path / "old.yaml").write_text("mine")
    assert "old.yaml exists" in refusal("textcraft", "--out", "old.yaml")
    assert (tmp_path / "old.yaml").read_text() == "mine"


def test_a_file_that_is_read_is_never_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.sft.jsonl").write_text(ROWS)
    own = OWN.format(tiers="()", turns=2)
    (tmp_path / "mine.py").write_text(own)
    for argv in (
        ["my.sft.jsonl", "--out", "my.yaml", "--force"],
        ["my.sft.jsonl", "--out", str(tmp_path / "my.sft.jsonl"), "--force"],
        ["mine.py:Own", "--out", "mine.py", "--force"],
    ):
        assert "is read, and would be replaced" in refusal(*argv)
    assert (tmp_path / "my.sft.jsonl").read_text() == ROWS
    assert (tmp_path / "mine.py").read_text() == own
    assert "is no environment" in refusal("nothing", "--out", "nothing")
    (tmp_path / "mine.py").write_text("class Mine: pass\n")
    mine = str(tmp_path / "mine.py")
    assert f"name the environment's class too: {mine}:Mine" in refusal(mine)


OWN = """
from ludus import Env

class Own(Env):
    reset = step = None
    tiers = classmethod(lambda cls: {tiers})
    max_turns = {turns}
"""


@pytest.mark.parametrize(
    ("tiers", "turns", "problem"),
    [
        ("None", 2, "tiers() returned None"),
        ("'easy'", 2, "tiers() returned 'easy'"),
        ("(1, 2)", 2, "tiers() returned (1, 2)"),
        ("1 / 0", 2, "tiers() raised ZeroDivisionError"),
        ("()", "'3'", "max_turns is '3'"),
        ("()", 0, "max_turns is 0"),
    ],
)
def test_what_is_wrong_in_a_class_is_told(
    tmp_path: Path, tiers: str, turns: object, problem: str
) -> None:
    (tmp_path / "mine.py").write_text(OWN.format(tiers=tiers, turns=turns))
    assert problem in refusal(f"{tmp_path}/mine.py:Own", "--tiers", "1")


def test_endless_minutes_are_refused() -> None:
    for minutes in ("inf", "nan", "1e9", "0"):
        assert CliRunner().invoke(app, ["init", "textcraft", "--minutes", minutes]).exit_code == 2


SIZED = """
from ludus import Env

class Own(Env):
    reset = step = None
    def __init__(self, size, depth: int = 1):
        pass

class Typed(Own):
    def __init__(self, size: int):
        pass
"""


@pytest.mark.parametrize(
    ("name", "args", "told"),
    [
        ("Own", [], "mine.py:Own needs `size=...`"),
        ("Typed", [], "mine.py:Typed needs `size=...` (a whole number)"),
        ("Typed", ["size=x"], "mine.py:Typed: size must be a whole number, got 'x'"),
        (
            "Own",
            ["size=2", "dpth=1"],
            "mine.py:Own: dpth is not an argument of Own (did you mean depth?)",
        ),
    ],
)
def test_arguments_are_told_as_the_command_takes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, args: list[str], told: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(SIZED)
    assert refusal(f"mine.py:{name}", *args) == told


def test_an_argument_that_is_given_twice_is_refused() -> None:
    assert (
        refusal("textcraft", "guide=1", "guide=2") == "guide=2: guide is given twice; give it once"
    )


def test_a_death_of_ones_own_process_is_told(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        """
import os
from ludus import Env, Message, Observation, Task

class Own(Env):
    async def reset(self, task):
        return Observation(messages=[Message(role="user", content="go")])

    async def step(self, action):
        os._exit(9)

    def expert_action(self):
        return "go"

    @classmethod
    def task(cls, tier, seed):
        return Task(id=str(seed), data={"seed": seed})
"""
    )
    told = refusal(f"{tmp_path}/mine.py:Own", "--out", f"{tmp_path}/mine.yaml")
    assert "ends its process in an episode of task 0, with exit code 9" in told


def test_a_death_of_the_measuring_process_is_told(tmp_path: Path) -> None:
    """It ended with the exit code 0 and without a recipe."""
    (tmp_path / "mine.py").write_text(
        """
import multiprocessing, os
from ludus import Env, Message, Observation, StepResult, Task

class Own(Env):
    steps = 0

    async def reset(self, task):
        return Observation(messages=[Message(role="user", content="go")])

    async def step(self, action):
        Own.steps += 1
        if Own.steps > 50 and multiprocessing.parent_process() is None:
            os._exit(0)
        reply = Message(role="user", content="right")
        return StepResult(messages=[reply], reward=1.0, terminated=True)

    def expert_action(self):
        return "go"

    @classmethod
    def task(cls, tier, seed):
        return Task(id=str(seed), data={"seed": seed})
"""
    )
    command = [sys.executable, "-m", "ludus", "init", "mine.py:Own", "--minutes", "1"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "mine.py:Own ended its process with exit code 0 while its episodes" in done.stderr
    assert not (tmp_path / "own.yaml").exists()


@pytest.mark.parametrize(
    "text",
    [
        "a,b[1].jsonl",
        "a, b",
        "{x}",
        "[",
        "a: b",
        "# c",
        "yes",
        "1",
        "",
        "a\nb",
        "\t",
        "é🙂",
        "a\u2028b",
    ],
)
def test_texts_of_a_recipe_are_read_back(text: str) -> None:
    for value in (text, {"path": text, "n": 1}, {"args": {text: [text, 0.001]}}):
        assert yaml.safe_load(f"key: {flow(value)}") == {"key": value}


def test_wrong_subjects_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "did you mean textcraft?" in refusal("textcrafft")
    assert "is not a tier" in refusal("textcraft", "--tiers", "depth-99x")
    assert "GoToObj, GoToObjS4, " in refusal("babyai", "--tiers", "zzz")
    assert "depth-1 is named twice" in refusal("textcraft", "--tiers", "depth-1,depth-2,depth-1")
    for names in ("", "depth-1,,depth-2"):
        assert "has an empty name" in refusal("textcraft", "--tiers", names)
    (tmp_path / "rows.jsonl").write_text('{"q": "1 + 1", "a": "2"}\n')
    assert "name the one with the prompt" in refusal("rows.jsonl")
    assert "a data set has rows" in refusal("rows.jsonl", "--tiers", "x")
    assert f"nothere.jsonl does not exist in {tmp_path}" in refusal("nothere.jsonl")
    assert f"there is no file nothere.csv in {tmp_path}" in refusal("nothere.csv", "prompt=q")


def test_levels_of_an_environment_that_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(OWN.format(tiers="()", turns=2))
    assert "mine.py:Own has no levels: leave it out" in refusal("mine.py:Own", "--tiers", "a")
    checks = "    @classmethod\n    def check_tier(cls, tier):\n        raise KeyError(tier)\n"
    (tmp_path / "theirs.py").write_text(OWN.format(tiers="('a',)", turns=2) + checks)
    told = refusal("theirs.py:Own", "--tiers", "a")
    assert "theirs.py:Own: check_tier('a') raised KeyError: 'a'" in told


def test_a_level_may_have_a_comma() -> None:
    known = ["two, three", "two", "three"]
    assert chosen_tiers("two, three", known) == ["two, three"]
    assert chosen_tiers("three, two", known) == ["three", "two"]


ROWS = '{"prompt": "1 + 1", "answer": "2"}\n{"prompt": "1 + 2", "answer": "3"}\n'


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        (ROWS + '{"prompt": "2", "answer": null}\n', "1 of 3 rows cannot be scored"),
        (
            ROWS + '{"prompt": "2", "answer": ""}\n',
            "remove it (line 3), or leave it out with `ludus init rows.jsonl on_bad_line=skip`",
        ),
        (ROWS + ROWS, "2 of 4 rows repeat an earlier one"),
        (ROWS + 3 * ROWS, "remove them (lines 3, 4, 5, 6, 7 and 1 more), or leave them out with"),
        (ROWS.replace("prompt", "question") * 2, "2 of 4 rows repeat an earlier one"),
        (
            ROWS + ROWS.splitlines()[0],
            "1 of 3 rows repeats an earlier one, so held-out rows may be training",
        ),
        ('{"prompt": "1", "answer": "2"}\n' * 3, "3 rows with one question"),
        ('{"prompt": "1", "answer": "2"}\n', "1 row with one question"),
        ('{"prompt": "1"}\n' + ROWS, "has no field 'answer'"),
    ],
)
def test_rows_that_cannot_be_used_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: str, problem: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text(rows)
    assert problem in refusal("rows.jsonl")
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]


def test_malformed_rows_are_skipped_on_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    good = [f'{{"prompt": "{n}", "answer": "{n}"}}\n' for n in range(8)]
    lines = ["no\n", *good[:2], "\n", "{\n", *good[2:5], "[]\n", *good[5:], "7\n"]
    (tmp_path / "rows.jsonl").write_text("".join(lines))
    told = refusal("rows.jsonl")
    assert "4 malformed lines (`ludus init rows.jsonl on_bad_line=skip` skips them)" in told
    assert "on_bad_line must be one of refuse, skip" in refusal("rows.jsonl", "on_bad_line=no")

    subject = open_subject("rows.jsonl", {"on_bad_line": "skip"}, None)
    assert subject.warnings == [
        "rows.jsonl: 4 malformed rows left out, the first: line 1 is not JSON: Expecting value at "
        "column 1"
    ]
    for number in range(1, 8):  # the two splits share no row, and leave none out
        tasks = config_tasks(subject, number, 8 - number)
        assert tasks.heldout is not None
        train = read_tasks(tasks.train, on_bad_line=tasks.on_bad_line)
        heldout = read_tasks(tasks.heldout, on_bad_line=tasks.on_bad_line)
        assert [task.answer for task in (*train, *heldout)] == [str(n) for n in range(8)]


def test_rows_that_cannot_be_scored_or_repeat_are_left_out_on_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the recipe's reader too: the two splits share no row."""
    monkeypatch.chdir(tmp_path)
    good = [f'{{"prompt": "{n}", "answer": "{n}"}}\n' for n in range(8)]
    empty, null = '{"prompt": "x", "answer": " "}\n', '{"prompt": "y", "answer": null}\n'
    lines = [null, *good[:2], "\n", *good[:3], empty, "no\n", *good[3:], *good[:1], empty]
    (tmp_path / "rows.jsonl").write_text("".join(lines))
    subject = open_subject("rows.jsonl", {"tasks.on_bad_line": "skip"}, None)
    assert subject.warnings == [
        "rows.jsonl: 1 malformed row, 3 unscorable rows, 3 repeated rows left out, the first: line "
        "1 task rows.jsonl:1 has no answer; its judge compares with an answer that is a text, a "
        "number or a list of these"
    ]
    for number in range(1, 8):
        tasks = config_tasks(subject, number, 8 - number)
        assert tasks.heldout is not None
        train = read_tasks(tasks.train, on_bad_line=tasks.on_bad_line)
        heldout = read_tasks(tasks.heldout, on_bad_line=tasks.on_bad_line)
        assert [task.answer for task in (*train, *heldout)] == [str(n) for n in range(8)]


def test_wrong_arguments_of_rows_are_told_by_their_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text(ROWS)
    assert "did you mean on_bad_line?" in refusal("rows.jsonl", "on_bad_lin=skip")
    assert "leave_out, limit, on_bad_line, path," in refusal("rows.jsonl", "zzz=1")
    assert (
        "rows.jsonl: no row has the field 'promt' (fields: prompt, answer): set the reader's "
        "`prompt` to the field that holds it"
    ) in refusal("rows.jsonl", "prompt=promt")


def test_the_whole_command_is_in_the_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my rows.jsonl").write_text(ROWS)
    seen: list[str] = []

    def calibrated(*given: object) -> tuple[str, list[str], float]:
        seen.append(str(given[-2]))
        Path(str(given[-3])).write_text("")
        return "name: x\n", [], 1.0

    monkeypatch.setattr("ludus.cli.init._other", calibrated)
    argv = ["my rows.jsonl", "prompt=prompt", "--minutes", "3", "--out", "a.yaml", "--force"]
    done = CliRunner().invoke(app, ["init", *argv])
    assert done.exit_code == 0, done.output
    assert seen == ["ludus init 'my rows.jsonl' prompt=prompt --out a.yaml --minutes 3.0 --force"]
    assert "a.sft.jsonl: questions and answers for SFT, which the recipe reads" in done.output
    assert "a.yaml: measured in 1 s; start it with: ludus train a.yaml" in done.output


def test_rows_whose_answers_contradict_each_other_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    more = '{"prompt": "1  + 1", "answer": ["3", "4"]}\n'
    (tmp_path / "rows.jsonl").write_text(ROWS + more)
    assert open_subject("rows.jsonl", {}, None).warnings == [
        "rows.jsonl: 1 question has different answers in 2 rows, and nothing can learn both: "
        "'1 + 1' has '2' in line 1 and ['3', '4'] in line 3; keep one of them"
    ]
    (tmp_path / "rows.jsonl").write_text(ROWS + more.replace("4", "2"))
    assert open_subject("rows.jsonl", {}, None).warnings == []


def test_conversations_of_another_recipe_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text(ROWS)
    (tmp_path / "mine.sft.jsonl").write_text("precious")
    assert "mine.sft.jsonl exists" in refusal("rows.jsonl", "--out", "mine.yaml")
    assert (tmp_path / "mine.sft.jsonl").read_text() == "precious"


def test_a_model_that_cannot_be_loaded_is_told_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "model.path: there is no folder ./none" in refusal("textcraft", "--model", "./none")


def test_a_recipe_has_the_name_of_its_one_level() -> None:
    def name(*tiers: str) -> str:
        return environment("textcraft", {}, ",".join(tiers) or None).name

    assert name() == "textcraft"
    assert name("depth-2") == "textcraft-depth-2"
    assert name("depth-2", "depth-3", "depth-4") == "textcraft", "not that of the first level"


def test_names_are_texts_in_yaml() -> None:
    assert flow("null") == "'null'"
    assert flow("123") == "'123'"
    assert flow(3e-4) == "3.0e-4"
