"""Each benchmark is read from a sample in the format of its rows on the hub."""

from __future__ import annotations

import csv
import json
import os
from pathlib import Path
from typing import Any

import pytest
from benchmark_samples import SAMPLES, sample

from ludus.core.errors import ConfigError, DataError
from ludus.core.types import NO_ENV, Spec, Task
from ludus.tasks import READERS
from ludus.tasks.benchmarks import BENCHMARKS
from ludus.tasks.readers import TaskList, read_tasks

FIRST = {
    "math-500": ("ours/geometry/1.json", "36", "Geometry"),
    "gsm8k": ("1", "75", None),
    "amc": ("0", "9", None),
    "aime-24": ("60", "401", None),
    "aime-25": ("0", "135", None),
    "minerva": ("1", "9", "Mechanics (ours)"),
    "olympiadbench": ("1", "$2,3$", "Algebra"),
    "mmlu-pro": ("1", "C", "physics"),
    "supergpqa": ("a1", "B", "Science"),
    "bbeh": ("1", "apple, fig, pear", "word sorting"),
    "gpqa": ("rec1", "B", "Physics"),
}
STEP_BY_STEP = "\nPlease reason step by step, and put your final answer within \\boxed{}."


def read(name: str, path: str | None = None, **more: Any) -> TaskList:
    on_bad_line = more.pop("on_bad_line", "refuse")
    args = {"name": name, "path": path or sample(name), **more}
    return read_tasks(Spec(name="benchmark", args=args), on_bad_line=on_bad_line)


def said(task: Task) -> str:
    (message,) = task.prompt
    assert message.role == "user"
    return message.content


@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_sample_is_read(name: str) -> None:
    tasks = read(name)
    id, answer, category = FIRST[name]
    first = tasks[0]
    assert len(tasks) == len(Path(sample(name)).read_text().splitlines())
    assert (first.id, first.answer, first.tier) == (f"{name}:{id}", answer, category)
    assert first.env == NO_ENV
    assert first.judge == BENCHMARKS[name].judge
    row = json.loads(Path(sample(name)).read_text().partition("\n")[0])
    question = row[BENCHMARKS[name].fields.question[0]]
    assert question in said(first)
    if name in {"math-500", "gsm8k", "amc", "aime-24", "aime-25", "minerva", "olympiadbench"}:
        assert said(first) == question + STEP_BY_STEP


def test_samples_and_benchmarks_have_the_same_names() -> None:
    assert {path.stem for path in SAMPLES.iterdir()} == set(BENCHMARKS) == set(FIRST)


def test_gold_answers() -> None:
    assert [task.answer for task in read("gsm8k")] == ["75", "20", "1,050"]
    assert [task.answer for task in read("olympiadbench")] == ["$2,3$", "2, 7", "5"]
    assert [task.answer for task in read("amc")] == ["9", "720"]


def test_prompts_of_multiple_choice() -> None:
    assert said(read("mmlu-pro")[0]) == (
        "The following are multiple choice questions (with answers) about physics. Think step by "
        'step and then finish your answer with "the answer is (X)" where X is the correct letter '
        "choice.\n\nQuestion:\nA gas at constant temperature is compressed to half its volume. Its "
        "pressure\nOptions:\nA. halves\nB. stays the same\nC. doubles\nD. quadruples\n"
        "Answer: Let's think step by step."
    )
    assert read("mmlu-pro")[0].data == {
        "options": ["halves", "stays the same", "doubles", "quadruples"]
    }
    assert said(read("supergpqa")[0]) == (
        "Answer the following multiple choice question. There is only one correct answer. The last "
        "line of your response should be in the format 'Answer: $LETTER' (without quotes), where "
        "LETTER is one of A, B, C, D, E, F, G, H, I, or J.\n\nWhich acid is in vinegar?\nA) citric "
        "acid\nB) acetic acid\nC) formic acid\nD) lactic acid"
    )
    assert said(read("gpqa")[0]) == (
        "Answer the following multiple choice question. The last line of your response should be "
        "of the following format: 'Answer: $LETTER' (without quotes) where LETTER is one of ABCD. "
        "Think step by step before answering.\n\nLight of which colour has the longest wavelength?"
        "\n\nA) violet\nB) red\nC) green\nD) blue"
    )


def test_bbehs_prompt() -> None:
    assert said(read("bbeh")[2]) == (
        "A train leaves at 9 and arrives at 13. How many hours does it take?\n\nThink step by "
        'step, and when you provide the final answer, please use the prefix "The answer is:" '
        "without any modification, and provide the answer directly, with no formatting, no bolding,"
        ' and no markup. For instance: "The answer is: 42" or "The answer is: yes". If the '
        "question is multiple choice with a single correct answer, the final answer must only be "
        'the letter corresponding to the correct answer. For example, "The answer is: (a)".'
    )


@pytest.mark.parametrize("key", ["question", "options", "category", "question_id"])
def test_half_a_surrogate_pair_is_refused_in_every_field(tmp_path: Path, key: str) -> None:
    """Also in a JSON list, whose rows are not read line by line: a prompt would not be encoded."""
    row = {**PRO, key: ["a", "b\ud800"] if key == "options" else "\ud800"}
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([row]))
    with pytest.raises(DataError, match="line 1 has a lone surrogate"):
        read("mmlu-pro", str(path))


def test_a_question_is_no_template(tmp_path: Path) -> None:
    path = write(tmp_path, {"question": "What is {options} of {question}?", "answer": "#### 1"})
    assert said(read("gsm8k", path)[0]).startswith("What is {options} of {question}?\nPlease")


def test_gpqas_order_depends_on_the_question_alone(tmp_path: Path) -> None:
    both = read("gpqa")
    lines = Path(sample("gpqa")).read_text().splitlines()
    (tmp_path / "second.jsonl").write_text(lines[1])
    (second,) = read("gpqa", str(tmp_path / "second.jsonl"))
    assert second.data == both[1].data
    assert second.answer == both[1].answer
    for task in both:
        right = task.data["options"]["ABCD".index(task.answer)]
        assert right in ("red", "uracil")


def test_parquet_csv_and_a_json_list_are_read_alike(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    for name in ("gpqa", "gsm8k"):
        rows = [json.loads(line) for line in Path(sample(name)).read_text().splitlines()]
        (tmp_path / "a.json").write_text(json.dumps(rows))
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
        with (tmp_path / "a.csv").open("w", newline="", encoding="utf-8-sig") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)
        expected = [(said(task), task.answer, task.data) for task in read(name)]
        for kind in ("json", "parquet", "csv"):
            tasks = read(name, str(tmp_path / f"a.{kind}"))
            assert [(said(task), task.answer, task.data) for task in tasks] == expected


def test_a_csv_keeps_none_as_a_text(tmp_path: Path) -> None:
    """pandas would read it as no value."""
    head = "Question,Correct Answer,Incorrect Answer 1,Incorrect Answer 2,Incorrect Answer 3"
    (tmp_path / "a.csv").write_text(f"{head}\nHow many?,None,NA,1,2\nHow?,a,b\n")
    tasks = read("gpqa", str(tmp_path / "a.csv"), on_bad_line="skip")
    assert sorted(tasks[0].data["options"]) == ["1", "2", "NA", "None"]
    assert [bad.number for bad in tasks.skipped] == [3]


def write(folder: Path, *rows: object, name: str = "rows.jsonl") -> str:
    lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
    (folder / name).write_bytes(b"\n".join(lines))
    return str(folder / name)


GSM = {"question": "1 + 1?", "answer": "#### 2"}
PRO = {"question": "q", "options": ["a", "b"], "answer": "B"}
BAD: list[tuple[str, object, str]] = [
    ("gsm8k", {"question": "q", "answer": "2"}, "field 'answer' has no `#### ANSWER` at its end"),
    ("gsm8k", {"question": "q", "answer": "1 ####"}, "field 'answer' has no `#### ANSWER`"),
    ("gsm8k", {"questoin": "q", "answer": "#### 2"}, "no field 'question' (did you mean questoin?"),
    ("gsm8k", {"question": "q"}, "has no field 'answer' (known: question)"),
    ("gsm8k", {"question": 7, "answer": "#### 2"}, "field 'question' must be a text, got 7"),
    ("gsm8k", {"question": " ", "answer": "#### 2"}, "field 'question' is empty"),
    ("gsm8k", b"{broken", "is not JSON: "),
    ("gsm8k", b"[1]", "is not an object but list"),
    ("gsm8k", b'{"question": "\\ud800", "answer": "#### 1"}', "has a lone surrogate"),
    ("math-500", {"problem": "q", "answer": None}, "field 'answer' must be a text or a number"),
    ("math-500", {"problem": "q", "answer": True}, "field 'answer' must be a text or a number"),
    ("math-500", {"problem": "q", "answer": ""}, "field 'answer' is empty"),
    ("olympiadbench", {"question": "q", "final_answer": []}, "'final_answer' is an empty list"),
    ("mmlu-pro", {**PRO, "options": ["a"]}, "field 'options' must hold 2 to 26 options"),
    ("mmlu-pro", {**PRO, "options": "ab"}, "field 'options' must be a list of texts"),
    ("mmlu-pro", {**PRO, "answer": "C"}, "the answer C is none of its 2 options, A to B"),
    ("mmlu-pro", {**PRO, "answer": 1}, "field 'answer' must be the letter of an option, got 1"),
    ("supergpqa", PRO, "has no field 'answer_letter' (did you mean answer?)"),
    ("gpqa", {"Question": "q", "Correct Answer": "a"}, "has no field 'Incorrect Answer 1'"),
]


@pytest.mark.parametrize(("name", "bad", "reason"), BAD, ids=range(len(BAD)))
def test_a_broken_row_is_refused_or_skipped(
    tmp_path: Path, name: str, bad: object, reason: str
) -> None:
    good = json.loads(Path(sample(name)).read_text().partition("\n")[0])
    path = write(tmp_path, good, bad)
    with pytest.raises(DataError) as refused:
        read(name, path)
    assert f"{path}: 1 malformed line (`tasks.on_bad_line: skip` skips them): line 2 " in str(
        refused.value
    )
    assert reason in str(refused.value)
    tasks = read(name, path, on_bad_line="skip")
    assert len(tasks) == 1
    assert [bad.number for bad in tasks.skipped] == [2]


def test_repeated_rows_of_a_file_are_malformed(tmp_path: Path) -> None:
    path = write(tmp_path, GSM, {**GSM, "question": "other"}, GSM)
    with pytest.raises(DataError, match="line 3 repeats line 1"):
        read("gsm8k", path)
    first, second = (
        {"problem": text, "answer": "1", "unique_id": "x"} for text in ("one", "another")
    )
    with pytest.raises(DataError, match="line 2 has the id of line 1: 'x'"):
        read("math-500", write(tmp_path, first, second))


def test_wrong_files_are_refused(tmp_path: Path) -> None:
    for name, data, said in (
        ("a.txt", b"{}", "the file type must be one of .jsonl, .json, .parquet, .csv"),
        ("a.jsonl", b"\n \n", "has no rows"),
        ("a.json", b"[{]", "is not a JSON list, nor JSON lines"),
        ("a.json", b"[]", "has no rows"),
        ("a.parquet", b"PAR1", "is not a Parquet file that can be read"),
        ("a.csv", b"a,b\n1,\xff\n", "is not CSV"),
        ("a.csv", b"question,answer\n", "has no rows"),
    ):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(DataError) as refused:
            read("gsm8k", str(tmp_path / name))
        assert said in str(refused.value)
    with pytest.raises(DataError, match=r"absent\.jsonl does not exist"):
        read("gsm8k", str(tmp_path / "absent.jsonl"))
    with pytest.raises(DataError, match="is a folder"):
        read("gsm8k", str(tmp_path))
    os.mkfifo(tmp_path / "pipe.jsonl")
    with pytest.raises(DataError, match=r"pipe\.jsonl is no regular file"):
        read("gsm8k", str(tmp_path / "pipe.jsonl"))
    (tmp_path / "loop.jsonl").symlink_to("loop.jsonl")
    with pytest.raises(DataError, match=r"loop\.jsonl: cannot be read: Too many levels"):
        read("gsm8k", str(tmp_path / "loop.jsonl"))
    with pytest.raises(DataError, match="cannot be read: File name too long"):
        read("gsm8k", str(tmp_path / f"{'a' * 300}.jsonl"))
    with pytest.raises(DataError, match="all 1 lines are malformed"):
        read("gsm8k", write(tmp_path, b"{"), on_bad_line="skip")


def test_arguments() -> None:
    assert len(read("gsm8k", limit=2)) == 2
    with pytest.raises(ConfigError, match=r"'gsm8' is not a known benchmark \(did you mean gsm8k"):
        read("gsm8", sample("gsm8k"))
    with pytest.raises(ConfigError, match="`revision` is of the hub, and `path` names a file"):
        read("gsm8k", revision="main")
    with pytest.raises(ConfigError, match="paht"):
        READERS.check(Spec(name="benchmark", args={"name": "gsm8k", "paht": "x"}))


def test_the_hubs_rows_are_read_as_published(tmp_path: Path, monkeypatch: Any) -> None:
    """A data set of the hub's name in the working folder, as `datasets` finds it; its repeated rows
    are kept, because published results count them."""
    folder = tmp_path / "TIGER-Lab" / "MMLU-Pro"
    folder.mkdir(parents=True)
    rows = Path(sample("mmlu-pro")).read_text()
    (folder / "test.jsonl").write_text(rows + rows)
    monkeypatch.chdir(tmp_path)
    tasks = read_tasks(Spec(name="benchmark", args={"name": "mmlu-pro"}))
    assert [task.id for task in tasks] == ["mmlu-pro:1", "mmlu-pro:2", "mmlu-pro:3", "mmlu-pro:4"]
    assert [task.answer for task in tasks] == ["C", "B", "C", "B"]


def test_an_absent_data_set_of_the_hub_is_named() -> None:
    with pytest.raises(DataError, match="cannot load the data set openai/gsm8k, split test"):
        read_tasks(Spec(name="benchmark", args={"name": "gsm8k"}))
